from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from jaxrl_llm.models.files.hf import EMBEDDED

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@pytest.fixture(scope="session")
def tokenizer_folder():
    """A byte is its own id; then come `<|pad|>` 256, `<|end|>` 257, `<|system|>`, `<|user|>` and `<|assistant|>`."""
    return EMBEDDED / "sort"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def special_tokenizer(tokenizer_folder) -> Any:
    """One that, like Llama's, opens every text with a BOS (id 261), and, like T5's, ends it with the EOS (257)."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 261), ("<|end|>", 257)]
    )
    return tokenizer


@pytest.fixture
def chatml_tokenizer(tokenizer_folder) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML
    return tokenizer
