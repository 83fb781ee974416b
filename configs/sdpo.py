"""SDPO (arXiv 2601.20802): the policy is its own teacher, which is shown a right answer to the prompt.

    python -m jaxrl_llm.train --config=configs/sdpo.py:start
    python -m jaxrl_llm.train --config=configs/sdpo.py

The first command makes the model that the second one starts from, `runs/sdpo_start/hf`: it sorts as badly as the
embedded one, and reads an answer that stands before the question, as a language model of some size does by itself.
Where a sample of a group is right, all others are scored by that model with the right one in its context, token by
token; rewards say which are right, and nothing else is learned from them (docs/distillation.md).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`start`: the model that it starts from. `tiny`: two steps from the embedded model, for a test."""
    if arg == "start":
        config = import_file(Path(__file__).with_name("sft_tiny.py")).get_config()
        config.output_dir = "runs/sdpo_start"
        config.data.path = "task:sort_shown"
        config.rollout.max_prompt_length = 32
        config.total_steps = 400
        return config
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/sdpo"
    config.model.path = "embedded:sort" if arg == "tiny" else "runs/sdpo_start/hf"
    config.total_steps = min(config.total_steps, 100)
    config.algorithm.advantage = "zero"
    config.algorithm.beta = 0.0
    config.algorithm.aggregation = "sequence"
    config.teacher.path = "self(rate=0)"  # at this learning rate a teacher that follows soon reads no answers
    config.teacher.context = "success"
    config.teacher.form = "divergence"
    config.teacher.template = "{solution}{prompt}"
    config.teacher.solution_template = "{solution},"
    config.eval.every = 10
    return config
