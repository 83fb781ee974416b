"""K-EXAONE (arXiv 2601.01739): attention as EXAONE 4.0 behind norms, experts as DeepSeek-V3."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, exaone4, layer_types
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import dense_before_sparse, mlp_types, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "exaone_moe"
ARCHITECTURE = "ExaoneMoe"


def _keys(correction: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *decoder.KEYS,
        *decoder.QK_NORMS,
        *deepseek_v3.beside_experts("mlp", correction),
        *experts,
    )


KEYS = _keys("e_score_correction_bias", decoder.experts("mlp"))
MODULE_KEYS = _keys("gate.e_score_correction_bias", decoder.stacked_experts("mlp"))
OTHER_KEYS = (MODULE_KEYS,)
# The entries of this family, by the names that DeepSeek-V3 has for them.
NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
DEFAULTS = {
    **exaone4.DEFAULTS,
    "num_key_value_heads": 32,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    theirs = renamed(hf, {own: name for name, own in NAMES.items()})
    theirs["first_k_dense_replace"] = dense_before_sparse(hf, hf["first_k_dense_replace"] or 0)
    own = {**exaone4.windows(hf), **deepseek_v3.experts(theirs), "qk_norm": "head"}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = renamed(deepseek_v3.expert_entries(config, {}), NAMES) | layer_types.write(config, base)
    own |= {"mlp_layer_types": mlp_types(config)} if base is None else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
