"""Phi-3.5-MoE (arXiv 2404.14219): Mixtral behind layer norms, with experts that are weighted one after another."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, mixtral, phi, rotary, stablelm
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import number, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "phimoe"
ARCHITECTURE = "Phimoe"
COMMON = (
    *(key for key in decoder.ENDS if not key.path.startswith("norm/")),
    TensorName("head/bias", "lm_head.bias"),
    *stablelm.NORMS,
    *decoder.ATTENTION,
)
KEYS = (*COMMON, *decoder.experts("block_sparse_moe", mixtral.WORDS))
MODULE_KEYS = (*COMMON, *decoder.stacked_experts("mlp", "router"))
OTHER_KEYS = (MODULE_KEYS,)
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.01,
}  # for entries that are left out
SCALES = ("short_mscale", "long_mscale")
unused_tensors = phi.unused_tensors  # the bias of the head where there is another one


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = _with_rope(DEFAULTS | hf)
    jitter = number("router_jitter_noise", hf["router_jitter_noise"])
    if hf["num_experts_per_tok"] != 2:
        refuse("num_experts_per_tok", hf["num_experts_per_tok"], "2")
    own = {
        **layer_types.read_uniform(hf),
        **decoder.LAYER_NORMS,
        **decoder.attention_biases(hf),
        **mixtral.experts(hf | {"router_jitter_noise": 0}),
        "normalize_top_k": False,
        "router_jitter": jitter,
        "head_bias": bool(hf.get("lm_head_bias", False)),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": mixtral.THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **mixtral.expert_entries(config),
        "sliding_window": config.sliding_window,
        "attention_bias": config.attention_bias,
        "lm_head_bias": config.head_bias,
        "router_jitter_noise": config.router_jitter,
    }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=_with_rope, write=_write_rope)


def _with_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with the factor of cosines and sines under its common name; raises ConfigError for two of them."""
    rope = rotary.parameters_of(hf)
    if rotary.kind_of(rope) == "default":
        return hf
    short, long = (number(name, rope.get(name), above=0) for name in SCALES)
    if short != long or rotary.kind_of(rope) not in ("longrope", "su"):
        refuse("long_mscale", long, f"short_mscale = {short}, of rope_type longrope")
    rest = {name: x for name, x in hf.items() if name != "rope_scaling"}
    return rest | {"rope_parameters": rope | {"rope_type": "longrope", "attention_factor": short}}


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary entries of a ModelConfig."""
    given = rotary.write(config)
    if given.get("rope_scaling"):
        given["rope_scaling"] |= dict.fromkeys(SCALES, config.rope.attention_factor)
    return given
