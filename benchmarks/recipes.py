"""The memory of every recipe, by plans: writes it into the tables of configs/recipes/ and docs/recipes.md.

    python -m benchmarks.recipes          # the rows that have none yet
    python -m benchmarks.recipes --again  # all of them anew
    python -m benchmarks.recipes --page   # the page alone, from the tables

Plans read config.json alone, which stands here for each model, and need neither weights nor accelerator. They are
compiled by the CPU's compiler: of temporaries they know an upper bound (benchmarks/sizes.py), so a row has what a
device needs at least, without them, and at most. A plan takes half a minute to two minutes of one core.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.marks import put
from benchmarks.sizes import planned

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "configs" / "recipes", ROOT / "docs" / "recipes.md"
HEAD = "| argument | H100s | GB on each | status | published |"
MISSING = "-"


def entries(family: str, width: int, hidden: int, layers: int, heads: int, kv_heads: int, size: int, **others) -> dict:
    """The config.json of a decoder, whose heads have `size` numbers."""
    found = {"model_type": family, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    found |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "hidden_act": "silu"}
    return found | {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True} | others


QWEN3 = {"vocab_size": 151936, "rope_theta": 1e6}
SMOLLM2 = {"vocab_size": 49152, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3 = {"vocab_size": 128256, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE}
GEMMA3 = {
    "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
# What config.json says of the sizes of each model; those of a base model and of the one made from it are the same.
SHAPES = {
    "HuggingFaceTB/SmolLM2-135M": entries("llama", 576, 1536, 30, 9, 3, 64, **SMOLLM2),
    "HuggingFaceTB/SmolLM2-1.7B": entries("llama", 2048, 8192, 24, 32, 32, 64, **SMOLLM2),
    "Qwen/Qwen3-0.6B": entries("qwen3", 1024, 3072, 28, 16, 8, 128, **QWEN3),
    "Qwen/Qwen3-1.7B": entries("qwen3", 2048, 6144, 28, 16, 8, 128, **QWEN3),
    "Qwen/Qwen3-8B": entries("qwen3", 4096, 12288, 36, 32, 8, 128, **QWEN3, tie_word_embeddings=False),
    "Qwen/Qwen3-32B": entries("qwen3", 5120, 25600, 64, 64, 8, 128, **QWEN3, tie_word_embeddings=False),
    "meta-llama/Llama-3.2-1B": entries("llama", 2048, 8192, 16, 32, 8, 64, **LLAMA3),
    "google/gemma-3-1b": entries("gemma3_text", 1152, 6912, 26, 4, 1, 256, **GEMMA3),
}


def write_shapes(folder: Path) -> None:
    """Writes a folder with a config.json for each model, by the names that it has on the hub."""
    for name, shape in SHAPES.items():
        for suffix in ("", "-Base", "-Instruct", "-pt", "-it"):
            (folder / f"{name}{suffix}").mkdir(parents=True)
            (folder / f"{name}{suffix}" / "config.json").write_text(json.dumps(shape))


def recipes() -> list[Path]:
    """The files of all recipes."""
    return [path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")]


def docstring(path: Path) -> str:
    """What a file says of itself."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def rows(path: Path) -> list[list[str]]:
    """The rows of a recipe's table: argument, number of H100s, GB on each, status and published results."""
    table = docstring(path).partition(HEAD)[2].strip().partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def measure(path: Path, argument: str, devices: str, folder: Path) -> str:
    """GB that each of so many H100s needs for a recipe, at least and at most; `folder` has the models' shapes."""
    line = [sys.executable, "-m", "jaxrl_llm", "plan", f"--config={path}:{argument}", "--device=h100"]
    line += [f"--devices={devices}", "--advice=never"]
    least, most = planned(subprocess.run(line, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout)
    return f"{least:.0f} to {most:.0f}"


def page() -> str:
    """The part of the page that has all recipes."""
    parts = []
    for path in recipes():
        text = re.sub(r"^    (.*)$", r"```sh\n\1\n```", docstring(path), flags=re.MULTILINE).replace("```\n```sh\n", "")
        parts.append(f"## `recipes/{path.stem}`\n\n{text}\n")
    return "\n" + "\n".join(parts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="plan rows anew that have their memory")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shapes(Path(folder))
        for path in recipes() if not arguments.page else []:
            for argument, devices, memory, *rest in rows(path):
                if memory != MISSING and not arguments.again:
                    continue
                found = measure(path, argument, devices, Path(folder))
                print(f"{path.stem}:{argument}: {found} GB", flush=True)
                before, after = (" | ".join([argument, devices, cell, *rest]) for cell in (memory, found))
                path.write_text(path.read_text().replace(f"| {before} |", f"| {after} |"))
    put(PAGE, "recipes", page())


if __name__ == "__main__":
    main()
