"""Phi-3 and Phi-4 (arXiv 2404.14219): queries, keys and values in one tensor, gate and up in another."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3"
KEYS = (
    *decoder.ENDS,
    *decoder.PRE_NORMS,
    *(TensorName(f"layers/attention/{name}/kernel", f"{LAYER}self_attn.qkv_proj.weight", True) for name in "qkv"),
    TensorName("layers/attention/o/kernel", f"{LAYER}self_attn.o_proj.weight", True),
    *(TensorName(f"layers/mlp/{name}/kernel", f"{LAYER}mlp.gate_up_proj.weight", True) for name in ("gate", "up")),
    TensorName("layers/mlp/down/kernel", f"{LAYER}mlp.down_proj.weight", True),
)
DEFAULTS = {"rms_norm_eps": 1e-5}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    kind = rotary.kind_of(rotary.parameters_of(hf))
    if kind != "default":
        refuse("rope_type", kind, f"default, in {MODEL_TYPE} models (the short ones: 4k, 16k)")
    return decoder.to_config(hf, ARCHITECTURE, layer_types.read_uniform(hf), overrides, rope={"partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {"sliding_window": config.sliding_window})
