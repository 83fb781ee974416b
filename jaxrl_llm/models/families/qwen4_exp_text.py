"""Qwen4-Exp's decoder: Qwen3.5's layers with experts between gated streams, chosen blocks and embeddings of n-grams."""

from typing import Any

import numpy as np

from jaxrl_llm.models.families import decoder, qwen2_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_next
from jaxrl_llm.models.families.decoder import LAYER, TensorName, maps
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.mixers.delta_net import SplitDeltaNet
from jaxrl_llm.models.mixers.pooled_attention import PooledAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.ngrams import NGramConfig, NGramDeltaNet

MODEL_TYPE = "qwen4_exp_text"
ARCHITECTURE = "Qwen4Exp"
PLE = f"{LAYER}ple."
TABLE = TensorName("layers/ngrams/embed/weight", f"{PLE}ple_embedding.ngram_embedding.weight")


def _streams(path: str, block: str) -> tuple[TensorName, ...]:
    words = {"narrow": "input_mix_weight_down", "widen": "input_mix_weight_up", "inject": "block_inject_weight"}
    return TensorName(f"{path}/norm/scale", f"{block}.hc_norm.weight"), *maps(path, block, words)


COMMON = (
    *qwen3_5_text.KEYS,
    *qwen2_moe.SHARED,
    *maps("layers/attention/indexer", f"{LAYER}self_attn.indexer", {"qk": "index_qk_proj"}),
    *decoder.norms(
        "layers/attention/indexer/", f"{LAYER}self_attn.indexer.", {f"{x}_norm": f"{x}_layernorm" for x in "qk"}
    ),
    *_streams("layers/mixer_streams", f"{LAYER}attn_hyper_connection"),
    *_streams("layers/mlp_streams", f"{LAYER}mlp_hyper_connection"),
    *_streams("streams", "model.hyper_connection_mixer"),
    *maps("layers/ngrams", PLE[:-1], {"key": "key_proj", "value": "value_proj"}),
    *decoder.norms("layers/ngrams/", PLE, {f"{x}_norm": f"norm_{x}" for x in ("key", "query", "conv")}),
    TensorName("layers/ngrams/conv", f"{PLE}conv1d.weight"),
)
# With the tables of a layer's n-grams in one tensor, as transformers' class has them; files have that in parts.
KEYS, OTHER_KEYS = decoder.expert_tables((*COMMON, TABLE))
MODULE_KEYS = KEYS
# The fields of indexers that are an entry each.
INDEXER = {
    "index_heads": "indexer_n_heads",
    "index_head_dim": "indexer_head_dim",
    "index_top": "indexer_budget",
    "index_block": "indexer_compress_ratio",
}
# The fields of an NGramConfig that are an entry each, integers from 1, and their values where they are left out.
NGRAMS = {
    "size": ("ngram_size", 3),
    "heads": ("heads_per_ngram", 8),
    "rows": ("ngram_vocab_size_base", 20_000_000),
    "multiple": ("make_ngram_vocab_size_divisible_by", 128),
    "conv": ("ple_conv_kernel_size", 4),
    "parts": ("split_ngram_parts", 512),
}
DEFAULTS = (
    qwen3_5_moe_text.DEFAULTS
    | dict(NGRAMS.values())
    | {"num_experts_per_tok": 10, "num_experts": 512, "hc_count": 4, "hc_lowrank": 320, "seed": 1234}
    | {"partial_rotary_factor": 1.0}
)  # for entries that are left out
GATES = ("silu", "sigmoid")  # of the delta nets' outputs


def keys(config: ModelConfig) -> tuple[TensorName, ...]:
    """The table of the files that transformers writes."""
    return in_parts(KEYS, config)


def other_keys(config: ModelConfig) -> tuple[tuple[TensorName, ...], ...]:
    """The tables of files in which the matrices of experts are stacked, or the tables of n-grams whole."""
    return in_parts(OTHER_KEYS[0], config), KEYS, *OTHER_KEYS


def in_parts(table: tuple[TensorName, ...], config: ModelConfig) -> tuple[TensorName, ...]:
    """The table, with each of the net's tables of n-grams in as many tensors as its files have."""
    if config.ngrams is None:
        return table
    tensor, count = TABLE.tensor.replace("weight", "shard_{part}.weight"), config.ngrams.parts
    return tuple(key._replace(tensor=tensor, parts=count) if key == TABLE else key for key in table)


def constants(config: ModelConfig) -> dict[str, np.ndarray]:
    """The numbers of the hashes of n-grams, which files hold too."""
    found: dict[str, Any] = {}
    if (ngrams := config.ngrams) is None:
        return found
    for index, layer in enumerate(ngrams.layers):
        start, primes = PLE.format(layer=layer) + "ple_embedding.", ngrams.primes(index)
        found[f"{start}layer_multipliers"] = ngrams.multipliers(index, config.vocab_size)
        found[f"{start}ngram_heads_vocab_sizes"] = primes
        found[f"{start}ngram_heads_offsets"] = np.cumsum(primes) - primes
    return {name: np.array(x, np.int64) for name, x in found.items()}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_defaults(hf)
    return checked(decoder.to_config(hf, ARCHITECTURE, fields(hf), overrides, rope={"partial": True}))


