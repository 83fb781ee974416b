"""Mamba-2 (arXiv 2405.21060), Mamba-Codestral: a layer is Mamba-2 alone."""

from typing import Any

from jaxrl_llm.models.families import granitemoehybrid, mamba
from jaxrl_llm.models.families.entries import positive, refuse, renamed
from jaxrl_llm.models.mixers.mamba2 import UnadaptedOutMamba2
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mamba2"
ARCHITECTURE = "Mamba2"
KEYS = (*mamba.AROUND, *granitemoehybrid.mamba_keys(mamba.BLOCK))
NAMES = mamba.NAMES | {"head_dim": "state_head_dim"}  # which is none of attention
FIELDS = mamba.FIELDS | {
    "delta_key_heads": "n_groups",
    "delta_value_heads": "num_heads",
    "delta_value_dim": "state_head_dim",
}
DEFAULTS = mamba.DEFAULTS | {
    "num_heads": 128,
    "state_head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "tie_word_embeddings": False,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = granitemoehybrid.mamba(hf, FIELDS)
    heads, width = own["delta_value_heads"], positive(hf, "expand") * positive(hf, "hidden_size")
    if heads * own["delta_value_dim"] != width:
        refuse("head_dim", own["delta_value_dim"], f"expand * hidden_size / num_heads = {width / heads:g}")
    return mamba.read(hf, UnadaptedOutMamba2, own, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return mamba.write(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, mamba.entries(config, base, FIELDS))
