"""Falcon Mamba (arXiv 2410.05355): Mamba whose keys, queries and what makes steps are divided by their rms."""

from typing import Any

from jaxrl_llm.models.families import mamba
from jaxrl_llm.models.families.entries import number, renamed
from jaxrl_llm.models.mixers.mamba1 import Mamba1
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "falcon_mamba"
ARCHITECTURE = "FalconMamba"
KEYS = mamba.KEYS
DEFAULTS = mamba.DEFAULTS | {"mixer_rms_eps": 1e-6}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, mamba.NAMES)
    own = mamba.selective(hf) | {"state_norm_eps": number("mixer_rms_eps", hf["mixer_rms_eps"])}
    return mamba.read(hf, Mamba1, own, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = mamba.entries(config, base, mamba.FIELDS) | {"mixer_rms_eps": config.state_norm_eps}
    return mamba.write(config, base, mamba.NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
