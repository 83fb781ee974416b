"""EXAONE 4.0 (arXiv 2507.11407): norms of what attention and feed-forward add, and of each head.

Models with a window have it in some layers, and rotary positions in these alone.
"""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, olmo2
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "exaone4"
ARCHITECTURE = "Exaone4"
KEYS = olmo2.KEYS
DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    return decoder.to_config(hf, ARCHITECTURE, {**windows(hf), "norms": "post", "qk_norm": "head"}, overrides)


def windows(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of windows, and of the layers without rotary positions."""
    if hf["sliding_window"] is None:
        return layer_types.read_uniform(hf)
    # Files without `layer_types` have a pattern of L and G, or the window in all layers but every n-th.
    pattern, last = hf["sliding_window_pattern"], positive(hf, "num_hidden_layers") - 1
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        found = layer_types.read(hf, lambda layer: pattern[layer % len(pattern)] == "L" and layer != last)
    elif isinstance(pattern, int) and pattern > 0:
        found = layer_types.read(hf, lambda layer: (layer + 1) % pattern != 0)
    else:
        refuse("sliding_window_pattern", pattern, "letters L and G, as in LLLG, and numbers from 1")
    return found | {"unrotated_layers": layer_types.outside(hf, found)}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    # With a window layers without one would have no rotary positions.
    without = {"sliding_window": None} if base is None and not config.sliding_layers else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, layer_types.write(config, base) | without)
