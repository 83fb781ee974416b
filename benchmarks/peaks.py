"""Plans against what runs really need: writes benchmarks/results/peaks.json and the table of docs/plan.md.

    python -m benchmarks.peaks             # the cases that are missing
    python -m benchmarks.peaks --again     # all cases anew
    python -m benchmarks.peaks --page      # the table alone

Each case runs in a process of its own, on this machine's CPU: the configuration is planned, real steps are made, and
the largest resident memory of the second, less that before anything was built, is set beside the plan's peak. Of that,

- the process itself (modules, data, compiled programs) is what is resident between steps, less the arrays alive then;
- kept is what programs had freed and malloc had kept: the third step gives it back between its programs.
"""

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.marks import put

ROOT = Path(__file__).parent.parent
STORE, PAGE = ROOT / "benchmarks" / "results" / "peaks.json", ROOT / "docs" / "plan.md"
# A config file, the width of the model, and other keys.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "grpo, 85 M parameters": ("grpo.py", 768, {"batch.prompts": 16, "batch.microbatch_rows": 32}),
    "grpo, 85 M, remat": ("grpo.py", 768, {"batch.prompts": 16, "batch.microbatch_rows": 32, "model.remat": "block"}),
    "grpo, 85 M, LoRA": ("grpo.py", 768, {"batch.prompts": 16, "batch.microbatch_rows": 32, "lora.rank": 8}),
    "sft, 85 M parameters": ("sft.py", 768, {"batch.prompts": 256}),
    "dpo, 85 M parameters": ("dpo.py", 768, {"batch.prompts": 64}),
}


def status(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def settle() -> None:
    """Gives back what was freed, and forgets the largest resident memory so far."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def larger_model(source: Path, folder: Path, width: int) -> None:
    """A folder with the tokenizer of `source` and a config.json of 12 layers of that width."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    entries = json.loads((folder / "config.json").read_text())
    heads = width // 64
    entries |= {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 12, "head_dim": 64}
    entries |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    entries.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(entries))


def child(case: str) -> dict[str, float]:
    """The plan's peak, the measured one, and what of that is the process itself and kept, of a case, in bytes."""
    import jax

    from jaxrl_llm.commands.dry_run import widths
    from jaxrl_llm.config import assign
    from jaxrl_llm.config.flags import load_config_file
    from jaxrl_llm.models.files import hf
    from jaxrl_llm.tools.plan.planned import make_plan
    from jaxrl_llm.tools.plan.topology import at_hand_target
    from jaxrl_llm.training.setup.run import build
    from jaxrl_llm.training.step import improve
    from jaxrl_llm.training.update import merge_frozen

    name, width, keys = CASES[case]
    config = load_config_file(str(ROOT / "configs" / name))
    config.eval.every = -1
    for key, value in keys.items():
        assign(config, key, value)
    with tempfile.TemporaryDirectory() as folder:
        larger_model(hf.locate(config.model.path), Path(folder) / "model", width)
        config.model.path, config.model.random_init = f"{folder}/model", True
        target = at_hand_target(config)
        jax.block_until_ready(jax.numpy.ones(8))
        with jax.set_mesh(target.mesh):
            settle()
            before = status("VmRSS")
            parts = build(config, target.mesh)
            state: Any = parts.state
            peaks = []
            for step in (1, 2, 3):
                settle()
                key = jax.random.fold_in(jax.random.key(0), step)
                experience = parts.source.next(merge_frozen(state, parts.frozen), key)
                before_update = status("VmHWM")
                if step == 3:
                    jax.block_until_ready(experience.batch)
                    settle()
                parts = parts._replace(state=None)  # the update donates it
                state, updates = improve(parts, state, experience.batch)
                jax.block_until_ready((state, updates))
                peaks.append(max(status("VmHWM"), before_update) - before)
            settle()
            process = status("VmRSS") - before - sum(x.nbytes for x in jax.live_arrays())
            plan = make_plan(config, target, widths(parts), packer=parts.pack)
            parts.rewards.close()
    found = {"planned": plan.peak.peak, "held": sum(plan.held.values()), "measured": peaks[1]}
    return {**found, "process": process, "kept": peaks[1] - peaks[2]}


def measure(again: bool) -> dict[str, dict[str, float]]:
    """All cases; those that are stored already are kept unless `again`."""
    store = json.loads(STORE.read_text()) if STORE.is_file() and not again else {}
    for case in CASES:
        if case in store:
            continue
        command = [sys.executable, "-m", "benchmarks.peaks", f"--child={case}"]
        output = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        store[case] = json.loads(line.removeprefix("RESULT "))
        STORE.write_text(json.dumps(store, indent=1) + "\n")
        print(f"{case}: {store[case]}", flush=True)
    return store


def table(store: dict[str, dict[str, float]]) -> str:
    """The table of docs/plan.md."""
    head = ("held", "planned peak", "measured peak", "of it the process itself", "kept")
    rows = [["run", *(f"{name}, MB" for name in head), "the rest / planned"]]
    for case, found in store.items():
        numbers = [found[name] / 1e6 for name in ("held", "planned", "measured", "process", "kept")]
        _, planned, measured, process, kept = numbers
        rows.append([case, *(f"{number:.0f}" for number in numbers), f"{(measured - process - kept) / planned:.2f}"])
    return page.table(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure cases anew that are stored")
    parser.add_argument("--page", action="store_true", help="write the table alone")
    parser.add_argument("--child", help="one case, in this process")
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(child(arguments.child)))
        return
    put(PAGE, "peaks", table(json.loads(STORE.read_text()) if arguments.page else measure(arguments.again)))


if __name__ == "__main__":
    main()
