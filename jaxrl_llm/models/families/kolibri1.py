"""Kolibri 1 (Aleph Alpha): norms before and behind each part, rotary positions in the layers with a window alone, and
experts in every layer, which are chosen by logits with a correction and weighted by sigmoids."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.families.decoder import LAYER, TensorName, norms
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "kolibri1"
ARCHITECTURE = "Kolibri1"


def _keys(attention_norm: str, mlp_norm: str, correction: str, experts: tuple[TensorName, ...]):
    return (
        *decoder.ENDS,
        *decoder.PRE_NORMS,
        *norms("layers/", LAYER, {"attention_out_norm": attention_norm, "mlp_out_norm": mlp_norm}),
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
FIELDS = decoder.EXPERTS | {
    "experts": COUNT,
    "shared_expert_ffn": "shared_expert_intermediate_size",
    "normalize_top_k": "norm_topk_prob",
}  # that are an entry each


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | ({COUNT: hf["num_experts"]} if "num_experts" in hf else {}) | hf
    positive(hf, "sliding_window")  # which transformers asks for where no layer has one too
    windows = layer_types.read(hf, lambda layer: (layer + 1) % 5 != 0)
    own = {
        **windows,
        "unrotated_layers": layer_types.outside(hf, windows),
        **decoder.read_fields(hf, FIELDS),
        "norms": "both",
        "qk_norm": "head",
        "router_sigmoid": True,
        "router_correction": True,
        "router_corrects_logits": True,
    }
    return decoder.to_config({"intermediate_size": own["expert_ffn"]} | hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    count = "num_experts" if "num_experts" in (base or {}) else COUNT
    own = layer_types.write(config, base) | decoder.write_fields(config, FIELDS | {"experts": count})
    if base is None:
        own["sliding_window"] = config.sliding_window or DEFAULTS["sliding_window"]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
