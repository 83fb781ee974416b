"""The Python interface as a script uses it: lazy names, the quick start of the README, models in and out."""

import inspect
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError


def quick_start(root) -> str:
    """The first Python block under the heading "Quick start" of the README."""
    text = (root / "README.md").read_text(encoding="utf-8")
    _, found, section = text.partition("\n## Quick start\n")
    assert found, "README.md has no heading 'Quick start'"
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block, "the quick start of README.md has no Python block"
    return block[1]


def small_config(tmp_path, **values):
    """A configuration for lists of short prompts, quiet and without training steps."""
    config = jaxrl_llm.default_config()
    config.output_dir, config.total_steps = str(tmp_path / "run"), 0
    config.rollout.max_completion_length, config.rollout.group_size = 4, 2
    config.batch.prompts, config.logging.backends = 2, ("jsonl",)
    config.update(values)
    return config


# --- names ---


def test_xla_keeps_its_alarms_to_itself_unless_asked(run_python, monkeypatch):
    code = "import os, jaxrl_llm; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # importing jax sets it in this process
    assert run_python("-c", code).stdout == "3\n"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert run_python("-c", code).stdout == "0\n"


def test_importing_the_package_imports_nothing_else(run_python):
    code = (
        "import sys, jaxrl_llm; print(jaxrl_llm.__version__); print({'jax', 'flax', 'transformers'} & {*sys.modules})"
    )
    result = run_python("-c", code)
    assert result.stdout.splitlines() == [jaxrl_llm.__version__, "set()"], result.stderr


def test_libraries_print_nothing_and_leave_logging_to_the_user(run_python, monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    code = """
import logging
import jaxrl_llm.environments.tools
import jaxrl_llm.distributed.orbax
import absl.logging
absl.logging.info("of Orbax")
logging.basicConfig(format="mine: %(message)s")
logging.getLogger("jaxrl_llm.data").warning("once")
"""
    result = run_python("-c", code)
    assert (result.returncode, result.stderr) == (0, "mine: once\n")


def test_every_name_is_there():
    assert {"train", "load_model", "generate", "save_hf", "Model", "default_config"} <= set(jaxrl_llm.__all__)
    assert set(jaxrl_llm.__all__) <= set(dir(jaxrl_llm))
    for name in jaxrl_llm.__all__:
        assert callable(getattr(jaxrl_llm, name)), name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; it has .*train"):
        jaxrl_llm.trian  # noqa: B018
    assert not hasattr(jaxrl_llm, "trian")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["attribute", "module", "from"])
def test_functions_stay_functions_whatever_is_imported_first(first, run_python):
    lines = ["import inspect, sys, jaxrl_llm"]
    modules = {name: f"jaxrl_llm.commands.{name}" for name in ("generate", "evaluate", "export")}
    for name, module in {"train": "jaxrl_llm.train", **modules}.items():
        statements = {
            "attribute": f"jaxrl_llm.{name}",
            "module": f"import {module}",
            "from": f"from jaxrl_llm import {name}; assert inspect.isfunction({name})",
        }
        lines += [statements.pop(first), *statements.values()]
        lines += [f"assert inspect.isfunction(jaxrl_llm.{name}), jaxrl_llm.{name}"]
        lines += [f"assert jaxrl_llm.{name} is sys.modules['{module}'].{name}"]
    result = run_python("-c", "\n".join(lines))
    assert result.returncode == 0, result.stderr


def test_other_attributes_can_be_set(monkeypatch):
    monkeypatch.setattr(jaxrl_llm, "generate", len)
    assert jaxrl_llm.generate is len
    monkeypatch.setattr(jaxrl_llm, "own", json, raising=False)
    assert jaxrl_llm.own is json


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(x, marks=pytest.mark.slow) for x in ("generate", "evaluate", "export"))]
)
def test_help_is_all_that_is_printed(command, run_python):
    start = ["jaxrl_llm.train"] if command == "train" else ["jaxrl_llm", command]
    result = run_python("-W", "default::RuntimeWarning", "-m", *start, "--help")
    assert result.returncode == 0
    assert f"python -m {' '.join(start)} --" in result.stdout
    assert result.stderr == ""


# --- the quick start ---


