"""OPO (arXiv 2505.23585) on the embedded model and task of grpo.py: exactly on policy, with a length-weighted baseline.

    python -m jaxrl_llm.train --config=configs/opo.py

The baseline that minimises the variance of the gradient weighs the scores of a group by their lengths; there is one
update a step and neither clip nor KL term nor division by a standard deviation. It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/opo"
    config.algorithm.advantage = "opo"
    config.algorithm.loss = "reinforce"
    config.algorithm.epsilon_high = 0.2  # not read
    config.algorithm.beta = 0.0
    return config
