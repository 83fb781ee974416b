"""Time to reward, side by side: GRPO by this library, TRL and Tunix, from the same weights to the same level.

    python -m benchmarks.race                                                # the embedded model sorts: half an hour
    python -m benchmarks.race --tasks=reverse,sums,chain_sum --weights=FOLDER --libraries=jaxrl_llm,trl,tunix    # hours
    python -m benchmarks.race --page                                         # the page and the pictures alone

Records of the second line are of SmolLM2-135M-Instruct. All libraries get the same model folder, prompts, reward
function, seeds and settings (CONTESTS), and compute in float32 on the same cores. The reward function itself keeps the
record: whenever it is called, with all completions of a step, it writes down the seconds and the processor's seconds
since its process began, the tokens so far, and the mean reward. So nothing is left out: imports, compilation and
loading count, evaluations and files are none. A run ends when it has reached the level.

Each run is a process of its own; nothing else should run on the machine meanwhile, though the processor's seconds tell
little of it. Records are kept in benchmarks/results/race/TASK-LIBRARY-SEED.json, runs that are there are not repeated,
and benchmarks/results/race.md and race.svg are made from them alone. TRL and the picture come with
`pip install -e ".[dev,report]"`; Tunix gets an environment of its own (benchmarks/environments.py).
"""

import argparse
import difflib
import itertools
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import environments, run
from benchmarks.cases import TUNIX
from benchmarks.page import table
from benchmarks.task import Task

ROOT = Path(__file__).parent.parent
STORE, PAGE, PICTURE = (ROOT / "benchmarks" / "results" / name for name in ("race", "race.md", "race.svg"))
LIBRARIES = ("jaxrl_llm", "trl")  # unless others are asked for
SEEDS = (0, 1, 2)
WINDOW = 5  # steps whose mean reward has to reach the level
Row = dict[str, Any]


class Settings(NamedTuple):
    """What all libraries are told."""

    steps: int  # at most
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


def adding(seed: int) -> list[Row]:
    """Sums and differences of two or three numbers below 100: reasoning-gym's chain_sum."""
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", size=4096, seed=seed, max_terms=3, min_digits=1, max_digits=2)
    return [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in made]


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
    "reverse": Contest(reversing, alike, Settings(60, 8, 8, 64, 12, 3e-5, 0.3)),
    "sums": Contest(summing, last_number, Settings(60, 4, 8, 80, 24, 4e-5, 0.3)),
    "chain_sum": Contest(adding, last_number, Settings(60, 4, 8, 64, 16, 4e-5, 0.3)),
}


class Recorder:
    """A reward function that keeps a line for each step."""

    def __init__(self, contest: Contest):
        self.reward, self.level = contest.reward, contest.settings.level
        self.lines, self.tokens = [], 0
        self.__name__ = "reward"  # by which TRL calls it

    def done(self) -> bool:
        """Whether the level has been reached."""
        return reached(self.lines, self.level) is not None

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

    class Ends:
        """Ends the run at the level."""

        def on_step(self, _):
            return "stop" if record.done() else None

    jaxrl_llm.train(config, rows, rewards=record, callbacks=[Ends()])


