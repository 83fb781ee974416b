"""Tasks that are generated on the spot: nothing to download, and every answer can be checked.

The built-in task is to sort digits: the prompt `sort:4821=` has the answer `1248`. A prompt belongs to one split by the
CRC-32 of its text, so the splits are disjoint by construction, whatever the size and the seed:

| crc32(prompt) % 8 | split | use |
|---|---|---|
| 0 | `test` | held out, only reported |
| 1 | `validation` | tuning settings |
| 2 to 7 | `train` | training |

`task:shapes` asks about images (shapes.py), and `task:shapes_blank` the same about grey ones. `task:seeds` has numbers
of which environments make prompts.

`task:reasoning_gym(leg_counting, size=1000)` is a task of the package reasoning-gym, and
`task:verifiers(taskset='my-taskset')` are the tasks of a taskset of the package verifiers.
"""

import importlib
import importlib.util
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, closest, import_optional, split_options
from jaxrl_llm.data import Row, shapes

SPLITS = ("train", "validation", "test")
SIZES = {"train": 16384, "validation": 1024, "test": 1024}
LARGEST = 1_000_000
DIGITS = (4, 8)
WRONG_SHARE = 0.6
MISTAKE_SHARE = 0.15  # of the steps that have a choice
END_OF_TURN = "<|end|>"  # of the embedded models
QUESTIONS = 10  # in a row of `smallest`
# Of entries of reasoning-gym (its data set's seed plus their index) and of `seeds`: splits start far from each other.
FIRST_SEEDS = {"train": 0, "validation": 10**9, "test": 2 * 10**9}


def split_of(prompt: str) -> str:
    """The split a prompt belongs to, from the CRC-32 of its text."""
    remainder = zlib.crc32(prompt.encode("utf-8")) % 8
    return {0: "test", 1: "validation"}.get(remainder, "train")


def sort_answer(prompt: str) -> str:
    """The right answer of `sort:DIGITS=`: the digits in ascending order."""
    return "".join(sorted(_digits(prompt)))


def sort_mistakes(prompt: str) -> list[str]:
    """The distinct wrong answers to `sort:DIGITS=`: sorted downwards, copied, reversed; none of them the right one."""
    digits = _digits(prompt)
    kinds = ["".join(sorted(digits, reverse=True)), digits, digits[::-1]]
    return [kind for kind in dict.fromkeys(kinds) if kind != sort_answer(prompt)]


def generate(name: str, split: str = "train", size: int | None = None, seed: int = 0) -> list[Row]:
    """The rows of a built-in task: `size` different prompts of one split, the same for the same arguments.

    `sort` has the columns prompt and answer. `sort_demos` adds a completion that is wrong with probability 0.6: the
    mixed-quality demonstrations of a warm start. `sort_pairs` adds chosen (right) and rejected (wrong) for preference
    methods; `sort_triples` two completions, of which the chosen one has no fewer digits in place, and reference (right)
    for TPO; `sort_labels` completion and label (True where it is right) for KTO. `sort_shown` is `sort_demos` with the
    answer before every other prompt, `1248,sort:4821=`, which is the completion then: a model that is to be its own
    teacher must know how to read it. `smallest` asks for the smallest of four digits ten times (`4821=`): the first
    question is the prompt, and the column questions holds all, each of the row's split. `smallest_demos` are games
    begun, with questions and answers before the last question, and a completion that is wrong with probability 0.6:
    another of its digits. `sort_steps` takes the smallest of the digits that are left in each step, or by mistake
    another, for process reward models: completions are the steps, and labels are false from the first mistake on.
    `seeds` is for environments that make their prompts themselves: an empty message of the user, and a number, `seed`,
    that no other row of any split has. Sizes default to 16384 for train and 1024 for validation and test.

    A `name` such as `reasoning_gym(leg_counting, size=1000)` is that of `reasoning_gym_rows`, and
    `verifiers(taskset='my-taskset')` that of `verifiers_rows`.

    Raises ConfigError: an unknown task or split, or a size outside 1 to 1000000.
    """
    if name.startswith("reasoning_gym("):
        return reasoning_gym_rows(name, split)
    if name.startswith("verifiers("):
        return verifiers_rows(name)
    if name not in (known := (*TASKS, *shapes.NAMES, "seeds")):
        raise ConfigError(
            f"there is no built-in task {name!r}; known are {', '.join(sorted(known))}; the closest is "
            f"{closest(name, known)}"
        )
    if split not in SPLITS:
        raise ConfigError(f"task:{name} has no split {split!r}; its splits are {', '.join(SPLITS)}")
    size = SIZES[split] if size is None else size
    if not 1 <= size <= LARGEST:
        raise ConfigError(f"task:{name} cannot have {size} rows; ask for 1 to {LARGEST}")
    if name in shapes.NAMES:
        return shapes.rows(name, split, size, seed)
    if name == "seeds":
        first = FIRST_SEEDS[split] + seed * LARGEST
        return [{"prompt": [{"role": "user", "content": ""}], "seed": first + number} for number in range(size)]
    draw = random.Random(f"{name}/{split}/{seed}")
    prompts = _questions(split, draw) if name in ("smallest", "smallest_demos") else _sort_prompts(split, draw)
    return [TASKS[name](next(prompts), draw) for _ in range(size)]


