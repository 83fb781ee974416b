"""Pass@k training (arXiv 2503.19595) on the embedded model and task of grpo.py: only the best of a group is reinforced.

    python -m jaxrl_llm.train --config=configs/passk.py

The advantage of a prompt's best completion is its lead over the second best, that of all others 0: the objective is
the best of k samples, so the policy stays diverse. It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/passk"
    config.algorithm.advantage = "passk"
    config.algorithm.beta = 0.0
    return config
