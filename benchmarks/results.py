"""Runs the configurations on several seeds, and writes docs/results.md from what they left.

    python -m benchmarks.results                        # every configuration that has no results yet, seeds 0, 1, 2
    python -m benchmarks.results grpo ppo --seeds=0     # these, anew
    python -m benchmarks.results grpo --steps=60        # shorter; the page says so
    python -m benchmarks.results --page                 # the page alone

Each run is a process of its own, as a user would start it; nothing else should run on the machine meanwhile. What a run
logged is kept in benchmarks/results/<config>-<seed>.json, and the page is made from those files alone.
"""

import argparse
import functools
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.page import page
from jaxrl_llm.config.resolve import import_file

ROOT = Path(__file__).parent.parent
STORE = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
SEEDS = (0, 1, 2)
ONLINE = (
    "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "gdpo", "rloo", "remax", "opo",
    "a2po", "online_dpo", "passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo",
)  # fmt: skip
OFFLINE = ("sft", "reward_model", "prm", "dpo", "ipo", "kto", "orpo", "cpo", "simpo", "alphapo", "tpo")
IMAGES = ("vision_grpo", "vision_grpo_blank")
FURTHER = tuple(import_file(ROOT / "configs" / "further.py").FORMS)
STALENESS = (0, 1, 2, 4, 8)
IN_FLIGHT = ("ahead_in_flight_1",)
AHEAD = (*(f"ahead_{n}" for n in STALENESS), *(f"ahead_clipped_{n}" for n in STALENESS[1:]), *IN_FLIGHT)
SELF = ("sdpo", "sdft")  # the policy as its own teacher
TAUGHT = "distill"  # from a teacher, whose own run is kept with it
SPANS = "gold"  # from the same teacher, as one of another tokenizer
CREDIT = {"credit_grpo": "group", "credit_gigpo": "gigpo(gamma=0.0)", "credit_turn": "turn(gamma=0.0)"}  # of a game
# What makes the model that these start from or learn from, with the same seed, and the key that names it.
STARTS = dict.fromkeys(SELF, ("sdpo.py:start", "model.path"))
STARTS |= dict.fromkeys((TAUGHT, SPANS), ("grpo.py", "teacher.path"))
STARTS |= dict.fromkeys(CREDIT, ("gigpo.py:start", "model.path"))  # but with seed 0: one model for all
CONTROL = "sft_control"  # the time of a GRPO run spent on more supervised fine-tuning
NAMES = (
    *ONLINE,
    *FURTHER,
    *AHEAD,
    TAUGHT,
    SPANS,
    *SELF,
    *CREDIT,
    *IMAGES,
    *OFFLINE,
    CONTROL,
)  # in the order of the page
SPECS = {"vision_grpo_blank": "vision_grpo.py:blank"}  # where the name is not that of a file
SPECS |= {name: f"further.py:{name}" for name in FURTHER}
SPECS |= dict.fromkeys(AHEAD, "async_grpo.py") | dict.fromkeys(IN_FLIGHT, "async_grpo.py:in_flight")
SPECS |= dict.fromkeys(CREDIT, "gigpo.py")
FLAGS = {
    name: ("--config.total_steps=120", "--config.algorithm.beta=0", f"--config.rollout.staleness={name.split('_')[-1]}")
    for name in AHEAD
}
CLIPPED = ("--config.algorithm.importance_correction=none", "--config.algorithm.old_logps=sampler")
FLAGS |= {name: (*FLAGS[name], *CLIPPED) for name in AHEAD if "clipped" in name}
FLAGS |= {
    name: (f"--config.algorithm.advantage={advantage}", "--config.eval.greedy=false")
    for name, advantage in CREDIT.items()
}
NAMING = "--config.logging.names=trl"
HEALTH = ("reward", "kl", "entropy", "completions/mean_length", "frac_reward_zero_std", "grad_norm")

Run = dict[str, Any]  # config, seed, seconds, steps, machine, and the logged lines that the page reads


