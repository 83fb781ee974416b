"""Kolibri 1 (Aleph Alpha): norms before and behind each part, rotary positions in the layers with a window alone, and
experts in every layer, which are chosen by logits with a correction and weighted by sigmoids."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import experts_of, positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "kolibri1"
ARCHITECTURE = "Kolibri1"


def _keys(attention_norm: str, mlp_norm: str, correction: str, experts: tuple[TensorName, ...]):
    return (
        *decoder.ENDS,
        *decoder.PRE_NORMS,
        TensorName("layers/attention_out_norm/scale", f"{LAYER}{attention_norm}.weight"),
        TensorName("layers/mlp_out_norm/scale", f"{LAYER}{mlp_norm}.weight"),
        *decoder.ATTENTION,
        *decoder.QK_NORMS,
        TensorName("layers/mlp/correction", f"{LAYER}{correction}"),
        *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.shared_experts", decoder.GATED),
        *experts,
    )


KEYS = _keys("post_attn_norm", "post_ffn_norm", "moe.router.expert_bias", decoder.experts("mlp"))
MODULE_KEYS = _keys(
    "post_self_attn_layernorm", "post_mlp_layernorm", "mlp.gate.e_score_correction_bias", decoder.stacked_experts("mlp")
)
OTHER_KEYS = (MODULE_KEYS,)
COUNT = "num_local_experts"  # of experts, as transformers writes it; files may have num_experts
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 513,
    COUNT: 384,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": False,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | ({COUNT: hf["num_experts"]} if "num_experts" in hf else {}) | hf
    channels = positive(hf, "moe_intermediate_size")
    positive(hf, "sliding_window")  # which transformers asks for where no layer has one too
    windows = layer_types.read(hf, lambda layer: (layer + 1) % 5 != 0)
    own = {
        **windows,
        "unrotated_layers": layer_types.outside(hf, windows),
        **experts_of(hf, COUNT, "num_experts_per_tok"),
        "norms": "both",
        "qk_norm": "head",
        "expert_ffn": channels,
        "shared_expert_ffn": positive(hf, "shared_expert_intermediate_size"),
        "router_sigmoid": True,
        "router_correction": True,
        "router_corrects_logits": True,
        "normalize_top_k": bool(hf["norm_topk_prob"]),
    }
    return decoder.to_config({"intermediate_size": channels} | hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {
        **layer_types.write(config, base),
        "num_experts" if "num_experts" in (base or {}) else COUNT: config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_ffn,
        "shared_expert_intermediate_size": config.shared_expert_ffn,
        "norm_topk_prob": config.normalize_top_k,
    }
    if base is None:
        own["sliding_window"] = config.sliding_window or DEFAULTS["sliding_window"]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
