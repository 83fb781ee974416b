"""Mistral 4: DeepSeek-V3 with experts by a softmax and queries that grow with the log of their position (arXiv
2501.19399), as those of Ministral 3."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, ministral3, rotary
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mistral4"
ARCHITECTURE = "Mistral4"
(KEYS,), OTHER_KEYS = deepseek_v3.OTHER_KEYS, (deepseek_v3.KEYS,)  # the files hold experts stacked
DEFAULTS = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # for entries that are left out
ROPE = ministral3.ROPE | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
FRACTION = "partial_rotary_factor"


def with_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with rotary parameters, which say of what part of a head they are; raises ConfigError for another
    part."""
    given = {FRACTION: hf[FRACTION]} if FRACTION in hf else {}  # beside the scaling in files of transformers 4
    rope = given | (rotary.parameters_of(hf) or ROPE)
    rotated = positive(hf, "qk_rope_head_dim")
    size = positive(hf, "qk_nope_head_dim") + rotated
    if FRACTION in rope and rope[FRACTION] != rotated / size:
        refuse(FRACTION, rope[FRACTION], f"{rotated} of {size} numbers, as qk_rope_head_dim says")
    if rotary.kind_of(rope) == "default":  # of which transformers rotates as many numbers as a head has
        refuse("rope_type", "default", "yarn")
    rest = {name: value for name, value in hf.items() if name not in (FRACTION, "rope_scaling")}
    return rest | {"rope_parameters": {name: value for name, value in rope.items() if name != FRACTION}}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_rope(DEFAULTS | hf)
    fields = ministral3.growth(hf["rope_parameters"]) | {"router_sigmoid": False, "router_correction": False}
    return deepseek_v3.read(hf, ARCHITECTURE, overrides, fields)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = deepseek_v3.entries(config, {}) | {"head_dim": config.head_dim}
    return decoder.from_config(
        config, base, ARCHITECTURE, MODEL_TYPE, own,
        rope=lambda base: with_rope(DEFAULTS | base), write=ministral3.write_rope,
    )  # fmt: skip
