"""DeepSeek-V3 (arXiv 2412.19437), and models of its shape such as Moonlight: latent attention, experts in groups."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, TensorName, maps, norms
from jaxrl_llm.models.families.entries import first_layers, positive, refuse
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "deepseek_v3"
ARCHITECTURE = "DeepseekV3"


def beside_experts(
    block: str, correction: str = "gate.e_score_correction_bias", shared: str = "shared_experts"
) -> tuple[TensorName, ...]:
    """The keys of the router's correction and of the experts that every token uses."""
    return (
        TensorName("layers/mlp/correction", f"{LAYER}{block}.{correction}"),
        *maps("layers/mlp/shared", f"{LAYER}{block}.{shared}", decoder.GATED),
    )


LATENT_KEYS = (
    *maps("layers/latent", f"{LAYER}self_attn", {
        "q": "q_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj",
        "o": "o_proj",
    }),
    *norms("layers/latent/", f"{LAYER}self_attn.", {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}),
)  # fmt: skip
KEYS, OTHER_KEYS = decoder.expert_tables(
    (*decoder.ENDS, *decoder.PRE_NORMS, *LATENT_KEYS, *decoder.FEED_FORWARD, *beside_experts("mlp"))
)
# The fields that are an entry each.
LATENT_FIELDS = {
    "latent_size": "kv_lora_rank",
    "rotary_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
    "rope_interleaved": "rope_interleave",
    **decoder.ATTENTION_BIAS,
}
EXPERT_FIELDS = {
    "expert_ffn": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "router_groups": "n_group",
    "router_top_groups": "topk_group",
    "normalize_top_k": "norm_topk_prob",
    "routed_scale": "routed_scaling_factor",
}
DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # for entries that are left out


def experts(hf: dict[str, Any], best: int = 2) -> dict[str, Any]:
    """The ModelConfig fields of the experts, all of whose entries are there; a group is rated by its `best` ones."""
    fields = decoder.read_fields(hf, EXPERT_FIELDS)
    groups, dense = fields["router_groups"], first_layers(hf, "first_k_dense_replace")
    if fields["experts"] % groups or fields["router_top_groups"] > groups:
        refuse("n_group", groups, f"divisors of n_routed_experts = {fields['experts']}, from topk_group on")
    if groups > 1 and fields["experts"] // groups < best:
        refuse("n_group", groups, f"numbers up to n_routed_experts / {best}, as {best} experts rate a group")
    if fields["experts_per_token"] > fields["experts"] // groups * fields["router_top_groups"]:
        refuse("num_experts_per_tok", fields["experts_per_token"], "up to the experts of topk_group groups")
    return {
        **fields,
        "shared_expert_ffn": fields["expert_ffn"] * positive(hf, "n_shared_experts"),
        "dense_layers": dense,
        "router_sigmoid": True,
        "router_correction": True,
    }


def expert_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `experts` reads; without a `base` also that nothing predicts further tokens."""
    further = {"num_nextn_predict_layers": 0} if base is None else {}
    return {
        **further,
        **decoder.write_fields(config, EXPERT_FIELDS),
        "n_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
        "first_k_dense_replace": len(config.dense_layers),
    }


def read(
    hf: dict[str, Any], family: str, overrides: dict[str, Any], fields: dict[str, Any] | None = None
) -> ModelConfig:
    """The ModelConfig of a `family` with the shape of DeepSeek-V3, all of whose entries are there.

    It has no experts where `n_routed_experts` is null. `fields` are those in which it differs.
    """
    layers, heads, fields = positive(hf, "num_hidden_layers"), positive(hf, "num_attention_heads"), fields or {}
    if hf.get("num_key_value_heads") not in (None, heads):
        refuse("num_key_value_heads", hf["num_key_value_heads"], f"num_attention_heads = {heads}")
    latent = decoder.read_fields(hf, LATENT_FIELDS)
    own = {
        **latent,
        **(experts(hf, fields.get("router_group_best", 2)) if hf["n_routed_experts"] is not None else {}),
        "mixers": (LatentAttention,) * layers,
        "query_rank": 0 if hf["q_lora_rank"] is None else positive(hf, "q_lora_rank"),
        **fields,
    }
    head_dim = positive(hf, "qk_nope_head_dim") + latent["rotary_head_dim"]
    return decoder.to_config({**hf, "head_dim": head_dim, "num_key_value_heads": heads}, family, own, overrides)


def entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `read` reads."""
    return {
        **decoder.write_fields(config, LATENT_FIELDS),
        **(expert_entries(config, base) if config.experts else {}),
        "q_lora_rank": config.query_rank or None,
        "qk_nope_head_dim": config.head_dim - config.rotated_size,
        "head_dim": config.rotated_size,
    }


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(DEFAULTS | hf, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, entries(config, base))
