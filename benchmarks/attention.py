"""What updates need for temporaries with each kind of attention on v5e chips; writes the table of docs/performance.md.

    pip install libtpu       # the number that jax asks for; no TPU is needed
    python -m benchmarks.attention

The updates are compiled by the TPU's own compiler from shapes alone. Nothing is timed. Points that
benchmarks/results/attention.json holds are not compiled again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.marks import put
from benchmarks.meter import report, result_of
from benchmarks.page import table

ROOT = Path(__file__).parent.parent
STORE = ROOT / "benchmarks" / "results" / "attention.json"
PAGE = ROOT / "docs" / "performance.md"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "max_position_embeddings": 131072, "hidden_act": "silu",
}  # fmt: skip
MODELS = {
    "SmolLM2-135M (heads of 64)": LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
    },
    "Qwen3-0.6B (heads of 128)": LLAMA | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072,
    },
}  # fmt: skip
SFT, GRPO = "SFT, packed documents", "GRPO, packed behind shared prompts"


class Point(NamedTuple):
    """One update."""

    model: str
    what: str
    tokens: int  # of a micro-batch on each chip: of SFT one row
    mesh: tuple[int, int] = (1, 1)  # fsdp, tensor
    remat: str = "block"

    @property
    def name(self) -> str:
        """What the update is, in words: the first cells of its row."""
        sizes = zip(("fsdp", "tensor"), self.mesh, strict=True)
        chips = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
        return f"{self.model} | {self.what} | {chips or '1 chip'} | {self.remat} | {self.tokens}"


POINTS = [
    Point("SmolLM2-135M (heads of 64)", SFT, 2048, remat="none"),
    *(Point(model, SFT, tokens) for model in MODELS for tokens in (2048, 8192)),
    *(Point(model, GRPO, 8192) for model in MODELS),
    *(Point(model, SFT, 8192, (2, 2) if "Qwen" in model else (4, 1)) for model in MODELS),
]


def configuration(point: Point, attention: str, folder: str):
    """The configuration of one update."""
    from jaxrl_llm.config import default

    config = default()
    config.model.path, config.model.remat, config.model.attention = folder, point.remat, attention
    config.mesh.data, (config.mesh.fsdp, config.mesh.tensor) = 1, point.mesh
    if point.what == SFT:
        config.algorithm.name, config.data.packing, config.data.max_length = "sft", True, point.tokens
        config.batch.prompts = 2 * point.mesh[0]
        config.batch.microbatch_rows = point.mesh[0]
    else:
        own = point.tokens // 10  # a prompt is as long as two completions
        config.rollout.max_completion_length, config.rollout.max_prompt_length = own, point.tokens - 8 * own
        config.rollout.group_size, config.batch.prompts, config.batch.packing = 8, 2, "true"
        config.batch.microbatch_tokens = point.tokens
    return config


def child(number: int, attention: str) -> None:
    """Prints the bytes of temporaries of one update as JSON; runs in a process of its own."""
    from jaxrl_llm.tools.plan.planned import make_plan
    from jaxrl_llm.tools.plan.topology import target

    point = POINTS[number]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[point.model]))
        config = configuration(point, attention, folder)
        devices = target(config, "v5e", point.mesh[0] * point.mesh[1])
        if devices.compiler != "TPU compiler":
            raise SystemExit("libtpu is not installed: pip install libtpu, of the number that jax asks for")
        plan = make_plan(config, devices, only="update")
        found = {"refused": plan.note} if plan.note else {"temporaries": plan.programs[0].temporaries}
    report(found)


def measure() -> dict[str, Any]:
    """All points."""
    store = json.loads(STORE.read_text()) if STORE.is_file() else {}
    for number, point in enumerate(POINTS):
        for attention in ("xla", "splash"):
            if attention in store.setdefault(point.name, {}):
                continue
            command = [sys.executable, "-m", "benchmarks.attention", f"--child={number}", f"--attention={attention}"]
            output = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
            store[point.name][attention] = result_of(output)
            STORE.write_text(json.dumps(store, indent=1) + "\n")
            print(f"{point.name}, {attention}: {store[point.name][attention]}", flush=True)
    return store


def text_of(store: dict[str, Any]) -> str:
    """The table of docs/performance.md."""
    rows = [["model", "update", "mesh", "model.remat", "tokens of a micro-batch", "xla", "splash"]]
    for point in POINTS:
        found = [store[point.name][attention] for attention in ("xla", "splash")]
        shown = [f"{x['temporaries'] / 1e9:.2f} GB" if "temporaries" in x else "does not fit" for x in found]
        rows.append([point.name, *shown])
    return table(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=int, help="one update, in this process")
    parser.add_argument("--attention", default="xla", help="its attention")
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.attention)
        return
    put(PAGE, "attention", text_of(measure()))


if __name__ == "__main__":
    main()
