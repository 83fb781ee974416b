"""A game of two turns, learned with GRPO on the embedded model: sort digits, then name the smallest of them.

python -m jaxrl_llm.train --config=configs/environment.py
"""

from pathlib import Path

from jaxrl_llm.names import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/environment"
    config.total_steps = min(config.total_steps, 100)
    config.environment.name = "sort_then_smallest"
    config.environment.max_turns = 2
    config.rewards.functions = ("environment",)
    config.rollout.max_completion_length = 20
    config.eval.prompts = 8 if arg == "tiny" else 128
    return config
