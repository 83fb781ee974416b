"""Rewards for programs: the completion's code is run against tests, in the sandbox.

Tests are a column of the data set, each value in one of these forms, itself or as JSON text:

| form | test |
|---|---|
| `"assert f(1) == 2\\nassert ..."` | Python code, run after the program |
| `["assert f(1) == 2", ...]` | pieces of Python code, one test each |
| `[{"input": "3\\n", "output": "6\\n"}, ...]` | what the program prints for a standard input |
| `{"inputs": ["3\\n"], "outputs": ["6\\n"]}` | the same |
| `{"fn_name": "f", "inputs": [[1]], "outputs": [2]}` | what a function returns for arguments |
"""

import contextlib
import functools
import json
import os
import re
import secrets
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrl_llm.rewards.sandbox import Limits, missing_walls, run_program
from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of

# The program and its tests come through standard input, and each test that passes is answered with a mark that the
# program does not know: one that exits early, or prints what it likes, passes nothing.
DRIVER = """\
import io, json, sys
job = json.loads(sys.stdin.read())
sys.stdin = io.StringIO("")
space = {"__name__": "__main__"}
say, write, flush = job.pop("mark"), sys.stdout.write, sys.stdout.flush
try:
    exec(compile(job["program"], "program", "exec"), space)
except SystemExit:
    pass
for index, test in enumerate(job["tests"]):
    try:
        if isinstance(test, dict):
            assert space[test["function"]](*test["arguments"]) == test["result"]
        else:
            exec(compile(test, "test", "exec"), space)
    except BaseException:
        continue
    write("\\n" + say + str(index) + "\\n")
    flush()
"""


def code_tests(
    completions: Sequence[Any],
    tests: Sequence[Any],
    *,
    partial: bool = False,
    seconds: float = 10.0,
    memory_mb: int = 1024,
    processes: int = 16,
    at_once: int = 0,
    require_walls: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion's program passes all `tests`, else 0.0; with `partial` the share that it passes.

    The program is the last fenced code block of the completion, or all of it; None where tests is None. `seconds`,
    `memory_mb` and `processes` limit it (per standard input; together for tests in Python); `at_once` programs run
    at the same time (0: as many as processors). Where the machine lacks the isolation layers (walls) that keep programs
    from network and files, there is a warning, or an error with `require_walls`.

    Raises RewardError: tests that have none of the forms of this module.
    """
    _check_walls(require_walls)
    limits = Limits(seconds, memory_mb, processes)
    parsed = [None if test is None else _parse(row, test) for row, test in enumerate(tests)]
    sources = [program_of(text_of(completion)) for completion in completions]
    with ThreadPoolExecutor(at_once or os.cpu_count() or 1) as threads:
        shares = list(threads.map(functools.partial(_share, limits=limits), sources, parsed))
    return [share if share is None or partial else float(share == 1.0) for share in shares]


def program_of(text: str) -> str:
    """The last fenced code block of a text, or the whole text when there is none."""
    blocks = re.findall(r"```[a-zA-Z0-9+]*[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return blocks[-1] if blocks else text


def _share(source: str, tests: list[Any] | None, limits: Limits) -> float | None:
    """The share of tests that a program passes."""
    if tests is None:
        return None
    if isinstance(tests[0], tuple):
        passed = sum(_prints(source, stdin, output, limits) for stdin, output in tests)
    else:
        mark = secrets.token_hex(16)
        stdin = json.dumps({"program": source, "tests": tests, "mark": mark})
        output = run_program(DRIVER, stdin, limits).output
        passed = len(set(re.findall(rf"^{mark}(\d+)$", output, re.MULTILINE)))
    return passed / len(tests)


def _prints(source: str, stdin: str, output: str, limits: Limits) -> bool:
    """True when the program succeeds and prints `output`, white space at line ends and the end aside."""
    finished = run_program(source, stdin, limits)
    return finished.succeeded and _lines(finished.output) == _lines(output)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _parse(row: int, tests: Any) -> list[Any]:
    """Tests as a list of Python texts, of calls of a function, or of (input, output) pairs."""
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):  # Python code may start like this too
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        return [tests]
    if isinstance(tests, dict) and len(tests.get("inputs") or ()) == len(tests.get("outputs") or ()) > 0:
        if name := tests.get("fn_name"):
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            return [{"function": name, "arguments": list(i), "result": o} for i, o in pairs]
        return [(_as_text(i), _as_text(o)) for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    if isinstance(tests, (list, tuple)) and tests:
        if all(isinstance(test, str) for test in tests):
            return list(tests)
        if all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return [(_as_text(test["input"]), _as_text(test["output"])) for test in tests]
    raise RewardError(
        f"code_tests cannot read the tests of row {row}: {shorten(tests)}; they are Python code, a list of it, a list "
        "of {'input', 'output'}, or {'inputs', 'outputs'} of equal length with or without 'fn_name'"
    )


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _check_walls(required: bool) -> None:
    if missing := missing_walls():
        message = (
            f"on this machine nothing but Python itself keeps programs from {' and '.join(missing)} "
            "(see jaxrl_llm.rewards.sandbox.walls()): run in a container without secrets"
        )
        if required:
            raise RewardError(message)
        warnings.warn(message, stacklevel=3)
