import gzip
import importlib.util
import json
import logging
import re
import types

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import tasks
from jaxrl_llm.data.diagnose import content_fault
from jaxrl_llm.data.files import local_files
from jaxrl_llm.data.formats.lookup import FactoryOptions
from jaxrl_llm.data.sources import load

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
OTHERS = [{"prompt": "c", "answer": "3"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def table():
    return datasets.Dataset.from_list(ROWS)


def test_reading_leaves_the_console_alone(tmp_path, monkeypatch, capsys):
    """Outside of a terminal no bars of `datasets`, and of its errors the one message that is raised; bars stay on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "bad.json").write_text('{"a": 1}\n{nonsense')
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n1,2,3\n")
    logged, handler = [], logging.Handler()
    handler.emit = logged.append
    logger = logging.getLogger("datasets")
    logger.addHandler(handler)
    try:
        assert list(load("rows.jsonl")) == ROWS
        for name in ("bad.json", "bad.csv"):
            with pytest.raises(ConfigError, match=f"cannot load {name}"):
                load(name)
    finally:
        logger.removeHandler(handler)
    assert capsys.readouterr().err == "" and not logged and datasets.is_progress_bar_enabled()


def test_a_data_set_passes_through(table):
    assert load(table) is table
    splits = datasets.DatasetDict(train=table, dev=datasets.Dataset.from_list(OTHERS))
    assert load(splits, "dev").to_list() == OTHERS


def test_a_list_of_dictionaries():
    assert load(ROWS) == ROWS
    # A column that only later rows have is kept.
    assert load([{"a": 1}, {"a": 2, "b": 3}]) == [{"a": 1, "b": None}, {"a": 2, "b": 3}]


def test_the_objects_of_a_list_stay_as_they_are():
    """Rewards see them: a table would give `tests` both keys, one of them None, and write 1 as 1.0."""
    rows = [{"prompt": "x", "tests": {"f(1)": 2}, "answer": 1}, {"prompt": "y", "tests": {"g(2)": 3}, "answer": 2.5}]
    assert repr(load(rows)) == repr(rows)
    assert load([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}])[1]["prompt"][0]["role"] == "user"


def test_sequences_in_a_list_are_lists():
    """As pandas gives the rows of a Parquet file: formats look for lists."""
    messages = [{"role": "user", "content": "a"}]
    array = np.array(messages, object)
    (row,) = load([{"prompt": array, "chosen": tuple(messages), "answer": np.int64(3), "image": np.zeros((2, 2, 3))}])
    assert row["prompt"] == row["chosen"] == messages
    assert type(row["answer"]) is int and row["image"].shape == (2, 2, 3)


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
    with pytest.raises(ConfigError, match=r"is one file and has only the split 'train', not 'test'"):
        load(file, "test")


def test_saved_to_disk(tmp_path, table):
    table.save_to_disk(tmp_path / "one")
    assert load(tmp_path / "one").to_list() == ROWS
    with pytest.raises(ConfigError, match=r"no split 'test'; its splits are train"):  # or it would be evaluated on
        load(tmp_path / "one", "test")
    (tmp_path / "test.jsonl").write_text('{"prompt": "a"}\n')
    of_test = datasets.load_dataset("json", data_files={"test": str(tmp_path / "test.jsonl")}, split="test")
    of_test.save_to_disk(tmp_path / "saved_test")
    assert (
        load(tmp_path / "saved_test").to_list() == load(tmp_path / "saved_test", "test").to_list() == [{"prompt": "a"}]
    )
    datasets.DatasetDict(train=table, test=datasets.Dataset.from_list(OTHERS)).save_to_disk(tmp_path / "two")
    assert load(str(tmp_path / "two"), "test").to_list() == OTHERS
    with pytest.raises(ConfigError, match=r"no split 'validation'; its splits are train, test"):
        load(tmp_path / "two", "validation")


def test_a_folder_of_files(tmp_path, table):
    folder = tmp_path / "data"
    folder.mkdir()
    table.to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(OTHERS).to_parquet(folder / "test.parquet")
    assert load(folder).to_list() == ROWS
    assert load(folder, "test").to_list() == OTHERS
    with pytest.raises(ConfigError, match=r"no split 'dev'; its splits are train, test"):
        load(folder, "dev")


def test_a_part_of_a_split_of_a_folder(tmp_path):
    """As of one file."""
    train, test = ([{"prompt": f"{name}{index}"} for index in range(10)] for name in ("train", "test"))
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(train), test=datasets.Dataset.from_list(test))
    splits.save_to_disk(tmp_path / "saved")
    splits["train"].save_to_disk(tmp_path / "one")
    (tmp_path / "files").mkdir()
    for name, rows in splits.items():
        rows.to_parquet(tmp_path / "files" / f"{name}.parquet")
    for path in (tmp_path / "saved", tmp_path / "files", splits):
        assert load(path, "train[:20%]").to_list() == train[:2]
        assert load(path, "test[-3:]").to_list() == test[-3:]
        assert load(path, "train[8:]+test").to_list() == train[8:] + test
        with pytest.raises(ConfigError, match=r"has no split 'dev'; its splits are train, test"):
            load(path, "dev[:1]")
    assert load(tmp_path / "one", "train[:2]").to_list() == train[:2]
    with pytest.raises(ConfigError, match=r"cannot load .*files.*\[1:"):
        load(tmp_path / "files", "train[1:")
    with pytest.raises(ConfigError, match=r"the split 'train\[:1\]' is a part of .*; set data.streaming to False"):
        load(tmp_path / "files", "train[:1]", streaming=True)


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_built_in_tasks(name):
    assert load(f"task:{name}", "validation") == tasks.generate(name, "validation")
    assert len(load(f"task:{name}")) == tasks.SIZES["train"]


def test_errors(tmp_path, table, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=re.escape(f"no file or folder 'rows.jsonl'; check data.path (a relative path starts at {tmp_path})"),
    ):
        load("rows.jsonl")
    for path in ("/nowhere/rows", "nowhere/", "no where"):
        with pytest.raises(ConfigError, match=rf"no file or folder '{path}'"):
            load(path)
    (tmp_path / "rows.zip").write_text("a")
    with pytest.raises(
        ConfigError, match=r"not a kind of file that can be read; those are .parquet, .jsonl, [^(]*; unpack it first$"
    ):
        load("rows.zip")
    with pytest.raises(ConfigError, match=r"'2\+2\?, 3\+3\?' is not .* rows in memory is written {'prompt': text}"):
        load(["2+2?", "3+3?"])
    (tmp_path / "bad.json").write_text("{nonsense")
    with pytest.raises(ConfigError, match=r"cannot load bad.json"):
        load("bad.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder 'empty' holds no .parquet"):
        load("empty")
    with pytest.raises(ConfigError, match=r"task:sort has no split 'dev'; its splits are train, validation, test"):
        load("task:sort", "dev")
    with pytest.raises(ConfigError, match=r"no built-in task 'sor'"):
        load("task:sor")


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    words = "cannot load someone/something (main), which is no file or folder here, from the hub: "
    with pytest.raises(ConfigError, match=re.escape(words)):
        load("someone/something", name="main")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """`datasets` would go on for half a minute for each misspelt path of two words."""
    asked = []

    def unreachable(self, path, **options):
        asked.append(path)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match=r"no file .* the hub: the hub does not answer \(no route to host\)"):
        load("data/trian")
    assert asked == ["data/trian"] and not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("empty", [[], datasets.Dataset.from_list([])])
def test_no_rows(empty):
    with pytest.raises(ConfigError, match=r"no rows"):
        load(empty)


def test_a_dictionary_of_columns_is_no_list():
    with pytest.raises(ConfigError, match=r"not a dict; .* dictionary of columns .* datasets\.Dataset\.from_dict"):
        load({"prompt": ["a", "b"], "answer": ["1", "2"]})


def test_a_column_whose_name_is_no_text():
    with pytest.raises(ConfigError, match=r"column named 5, but names of columns are texts"):
        load([{"prompt": "a"}, {"prompt": "b", 5: 1}])


def test_a_list_that_is_no_table():
    with pytest.raises(ConfigError, match=r"list of dictionaries"):
        load([1, 2])
    with pytest.raises(ConfigError, match=r"list of dictionaries"):
        load({"prompt": ["a"]})
    assert list(load(ROWS, streaming=True)) == ROWS
    with pytest.raises(ConfigError, match=r"cannot be streamed, because a column changes its type .* data.streaming"):
        load([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}], streaming=True)


def test_files_in_a_bucket(table, monkeypatch):
    import fsspec

    # Offline, datasets reads from no file system but the local one: this one is in memory.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    fs = fsspec.filesystem("memory")
    fs.makedirs("/bucket/parts", exist_ok=True)
    with fs.open("/bucket/rows.jsonl", "w") as file:
        file.write('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    with fs.open("/bucket/parts/train.jsonl", "w") as file:
        file.write('{"prompt": "a", "answer": "1"}\n')
    with fs.open("/bucket/parts/test.jsonl", "w") as file:
        file.write('{"prompt": "c", "answer": "3"}\n')
    table.save_to_disk("memory://bucket/saved")
    assert load("memory://bucket/rows.jsonl").to_list() == ROWS
    assert list(load("memory://bucket/rows.jsonl", streaming=True)) == ROWS
    assert load("memory://bucket/saved").to_list() == ROWS
    assert load("memory://bucket/parts", "test").to_list() == OTHERS
    assert load("memory://bucket/parts", "train[:100%]").to_list() == ROWS[:1]
    with pytest.raises(ConfigError, match=r"parts has no split 'dev'; its splits are train, test"):
        load("memory://bucket/parts", "dev")
    with pytest.raises(ConfigError, match=r"there is no folder 'memory://bucket/nothing'"):
        load("memory://bucket/nothing")
    with pytest.raises(ConfigError, match=r"cannot load nonsense://x/rows: Protocol not known: nonsense"):
        load("nonsense://x/rows")


@pytest.mark.parametrize("where", ["here", "bucket"])
@pytest.mark.parametrize(
    "files",
    [
        ("train/0.jsonl", "test/0.jsonl"),
        ("code_contests-train.jsonl", "code_contests-test.jsonl"),
        ("latest-train.jsonl", "latest-eval.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"),
    ],
)
def test_folders_and_words_of_names_tell_the_split(tmp_path, monkeypatch, files, where):
    """In a bucket as here: "contests" holds the letters of "test", and a name may say nothing in a folder that does."""
    import fsspec

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    fs = fsspec.filesystem("memory" if where == "bucket" else "file")
    root = f"/{tmp_path.name}" if where == "bucket" else str(tmp_path / "rows")
    for file, word in zip(files, "ab", strict=True):
        fs.makedirs(f"{root}/{file}".rpartition("/")[0], exist_ok=True)
        fs.pipe(f"{root}/{file}", json.dumps({"prompt": word}).encode())
    path = f"memory:/{root}" if where == "bucket" else root
    assert load(path).to_list() == [{"prompt": "a"}]
    assert list(load(path, "test", streaming=True)) == [{"prompt": "b"}]
    assert load(path, "train[:1]+test").to_list() == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ConfigError, match=r"has no split 'validation'; its splits are train, test"):
        load(path, "validation")


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="the file system is installed")
def test_a_bucket_without_its_file_system():
    for path in ("gs://bucket/rows.jsonl", "gs://bucket/folder"):
        with pytest.raises(ConfigError, match=f"cannot load {path}: Please install gcsfs"):
            load(path)


def test_text_of_a_csv_file_stays_as_it_was_written(tmp_path):
    """Pandas reads 42 for "0042", 42.0 where its column has a hole, True for true, and None for null, NA and None."""
    columns = {
        "zip": ("0042", "7"), "answer": ("null", "NA"), "word": ("None", "nan"), "price": ("0.50", "3"),
        "flag": ("true", "false"), "large": ("12345678901234567890", "9" * 400), "digits": ("4_2", "１"),
        "count": ("42", ""), "score": ("0.5", "-1e-07"), "margin": ("1", "0.5"), "completion": ("4", "9"),
    }  # fmt: skip
    lines = [",".join(columns), *(",".join(f'"{text}"' for text in row) for row in zip(*columns.values(), strict=True))]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    texts = {name: [text or None for text in column] for name, column in columns.items()}
    numbers = {"count": [42, None], "score": [0.5, -1e-07], "margin": [1.0, 0.5]}
    assert load(tmp_path / "rows.csv").to_dict() == texts | numbers
    rows = list(load(tmp_path / "rows.csv", streaming=True))  # whose types would have to be known beforehand
    assert {name: [row[name] for row in rows] for name in columns} == texts


@pytest.mark.parametrize("lines", ["What, you?,Me\n", "a,b,\nc,d,\n"])
def test_lines_of_a_csv_file_with_more_fields_than_names_are_refused(tmp_path, lines):
    """pandas would take the first field for the name of the line, and give `prompt` the text of the second."""
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{lines}")
    with pytest.raises(ConfigError, match=r"rows.csv have more fields than its header, prompt, answer: put texts with"):
        load(str(tmp_path / "rows.csv"))


def test_two_columns_of_a_csv_file_with_one_name_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt,"a,b",prompt.1,,,prompt\n1,2,3,4,5,6\n')
    with pytest.raises(ConfigError, match=r"rows.csv has two columns named 'prompt': rename one"):
        load(str(tmp_path / "rows.csv"))


def test_csv_files_that_are_read_together_have_the_same_columns(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nx,1\n")
    (tmp_path / "b.csv").write_text("answer,prompt\n02,y\n")
    assert load(tmp_path / "*.csv").to_list() == [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "02"}]
    (tmp_path / "c.csv").write_text("prompt\nz\n")
    with pytest.raises(ConfigError, match=r"c.csv has the columns prompt, but .*a.csv has prompt, answer; files that"):
        load(tmp_path / "*.csv")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("layout", ["lines", "list"])
def test_dates_in_json_are_text(tmp_path, streaming, layout):
    """Arrow makes times of a column of them, also inside messages."""
    rows = [
        {"answer": "2024-05-01", "count": 1, "messages": [{"role": "user", "content": "2024-05-01T10:00"}]},
        {"answer": "2024-05-02T10:00:00Z", "count": 2, "messages": [{"role": "user", "content": "1999-12-31"}]},
        {"answer": "2024-05-03", "count": None, "messages": None},
    ]
    written = json.dumps(rows) if layout == "list" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.json").write_text(written)
    assert list(load(tmp_path / "rows.json", streaming=streaming)) == rows
    if not streaming:
        assert load(tmp_path / "rows.json", "train[1:2]").to_list() == rows[1:2]
        # Rows are kept by what is read: not when that changes.
        (tmp_path / "rows.json").write_text(written.replace("2024-05-01", "2025-05-01"))
        assert load(tmp_path / "rows.json")[0]["answer"] == "2025-05-01"


def test_integers_that_a_float_does_not_hold_are_refused(tmp_path):
    """Not those that it holds, of a column of fractions or in a text."""
    refused = [
        [{"a": 1}, {"a": 2**63}],
        [{"a": [{"b": 1}, {"b": 10**19 + 1}]}],
        [{"a": 1.5, "b": 3}, {"a": 2**60 + 1, "b": 4}],
    ]
    for number, rows in enumerate(refused):
        for layout, text in (("lines", "\n".join(map(json.dumps, rows))), ("list", json.dumps(rows, indent=1))):
            (file := tmp_path / f"{layout}_{number}.json").write_text(text)
            with pytest.raises(ConfigError, match=r"has the integer \d{19,20}, which would lose digits as a float"):
                load(str(file))
    kept = [{"a": 2.5, "b": 2**63 - 1, "c": "in 1234567890123456789 years"}, {"a": 2**60, "b": -(2**63), "c": ""}]
    (file := tmp_path / "kept.jsonl").write_text("\n".join(map(json.dumps, kept)))
    assert list(load(str(file))) == kept


@pytest.mark.parametrize("dates", ["a", "b"])
def test_dates_in_one_of_several_json_files(tmp_path, dates):
    for name in "ab":
        answer = "2024-05-01" if name == dates else "Paris"
        row = {"answer": answer, "messages": [{"role": "user", "content": answer}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    expected = ["2024-05-01", "Paris"] if dates == "a" else ["Paris", "2024-05-01"]
    assert load(tmp_path / "*.jsonl")["answer"][:] == expected
    assert [messages[0]["content"] for messages in load(tmp_path / "*.jsonl")["messages"]] == expected
    assert load([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"])["answer"][:] == expected


@pytest.mark.parametrize("day", ["Monday", "2024-05-01"])
def test_types_of_json_are_those_of_all_rows(tmp_path, day):
    """A reader of blocks takes those of the first, in which a column may be null, whole numbers, or not there."""
    rows = [
        {"day": day, "n": 1, "tools": None, "messages": [{"role": "user"}]},
        {"day": day, "n": 1.5, "tools": [{"name": "f"}], "messages": [{"role": "user", "name": "x"}], "late": True},
    ]
    for name, row in zip("ab", rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    first, second = load(tmp_path / "*.jsonl")
    assert first == {**rows[0], "messages": [{"role": "user", "name": None}], "late": None} and second == rows[1]
    assert load(tmp_path / "*.jsonl", "train[1:]").to_list() == rows[1:]


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"name": "x"}, "has the key 'name', which no row before it has"),
        ({"number": 1.5}, "has 1.5 where the rows before it have int64; a column has one type"),
        ({"number": "01"}, 'has "01" where the rows before it have int64'),
    ],
)
def test_what_streamed_rows_with_dates_would_lose_is_refused(tmp_path, late, message):
    """The table of the first rows has no place for it."""
    (tmp_path / "a.jsonl").write_text('{"day": "2024-05-01", "number": 1}\n')
    (tmp_path / "b.jsonl").write_text(json.dumps({"day": "2024-05-02", **late}) + "\n")
    with pytest.raises(ConfigError, match=f"b.jsonl {message}"):
        list(load(tmp_path / "*.jsonl", streaming=True))


def test_only_the_files_of_the_split_are_looked_through(tmp_path):
    """And none when rows are streamed: they may be more than fit on this machine."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "test.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    assert load(folder).to_list() == list(load(folder, streaming=True)) == [{"prompt": "a"}]
    with pytest.raises(ConfigError, match=r"test.jsonl: line 1 is not UTF-8"):
        load(folder, "test")


def test_several_files(tmp_path, monkeypatch):
    for index in range(3):
        (tmp_path / f"part{index}.csv").write_text(f"prompt,answer\np{index},x\n")
    assert load(f"{tmp_path}/part*.csv")["prompt"][:] == ["p0", "p1", "p2"]
    assert load([f"{tmp_path}/part2.csv", f"{tmp_path}/part0.csv"])["prompt"][:] == ["p2", "p0"]
    (tmp_path / "rows.txt").write_text('{"prompt": "a"}\n')
    assert load([f"{tmp_path}/rows.txt"], ds_type="json")["prompt"][:] == ["a"]
    monkeypatch.chdir(tmp_path)
    assert len(load("part*.csv")) == 3
    assert load("part*.csv", "train[1:]")["prompt"][:] == ["p1", "p2"]


def test_patterns_and_names_that_read_like_one(tmp_path, monkeypatch):
    """`datasets` takes the name of a file for a pattern, and says nothing of one that matches no file."""
    monkeypatch.chdir(tmp_path)
    for name in ("part1.jsonl", "part2.jsonl", "part[1].jsonl", "rows[a].parquet", "rows[a].csv"):
        if name.endswith("parquet"):
            datasets.Dataset.from_list([{"prompt": name}]).to_parquet(name)
        else:
            (tmp_path / name).write_text(f"prompt\n{name}\n" if ".csv" in name else f'{{"prompt": "{name}"}}\n')
    for path in ("part[1].jsonl", "rows[a].parquet", f"{tmp_path}/rows[a].csv"):
        for streaming in (False, True):
            assert [row["prompt"] for row in load(path, streaming=streaming)] == [path.rpartition("/")[2]]
    assert load("part?.jsonl")["prompt"][:] == load("part[12].jsonl")["prompt"][:] == ["part1.jsonl", "part2.jsonl"]
    assert sorted(local_files("part?.jsonl")) == ["part1.jsonl of part?.jsonl", "part2.jsonl of part?.jsonl"]
    with pytest.raises(ConfigError, match=r"no file or folder 'part\[3\].jsonl'"):
        load("part[3].jsonl")
    with pytest.raises(
        ConfigError, match=r"no file or folder 'part1.jsonl, part2.jsonl'; .* several are entries of data.s"
    ):
        load("part1.jsonl, part2.jsonl")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/rows.ndjson").write_text('{"prompt": "p"}\n')
    (tmp_path / "inner/notes.txt").write_text("a note\n")
    assert load("inner/*")["prompt"][:] == ["p"]
    with pytest.raises(ConfigError, match=r"rows\[a\].csv is a csv file, but .*part1.jsonl a json file"):
        load("*")


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_and_tabs(tmp_path, streaming):
    (tmp_path / "texts.txt").write_text("one\n\ntwo, 0042\n")
    assert [row["text"] for row in load(tmp_path / "texts.txt", streaming=streaming)] == ["one", "", "two, 0042"]
    (tmp_path / "rows.tsv").write_text("prompt\tanswer\na, b\t0042\n")
    assert list(load(tmp_path / "rows.tsv", streaming=streaming)) == [{"prompt": "a, b", "answer": "0042"}]
    (tmp_path / "rows.csv").write_text("prompt,answer\nc,1\n")
    with pytest.raises(ConfigError, match=r"some are csv and some tsv: make them two sources"):
        load([f"{tmp_path}/rows.tsv", f"{tmp_path}/rows.csv"], streaming=streaming)


def test_texts_beside_the_rows_of_a_folder_are_notes(tmp_path):
    (tmp_path / "notes.txt").write_text("a note\n")
    with pytest.raises(
        ConfigError, match=r"holds no .parquet, [^;]*.arrow file and no saved data set; .*/\*.txt names"
    ):
        load(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    assert load(tmp_path).to_list() == ROWS[:1]


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_without_rows_are_passed_over(tmp_path, streaming):
    """Programs that write in parts leave some, which `datasets` fails on."""
    for number, texts in enumerate([["a"], [], ["b", "c"]]):
        table = pyarrow.table({"prompt": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, tmp_path / f"part-{number}.parquet")
    for path in (tmp_path, tmp_path / "*.parquet", [tmp_path / f"part-{number}.parquet" for number in range(3)]):
        assert [row["prompt"] for row in load(path, streaming=streaming)] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"part-1.parquet has no rows"):
        load(tmp_path / "part-1.parquet", streaming=streaming)


@pytest.mark.parametrize("readme", ["# Rows", "---\nlicense: mit\n---\nconfigs: none"])
def test_a_readme_without_configurations_changes_no_text(tmp_path, readme):
    """`datasets` would make numbers, dates and None of texts."""
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "rows.csv").write_text("question,answer\nNone,0042\n")
    assert load(tmp_path).to_list() == [{"question": "None", "answer": "0042"}]


def test_files_of_several_types_and_of_unknown_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b.JSONL", "c.csv"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    assert len(load(["~/a.jsonl", "b.JSONL"])) == 2
    with pytest.raises(ConfigError, match=r"c.csv is a csv file, but a.jsonl a json file; .* two of data.sources"):
        load(["a.jsonl", "b.JSONL", "c.csv"])
    with pytest.raises(ConfigError, match=r"ds_type of 'a.jsonl' is 'jsonl'; it is parquet, json, csv, arrow, text"):
        load("a.jsonl", ds_type="jsonl")


def test_compressed_and_arrow_files(tmp_path, table):
    import gzip

    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a"}\n')
    assert load(tmp_path / "rows.jsonl.gz")["prompt"][:] == ["a"]
    table.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert load(arrow).to_list() == ROWS


def test_a_file_and_a_task_have_no_configurations(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    with pytest.raises(ConfigError, match=r"a.csv' is a file, which has no configuration 'main': leave the name out"):
        load(f"{tmp_path}/a.csv", name="main")
    with pytest.raises(ConfigError, match="'task:sort' is a built-in task, which has no configuration 'main'"):
        load("task:sort", name="main")


def test_rows_of_a_data_set_with_a_format_are_pythons():
    rows = [{"prompt": [{"role": "user", "content": "Q"}], "answer": 4, "other": 1}]
    for name in ("numpy", "pandas", "arrow"):
        table = datasets.Dataset.from_list(rows)
        assert load(table.with_format(name)).to_list() == rows
        assert list(load(table.to_iterable_dataset().with_format(name))) == rows
        assert list(load(table.with_format(name, columns=["answer"]))) == [{"answer": 4}]
    assert list(load(table.with_transform(lambda batch: {"prompt": ["a"]}))) == [{"prompt": "a"}]


def test_threads_and_tuples_as_rows():
    thread = [("user", "Q"), ("assistant", "A")]
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert load([thread]) == [{"messages": messages}]
    assert load([{"turns": thread, "metadata": {"answer": "4"}}]) == [{"messages": messages, "answer": "4"}]
    assert load([types.SimpleNamespace(turns=thread, metadata=None)]) == [{"messages": messages}]
    assert load([(thread, messages)]) == [{"chosen": messages, "rejected": messages}]
    assert load([("good", "bad")]) == [{"chosen": "good", "rejected": "bad"}]
    with pytest.raises(ConfigError, match=r"item 1 of the list: a turn is"):
        load([thread, [("user", "Q", "?")]])


def test_a_function_or_class_from_a_file(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Rows:\n"
        "    def __init__(self, split):\n        self.split = split\n"
        "    def __len__(self):\n        return 2\n"
        "    def __getitem__(self, index):\n        return {'prompt': f'{self.split}{index}'}\n"
        "def rows(split, name):\n    return [{'prompt': name or split}]\n"
        "def number():\n    return 3\n"
        "def all_rows():\n    return [{'prompt': 'a'}]\n"
        "def failing():\n    yield {'prompt': 'a'}\n    raise ValueError('no more')\n"
        "def leaving(split):\n    raise SystemExit(0)\n"
        "three = 3\n"
    )
    assert load(f"{tmp_path}/own.py:Rows", "dev") == [{"prompt": "dev0"}, {"prompt": "dev1"}]
    assert load(f"{tmp_path}/own.py:rows", "dev", "main") == [{"prompt": "main"}]
    assert load(f"{tmp_path}/own.py:all_rows") == [{"prompt": "a"}]
    for split in ("test", "train[:10%]"):
        with pytest.raises(ConfigError, match=r"own.py:all_rows has no argument split, .* the split 'train', not"):
            load(f"{tmp_path}/own.py:all_rows", split)
    with pytest.raises(ConfigError, match=r"own.py:number gave int; it must give rows"):
        load(f"{tmp_path}/own.py:number")
    with pytest.raises(ConfigError, match=r"own.py:failing failed: ValueError: no more \(.*own.py:16\)"):
        load(f"{tmp_path}/own.py:failing")
    with pytest.raises(ConfigError, match=r"own.py:leaving failed: LeftError: it called sys.exit\(0\), in leaving"):
        load(f"{tmp_path}/own.py:leaving")
    with pytest.raises(ConfigError, match=r"own.py:three is int, but it takes a function or a class that gives rows"):
        load(f"{tmp_path}/own.py:three")


def test_a_class_with_the_signature_of_verl(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n"
        "        cache = config.get('cache_dir', 'c')\n"
        "        self.said = f'{data_files} {tokenizer} {config.prompt_key} {cache} {processor}'\n"
        "    def __len__(self):\n        return 2\n"
        "    def __getitem__(self, index):\n        return {'prompt': f'{self.said} {index}'}\n"
        "def other(session):\n    return []\n"
    )
    arguments = {"tokenizer": "T", "config": FactoryOptions(prompt_key="question")}
    rows = load(f"{tmp_path}/own.py:Own(data_files='a.parquet')", arguments=arguments)
    assert [row["prompt"] for row in rows] == ["a.parquet T question c None 0", "a.parquet T question c None 1"]
    with pytest.raises(ConfigError, match=r"own.py:other asks for session; it gets those of config, data_files"):
        load(f"{tmp_path}/own.py:other", arguments=arguments)
    with pytest.raises(ConfigError, match=r"data.path: cannot find '.*own.py:Owned': .*; the closest is Own"):
        load(f"{tmp_path}/own.py:Owned", arguments=arguments)
    with pytest.raises(ConfigError, match=r"own.py:Own has no argument 'file'"):
        load(f"{tmp_path}/own.py:Own(file='a')", arguments=arguments)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "the file is empty"),
        ("empty.csv", b"", "the file is empty"),
        ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("blank.jsonl", b"\n \n", "the file has empty lines alone"),
        ("head.csv", b"prompt,answer\n", "no rows"),
        ("bytes.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"line 2 is not UTF-8 \(byte 0xff\)"),
        ("bytes.csv", b"prompt\na\n\xe9t\xe9\n", r"line 3 is not UTF-8 \(byte 0xe9\)"),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("none.json", b"[]", "the list has no rows; give it at least one"),
        ("marks.csv", b"prompt;answer\na;1\n", "has the one column 'prompt;answer': separate .* by commas"),
        ("scalar.jsonl", b'{"p": "a"}\n3\n', "line 2 is 3, not an object"),
        ("none.jsonl", b"{}", "the object has no rows; give it at least one"),
        ("marks.tsv", b"prompt,answer\na,1\n", "has the one column 'prompt,answer': separate .* by tabs"),
        ("rows.txt", b'\n{"prompt": "a"}\n', "line 2 is JSON, but every line of a .txt file is a text"),
        (
            "lines.csv",
            b'{"prompt": "a", "answer": "1"}\n',
            "is named as a csv file, but its lines are JSON: name it .jsonl",
        ),
        ("texts.txt", b"a\n\xe9t\xe9\n", r"line 2 is not UTF-8"),
        ("here.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run git lfs pull"),
        ("frame.json", b'{"prompt": {"0": "a", "1": "b"}}', r"is one object, whose columns .*orient='records'"),
        ("lists.json", b'{"prompt": ["a", "b"], "completion": ["c", "d"]}', "is one object, whose columns hold"),
        ("rows.json", b'{"data": [{"prompt": "a"}]}', "is one object, whose key 'data' has the rows"),
    ],
)
def test_damaged_files(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(name)
    assert name in str(caught.value)


def test_a_column_of_two_types_is_named(tmp_path):
    """Readers that refuse it do not say where."""
    (tmp_path / "mixed.jsonl").write_text('{"p": "a"}\n\n{"p": [{"role": "user"}]}\n')
    (tmp_path / "fine.jsonl").write_text('{"p": "a"}\n{"p": null, "q": 1}\n{"q": 2.5}\n')
    message = "column 'p' is a list of an object in line 3 but text in line 1; a column has one type"
    assert message in str(content_fault(str(tmp_path / "mixed.jsonl")))
    assert content_fault(str(tmp_path / "fine.jsonl")) is None
