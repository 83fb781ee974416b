"""Llama 4's text part: attention in chunks, but none and no rotary positions in every fourth layer; sigmoid routers."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "llama4_text"
ARCHITECTURE = "Llama4"
BLOCK = f"{LAYER}feed_forward"
KEYS = (
    *decoder.ENDS,
    *decoder.PRE_NORMS,
    *decoder.ATTENTION,
    *decoder.maps("layers/mlp", BLOCK, decoder.GATED),
    *decoder.maps("layers/mlp/shared", f"{BLOCK}.shared_expert", decoder.GATED),
    TensorName("layers/mlp/router/kernel", f"{BLOCK}.router.weight", transpose=True),
    TensorName("layers/mlp/experts/gate/kernel", f"{BLOCK}.experts.gate_up_proj", columns=True),
    TensorName("layers/mlp/experts/up/kernel", f"{BLOCK}.experts.gate_up_proj", columns=True),
    TensorName("layers/mlp/experts/down/kernel", f"{BLOCK}.experts.down_proj"),
)
CHUNKS = {"sliding": "chunked_attention", "size": "attention_chunk_size"}
DEFAULTS = {
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "router_aux_loss_coef": 0.001,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_bias": False,
}  # for entries that are left out
FIELDS = {
    **mixtral.FIELDS,
    **decoder.ATTENTION_BIAS,
    "qk_rms": "use_qk_norm",
    "ffn": "intermediate_size_mlp",
    "expert_ffn": "intermediate_size",
}  # that are an entry each
THETA = 500_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    layers, unrotated = positive(hf, "num_hidden_layers"), layer_types.read_unrotated(hf)
    step, sparse = positive(hf, "interleave_moe_layer_step"), hf.get("moe_layers")
    dense = tuple(layer for layer in range(layers) if ((layer + 1) % step if sparse is None else layer not in sparse))
    if len(dense) == layers:
        refuse("moe_layers", sparse, "lists with some of the layers")
    chunk = hf["attention_chunk_size"]
    windows = layer_types.read(hf, lambda layer: chunk is not None and layer not in unrotated, **CHUNKS)
    growth = number("attn_scale", hf["attn_scale"]) if hf["attn_temperature_tuning"] else 0.0
    own = {
        **windows,
        "sliding_chunks": bool(windows),
        "unrotated_layers": unrotated,
        "rope_interleaved": True,
        "query_growth": growth,
        "query_growth_every": positive(hf, "floor_scale") if growth else 0,
        **decoder.read_fields(hf, FIELDS),
        "shared_expert_ffn": positive(hf, "intermediate_size"),
        "dense_layers": dense,
        "router_sigmoid": True,
        "router_on_inputs": True,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **layer_types.write(config, base, **CHUNKS),
        **decoder.write_fields(config, FIELDS),
        "attn_temperature_tuning": bool(config.query_growth),
    }
    if config.query_growth:
        own |= {"attn_scale": config.query_growth, "floor_scale": config.query_growth_every}
    if base is None:
        own |= layer_types.write_unrotated(config)
        own["moe_layers"] = [layer for layer in range(config.layers) if layer not in config.dense_layers]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
