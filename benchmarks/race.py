"""Time to reward, side by side: GRPO by this library and by TRL, from the same weights to the same level.

    python -m benchmarks.race                                          # the embedded model sorts: half an hour
    python -m benchmarks.race --tasks=reverse,sums --weights=FOLDER    # a model of your own: hours
    python -m benchmarks.race --page                                   # the page alone

Both libraries get the same model folder, prompts, reward function, seeds and settings (SETTINGS), and compute in
float32 on the same cores. The reward function itself keeps the record: whenever it is called, with all completions of a
step, it writes down the seconds and the processor's seconds since its process began, the tokens so far, and the mean
reward. So nothing is left out: imports, compilation and loading count, evaluations and files are none.

Each run is a process of its own; nothing else should run on the machine meanwhile, though the processor's seconds tell
little of it. Records are kept in benchmarks/results/race/TASK-LIBRARY-SEED.json, runs that are there are not repeated,
and benchmarks/results/race.md is made from them alone. TRL comes with `pip install -e ".[dev]"`.
"""

import argparse
import difflib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.page import table

ROOT = Path(__file__).parent.parent
STORE, PAGE = (ROOT / "benchmarks" / "results" / name for name in ("race", "race.md"))
LIBRARIES = ("jaxrl_llm", "trl")
SEEDS = (0, 1, 2)
WINDOW = 5  # steps whose mean reward has to reach the level
Row = dict[str, Any]


class Settings(NamedTuple):
    """What both libraries are told."""

    steps: int
    prompts: int
    group: int
    prompt_tokens: int
    tokens: int  # of a completion, at most
    learning_rate: float
    level: float  # the mean reward to reach


class Contest(NamedTuple):
    """Rows with prompts and answers, what their completions are worth, and the settings."""

    rows: Callable[[int], list[Row]]
    reward: Callable[[str, str], float]
    settings: Settings


def sorting(seed: int) -> list[Row]:
    """The embedded model's own task."""
    from jaxrl_llm.data import tasks

    return tasks.generate("sort", size=4096, seed=seed)


def reversing(seed: int) -> list[Row]:
    """Words of four to six letters, to be written backwards."""
    draw, rows = random.Random(f"reverse/{seed}"), []
    for _ in range(4096):
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 6)))
        text = f"Write the letters of the word {word} in reverse order. Answer with the reversed word alone."
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": word[::-1]})
    return rows


def summing(seed: int) -> list[Row]:
    """Word problems of one or two steps, as GSM8K's (arXiv 2110.14168)."""
    draw, rows = random.Random(f"sums/{seed}"), []
    for _ in range(4096):
        name, thing = draw.choice(("Ana", "Ben", "Lea", "Tom")), draw.choice(("apples", "books", "coins", "pens"))
        first, second, third = (draw.randint(2, 12) for _ in range(3))
        text = f"{name} has {first} {thing} and gets {second} more."
        answer = first + second
        if draw.random() < 0.5:
            text, answer = f"{text} Then {name} buys {third} more.", answer + third
        text = f"{text} How many {thing} does {name} have? Answer with a number."
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(answer)})
    return rows


def exact(text: str, answer: str) -> float:
    """1 for the answer itself."""
    return float(text.strip() == answer)


def alike(text: str, answer: str) -> float:
    """The share of characters that the first word has in common with the answer, in their order."""
    words = text.split()
    return difflib.SequenceMatcher(None, words[0] if words else "", answer).ratio()


def last_number(text: str, answer: str) -> float:
    """1 where the last number of the text is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == answer)


CONTESTS = {
    "sort": Contest(sorting, exact, Settings(250, 32, 8, 16, 10, 3e-4, 0.8)),
    "reverse": Contest(reversing, alike, Settings(150, 8, 8, 64, 12, 2e-5, 0.6)),
    "sums": Contest(summing, last_number, Settings(150, 8, 8, 80, 24, 2e-5, 0.6)),
}


class Recorder:
    """A reward function that keeps a line for each step."""

    def __init__(self, reward: Callable[[str, str], float]):
        self.reward, self.lines, self.tokens = reward, [], 0
        self.__name__ = "reward"  # by which TRL calls it

    def __call__(self, completions, answer, completion_ids, **_) -> list[float | None]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        found: list[float | None] = [self.reward(*pair) for pair in zip(texts, answer, strict=True)]
        self.tokens += sum(map(len, completion_ids))
        used = sum(os.times()[:4])
        reward = float(np.mean(np.asarray(found, float)))
        line = {"seconds": time.time() - began(), "cpu": used, "tokens": self.tokens, "reward": reward}
        self.lines.append({name: round(value, 4) for name, value in line.items()})
        return found


def began() -> float:
    """When this process was started, on the clock of `time.time`."""
    return float(os.environ["RACE_BEGAN"])


def with_jaxrl_llm(folder: str, rows: list[Row], record: Recorder, s: Settings, seed: int, output: str) -> None:
    """A run of this library."""
    import jaxrl_llm

    config = jaxrl_llm.default_config()
    config.model.path, config.model.dtype, config.output_dir, config.seed = folder, "float32", output, seed
    config.total_steps, config.batch.prompts, config.rollout.group_size = s.steps, s.prompts, s.group
    config.rollout.max_prompt_length, config.rollout.max_completion_length = s.prompt_tokens, s.tokens
    config.algorithm.aggregation, config.algorithm.beta, config.algorithm.epsilon_high = "token", 0.0, 0.28
    config.optimizer.learning_rate, config.optimizer.b2, config.optimizer.warmup_steps = s.learning_rate, 0.99, 5
    config.eval.every, config.checkpoint.every, config.logging.backends = -1, 0, ()
    jaxrl_llm.train(config, rows, rewards=record)


def with_trl(folder: str, rows: list[Row], record: Recorder, s: Settings, seed: int, output: str) -> None:
    """A run of TRL's GRPOTrainer: one batch a step, nothing recomputed."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    given = GRPOConfig(
        output_dir=output, max_steps=s.steps, seed=seed, per_device_train_batch_size=s.prompts * s.group,
        num_generations=s.group, max_completion_length=s.tokens, temperature=1.0, num_iterations=1, beta=0.0,
        epsilon=0.2, epsilon_high=0.28, loss_type="dapo", learning_rate=s.learning_rate, adam_beta2=0.99,
        warmup_steps=5, lr_scheduler_type="constant_with_warmup", use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=s.steps, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), reward_funcs=record,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(folder), args=given,
    )  # fmt: skip
    trainer.train()


