"""DPO (arXiv 2305.18290) on the embedded model: the right answer is chosen, a wrong one rejected.

    python -m jaxrl_llm.train --config=configs/dpo.py

The reference is a copy of the model that training starts from; `--config.data.precompute_reference=true` scores the
data with it once and frees it. 2 CPU cores: about a minute. Held-out pairs ranked right: 99 %; right answers of sampled
completions 24 % -> 42 %, of greedy ones 71 % -> 95 %.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/dpo"
    config.total_steps = 100
    config.data.path = "task:sort_pairs"
    config.data.eval_split = "validation"
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 10
    config.algorithm.name = "preference"
    config.algorithm.loss = "dpo"
    config.algorithm.beta = 3.0  # answers are short; 0.1 is usual for long ones
    config.optimizer.learning_rate = 2e-5
    config.batch.prompts = 64
    config.optimizer.b2 = 0.99
    config.optimizer.schedule = "cosine"
    config.optimizer.min_lr_ratio = 0.1
    config.optimizer.warmup_steps = 10
    config.eval.prompts = 256
    config.eval.measure = "both"
    if arg == "tiny":
        config.total_steps, config.batch.prompts, config.eval.prompts = 2, 4, 6
        config.optimizer.warmup_steps = 1
    return config
