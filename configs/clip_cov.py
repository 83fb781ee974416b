"""Clip-Cov (arXiv 2505.22617) on the embedded model and task of grpo.py: keeps entropy by clipping a few tokens.

    python -m jaxrl_llm.train --config=configs/clip_cov.py

Tokens whose log-prob and advantage vary together drain the entropy; a random few of them take no part in the update.
The paper's range of covariances, 1 to 5, suits long completions of a larger model; here the range is lower and the
share larger. It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/clip_cov"
    config.algorithm.loss = "clip_cov(fraction=0.002, lower=0.5, upper=5.0)"
    config.algorithm.beta = 0.0
    config.batch.minibatches = 2
    return config
