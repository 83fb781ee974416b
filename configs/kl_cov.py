"""KL-Cov (arXiv 2505.22617) on the embedded model and task of grpo.py: keeps entropy by a penalty on few tokens.

    python -m jaxrl_llm.train --config=configs/kl_cov.py

The tokens whose log-prob and advantage vary together most are penalised for moving away from the policy that sampled
them; nothing is clipped. The share is larger than the paper's 2e-4, as batches here have few tokens. It starts from
grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/kl_cov"
    config.algorithm.loss = "kl_cov(fraction=0.002, kl_coef=1.0)"
    config.algorithm.epsilon_high = 0.2  # not read
    config.algorithm.beta = 0.0
    config.batch.minibatches = 2
    return config
