"""Faults of rewards and data, injected into runs: each ends in the outcome that docs/reliability.md names."""

import json
import math
import time

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.training.setup import memory

PROMPTS = [{"prompt": f"sort:{n}=", "answer": "1"} for n in (31, 21, 52, 47)]


def configured(root, tmp_path, name="grpo", **settings):
    config = load_config_file(f"{root}/configs/{name}.py:tiny")
    config.output_dir, config.logging.backends, config.eval.every = str(tmp_path / "run"), ("jsonl",), -1
    for key, value in settings.items():
        section, _, leaf = key.partition("__")
        config[section][leaf] = value
    return config


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


def raises(completions, **kwargs):
    raise RuntimeError("no such model")


def hangs(completions, **kwargs):
    time.sleep(20)


def too_few(completions, **kwargs):
    return [0.0]


def nan(completions, **kwargs):
    return [math.nan] * len(completions)


def infinite(completions, **kwargs):
    return [0.0, math.inf] * (len(completions) // 2)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def half(completions, **kwargs):
    return [None, 1.0, 0.0, 1.0] * (len(completions) // 4)


def alike(completions, **kwargs):
    return [0.25] * len(completions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        (raises, {}, r"reward 'raises' raised RuntimeError: no such model"),
        (hangs, {"rewards__timeout": 0.2}, r"reward 'hangs' .*0\.2"),
        (too_few, {}, r"reward 'too_few' returned 1 result for 16 completions"),
        (infinite, {}, r"reward 'infinite' returned inf for row 1"),
        (alike, {"algorithm__dynamic_sampling": True, "algorithm__max_sampling_rounds": 2},
         r"after 2 rounds of sampling, the completions of 4 prompts of 4 still score alike\. Raise"),
        (nothing, {"algorithm__dynamic_sampling": True, "algorithm__max_sampling_rounds": 2},
         r"4 prompts of 4 still score alike, and 16 completions have no reward"),
    ],
)  # fmt: skip
def test_rewards_that_end_the_run(root, tmp_path, reward, settings, message):
    with pytest.raises(ConfigError, match=message):
        jaxrl_llm.train(configured(root, tmp_path, **settings), rewards=reward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "settings", "expected"),
    [
        (raises, {"rewards__on_error": "none"}, {"unscorable_rows": 16.0, "warning/unscorable_rows": 1.0}),
        (hangs, {"rewards__timeout": 0.2, "rewards__on_timeout": "0"}, {"reward": 0.0, "warning/zero_reward": 1.0}),
        (nan, {}, {"unscorable_rows": 16.0, "warning/unscorable_rows": 1.0, "nonfinite_gradient": 0.0}),
        (nothing, {}, {"unscorable_rows": 16.0, "warning/unscorable_rows": 1.0, "nonfinite_gradient": 0.0}),
        (half, {}, {"unscorable_rows": 4.0, "warning/unscorable_rows": 1.0, "nonfinite_gradient": 0.0}),
        (alike, {}, {"frac_reward_zero_std": 1.0, "advantages/max": 0.0, "reward": 0.25}),
    ],
)
def test_rewards_that_the_run_survives(root, tmp_path, reward, settings, expected):
    jaxrl_llm.train(configured(root, tmp_path, **settings), rewards=reward)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert {name: line[name] for name in expected} == expected
        assert line["loss"] is not None


def run_on(root, tmp_path, content, file="rows.jsonl", **settings):
    (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    jaxrl_llm.train(configured(root, tmp_path, data__path=str(tmp_path / file), **settings))


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"rows\.jsonl: the file is empty"),
        ('{"prompt": "sort:31="}\n{"prompt": \n', r"rows\.jsonl.* line 2 is not JSON"),
        (b'{"prompt": "sort:31="}\n{"prompt": "\xff\xfe"}\n', r"rows\.jsonl.* line 2 is not UTF-8 \(byte 0xff\)"),
        (lines_of([{"question": "sort:31="}]), r"rows\.jsonl.*prompt"),
        (lines_of([*PROMPTS, {"prompt": None, "answer": "1"}]), r"rows\.jsonl row 4"),
        (lines_of([*PROMPTS, {"prompt": "sort:" + "7" * 40 + "=", "answer": "7"}]), r"row 4.*max_prompt_length"),
    ],
    ids=["empty", "torn line", "no UTF-8", "no column", "no value", "too long"],
)
def test_data_that_ends_the_run_before_it_starts(root, tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        run_on(root, tmp_path, content)
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grpo", {"rollout__max_completion_length": 10**9}, r"up to 10000000\d\d tokens .* has positions for 2048"),
        ("grpo", {"rollout__max_completion_length": 2040}, r"the longest prompt, and rollout\.max_completion_length"),
        ("sft", {"data__max_length": 4096, "data__streaming": True}, r"data\.max_length, as rows are streamed"),
    ],
)
def test_rows_beyond_the_positions_of_the_model(root, tmp_path, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        jaxrl_llm.train(configured(root, tmp_path, name, **settings))


def test_rows_beyond_the_memory(root, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda mesh: 1e4)
    with pytest.raises(
        ConfigError, match=r"rollout\.max_completion_length is 100, .* more than the 0 GB of the devices"
    ):
        jaxrl_llm.train(configured(root, tmp_path, rollout__max_completion_length=100))


@pytest.mark.slow
def test_long_prompts_are_dropped_if_asked(root, tmp_path):
    rows = [*PROMPTS, {"prompt": "sort:" + "7" * 40 + "=", "answer": "7"}]
    run_on(root, tmp_path, lines_of(rows), data__overlong="filter")
    assert max(line["prompts/max_length"] for line in metrics(tmp_path)) < 16


@pytest.mark.slow
def test_an_empty_completion_teaches_its_end(root, tmp_path):
    """An empty answer is a row of one token, the end of text."""
    rows = [{"prompt": f"sort:{n}=", "completion": "" if n % 2 else "1"} for n in range(8)]
    run_on(root, tmp_path, lines_of(rows), "pairs.jsonl", name="sft")
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path))


@pytest.mark.slow
def test_an_unreachable_judge(root, tmp_path):
    judge = "judge(url='http://127.0.0.1:9/v1', model='m', attempts=2, backoff=0.01)"
    settings = {"rewards__functions": (judge,)}
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        jaxrl_llm.train(configured(root, tmp_path, **settings))
    jaxrl_llm.train(configured(root, tmp_path, **settings, rewards__on_error="none"))
    assert metrics(tmp_path)[-1]["warning/unscorable_rows"] == 1.0
