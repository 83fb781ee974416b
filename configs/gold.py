"""GOLD: on-policy distillation from a teacher that may have another tokenizer.

    python -m jaxrl_llm.train --config=configs/grpo.py
    python -m jaxrl_llm.train --config=configs/gold.py

The first command makes the teacher, `runs/grpo/hf`, which happens to have the same tokens, so that each is a span of
its own; `--config.teacher.path` names one of any family. All else is as in distill.py (docs/distillation.md).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, with the embedded model as its own teacher, for a test."""
    config = import_file(Path(__file__).with_name("distill.py")).get_config(arg)
    config.output_dir = "runs/gold"
    config.teacher.form = "uld"
    config.teacher.uld_hybrid = True
    return config
