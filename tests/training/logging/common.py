"""Rows of completions, consoles and views of files, for the tests of the records and of the console."""

import io
import math

import numpy as np
from rich.console import Console

from jaxrl_llm.training.logging.logger import LoggingSpec
from jaxrl_llm.training.logging.records import read_metrics

ROWS = [
    {"prompt": "1+1=", "completion": "2", "exact_match": 1.0, "length": np.float32(0.5), "advantage": 0.7},
    {
        "prompt": "1+1=",
        "completion": "3",
        "exact_match": 0,
        "length": math.nan,
        "advantage": -0.7,
        "tool": "calculator",
    },
]


def quiet_spec():
    return LoggingSpec(backends=("jsonl",))


def terminal(monkeypatch, width=100) -> Console:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def text_of(console: Console) -> str:
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def steps(folder) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
