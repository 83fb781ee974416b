"""GRPO as configs/grpo.py, with rollouts that are made ahead.

    python -m jaxrl_llm.train --config=configs/async_grpo.py

While one batch is trained on, a thread samples and grades the next one, by the policy of one update before
(`rollout.staleness`, docs/asynchronous.md). Each token is weighed by the ratio of the policy that is updated and the
one that sampled it, cut at 2 (`algorithm.importance_correction`). It starts from grpo.py beside it.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/async_grpo"
    config.rollout.staleness = 1
    config.algorithm.importance_correction = "token_truncate"
    config.algorithm.importance_max = 2.0
    return config
