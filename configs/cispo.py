"""CISPO (MiniMax-M1, arXiv 2506.13585) on the embedded model and task of grpo.py: capped weights, no token is clipped.

    python -m jaxrl_llm.train --config=configs/cispo.py

REINFORCE whose importance weight is capped and takes no gradient, so that every token keeps teaching where PPO's clip
would silence it. epsilon_high is the cap of the ratio itself (ScaleRL, arXiv 2510.13786). It starts from grpo.py beside
it.

2 CPU cores, seed 0: about 2 minutes for 250 steps. Held-out accuracy rises from 0.25 to 0.98 (greedy: 0.74 to 0.99).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/cispo"
    config.algorithm.loss = "cispo"
    config.algorithm.epsilon_high = 5.0
    config.algorithm.beta = 0.0
    config.batch.minibatches = 2
    return config
