"""The notebooks: they agree with their texts, and run from a clean kernel with the results that they promise."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def load_build() -> ModuleType:
    """`notebooks/build.py` as a module."""
    spec = importlib.util.spec_from_file_location("notebooks_build", ROOT / "notebooks" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


def stored(name: str) -> dict:
    return json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))


def printed(made: dict) -> str:
    """All that the cells of a notebook have printed."""
    outputs = [output for cell in made["cells"] for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} <= {"stream"}, "cells print text, and nothing fails"
    return "".join("".join(output["text"]) for output in outputs if output["name"] == "stdout")


def run(name: str, folder: Path, monkeypatch, steps: int | None = None) -> str:
    """The output of the notebook, run from a clean kernel in `folder`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    if steps is not None:
        monkeypatch.setenv("JAXRL_STEPS", str(steps))
    text = (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    return printed(build.execute(build.notebook(text), folder))


def test_there_are_four():
    assert sorted(path.stem for path in build.texts()) == NAMES
    assert NAMES == ["dpo_preference_file", "grpo_own_reward", "inside_grpo", "sft_lora_export"]


@pytest.mark.parametrize("name", NAMES)
def test_notebook_agrees_with_its_text(name):
    """Run `python notebooks/build.py` after changing a text."""
    found, text = stored(name), (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    assert found == build.notebook(text, found, name)
    opened = nbformat.from_dict(found)
    nbformat.validate(opened)
    saved = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert saved == build.written(found) == nbformat.writes(opened) + "\n"  # as a reader's Jupyter would write it
    assert len(found["cells"]) < 15
    assert found["cells"][0]["cell_type"] == "markdown" and found["cells"][0]["source"][0].startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_notebook_opens_in_colab(name):
    found = stored(name)
    repository = build.REPOSITORY.removeprefix("https://github.com/")
    address = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb"
    assert found["cells"][0]["source"][-1].endswith(f"({address})")
    assert found["metadata"]["accelerator"] == "GPU" and found["metadata"]["colab"]["gpuType"] == "T4"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("machine", "extra"), [(set(), ""), ({"nvidia-smi"}, "[cuda12]"), ({"TPU_ACCELERATOR_TYPE"}, "[tpu]")]
)
def test_the_first_cell_installs_for_the_accelerator(name, machine, extra, tmp_path, monkeypatch):
    """Where jaxrl_llm is not installed: from the repository, or from the checkout that the notebook lies in."""
    cells = build.cells_of((ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8"))
    cell = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    installed = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda program: program if program in machine else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: installed.append(command[-1]))
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # of /dev
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    for variable in machine - {"nvidia-smi"}:
        monkeypatch.setenv(variable, "v5litepod-1")
    for folder in (tmp_path / "content", ROOT / "notebooks"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        exec(cell, {})
    assert installed == [f"jaxrl_llm{extra} @ git+{build.REPOSITORY}", f"..{extra}"]


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_of_a_whole_run(name):
    """`python notebooks/build.py --execute` stores them: those of all of its cells, and no path of where it ran."""
    code = [cell for cell in stored(name)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(len(cell["outputs"]) <= 1 for cell in code), "what a cell prints is one output"
    assert len(printed(stored(name))) > 500
    text = json.dumps(stored(name))
    assert str(ROOT) not in text and not re.search(r"/(home|root|tmp|Users)/", text)
    assert len(text) < 100_000


def test_cells_of_a_text():
    text = "# ruff: noqa\n# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1\n\n\n# %%\nprint(x)  # %%\n"
    cells = build.cells_of(text)
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code"]
    assert ["".join(cell["source"]) for cell in cells] == ["# Title\n\nWords.", "x = 1", "print(x)  # %%"]


def test_outputs_stay_with_cells_that_have_not_changed():
    old = build.notebook("# %%\nprint(1)\n\n# %%\nprint(2)\n")
    for count, cell in enumerate(old["cells"], 1):
        cell["outputs"], cell["execution_count"] = [f"said {count}"], count
    new = build.notebook("# %%\nprint(3)\n\n# %%\nprint(2)\n", old)
    assert [cell["outputs"] for cell in new["cells"]] == [[], ["said 2"]]


def test_a_cell_that_fails_is_an_error(tmp_path):
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        build.execute(build.notebook("# %%\n1 / 0\n"), tmp_path)


def test_data_and_preview_of_a_notebook(tmp_path, monkeypatch, capsys):
    """The cells that come before training, run here; the tests below run whole notebooks from a clean kernel."""
    text = (ROOT / "notebooks" / "dpo_preference_file.py").read_text(encoding="utf-8")
    before, found, _ = text.partition("# %% [markdown]\n# ## Train\n")
    assert found
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXRL_STEPS", raising=False)
    names = {}
    for cell in build.cells_of(before):
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "embedded:sort on cpu for 80 steps" in said
    assert "pairs to train on" in said and "⟦" in said
    assert len((tmp_path / "held_out.jsonl").read_text().splitlines()) == 256


# --- run ---


@pytest.mark.slow
def test_inside_grpo_runs(tmp_path, monkeypatch):
    """By hand and by the library: the notebook asserts that they agree."""
    text = run("inside_grpo", tmp_path, monkeypatch)
    by_hand = re.search(r"loss (-?[\d.]+); gradient norm ([\d.]+)", text)
    assert by_hand and f"gradient norm {by_hand[2]}: as by hand" in text
    better, worse = (float(x) for x in re.findall(r"log-prob changes by ([+-][\d.]+)", text))
    assert better > worse


@pytest.mark.slow
def test_grpo_own_reward_learns(tmp_path, monkeypatch):
    text = run("grpo_own_reward", tmp_path, monkeypatch)
    before, after = (float(x) for x in re.search(r"eval/accuracy +([\d.]+) -> ([\d.]+)", text).groups())
    assert after > before + 0.4
    assert len(re.findall(r"sort:\d+= \d+", text)) == 3
    assert (tmp_path / "runs" / "notebook_grpo" / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_dpo_preference_file_learns(tmp_path, monkeypatch):
    text = run("dpo_preference_file", tmp_path, monkeypatch)
    after = float(re.search(r"eval/rewards/accuracies +[\d.]+ -> ([\d.]+)", text)[1])
    assert after > 0.9
    (first, last), _ = re.findall(r"right answers at temperature [\d.]+: (\d+)% -> (\d+)%", text)
    assert int(last) > int(first) + 10
    assert "⟦" in text, "the preview marks what is learned"


@pytest.mark.slow
def test_sft_lora_export_gives_the_same_logits(tmp_path, monkeypatch):
    text = run("sft_lora_export", tmp_path, monkeypatch)
    assert float(re.search(r"largest difference of \d+ logits: (\S+)", text)[1]) < 1e-3
    theirs, ours = re.search(r"transformers: (\S+) here: (\S+)", text).groups()
    assert theirs == ours
    assert "adapter_model.safetensors" in text


@pytest.mark.slow
def test_steps_can_be_cut(tmp_path, monkeypatch):
    """`JAXRL_STEPS`, for those who only want to see that all works; thresholds are not checked then."""
    assert "for 2 steps" in run("sft_lora_export", tmp_path, monkeypatch, steps=2)
    for name in ("dpo_preference_file", "grpo_own_reward"):
        assert 'os.environ.get("JAXRL_STEPS"' in (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
