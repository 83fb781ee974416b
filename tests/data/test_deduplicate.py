"""Rows that are there twice are left out, of all sources, and of evaluations those that are trained on."""

import json
import logging

import numpy as np
import pytest
from PIL import Image

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.training.setup.data import read_data

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


def test_of_equal_rows_the_first_stays(config, caplog):
    with caplog.at_level(logging.WARNING):
        data = read_data(config, None, None, None, None)
    assert asked(data)[0] == ["sort:12=", "sort:13=", "sort:14="] and count(data) == 3
    assert "train.jsonl: left out 3 rows that an earlier one equals, of 6" in caplog.text
    assert "data: 3 rows, all 3 used" in data.notes[0]
    config.data.sources = ("train.jsonl", "more.jsonl")
    assert asked(read_data(config, None, None, None, None))[0] == ["sort:12=", "sort:13=", "sort:14=", "sort:9="]
    assert len(jaxrl_llm.train(config).metrics) == 1
    config.data.deduplicate = False
    assert count(read_data(config, None, None, None, None)) == 10


def test_rows_that_are_evaluated_on(config):
    config.eval.every, config.data.eval_path = 0, "more.jsonl"
    assert asked(read_data(config, None, None, None, None)) == [["sort:12=", "sort:13=", "sort:14="], ["sort:9="]]
    config.data.eval_path, config.eval.fraction = None, 0.34
    trained, held_out = asked(read_data(config, None, None, None, None))
    assert len(held_out) == 1 and sorted(trained + held_out) == ["sort:12=", "sort:13=", "sort:14="]
    config.eval.fraction, config.data.eval_split = 0.0, "train"
    with pytest.raises(ConfigError, match=r"data.deduplicate is true, and train.jsonl has no row that is not in"):
        read_data(config, None, None, None, None)


def test_rows_in_memory_are_compared_whole(config):
    """Arrays and objects too."""
    array, image = np.arange(4.0), Image.new("L", (2, 3))
    others = (array + 1, array.reshape(2, 2), image, Image.new("L", (3, 2)), np.array(["a", None], object))
    rows = [{**ROWS[0], "extra": {"a": extra}} for extra in (array, array.copy(), *others, others[-1].copy())]
    assert count(read_data(config, rows, None, None, None)) == 6
