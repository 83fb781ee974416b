"""Evaluation: pass@k against its definition, the function against a run's own numbers, and the command line."""

import importlib
import itertools
import json
import re

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.sample_statistics import pass_at_k
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.training.evaluation.run import full_batches


@pytest.fixture
def config(root):
    return load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")


def last_evaluation(result) -> dict[str, float]:
    return {name: value for name, value in result.metrics[-1].items() if name.startswith("eval/")}


# --- pass@k ---


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    rows = np.array(list(itertools.product([False, True], repeat=n)))
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        expected = np.mean([[row[list(subset)].any() for subset in subsets] for row in rows])
        assert pass_at_k(rows, k) == pytest.approx(expected)


def test_pass_at_k_by_hand():
    correct = np.array([[True, False, False, False], [False] * 4])
    assert [pass_at_k(correct, k) for k in (1, 2, 4)] == [0.125, 0.25, 0.5]


def test_pass_at_k_of_many_samples_is_exact():
    correct = np.zeros((1, 2000), bool)
    correct[0, :1] = True
    assert pass_at_k(correct, 1000) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(("count", "at_once", "multiple"), [(7, 3, 1), (7, 3, 2), (2, 100, 1), (1, 1, 8), (8, 0, 1)])
def test_batches_cover_all_examples_once_and_have_one_size(count, at_once, multiple):
    batches = list(full_batches(range(count), at_once, multiple, RowGroup(0, 1, 1)))
    assert [x for _, _, examples, own in batches for x in examples[:own]] == list(range(count))
    (size,) = {len(examples) for _, _, examples, _ in batches}
    assert size % multiple == 0
    assert [start for start, *_ in batches] == list(range(0, count, size))
    shares = [list(full_batches(range(count), at_once, multiple, RowGroup(index, 2, 1))) for index in range(2)]
    for both in zip(*shares, strict=True):
        assert sum(own for *_, own in both) == both[0][1] == both[1][1]


# --- the function ---


@pytest.mark.slow
def test_samples_in_eight_bits_need_no_correction_where_nothing_is_trained(config):
    config.rollout.weights_dtype, config.eval.prompts, config.eval.temperature = "int8", 64, 0.0
    found = jaxrl_llm.evaluate(config)["eval/accuracy"]
    config.rollout.weights_dtype = "auto"
    assert abs(found - jaxrl_llm.evaluate(config)["eval/accuracy"]) < 0.1


@pytest.mark.slow
def test_a_run_reports_the_same_numbers(config, tiny_run):
    expected = last_evaluation(tiny_run)
    for path in ("hf", "", "checkpoints/2"):  # the model that was written, the newest checkpoint, and one by its step
        config.model.path = str(tiny_run.output_dir / path)
        assert jaxrl_llm.evaluate(config) == expected
    config.model.path = str(tiny_run.output_dir / "checkpoints/1")
    assert jaxrl_llm.evaluate(config) != expected
    assert expected["eval/pass@1"] == expected["eval/accuracy"]
    assert 0 < expected["eval/accuracy"] < expected["eval/pass@4"]


@pytest.mark.slow  # tests/training/evaluation/test_eval_sets.py has a default one
@pytest.mark.parametrize(
    ("samples", "ks"),
    [(4, [1, 2, 4]), (3, [1, 2, 3]), (1, [1])],
)
def test_metrics_of_known_rewards(samples, ks, config):
    def first_of_each(completions, right, **columns):
        return [float(row % samples == 0 and right[row]) for row in range(len(completions))]

    config.eval.samples, config.batch.prompts = samples, samples
    rows = [{"prompt": "sort:12=", "right": True}, {"prompt": "sort:7651=", "right": False}]
    metrics = jaxrl_llm.evaluate(config, rows, first_of_each)
    assert [name for name in metrics if "pass@" in name] == [f"eval/pass@{k}" for k in ks]
    for k in ks:
        assert metrics[f"eval/pass@{k}"] == pytest.approx(k / samples / 2)
    assert (metrics["eval/reward"], metrics["eval/accuracy"]) == pytest.approx((1 / samples / 2, 1 / samples / 2))
    assert metrics["eval/greedy_accuracy"] == 0.5


