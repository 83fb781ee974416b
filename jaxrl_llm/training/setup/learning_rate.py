"""The learning rate that `optimizer.learning_rate=auto` stands for, and advice on one that does not fit adapters."""

from jaxrl_llm.config import ConfigDict, ConfigError

BASE, LORA, WIDTH = 5e-5, 10.0, 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}  # fitted to these families, by what their model_type begins with
# What is small for adapters is usual for whole models: the largest of such rates, for data that is given and sampled.
FULL_RATES = {"sft": 2e-5, "": 2e-6}


def rule(model_type: str, width: int, adapters: bool) -> float:
    """The rate of Adam for a model of that width: 5e-5 x (10 with adapters) x (2000 / width)^p.

    p is 0.781 for Llama and 0.0775 for Qwen: fits of Thinking Machines to sweeps of supervised fine-tuning, in which
    adapters wanted ten times the rate of full training at every rank (LoRA Without Regret, Schulman et al. 2025,
    thinkingmachines.ai/blog/lora; tinker-cookbook, hyperparam_utils.get_lr). Raises ConfigError for other families.
    """
    exponent = next((p for family, p in EXPONENTS.items() if model_type.startswith(family)), None)
    if exponent is None:
        raise ConfigError(
            f"optimizer.learning_rate is auto, a rule that was fitted to llama and qwen models, but this is a "
            f"{model_type}: set a number; for adapters about ten times that of full training"
        )
    return BASE * (LORA if adapters else 1.0) * (WIDTH / width) ** exponent


def with_learning_rate(config: ConfigDict, model_type: str, width: int, adapters: bool) -> tuple[ConfigDict, list[str]]:
    """The configuration with a number for `auto`, and lines on the rate to print; raises ConfigError as `rule`."""
    c = config.optimizer
    if c.learning_rate == "auto":
        config = config.copy_and_resolve_references()
        config.optimizer.learning_rate = rule(model_type, width, adapters)
        kind = "adapters" if adapters else "full training"
        return config, [
            f"optimizer.learning_rate: auto is {config.optimizer.learning_rate:.3g}, for {kind} of a {model_type} of "
            f"width {width} (docs/adapters.md)"
        ]
    usual = FULL_RATES.get(config.algorithm.name, FULL_RATES[""])
    if adapters and c.name == "adamw" and 0 < c.learning_rate <= usual:
        return config, [
            f"optimizer.learning_rate is {c.learning_rate:g}, a rate of full training: adapters learn with about ten "
            "times as much (docs/adapters.md)"
        ]
    return config, []
