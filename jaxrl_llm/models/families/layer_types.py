"""The entries of config.json about layers that see only the latest tokens, in both directions."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.models.families.entries import positive, refuse

SLIDING, FULL = "sliding_attention", "full_attention"


def read(hf: dict[str, Any], slides: Callable[[int], bool]) -> dict[str, Any]:
    """The ModelConfig fields of sliding windows: the layers that `layer_types` names or, without it, `slides` tells.

    Raises ConfigError for other types of layers, a list of another length, and sliding layers without a window.
    """
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("layer_types") or [SLIDING if slides(layer) else FULL for layer in range(layers)]
    if other := sorted(set(types) - {SLIDING, FULL}):
        refuse("layer_types", other, f"{FULL} and {SLIDING}")
    if len(types) != layers:
        refuse("layer_types", types, f"one type for each of the {layers} layers")
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
    return {"sliding_window": positive(hf, "sliding_window"), "sliding_layers": sliding} if sliding else {}


def read_uniform(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields where `sliding_window`, if there is one, holds for every layer."""
    window = hf.get("sliding_window")
    kind = FULL if window is None else SLIDING
    if other := sorted(set(hf.get("layer_types") or ()) - {kind}):
        refuse("layer_types", other, f"{kind} in every layer (sliding_window = {window})")
    return read({**hf, "layer_types": None}, lambda _: window is not None)


def write(config) -> dict[str, Any]:
    """The entries for the windows of a ModelConfig."""
    types = [SLIDING if layer in config.sliding_layers else FULL for layer in range(config.layers)]
    return {"sliding_window": config.sliding_window, "layer_types": types}
