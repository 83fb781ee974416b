"""ReMax (arXiv 2310.10505) on the embedded model and task of grpo.py: the greedy completion is the baseline.

    python -m jaxrl_llm.train --config=configs/remax.py

Each step writes one more completion of every prompt, greedily, and subtracts its reward; there is no group, and no
division by a standard deviation. It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/remax"
    config.algorithm.advantage = "remax"
    config.algorithm.loss = "reinforce"
    config.algorithm.epsilon_high = 0.2  # not read
    config.algorithm.aggregation = "sequence"
    config.algorithm.kl_in_reward = True
    config.algorithm.beta = 0.01
    config.batch.prompts *= config.rollout.group_size
    config.rollout.group_size = 1
    return config
