"""SmolLM3: Llama's shape, with no rotary positions in every fourth layer (arXiv 2501.18795)."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, llama
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "smollm3"
ARCHITECTURE = "SmolLM3"
KEYS = decoder.KEYS
DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4}  # for entries that are left out
THETA = 2_000_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    unrotated = layer_types.read_unrotated(hf)
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    slides = set(unrotated) if window is not None else set()
    own = {
        "unrotated_layers": unrotated,
        **decoder.read_fields(hf, llama.FIELDS),
        **layer_types.read({**hf, "sliding_window": window}, slides.__contains__),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = decoder.write_fields(config, llama.FIELDS) | layer_types.write(config, base)
    if base is None:
        own |= layer_types.write_unrotated(config) | {"use_sliding_window": bool(config.sliding_layers)}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
