"""A*-PO (arXiv 2505.20686) on the embedded model and task of grpo.py: one completion of each prompt, no group.

    python -m jaxrl_llm.train --config=configs/a2po.py

Before the first step the reference, the model as it starts, completes each prompt four times. The scores say what a
prompt is worth to the best policy near it (its optimal value); prompts that none of them solved are left out. Each step
then learns from the difference between a completion's reward and that value. It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/a2po"
    config.algorithm.advantage = "a2po(beta1=0.5)"
    config.algorithm.loss = "a2po(beta2=0.001)"
    config.algorithm.epsilon_high = 0.2  # not read
    config.algorithm.aggregation = "sequence"
    config.algorithm.beta = 0.0
    config.algorithm.reference_samples = 1 if arg == "tiny" else 4
    config.batch.prompts *= config.rollout.group_size
    config.rollout.group_size = 1
    return config
