"""Nemotron-H (arXiv 2504.03624) and Nemotron 3 (arXiv 2512.20856): a layer is Mamba-2, attention without rotary
positions, a feed-forward or experts alone, the last two without gates, and experts may be narrower than the model."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, granitemoehybrid
from jaxrl_llm.models.families.decoder import TensorName, maps, norms
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.mamba2 import UnadaptedOutMamba2
from jaxrl_llm.models.mixers.mixer import NoMixer
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "nemotron_h"
ARCHITECTURE = "NemotronH"
UNGATED = {"up": "up_proj", "down": "down_proj"}


def _keys(root: str, expert: str) -> tuple[TensorName, ...]:
    """The table of files whose names begin with `root`, and whose experts' matrices are called by `expert`."""
    layer = f"{root}.layers.{{layer}}."
    part = f"{layer}mixer"
    return (
        TensorName("embed/weight", f"{root}.embeddings.weight"),
        TensorName("norm/scale", f"{root}.norm_f.weight"),
        *decoder.ENDS[2:],
        *norms("layers/", layer, {"input_norm": "norm", "post_attention_norm": "norm"}),
        *maps("layers/attention", part, decoder.QKVO),
        *granitemoehybrid.mamba_keys(part),
        *maps("layers/mlp", part, UNGATED | {"narrow": "fc1_latent_proj", "widen": "fc2_latent_proj"}),
        TensorName("layers/mlp/router/kernel", f"{part}.gate.weight", transpose=True),
        TensorName("layers/mlp/correction", f"{part}.gate.e_score_correction_bias"),
        *maps("layers/mlp/shared", f"{part}.shared_experts", UNGATED),
        TensorName("layers/mlp/experts/up/kernel", f"{part}.experts.{expert.format('up_proj')}", transpose=True),
        TensorName("layers/mlp/experts/down/kernel", f"{part}.experts.{expert.format('down_proj')}", transpose=True),
    )


KEYS = _keys("backbone", "{{expert}}.{}.weight")
MODULE_KEYS = _keys("model", "{}")
OTHER_KEYS = (MODULE_KEYS,)
LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}  # of `hybrid_override_pattern`
MIXERS = {  # of `layers_block_type`
    "mamba": UnadaptedOutMamba2, "linear_attention": UnadaptedOutMamba2, "attention": Attention,
    "full_attention": Attention, "moe": NoMixer, "mlp": NoMixer,
}  # fmt: skip
# The fields that are an entry each.
FIELDS = {"norm_eps": "layer_norm_epsilon", "mlp_bias": "mlp_bias"}
MAMBA_FIELDS = {
    "delta_key_heads": "n_groups",
    "delta_value_heads": "mamba_num_heads",
    "delta_key_dim": "ssm_state_size",
    "delta_value_dim": "mamba_head_dim",
    "delta_conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "state_bias": "use_bias",
}
EXPERT_FIELDS = {**deepseek_v3.EXPERT_FIELDS, "shared_expert_ffn": "moe_shared_expert_intermediate_size"}
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "n_groups": 8,
    "mamba_num_heads": 128,
    "ssm_state_size": 128,
    "mamba_head_dim": 64,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # for entries that are left out
FIXED = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False, "sliding_window": None}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    kinds = _kinds(hf)
    layers = {kind: tuple(i for i, other in enumerate(kinds) if other == kind) for kind in ("moe", "mlp")}
    for entry, value in FIXED.items():
        if hf.get(entry) not in (None, value):
            refuse(entry, hf[entry], f"{value}")
    hf |= {"num_hidden_layers": len(kinds), "hidden_act": None}
    own = {
        **decoder.read_fields(hf, FIELDS),
        "activation": "relu2",
        "ffn_gate": False,
        "mixers": tuple(MIXERS[kind] for kind in kinds),
        "bare_layers": tuple(i for i, kind in enumerate(kinds) if kind not in layers),
        "unrotated_layers": tuple(range(len(kinds))),
    }
    if UnadaptedOutMamba2 in own["mixers"]:
        own |= granitemoehybrid.mamba(hf, MAMBA_FIELDS)
    if layers["moe"]:
        own |= deepseek_v3.experts({**hf, "first_k_dense_replace": 0, "n_shared_experts": 1}) | {
            "shared_expert_ffn": positive(hf, "moe_shared_expert_intermediate_size"),
            "expert_width": 0 if hf.get("moe_latent_size") is None else positive(hf, "moe_latent_size"),
            "dense_layers": layers["mlp"],
        }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations={"relu2": "relu2"})


def _kinds(hf: dict[str, Any]) -> list[str]:
    """The kind of each layer: by `layers_block_type` or, without it, the letters of `hybrid_override_pattern`."""
    if (kinds := hf.get("layers_block_type")) is not None:
        if not kinds or (unknown := sorted({*kinds} - {*MIXERS})):
            refuse("layers_block_type", unknown if kinds else kinds, ", ".join(MIXERS))
        return kinds
    pattern = hf.get("hybrid_override_pattern")
    if not pattern or set(pattern) - {*LETTERS}:
        refuse("hybrid_override_pattern", pattern, f"letters {' '.join(LETTERS)}, one for each layer")
    return [LETTERS[letter] for letter in pattern]


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = decoder.write_fields(config, FIELDS)
    if config.delta_value_heads:
        own |= decoder.write_fields(config, MAMBA_FIELDS)
    if config.experts:
        own |= decoder.write_fields(config, EXPERT_FIELDS) | {"moe_latent_size": config.expert_width or None}
    if base is None:
        names = {UnadaptedOutMamba2: "linear_attention", Attention: "full_attention"}
        own["layers_block_type"] = [
            names.get(kind.mixer) or ("moe" if kind.experts else "mlp") for kind in config.layer_configs
        ]
        # Transformers cuts steps below a time_step_min off in whole rows, but not in decoding; vLLM never does.
        own |= {"time_step_min": 1e-9, "hidden_act": None}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