RUNNERS = {"jaxrl_llm": with_jaxrl_llm, "trl": with_trl}


def race(task: str, library: str, seed: int, weights: str, steps: int | None) -> Row:
    """The record of one run, in this process."""
    contest = CONTESTS[task]
    settings = contest.settings._replace(**({} if steps is None else {"steps": steps}))
    record = Recorder(contest.reward)
    with tempfile.TemporaryDirectory() as output:
        RUNNERS[library](weights, contest.rows(seed), record, settings, seed, output)
    return {"settings": settings._asdict(), "cores": len(os.sched_getaffinity(0)), "lines": record.lines}


def reached(lines: list[Row], level: float) -> Row | None:
    """The line at which the mean reward of the last steps has reached the level; None where it never has."""
    for end in range(WINDOW, len(lines) + 1):
        if statistics.mean(line["reward"] for line in lines[end - WINDOW : end]) >= level:
            return lines[end - 1] | {"step": end}
    return None


def page(store: dict[tuple[str, str], list[Row]]) -> str:
    """The table of all records."""
    head = ["task", "level", "library", "seeds", "reached it", "steps", "seconds", "CPU seconds", "tokens",
            "s to the first step", "last reward"]  # fmt: skip
    rows = [head]
    for (task, library), records in sorted(store.items()):
        level = records[0]["settings"]["level"]
        ends = [end for record in records if (end := reached(record["lines"], level)) is not None]
        medians = [
            f"{statistics.median(end[name] for end in ends):,.0f}" if ends else ""
            for name in ("step", "seconds", "cpu", "tokens")
        ]
        first = statistics.median(record["lines"][0]["seconds"] for record in records)
        last = statistics.median(
            statistics.mean(line["reward"] for line in record["lines"][-WINDOW:]) for record in records
        )
        counts = (str(len(records)), str(len(ends)))
        rows.append([task, f"{level:g}", library, *counts, *medians, f"{first:.0f}", f"{last:.3f}"])
    cores = sorted({record["cores"] for records in store.values() for record in records})
    return (
        "# Time to reward\n\nWritten by `python -m benchmarks.race` from the records in benchmarks/results/race; "
        f"medians over seeds, {', '.join(map(str, cores))} CPU cores, float32. A level is reached by the mean of "
        f"{WINDOW} steps. Time counts from the start of the process.\n\n" + table(rows) + "\n"
    )


def stored() -> dict[tuple[str, str], list[Row]]:
    """The records that are kept, by task and library."""
    found: dict[tuple[str, str], list[Row]] = {}
    for file in sorted(STORE.glob("*.json")):
        task, library, _ = file.stem.split("-")
        found.setdefault((task, library), []).append(json.loads(file.read_text(encoding="utf-8")))
    return found


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="sort", help=f"of {', '.join(CONTESTS)}")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--weights", help="a model folder; the embedded model's unless given")
    parser.add_argument("--steps", type=int, help="in place of the task's own; then nothing is kept")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # TASK-LIBRARY-SEED: what the processes run
    options = parser.parse_args(argv)
    if options.one:
        task, library, seed = options.one.split("-")
        print(json.dumps(race(task, library, int(seed), options.weights, options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = options.weights
        if not weights and not options.page:
            from jaxrl_llm.models.model import load_model, save_hf

            weights = f"{folder}/model"
            save_hf(load_model("embedded:sort"), weights)
        names = (options.tasks.split(","), options.seeds.split(","), options.libraries.split(","))
        for task, seed, library in itertools.product(*names) if not options.page else ():
            name = f"{task}-{library}-{seed}"
            if (STORE / f"{name}.json").exists() and options.steps is None:
                continue
            print(name, flush=True)
            command = [sys.executable, "-m", "benchmarks.race", f"--one={name}", f"--weights={weights}"]
            command += [] if options.steps is None else [f"--steps={options.steps}"]
            environment = os.environ | {"RACE_BEGAN": str(time.time())}
            done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            record = json.loads(done.stdout.splitlines()[-1])
            print(f"{record['lines'][-1]} {reached(record['lines'], record['settings']['level'])}", flush=True)
            if options.steps is None:
                STORE.mkdir(parents=True, exist_ok=True)
                (STORE / f"{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    if records := stored():
        PAGE.write_text(page(records), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
