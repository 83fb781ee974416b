"""A reward model (Bradley-Terry, arXiv 2203.02155) from the embedded model: does an answer sort its digits?

    python -m jaxrl_llm.train --config=configs/reward_model.py

`runs/reward_model/hf` is a sequence classification model with one score. 2 CPU cores: about 30 seconds. Held-out pairs
ranked right: 76 % -> 100 %.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/reward_model"
    config.total_steps = 100
    config.data.path = "task:sort_pairs"
    config.data.eval_split = "validation"
    config.algorithm.name = "reward_model"
    config.algorithm.loss = "bradley_terry(center=0.01)"
    config.optimizer.learning_rate = 3e-4
    config.batch.prompts = 64
    config.optimizer.b2 = 0.99
    config.optimizer.schedule = "cosine"
    config.optimizer.min_lr_ratio = 0.1
    config.optimizer.warmup_steps = 10
    config.eval.prompts = 256
    if arg == "tiny":
        config.total_steps, config.batch.prompts, config.eval.prompts = 2, 4, 6
        config.optimizer.warmup_steps = 1
    return config
