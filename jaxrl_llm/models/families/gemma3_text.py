"""Gemma 3, text models (arXiv 2503.19786): Gemma 2 with norms on queries and keys, five of six layers with a window.

Layers with a window have rotary positions of their own.
"""

from typing import Any

from jaxrl_llm.models.families import decoder, gemma2, layer_types, rotary
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gemma3_text"
ARCHITECTURE = {"lm": "Gemma3ForCausalLM", "score": "Gemma3TextForSequenceClassification"}
KEYS = (*gemma2.KEYS, *decoder.QK_NORMS)
DEFAULTS = {**gemma2.DEFAULTS, "attn_logit_softcapping": None, "final_logit_softcapping": None}
BASES = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}  # of full and of sliding attention


def with_ropes(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with rotary parameters of both types of layers; files of transformers 4 have a base and a scaling of
    one each."""
    bases = (base if hf.get(entry) is None else hf[entry] for entry, base in BASES.items())
    return {**hf, "rope_parameters": rotary.both_sets(hf, *bases)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_ropes(DEFAULTS | hf)
    every = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    own = {**gemma2.common(hf), "qk_norm": "head", **layer_types.read(hf, lambda layer: (layer + 1) % every != 0)}
    rope = {"by_type": True}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=gemma2.ACTIVATIONS, rope=rope)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = gemma2.own_entries(config, base)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_ropes)
