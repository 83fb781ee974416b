"""AlphaPO (arXiv 2501.03884) on the embedded model: SimPO with another reward function, no reference.

    python -m jaxrl_llm.train --config=configs/alphapo.py

The reward of a completion is `(1 - p^-alpha) / alpha` of its mean probability p a token, which holds back the
likelihood that SimPO's logarithm spends; alpha near 0 is SimPO. It starts from simpo.py.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("simpo.py")).get_config(arg)
    config.output_dir = "runs/alphapo"
    config.algorithm.loss = "alphapo(gamma=5.0, alpha=0.1)"
    return config
