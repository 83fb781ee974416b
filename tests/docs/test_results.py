"""The page of results, from runs that are kept; and the command that makes both."""

import ast
import json
import string

import pytest

from benchmarks import results
from benchmarks.page import page


def kept(config: str, seed: int, lines: list[dict]) -> dict:
    return {"config": config, "seed": seed, "seconds": 12.0, "steps": 9, "machine": "2 CPU cores", "lines": lines}


def test_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "STORE", tmp_path)
    accuracy = [{"step": s, "eval/accuracy": a, "eval/greedy_accuracy": a + 0.1} for s, a in ((0, 0.25), (9, 0.5))]
    health = {"step": 1, "reward": 0.125, "kl": 0.0}
    for seed in (0, 1):
        results.store(f"grpo-{seed}", kept("grpo", seed, [accuracy[0], health, accuracy[1]]))
    results.store("sft-2", kept("sft", 2, [{"step": s, "eval/loss": x} for s, x in ((0, 0.5), (9, 0.25))]))
    results.store("vision_grpo_blank-0", kept("vision_grpo_blank", 0, accuracy))
    results.store("sft_control-0", kept("sft_tiny", 0, accuracy))
    results.store("sdpo-0", kept("sdpo", 0, accuracy))
    teacher = kept("grpo", 1, accuracy) | {"cpu_seconds": 40.4}
    pace = [{"step": s, "eval/accuracy": a, "eval/greedy_accuracy": a} for s, a in ((0, 0.2), (2, 0.485), (4, 0.4))]
    for seed, lines in ((0, pace[:1]), (1, pace)):
        results.store(f"distill-{seed}", kept("distill", seed, lines) | {"cpu_seconds": 9.6, "teacher": teacher})
    results.store("topr-0", kept("topr", 0, accuracy))
    results.store("ahead_clipped_4-0", kept("ahead_clipped_4", 0, accuracy))
    played = {
        "grpo": ((0.4, 0.89), (0.5, 0.9), (0.6, 0.7)),
        "turn": ((0.4, 0.93), (0.95, 0.8), (0.6, 0.91)),
    }
    for name, seed, rewards in ((name, *run) for name, runs in played.items() for run in enumerate(runs)):
        lines = [{"step": 4 * n, "eval/reward": reward} for n, reward in enumerate(rewards, 1)]
        results.store(f"credit_{name}-{seed}", kept(f"credit_{name}", seed, lines))
    groups = results.ONLINE, results.OFFLINE, results.CONTROL, results.IMAGES, results.SELF
    text = page(results.stored(), *groups, results.FURTHER, results.AHEAD, results.TAUGHT, results.CREDIT)
    assert "## The policy as its own teacher" in text and "| `sdpo` | 9 | 0.250 / 0.350 | 0.500 / 0.600 |" in text
    row = "| 1 | 9 | 0.500 / 0.600 | 9 | 40 | 9 | 0.400 / 0.400 | 2 | 10 |"
    assert "## From a teacher" in text and row in text and "| not reached | 10 |" in text
    assert "| seed | 0 | 2 | 4 |" in text and "| 1 | 0.200 / 0.200 | 0.485 / 0.485 | 0.400 / 0.400 |" in text
    assert "| seed | `credit_grpo` | `credit_turn` |" in text and "| 0 | not reached | 64 |" in text
    assert "| 1 | 64 | 32 |" in text and "| median | not reached | 64 |" in text
    assert "|  | 32 | 64 |" in text and "| `credit_grpo` | 0.500 | 0.890 |" in text
    assert "| `credit_turn` | 0.600 | 0.910 |" in text and "`credit_gigpo` |" not in text
    assert "## Further objectives" in text and "| `topr` | 9 | 0.250 / 0.350 | 0.500 / 0.600 | 12 |" in text
    assert "| `ahead_clipped_4` | 9 | 0.250 / 0.350 | 0.500 / 0.600 | 12 |" in text and "`ahead_1`" not in text
    assert text.index("`grpo`") < text.index("`topr`") < text.index("`sdpo`")
    assert "## Images" in text and "| `vision_grpo_blank` | 9 | 0.250 / 0.350 | 0.500 / 0.600 | 12 |" in text
    assert "| `grpo` | 9 | 0.250 / 0.350 | 0.500 / 0.600 | 0.500 / 0.600 | 12 |" in text
    assert "| 1 | 0.125 | 0.000 |" in text
    assert "| 2 | 9 | 0.500 -> 0.250 | 12 |" in text
    assert "| SFT on the same demonstrations | 0.250 / 0.350 | 0.500 / 0.600 | 9 | 12 |" in text
    assert "`ppo`" not in text


def test_every_configuration_is_measured(root):
    # What makes the model, stages of others, other subjects.
    others = {"sft_tiny", "rlhf", "relora", "grpo_lora", "environment", "agent", "self_play"}
    specs = {results.SPECS.get(name, f"{name}.py") for name in set(results.NAMES) - {results.CONTROL}}
    measured = {spec.partition(".py")[0] for spec in specs}
    assert {path.stem for path in (root / "configs").glob("*.py")} - others == measured


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "STORE", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    results.main(["reward_model", "--seeds=3", "--steps=12"])
    run = json.loads((tmp_path / "results/reward_model-3.json").read_text())
    assert (run["config"], run["seed"], run["steps"]) == ("reward_model", 3, 12)
    assert run["seconds"] > run["pace"] > 0
    assert "### `reward_model`" in (tmp_path / "page.md").read_text()
    before = (tmp_path / "results/reward_model-3.json").stat().st_mtime_ns
    results.main(["--page"])
    assert (tmp_path / "results/reward_model-3.json").stat().st_mtime_ns == before


def test_the_page_of_models_has_the_text_of_its_command(root):
    """Read from its source: to import it is to ask for eight devices."""
    source = ast.parse((root / "benchmarks/models.py").read_text(encoding="utf-8"))
    texts = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("TEXT", "EXAMPLE")
    }  # fmt: skip
    page = (root / "docs/models.md").read_text(encoding="utf-8")
    parts = [texts["EXAMPLE"], *(literal for literal, *_ in string.Formatter().parse(texts["TEXT"]))]
    assert len(parts) > 8 and all(part in page for part in parts)
