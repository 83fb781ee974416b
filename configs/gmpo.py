"""GMPO (arXiv 2507.20673) on the embedded model and task of grpo.py: the geometric mean of clipped token ratios.

    python -m jaxrl_llm.train --config=configs/gmpo.py

Log-ratios are clipped, on one side only, before their mean makes one number of a completion; so the range is wider
than a token's in PPO. The clip acts from the second minibatch of a step on: in the first all ratios are 1. It starts
from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/gmpo"
    config.algorithm.loss = "gmpo"
    config.algorithm.aggregation = "sequence"
    config.algorithm.beta = 0.0
    config.algorithm.epsilon_low, config.algorithm.epsilon_high = 0.4, 0.4
    config.batch.minibatches = 2
    return config