def train(config: str, seed: int, *flags: str) -> Run:
    """One run of `configs/<config>.py`, or of what SPECS and FLAGS have for it; of TAUGHT also its teacher's."""
    with tempfile.TemporaryDirectory() as folder:
        first = None
        if config in STARTS:
            spec, key = STARTS[config]
            start, first = _start(spec, 0 if config in CREDIT else seed)
            flags = (f"--config.{key}={start}/hf", *flags)
        own = Path(folder) / config
        run = _run(SPECS.get(config, f"{config}.py"), seed, own, NAMING, *FLAGS.get(config, ()), *flags)
    return {"config": config, "seed": seed, **run} | ({"teacher": first} if config == TAUGHT else {})


@functools.cache
def _starts() -> tempfile.TemporaryDirectory[str]:
    """The folder of the models that runs start from, kept until the command ends."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _start(spec: str, seed: int) -> tuple[Path, Run]:
    """The folder and the run of a model that others start from, made once a command."""
    folder = Path(_starts().name) / f"{spec.replace(':', '_')}-{seed}"
    return folder, _run(spec, seed, folder, NAMING)


def _run(spec: str, seed: int, folder: Path, *flags: str) -> Run:
    """One run of a configuration: what it took, and what it logged."""
    command = [sys.executable, "-m", "jaxrl_llm.train", f"--config=configs/{spec}", f"--config.seed={seed}"]
    began, used = time.perf_counter(), _cpu_seconds()
    flags = (f"--config.output_dir={folder}", *flags)
    subprocess.run([*command, *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - used
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "steps": lines[-1]["step"],
        "machine": f"{os.cpu_count()} CPU cores, jax {jax.__version__}",
        "lines": [_kept(line) for line in lines if _is_kept(line, lines[-1]["step"])],
        "pace": sorted(b["time"] - a["time"] for a, b in itertools.pairwise(lines))[len(lines) // 3],  # seconds
    }


def _cpu_seconds() -> float:
    """Of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _is_kept(line: dict[str, Any], last: int) -> bool:
    return any(name.startswith("eval/") for name in line) or line["step"] in (1, 10, last)


def _kept(line: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in line if name.startswith("eval/") or name in HEALTH]
    return {"step": line["step"], **{name: line[name] for name in names}}


def control(seconds: float) -> Run:
    """More supervised fine-tuning of the shipped model, for as many steps as take about `seconds`."""
    flags = ["--config.model.random_init=false", "--config.data.eval_split=test", "--config.eval.prompts=256"]
    flags += ["--config.optimizer.warmup_steps=0", "--config.eval.every=0"]
    pace = train("sft_tiny", 0, "--config.total_steps=60", *flags)["pace"]
    return train("sft_tiny", 0, f"--config.total_steps={round(seconds / pace)}", *flags)


def store(name: str, run: Run) -> None:
    """Keeps the run under its name."""
    STORE.mkdir(exist_ok=True)
    (STORE / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def stored() -> dict[str, dict[int, Run]]:
    """The runs that are kept, by configuration and seed, in the order of the page."""
    found: dict[str, dict[int, Run]] = {name: {} for name in NAMES}
    for file in sorted(STORE.glob("*-[0-9]*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(file.stem.rpartition("-")[0], {})[run["seed"]] = run
    return {name: runs for name, runs in found.items() if runs}


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", choices=[[], *NAMES], metavar="CONFIG")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--steps", type=int, help="training steps, in place of the configuration's")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args(argv)
    chosen = options.configs or NAMES
    for name, seed in itertools.product([] if options.page else chosen, map(int, options.seeds.split(","))):
        known = stored()
        if (not options.configs and seed in known.get(name, {})) or (name == CONTROL and seed):
            continue
        print(f"{name}, seed {seed}", flush=True)
        if name == CONTROL:
            seconds = [run["seconds"] for run in known.get("grpo", {}).values()] or [120.0]
            run = control(sorted(seconds)[len(seconds) // 2])
        else:
            run = train(name, seed, *([f"--config.total_steps={options.steps}"] if options.steps else []))
        store(f"{name}-{seed}", run)
    PAGE.write_text(
        page(stored(), ONLINE, OFFLINE, CONTROL, IMAGES, SELF, FURTHER, AHEAD, TAUGHT, CREDIT, (SPANS,)),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
