"""Post-training of language models in JAX: reinforcement learning, preferences and supervised fine-tuning.

The functions below are the whole Python interface; each is imported when it is first used.

    config = jaxrl_llm.default_config()
    result = jaxrl_llm.train(config, train_dataset=rows, rewards=function)
    texts = jaxrl_llm.generate(result.model, prompts)
"""

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.commands.compare import compare as compare
    from jaxrl_llm.commands.evaluate import evaluate as evaluate
    from jaxrl_llm.commands.evaluate import evaluate_responses as evaluate_responses
    from jaxrl_llm.commands.export import export as export
    from jaxrl_llm.commands.generate import generate as generate
    from jaxrl_llm.config import ConfigError as ConfigError
    from jaxrl_llm.config import default as default_config
    from jaxrl_llm.config.version import __version__ as __version__
    from jaxrl_llm.models.model import Model as Model
    from jaxrl_llm.models.model import load_model as load_model
    from jaxrl_llm.models.model import save_adapter as save_adapter
    from jaxrl_llm.models.model import save_hf as save_hf
    from jaxrl_llm.train import train as train

# XLA's log holds what is for its developers, such as an alarm about compilations of more than two minutes: errors come
# as exceptions. It is read once, when jax is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the advice is to install torch

__all__ = (
    "ConfigError",
    "Model",
    "compare",
    "default_config",
    "evaluate",
    "evaluate_responses",
    "export",
    "generate",
    "load_model",
    "save_adapter",
    "save_hf",
    "train",
)

if sys.argv[:1] == ["-m"] and "jaxrl_llm.train" in sys.orig_argv:  # whose imports come before its first line
    from jaxrl_llm.config.starting import STARTED, imports

    STARTED.enter_context(imports())

# The module of each name, and its name there.
_ORIGIN = {
    "ConfigError": ("config", "ConfigError"),
    "__version__": ("config.version", "__version__"),
    "Model": ("models.model", "Model"),
    "compare": ("commands.compare", "compare"),
    "default_config": ("config", "default"),
    "evaluate": ("commands.evaluate", "evaluate"),
    "evaluate_responses": ("commands.evaluate", "evaluate_responses"),
    "export": ("commands.export", "export"),
    "generate": ("commands.generate", "generate"),
    "load_model": ("models.model", "load_model"),
    "save_adapter": ("models.model", "save_adapter"),
    "save_hf": ("models.model", "save_hf"),
    "train": ("train", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _ORIGIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _ORIGIN[name]
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `jaxrl_llm.train` the function: the import system would replace it by the submodule of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "train" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
