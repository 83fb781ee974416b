"""Sarvam 105B: DeepSeek-V3 with experts that are not in groups."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, rotary
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "sarvam_mla"
ARCHITECTURE = "SarvamMLA"  # and "DeepseekV3", whose classes transformers has for it
KEYS, OTHER_KEYS = deepseek_v3.KEYS, deepseek_v3.OTHER_KEYS
NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
DEFAULTS = {
    **deepseek_v3.DEFAULTS,
    "q_lora_rank": None,
    "n_routed_experts": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.006,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    family = decoder.class_of(hf, ARCHITECTURE, deepseek_v3.ARCHITECTURE)
    return deepseek_v3.read(DEFAULTS | renamed(as_yarn(hf), NAMES), family, overrides)


def as_yarn(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with the name that the rotary scaling of published files has elsewhere."""
    given = hf.get("rope_scaling") or {}
    if rotary.kind_of(given) != "deepseek_yarn":
        return hf
    return hf | {"rope_scaling": {x: given[x] for x in given if x != "type"} | {"rope_type": "yarn"}}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    names = {name: common for name, common in NAMES.items() if name in (base or {})}
    family = decoder.class_of(base, ARCHITECTURE, deepseek_v3.ARCHITECTURE)
    common = None if base is None else renamed(base, names)
    own = deepseek_v3.entries(config, base)
    return decoder.with_own_names(decoder.from_config(config, common, family, MODEL_TYPE, own, as_yarn), names)
