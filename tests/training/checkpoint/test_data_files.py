"""Data that is edited in place, with as many rows, is told when the run goes on."""

import json
import os
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.config import default
from jaxrl_llm.data import sources
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.training.checkpoint import data_files
from jaxrl_llm.training.checkpoint.data_files import checksums, edited


def write(file: Path, answers) -> None:
    file.write_text("".join(json.dumps({"prompt": f"sort:{n}=", "completion": str(n)}) + "\n" for n in answers))


def source(path, rows=()) -> DataSource:
    return DataSource(path if isinstance(path, str) else "", rows, dict, None, None, None, path=path)


def test_a_checksum_is_of_the_content(tmp_path, monkeypatch):
    (folder := tmp_path / "rows").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write(folder / name, range(12, 16))
    (folder / "picture.png").write_bytes(b"x")
    before = checksums([source(str(folder))])
    assert list(before) == [f"{name} of {folder}" for name in ("a.jsonl", "b.jsonl")]
    os.utime(folder / "a.jsonl", (1, 1))
    assert checksums([source(str(folder))]) == before and edited(before, before) == []
    write(folder / "a.jsonl", (12, 13, 15, 14))
    (line,) = edited(before, checksums([source(str(folder))]))
    assert line.startswith(f"a.jsonl of {folder}: edited since the checkpoint was written; the run goes on with")
    write(folder / "b.jsonl", (22, 13, 14, 15))
    (line,) = edited(before, checksums([source(str(folder))]))
    assert line.startswith(f"a.jsonl of {folder} and 1 other file: edited")
    assert edited({}, before) == []  # of a checkpoint of an earlier version
    others = ("task:sort", [{"prompt": "a"}], "gs://bucket/rows.jsonl", "rows.py:function")
    assert checksums(map(source, others)) == {}
    # Of a large file parts are read, among them its beginning and its end, and of many files the sizes alone.
    for name, value in {"WHOLE": 8, "BLOCK": 4, "BLOCKS": 2}.items():
        monkeypatch.setattr(data_files, name, value)
    large = folder / "c.jsonl"
    sums = []
    for text in ("0123456789abcdefg", "0123_________defg", "0123456789abcdef_", "_123456789abcdefg"):
        large.write_text(text)
        sums += checksums([source(str(large))]).values()
    assert sums[0] == sums[1] and len({*sums}) == 3
    monkeypatch.setattr(data_files, "FILES", 0)
    assert {*checksums([source(str(large))]).values()} == {"17 bytes, e3b0c44298fc1c14"}


def test_rows_behind_a_url_are_told_by_what_the_server_says_of_them(tmp_path, monkeypatch):
    """Those of one file are the same at each start, and others once it is edited; secrets of its address stay here."""
    file, url = tmp_path / "rows.jsonl", f"file://{tmp_path}/rows.jsonl"
    write(file, range(12, 16))
    before = checksums([source(f"{url}?token=hidden", sources.load(url))])
    assert [*before] == [f"train of {url}?token=***"]
    url += "?token=hidden"
    assert checksums([source(url, sources.load(f"file://{file}"))]) == before
    write(file, (12, 13, 15, 14))
    os.utime(file, (1, 1))
    (line,) = edited(before, checksums([source(url, sources.load(f"file://{file}"))]))
    assert line.startswith(f"train of file://{file}?token=***: edited since the checkpoint was written")
    for name in ("train", "test"):
        (tmp_path / "both").mkdir(exist_ok=True)
        write(tmp_path / "both" / f"{name}.jsonl", range(12, 16))
    both = f"file://{tmp_path}/both"
    assert [*checksums([source(both, sources.load(both, "train+test"))])] == [both]
    made = sources.load(f"file://{file}")
    assert checksums([source("rows.py:function", made), source(made, made)]) == {}
    assert checksums([source(url, sources.load(f"file://{file}", streaming=True))]) == {}


@pytest.mark.slow
def test_a_run_that_goes_on_tells_it_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, config = Path("rows.jsonl"), default()
    write(file, range(12, 16))
    config.algorithm.name, config.data.path, config.eval.every, config.output_dir = "sft", str(file), -1, "run"
    config.batch.prompts, config.logging.backends = 2, ("console", "jsonl")
    told = []
    for steps, answers in ((1, None), (2, None), (3, (12, 13, 15, 14)), (4, None)):
        if answers is not None:
            write(file, answers)
        config.total_steps = steps
        jaxrl_llm.train(config)
        told.append("warning: rows.jsonl: edited since the checkpoint" in "".join(capsys.readouterr()))
    assert told == [False, False, True, False]
