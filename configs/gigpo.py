"""GiGPO (arXiv 2505.10978) on the game of environment.py: turns are compared with those that answered the same state.

    python -m jaxrl_llm.train --config=configs/gigpo.py

Of the completions of a prompt, those that sorted its digits are all asked `sort:=` then: the second answers are
compared among themselves, where GRPO compares them with the rows that failed before. It starts from environment.py
beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("environment.py")).get_config(arg)
    config.output_dir = "runs/gigpo"
    config.algorithm.advantage = "gigpo"
    return config
