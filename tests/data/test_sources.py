import re

import datasets
import pytest

from jaxrl_llm.data import tasks
from jaxrl_llm.data.sources import load
from jaxrl_llm.names import ConfigError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
OTHERS = [{"prompt": "c", "answer": "3"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def table():
    return datasets.Dataset.from_list(ROWS)


def test_a_data_set_passes_through(table):
    assert load(table) is table
    splits = datasets.DatasetDict(train=table, dev=datasets.Dataset.from_list(OTHERS))
    assert load(splits, "dev").to_list() == OTHERS


def test_a_list_of_dictionaries():
    assert load(ROWS).to_list() == ROWS
    # A column that only later rows have is kept.
    assert load([{"a": 1}, {"a": 2, "b": 3}]).to_list() == [{"a": 1, "b": None}, {"a": 2, "b": 3}]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv"])
def test_one_file(tmp_path, table, suffix):
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        table.to_parquet(file)
    elif suffix == "csv":
        file.write_text("prompt,answer\na,x\nb,y\n")
    elif suffix == "json":
        file.write_text('[{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y"}]')
    else:
        file.write_text('{"prompt": "a", "answer": "x"}\n{"prompt": "b", "answer": "y"}\n')
    assert load(str(file))["prompt"][:] == ["a", "b"]
    assert load(file).column_names == ["prompt", "answer"]
    with pytest.raises(ConfigError, match="is one file and has only the split 'train', not 'test'"):
        load(file, "test")


def test_saved_to_disk(tmp_path, table):
    table.save_to_disk(tmp_path / "one")
    assert load(tmp_path / "one").to_list() == ROWS
    datasets.DatasetDict(train=table, test=datasets.Dataset.from_list(OTHERS)).save_to_disk(tmp_path / "two")
    assert load(str(tmp_path / "two"), "test").to_list() == OTHERS
    with pytest.raises(ConfigError, match="no split 'validation'; its splits are train, test"):
        load(tmp_path / "two", "validation")


def test_a_folder_of_files(tmp_path, table):
    folder = tmp_path / "data"
    folder.mkdir()
    table.to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(OTHERS).to_parquet(folder / "test.parquet")
    assert load(folder).to_list() == ROWS
    assert load(folder, "test").to_list() == OTHERS
    with pytest.raises(ConfigError, match="no split 'dev'; its splits are train, test"):
        load(folder, "dev")


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_built_in_tasks(name):
    assert load(f"task:{name}", "validation").to_list() == tasks.generate(name, "validation")
    assert len(load(f"task:{name}")) == tasks.SIZES["train"]


def test_errors(tmp_path, table, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=re.escape(f"no file or folder 'rows.jsonl'; check data.path (a relative path starts at {tmp_path})"),
    ):
        load("rows.jsonl")
    with pytest.raises(ConfigError, match="no file or folder '/nowhere/rows'"):
        load("/nowhere/rows")
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(
        ConfigError, match=re.escape("not a kind of file that can be read; those are .parquet, .jsonl, .json, .csv")
    ):
        load("rows.txt")
    (tmp_path / "bad.json").write_text("{nonsense")
    with pytest.raises(ConfigError, match=r"cannot load bad.json"):
        load("bad.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder 'empty' holds no .parquet"):
        load("empty")
    with pytest.raises(ConfigError, match="task:sort has no split 'dev'; its splits are train, validation, test"):
        load("task:sort", "dev")
    with pytest.raises(ConfigError, match="no built-in task 'sor'"):
        load("task:sor")


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=re.escape("cannot load hub data set someone/something (main): ")):
        load("someone/something", name="main")


@pytest.mark.parametrize("empty", [[], datasets.Dataset.from_list([])])
def test_no_rows(empty):
    with pytest.raises(ConfigError, match="no rows"):
        load(empty)


def test_a_list_that_is_no_table():
    with pytest.raises(ConfigError, match="list of dictionaries"):
        load(["a", "b"])
    with pytest.raises(ConfigError, match="list of dictionaries"):
        load({"prompt": ["a"]})
    with pytest.raises(ConfigError, match="a column changes its type"):
        load([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}])
