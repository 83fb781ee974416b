"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on queries, keys and values; upper layers may have a window."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2"
PROCESS_REWARD_MODEL = "Qwen2ForProcessRewardModel"  # of Qwen2.5-Math-PRM: its step head has a hidden layer
KEYS = decoder.KEYS


def window(hf: dict[str, Any]) -> int | None:
    """The window of the layers that have one, None without `use_sliding_window`."""
    return hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None


def windows(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the layers with a window: those from `max_window_layers` on, or of `layer_types`."""
    size, first = window(hf), hf.get("max_window_layers", 28)
    return layer_types.read({**hf, "sliding_window": size}, lambda layer: size is not None and layer >= first)


def window_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `windows` reads, where those of `base` say something else."""
    fields = {} if base is None else windows({**base, "num_hidden_layers": config.layers})
    if config.sliding_layers == fields.get("sliding_layers", ()) and config.sliding_window == fields.get(
        "sliding_window"
    ):
        return {}
    return layer_types.write(config) | {"use_sliding_window": bool(config.sliding_layers)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    own = {"attention_bias": True, **windows(hf)}
    if hf.get("architectures") == [PROCESS_REWARD_MODEL]:
        own |= {"step_hidden": True}
        # Its num_labels is fixed in its own code, and config.json may lack it.
        hf = {**hf, "architectures": [decoder.architectures(ARCHITECTURE)["step"]], "num_labels": 2}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"architectures": [PROCESS_REWARD_MODEL]} if config.step_hidden else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own | window_entries(config, base))
