"""Time to reward, side by side: this library, TRL and Tunix, from the same weights to the same level.

    python -m benchmarks.race                                                # the embedded model sorts: ten minutes
    python -m benchmarks.race --tasks=reverse,sums,chain_sum,sft,dpo --weights=FOLDER --libraries=jaxrl_llm,trl,tunix
    python -m benchmarks.race --page                                         # the page and the pictures alone

Records of the second line are of SmolLM2-135M-Instruct, and take hours. All libraries get the same model folder,
prompts, rewards, seeds and settings (contests.py), and compute in float32 on the same cores. GRPO runs to a mean
reward: the reward function itself keeps the record, whenever it is called with all completions of a step. SFT and DPO
run to a loss on held-out rows, as each library's own evaluation gives it every few steps. A line of a record has the
seconds and the processor's seconds since the process began, so nothing is left out: imports, compilation and loading
count. A run ends when it has reached the level. Seconds are compared within a seed, as another seed's may have been
measured on another machine.

Each run is a process of its own; nothing else should run on the machine meanwhile, though the processor's seconds tell
little of it. Records are kept in benchmarks/results/race/TASK-LIBRARY-SEED.json, and runs that have one are repeated
with --again alone; the table in docs/how_good.md and its picture are made from the records. TRL and the picture come
with `pip install -e ".[dev,report]"`; Tunix gets an environment of its own (benchmarks/environments.py).
"""

import argparse
import importlib
import itertools
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import environments, run
from benchmarks.cases import OURS, TRL, TUNIX
from benchmarks.marks import put
from benchmarks.page import table
from benchmarks.race.contests import CONTESTS, Row
from benchmarks.race.record import Record, courses, measured, reached

ROOT = Path(__file__).parent.parent.parent
STORE, PAGE = ROOT / "benchmarks" / "results" / "race", ROOT / "docs" / "how_good.md"
PICTURE = ROOT / "docs" / "images" / "race.svg"
LIBRARIES = (OURS, TRL, TUNIX)
SEEDS = (0, 1, 2)
Store = dict[tuple[str, str], dict[str, Row]]  # records by task and library, and by seed


def race(name: str, weights: str, rows: Path, steps: int | None) -> Row:
    """The record of one run, TASK-LIBRARY-SEED, in this process."""
    task, library, seed = name.split("-")
    contest = CONTESTS[task]
    settings = contest.settings._replace(**({} if steps is None else {"steps": steps}))
    record, data = Record(contest), json.loads(rows.read_text(encoding="utf-8"))
    runner = importlib.import_module(f"benchmarks.race.with_{library}")
    with tempfile.TemporaryDirectory() as output:
        runner.run(contest.method, weights, data, record, settings, int(seed), output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    machine = {"cores": len(os.sched_getaffinity(0)), "processor": _processor()}
    about = {"settings": settings._asdict(), **machine, "weights": Path(weights).name}
    return about | {"peak": peak, "lines": record.lines}


def _processor() -> str:
    """The name that Linux gives the processor; what Python knows of it elsewhere."""
    about = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", about.read_text(encoding="utf-8")) if about.exists() else None
    return found[1] if found else platform.processor()


def spread(values: list[float], digits: int = 0) -> str:
    """The median, and what the values lie between."""
    if not values:
        return ""
    low, middle, high = (f"{x:,.{digits}f}" for x in (min(values), statistics.median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def summary(store: Store) -> str:
    """The table of all records: medians over seeds, and what they lie between."""
    head = ["task", "level", "library", "seeds", "reached it", "steps", "seconds", "times ours", "CPU seconds",
            "tokens sampled", "s to the first line", "at last", "peak GB"]  # fmt: skip
    rows = [head]
    for (task, library), seeds in sorted(store.items()):
        records = list(seeds.values())
        level = records[0]["settings"]["level"]
        ends = {seed: end for seed, record in seeds.items() if (end := reached(record["lines"], level)) is not None}
        steps, seconds, processors, tokens = (
            spread([end[name] for end in ends.values() if name in end]) for name in ("step", "seconds", "cpu", "tokens")
        )
        # Of one seed, whose runs share a machine; another seed's may be another.
        ours = {seed: reached(record["lines"], level) for seed, record in store.get((task, OURS), {}).items()}
        times = spread([end["seconds"] / own["seconds"] for seed, end in ends.items() if (own := ours.get(seed))], 1)
        found = [steps, seconds, "" if library == OURS else times, processors, tokens]
        first = spread([record["lines"][0]["seconds"] for record in records])
        last = spread([courses(record["lines"])[-1] for record in records], 3)
        peak = spread([record["peak"] / 1e9 for record in records if "peak" in record], 1)
        asked = f"{measured(records[0]['lines'])} {level:g}"
        rows.append([task, asked, library, str(len(records)), str(len(ends)), *found, first, last, peak])
    return table(rows) + "\n"


def picture(store: Store) -> None:
    """Draws what approaches the level by seconds, and by sampled tokens or steps, a line for each record."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "race"  # so that the same records make the same file
    from matplotlib import pyplot

    tasks = sorted({task for task, _ in store})
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(9, 2.6 * len(tasks)), squeeze=False, sharey="row")
    for (task, library), seeds in sorted(store.items()):
        records = list(seeds.values())
        kind = measured(records[0]["lines"])
        names = ("seconds", "step" if kind == "loss" else "tokens")
        for axis, name in zip(axes[tasks.index(task)], names, strict=True):
            for i, record in enumerate(records):
                along = [line[name] for line in record["lines"]]
                label = library if i == 0 else None
                colour = f"C{LIBRARIES.index(library)}"
                axis.plot(along, courses(record["lines"]), color=colour, linewidth=1, label=label)
            axis.axhline(records[0]["settings"]["level"], color="#999", linewidth=0.6, linestyle=":")
            axis.set(xlabel=name, ylabel=f"{task}: {kind}" if name == "seconds" else None)
    for axis in axes.flat:
        axis.set_xlim(left=0)
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def stored() -> Store:
    """The records that are kept."""
    found: Store = {}
    for file in sorted(STORE.glob("*.json")):
        task, library, seed = file.stem.split("-")
        found.setdefault((task, library), {})[seed] = json.loads(file.read_text(encoding="utf-8"))
    return found


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="sort", help=f"of {', '.join(CONTESTS)}")
    parser.add_argument("--libraries", default=f"{OURS},{TRL}", help=f"of {', '.join(LIBRARIES)}")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--weights", help="a model folder; the embedded model's unless given")
    parser.add_argument("--steps", type=int, help="in place of the task's own; then nothing is kept")
    parser.add_argument("--again", action="store_true", help="measure the chosen runs anew")
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
            if (STORE / f"{name}.json").exists() and options.steps is None and not options.again:
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
        put(PAGE, "race", summary(records))
        picture(records)


if __name__ == "__main__":
    main(sys.argv[1:])
