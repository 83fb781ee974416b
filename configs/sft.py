"""Supervised fine-tuning of the embedded model on demonstrations of its task: sort 4 to 8 digits.

    python -m jaxrl_llm.train --config=configs/sft.py

The demonstrations are of mixed quality, six in ten wrong, so the loss has a floor well above 0; `configs/sft_tiny.py`
makes the embedded model itself from random weights. 2 CPU cores: about 30 seconds. Held-out loss 0.63 -> 0.55.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/sft"
    config.total_steps = 100
    config.algorithm.name = "sft"
    config.data.path = "task:sort_demos"
    config.data.eval_split = "validation"
    config.batch.prompts = 64
    config.optimizer.learning_rate = 1e-4
    config.optimizer.b2 = 0.99
    config.optimizer.schedule = "cosine"
    config.optimizer.min_lr_ratio = 0.1
    config.optimizer.warmup_steps = 10
    config.eval.prompts = 256
    if arg == "tiny":
        config.total_steps, config.batch.prompts, config.eval.prompts = 2, 4, 6
        config.optimizer.warmup_steps = 1
    return config
