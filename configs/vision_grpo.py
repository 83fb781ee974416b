"""GRPO (arXiv 2402.03300) on images: the colour, number and place of drawn shapes, from random parameters.

    python -m jaxrl_llm.train --config=configs/vision_grpo.py

2 CPU cores: about two minutes. Right answers of sampled completions 5 % -> 91 %; with grey images (`:blank`) they stay
at one in four, which is chance.
"""

from jaxrl_llm.config import check_form, default


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test. `blank`: the same questions about grey images, the control."""
    check_form(arg, "tiny", "blank")
    config = default()
    config.output_dir = "runs/vision_grpo"
    config.model.path = "embedded:shapes"
    config.model.random_init = True
    config.model.vision = "trained"
    config.data.path = "task:shapes"
    config.total_steps = 600
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 16
    config.rollout.max_completion_length = 1
    config.algorithm.aggregation = "token"
    config.algorithm.entropy_coef = 0.02  # without it each question soon has one answer, whatever the image
    config.batch.prompts = 64
    config.optimizer.learning_rate = 5e-4
    config.optimizer.b2 = 0.99
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 10
    config.eval.every = 100
    config.eval.prompts = 256
    if arg == "blank":
        config.output_dir, config.data.path = "runs/vision_grpo_blank", "task:shapes_blank"
    if arg == "tiny":
        config.total_steps, config.batch.prompts, config.eval.prompts = 2, 4, 8
        config.rollout.group_size, config.optimizer.warmup_steps = 4, 1
    return config
