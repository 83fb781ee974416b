"""Sarvam 30B: GLM-4.5 with whole heads rotated, whose files have the names of Ling."""

from typing import Any

from jaxrl_llm.models.families import decoder, glm4_moe
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "sarvam_moe"
ARCHITECTURE = "SarvamMoE"
# How names end in the files, and in transformers' class.
WORDS = {
    "word_embeddings.weight": "embed_tokens.weight",
    "attention.dense.weight": "self_attn.o_proj.weight",
    "attention.query_layernorm.weight": "self_attn.q_norm.weight",
    "attention.key_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}
NET = f"{LAYER}attention.query_key_value"


def _in_files(key: TensorName) -> TensorName:
    part = key.path.removeprefix("layers/attention/")
    if part in ("q/kernel", "k/kernel", "v/kernel"):
        return key._replace(tensor=f"{NET}.weight")
    if part in ("q/bias", "k/bias", "v/bias"):
        return key._replace(tensor=f"{NET}.bias")
    word = next((word for word, own in WORDS.items() if key.tensor.endswith(own)), None)
    return key if word is None else key._replace(tensor=key.tensor.removesuffix(WORDS[word]) + word)


KEYS = tuple(_in_files(key) for key in glm4_moe.KEYS)
MODULE_KEYS = glm4_moe.OTHER_KEYS[0]
OTHER_KEYS = (glm4_moe.KEYS, MODULE_KEYS)
NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
DEFAULTS = {
    **glm4_moe.DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "partial_rotary_factor": 1.0,
    "initializer_range": 0.006,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 1024,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    family = decoder.class_of(hf, ARCHITECTURE, glm4_moe.ARCHITECTURE)
    hf, rope = DEFAULTS | renamed(hf, NAMES), {"theta": 8_000_000.0, "partial": True}
    return decoder.to_config(hf, family, glm4_moe.own_fields(hf), overrides, rope=rope)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    names = {name: common for name, common in NAMES.items() if name in (base or {})}
    family = decoder.class_of(base, ARCHITECTURE, glm4_moe.ARCHITECTURE)
    own = glm4_moe.own_entries(config, base)
    return decoder.from_own_names(config, base, names, {}, family, MODEL_TYPE, own)
