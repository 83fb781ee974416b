"""GRPO as configs/grpo.py, with asynchronous rollouts.

    python -m jaxrl_llm.train --config=configs/async_grpo.py
    python -m jaxrl_llm.train --config=configs/async_grpo.py:in_flight

While one batch is trained on, a thread samples and grades the next one, by the policy of one update before
(`rollout.staleness`, docs/asynchronous.md). Each token is weighed by the ratio of the policy that is updated and the
one that sampled it, cut at 2 (`algorithm.importance_correction`). It starts from grpo.py beside it. With `in_flight`
the new policy comes to the batch that is still being sampled (`rollout.update_in_flight`).
"""

from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import import_file

FORMS = {"": {}, "in_flight": {"rollout.update_in_flight": True, "rollout.chunk": 2}}


def get_config(arg: str = ""):
    """`in_flight`, or nothing; `tiny`, or `in_flight,tiny`: two steps, for a test."""
    name, _, size = arg.rpartition(",") if arg.endswith("tiny") else (arg, "", "")
    if name not in FORMS:
        raise ConfigError(
            f"configs/async_grpo.py has no form {arg!r}: leave it out, or give in_flight, each also with tiny"
        )
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(size)
    config.output_dir = "_".join(filter(None, ("runs/async_grpo", name)))
    config.rollout.staleness = 1
    config.algorithm.importance_correction = "token_truncate"
    config.algorithm.importance_max = 2.0
    config.update_from_flattened_dict(FORMS[name])
    return config
