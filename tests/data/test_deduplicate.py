"""Rows that are there twice are left out, of all sources, and of evaluations those that are trained on."""

import json
import logging
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import jaxrl_llm
from jaxrl_llm.commands.preview import preview
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.training.setup import evaluation
from jaxrl_llm.training.setup.data import read_data
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.worker import Setup

ROWS = [{"prompt": f"sort:{n}=", "completion": str(n)} for n in (12, 13, 12, 14, 13, 12)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", ROWS), ("more", [*ROWS[3:], {"prompt": "sort:9=", "completion": "9"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = default()
    config.algorithm.name, config.data.path, config.data.deduplicate = "sft", "train.jsonl", True
    config.total_steps, config.batch.prompts, config.eval.every = 1, 2, -1
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    return config


def count(data):
    """The rows that are trained on."""
    assert data.tokens is not None
    return len(data.tokens.rows)


def asked(data):
    """The prompts of the rows that are trained on, and of those that are evaluated on."""
    held_out = [source.rows for _, own in data.held_out for source in own]
    return [
        [row["prompt"] for source in sources for row in source]
        for sources in ([x.rows for x in data.sources], held_out)
    ]


@pytest.mark.parametrize(("fraction", "split"), [(0.0, "train"), (0.5, "train"), (0.0, "train[30%:]")])
def test_errors_name_the_row_of_the_file(config, fraction, split):
    """Not the row among those that are left of it."""
    config.eval.fraction, config.data.split, config.data.max_length = fraction, split, 12
    rows = [*ROWS, {"prompt": "sort:1234567=", "completion": "7"}]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.seed = next(seed for seed in range(9) if 3 not in np.random.default_rng(seed).permutation(4)[:2].tolist())
    with pytest.raises(ConfigError, match=r"^train.jsonl row 6: the row has 15 tokens, more than data.max_length=12"):
        read_data(config)


def test_of_equal_rows_the_first_stays(config, caplog):
    with caplog.at_level(logging.WARNING):
        data = read_data(config)
    assert asked(data)[0] == ["sort:12=", "sort:13=", "sort:14="] and count(data) == 3
    assert "train.jsonl: left out 3 of 6 rows: an earlier one is equal" in caplog.text
    assert "data: 3 rows, all 3 used" in data.notes[0]
    config.data.sources = ("train.jsonl", "more.jsonl")
    assert asked(read_data(config))[0] == ["sort:12=", "sort:13=", "sort:14=", "sort:9="]
    assert len(jaxrl_llm.train(config).metrics) == 1
    config.data.deduplicate = False
    assert count(read_data(config)) == 10


def test_rows_that_are_evaluated_on(config):
    config.eval.every, config.data.eval_path = 0, "more.jsonl"
    assert asked(read_data(config)) == [["sort:12=", "sort:13=", "sort:14="], ["sort:9="]]
    config.data.eval_path, config.eval.fraction = None, 0.34
    trained, held_out = asked(read_data(config))
    assert len(held_out) == 1 and sorted(trained + held_out) == ["sort:12=", "sort:13=", "sort:14="]
    config.eval.fraction, config.data.eval_split = 0.0, "train"
    with pytest.raises(ConfigError, match=r"data.deduplicate is true, and train.jsonl has no row that is not in"):
        read_data(config)


def test_samples_leave_out_what_is_trained_on(config, monkeypatch):
    """In a run and outside of it: the prompts of an evaluation are those of the rows that are left."""
    config.algorithm.name, config.eval.every, config.data.eval_path = "grpo", 0, "more.jsonl"
    data = read_data(config)
    model: Any = SimpleNamespace(tokenizer=data.tokenizer)
    monkeypatch.setattr(evaluation, "build_worker", lambda *_: None)
    nothing: Any = None
    with closing(load_rewards("think_format")) as rewards:
        setup = Setup(config, nothing, model, rewards, nothing, nothing)
        in_run = evaluation.build_evaluate(setup, nothing, nothing, data.held_out)
        for found in (in_run.sets, evaluation.build_evaluations(config, model, rewards, None, nothing)):
            assert [[row["prompt"] for row in one.examples] for one in found] == [["sort:9="]]
    assert evaluation.kept_prompts(config, data.tokenizer, None) == [True]
    assert re.search(r"evaluated on: more.jsonl\nrows +1, of which 1 are used", preview(config))


def test_rows_in_memory_are_compared_whole(config):
    """Arrays and objects too."""
    array, image = np.arange(4.0), Image.new("L", (2, 3))
    others = (array + 1, array.reshape(2, 2), image, Image.new("L", (3, 2)), np.array(["a", None], object))
    rows = [{**ROWS[0], "extra": {"a": extra}} for extra in (array, array.copy(), *others, others[-1].copy())]
    assert count(read_data(config, Given(rows))) == 6
    keys = ({1: "a", "b": array}, {"b": array, 1: "a"}, {1: "a", "b": array + 1}, {"1": "a", "b": array}, {(1, 2): "a"})
    rows = [{**ROWS[0], "extra": [extra]} for extra in keys]  # keys of several types, in any order
    assert count(read_data(config, Given(rows))) == 4
