"""Ling 3 (inclusionAI): Kimi delta attention, whose decays have a floor, and in the last layer of each group latent
attention with a gate for each head; experts as DeepSeek-V3."""

import functools
from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, kimi_linear, olmo_hybrid
from jaxrl_llm.models.families.decoder import LAYER, TensorName, maps
from jaxrl_llm.models.families.entries import (
    computed,
    dense_before_sparse,
    mixer_types,
    mixers_of,
    mlp_types,
    positive,
    refuse,
    renamed,
)
from jaxrl_llm.models.mixers.kimi_delta import WideKimiDelta
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "bailing_hybrid"
ARCHITECTURE = "BailingHybrid"
MIXERS = {"linear_attention": WideKimiDelta, "full_attention": LatentAttention}


def _keys(words: dict[str, str], experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    """The table of files in which parts of names have other `words` than in transformers' class."""
    net = f"{LAYER}self_attn"
    gate = f"{net}.forget_gate"
    common = (
        *decoder.ENDS,
        *decoder.PRE_NORMS,
        *deepseek_v3.LATENT_KEYS,
        *maps("layers/latent", net, {"gate": "g_proj"}),
        *olmo_hybrid.conv_keys(net),
        *maps("layers/delta", net, {"z": "g_proj", "f": "forget_gate.f_proj"}),
        TensorName("layers/delta/log_decay", f"{gate}.A_log"),
        TensorName("layers/delta/step_bias", f"{gate}.dt_bias"),
        *decoder.FEED_FORWARD,
        *deepseek_v3.beside_experts("mlp"),
    )

    def named(name: str) -> str:
        return functools.reduce(lambda name, pair: name.replace(*pair), words.items(), name)

    return (*(key._replace(tensor=named(key.tensor)) for key in common), *experts)


WORDS = {
    "embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense", "forget_gate.": "",
    "e_score_correction_bias": "expert_bias",
}  # fmt: skip
KEYS = _keys(WORDS, decoder.experts("mlp"))
MODULE_KEYS = _keys({}, decoder.stacked_experts("mlp"))
OTHER_KEYS = (MODULE_KEYS,)
# The entries of this family, by the names that DeepSeek-V3 has for them, which files may have too.
NAMES = kimi_linear.NAMES | {"max_position_embeddings": "model_max_length"}
# Fields of delta attention that are an entry each, by the name that transformers gives it and that of the hub.
SIZES = {
    "delta_key_heads": ("linear_num_heads", "num_attention_heads"),
    "delta_key_dim": ("linear_head_dim", "head_dim"),
    "delta_conv": ("linear_conv_kernel_dim", "short_conv_kernel_size"),
}
DEFAULTS = {
    **{name: deepseek_v3.DEFAULTS[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
    "q_lora_rank": None,
    "v_head_dim": 128,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "layer_group_size": 6,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "moe_intermediate_size": 768,
    "num_experts": 512,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 6_000_000.0,
}  # for entries that are left out


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries by their names here, with those that are left out."""
    return DEFAULTS | renamed(hf, NAMES | {"num_local_experts": "num_experts"})


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_defaults(hf)
    computed(hf, {"tie_word_embeddings": False})
    every = positive(hf, "layer_group_size")
    sizes = {field: positive(hf, names[names[0] not in hf]) for field, names in SIZES.items()}
    if sizes["delta_conv"] < 2:
        refuse("short_conv_kernel_size", sizes["delta_conv"], "numbers from 2")
    own = sizes | {
        "mixers": mixers_of(hf, MIXERS, lambda i: "linear_attention" if (i + 1) % every else "full_attention"),
        "delta_value_heads": sizes["delta_key_heads"],
        "delta_value_dim": sizes["delta_key_dim"],
        "delta_floor": kimi_linear.floor_of("kda_lower_bound", hf["kda_lower_bound"] if hf["kda_safe_gate"] else None),
        "attention_gate": "heads",
    }
    theirs = {name: hf[entry] for name, entry in kimi_linear.NAMES.items()}
    theirs["first_k_dense_replace"] = dense_before_sparse(hf, hf["first_k_dense_replace"] or 0)
    return deepseek_v3.read({**hf, **theirs, "rope_interleave": True}, ARCHITECTURE, overrides, own)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    given = base or {}
    names = {name: entry for name, entry in NAMES.items() if name not in given}
    own = renamed(deepseek_v3.entries(config, base), names)
    del own["rope_interleave"]
    own["head_dim"] = given.get("head_dim", own["head_dim"])
    for field, (entry, plain) in SIZES.items():
        own[plain if base is not None and entry not in base else entry] = getattr(config, field)
    own |= {"kda_safe_gate": config.delta_floor is not None}
    own |= {"kda_lower_bound": config.delta_floor} if config.delta_floor is not None else {}
    if base is None:
        own["layer_types"] = mixer_types(config, MIXERS)
        own["mlp_layer_types"] = mlp_types(config)
    hf = decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_defaults)
    return hf if base is not None else renamed(hf, NAMES)
