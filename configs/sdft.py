"""SDFT (arXiv 2601.19897): the policy is its own teacher, which is shown the row's demonstration.

    python -m jaxrl_llm.train --config=configs/sdpo.py:start
    python -m jaxrl_llm.train --config=configs/sdft.py

The first command makes the model that the second one starts from (configs/sdpo.py). The policy answers by itself, and
its answers are scored, token by token, by the model as it started with the row's answer in its context. Rewards are
measured and teach nothing (docs/distillation.md).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps from the embedded model, for a test."""
    config = import_file(Path(__file__).with_name("sdpo.py")).get_config(arg)
    config.output_dir = "runs/sdft"
    config.teacher.context = "privileged"
    config.teacher.privileged_column = "answer"
    config.teacher.template = "{privileged}{prompt}"
    config.teacher.solution_template = None
    config.teacher.privileged_template = "{privileged},"
    config.teacher.max_prompt_length = 32
    return config
