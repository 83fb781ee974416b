"""DeepSeek-V4: attention to a window and, in most layers, to compressed tokens before it; hyper-connections; experts of
which the first layers choose some by the token alone, and others by the root of a softplus with a correction."""

from typing import Any

from jaxrl_llm.models.families import decoder, mixtral, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear, maps, norms
from jaxrl_llm.models.families.entries import computed, mixer_types, mixers_of, number, positive, refuse, unset
from jaxrl_llm.models.mixers.compressed_attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    WindowAttention,
)
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "deepseek_v4"
ARCHITECTURE = "DeepseekV4"
MIXERS = {
    "sliding_attention": WindowAttention,
    "compressed_sparse_attention": CompressedSparseAttention,
    "heavily_compressed_attention": HeavilyCompressedAttention,
}
# Names in files and, behind them, in transformers' class.
MAPS = {
    "q_a": ("wq_a", "q_a_proj"),
    "q_b": ("wq_b", "q_b_proj"),
    "kv": ("wkv", "kv_proj"),
    "o_a": ("wo_a", "o_a_proj"),
    "o_b": ("wo_b", "o_b_proj"),
    "compressor/kv": ("compressor.wkv", "compressor.kv_proj"),
    "compressor/scores": ("compressor.wgate", "compressor.gate_proj"),
    "indexer/kv": ("indexer.compressor.wkv", "compressor.indexer.kv_proj"),
    "indexer/scores": ("indexer.compressor.wgate", "compressor.indexer.gate_proj"),
    "indexer/q": ("indexer.wq_b", "compressor.indexer.q_b_proj"),
    "indexer/proj": ("indexer.weights_proj", "compressor.indexer.scorer.weights_proj"),
}
NORMS = {
    "q_a_norm": ("q_norm", "q_a_norm"),
    "kv_norm": ("norm", "kv_norm"),
    "compressor/norm": ("compressor.norm", "compressor.kv_norm"),
    "indexer/norm": ("indexer.compressor.norm", "compressor.indexer.kv_norm"),
}
ARRAYS = {
    "sinks": ("attn_sink", "sinks"),
    "compressor/position_bias": ("compressor.ape", "compressor.position_bias"),
    "indexer/position_bias": ("indexer.compressor.ape", "compressor.indexer.position_bias"),
}
STREAMS = {"proj/kernel": "fn", "shift": "base", "scale": "scale"}  # the numbers of hyper-connections


def _ends(embed: str, head: str, norm: str, streams: str) -> tuple[TensorName, ...]:
    return (
        TensorName("embed/weight", f"{embed}.weight"),
        TensorName("head/kernel", f"{head}.weight", transpose=True),
        *norms("", "", {"norm": norm}),
        *_of_streams("streams", streams),
        *linear("score", "score"),
    )


def _of_streams(path: str, start: str) -> tuple[TensorName, ...]:
    return tuple(TensorName(f"{path}/weights/{x}", start + word, x == "proj/kernel") for x, word in STREAMS.items())


def _of_layers(number: int, attention: str, block: str, streams: tuple[str, str]) -> tuple[TensorName, ...]:
    """The keys of layers but for their experts, in files (0) or by transformers' class (1)."""
    of_mixers = (
        (
            *maps(f"layers/{x.path}", LAYER + attention, {name: words[number] for name, words in MAPS.items()}),
            *norms(f"layers/{x.path}/", f"{LAYER}{attention}.", {name: words[number] for name, words in NORMS.items()}),
            *(
                TensorName(f"layers/{x.path}/{name}", f"{LAYER}{attention}.{words[number]}")
                for name, words in ARRAYS.items()
            ),
        )
        for x in MIXERS.values()
    )
    words = (mixtral.WORDS, decoder.GATED)[number]
    own = ("input_norm", "post_attention_norm")
    named = (("attn_norm", "ffn_norm"), ("input_layernorm", "post_attention_layernorm"))[number]
    return (
        *(key for keys in of_mixers for key in keys),
        *norms("layers/", LAYER, dict(zip(own, named, strict=True))),
        *_of_streams("layers/mixer_streams", LAYER + streams[0]),
        *_of_streams("layers/mlp_streams", LAYER + streams[1]),
        *maps("layers/mlp/shared", f"{LAYER}{block}.shared_experts", words),
        TensorName("layers/mlp/correction", f"{LAYER}{block}.gate.{('bias', 'e_score_correction_bias')[number]}"),
        TensorName("layers/mlp/table", f"{LAYER}{block}.gate.tid2eid", integers=True),
    )


