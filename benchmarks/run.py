"""Measures this library, its peers and the machine's limits on the same work: benchmarks/results/performance.*.

    python -m benchmarks.run                                  # everything that is not in performance.json yet
    python -m benchmarks.run --cases=grpo,sft --peers=trl     # some cases, one peer
    python -m benchmarks.run --cases=grpo --again             # these anew
    python -m benchmarks.run --smollm2=FOLDER                 # the trained SmolLM2 in place of a random one
    python -m benchmarks.run --dtype=bfloat16                 # every library in bfloat16
    python -m benchmarks.run --device=gpu                     # larger models, on an accelerator
    python -m benchmarks.run --table                          # only the table, from what is stored

Every task is a process of its own, one after the other; nothing else should run on the machine meanwhile. Two CPU
cores take about 50 minutes. A run that is stopped goes on where it was. Peers need their own environments, which are
made under --environments; one that cannot be installed, or fails, is named in the table with its error.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import environments, folders
from benchmarks.cases import CASES, DEFAULT_CASES, DEVICES, LIBRARIES, LIMIT, OURS, SHAPES, TRL, TUNIX, usual_dtype
from benchmarks.meter import result_of
from benchmarks.table import text_of

ROOT = Path(__file__).parent.parent
STORE = ROOT / "benchmarks" / "results"
CACHE = Path("~/.cache/jaxrl_llm/benchmarks").expanduser()
MODULES = {OURS: "benchmarks.ours", LIMIT: "benchmarks.limits", **environments.MODULES}
STORES = {"cpu": "performance", "gpu": "performance_gpu"}
PATIENCE = 900  # seconds a task may take


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    options = _options(argv)
    usual = options.dtype == usual_dtype(options.device)
    name = STORES[options.device] + ("" if usual else f"_{options.dtype}")
    store = options.results or STORE / f"{name}.json"
    found = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {"tasks": {}}
    if not options.table:
        found["machine"], found["dtype"] = _machine(options.device), options.dtype
        _measure(options, found, store)
    text = text_of(found)
    store.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--models", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--peers", default=f"{TRL},{TUNIX}", help="trl, tunix, both, or nothing")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPUs, else bfloat16")
    parser.add_argument("--environments", type=Path, default=CACHE, help="folder of peers' environments and of models")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL already")
    parser.add_argument("--tunix-python", type=Path, help="an interpreter that has Tunix already")
    parser.add_argument("--smollm2", type=Path, help="a Hugging Face folder of SmolLM2-135M in fp32")
    parser.add_argument("--intervals", type=int, help="of each task, in place of five")
    parser.add_argument("--again", action="store_true", help="measure the chosen tasks anew")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, help="where the JSON is kept")
    options = parser.parse_args(argv)
    options.dtype = options.dtype or usual_dtype(options.device)
    options.models = options.models.split(",") if options.models else DEVICES[options.device]
    options.cases = options.cases.split(",")
    options.peers = [peer for peer in options.peers.split(",") if peer]
    for names, known in ((options.models, SHAPES), (options.cases, CASES), (options.peers, environments.PINS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def _measure(options: argparse.Namespace, found: dict[str, Any], store: Path) -> None:
    pythons: dict[str, Path | OSError] = {OURS: Path(sys.executable), LIMIT: Path(sys.executable)}
    for model in options.models:
        folder = folders.folder_of(model, options.environments, options.smollm2 if model == "smollm2" else None)
        for case in options.cases:
            for library in CASES[case]:
                name = f"{model}/{case}/{library}"
                if library not in (OURS, LIMIT, *options.peers):
                    continue
                if case == "scaling" and model != DEVICES[options.device][0]:
                    continue
                if "seconds" in found["tasks"].get(name, {}) and not options.again:
                    continue
                if library not in pythons:
                    pythons[library] = _python_or_error(library, options)
                result = _task(library, pythons[library], model, case, folder, options)
                found["tasks"][name] = result
                print(f"{name}: {result.get('error') or format(result['seconds'], '.3f') + ' s'}", flush=True)
                store.parent.mkdir(parents=True, exist_ok=True)
                part = store.with_suffix(".part")
                part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                part.replace(store)


def _python_or_error(library: str, options: argparse.Namespace) -> Path | OSError:
    given = {TRL: options.trl_python, TUNIX: options.tunix_python}[library]
    try:
        return environments.python_of(library, options.environments, given)
    except OSError as error:
        return error


def _task(library: str, python: Path | OSError, model: str, case: str, folder: Path, options) -> dict[str, Any]:
    """What the task printed, or {"error"}."""
    if isinstance(python, OSError):
        return {"error": f"not installed: {python}"}
    command = [str(python), "-m", MODULES[library], f"--model={model}", f"--case={case}", f"--folder={folder}"]
    command += [f"--intervals={options.intervals}"] if options.intervals and library != LIMIT else []
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(options), capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {PATIENCE} s"}
    result = result_of(done.stdout)
    if done.returncode or result is None:
        lines = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        return {"error": lines[-1][-300:]}
    return {**result, "whole": time.perf_counter() - began}


def _environment(options: argparse.Namespace) -> dict[str, str]:
    cores = str(len(os.sched_getaffinity(0)))
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    names = {"cpu": ("cpu", "cpu"), "gpu": ("cuda", "cuda")}[options.device]
    return kept | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": cores, "JAX_PLATFORMS": names[0], "BENCHMARK_DEVICE": names[1],
        "BENCHMARK_DTYPE": options.dtype,
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1",
    }  # fmt: skip


def _machine(device: str) -> str:
    kind = "CPU cores" if device == "cpu" else "CPU cores and an accelerator"
    return f"{len(os.sched_getaffinity(0))} {kind}, Python {sys.version.split()[0]}, jax {version('jax')}"


if __name__ == "__main__":
    assert set(LIBRARIES) == set(MODULES)
    main(sys.argv[1:])
