"""DeepSeek-V2 (arXiv 2405.04434): latent attention as DeepSeek-V3, and experts by a softmax, whose groups are rated by
their best one."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.families.entries import refuse, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "deepseek_v2"
ARCHITECTURE = "DeepseekV2"
KEYS, OTHER_KEYS = deepseek_v3.KEYS, deepseek_v3.OTHER_KEYS
DEFAULTS = {
    **deepseek_v3.DEFAULTS,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}  # for entries that are left out
METHODS = ("greedy", "group_limited_greedy")
UNGROUPED = {"n_group": 1, "topk_group": 1}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    if hf["topk_method"] not in METHODS:
        refuse("topk_method", hf["topk_method"], " and ".join(METHODS))
    unset(hf, "norm_topk_prob", "mlp_bias")
    hf |= UNGROUPED if hf["topk_method"] == "greedy" else {}
    fields = {"router_sigmoid": False, "router_correction": False, "router_group_best": 1}
    return deepseek_v3.read(hf, ARCHITECTURE, overrides, fields)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = deepseek_v3.entries(config, base)
    if config.router_groups == 1:
        own |= {entry: base[entry] for entry in UNGROUPED if base is not None and entry in base}
    if base is None:
        own |= {"topk_method": METHODS[config.router_groups > 1]}
    hf = decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
    without = {"rope_interleave", "num_nextn_predict_layers"} - {*(base or ())}
    return {entry: value for entry, value in hf.items() if entry not in without}
