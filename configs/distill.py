"""On-policy distillation: the embedded model learns from a teacher's distributions on its own samples, without rewards.

    python -m jaxrl_llm.train --config=configs/grpo.py
    python -m jaxrl_llm.train --config=configs/distill.py

The first command makes the teacher, `runs/grpo/hf`; `--config.teacher.path` names another. Rewards are measured all the
same: `algorithm.advantage = "zero"` learns nothing from them. A step has as many completions as one of grpo.py, each of
a prompt of its own, since nothing is compared within a group, and twelve updates are made of it (docs/distillation.md).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, with the embedded model as its own teacher, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/distill"
    config.total_steps = min(config.total_steps, 27)
    config.batch.prompts, config.rollout.group_size = config.batch.prompts * config.rollout.group_size, 1
    config.batch.minibatches = 4
    config.teacher.path = "embedded:sort" if arg == "tiny" else "runs/grpo/hf"
    config.teacher.form = "divergence"
    config.algorithm.advantage = "zero"
    config.algorithm.beta = 0.0
    config.algorithm.num_iterations = 3
    config.optimizer.min_lr_ratio = 0.05
    config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, 2)
    config.eval.every = 3
    return config
