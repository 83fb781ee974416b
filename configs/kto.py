"""KTO (arXiv 2402.01306) on the embedded model: completions labelled right or wrong, no pairs.

    python -m jaxrl_llm.train --config=configs/kto.py

Each row's prompt is also scored with the completion of another row of the batch, for the KL that rows are compared
with. 2 CPU cores: about a minute. Held-out rows on the right side of it: 98 %; right answers of sampled
completions 26 % -> 51 %, of greedy ones 76 % -> 96 %.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/kto"
    config.total_steps = 100
    config.data.path = "task:sort_labels"
    config.data.eval_split = "validation"
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 10
    config.algorithm.name = "preference"
    config.algorithm.loss = "kto"
    config.algorithm.beta = 1.0  # answers are short; 0.1 is usual for long ones
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
