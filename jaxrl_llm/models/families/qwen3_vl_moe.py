"""Qwen3-VL's mixtures of experts (Qwen3-VL-30B-A3B): qwen3_moe's decoder with the encoder of qwen3_vl."""

from typing import Any

from jaxrl_llm.models.families import decoder, llava, qwen3, qwen3_moe, qwen3_vl, qwen_vl
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_vl_moe"
ARCHITECTURE = {"lm": "Qwen3VLMoeForConditionalGeneration", "score": "Qwen3VLMoeForSequenceClassification"}
EXPERTS = f"{LAYER}mlp.experts."
# On the hub the experts' matrices are stacked, `[E,D,2F]` and `[E,F,D]`; version 5 of transformers writes its own,
# `[E,2F,D]` and `[E,D,F]`, under the same names.
KEYS = llava.as_modules(
    (
        *qwen3.KEYS,
        TensorName("layers/mlp/router/kernel", f"{LAYER}mlp.gate.weight", transpose=True),
        TensorName("layers/mlp/experts/gate/kernel", f"{EXPERTS}gate_up_proj", columns=True),
        TensorName("layers/mlp/experts/up/kernel", f"{EXPERTS}gate_up_proj", columns=True),
        TensorName("layers/mlp/experts/down/kernel", f"{EXPERTS}down_proj"),
    ),
    qwen3_vl.TOWER_KEYS,
)
MODULE_KEYS = llava.as_modules((*qwen3.KEYS, *decoder.stacked_experts("mlp")), qwen3_vl.TOWER_KEYS)
OTHER_KEYS = (MODULE_KEYS,)
FAMILY = qwen3_vl.FAMILY._replace(
    model_type=MODEL_TYPE,
    architecture=ARCHITECTURE,
    text={
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
    },
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    # Weights of experts always add up to 1, and what the decoder's entries say of tied embeddings is not read.
    fixed = {"norm_topk_prob": True, "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False))}
    text = qwen_vl.text_of(hf, FAMILY) | fixed
    own = {"qk_norm": "head", **decoder.attention_biases(text), **qwen3_moe.experts(text)}
    return qwen_vl.config_of(hf, text, FAMILY, qwen3_vl.encoder_of(hf, text, FAMILY), own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, **qwen3_moe.expert_entries(config, base)}
    return qwen_vl.entries_of(config, base, FAMILY, own, qwen3_vl.encoder_entries(config))
