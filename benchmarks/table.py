"""The text of benchmarks/results/performance.md, from what benchmarks/run.py keeps."""

from collections.abc import Mapping
from typing import Any

from benchmarks.cases import CASES, LIMIT, OURS, SHAPES, TITLES, TRL, TUNIX, useful_tokens
from benchmarks.meter import INTERVALS
from benchmarks.page import table

PEERS = (TRL, TUNIX)
NAMES = {TRL: "TRL", TUNIX: "Tunix"}
Tasks = Mapping[str, Mapping[str, Any]]


def text_of(found: Mapping[str, Any]) -> str:
    """The page; what was not measured is left out, what failed is named."""
    tasks = found["tasks"]
    dtype = found.get("dtype", "float32")
    parts = [HEAD.format(machine=found.get("machine", "an unknown machine"), dtype=dtype)]
    for model in SHAPES:
        rows = [row for case in CASES if (row := _row(tasks, model, case))]
        if rows:
            head = ["", "seconds", "useful tokens/s", *(f"{NAMES[p]} / ours" for p in PEERS), "of the limit",
                    "useful decode", "peak GB", *(f"{NAMES[p]} GB" for p in PEERS), "first"]  # fmt: skip
            parts.append(f"\n## {model}\n\n{_shape(model)}\n\n{table([head, *rows])}")
        phases = [row for case in CASES if (row := _phases(tasks, model, case))]
        if phases:
            head = ["", "decode, share of its products", "of the bandwidth", "update, share of its products",
                    "update TFLOP/s", "of the matrix rate"]  # fmt: skip
            parts.append(f"\n{table([head, *phases])}")
        if "points" in (scaling := tasks.get(f"{model}/scaling/{OURS}", {})):
            parts.append("\n" + _scaling(scaling))
    rates = [task for task in tasks.values() if "matrix_rate" in task]
    if rates:
        best = max(task["matrix_rate"] for task in rates), max(task["bandwidth"] for task in rates)
        device = rates[0].get("device", "cpu")
        device = "The machine" if device == "cpu" else device
        rate = f"{best[0] / 1e12:.3g} TFLOP/s in square products"
        parts.append(f"\n{device}: {rate}, {best[1] / 1e9:.0f} GB/s read.\n")
    errors = [f"- {name}: {task['error']}" for name, task in tasks.items() if "error" in task]
    if errors:
        parts.append("\nNot measured:\n\n" + "\n".join(errors) + "\n")
    few = [name for name, task in tasks.items() if 0 < len(task.get("intervals", ())) < INTERVALS]
    if few:
        parts.append(f"\nMedians of fewer intervals: {', '.join(few)}.\n")
    disturbed = [name for name, task in tasks.items() if task.get("disturbed")]
    if disturbed:
        parts.append(f"\nOther processes used the cores during: {', '.join(disturbed)}.\n")
    return "".join(parts)


def _shape(model: str) -> str:
    s = SHAPES[model]
    return (
        f"{s.prompts} prompts x {s.group} completions, prompts of {s.prompt} tokens, {s.new} new ones; geometric "
        f"lengths: mean {useful_tokens('rollout_geometric', s) / s.completions:.1f}, at most {s.longest}; DPO "
        f"{s.pairs} pairs, SFT {s.rows} rows, of {s.row} tokens."
        + (f" Adapters of rank {s.lora} are trained." if s.lora else "")
    )


def _row(tasks: Tasks, model: str, case: str) -> list[str] | None:
    ours = tasks.get(f"{model}/{case}/{OURS}", {})
    if "seconds" not in ours or case == "scaling":
        return None
    peers = [tasks.get(f"{model}/{case}/{peer}", {}) for peer in PEERS]
    limit = tasks.get(f"{model}/{case}/{LIMIT}", {})
    samples = case.startswith(("rollout", "grpo"))
    speed = f"{useful_tokens(case, SHAPES[model]) / ours['seconds']:.0f}" if samples else ""
    return [
        TITLES[case], f"{ours['seconds']:.3g}", speed, *(_ratio(peer, ours) for peer in peers), _share(limit, ours),
        f"{ours['useful']:.2f}" if "useful" in ours else "", f"{ours['peak_gb']:.2f}",
        *(f"{peer['peak_gb']:.2f}" if "peak_gb" in peer else "" for peer in peers), f"{ours['first']:.1f}",
    ]  # fmt: skip


def _ratio(peer: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "error" in peer:
        return "failed"
    return f"{peer['seconds'] / ours['seconds']:.2f}x ({peer['seconds']:.3g} s)" if "seconds" in peer else ""


def _share(limit: Mapping[str, Any], ours: Mapping[str, Any], phase: str = "seconds") -> str:
    return f"{limit[phase] / ours[phase]:.0%}" if phase in limit and phase in ours else ""


def _phases(tasks: Tasks, model: str, case: str) -> list[str] | None:
    ours, limit = (tasks.get(f"{model}/{case}/{library}", {}) for library in (OURS, LIMIT))
    if "seconds" not in ours or "seconds" not in limit:
        return None
    decode = {**ours, "time/rollout": ours["seconds"]} if case.startswith("rollout") else ours
    ours, limit = _updates(ours), _updates(limit)
    rate, share, read = "", "", ""
    if "decode_bytes" in limit and "time/rollout" in decode:
        read = f"{limit['decode_bytes'] / decode['time/rollout'] / limit['bandwidth']:.0%}"
    if "update_flops" in limit and "time/update" in ours:
        speed = limit["update_flops"] / ours["time/update"]
        rate, share = f"{speed / 1e12:.3g}", f"{speed / limit['matrix_rate']:.0%}"
    return [TITLES[case], _share(limit, decode, "time/rollout"), read, _share(limit, ours, "time/update"), rate, share]


def _updates(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the log-probs of the reference in the update, which waits for them."""
    return {**task, "time/update": task["time/update"] + task.get("time/logps", 0.0)} if "time/update" in task else task


def _scaling(task: Mapping[str, Any]) -> str:
    points = ", ".join(f"{tokens}: {seconds:.2f}" for tokens, seconds in task["points"])
    return (
        f"Seconds of a GRPO step by tokens: {points}. A line fits them with R² = {task['r2']:.4f}; from the first to "
        f"the last they grow with the power {task['power']:.2f} of the tokens.\n"
    )


HEAD = """# Performance

Written by `python -m benchmarks.run` on {machine}. Every task is a process of its own; seconds are the median of at
least five intervals, where nothing else is said, after a first one that compiles (`first`, in seconds). Peers get the
same weights, prompts, lengths and number of threads, in {dtype}. Ratios are peers' seconds over ours.

The limit of a case is the time of its matrix products alone, each token and each prompt counted once: nothing is
allowed for attention, sampling, norms, the optimizer or copies. Useful decode is the share of decode steps that gave a
token which was kept. Peak GB is resident memory of the whole process, or what was in use of an accelerator's memory.
The bandwidth's share counts what decoding must read: matrices, keys and values, once a step, a prompt's once for all of
its rows. An update's operations, of which the matrix rate's share is, count no recomputation.
"""
