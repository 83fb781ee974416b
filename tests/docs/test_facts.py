"""Numbers and names in texts that are written by hand: those of the records, and of the code."""

import ast
import importlib
import json
import re

from jaxrl_llm.config import flat
from jaxrl_llm.config.resolve import import_file

# Right answers of samples and of greedy completions, before and after, in the docstrings of configs/.
RISES = re.compile(r"accuracy\S* rises from ([\d.]+) to ([\d.]+)\s\(greedy: ([\d.]+) to\s([\d.]+)\)")
SHARES = re.compile(
    r"right answers of (?:held-out )?sampled\scompletions (\d+) % -> (\d+) %, of\sgreedy ones\s(\d+) % -> (\d+) %",
    re.IGNORECASE,
)


def accuracies(root, name: str) -> tuple[float, ...]:
    """Of samples before and after, then of greedy completions, in the record of a configuration with seed 0."""
    lines = json.loads((root / f"benchmarks/results/{name}.json").read_text())["lines"]
    measured = [(x["eval/accuracy"], x["eval/greedy_accuracy"]) for x in lines if "eval/greedy_accuracy" in x]
    return (*(run[0] for run in (measured[0], measured[-1])), *(run[1] for run in (measured[0], measured[-1])))


def test_docstrings_of_configurations_have_the_recorded_numbers(root):
    told = {}
    for path in sorted((root / "configs").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if (root / f"benchmarks/results/{path.stem}-0.json").exists():
            found = [[float(x) for x in match.groups()] for match in RISES.finditer(text)]
            found += [[int(x) / 100 for x in match.groups()] for match in SHARES.finditer(text)]
            told |= {path.stem: found[0]} if found else {}
    assert len(told) >= 15
    for name, numbers in told.items():
        recorded = accuracies(root, f"{name}-0")
        assert all(abs(a - b) < 0.0051 for a, b in zip(numbers, recorded, strict=True)), (name, numbers, recorded)


def test_the_readme_has_the_recorded_numbers(root):
    readme = (root / "README.md").read_text(encoding="utf-8")
    row = re.compile(r"\| (?:GRPO, seed (\d)|(control).*?) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \| (\d+) \|")
    rows = row.findall(readme)
    assert len(rows) == 4
    for seed, _, sampled, greedy, sampled_after, greedy_after, seconds in rows:
        name = f"grpo-{seed}" if seed else "sft_control-0"
        numbers = [float(x) for x in (sampled, sampled_after, greedy, greedy_after)]
        recorded = accuracies(root, name)
        assert all(abs(a - b) < 0.0051 for a, b in zip(numbers, recorded, strict=True)), (name, numbers, recorded)
        assert round(json.loads((root / f"benchmarks/results/{name}.json").read_text())["seconds"]) == int(seconds)


def test_the_page_of_metrics_has_those_of_losses(root):
    """Every `"name": Metric(...)` in the package; the page writes the last parts of names that share the first."""
    page = (root / "docs/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/@<>]+)`", page))
    leaves = {name.rpartition("/")[2] for name in named}
    sources = [path.read_text(encoding="utf-8") for path in (root / "jaxrl_llm").rglob("*.py")]
    metrics = {name for source in sources for name in re.findall(r'"([\w/]+)": Metric\(', source)}
    assert len(metrics) > 20
    missing = [name for name in metrics if name not in named and name.rpartition("/")[2] not in leaves]
    assert not missing, missing


def test_keys_on_the_page_of_algorithms_are_those_of_the_configurations(root):
    """Of each section the first sentence behind "Keys:", and every `configs/NAME.py` with its loss and beta."""
    page = (root / "docs/algorithms.md").read_text(encoding="utf-8")
    stems = {
        "Dr. GRPO": "dr_grpo", "DAPO": "dapo", "GSPO": "gspo", "CISPO": "cispo", "SAPO": "sapo", "GMPO": "gmpo",
        "GDPO": "gdpo", "RLOO": "rloo", "REINFORCE++": "reinforce_plus_plus", "A*-PO": "a2po", "PPO": "ppo",
        "Online DPO": "online_dpo",
        "Reward model": "reward_model", "Process reward model": "prm",
    }  # fmt: skip
    # Those of preference losses.
    stated = re.findall(r"`configs/(\w+)\.py`:?\s+\(?(`loss=\"[^`]+\"`, `beta=[^`]+`)", page)
    for heading, stem in stems.items():
        (section,) = re.findall(
            rf"^## {re.escape(heading)}(?:[ ,][^\n]*)?\n(.*?)(?=^#)", page, re.MULTILINE | re.DOTALL
        )
        stated.append((stem, re.split(r"\.\s", section.partition("Keys:")[2])[0]))
    assert len(stated) == len(stems) + 8
    for stem, text in stated:
        config = flat(import_file(root / f"configs/{stem}.py").get_config().to_dict())
        values = re.findall(r"`([\w.]+)=([^`]+)`", text)
        assert values, stem
        for name, value in values:
            key = name if "." in name else f"algorithm.{name}"
            assert config[key] == ast.literal_eval(value), (stem, name, config[key], value)


def test_the_pages_of_models_have_every_family(root):
    """Each is on the page of models, and those of its table of images on that of vision too."""
    page, vision = ((root / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("models", "vision"))
    families = (root / "jaxrl_llm/models/families").glob("*.py")
    known = {name for path in families for name in re.findall(r'^MODEL_TYPE = "(\w+)"', path.read_text(), re.MULTILINE)}
    assert len(known) > 80 and not [name for name in known if f"`{name}`" not in page]
    read_images = re.findall(r"^\| `(\w+)` \|", page.partition("## Families that read images")[2], re.MULTILINE)
    assert len(read_images) > 10 and not [name for name in read_images if f"`{name}`" not in vision]


def test_what_pages_import_is_there(root):
    imports = re.compile(r"^\s*from (jaxrl_llm[\w.]*) import (\w+(?:, \w+)*)", re.MULTILINE)
    found = [
        (page.name, module, name)
        for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))
        for module, names in imports.findall(page.read_text())
        for name in names.split(", ")
    ]
    assert len(found) > 30
    assert not [line for line in found if not hasattr(importlib.import_module(line[1]), line[2])]