_FILES = (*_of_layers(0, "attn", "ffn", ("hc_attn_", "hc_ffn_")), *decoder.experts("ffn", mixtral.WORDS))
# Of the files on the hub, whose names have no `model.` before them.
KEYS = (
    *_ends("embed", "head", "norm", "hc_head_"),
    *(key._replace(tensor=key.tensor.removeprefix("model.")) for key in _FILES),
)
MODULE_KEYS = (
    *_ends("model.embed_tokens", "lm_head", "model.norm", "model.hc_head.hc_"),
    *_of_layers(1, "self_attn", "mlp", ("attn_hc.", "ffn_hc.")),
    *decoder.stacked_experts("mlp"),
)
# As transformers writes them, and as its class has them.
OTHER_KEYS = ((*_ends("model.embed_tokens", "head", "model.norm", "model.hc_head.hc_"), *_FILES), MODULE_KEYS)
FIELDS = {
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_expert_ffn": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "query_rank": "q_lora_rank",
    "output_groups": "o_groups",
    "output_rank": "o_lora_rank",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_top": "index_topk",
    "hyper_streams": "hc_mult",
    "hyper_sinkhorn": "hc_sinkhorn_iters",
    "hyper_eps": "hc_eps",
}  # that are an entry each
DEFAULTS = {
    "num_key_value_heads": 1,
    "head_dim": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
}  # for entries that are left out
# With other values transformers computes the same, which is not what these say.
FIXED = {"num_key_value_heads": 1, "n_shared_experts": 1, "norm_topk_prob": True}
# Tokens of a window, among `compress_rates` and as an entry of its own, which older files have.
RATIOS = {
    "sparse_ratio": ("compressed_sparse_attention", "compress_rate_csa", 4),
    "heavy_ratio": ("heavily_compressed_attention", "compress_rate_hca", 128),
}
OLDER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
SCORES = {"sqrtsoftplus": "router_softplus", "sigmoid": "router_sigmoid"}
SETS = {"full_attention": "compress", "sliding_attention": "main"}  # of rotary parameters


