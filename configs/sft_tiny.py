"""Makes the shipped model `embedded:sort`: supervised fine-tuning of random weights on demonstrations of mixed quality.

    python -m jaxrl_llm.train --config=configs/sft_tiny.py

Six demonstrations in ten are wrong (digits sorted downwards, copied or reversed), so the result sorts only sometimes:
a warm start from which reinforcement has something to do. 2 CPU cores: under a minute. The folder
`runs/sft_tiny/hf` is what lies in `jaxrl_llm/models/embedded/sort`.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/sft_tiny"
    config.total_steps = 200
    config.model.random_init = True
    config.algorithm.name = "sft"
    config.data.path = "task:sort_demos"
    config.data.eval_path = "task:sort"
    config.data.eval_split = "validation"
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 10
    config.batch.prompts = 128
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.99
    config.optimizer.warmup_steps = 20
    config.eval.every = 50
    if arg == "tiny":
        config.total_steps, config.batch.prompts, config.eval.prompts = 2, 8, 8
        config.optimizer.warmup_steps = 1
    return config
