"""Ministral 3: Mistral with queries that grow with the log of their position (arXiv 2501.19399), and YaRN."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, rotary
from jaxrl_llm.models.families.entries import number, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "ministral3"
ARCHITECTURE = "Ministral3"
KEYS = decoder.KEYS
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}  # for entries that are left out
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_rope(DEFAULTS | hf)
    own = layer_types.read_uniform(hf) | growth(hf["rope_parameters"])
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def growth(rope: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of queries that grow, of rotary parameters."""
    beta = number("llama_4_scaling_beta", rope.get("llama_4_scaling_beta") or 0.0)
    every = rope.get("original_max_position_embeddings")
    if not beta:
        return {}
    if not isinstance(every, int) or every < 1:
        refuse("original_max_position_embeddings", every, "integers from 1, beside llama_4_scaling_beta")
    return {"query_growth": beta, "query_growth_every": every, "query_growth_rotated": True}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {"sliding_window": config.sliding_window}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_rope, write=write_rope)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary entries of a ModelConfig, with those of queries that grow."""
    given = rotary.write(config)
    if config.local_rope is not None:
        refuse("rope_parameters", given["rope_parameters"], "one set of parameters for all layers")
    parameters = {"rope_type": "default", **(given["rope_scaling"] or {}), "rope_theta": given["rope_theta"]}
    parameters["llama_4_scaling_beta"] = config.query_growth
    if config.query_growth:
        parameters["original_max_position_embeddings"] = config.query_growth_every
    return {"rope_parameters": parameters}


def with_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with rotary parameters, of which files of transformers 4 have the base apart, or the family's."""
    return {**hf, "rope_parameters": rotary.parameters_of(hf) or ({} if hf.get("rope_theta") else ROPE)}
