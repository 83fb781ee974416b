"""GRPO (arXiv 2402.03300) of LoRA adapters (arXiv 2106.09685) on the embedded model and task, as configs/grpo.py.

    python -m jaxrl_llm.train --config=configs/grpo_lora.py

The reference policy is the model without its adapters. `runs/grpo_lora/adapter` loads with PEFT, `runs/grpo_lora/hf` is
merged. 2 CPU cores: a few minutes. Right answers of greedy completions 74 % -> 100 %, of sampled ones 25 % -> 69 %.

Samples cannot become much better than that. This small model was made from contradictory demonstrations: with its head
and last norm frozen it gives no token a probability above 0.97, whatever its layers compute, and answers have 5 to 9
tokens. It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/grpo_lora"
    config.total_steps = min(config.total_steps, 150)
    config.lora.rank = 16
    config.lora.alpha = 32.0
    config.optimizer.learning_rate = 1e-3
    return config
