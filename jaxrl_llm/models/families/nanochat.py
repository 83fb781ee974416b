"""nanochat (Karpathy): norms without parameters, one of them on the embeddings, feed-forwards of squared ReLU without
gates, soft-capped logits, and heads that are rotated the other way round and normed behind it."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, maps
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "nanochat"
ARCHITECTURE = "NanoChat"
KEYS = (*decoder.ENDS, *decoder.ATTENTION, *maps("layers/mlp", f"{LAYER}mlp", {"up": "fc1", "down": "fc2"}))
DEFAULTS = {"hidden_act": "relu2", "final_logit_softcapping": 15.0}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    cap = hf["final_logit_softcapping"]
    own = {
        **decoder.attention_biases(hf),
        "norm_scale": False,
        "embed_norm": "rms",
        "ffn_gate": False,
        "rope_reversed": True,
        "qk_norm": "rotated",
        "logit_softcap": None if cap is None else number("final_logit_softcapping", cap, above=0),
        "lora_names": (("up", "fc1"), ("down", "fc2")),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "final_logit_softcapping": config.logit_softcap}
    return decoder.from_own_names(config, base, {}, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