def with_sets(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with the rotary parameters of both kinds of layers under the names of `rotary.TYPES`."""
    hf = DEFAULTS | hf
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    sets = {name: given[own] for name, own in SETS.items() if isinstance(given.get(own), dict)}
    if len(sets) < len(SETS):
        part = hf.get("partial_rotary_factor")
        if part is None:
            rotated = hf.get("qk_rope_head_dim")
            part = 64 / 512 if rotated is None else positive(hf, "qk_rope_head_dim") / positive(hf, "head_dim")
        scaling = {name: x for name, x in given.items() if name not in SETS.values()}
        scaling = {"attention_factor": 1.0} | scaling if rotary.kind_of(scaling) == "yarn" else scaling
        sets = {
            "full_attention": {**scaling, "rope_theta": hf["compress_rope_theta"], "partial_rotary_factor": part},
            "sliding_attention": {"rope_theta": hf["rope_theta"], "partial_rotary_factor": part},
        }
    return {name: x for name, x in hf.items() if name != "rope_scaling"} | {"rope_parameters": sets}


def write_sets(config: ModelConfig) -> dict[str, Any]:
    """The entries of rotary positions."""
    sets = rotary.write_sets(config)["rope_parameters"]
    return {"rope_parameters": {own: sets[name] for name, own in SETS.items()}}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_sets(hf)
    computed(hf, FIXED)
    unset(hf, "attention_bias", "mlp_bias", "router_jitter_noise")
    hf["intermediate_size"] = hf["moe_intermediate_size"]  # there are no dense layers
    types, routers, fields = layer_types(hf), router_types(hf), decoder.read_fields(hf, FIELDS)
    rates = hf.get("compress_rates") or {}
    ratios = {
        field: positive({name: hf.get(older) or rates.get(name, usual)}, name)
        for field, (name, older, usual) in RATIOS.items()
    }
    for field, (name, *_) in RATIOS.items():
        if ratios[field] < 2:
            refuse(f"{name} of compress_rates", ratios[field], "integers from 2")
    if hf["scoring_func"] not in SCORES:
        refuse("scoring_func", hf["scoring_func"], ", ".join(SCORES))
    outputs, (full, local) = positive(hf, "num_attention_heads") * positive(hf, "head_dim"), rotary.fractions_of(hf)
    if outputs % fields["output_groups"]:
        refuse("o_groups", fields["output_groups"], f"divisors of num_attention_heads * head_dim = {outputs}")
    if full != local:
        refuse("partial_rotary_factor of compress", full, f"that of main, {local:g}")
    own = {
        **fields,
        **ratios,
        "mixers": mixers_of(hf | {"layer_types": types}, MIXERS, types.__getitem__),
        "sliding_window": positive(hf, "sliding_window"),
        "sliding_layers": tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention"),
        "attention_sinks": True,
        "rotary_fraction": full,
        "hash_layers": tuple(layer for layer, kind in enumerate(routers) if kind == "hash_moe"),
        SCORES[hf["scoring_func"]]: True,
        "router_correction": True,
        "normalize_top_k": True,
        "top_k_epsilon": 1e-20,
        "swiglu_limit": number("swiglu_limit", hf["swiglu_limit"], above=0),
        "swiglu_alpha": 1.0,
        "swiglu_offset": 0.0,
        "swiglu_everywhere": True,
    }
    config = decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"by_type": True, "partial": True})
    if config.rotated_size % 2:
        refuse("partial_rotary_factor", full, f"an even number of head_dim = {config.head_dim} dimensions")
    if config.index_head_dim < config.rotated_size:
        refuse("index_head_dim", config.index_head_dim, f"numbers from the {config.rotated_size} that are rotated")
    return config


def layer_types(hf: dict[str, Any]) -> list[str]:
    """The type of each layer: as `layer_types` says, or older files' `compress_ratios`, or heavily compressed attention
    in the first two and every other layer. Both may have more for the layers that predict further tokens."""
    layers, older = positive(hf, "num_hidden_layers"), hf.get("compress_ratios")
    if (types := hf.get("layer_types")) is not None:
        return types[:layers]
    if older is None:
        return [[*MIXERS][1 if layer > 2 and layer % 2 else 2] for layer in range(layers)]
    if not all(isinstance(ratio, int) and ratio in OLDER_TYPES for ratio in older):
        refuse("compress_ratios", older, f"lists of {', '.join(map(str, OLDER_TYPES))}")
    return [OLDER_TYPES[ratio] for ratio in older[:layers]]


def router_types(hf: dict[str, Any]) -> list[str]:
    """The type of each layer's router: as `mlp_layer_types` says, or older files' `num_hash_layers`, the first ones."""
    layers, types = positive(hf, "num_hidden_layers"), hf.get("mlp_layer_types")
    if types is None:
        first = hf.get("num_hash_layers")
        first = 3 if first is None else int(number("num_hash_layers", first))
        return ["hash_moe" if layer < first else "moe" for layer in range(layers)]
    if len(types) < layers or set(types) - {"hash_moe", "moe"}:
        refuse("mlp_layer_types", types, f"hash_moe or moe for each of the {layers} layers")
    return types[:layers]


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **decoder.write_fields(config, FIELDS),
        "sliding_window": config.sliding_window,
        "swiglu_limit": config.swiglu_limit,
    }
    if base is None:
        own["layer_types"] = mixer_types(config, MIXERS)
        own["mlp_layer_types"] = ["hash_moe" if x in config.hash_layers else "moe" for x in range(config.layers)]
        own["compress_rates"] = {name: getattr(config, field) for field, (name, *_) in RATIOS.items()}
        own["scoring_func"] = next((name for name, field in SCORES.items() if getattr(config, field)), "softmax")
        own["num_nextn_predict_layers"] = 0
    hf = decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_sets, write=write_sets)
    if base is None or "intermediate_size" not in base:
        del hf["intermediate_size"]
    return hf
