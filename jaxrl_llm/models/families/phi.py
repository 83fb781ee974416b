"""Phi-1 to Phi-2 (arXiv 2306.11644, 2309.05463): attention and feed-forward side by side behind one layer norm, a part
of each head rotated, and biases everywhere, also of the head."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import refuse, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "phi"
ARCHITECTURE = "Phi"
KEYS = (
    decoder.ENDS[0],
    *layer_norm("norm", "model.final_layernorm"),
    *linear("head", "lm_head"),
    *linear("score", "score"),
    *layer_norm("layers/input_norm", f"{LAYER}input_layernorm"),
    *maps("layers/attention", f"{LAYER}self_attn", decoder.QKVO | {"o": "dense"}),
    *layer_norm("layers/attention/q_norm", f"{LAYER}self_attn.q_layernorm"),
    *layer_norm("layers/attention/k_norm", f"{LAYER}self_attn.k_layernorm"),
    *maps("layers/mlp", f"{LAYER}mlp", {"up": "fc1", "down": "fc2"}),
)
NAMES = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS = {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}  # for entries left out


def unused_tensors(config: ModelConfig) -> set[str]:
    """The bias of the head where there is another one."""
    return {"lm_head.bias"} if config.head != "lm" else set()


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    if hf.get("tie_word_embeddings"):
        refuse("tie_word_embeddings", True, "false")
    own = {
        **decoder.LAYER_NORMS,
        **dict.fromkeys(decoder.BIASES, True),
        "head_bias": True,
        "qk_norm": "head" if hf.get("qk_layernorm") else "",
        "parallel_ffn": "shared",
        "ffn_gate": False,
        "lora_names": (("up", "fc1"), ("down", "fc2")),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN, rope={"partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"qk_layernorm": bool(config.qk_norm)}
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
