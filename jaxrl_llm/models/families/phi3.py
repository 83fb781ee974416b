"""Phi-3 and Phi-4 (arXiv 2404.14219, 2503.01743): queries, keys and values in one tensor, gate and up in another."""

from typing import Any

from jaxrl_llm.models.families import decoder, glm, layer_types, rotary
from jaxrl_llm.models.families.decoder import LAYER, maps
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3"
KEYS = (
    *decoder.ENDS,
    *decoder.PRE_NORMS,
    *maps("layers/attention", f"{LAYER}self_attn", decoder.QKVO | dict.fromkeys("qkv", "qkv_proj")),
    *glm.FEED_FORWARD,
)
ORIGINAL = "original_max_position_embeddings"
DEFAULTS = {"rms_norm_eps": 1e-5}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | as_longrope(hf)
    return decoder.to_config(hf, ARCHITECTURE, layer_types.read_uniform(hf), overrides, rope={"partial": True})


def as_longrope(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with the rotary scaling under the name that it has today, and the lengths that it counts with.

    The original length is an entry beside the scaling, which goes before one in it, as in transformers.
    """
    given = rotary.parameters_of(hf)
    if (kind := rotary.kind_of(given)) == "default":
        return hf
    if kind not in ("longrope", "su", "yarn"):  # all of which mean longrope in these models
        refuse("rope_type", kind, f"default and longrope, in {MODEL_TYPE} models")
    hf = {ORIGINAL: 4096, rotary.MOST: 4096} | hf
    place = "rope_scaling" if given is hf.get("rope_scaling") else "rope_parameters"
    return hf | {place: given | {"rope_type": "longrope", ORIGINAL: hf[ORIGINAL]}}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"sliding_window": config.sliding_window}
    own |= {ORIGINAL: config.rope.original_max_positions} if config.rope.kind == "longrope" else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, as_longrope)
