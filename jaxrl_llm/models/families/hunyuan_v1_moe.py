"""Hunyuan-A13B: Hunyuan's dense shape with experts in every layer, beside a feed-forward that every token uses."""

from typing import Any

from jaxrl_llm.models.families import decoder, hunyuan_v1_dense
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "hunyuan_v1_moe"
ARCHITECTURE = "HunYuanMoEV1"


def _keys(experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *(key for key in hunyuan_v1_dense.KEYS if not key.path.startswith("layers/mlp/")),
        *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.shared_mlp", decoder.GATED),
        *experts,
    )


KEYS = _keys(decoder.experts("mlp", router="gate.wg"))
OTHER_KEYS = (_keys(decoder.stacked_experts("mlp", "gate.wg")),)
DEFAULTS = hunyuan_v1_dense.DEFAULTS | {"num_experts": 1, "moe_topk": 1}
EXPERTS = {"experts": "num_experts", "experts_per_token": "moe_topk"}  # the fields, and their entries


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    for entry in EXPERTS.values():  # published files have one for each layer
        if isinstance(hf[entry], list | tuple):
            if not hf[entry] or any(x != hf[entry][0] for x in hf[entry]):
                refuse(entry, hf[entry], "the same number in every layer")
            hf[entry] = hf[entry][0]
    own = hunyuan_v1_dense.own_fields(hf) | {
        **decoder.read_fields(hf, EXPERTS | {"expert_ffn": "intermediate_size"}),
        "shared_expert_ffn": positive(hf, "intermediate_size"),
        "normalize_top_k": True,
    }
    return decoder.to_config(hunyuan_v1_dense.stretched(hf), ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = hunyuan_v1_dense.own_entries(config) | decoder.write_fields(config, EXPERTS)
    for entry in EXPERTS.values():
        if isinstance((base or {}).get(entry), list):
            own[entry] = [own[entry]] * len((base or {})[entry])
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=hunyuan_v1_dense.stretched)
