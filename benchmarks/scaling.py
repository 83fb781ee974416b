"""How the compiled update scales with devices: strong, weak, and by mesh axis; writes benchmarks/results/scaling.json.

    python -m benchmarks.scaling             # the points that are missing, 1 to 256 devices
    python -m benchmarks.scaling --again     # all points anew
    python -m benchmarks.scaling --page      # the tables of docs/plan.md alone

A GRPO update of a model with the shape of Llama 3.2 1B is compiled for that many simulated devices, in a process of its
own for each number, from shapes alone. Strong scaling keeps the rows of a step, weak scaling those of a device. With 1
to 8 devices a real GRPO step of the embedded model is made too: what it learns must not depend on their number.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.marks import put

ROOT = Path(__file__).parent.parent
STORE = ROOT / "benchmarks" / "results" / "scaling.json"
PAGE = ROOT / "docs" / "plan.md"
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REAL = (1, 2, 4, 8)
ROWS, PART = 1024, 4  # of a strong step; of a micro-batch in each row shard
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "hidden_act": "silu",
}  # fmt: skip
# What is cut, and whether the rows of a step or those of a device stay the same.
KINDS = {"data": "strong", "fsdp": "strong", "tensor": "strong", "fsdp, weak": "weak"}


def configuration(kind: str, devices: int, folder: str):
    """The configuration of one point."""
    from jaxrl_llm.config import default

    config = default()
    config.model.path, config.model.remat, config.batch.packing = folder, "block", "false"
    tensor = min(devices, 8) if kind == "tensor" else 1
    fsdp = 1 if kind == "data" else devices // tensor
    config.mesh.tensor, config.mesh.fsdp = tensor, fsdp
    shards = devices // tensor
    rows = ROWS if KINDS[kind] == "strong" else 8 * devices
    config.rollout.group_size, config.batch.prompts = 8, rows // 8
    config.batch.microbatch_rows = PART * shards
    return config


def compiled(devices: int, kinds: list[str]) -> dict[str, Any]:
    """The update on so many simulated devices: what one of them computes, holds and sends."""
    from jaxrl_llm.tools.plan.planned import make_plan
    from jaxrl_llm.tools.plan.topology import target

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for kind in kinds:
            config = configuration(kind, devices, folder)
            plan = make_plan(config, target(config, "h100", devices, simulate=True), only="update")
            update = plan.programs[0]
            found[kind] = {
                "mesh": dict(plan.target.mesh.shape),
                "flops": update.compiled_flops,
                "traced_flops": update.flops,
                "arguments": update.arguments,
                "temporaries": update.temporaries,
                "sent": update.sent,
                "collectives": {f"{x.kind} over {x.group}": x.sent for x in update.collectives},
                "seconds_to_compile": round(update.seconds, 1),
            }
    return found


def real(devices: int) -> dict[str, float]:
    """What a real GRPO step of the embedded model measures on so many simulated devices."""
    import jax

    from jaxrl_llm.config.flags import load_config_file
    from jaxrl_llm.training.setup.mesh import build_mesh
    from jaxrl_llm.training.setup.run import build
    from jaxrl_llm.training.step import improve
    from jaxrl_llm.training.update import merge_frozen

    config = load_config_file(f"{ROOT / 'configs' / 'grpo.py'}:tiny")
    config.batch.prompts, config.eval.every, config.mesh.fsdp = 8, -1, devices
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        parts = build(config, mesh)
        key = jax.random.fold_in(jax.random.key(0), 1)
        experience = parts.source.next(merge_frozen(parts.state, parts.frozen), key)
        _, updates = improve(parts, parts.state, experience.batch)
        parts.rewards.close()
        tokens = float((experience.batch.inputs.tokens * experience.batch.inputs.segments).sum())
        return {"tokens": tokens, **{name: float(updates[0][name]) for name in ("loss", "grad_norm", "entropy")}}


def child(devices: int, kinds: list[str]) -> None:
    """Prints the points of one number of devices as JSON; runs in a process of its own."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    found: dict[str, Any] = {"compiled": compiled(devices, kinds)}
    if devices in REAL:
        found["real"] = real(devices)
    print("RESULT " + json.dumps(found))


def measure(again: bool) -> dict[str, Any]:
    """All points; those that are stored already are kept unless `again`."""
    store = json.loads(STORE.read_text()) if STORE.is_file() and not again else {}
    for devices in DEVICES:
        if str(devices) in store:
            continue
        command = [sys.executable, "-m", "benchmarks.scaling", f"--child={devices}"]
        output = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        store[str(devices)] = json.loads(line.removeprefix("RESULT "))
        STORE.write_text(json.dumps(store, indent=1) + "\n")
        print(f"{devices} devices: done", flush=True)
    return store


def tables(store: dict[str, Any]) -> str:
    """The tables of docs/plan.md."""
    lines = []
    for kind, scaling in KINDS.items():
        points = {int(n): point["compiled"][kind] for n, point in store.items()}
        rows = f"{ROWS} rows" if scaling == "strong" else "8 rows for each device"
        lines += [f"\n**{kind.removesuffix(', weak')}, {scaling}: {rows} of 768 tokens.**\n"]
        lines += [
            "| devices | mesh | TFLOPs | of an equal share | arguments, GB | gathers, GB | reduces, GB | others, GB |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for n, x in sorted(points.items()):
            mesh = " x ".join(f"{name} {size}" for name, size in x["mesh"].items() if size > 1) or "1"
            sent = {"gather": 0.0, "reduce": 0.0, "": 0.0}
            for kind, size in x["collectives"].items():
                sent[next(part for part in sent if part in kind.partition(" ")[0])] += size / 1e9
            lines.append(
                f"| {n} | {mesh} | {x['flops'] / 1e12:.3g} | {x['flops'] / x['traced_flops']:.2f} | "
                f"{x['arguments'] / 1e9:.3g} | {' | '.join(f'{size:.3g}' for size in sent.values())} |"
            )
    lines += [
        "\n**A real GRPO step of the embedded model, fsdp.**\n",
        "| devices | sum of token ids | loss | grad_norm |",
    ]
    lines += ["|---|---|---|---|"]
    for n in (n for n in REAL if str(n) in store):
        x = store[str(n)]["real"]
        lines.append(f"| {n} | {x['tokens']:.0f} | {x['loss']:.7f} | {x['grad_norm']:.6f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure points anew that are stored")
    parser.add_argument("--page", action="store_true", help="write the tables alone")
    parser.add_argument("--child", type=int, help="one number of devices, in this process")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, list(KINDS))
        return
    put(PAGE, "scaling", tables(json.loads(STORE.read_text()) if arguments.page else measure(arguments.again)))


if __name__ == "__main__":
    main()
