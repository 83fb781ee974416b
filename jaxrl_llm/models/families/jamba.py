"""Jamba (arXiv 2403.19887): Mamba-1 with norms of its own in most layers, attention without positions in the others,
and experts in some of both."""

from typing import Any

from jaxrl_llm.models.families import bamba, decoder, mamba
from jaxrl_llm.models.families.decoder import LAYER, norms
from jaxrl_llm.models.families.entries import positive, refuse, renamed
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.mamba1 import NormedMamba1
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "jamba"
ARCHITECTURE = "Jamba"
BLOCK = "feed_forward"
COMMON = (
    *bamba.ENDS_AND_NORMS,
    *decoder.ATTENTION,
    *mamba.mixer_keys(f"{LAYER}mamba"),
    *norms("layers/mamba/", f"{LAYER}mamba.", {f"{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}),
    *decoder.maps("layers/mlp", f"{LAYER}{BLOCK}", decoder.GATED),
)
KEYS = (*COMMON, *decoder.experts(BLOCK, router="router"))
OTHER_KEYS = ((*COMMON, *decoder.stacked_experts(BLOCK, router="router")),)  # as transformers 5 has them
# Entries of Mamba-1, which the family of that name has under others.
NAMES = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_rank": "time_step_rank",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
EXPERTS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "intermediate_size",
    "router_aux_loss_coef": "router_aux_loss_coef",
}  # fields that are an entry each
DEFAULTS = {
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    **{own: mamba.DEFAULTS[name] for own, name in NAMES.items()},
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, {"num_local_experts": "num_experts"})
    layers = range(positive(hf, "num_hidden_layers"))
    attending, sparse = (_every(hf, kind) for kind in ("attn", "expert"))
    own: dict[str, Any] = {
        "mixers": tuple(Attention if layer in attending else NormedMamba1 for layer in layers),
        "unrotated_layers": tuple(layers),
        **mamba.selective(renamed(hf, NAMES) | {"intermediate_size": None}),
    }
    if positive(hf, "num_experts") > 1 and sparse:
        own |= decoder.read_fields(hf, EXPERTS)
        own["dense_layers"] = tuple(layer for layer in layers if layer not in sparse)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def _every(hf: dict[str, Any], kind: str) -> list[int]:
    """The layers of a kind: one in so many, from an offset on."""
    entry, period = f"{kind}_layer_offset", positive(hf, f"{kind}_layer_period")
    offset = hf[entry]
    if type(offset) is not int or not 0 <= offset < period:
        refuse(entry, offset, f"integers from 0, below {kind}_layer_period = {period}")
    return [layer for layer in range(hf["num_hidden_layers"]) if layer % period == offset]


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = decoder.write_fields(config, EXPERTS) if config.experts else {}
    if base is None:
        found = mamba.entries(config, None, mamba.FIELDS)
        own |= {name: found[other] for name, other in NAMES.items()}
        kinds = list(enumerate(config.layer_configs))
        own |= _period("attn", [layer for layer, kind in kinds if kind.mixer is Attention], config.layers)
        own |= _period("expert", [layer for layer, kind in kinds if kind.experts], config.layers)
        own |= {} if config.experts else {"num_experts": 1}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)


def _period(kind: str, layers: list[int], count: int) -> dict[str, int]:
    """The entries that `_every` reads, of these layers of `count`."""
    first, *others = layers or [count]
    period = others[0] - first if others else count + 1
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first}