def with_trl(folder: str, rows: list[Row], record: Recorder, s: Settings, seed: int, output: str) -> None:
    """A run of TRL's GRPOTrainer: one batch a step, nothing recomputed."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Ends(TrainerCallback):
        """Ends the run at the level."""

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = control.should_training_stop or record.done()
            return control

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
        callbacks=[Ends()],
    )  # fmt: skip
    trainer.train()


def with_tunix(folder: str, rows: list[Row], record: Recorder, s: Settings, seed: int, output: str) -> None:
    """A run of Tunix's GRPOLearner with its own sampler, one mesh for all roles."""
    import jax
    import optax
    from transformers import AutoTokenizer
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    from benchmarks.peers.with_tunix import load

    del output
    texts = AutoTokenizer.from_pretrained(folder)
    stop, pad = texts.eos_token_id, texts.convert_tokens_to_ids("<|endoftext|>")

    class Tokenizer:
        """The model's own. Tunix finds padding by its id, so that it must be one that no prompt has."""

        def encode(self, text, **_):
            return texts.encode(text, add_special_tokens=False)

        def decode(self, ids, **_):
            return texts.decode(ids, skip_special_tokens=True)

        bos_id, eos_id, pad_id = (staticmethod(lambda i=i: i) for i in (texts.bos_token_id, stop, pad))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model, _ = load(Task("", "", Path(folder), None), mesh)
    role, rate = rl_cluster.Role, optax.schedules.join_schedules(
        [optax.linear_schedule(0.0, s.learning_rate, 5), optax.constant_schedule(s.learning_rate)], [5]
    )  # fmt: skip
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
        rollout_engine="vanilla", offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.0)
            ),
            eval_every_n_steps=10**6, max_steps=s.steps,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=s.tokens, max_prompt_length=s.prompt_tokens,
            kv_cache_size=s.prompt_tokens + s.tokens, temperature=1.0, top_p=1.0, top_k=None, eos_tokens=[stop],
        ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(actor=model, reference=None, tokenizer=Tokenizer(), cluster_config=config)
    generate, sampled = cluster.generate, []

    def kept(*arguments, **options):
        found = generate(*arguments, **options)
        sampled[:] = found.tokens
        return found

    def reward(prompts, completions, answer, **_) -> list[float]:
        del prompts
        return record(completions, answer, sampled)  # pyright: ignore[reportReturnType]

    def batches():
        order = np.random.default_rng(seed).permutation(len(rows))
        for step in range(s.steps):
            if record.done():
                return
            config.rollout_config.seed = seed * s.steps + step  # else its sampler draws the same numbers at each step
            chosen = [rows[i] for i in order[step * s.prompts : (step + 1) * s.prompts]]
            asked = [
                texts.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in chosen
            ]
            yield {"prompts": np.array(asked), "answer": np.array([row["answer"] for row in chosen])}

    cluster.generate = kept
    algorithm = grpo_learner.GRPOConfig(
        num_generations=s.group, num_iterations=1, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"
    )
    with mesh:
        grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward).train(batches())


RUNNERS = {"jaxrl_llm": with_jaxrl_llm, "trl": with_trl, TUNIX: with_tunix}


