"""Nemotron-4 and Minitron (arXiv 2402.16819, 2407.14679): layer norms whose scales count from 1, half of each head
rotated, and feed-forwards of squared ReLU without gates."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama, stablelm
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "nemotron"
ARCHITECTURE = "Nemotron"
KEYS = (*decoder.ENDS, *stablelm.NORMS, *decoder.ATTENTION, *decoder.FEED_FORWARD)
NAMES = {"norm_eps": "rms_norm_eps"}
# For entries that are left out.
DEFAULTS = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "initializer_range": 0.0134}
PARTIAL = {"partial": True}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {**decoder.read_fields(hf, llama.FIELDS), **decoder.LAYER_NORMS, "norm_offset": 1.0, "ffn_gate": False}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN, rope=PARTIAL)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = decoder.write_fields(config, llama.FIELDS)
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