def checked(config: ModelConfig) -> ModelConfig:
    """The config; raises ConfigError where blocks cannot be rated by its rotary positions."""
    if config.index_top and config.rope.changes_beyond is not None:
        refuse("rope_type", config.rope.kind, "types that rotate rows of every length alike")
    if config.index_top and config.index_head_dim < config.rotated_size:
        refuse("indexer_head_dim", config.index_head_dim, f"numbers from the {config.rotated_size} that are rotated")
    return config


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, and those that are left out. Those of other families are not read: every layer has experts."""
    types = ["full_attention" if kind == "indexed_attention" else kind for kind in hf.get("layer_types") or ()]
    hf = DEFAULTS | hf | {"decoder_sparse_step": 1, "mlp_only_layers": [], "layer_types": types}
    return {"intermediate_size": hf["moe_intermediate_size"]} | hf


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that are this family's own, of entries with their defaults."""
    own = qwen3_next.delta_fields(hf, SplitDeltaNet, PooledAttention) | qwen2_moe.experts(hf)
    if (streams := positive(hf, "hc_count")) < 2:
        refuse("hc_count", streams, "integers from 2")
    if (gate := hf.get("output_gate_type") or "silu") not in GATES:
        refuse("output_gate_type", gate, " and ".join(GATES))
    ngrams = _ngrams(hf)
    mixers = list(own["mixers"])
    for layer in () if ngrams is None else ngrams.layers:
        if mixers[layer] is not SplitDeltaNet:
            refuse("ple_layer_ids", hf["ple_layer_ids"], "layers of linear_attention")
        mixers[layer] = NGramDeltaNet
    return own | {
        **_indexer(hf, PooledAttention in mixers),
        "mixers": tuple(mixers),
        "ngrams": ngrams,
        "delta_sigmoid": gate == "sigmoid",
        "norms": "",
        "final_norm": False,
        "hyper_streams": streams,
        "hyper_rank": positive(hf, "hc_lowrank"),
    }


def _indexer(hf: dict[str, Any], attends: bool) -> dict[str, int]:
    if not attends and all(hf.get(entry) is None for entry in INDEXER.values()):
        return {}
    found = {field: positive(hf, entry) for field, entry in INDEXER.items()}
    if (heads := hf.get("indexer_kv_heads", 1)) != 1:
        refuse("indexer_kv_heads", heads, "1")
    if found["index_top"] % found["index_block"]:
        block = found["index_block"]
        refuse("indexer_budget", found["index_top"], f"multiples of indexer_compress_ratio = {block}")
    return found


def _ngrams(hf: dict[str, Any]) -> NGramConfig | None:
    """The tables of n-grams; raises ConfigError for layers, numbers and an end of text that transformers refuses."""
    layers, count = sorted(set(hf.get("ple_layer_ids") or ())), positive(hf, "num_hidden_layers")
    if not layers:
        return None
    if not all(isinstance(layer, int) and 0 < layer <= count for layer in layers):
        refuse("ple_layer_ids", layers, f"numbers of layers from 1 to num_hidden_layers = {count}")
    sizes = {field: positive(hf, entry) for field, (entry, _) in NGRAMS.items()}
    width = positive(hf, "hidden_size" if hf.get("ple_embed_dim") is None else "ple_embed_dim")
    if sizes["size"] < 2:
        refuse("ngram_size", sizes["size"], "integers from 2")
    if width % (tables := (sizes["size"] - 1) * sizes["heads"]):
        refuse("ple_embed_dim", width, f"multiples of the {tables} tables of n-grams")
    ends = hf.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not ends:
        refuse("eos_token_id", None, "the token at which n-grams end, as ple_layer_ids names layers that have some")
    if sizes["rows"] * tables >= 2**31 - 2**24:  # which leaves room for primes to be larger
        refuse("ngram_vocab_size_base", sizes["rows"], f"numbers that make {tables} tables of less than 2^31 rows")
    seed = int(number("seed", hf["seed"]))
    return NGramConfig(tuple(layer - 1 for layer in layers), ends[0], width, seed=seed, **sizes)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, entries(config, base))


def entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `fields` reads."""
    own = qwen3_next.delta_entries(config, base) | qwen2_moe.expert_entries(config, base)
    own |= {"hc_count": config.hyper_streams, "hc_lowrank": config.hyper_rank}
    if config.index_top:
        own |= decoder.write_fields(config, INDEXER) | {"indexer_kv_heads": 1}
    if config.delta_sigmoid != ((base or {}).get("output_gate_type") == "sigmoid"):
        own["output_gate_type"] = GATES[config.delta_sigmoid]
    if (ngrams := config.ngrams) is None:
        return own | {"ple_layer_ids": []} if (base or {}).get("ple_layer_ids") else own
    given = (base or {}).get("eos_token_id")
    given = given if isinstance(given, list) else [] if given is None else [given]
    if given[:1] != [ngrams.eos]:  # as where training has ended turns with another token
        others = [end for end in given if end != ngrams.eos]
        own["eos_token_id"] = [ngrams.eos, *others] if others else ngrams.eos
    own |= {entry: getattr(ngrams, field) for field, (entry, _) in NGRAMS.items()}
    layers = {"ple_layer_ids": [layer + 1 for layer in ngrams.layers]}
    return own | layers | {"ple_embed_dim": ngrams.width, "seed": ngrams.seed}
