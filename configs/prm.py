"""A process reward model (arXiv 2211.14275, 2305.20050) from the embedded model: is each step of sorting digits right?

    python -m jaxrl_llm.train --config=configs/prm.py

`runs/prm/hf` is a token classification model with two labels, wrong and right; `prm:runs/prm/hf` is a reward of it.
2 CPU cores: about 40 seconds. Held-out steps that it judges correctly: 41 % -> 99 %, of the wrong ones 97 %.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/prm"
    config.total_steps = 200
    config.data.path = "task:sort_steps"
    config.data.eval_split = "validation"
    config.algorithm.name = "process_reward_model"
    config.optimizer.learning_rate = 5e-4
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
