"""Hunyuan 4 (Tencent): DeepSeek-V3.2 with streams of hidden states that are not mixed (models/hyper_connections.py),
attention sinks, gates of attention's outputs, experts that are clipped, and indexers that serve several layers.

The head is one of 32 bits in transformers, which `model.fp32_head` says here. Transformers rotates the two halves of
dimensions together, vLLM and SGLang neighbours: the entry `rope_interleave`, which the former does not read, is true
for these.
"""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, deepseek_v32, glm_moe_dsa
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import computed, dense_layers, number
from jaxrl_llm.models.mixers.sparse_attention import SharedSparseAttention, SparseLatentAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "hy_v4"
ARCHITECTURE = "HYV4"


def _keys(attention: str, ffn: str, head: str, sinks: str, gate: str, gates: str) -> tuple[TensorName, ...]:
    """The table of files in which the names of streams begin so, and in which sinks, and the gates of attention and of
    feed-forwards have these."""
    streams = {"layers/mixer_streams": LAYER + attention, "layers/mlp_streams": LAYER + ffn, "streams": head}
    return (
        *decoder.ENDS,
        *decoder.PRE_NORMS,
        *deepseek_v3.LATENT_KEYS,
        *deepseek_v32.INDEXER_KEYS,
        *decoder.linear("layers/latent/gate", f"{LAYER}self_attn.{gate}"),
        TensorName("layers/latent/sinks", f"{LAYER}self_attn.{sinks}"),
        *(
            key._replace(tensor=key.tensor.replace("gate_proj", gates))
            for key in (*decoder.FEED_FORWARD, *deepseek_v3.beside_experts("mlp"))
        ),
        *decoder.stacked_experts("mlp"),
        *(
            key
            for path, start in streams.items()
            for key in (
                TensorName(f"{path}/weights/proj/kernel", f"{start}fn", transpose=True),
                TensorName(f"{path}/weights/scale", f"{start}scale"),
                TensorName(f"{path}/weights/shift", f"{start}base"),
            )
        ),
    )


KEYS = _keys(
    "hc_attn_layer.hc_pre.hc_", "hc_mlp_layer.hc_pre.hc_", "model.hc_head.hc_head_", "learnable_sink_param",
    "linear_gate", "gate_proj",
)  # fmt: skip
MODULE_KEYS = _keys("attn_hc.", "ffn_hc.", "model.hc_head.hc_", "sinks", "gate_proj", "gate_proj")
# And what transformers writes, which renames more than it has renamed.
OTHER_KEYS = (
    MODULE_KEYS,
    _keys(
        "hc_pre.hc_attn_layer.hc_", "hc_pre.hc_mlp_layer.hc_", "model.hc_pre.hc_head.hc_head_", "learnable_sink_param",
        "linear_gate", "linear_gate",
    ),
)  # fmt: skip
UNREAD = ("model.mtp_layers.",)  # of multi-token prediction
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.006,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "hc_mult": 4,
    "hc_magnitude": 2.0,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
}  # for entries that are left out
FIELDS = {"hyper_streams": "hc_mult", "hyper_scale": "hc_magnitude", "hyper_eps": "hc_eps"}  # that are an entry each
# Every head has keys of its own whatever the number in files, and layers may be dense in any order. Without a list of
# them, every fourth indexer from the second layer on serves the three layers behind it.
UNREAD_ENTRIES = {
    "num_key_value_heads": None,
    "mlp_layer_types": None,
    "first_k_dense_replace": 0,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 2,
    "index_topk_pattern": None,
}
FIXED = {"enable_ihc": True, "gating_type": "elementwise"}  # entries of published files


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    computed(hf, FIXED)
    dense, interleaved = dense_layers(hf, 1), bool(hf.get("rope_interleave", False))
    hf |= UNREAD_ENTRIES
    shared, layers = glm_moe_dsa.shared_indexers(hf), range(hf["num_hidden_layers"])
    fields = {
        **decoder.read_fields(hf, FIELDS),
        "dense_layers": dense,
        "shared_indexers": shared,
        "mixers": tuple(SharedSparseAttention if layer in shared else SparseLatentAttention for layer in layers),
        "rope_interleaved": interleaved,
        "index_interleaved": interleaved,
        "index_rotates_last": True,
        "index_norm_eps": None,
        "attention_gate": "numbers",
        "attention_sinks": True,
        "swiglu_limit": number("swiglu_limit", hf["swiglu_limit"], above=0),
        "swiglu_alpha": 1.0,
        "swiglu_offset": 0.0,
    }
    return deepseek_v32.read(hf | {"rope_interleave": interleaved}, ARCHITECTURE, overrides, fields)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    given = base or {}
    own = glm_moe_dsa.entries(config, base) | decoder.write_fields(config, FIELDS)
    own["swiglu_limit"] = config.swiglu_limit
    for entry in ("first_k_dense_replace", "num_nextn_predict_layers"):
        own.pop(entry, None)
    if config.rope_interleaved or "rope_interleave" in given:
        own["rope_interleave"] = config.rope_interleaved
    own["num_key_value_heads"] = given.get("num_key_value_heads", config.kv_heads)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
