"""StarCoder 2 (arXiv 2402.19173): grouped queries with a window, layer norms, and feed-forwards without gates."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, stablelm
from jaxrl_llm.models.families.decoder import LAYER, maps
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "starcoder2"
ARCHITECTURE = "Starcoder2"
KEYS = (
    *decoder.ENDS,
    *stablelm.NORMS,
    *decoder.ATTENTION,
    *maps("layers/mlp", f"{LAYER}mlp", {"up": "c_fc", "down": "c_proj"}),
)
NAMES = {"norm_epsilon": "rms_norm_eps"}
DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.018042,
    "use_bias": True,
    "tie_word_embeddings": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {
        **decoder.LAYER_NORMS,
        **layer_types.read_uniform(hf),
        **dict.fromkeys(decoder.BIASES, bool(hf["use_bias"])),
        "ffn_gate": False,
        "lora_names": (("down", "c_proj"),),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"use_bias": config.mlp_bias, "sliding_window": config.sliding_window}
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
