"""GRPO (arXiv 2402.03300) on the embedded model and task: sort 4 to 8 digits, reward 1 for the exact answer.

python -m jaxrl_llm.train --config=configs/grpo.py
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/grpo"
    config.total_steps = 250
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 10
    config.algorithm.aggregation = "token"
    config.algorithm.beta = 0.01
    config.algorithm.epsilon_high = 0.28
    config.batch.prompts = 32
    config.optimizer.learning_rate = 3e-4
    config.optimizer.b2 = 0.99
    config.optimizer.schedule = "cosine"
    config.optimizer.min_lr_ratio = 0.2
    config.optimizer.warmup_steps = 5
    config.eval.every = 25
    config.eval.prompts = 256
    if arg == "tiny":
        config.total_steps, config.batch.prompts, config.eval.prompts = 2, 4, 8
        config.rollout.group_size, config.optimizer.warmup_steps = 4, 1
    return config
