"""Apertus (arXiv 2509.14233): Llama's shape with norms of each head's queries and keys, and feed-forwards of xIELU
(arXiv 2411.13010) without gates."""

import functools
from typing import Any

from jaxrl_llm.models.families import decoder, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, norms
from jaxrl_llm.models.families.entries import computed
from jaxrl_llm.models.layers import XIELU_NUMBERS
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "apertus"
ARCHITECTURE = "Apertus"
KEYS = (
    *decoder.ENDS,
    *norms("layers/", LAYER, {"input_norm": "attention_layernorm", "post_attention_norm": "feedforward_layernorm"}),
    *decoder.ATTENTION,
    *decoder.QK_NORMS,
    *decoder.FEED_FORWARD[2:],
    *(TensorName(f"layers/mlp/activation/{name}", f"{LAYER}mlp.act_fn.{name}") for name in XIELU_NUMBERS),
)
ROPE = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
with_rope = functools.partial(rotary.with_default, ROPE)
DEFAULTS = {"rms_norm_eps": 1e-5}  # for entries that are left out, as is ROPE
ACTIVATIONS = {"xielu": "xielu"}
# The only values of entries of published files, which transformers does not read, that are computed.
COMPUTED = {"qk_norm": True, "post_norm": False, "mlp_bias": False}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(hf, ARCHITECTURE, overrides)


def read(
    hf: dict[str, Any], family: str, overrides: dict[str, Any], fields: dict[str, Any] | None = None
) -> ModelConfig:
    """The ModelConfig of a `family` with the shape of Apertus; `fields` are those in which it differs."""
    hf = DEFAULTS | with_rope(hf)
    computed(hf, COMPUTED)
    own = {**decoder.attention_biases(hf), "qk_norm": "head", "ffn_gate": False} | (fields or {})
    return decoder.to_config(hf, family, own, overrides, activations=ACTIVATIONS, rope={"theta": ROPE["rope_theta"]})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return write(config, base, ARCHITECTURE, MODEL_TYPE, {})


def write(
    config: ModelConfig, base: dict[str, Any] | None, family: str, model_type: str, own: dict[str, Any]
) -> dict[str, Any]:
    """The config.json of a net of a `family` with the shape of Apertus: `base` changed, with the `own` entries."""
    own = {"attention_bias": config.attention_bias} | ({"hidden_act": "xielu"} if base is None else {}) | own
    return decoder.from_config(config, base, family, model_type, own, rope=with_rope)
