"""StableLM (arXiv 2402.17834): Llama's shape with layer norms and a quarter of each head rotated."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, TensorName, layer_norm
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "stablelm"
ARCHITECTURE = "StableLm"
NORMS = (
    *layer_norm("norm", "model.norm"),
    *layer_norm("layers/input_norm", f"{LAYER}input_layernorm"),
    *layer_norm("layers/post_attention_norm", f"{LAYER}post_attention_layernorm"),
)
QK_NORMS = tuple(
    TensorName(f"layers/attention/{name}_norm/scale", f"{LAYER}self_attn.{name}_layernorm.norms.{{head}}.weight")
    for name in "qk"
)
KEYS = (*decoder.ENDS, *NORMS, *decoder.ATTENTION, *QK_NORMS, *decoder.FEED_FORWARD)
NAMES = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {
        **decoder.LAYER_NORMS,
        "qk_norm": "heads" if hf.get("qk_layernorm") else "",
        "attention_bias": bool(hf.get("use_qkv_bias")),
        "parallel_ffn": "shared" if hf.get("use_parallel_residual") else "",
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        "use_qkv_bias": config.attention_bias,
        "use_parallel_residual": bool(config.parallel_ffn),
        "qk_layernorm": bool(config.qk_norm),
    }
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
