"""TPO (arXiv 2405.16681) on the embedded model: a preference between two completions, and a gold one to imitate.

    python -m jaxrl_llm.train --config=configs/tpo.py

A row has a third completion, in its column `reference`, which is learned by its likelihood; chosen and rejected are two
that a model has written, and the better of them may be wrong. No reference policy is kept. `tpo_l(gamma=0.5)` compares
mean log-probs, as SimPO does. 2 CPU cores: about a minute. Held-out pairs ranked right, some of which have no better
one: 66 % -> 76 %; right answers of sampled completions 22 % -> 46 %, of greedy ones 72 % -> 98 %.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("simpo.py")).get_config(arg)
    config.output_dir = "runs/tpo"
    config.data.path = "task:sort_triples"
    config.algorithm.loss = "tpo"
    config.algorithm.beta = 0.1
    return config
