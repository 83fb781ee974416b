"""LongCat-Flash (arXiv 2509.01322): layers of two halves, each latent attention and a dense feed-forward, and experts
beside both, some of which give their inputs as they are."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import computed, number, positive, renamed, unset
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.shortcut import TwoLatentAttentions

MODEL_TYPE = "longcat_flash"
ARCHITECTURE = "LongcatFlash"
HALVES = ("first", "second")
ROUTER = "router.classifier"


def _of_half(number: int) -> tuple[TensorName, ...]:
    """The keys of a half of each layer: those of a layer of DeepSeek-V3, in lists of two."""
    maps = (*deepseek_v3.LATENT_KEYS, *decoder.FEED_FORWARD)
    words = {"self_attn.": f"self_attn.{number}.", "mlp.": f"mlps.{number}."}
    named = [
        key._replace(tensor=key.tensor.replace(word, own)) for key in maps for word, own in words.items()
        if word in key.tensor
    ]  # fmt: skip
    named += [key._replace(tensor=key.tensor.replace(".weight", f".{number}.weight")) for key in decoder.PRE_NORMS]
    return tuple(key._replace(path=key.path.replace("layers/", f"layers/{HALVES[number]}/")) for key in named)


KEYS = (
    *decoder.ENDS,
    *_of_half(0),
    *_of_half(1),
    TensorName("layers/mlp/correction", f"{decoder.LAYER}mlp.router.e_score_correction_bias"),
    *decoder.experts("mlp", router=ROUTER),
)
UNREAD = ("model.mtp.",)  # of multi-token prediction
NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "num_experts_per_tok": 12,
    "routed_scaling_factor": 6.0,
}  # for entries that are left out
# What entries of DeepSeek-V3 would say of it, which it does not have.
ALIKE = {
    "rope_interleave": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0,
    "norm_topk_prob": False,
}  # fmt: skip
# The only values of entries that are computed.
COMPUTED = {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}


def unused_tensors(config: ModelConfig) -> set[str]:
    """Matrices of experts that give their inputs, which transformers writes."""
    numbers = range(config.experts, config.routed_experts)
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{word}_proj.weight"
        for layer in range(config.layers) for expert in numbers for word in ("gate", "up")
    }  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    unset(hf, "router_bias")
    size = positive(hf, "qk_nope_head_dim") + positive(hf, "qk_rope_head_dim")
    given = {entry: value for entry, value in hf.items() if value is not None}
    computed(given, COMPUTED | {"qk_head_dim": size, "head_dim": hf["qk_rope_head_dim"]})
    width = positive(hf, "hidden_size")
    own = {
        "mixers": (TwoLatentAttentions,) * positive(hf, "num_hidden_layers"),
        "latent_scales": tuple((width / positive(hf, rank)) ** 0.5 for rank in ("q_lora_rank", "kv_lora_rank")),
        "zero_experts": int(number("zero_expert_num", hf["zero_expert_num"] or 0)),
        "shared_expert_ffn": 0,
        "shortcut_experts": True,
        "router_sigmoid": False,
    }
    return deepseek_v3.read(hf | ALIKE, ARCHITECTURE, overrides, own)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = deepseek_v3.entries(config, {}) | {"zero_expert_num": config.zero_experts}
    own = {entry: value for entry, value in own.items() if entry not in ALIKE}
    own |= {"qk_head_dim": config.head_dim} if base is None or base.get("qk_head_dim") else {}
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
