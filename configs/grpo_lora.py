"""GRPO (arXiv 2402.03300) of LoRA adapters (arXiv 2106.09685) on the embedded model and task, as configs/grpo.py.

    python -m jaxrl_llm.train --config=configs/grpo_lora.py

The reference policy is the model without its adapters. `runs/grpo_lora/adapter` loads with PEFT, `runs/grpo_lora/hf` is
merged. 2 CPU cores: a few minutes. Right answers of greedy completions 74 % -> 100 %, of sampled ones 25 % -> 69 %.

Sampled answers cannot become much better: with its head and last norm frozen this small model, made from contradictory
demonstrations, gives no token a probability above 0.97, whatever its layers compute, and answers have 5 to 9 tokens.
"""

from jaxrl_llm.config import default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = default()
    config.output_dir = "runs/grpo_lora"
    config.total_steps = 150
    config.lora.rank = 16
    config.lora.alpha = 32.0
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 10
    config.algorithm.aggregation = "token"
    config.algorithm.beta = 0.01
    config.algorithm.epsilon_high = 0.28
    config.batch.prompts = 32
    config.optimizer.learning_rate = 1e-3
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
