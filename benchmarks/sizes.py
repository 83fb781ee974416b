"""The smallest GPUs for common models and algorithms, by plans: writes the tables of docs/gpu_sizes.md.

    python -m benchmarks.sizes          # the cells that are missing
    python -m benchmarks.sizes --again  # all of them anew
    python -m benchmarks.sizes --page   # the page alone

Each cell is the command that `command` makes, for 1, 2, 4 and 8 devices until 80 GB of each do in any case. The plans
read config.json alone, which stands here, and need neither weights nor accelerator. They are compiled by the CPU's
compiler, which makes wide copies of what is in bfloat16, so of temporaries they know an upper bound: of each cell the
table has what it needs at least, without them, and at most. A plan takes half a minute to two minutes of one core.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.marks import put
from benchmarks.page import table
from jaxrl_llm.tools.plan.planned import HEADROOM

ROOT = Path(__file__).parent.parent
STORE, PAGE = ROOT / "benchmarks" / "results" / "sizes.json", ROOT / "docs" / "gpu_sizes.md"
# Qwen2.5: width, feed-forward, layers, query heads, key/value heads, vocabulary, whether the head is the embedding.
MODELS = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
}
TRAINED = {"full": (), "LoRA": ("--config.lora.rank=16", "--config.model.param_dtype=bfloat16")}
# For each algorithm its settings, and the rows of a micro-batch on each device: a pair of DPO has two.
ALGORITHMS = {
    "SFT": (("--config=sft", "--config.data.max_length=1024", "--config.batch.prompts=32"), 1),
    "DPO": (("--config=dpo", "--config.data.max_length=1024", "--config.batch.prompts=16"), 2),
    "GRPO": (
        (
            "--config=grpo",
            "--config.algorithm.beta=0",
            "--config.rollout.max_prompt_length=512",
            "--config.rollout.max_completion_length=512",
            "--config.batch.prompts=8",
        ),
        1,
    ),
}
MEMORIES = (16, 24, 32, 48, 80)  # GB of one device; several have the last
UNITS = {"B": 1e-9, "KB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3}


def write_config(model: str, folder: Path) -> None:
    """Writes the config.json of a model."""
    width, hidden, layers, heads, kv_heads, vocabulary, tied = MODELS[model]
    entries = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    entries |= {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    entries |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    entries |= {"tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(entries))


def command(model: str, trained: str, algorithm: str, devices: int) -> list[str]:
    """The plan of a cell, as arguments of `python -m jaxrl_llm`; the folder of the model has its name."""
    settings, rows = ALGORITHMS[algorithm]
    found = ["plan", *settings, f"--config.model.path=Qwen2.5-{model}", "--config.model.remat=block", *TRAINED[trained]]
    found.append(f"--config.batch.microbatch_rows={rows * devices}")
    return [*found, "--device=h100", f"--devices={devices}", *([f"--config.mesh.fsdp={devices}"] * (devices > 1))]


def planned(text: str) -> tuple[float, float]:
    """GB that the programs of a printed plan need, at least (without temporaries) and at most."""
    _, _, programs = text.partition("programs of a step")
    sizes = (re.findall(r"([\d.]+) (B|KB|MB|GB|TB)\b", line) for line in programs.split("\n\n")[0].splitlines())
    # Resident, arguments, results, temporaries, peak; what follows is no size, or not of memory.
    rows = [[float(number) * UNITS[unit] for number, unit in row[:5]] for row in sizes if len(row) > 5]
    if not rows:
        raise ValueError(f"the plan has no programs:\n{text}")
    return max(peak - temporaries for *_, temporaries, peak in rows), max(peak for *_, peak in rows)


def fits(peak: float, memory: float) -> bool:
    """Whether a peak fits a device, with as much left free as plans leave."""
    return peak <= (1 - HEADROOM) * memory


def parameters(model: str) -> float:
    """Billions of parameters of a model, without norms and biases."""
    width, hidden, layers, heads, kv_heads, vocabulary, tied = MODELS[model]
    attention = 2 * width * width * (1 + kv_heads / heads)
    return (layers * (attention + 3 * width * hidden) + vocabulary * width * (1 if tied else 2)) / 1e9


Peaks = dict[str, list[float]]  # by number of devices: GB of each, at least and at most


def measure(again: bool) -> dict[str, Peaks]:
    """The peaks of every cell; those that are stored are kept unless `again`."""
    store = json.loads(STORE.read_text()) if STORE.is_file() and not again else {}
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            write_config(model, Path(folder) / f"Qwen2.5-{model}")
        for cell in ((m, t, a) for m in MODELS for t in TRAINED for a in ALGORITHMS):
            peaks: Peaks = store.setdefault(" ".join(cell), {})
            # Parameters and moments alone say of most counts that they cannot do.
            held = parameters(cell[0]) * (12 if cell[1] == "full" else 2)
            for devices in (1, 2, 4, 8):
                done = any(fits(most, MEMORIES[-1]) for _, most in peaks.values())
                if done or str(devices) in peaks or not fits(held / devices, MEMORIES[-1]):
                    continue
                line = [sys.executable, "-m", "jaxrl_llm", *command(*cell, devices), "--advice=never"]
                printed = subprocess.run(line, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout
                least, most = planned(printed)
                print(f"{' '.join(cell)}, {devices}: {least:.1f} to {most:.1f} GB", flush=True)
                peaks[str(devices)] = [round(least, 2), round(most, 2)]
                STORE.write_text(json.dumps(store, indent=1) + "\n")
    return store


def devices_for(peaks: Peaks) -> str:
    """The smallest devices that may do, and those that do in any case; in brackets the peaks of the first."""

    def smallest(which: int) -> str:
        for devices, found in peaks.items():
            for memory in MEMORIES if devices == "1" else MEMORIES[-1:]:
                if fits(found[which], memory):
                    return f"{memory} GB" if devices == "1" else f"{devices} x {memory} GB"
        return "more"

    may, does = smallest(0), smallest(1)
    least, most = next(found for found in peaks.values() if fits(found[0], MEMORIES[-1]))
    return f"{may if may == does else f'{may} to {does}'} ({least:.0f} to {most:.0f})"


def tables(store: dict[str, Peaks]) -> str:
    """The table of the page."""
    rows = [["model, trained", *ALGORITHMS]]
    for model in MODELS:
        for trained in TRAINED:
            cells = (store[f"{model} {trained} {algorithm}"] for algorithm in ALGORITHMS)
            rows.append([f"{model}, {trained}", *(devices_for(peaks) for peaks in cells)])
    return table(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="plan cells anew that are stored")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    store = json.loads(STORE.read_text()) if arguments.page else measure(arguments.again)
    put(PAGE, "sizes", tables(store))


if __name__ == "__main__":
    main()
