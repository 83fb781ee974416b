"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every other layer, experts with biases, clipped swiglu.

The experts' matrices are read from MXFP4 or from floats, and written as floats.
"""

import functools
from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, mixtral, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOss"
EXPERTS = f"{LAYER}mlp.experts."
KEYS = (
    *decoder.ENDS,
    *decoder.PRE_NORMS,
    *decoder.ATTENTION,
    TensorName("layers/attention/sinks", f"{LAYER}self_attn.sinks"),
    *linear("layers/mlp/router", f"{LAYER}mlp.router"),
    TensorName("layers/mlp/experts/gate/kernel", f"{EXPERTS}gate_up_proj", interleaved=True),
    TensorName("layers/mlp/experts/gate/bias", f"{EXPERTS}gate_up_proj_bias", interleaved=True),
    TensorName("layers/mlp/experts/up/kernel", f"{EXPERTS}gate_up_proj", interleaved=True),
    TensorName("layers/mlp/experts/up/bias", f"{EXPERTS}gate_up_proj_bias", interleaved=True),
    TensorName("layers/mlp/experts/down/kernel", f"{EXPERTS}down_proj"),
    TensorName("layers/mlp/experts/down/bias", f"{EXPERTS}down_proj_bias"),
)
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
with_rope = functools.partial(rotary.with_default, YARN)
DEFAULTS = {
    "num_local_experts": 128,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
    "attention_bias": True,
}  # for entries that are left out
FIELDS = mixtral.FIELDS | decoder.ATTENTION_BIAS | {"expert_ffn": "intermediate_size"}  # that are an entry each
THETA = 150_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_rope(DEFAULTS | hf)
    own = {
        **decoder.read_fields(hf, FIELDS),
        "attention_sinks": True,
        **layer_types.read(hf, lambda layer: layer % 2 == 0),
        "expert_bias": True,
        "swiglu_limit": number("swiglu_limit", hf["swiglu_limit"], above=0),
        "swiglu_alpha": number("swiglu_alpha", hf["swiglu_alpha"], above=0),
        "normalize_top_k": True,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **layer_types.write(config, base),
        **decoder.write_fields(config, FIELDS),
        "swiglu_limit": config.swiglu_limit,
    }
    own |= {"swiglu_alpha": config.swiglu_alpha} if base is None else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_rope)
