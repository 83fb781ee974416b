"""Gemma 3, text models (arXiv 2503.19786): Gemma 2 with norms on queries and keys, five of six layers with a window.

Layers with a window have rotary positions of their own. Of a model with vision (`gemma3`) the text part is read, and
written as a text model.
"""

from typing import Any

from jaxrl_llm.models.families import decoder, gemma2, layer_types
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.transformer import ModelConfig

MODEL_TYPE = "gemma3_text"
ARCHITECTURE = {"lm": "Gemma3ForCausalLM", "score": "Gemma3TextForSequenceClassification"}
KEYS = (*gemma2.KEYS, *decoder.QK_NORMS)
WITH_VISION = "gemma3"
OTHER_KEYS = (
    tuple(key._replace(tensor=f"language_model.{key.tensor}") for key in KEYS),
    tuple(key._replace(tensor=key.tensor.replace("model.", "model.language_model.", 1)) for key in KEYS),
)
# What a text part leaves out: the sizes of the 4b model are not these, but its heads and vocabulary are.
SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
DEFAULTS = {**gemma2.DEFAULTS, "attn_logit_softcapping": None, "final_logit_softcapping": None}
BASES = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def text_part(hf: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text model in a model with vision; raises ConfigError where it has none."""
    text = hf.get("text_config")
    if not isinstance(text, dict):
        refuse("text_config", text, f"the entries of a {MODEL_TYPE} model")
    shared = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
    architectures = hf.get("architectures") or ["Gemma3ForConditionalGeneration"]
    return {
        **SIZES,
        **{name: hf[name] for name in shared if name in hf},
        **text,
        "model_type": MODEL_TYPE,
        "architectures": [name.replace("ForConditionalGeneration", "ForCausalLM") for name in architectures],
        "tie_word_embeddings": text.get("tie_word_embeddings", hf.get("tie_word_embeddings", True)),
    }


def _rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of both types of layers; files of transformers 4 have a base and a scaling of one each."""
    given = hf.get("rope_parameters") or {}
    names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    bases = {kind: BASES[kind] if hf.get(name) is None else hf[name] for kind, name in names.items()}
    full = {"rope_theta": bases["full_attention"], **(hf.get("rope_scaling") or {})}
    local = {"rope_theta": bases["sliding_attention"]}
    return {
        "full_attention": full | (given.get("full_attention") or {}),
        "sliding_attention": local | (given.get("sliding_attention") or {}),
    }


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    hf |= {"rope_parameters": _rope_parameters(hf)}
    every = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    own = {**gemma2.common(hf), "qk_norm": True, **layer_types.read(hf, lambda layer: (layer + 1) % every != 0)}
    rope = {"by_type": True}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=gemma2.ACTIVATIONS, rope=rope)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    rope = None if base is None else {**base, "rope_parameters": _rope_parameters(base)}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, gemma2.own_entries(config, base), rope=rope)
