"""The checksums by which processes see that they have read the same; tests/system/processes has real ones."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.data.sources import RowList
from jaxrl_llm.distributed import processes
from jaxrl_llm.training.setup import agreed


@pytest.fixture
def of_two(monkeypatch):
    """`of_two(check, *arguments)`: the facts that this process of two compares."""
    told = []
    monkeypatch.setattr(agreed.jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreed, "check_agreed", lambda facts, fix: told.append(facts))

    def facts(check, *arguments):
        check(*arguments)
        return told.pop()

    return facts


def test_rows_that_differ(of_two):
    """In number, order, length or a token; by the columns that hold tokens alone."""
    pairs = [{"chosen_ids": [number, 1], "rejected_ids": [2], "ids": 3} for number in range(4)]
    last = {**pairs[3], "rejected_ids": [4]}
    others = (pairs[:3], pairs[::-1], [*pairs[:3], last], [*pairs[:3], {**last, "rejected_ids": [2, 2]}], [])
    found = [str(of_two(agreed.check_same_rows, "rows", "pairs", rows)) for rows in (pairs, *others)]
    assert len(set(found)) == len(found)
    same = [dict(row, ids="another") for row in pairs]
    assert str(of_two(agreed.check_same_rows, "rows", "pairs", same)) == found[0]
    assert "the number of rows" in found[0]


def test_labels_that_differ(of_two):
    """The same tokens, of which others are learned, or which are told to be right."""
    rows = {"ids": [1, 2, 3], "mask": [0, 0, 1], "label": True, "step_labels": [0.0, 0.0, 1.0]}
    for kind, changes in (
        ("completions", {"mask": [0, 1, 1]}),
        ("labels", {"label": False}),
        ("steps", {"step_labels": [0.0, 0.0, 0.5]}),
    ):
        same, other = (of_two(agreed.check_same_rows, "rows", kind, [row]) for row in (rows, rows | changes))
        assert same != other, kind


def test_streams_that_differ(of_two, tmp_path, monkeypatch):
    """In one of the first rows, or in a file."""
    found = []
    rows = [{"prompt": f"{n:06d}", "completion": "x"} for n in range(40)]
    changes = ({}, {}, {agreed.FIRST - 1: "y"}, {39: "y"}, {39: "yy"})
    for number, changed in enumerate(changes):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        own = [row | {"completion": changed.get(n, "x")} for n, row in enumerate(rows)]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        source = DataSource("rows.jsonl", RowList(own), dict, None, None, None, path="rows.jsonl")
        facts = of_two(agreed.check_same_streams, [source])
        assert list(facts) == ["the checksum of the first 16 rows of rows.jsonl", "rows.jsonl of rows.jsonl"]
        found.append(tuple(facts.values()))
    assert found[0] == found[1] and len(set(found)) == len(found) - 1
    assert [facts[0] == found[0][0] for facts in found] == [True, True, False, True, True]
    in_memory = of_two(agreed.check_same_streams, [source._replace(name="", path=rows)])
    assert in_memory == {"the checksum of the first 16 rows of the data": found[-1][0]}
    # Files of one name in folders of one, and parts of one data set.
    for part in ("a", "b"):
        (tmp_path / "folder" / part).mkdir(parents=True)
        (tmp_path / "folder" / part / "rows.jsonl").write_text(json.dumps(rows[0]))
    both = [source._replace(rows=RowList(own), path=str(tmp_path / "folder")) for own in (rows[:1], rows[1:])]
    facts = of_two(agreed.check_same_streams, both)
    assert [name.partition(" of ")[0] for name in facts][1:] == ["a/rows.jsonl", "b/rows.jsonl"]
    what = "the checksum of the first 16 rows of rows.jsonl"
    assert of_two(agreed.check_same_streams, [both[1], both[1]])[what] != facts[what]


def test_models_that_differ(of_two, tmp_path):
    """In a file's size, in bytes wherever they are, or by a file that is not there; the adapter too."""
    size = 1 << 18
    files = {"config.json": b"{}", "model.safetensors": bytes(size)}
    kinds = (files, files | {"model.safetensors": bytes(size - 1)}, files | {"generation_config.json": b"{}"})
    for place in (0, size // 2, size - 1):
        kinds += (files | {"model.safetensors": bytes(place) + b"1" + bytes(size - 1 - place)},)
    found = []
    for number, own in enumerate(kinds):
        folder = tmp_path / str(number) / "model"
        folder.mkdir(parents=True)
        for name, content in own.items():
            (folder / name).write_bytes(content)
        facts = of_two(agreed.check_same_model, str(folder), None, False)
        found.append(str(sorted(facts.values())))
        assert all(str(folder) in name for name in facts)
    assert len(set(found)) == len(found)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"a")
    assert f"adapter_model.safetensors of {adapter}" in of_two(
        agreed.check_same_model, str(tmp_path / "0" / "model"), None, False, str(adapter)
    )


def test_the_first_difference_is_told(monkeypatch):
    other = {"host": "b", "facts": {"rows": 7, "seed": 1}}
    monkeypatch.setattr(processes, "gather", lambda own: [own, own, other])
    words = r"process 2 \(b\) is set up differently from process 0 \(.*\): rows is 7 there, 8 here. Give them"
    with pytest.raises(processes.AgreedError, match=words):
        processes.check_agreed({"rows": 8, "seed": 1}, "Give them the same")
    monkeypatch.setattr(processes, "gather", lambda own: [own] * 2)
    assert len(processes.check_agreed({"rows": 8}, "")) == 2
