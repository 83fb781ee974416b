"""SantaCoder and StarCoder 1 (arXiv 2301.03988, 2305.06161): GPT-2 whose heads share one key and one value."""

from typing import Any

from jaxrl_llm.models.families import gpt2
from jaxrl_llm.models.families.decoder import maps
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gpt_bigcode"
# The tensors of transformers' class for steps have other names than the table.
ARCHITECTURE = {"lm": "GPTBigCodeForCausalLM", "score": "GPTBigCodeForSequenceClassification", "step": ""}
LAYER = "transformer.h.{layer}."
KEYS = (
    *gpt2.around("transformer."),
    *maps("layers/attention", f"{LAYER}attn", {"qkv": "c_attn", "o": "c_proj"}),
    *maps("layers/mlp", f"{LAYER}mlp", {"up": "c_fc", "down": "c_proj"}),
)
DEFAULTS = {**gpt2.DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "multi_query": True}  # for entries that are left out
unused_tensors = gpt2.unused_tensors


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, gpt2.NAMES)
    shared = bool(hf["multi_query"])
    hf |= {"num_key_value_heads": 1 if shared else None, "head_dim": None}
    return gpt2.read(hf, ARCHITECTURE, overrides, {"joint_qkv": "blocks" if shared else "heads"})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"multi_query": config.joint_qkv == "blocks"}
    found = gpt2.write(config, base, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
    return found | {"num_key_value_heads": config.kv_heads}  # as transformers writes it, though it does not read it