@pytest.mark.slow
def test_completions_of_a_prompt_have_its_number(config):
    """Two rows of one text are two prompts."""
    seen = []

    def look(completions, prompt_numbers):
        seen.append(prompt_numbers)
        return [0.0] * len(completions)

    config.eval.samples, config.eval.greedy, config.batch.prompts = 2, False, 2
    jaxrl_llm.evaluate(config, [{"prompt": "sort:12="}] * 2, look)
    assert [number for batch in seen for number in batch] == [0, 0, 1, 1]


@pytest.mark.slow
def test_a_reward_that_never_applies_is_no_number(config):
    metrics = jaxrl_llm.evaluate(config, [{"prompt": "a"}], lambda completions: [None] * len(completions))
    assert np.isnan(metrics["eval/reward"]) and np.isnan(metrics["eval/accuracy"])


# --- the command line ---


@pytest.mark.slow
def test_command_prints_and_writes(root, run_python, tiny_run, tmp_path):
    result = run_python(
        "-m", "jaxrl_llm", "evaluate", f"--config={root / 'configs' / 'grpo.py'}:tiny",
        f"--config.model.path={tiny_run.output_dir / 'hf'}", "--output=numbers.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert {f"eval/{name}": value for name, value in found["metrics"].items()} == last_evaluation(tiny_run)
    assert (found["data"], found["split"], found["prompts"], found["samples"]) == ("task:sort", "test", 8, 4)
    printed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert printed["greedy_accuracy"] == f"{found['metrics']['greedy_accuracy']:.3f}"
    assert printed["pass@2"] == f"{found['metrics']['pass@2']:.3f}"
    assert printed["data"] == "task:sort"


def test_what_is_evaluated_on_is_named(monkeypatch, capsys):
    evaluate = importlib.import_module("jaxrl_llm.commands.evaluate")
    monkeypatch.setattr(evaluate, "_measure", lambda config: (4, {}))
    evaluate.main(["--config.data.sources=a.jsonl,b.jsonl(split='some')", "--config.eval.fraction=0.1"])
    assert {"data         a.jsonl, b.jsonl", "split        train, some"} <= set(capsys.readouterr().out.splitlines())
    for asked, data, split in (
        (["--config.data.eval_path=a.jsonl"], "a.jsonl", ["split        train"]),  # the only one of a file
        (["--config.data.eval_path=a.jsonl", "--config.data.eval_split=a"], "a.jsonl", ["split        a"]),
        (["--config.data.eval_path=owner/data"], "owner/data", []),  # test, or the only one
        (["--config.data.sources=a.jsonl,task:sort"], "task:sort", ["split        test"]),  # the file is left out
    ):
        evaluate.main(asked)
        lines = capsys.readouterr().out.splitlines()
        assert f"data         {data}" in lines and [line for line in lines if line.startswith("split")] == split


@pytest.mark.slow
def test_numbers_on_many_devices(root, run_python, tiny_run, tmp_path):
    result = run_python(
        "-m", "jaxrl_llm", "evaluate", f"--config={root / 'configs' / 'grpo.py'}:tiny", "--config.mesh.fsdp=4",
        f"--config.model.path={tiny_run.output_dir / 'hf'}", "--output=numbers.json", devices=8,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "numbers.json").read_text())["metrics"]
    assert metrics["greedy_accuracy"] == last_evaluation(tiny_run)["eval/greedy_accuracy"]


@pytest.mark.slow
def test_infinite_is_null_in_json(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing.py").write_text("def nothing(completions, **columns):\n    return [None] * len(completions)\n")
    arguments = ["--config.rewards.functions=nothing.py:nothing", "--config.eval.prompts=2", "--output=numbers.json"]
    importlib.import_module("jaxrl_llm.commands.evaluate").main(arguments)
    found = json.loads((tmp_path / "numbers.json").read_text(), parse_constant=pytest.fail)
    assert found["metrics"]["reward"] is None
    assert re.search(r"^reward +-$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", ["evaluate", "verify", "compare"])
@pytest.mark.parametrize(("name", "words"), [("none/x.json", "there is no folder"), ("", "is a folder, but it takes")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, command, name, words):
    with pytest.raises(ConfigError, match=f"--output: .*{words}"):
        importlib.import_module(f"jaxrl_llm.commands.{command}").main([f"--output={tmp_path / name}"])
