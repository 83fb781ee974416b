"""Add tokens to the vocabulary of a model.

    python -m jaxrl_llm add_tokens --model=Qwen/Qwen3-0.6B --tokens='<think>,</think>' --output=models/thinking
    python -m jaxrl_llm.train --config=configs/sft.py --config.model.path=models/thinking

Each is one token of the tokenizer from then on, and has a row in the embedding and in the head, the mean of those that
were there, from which training starts. The folder holds the model in its own storage type, with its tokenizer.
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.schema import DTYPES
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.files.new_tokens import with_tokens
from jaxrl_llm.models.model import describe, load_model, save_hf
from jaxrl_llm.training.logging.console import stderr_console, waiting

FLAGS = (
    Setting("model", "", "Folder, hub id, URL or `embedded:<name>` of the model."),
    Setting("tokens", (), "Tokens to add, `<think>,</think>`."),
    Setting(
        "special",
        False,
        "Leave them out of decoded completions, as marks of turns are; rewards and stop strings see the others.",
        bool,
    ),
    Setting("output", "", "Folder to write."),
    Setting("overwrite", False, "Replace a model that the folder already holds.", bool),
)


def add_tokens(
    model: str, tokens: Sequence[str], output: str | Path, special: bool = False, overwrite: bool = False
) -> Path:
    """Writes the model with more tokens as a Hugging Face folder and returns its path; see `new_tokens.with_tokens`.

    Raises ConfigError as that, `load_model` and `save_hf` do.
    """
    entries = describe(model).hf_config or {}
    named = str(entries.get("dtype") or entries.get("torch_dtype") or "").removeprefix("torch.")
    mesh = make_mesh(data=1, fsdp=-1)
    with jax.set_mesh(mesh):
        loaded = load_model(model, "float32", named if named in DTYPES else "float32", mesh)
        save_hf(with_tokens(loaded, tokens, special), output, overwrite=overwrite)
    return Path(output).expanduser()


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    options = load_options(argv, __doc__ or "", FLAGS)
    for name in ("model", "tokens", "output"):
        if not options[name]:
            raise ConfigError(f"--{name} is missing; write --{name}={name.upper()}")
    with waiting(f"reading {options['model']}", stderr_console(), lines=False):
        print(add_tokens(**options))
