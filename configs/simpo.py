"""SimPO (arXiv 2405.14734) on the embedded model: mean log-probs, a target margin, no reference.

    python -m jaxrl_llm.train --config=configs/simpo.py

gamma is the margin itself, here half of beta; `nll_weight=1` adds the likelihood of the chosen completion (CPO-SimPO).
The paper has beta 2 to 2.5 for long completions. 2 CPU cores: about a minute. Held-out pairs ranked right:
95 % -> 100 %; right answers of sampled completions 24 % -> 27 %, of greedy ones 71 % -> 84 %.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    check_form(arg, "tiny")
    config = default()
    config.output_dir = "runs/simpo"
    config.total_steps = 100
    config.data.path = "task:sort_pairs"
    config.data.eval_split = "validation"
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 10
    config.algorithm.name = "preference"
    config.algorithm.loss = "simpo(gamma=5.0, nll_weight=0.0)"
    config.algorithm.beta = 10.0
    config.optimizer.learning_rate = 1e-5
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
