"""VaultGemma (arXiv 2510.15001): Gemma 2 with the norms before each part alone, trained with differential privacy."""

from typing import Any

from jaxrl_llm.models.families import decoder, gemma2, layer_types
from jaxrl_llm.models.families.decoder import LAYER, norms
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "vaultgemma"
ARCHITECTURE = "VaultGemma"
KEYS = (
    *decoder.ENDS,
    *norms("layers/", LAYER, {"input_norm": "input_layernorm", "post_attention_norm": "pre_feedforward_layernorm"}),
    *decoder.ATTENTION,
    *decoder.FEED_FORWARD,
)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = gemma2.DEFAULTS | hf
    own = gemma2.common(hf) | {"norms": "pre"} | layer_types.read(hf, lambda layer: layer % 2 == 0)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=gemma2.ACTIVATIONS)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, gemma2.own_entries(config, base))
