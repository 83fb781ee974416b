"""The models that the recipes train, and what a recipe's argument says of them."""

from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.config import ConfigError, default


@dataclass(frozen=True)
class Model:
    """A model of the hub, before (`base`) and after (`chat`) its makers' post-training."""

    base: str
    chat: str
    base_template: str | None  # chat template for the base model; None: its tokenizer has one
    template_kwargs: str = ""  # of the chat model: answers without a chain of thought in tags
    lora: bool = False  # adapters unless the argument says otherwise: one accelerator of 80 GB does


MODELS = {
    "smollm2-135m": Model("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct", "chatml"),
    "smollm2-1.7b": Model("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "chatml"),
    "qwen3-0.6b": Model("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B", None, "enable_thinking=False"),
    "qwen3-1.7b": Model("Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-1.7B", None, "enable_thinking=False"),
    "qwen3-8b": Model("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B", None, "enable_thinking=False", lora=True),
    "llama-3.2-1b": Model("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", "llama3"),
    "gemma-3-1b": Model("google/gemma-3-1b-pt", "google/gemma-3-1b-it", "gemma"),
}


def start(recipe: str, arg: str, known: tuple[str, ...] = tuple(MODELS)):
    """The default configuration with what all recipes set, and the model, of an argument such as `qwen3-0.6b,lora`.

    All of the model is trained, or adapters with `lora`; `full` is the former for a model that a recipe would train by
    adapters, over all devices. Raises ConfigError for another argument.
    """
    name, _, trained = arg.partition(",")
    if name not in known or trained not in ("", "lora", "full"):
        raise ConfigError(
            f"configs/recipes/{recipe}.py has no argument {arg!r}; it is one of {', '.join(known)}, and may end in "
            f"',lora' (adapters) or ',full' (all of the model)"
        )
    model, config = MODELS[name], default()
    config.output_dir = str(Path("runs/recipes") / recipe / arg.replace(",", "-"))
    config.model.remat = "block"
    config.batch.microbatch_rows = 8
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.0
    if trained == "lora" or (model.lora and trained != "full"):
        config.lora.rank, config.lora.alpha = 32, 64.0
        config.model.param_dtype = "bfloat16"  # of the base, which stays as it is
    elif model.lora:
        config.mesh.data, config.mesh.fsdp = 1, -1
        config.batch.microbatch_rows = 16  # a pair, or two rows, on each of 8 devices
    return config, model