def reasoning_gym_rows(spec: str, split: str = "train") -> list[Row]:
    """The rows of `reasoning_gym(task, size=..., seed=..., option=...)`; other options are the task's own.

    Their columns are prompt, answer, and `reasoning_gym`, by which the reward `reasoning_gym_score` finds the entry
    again. Splits draw with different random numbers, so that they share an entry only where a task has few.

    Raises ConfigError: the package reasoning-gym is missing, or an unknown task, split or option.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"task:{spec} needs the package reasoning-gym: pip install reasoning-gym")
    create_dataset = importlib.import_module("reasoning_gym").create_dataset
    tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    # The task's name stands without a keyword, which option lists do not allow.
    named = re.sub(r"\(\s*(\w+)\s*(?=[,)])", r"(name='\1'", spec, count=1)
    options = split_options(named)[1]
    task = options.pop("name", None)
    if task not in tasks:
        near = f"; the closest is {closest(str(task), tasks)}" if task else ""
        raise ConfigError(f"task:{spec}: there is no reasoning-gym task {task!r}{near}; write reasoning_gym(task)")
    if split not in SIZES:
        raise ConfigError(f"task:{spec} has no split {split!r}; its splits are {', '.join(SIZES)}")
    size = options.pop("size", SIZES[split])
    config = {"name": task, "size": size, "seed": options.pop("seed", 0) + FIRST_SEEDS[split], **options}
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


def verifiers_rows(spec: str) -> list[Row]:
    """The rows of `verifiers(taskset='my-taskset', size=1000)`: tasks for `environment.agent="verifiers(...)"`.

    taskset: the id of an installed taskset, or a dictionary of its settings with `id` among them; size: of how many
    tasks, the first ones; agent: the value of a column of that name, by which one of `environment.agents` plays them.
    The columns are prompt, as messages of text, and `verifiers`, the whole task as JSON.

    Raises ConfigError: the package verifiers is missing or has no such taskset, or that has no end and `size` is none.
    """
    options = split_options(spec)[1]
    taskset, size, agent = (options.pop(name, None) for name in ("taskset", "size", "agent"))
    if options or not taskset:
        raise ConfigError(f"task:{spec}: write verifiers(taskset='my-taskset'), maybe with size=1000")
    package: Any = import_optional("verifiers.v1", "0.4", f"task:{spec}")
    try:
        settings = {"id": taskset} if isinstance(taskset, str) else taskset
        found = package.load_taskset(package.resolve_env_config({"taskset": settings}).taskset)
        if size is None and not found.bounded:
            raise ConfigError(f"task:{spec} has tasks without end: give their number, size=1000")
        tasks = [task.data for task in (found if size is None else found.take(size))]
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"task:{spec}: verifiers cannot load it: {type(error).__name__}: {said}") from error
    system = [
        [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}] for data in tasks
    ]
    return [
        {
            "prompt": [*before, {"role": "user", "content": data.prompt_text}],
            "verifiers": data.model_dump_json(),
            **({} if agent is None else {"agent": agent}),
        }
        for before, data in zip(system, tasks, strict=True)
    ]


def _digits(prompt: str) -> str:
    return prompt.removeprefix("sort:").removesuffix("=")


def _sort_prompts(split: str, draw: random.Random) -> Iterator[str]:
    """Endless different prompts of a split. Digits that are all equal are left out: no wrong answer exists for them."""
    seen: set[str] = set()
    while True:
        digits = "".join(draw.choices("0123456789", k=draw.randint(*DIGITS)))
        prompt = f"sort:{digits}="
        if len(set(digits)) > 1 and prompt not in seen and split_of(prompt) == split:
            seen.add(prompt)
            yield prompt


def _questions(split: str, draw: random.Random) -> Iterator[str]:
    """Endless questions of a split, four digits each that are not all equal; there are 10000 in all, so they recur."""
    while True:
        digits = "".join(draw.choices("0123456789", k=4))
        question = f"{digits}="
        if len(set(digits)) > 1 and split_of(question) == split:
            yield question


def _plain(prompt: str, draw: random.Random) -> Row:
    return {"prompt": prompt, "answer": sort_answer(prompt)}


def _demo(prompt: str, draw: random.Random) -> Row:
    answer = sort_answer(prompt)
    wrong = draw.random() < WRONG_SHARE
    return {"prompt": prompt, "completion": draw.choice(sort_mistakes(prompt)) if wrong else answer, "answer": answer}


def _pair(prompt: str, draw: random.Random) -> Row:
    answer = sort_answer(prompt)
    return {"prompt": prompt, "chosen": answer, "rejected": draw.choice(sort_mistakes(prompt)), "answer": answer}


def _triple(prompt: str, draw: random.Random) -> Row:
    answer = sort_answer(prompt)
    written = draw.sample([answer, *sort_mistakes(prompt)], 2)
    rejected, chosen = sorted(written, key=lambda digits: sum(a == b for a, b in zip(digits, answer, strict=True)))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "reference": answer, "answer": answer}


def _shown(prompt: str, draw: random.Random) -> Row:
    row = _demo(prompt, draw)
    shown = {"prompt": f"{row['answer']},{prompt}", "completion": row["answer"]}
    return row | shown if draw.random() < 0.5 else row


def _label(prompt: str, draw: random.Random) -> Row:
    answer = sort_answer(prompt)
    right = draw.random() < 0.5
    completion = answer if right else draw.choice(sort_mistakes(prompt))
    return {"prompt": prompt, "completion": completion, "label": right, "answer": answer}


def _smallest(prompt: str, draw: random.Random) -> Row:
    more = itertools.islice(_questions(split_of(prompt), draw), QUESTIONS - 1)
    return {"prompt": prompt, "answer": min(prompt[:-1]), "questions": [prompt, *more]}


def _smallest_demo(prompt: str, draw: random.Random) -> Row:
    def answer(question: str) -> str:
        smallest, digits = min(question[:-1]), question[:-1]
        return draw.choice(digits.replace(smallest, "")) if draw.random() < WRONG_SHARE else smallest

    before = itertools.islice(_questions(split_of(prompt), draw), draw.randrange(QUESTIONS))
    begun = "".join(f"{question}{answer(question)}{END_OF_TURN}" for question in before)
    return {"prompt": begun + prompt, "completion": answer(prompt)}


def _steps(prompt: str, draw: random.Random) -> Row:
    left, steps, labels = list(_digits(prompt)), list[str](), list[bool]()
    while left:
        others = [digit for digit in left if digit != min(left)]
        mistaken = bool(others) and draw.random() < MISTAKE_SHARE
        steps.append(draw.choice(others) if mistaken else min(left))
        labels.append(all(labels) and not mistaken)
        left.remove(steps[-1])
    return {"prompt": prompt, "completions": steps, "labels": labels, "answer": sort_answer(prompt)}


TASKS: dict[str, Callable[[str, random.Random], Row]] = {
    "sort": _plain,
    "sort_demos": _demo,
    "sort_pairs": _pair,
    "sort_triples": _triple,
    "sort_labels": _label,
    "sort_shown": _shown,
    "sort_steps": _steps,
    "smallest": _smallest,
    "smallest_demos": _smallest_demo,
}
