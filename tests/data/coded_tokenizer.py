"""A tokenizer with Python code, as folders of the hub may bring it."""

import json
import shutil
from pathlib import Path

from jaxrl_llm.models.files.hf import EMBEDDED

CODE = """
from transformers import PreTrainedTokenizerFast


class CodedTokenizer(PreTrainedTokenizerFast):
    pass
"""


def coded_folder(folder: Path) -> Path:
    """The folder, after `embedded:sort` was written to it as a Seed-OSS, for whose tokenizers transformers has no class
    of its own, with such a class in a file."""
    shutil.copytree(EMBEDDED / "sort", folder, dirs_exist_ok=True)
    (folder / "coded_tokenizer.py").write_text(CODE)
    changes = {
        "config.json": {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"]},
        "tokenizer_config.json": {
            "tokenizer_class": "CodedTokenizer",
            "auto_map": {"AutoTokenizer": [None, "coded_tokenizer.CodedTokenizer"]},
        },
    }
    for name, entries in changes.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | entries))
    return folder


def kind(tokenizer) -> str:
    """The name of the tokenizer's class."""
    return type(tokenizer).__name__
