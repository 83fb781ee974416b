"""Tiny random models of every family, made by transformers, which is the oracle of these tests."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # with these, of the 8 waves some are kept, some slowed, some between
}
VARIANTS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama3": lambda: LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3_ROPE, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE | {"num_key_value_heads": 4}, head_dim=16, tie_word_embeddings=True),
    "qwen3-biases": lambda: Qwen3Config(
        **SHAPE | {"num_key_value_heads": 1}, head_dim=8, attention_bias=True, rms_norm_eps=1e-3
    ),
}


def make_oracle(variant: str, seed: int = 0):
    """A random transformers model in which biases and norms are random too, so that none can be left out unnoticed."""
    torch.manual_seed(seed)
    oracle = AutoModelForCausalLM.from_config(VARIANTS[variant](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return oracle


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def oracle(request):
    return make_oracle(request.param)


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    """The oracle's folder, as transformers writes it."""
    path = tmp_path_factory.mktemp("oracle")
    oracle.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """An untied llama, for the tests that do not depend on the family."""
    path = tmp_path_factory.mktemp("llama")
    make_oracle("llama").save_pretrained(path)
    return path
