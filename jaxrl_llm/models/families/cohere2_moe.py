"""Command A+ (Cohere, 2026): Command A with experts, and dense layers before them, which rotate queries and keys though
they have no window."""

from typing import Any

from jaxrl_llm.models.families import cohere2, decoder, layer_types
from jaxrl_llm.models.families.decoder import LAYER
from jaxrl_llm.models.families.entries import dense_layers, mlp_types, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "cohere2_moe"
ARCHITECTURE = "Cohere2Moe"
KEYS, OTHER_KEYS = decoder.expert_tables(
    (*cohere2.KEYS, *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.shared_experts", decoder.GATED))
)
DEFAULTS = {
    **cohere2.DEFAULTS,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
    "prefix_dense_sliding_window_pattern": 1,
}  # for entries that are left out
FIELDS = decoder.EXPERTS | decoder.ATTENTION_BIAS | {"expert_ffn": "intermediate_size"}  # that are an entry each
PREFIX = "prefix_dense_intermediate_size"
ROUTERS = ("softmax", "sigmoid")  # the first one over the chosen experts alone
COMBINED = {"average": 0.5, "sum": 1.0}  # the share of experts, chosen and shared, by how they are combined


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf, layers = DEFAULTS | hf, positive(hf, "num_hidden_layers")
    first = int(number("first_k_dense_replace", hf.get("first_k_dense_replace") or 0))
    every, of_first = positive(hf, "sliding_window_pattern"), positive(hf, "prefix_dense_sliding_window_pattern")
    dense, channels = dense_layers(hf, first), positive(hf, "intermediate_size")
    windows = layer_types.read(hf, lambda i: bool((i + 1) % of_first if i < first else (i - first + 1) % every))
    router, combined = hf["expert_selection_fn"], hf["shared_expert_combination_strategy"]
    if router not in ROUTERS:
        refuse("expert_selection_fn", router, " and ".join(ROUTERS))
    if combined not in COMBINED:
        refuse("shared_expert_combination_strategy", combined, " and ".join(COMBINED))
    shared = positive(hf, "num_shared_experts") if hf["num_shared_experts"] else 0
    rms, rotated = hf.get("rms_norm_eps") is not None, (*windows.get("sliding_layers", ()), *(dense * (of_first == 1)))
    own = {
        **windows,
        **decoder.read_fields(hf, FIELDS),
        "unrotated_layers": tuple(layer for layer in range(layers) if layer not in rotated),
        "rope_interleaved": True,
        "norm_eps": number(name := "rms_norm_eps" if rms else "layer_norm_eps", hf[name]),
        "norm_centred": not rms,
        "parallel_ffn": "shared",
        "logit_divisor": 1 / number("logit_scale", hf["logit_scale"], above=0),
        "ffn": channels if hf.get(PREFIX) is None else positive(hf, PREFIX),
        "shared_expert_ffn": channels * shared,
        "shared_expert_scale": COMBINED[combined] if shared else 1.0,
        "routed_scale": COMBINED[combined] if shared else 1.0,
        "dense_layers": dense,
        "router_sigmoid": router == "sigmoid",
        "normalize_top_k": router == "softmax" or bool(hf["norm_topk_prob"]),
    }
    return decoder.to_config(hf | {"rms_norm_eps": own["norm_eps"]}, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    names = {scale: name for name, scale in COMBINED.items()}
    norm = {"layer_norm_eps": config.norm_eps} if config.norm_centred else {}
    own: dict[str, Any] = {
        **layer_types.write(config, base),
        **norm,
        "rms_norm_eps": None if config.norm_centred else config.norm_eps,
        **decoder.write_fields(config, FIELDS),
        "logit_scale": decoder.reciprocal(config.logit_divisor, (DEFAULTS | (base or {}))["logit_scale"]),
        "num_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
    }
    if base is None:
        own |= {
            PREFIX: config.ffn,
            "shared_expert_combination_strategy": names.get(config.shared_expert_scale),
            "expert_selection_fn": ROUTERS[config.router_sigmoid],
            "norm_topk_prob": config.normalize_top_k,
            "mlp_layer_types": mlp_types(config),
            "prefix_dense_sliding_window_pattern": 1 + bool({*config.dense_layers} & {*config.unrotated_layers}),
        }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
