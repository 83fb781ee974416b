"""reasoning-gym's tasks as data: `data.path="task:reasoning_gym(leg_counting, size=1000)"`.

The rows have the columns prompt, answer, and `reasoning_gym`, by which the reward `reasoning_gym_score` finds the entry
again. It needs the package reasoning-gym.
"""

import importlib
import importlib.util
import json
import re
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, closest, split_options

SIZES = {"train": 16384, "validation": 1024, "test": 1024}
# An entry's seed is the data set's plus its index: splits start far from each other.
SPLIT_SEEDS = {"train": 0, "validation": 10**9, "test": 2 * 10**9}


def generate(spec: str, split: str = "train") -> list[dict[str, Any]]:
    """The rows of `reasoning_gym(task, size=..., seed=..., option=...)`; other options are the task's own.

    Splits draw with different random numbers, so that they share an entry only where a task has few.
    Raises ConfigError: the package is missing, an unknown task, split or option.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"task:{spec} needs the package reasoning-gym: pip install reasoning-gym")
    create_dataset = importlib.import_module("reasoning_gym").create_dataset
    tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    named = re.sub(r"\(\s*(\w+)\s*(?=[,)])", r"(name='\1'", spec, count=1)
    options = split_options(named)[1]
    task = options.pop("name", None)
    if task not in tasks:
        near = f"; the closest is {closest(str(task), tasks)}" if task else ""
        raise ConfigError(f"task:{spec}: there is no reasoning-gym task {task!r}{near}; write reasoning_gym(task)")
    if split not in SIZES:
        raise ConfigError(f"task:{spec} has no split {split!r}; its splits are {', '.join(SIZES)}")
    size = options.pop("size", SIZES[split])
    config = {"name": task, "size": size, "seed": options.pop("seed", 0) + SPLIT_SEEDS[split], **options}
    try:
        dataset = create_dataset(**config)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"task:{spec}: reasoning-gym refuses {options}: {error}") from error
    return [
        {
            "prompt": dataset[index]["question"],
            "answer": str(dataset[index]["answer"]),
            "reasoning_gym": json.dumps({"config": config, "index": index}),
        }
        for index in range(size)
    ]
