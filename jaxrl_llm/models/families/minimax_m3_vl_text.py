"""The text part of MiniMax-M3: attention to blocks of tokens in some layers, experts by a sigmoid with a correction,
and clipped gates in these and in dense layers.
"""

from typing import Any

from jaxrl_llm.models.families import decoder, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import (
    dense_layers,
    mixer_types,
    mixers_of,
    mlp_types,
    number,
    positive,
    refuse,
)
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.block_attention import BlockAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "minimax_m3_vl_text"
ARCHITECTURE = "MiniMaxM3VL"
MIXERS = {"full_attention": Attention, "minimax_m3_sparse": BlockAttention}
INDEXER = ("q_proj", "k_proj", "q_norm", "k_norm")


def _keys(block: str, index: str, gated: dict[str, str], experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    """The table of files in which experts are parts of this `block`, names of indexers begin with `index`, and those of
    the maps of dense feed-forwards and shared experts are `gated`."""
    net, correction = f"{LAYER}self_attn", "" if block == "block_sparse_moe" else "gate."
    maps, norms = ({name[0]: f"{index}{name}" for name in INDEXER if name.endswith(end)} for end in ("proj", "norm"))
    of_blocks = (
        key._replace(path=key.path.replace("attention", "blocks")) for key in decoder.ATTENTION + decoder.QK_NORMS
    )
    return (
        *decoder.ENDS,
        *decoder.PRE_NORMS,
        *decoder.ATTENTION,
        *decoder.QK_NORMS,
        *of_blocks,
        *decoder.maps("layers/blocks/indexer", net, maps),
        *(TensorName(f"layers/blocks/indexer/{x}_norm/scale", f"{net}.{name}.weight") for x, name in norms.items()),
        *decoder.maps("layers/mlp", f"{LAYER}mlp", gated),
        *decoder.maps("layers/mlp/shared", f"{LAYER}{block}.shared_experts", gated),
        TensorName("layers/mlp/correction", f"{LAYER}{block}.{correction}e_score_correction_bias"),
        *experts,
    )


KEYS = _keys(
    "mlp", "indexer.", decoder.GATED | dict.fromkeys(("gate", "up"), "gate_up_proj"), decoder.stacked_experts("mlp")
)
# Of the files on the hub, whose text part transformers knows by the names above alone.
OTHER_KEYS = (_keys("block_sparse_moe", "index_", decoder.GATED, decoder.experts("block_sparse_moe", mixtral.WORDS)),)
# The fields of indexers that are an entry each, their names among `sparse_attention_config`, and their defaults.
SIZES = {
    "index_heads": ("index_n_heads", "sparse_num_index_heads", 4),
    "index_head_dim": ("index_head_dim", "sparse_index_dim", 128),
    "index_block": ("index_block_size", "sparse_block_size", 128),
    "index_top": ("index_topk_blocks", "sparse_topk_blocks", 16),
    "index_local": ("index_local_blocks", "sparse_local_block", 1),
}
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
FIELDS = mixtral.FIELDS | {
    "ffn": "dense_intermediate_size",
    "expert_ffn": "intermediate_size",
    "shared_expert_ffn": "shared_intermediate_size",
    "routed_scale": "routed_scaling_factor",
}  # that are an entry each
THETA = 5_000_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    given = hf.get("sparse_attention_config") or {}
    hf = DEFAULTS | hf | {"hidden_act": "silu"}  # which files call swigluoai, and is computed of the two entries
    hf |= {name: given.get(short, hf.get(name, default)) for name, short, default in SIZES.values()}
    if (frequencies := given.get("sparse_attention_freq")) is not None and not hf.get("layer_types"):
        hf["layer_types"] = [[*MIXERS][bool(chosen)] for chosen in frequencies]
    if (frequencies := hf.get("moe_layer_freq")) is not None and not hf.get("mlp_layer_types"):
        hf["mlp_layer_types"] = ["sparse" if sparse else "dense" for sparse in frequencies]
    sizes = {field: positive(hf, name) for field, (name, *_) in SIZES.items() if field != "index_local"}
    local, kv_heads = int(number("index_local_blocks", hf["index_local_blocks"])), positive(hf, "num_key_value_heads")
    if local > sizes["index_top"]:
        refuse("index_local_blocks", local, f"numbers up to index_topk_blocks = {sizes['index_top']}")
    if sizes["index_heads"] != kv_heads:
        refuse("index_n_heads", sizes["index_heads"], f"num_key_value_heads = {kv_heads}")
    own = {
        **sizes,
        **decoder.read_fields(hf, FIELDS),
        "mixers": mixers_of(hf, MIXERS, lambda _: "full_attention"),
        "index_top": sizes["index_top"] * sizes["index_block"],
        "index_local": local,
        "norm_offset": 1.0,
        "qk_norm": "head",
        "dense_layers": dense_layers(hf, 0),
        "router_sigmoid": True,
        "router_correction": True,
        "normalize_top_k": True,
        "swiglu_limit": number("swiglu_limit", hf["swiglu_limit"], above=0),
        "swiglu_alpha": number("swiglu_alpha", hf["swiglu_alpha"], above=0),
        "swiglu_everywhere": True,
    }
    config = decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA, "partial": True})
    if config.index_head_dim < config.rotated_size:
        refuse("index_head_dim", config.index_head_dim, f"numbers from the {config.rotated_size} that are rotated")
    return config


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **decoder.write_fields(config, FIELDS),
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
    }
    if base is None:
        own |= {entry: getattr(config, field) for field, (entry, *_) in SIZES.items()}
        own["index_topk_blocks"] = config.index_top // max(config.index_block, 1)
        own["layer_types"] = mixer_types(config, MIXERS)
        own["mlp_layer_types"] = mlp_types(config)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
