"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in every layer, and multipliers of what they read
and give, of feed-forwards, embeddings and logits."""

from typing import Any

from jaxrl_llm.models.families import bamba, decoder, granitemoehybrid, llama
from jaxrl_llm.models.families.decoder import LAYER
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.mixers.parallel import AttentionAndMamba
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "falcon_h1"
ARCHITECTURE = "FalconH1"
KEYS = (
    *bamba.ENDS_AND_NORMS,
    *(key._replace(path=key.path.replace("/attention/", "/parallel/attention/")) for key in decoder.ATTENTION),
    *granitemoehybrid.mamba_keys(f"{LAYER}mamba", "layers/parallel/mamba"),
    *decoder.maps("layers/mlp", f"{LAYER}feed_forward", decoder.GATED),
)
SCALES = ("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    **granitemoehybrid.MAMBA_DEFAULTS,
    "projectors_bias": False,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "key_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    **dict.fromkeys(SCALES, 1.0),
}  # for entries that are left out
OWN_FIELDS = llama.FIELDS | {"mamba_norm": "mamba_rms_norm"}  # that are an entry each
FIELDS = granitemoehybrid.MAMBA_FIELDS | OWN_FIELDS


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    if hf["mamba_rms_norm"] and hf["mamba_norm_before_gate"]:
        refuse("mamba_norm_before_gate", True, "false, where mamba_rms_norm is true")
    if hf["projectors_bias"] != hf["mamba_proj_bias"]:
        refuse("projectors_bias", hf["projectors_bias"], f"mamba_proj_bias = {hf['mamba_proj_bias']}")
    given = hf["mamba_d_ssm"] is not None
    width = positive(hf, "mamba_d_ssm") if given else positive(hf, "mamba_expand") * positive(hf, "hidden_size")
    own = granitemoehybrid.mamba_of(hf, width, "mamba_d_ssm") | {
        "mamba_scales": _numbers(hf, "ssm_multipliers", 5),
        "parallel_scales": tuple(number(entry, hf[entry]) for entry in SCALES),
        "ffn_scales": _numbers(hf, "mlp_multipliers", 2),
        "mixers": (AttentionAndMamba,) * positive(hf, "num_hidden_layers"),
        **decoder.read_fields(hf, OWN_FIELDS),
        "key_scale": number("key_multiplier", hf["key_multiplier"], above=0),
        "embed_scale": number("embedding_multiplier", hf["embedding_multiplier"], above=0),
        "logit_divisor": 1 / number("lm_head_multiplier", hf["lm_head_multiplier"], above=0),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def _numbers(hf: dict[str, Any], entry: str, count: int) -> tuple[float, ...]:
    given = hf.get(entry) or [1.0] * count
    if not isinstance(given, list | tuple) or len(given) != count:
        refuse(entry, given, f"lists of {count} numbers")
    return tuple(number(entry, x) for x in given)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **decoder.write_fields(config, FIELDS),
        "mamba_d_ssm": config.delta_value_heads * config.delta_value_dim,
        "projectors_bias": config.state_bias,
        "key_multiplier": config.key_scale,
        "embedding_multiplier": config.embed_scale,
        "lm_head_multiplier": 1 / config.logit_divisor,
        "ssm_multipliers": list(config.mamba_scales),
        "mlp_multipliers": list(config.ffn_scales),
        **dict(zip(SCALES, config.parallel_scales, strict=False)),
    }
    if base is not None:
        own["lm_head_multiplier"] = decoder.reciprocal(config.logit_divisor, (DEFAULTS | base)["lm_head_multiplier"])
        if base.get("mamba_d_ssm", ...) is None:
            own["mamba_d_ssm"] = None
    else:
        own |= {"mamba_d_head": "auto", "mamba_norm_before_gate": False}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
