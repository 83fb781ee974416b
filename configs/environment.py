"""A game of two turns, learned with GRPO on the embedded model: sort digits, then name the smallest of them.

    python -m jaxrl_llm.train --config=configs/environment.py

A row is a conversation: the policy sorts (`sort:4821=`, `1248`), the environment asks `sort:=`, which the model has
never seen, and the reward is 1 when `1` comes back too. See docs/environments.md. It starts from grpo.py beside it.

2 CPU cores, seed 0: about 3 minutes for 100 steps. Held-out accuracy, both turns right, rises from 0.08 to 0.85
(greedy: 0.22 to 0.99).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


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
