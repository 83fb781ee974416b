"""The text part of GLM-5.3-Flash: Kimi delta attention in three of four layers, attention to pools of tokens that an
indexer chooses in the fourth, no rotary positions, hyper-connections, and experts whose gates are clipped."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, deepseek_v32, glm_moe_dsa, kimi_linear
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import (
    computed,
    dense_layers,
    mixer_types,
    mixers_of,
    mlp_types,
    number,
    positive,
    refuse,
)
from jaxrl_llm.models.families.rotary import ENTRIES
from jaxrl_llm.models.mixers.kimi_delta import FlatKimiDelta
from jaxrl_llm.models.mixers.pooled_latents import PooledLatentAttention
from jaxrl_llm.models.mixers.sparse_attention import SharedSparseAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.rope import Rope

MODEL_TYPE = "glm5_next_text"
ARCHITECTURE = "Glm5Next"
MIXERS = {"linear_attention": FlatKimiDelta, "indexed_attention": PooledLatentAttention}
PARTS = {"proj/kernel": "fn", "scale": "scale", "shift": "base"}  # of hyper-connections


def _keys(gate: str, streams: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    """The table of files in which names of decays begin with `gate`, and those of hyper-connections are `streams`."""
    return (
        *kimi_linear.table("mlp", gate, experts),
        *deepseek_v32.INDEXER_KEYS,
        TensorName(f"{deepseek_v32.INDEXER}/gate/kernel", f"{deepseek_v32.NET}.index_kpool_compress_gate", True),
        TensorName(f"{deepseek_v32.INDEXER}/places", f"{deepseek_v32.NET}.index_kpool_compress_ape"),
        *(
            TensorName(f"layers/{of}_streams/weights/{path}", LAYER + streams.format(name, part), part == "fn")
            for of, name in (("mixer", "attn"), ("mlp", "ffn"))
            for path, part in PARTS.items()
        ),
    )


KEYS = _keys("", "hc_{}_{}", decoder.experts("mlp"))
MODULE_KEYS = _keys("forget_gate.", "{}_hc.{}", decoder.stacked_experts("mlp"))
OTHER_KEYS = (MODULE_KEYS,)
# The fields that are an entry each.
FIELDS = {
    "latent_size": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "value_head_dim": "v_head_dim",
    **decoder.ATTENTION_BIAS,
    **deepseek_v32.SIZES,
    "index_pool": "index_kpool",
    "hyper_streams": "hc_mult",
    "hyper_sinkhorn": "hc_sinkhorn_iters",
    "hyper_eps": "hc_eps",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "index_kpool": 16,
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "n_routed_experts": 288,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    computed(hf, {"qk_rope_head_dim": 0, "index_kpool_always_select_tail": True})
    if (given := hf.get("linear_attn_config")) is not None:
        names = {entry: short for entry, short, _ in kimi_linear.SIZES.values()}
        names["linear_lower_bound"] = "gate_lower_bound"
        hf |= {entry: given.get(short, hf[entry]) for entry, short in names.items()}
        if hf["linear_lower_bound"] is None and given.get("safe_gate", True):
            hf["linear_lower_bound"] = DEFAULTS["linear_lower_bound"]
    layers, heads = positive(hf, "num_hidden_layers"), positive(hf, "num_attention_heads")
    if hf.get("num_key_value_heads") not in (None, heads):
        refuse("num_key_value_heads", hf["num_key_value_heads"], f"num_attention_heads = {heads}")
    sizes = {field: positive(hf, entry) for field, (entry, *_) in kimi_linear.SIZES.items()}
    if sizes["delta_conv"] < 2:
        refuse("linear_conv_kernel_dim", sizes["delta_conv"], "numbers from 2")
    fields = decoder.read_fields(hf, FIELDS)
    if fields["index_top"] % fields["index_pool"]:
        refuse("index_topk", fields["index_top"], f"multiples of index_kpool = {fields['index_pool']}")
    mixers, shared = _mixers(hf)
    own = {
        **sizes,
        **fields,
        **deepseek_v3.experts(hf | {"first_k_dense_replace": 0}),
        "mixers": mixers,
        "shared_indexers": shared,
        "dense_layers": dense_layers(hf, 3),
        "delta_value_heads": sizes["delta_key_heads"],
        "delta_value_dim": sizes["delta_key_dim"],
        "delta_floor": kimi_linear.floor_of("linear_lower_bound", hf["linear_lower_bound"]),
        "latent_norm_eps": None,
        "rope": Rope(),
        "rotary_fraction": 0.0,
        "unrotated_layers": tuple(range(layers)),
        "hyper_head": "mean",
        "router_fp32": True,
        "swiglu_limit": number("swiglu_limit", hf["swiglu_limit"], above=0),
        "swiglu_alpha": 1.0,
        "swiglu_offset": 0.0,
        "swiglu_everywhere": True,
    }
    return decoder.to_config({**hf, "head_dim": hf["qk_nope_head_dim"]}, ARCHITECTURE, own, overrides)


def _mixers(hf: dict[str, Any]) -> tuple[tuple[type, ...], tuple[int, ...]]:
    """The mixer of each layer, and the layers that attend to what the one before them has chosen."""
    kinds = MIXERS | {"full_attention": PooledLatentAttention}
    mixers = mixers_of(hf, kinds, lambda layer: [*MIXERS][layer % 4 == 3])
    types = glm_moe_dsa.indexer_types(hf)
    chooses = [mixer is PooledLatentAttention and kind == "full" for mixer, kind in zip(mixers, types, strict=True)]
    shared = tuple(i for i, mixer in enumerate(mixers) if mixer is PooledLatentAttention and not chooses[i])
    if not all(layer and chooses[layer - 1] for layer in shared):  # transformers passes a choice on to the next layer
        refuse("indexer_types", types, "full for each layer of indexed_attention but those behind one that is full")
    return tuple(SharedSparseAttention if i in shared else mixer for i, mixer in enumerate(mixers)), shared


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    given = base or {}
    experts = deepseek_v3.expert_entries(config, given)
    own = {
        **decoder.write_fields(config, FIELDS),
        **{entry: value for entry, value in experts.items() if entry != "first_k_dense_replace"},
        "qk_nope_head_dim": config.head_dim,
        "qk_rope_head_dim": 0,
        "head_dim": given.get("head_dim", 0),
        "swiglu_limit": config.swiglu_limit,
    }
    if base is None:
        types = mixer_types(config, MIXERS | {"shared": SharedSparseAttention})
        own |= {entry: getattr(config, field) for field, (entry, *_) in kimi_linear.SIZES.items()}
        own |= {
            "linear_lower_bound": config.delta_floor,
            "layer_types": ["indexed_attention" if kind == "shared" else kind for kind in types],
            "indexer_types": ["shared" if kind == "shared" else "full" for kind in types],
            "mlp_layer_types": mlp_types(config),
        }
    # Positions are read by no layer: entries about them stay as they are.
    rope = {entry: given[entry] for entry in ENTRIES if entry in given}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, write=lambda _: rope)