def race(name: str, weights: str, rows: Path, steps: int | None) -> Row:
    """The record of one run, TASK-LIBRARY-SEED, in this process."""
    task, library, seed = name.split("-")
    contest = CONTESTS[task]
    settings = contest.settings._replace(**({} if steps is None else {"steps": steps}))
    record = Recorder(contest)
    with tempfile.TemporaryDirectory() as output:
        RUNNERS[library](weights, json.loads(rows.read_text(encoding="utf-8")), record, settings, int(seed), output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    about = {"settings": settings._asdict(), "cores": len(os.sched_getaffinity(0)), "weights": Path(weights).name}
    return about | {"peak": peak, "lines": record.lines}


def reached(lines: list[Row], level: float) -> Row | None:
    """The line at which the mean reward of the last steps has reached the level; None where it never has."""
    for end in range(WINDOW, len(lines) + 1):
        if statistics.mean(line["reward"] for line in lines[end - WINDOW : end]) >= level:
            return lines[end - 1] | {"step": end}
    return None


def spread(values: list[float], digits: int = 0) -> str:
    """The median, and what the values lie between."""
    if not values:
        return ""
    low, middle, high = (f"{x:,.{digits}f}" for x in (min(values), statistics.median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def page(store: dict[tuple[str, str], list[Row]]) -> str:
    """The table of all records."""
    head = ["task", "level", "library", "seeds", "reached it", "steps", "seconds", "CPU seconds", "tokens",
            "s to the first step", "last reward", "peak GB"]  # fmt: skip
    rows = [head]
    for (task, library), records in sorted(store.items()):
        level = records[0]["settings"]["level"]
        ends = [end for record in records if (end := reached(record["lines"], level)) is not None]
        found = [spread([end[name] for end in ends]) for name in ("step", "seconds", "cpu", "tokens")]
        first = spread([record["lines"][0]["seconds"] for record in records])
        last = spread([statistics.mean(line["reward"] for line in record["lines"][-WINDOW:]) for record in records], 3)
        peak = spread([record["peak"] / 1e9 for record in records if "peak" in record], 1)
        rows.append([task, f"{level:g}", library, str(len(records)), str(len(ends)), *found, first, last, peak])
    cores = sorted({record["cores"] for records in store.values() for record in records})
    return (
        "# Time to reward\n\nWritten by `python -m benchmarks.race` from the records in benchmarks/results/race; "
        f"medians over seeds, and what they lie between; {', '.join(map(str, cores))} CPU cores, float32. A level is "
        f"reached by the mean of {WINDOW} steps. Time counts from the start of the process.\n\n"
        + table(rows)
        + "\n\n![reward by seconds and by tokens](race.svg)\n"
    )


def picture(store: dict[tuple[str, str], list[Row]]) -> None:
    """Draws the mean reward of the last steps by seconds and by tokens, a line for each record."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "race"  # so that the same records make the same file
    from matplotlib import pyplot

    tasks = sorted({task for task, _ in store})
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(9, 2.6 * len(tasks)), squeeze=False, sharey="row")
    for (task, library), records in sorted(store.items()):
        colour = f"C{list(RUNNERS).index(library)}"
        for axis, name in zip(axes[tasks.index(task)], ("seconds", "tokens"), strict=True):
            for i, record in enumerate(records):
                lines = record["lines"]
                means = [
                    statistics.mean(line["reward"] for line in lines[max(0, end - WINDOW) : end])
                    for end in range(1, len(lines) + 1)
                ]
                label = library if i == 0 else None
                axis.plot([line[name] for line in lines], means, color=colour, linewidth=1, label=label)
            axis.axhline(records[0]["settings"]["level"], color="#999", linewidth=0.6, linestyle=":")
            axis.set(xlabel=name, ylabel=f"{task}: reward" if name == "seconds" else None, xlim=(0, None))
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


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
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help=f"of {', '.join(RUNNERS)}")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--weights", help="a model folder; the embedded model's unless given")
    parser.add_argument("--steps", type=int, help="in place of the task's own; then nothing is kept")
    parser.add_argument("--tunix-python", type=Path, help="an interpreter that has Tunix already")
    parser.add_argument("--page", action="store_true", help="only write the page and draw the picture")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # TASK-LIBRARY-SEED: what the processes run
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # its data
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(race(options.one, options.weights, options.rows, options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = options.weights
        if not weights and not options.page:
            from jaxrl_llm.models.model import load_model, save_hf

            weights = f"{folder}/embedded"
            save_hf(load_model("embedded:sort"), weights)
        names = (options.tasks.split(","), options.seeds.split(","), options.libraries.split(","))
        for task, seed, library in itertools.product(*names) if not options.page else ():
            name = f"{task}-{library}-{seed}"
            if (STORE / f"{name}.json").exists() and options.steps is None:
                continue
            print(name, flush=True)
            python = sys.executable
            if library == TUNIX:
                python = environments.python_of(TUNIX, run.CACHE, options.tunix_python)
            # Every library reads the same file: what makes the rows need not be in its environment.
            rows = Path(folder) / "rows.json"
            rows.write_text(json.dumps(CONTESTS[task].rows(int(seed))), encoding="utf-8")
            command = [str(python), "-m", "benchmarks.race", f"--one={name}", f"--weights={weights}", f"--rows={rows}"]
            command += [] if options.steps is None else [f"--steps={options.steps}"]
            environment = os.environ | {"RACE_BEGAN": str(time.time()), "BENCHMARK_DTYPE": "float32"}
            done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            record = json.loads(done.stdout.splitlines()[-1])
            print(f"{record['lines'][-1]} {reached(record['lines'], record['settings']['level'])}", flush=True)
            if options.steps is None:
                STORE.mkdir(parents=True, exist_ok=True)
                (STORE / f"{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    if options.steps is None and (records := stored()):
        PAGE.write_text(page(records), encoding="utf-8")
        picture(records)


if __name__ == "__main__":
    main(sys.argv[1:])