@pytest.mark.slow
def test_quick_start_learns(root, run_python, tmp_path):
    code = quick_start(root)
    assert len(code.splitlines()) <= 12
    (tmp_path / "quick_start.py").write_text(code, encoding="utf-8")
    result = run_python("quick_start.py")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "quickstart"
    rewards = [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert np.mean(rewards[-5:]) > rewards[0] + 10
    (text,) = eval(result.stdout.splitlines()[-1])
    assert abs(20 - len(text)) <= 5, text
    assert jaxrl_llm.generate(jaxrl_llm.load_model(run / "hf"), ["sort:1234="]) == [text]


# --- train ---


def test_train_takes_lists_and_functions(tmp_path):
    def longer_than_none(completions, bonus, **columns):
        return [float(bonus[i]) for i, _ in enumerate(completions)]

    rows = [{"prompt": "ab", "bonus": 0}, {"prompt": "cde", "bonus": 1}, {"prompt": "f", "bonus": 1}]
    result = jaxrl_llm.train(small_config(tmp_path), rows, rows, longer_than_none)
    assert result.metrics[0]["eval/accuracy"] == pytest.approx(2 / 3)
    assert result.metrics[0]["eval/reward"] == pytest.approx(2 / 3)
    assert result.output_dir == tmp_path / "run"
    model = "<Model embedded:sort: llama, 0.37 M parameters, float32>"  # what a notebook shows, without any number
    assert (repr(result.model), repr(result)) == (
        model, f"Result(model={model}, metrics=[... of {len(result.metrics)} steps], output_dir={tmp_path / 'run'})",
    )  # fmt: skip


def test_all_of_a_run_is_in_one_folder_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    result = jaxrl_llm.train(small_config(tmp_path, output_dir="~/run"), [{"prompt": "ab"}, {"prompt": "c"}])
    run = tmp_path / "home" / "run"
    assert result.output_dir == run and not (tmp_path / "~").exists()
    assert {"checkpoints", "config.json", "hf"} <= {path.name for path in run.iterdir()}
    assert json.loads((run / "config.json").read_text())["output_dir"] == str(run)


def test_a_run_started_again_has_its_metrics_and_its_folder_whatever_a_reward_does(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()

    def moves(completions):
        os.chdir(tmp_path / "elsewhere")
        # Its arrays are on one device, not on the mesh of the run, which may be of several processes.
        assert isinstance(jnp.ones(3).sharding, jax.sharding.SingleDeviceSharding)
        return [float(len(text)) for text in completions]

    config, results = small_config(tmp_path, output_dir="run", total_steps=1), []
    for _ in range(2):
        monkeypatch.chdir(tmp_path)
        results.append(jaxrl_llm.train(config, [{"prompt": "ab"}, {"prompt": "c"}], rewards=moves))
    first, again = results
    assert first.output_dir == tmp_path / "run" and not [*(tmp_path / "elsewhere").iterdir()]
    assert {"checkpoints", "config.json", "hf", "metrics.jsonl"} <= {path.name for path in first.output_dir.iterdir()}
    assert [line["step"] for line in first.metrics] == [1]
    np.testing.assert_equal(again.metrics, first.metrics)


def test_train_dataset_alone_is_not_evaluated(tmp_path):
    result = jaxrl_llm.train(
        small_config(tmp_path), [{"prompt": "ab"}, {"prompt": "c"}], rewards=lambda completions: []
    )
    assert result.metrics == []
    assert (result.output_dir / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train_dataset": []}, "has no rows"),
        ({"eval_dataset": []}, "has no rows"),
        ({"rewards": []}, "rewards is empty"),
        ({"train_dataset": [{"question": "x"}]}, "'prompt'"),
    ],
)
def test_train_refuses_what_is_empty(arguments, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        jaxrl_llm.train(small_config(tmp_path), **arguments)


# --- models ---


def test_signatures_are_the_documented_ones():
    def names(function):
        return list(inspect.signature(function).parameters)

    given = ["train_dataset", "eval_dataset", "rewards", "environment", "tools", "callbacks"]
    given += ["model", "tokenizer", "peft_config", "optimizers", "compute_metrics", "quantization_config", "others"]
    assert names(jaxrl_llm.train) == ["config", *given]
    assert names(jaxrl_llm.load_model)[:2] == ["path", "dtype"]
    assert names(jaxrl_llm.generate)[:2] == ["model", "prompts"]
    assert names(jaxrl_llm.save_hf)[:2] == ["model", "path"]
    assert names(jaxrl_llm.Model.__call__)[1:] == ["tokens", "segments", "positions", "images", "prompt_width"]


def test_model_call_gives_logits_whatever_the_padding():
    model = jaxrl_llm.load_model("embedded:sort", dtype="float32")
    ids = model.tokenizer("sort:4821=")["input_ids"]
    logits = model([ids])
    assert logits.shape == (1, len(ids), model.net.config.vocab_size)
    padded = model([[7, 7, 7, *ids, 9]], segments=[[0, 0, 0, *[1] * len(ids), 0]])
    np.testing.assert_allclose(padded[:, 3:-1], logits, atol=1e-4)
    assert np.argmax(logits[0, -1]) == ord("1")
    for wrong, shown in (("sort:4821=", "'sort:4821='"), (ids, r"\[115, "), (np.array(ids), r"an array \(10,\)")):
        with pytest.raises(ConfigError, match=rf"reads rows of token ids, \[N,T\], and not {shown}.*model\(\[ids\]\)"):
            model(wrong)


def test_load_model_dtype():
    assert jaxrl_llm.load_model("embedded:sort", dtype="bfloat16").params["norm"]["scale"].dtype == "bfloat16"
    assert jaxrl_llm.load_model("embedded:sort").params["norm"]["scale"].dtype == "float32"  # auto, on CPU


def test_saved_model_is_loaded_bit_for_bit(tiny_run, tmp_path):
    jaxrl_llm.save_hf(tiny_run.model, tmp_path / "copy")
    again = jaxrl_llm.load_model(tmp_path / "copy")
    jax.tree.map(np.testing.assert_array_equal, again.params, tiny_run.model.params)
    with pytest.raises(ConfigError, match="copy holds a model already"):
        jaxrl_llm.save_hf(tiny_run.model, tmp_path / "copy")
    jaxrl_llm.save_hf(again, tmp_path / "copy", overwrite=True)


def test_trained_model_is_the_hf_folder(tiny_run):
    saved = jaxrl_llm.load_model(tiny_run.output_dir / "hf")
    jax.tree.map(np.testing.assert_array_equal, saved.params, tiny_run.model.params)
    before = jaxrl_llm.load_model("embedded:sort")
    assert not np.array_equal(before.params["head"]["kernel"], saved.params["head"]["kernel"])
