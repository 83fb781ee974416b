"""The entries of config.json about layers that see only the latest tokens, or no positions, in both directions."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.models.families.entries import positive, refuse

SLIDING, FULL = "sliding_attention", "full_attention"


def read(
    hf: dict[str, Any], slides: Callable[[int], bool], sliding: str = SLIDING, size: str = "sliding_window"
) -> dict[str, Any]:
    """The ModelConfig fields of sliding windows: the layers that `layer_types` names or, without it, `slides` tells.

    `sliding` is their type, and `size` the entry of their window.
    Raises ConfigError for other types of layers, a list of another length, and sliding layers without a window.
    """
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("layer_types") or [sliding if slides(layer) else FULL for layer in range(layers)]
    if other := sorted(set(types) - {sliding, FULL}):
        refuse("layer_types", other, f"{FULL} and {sliding}")
    if len(types) != layers:
        refuse("layer_types", types, f"one type for each of the {layers} layers")
    found = tuple(layer for layer, kind in enumerate(types) if kind == sliding)
    return {"sliding_window": positive(hf, size), "sliding_layers": found} if found else {}


def read_uniform(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields where `sliding_window`, if there is one, holds for every layer."""
    window = hf.get("sliding_window")
    kind = FULL if window is None else SLIDING
    if other := sorted(set(hf.get("layer_types") or ()) - {kind}):
        refuse("layer_types", other, f"{kind} in every layer (sliding_window = {window})")
    return read({**hf, "layer_types": None}, lambda _: window is not None)


def outside(hf: dict[str, Any], windows: dict[str, Any]) -> tuple[int, ...]:
    """The layers without a window, of the fields that `read` gives."""
    return tuple(i for i in range(positive(hf, "num_hidden_layers")) if i not in windows.get("sliding_layers", ()))


def write(config, base: Any = None, sliding: str = SLIDING, size: str = "sliding_window") -> dict[str, Any]:
    """The entries for the windows of a ModelConfig; over those of a `base`, which has the layers', their size alone."""
    if base is not None:
        return {size: config.sliding_window} if config.sliding_layers else {}
    types = [sliding if layer in config.sliding_layers else FULL for layer in range(config.layers)]
    # Some classes of transformers have no null for the size.
    return {"layer_types": types} | ({size: config.sliding_window} if config.sliding_layers else {})


def read_unrotated(hf: dict[str, Any]) -> tuple[int, ...]:
    """The layers without rotary positions: those of zeros in `no_rope_layers` or, without it, every fourth.

    `no_rope_layer_interval` is another number than four. Raises ConfigError for a list that is too short.
    """
    layers, every = positive(hf, "num_hidden_layers"), hf.get("no_rope_layer_interval") or 4
    rotated = hf.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(layers)]
    if len(rotated) < layers:
        refuse("no_rope_layers", rotated, f"lists of at least {layers} entries")
    return tuple(layer for layer in range(layers) if not rotated[layer])


def write_unrotated(config) -> dict[str, Any]:
    """The entry for the layers of a ModelConfig without rotary positions."""
    return {"no_rope_layers": [int(layer not in config.unrotated_layers) for layer in range(config.layers)]}
