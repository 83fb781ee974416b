"""Rewards for programs: the completion's code is run against tests, in the sandbox.

Tests are a column of the data set, each value in one of these forms, itself or as JSON text:

| form | test |
|---|---|
| `"assert f(1) == 2\\nassert ..."` | Python code, run after the program |
| `["assert f(1) == 2", ...]` | pieces of Python code, one test each |
| `[{"input": "3\\n", "output": "6\\n"}, ...]` | what the program prints for a standard input |
| `{"inputs": ["3\\n"], "outputs": ["6\\n"]}` | the same, also without the s (CodeContests) |
| `{"fn_name": "f", "inputs": [[1]], "outputs": [2]}` | what a function returns for arguments |
| `[{"fn_name": "f", "input": [1], "output": 2}, ...]` | the same (SYNTHETIC-1, also as its `test_cases`) |
| `{"fn_name": "f", "inputs": ["[1, 2]\\n3"], "outputs": ["4"]}` | the same, in lines of JSON (LiveCodeBench) |

A function may be a method of a class Solution. Values are compared as Python's `==` compares them, lists and tuples as
one; where `fn_name` stands, what a list of one value holds is right too, for APPS, TACO and verl wrap outputs in such
lists. Printed lines are compared token by token, whatever white space is between and around them: tokens are the same
text, or two numbers that differ by at most 1e-6 of the larger (or 1e-9), unless both are integers. Tests in Python run
in a process of their own, in which the program's functions are calls into the program's.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import itertools
import json
import marshal
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jaxrl_llm.rewards.concurrency import DEADLINE
from jaxrl_llm.rewards.sandbox import Limits, missing_walls, run_program, run_tests
from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of

# Names that tests use without importing them, because the programs of their data sets import them.
HELPERS = {"isclose": "math:isclose", "inf": "math:inf", "nan": "math:nan", "approx": "pytest:approx",
           "allclose": "numpy:allclose", "Decimal": "decimal:Decimal", "Fraction": "fractions:Fraction"} | {
    name: f"collections:{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple")
}  # fmt: skip
INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)  # in linear time
MODULES = {"np": "numpy", "pd": "pandas"} | {
    name: name for name in ("numpy", "pandas", "pytest", *sys.stdlib_module_names)
}
# What a judge of functions imports for the program, whose starter code says List[int]: LiveCodeBench's modules, in its
# order, and all that is in them; a later name counts, before them builtins, and first the modules themselves.
JUDGED_WITH = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
GIVEN = {
    name: f"{module.__name__}:{name}"
    for module in map(importlib.import_module, JUDGED_WITH)
    for name in getattr(module, "__all__", vars(module))
    if not name.startswith("_") and not hasattr(builtins, name)
} | {module: module for module in JUDGED_WITH}
PYTHON = ("python", "python3", "py", "py3")
KEYS = ("input", "output")  # of a test


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

    The program is the last fenced code block of the completion that says it is Python, or the last one, or all of it;
    None where tests is None. `seconds`, `memory_mb` and `processes` limit it (per standard input; together for tests in
    Python and of a function); without `partial` the first test that fails is the last that is run. `at_once` programs
    run at the same time (0: as many as processors). Where the machine lacks isolation layers (walls) that keep programs
    from network, files and other processes, there is a warning, or an error with `require_walls`.

    HumanEval's tests, which define `check(candidate)` and leave the call out, are called with the function that the
    column `entry_point` names; LiveCodeBench's of the type functional call the `func_name` of `metadata`, a column or,
    in DeepCoder's rows, an entry of each test. A program that is tested by calls of a function may use List, deque,
    math and the like (GIVEN) without importing them.
    Raises RewardError: tests that have none of the forms of this module, a limit that is not above 0.
    """
    limits = Limits(seconds, memory_mb, processes, deadline=DEADLINE.get())
    _check_walls(require_walls)
    parsed = [None if test is None else _parse(row, test, _entry_point(columns, row)) for row, test in enumerate(tests)]
    sources = [program_of(text_of(completion)) for completion in completions]
    with ThreadPoolExecutor(at_once or os.cpu_count() or 1, "programs") as threads:
        return list(threads.map(functools.partial(_share, limits=limits, partial=partial), sources, parsed))


def program_of(text: str) -> str:
    """The last fenced code block of a text that says it is Python, else the last one, else the whole text."""
    blocks: list[tuple[str, list[str]]] = []
    is_open = False
    for line in text.replace("\r\n", "\n").split("\n"):
        if re.fullmatch(r"\s*``` ?(?:python|py)3?\s*", line, re.IGNORECASE):
            is_open = False  # a block that lacks its end
        if is_open:
            end = re.match(r"\s*```|([^`]+)```\s*$", line)  # backticks within a line of code are none
            blocks[-1][1].extend([line] if end is None else filter(None, [end[1]]))
            is_open, line = end is None, "" if end is None else line[end.end() :]
        words = re.sub(r"```[^`]+```", "", line)  # code within a sentence, ```f```, opens no block
        if not is_open and (opening := re.search(r"```([^`]*)$", words)):
            blocks.append((opening[1].lower().partition(" ")[0], []))
            is_open = True
    if not blocks:
        return text
    in_python = [lines for tag, lines in blocks if tag in PYTHON]
    program = "".join(f"{line}\n" for line in (in_python or [lines for _, lines in blocks])[-1])
    return textwrap.dedent(program) if program[:1] in (" ", "\t") else program  # a block in a list is indented


def _share(source: str, tests: list[Any] | None, limits: Limits, partial: bool) -> float | None:
    """The share of tests that a program passes; unless `partial`, 0.0 where that is not all."""
    if tests is None:
        return None
    if isinstance(tests[0], tuple):
        verdicts = (_prints(source, stdin, output, limits) for stdin, output in tests)
        return sum(verdicts) / len(tests) if partial else float(all(verdicts))
    given = None
    if isinstance(tests[0], dict):
        given = {name: GIVEN[name] for name in GIVEN.keys() & set(re.findall(r"\w+", source, re.ASCII))}
    sources = tuple(test for test in tests if isinstance(test, str))
    job = {"tests": tests, "whole": not partial, "given": given, **_names(sources)}
    passed = len(run_tests(source, job, limits).passed)
    return passed / len(tests) if partial else float(passed == len(tests))


def _prints(source: str, stdin: str, output: str, limits: Limits) -> bool:
    """True when a program prints an output for a standard input, which it has room for however long it is."""
    kilobytes = len(output.encode("utf-8", "replace")) // 1024 + 64
    most = max(limits.output_kb, kilobytes)
    run = run_program(source, stdin, replace(limits, output_kb=most, file_mb=max(limits.file_mb, most // 1024 + 1)))
    return run.succeeded and same_output(run.output, output)


def same_output(output: str, wanted: str) -> bool:
    """True for texts with the same tokens in each line, empty lines at both ends of the texts aside.

    Tokens are the same where their texts are, or where they are numbers that differ by at most 1e-6 of the larger, or
    1e-9, and that are not both written as integers: those are compared exactly.
    """

    def is_close(token: str, other: str) -> bool:
        if not (NUMBER.fullmatch(token) and NUMBER.fullmatch(other)):
            return False
        values = float(token), float(other)
        is_exact = bool(INTEGER.fullmatch(token) and INTEGER.fullmatch(other))
        return not is_exact and all(map(math.isfinite, values)) and math.isclose(*values, rel_tol=1e-6, abs_tol=1e-9)

    lines, wanted_lines = ([line.split() for line in text.strip().split("\n")] for text in (output, wanted))
    return list(map(len, lines)) == list(map(len, wanted_lines)) and all(
        token == other or is_close(token, other)
        for token, other in zip(itertools.chain(*lines), itertools.chain(*wanted_lines), strict=True)
    )


def _entry_point(columns: Mapping[str, Any], row: int) -> str | None:
    """The name of the function that a row asks for, in HumanEval's or LiveCodeBench's column."""
    if names := columns.get("entry_point"):
        return names[row]
    return _func_name((columns.get("metadata") or {row: None})[row])


def _func_name(metadata: Any) -> str | None:
    """The name of the function in LiveCodeBench's metadata, of a row or of a test."""
    with contextlib.suppress(ValueError):
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _parse(row: int, tests: Any, name: str | None = None) -> list[Any]:
    """Tests as a list of Python texts, of calls of a function, or of (input, output) pairs."""
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):  # Python code may start like this too
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        if not re.search(r"^def check\(", tests, re.MULTILINE) or len(re.findall(r"\bcheck\(", tests)) > 1:
            return [tests]
        if name is None:
            raise RewardError(
                f"the tests of row {row} define check(candidate) and never call it: end them with check(NAME), or give "
                "the name of the function in the column entry_point"
            )
        return [f"{tests}\n\ncheck({name})\n"]
    if isinstance(tests, dict):
        tests = tests.get("test_cases") or tests
    if isinstance(tests, dict):
        inputs, outputs = (tests.get(f"{key}s", tests.get(key)) for key in KEYS)  # without the s in CodeContests
        if isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple)) and len(inputs) == len(outputs):
            tests = [{**tests, "input": given, "output": result} for given, result in zip(inputs, outputs, strict=True)]
    if isinstance(tests, (list, tuple)) and tests:
        if all(isinstance(test, str) for test in tests):
            return list(tests)
        if all(isinstance(test, dict) and test.keys() >= set(KEYS) for test in tests):
            of_calls = [test.get("fn_name") or test.get("testtype") == "functional" for test in tests]
            names = [test.get("fn_name") or _func_name(test.get("metadata")) or name or "" for test in tests]
            if not any(of_calls) and all(test["output"] is not None for test in tests):
                return [(_as_text(test["input"]), _as_text(test["output"])) for test in tests]
            if all(of_calls) and all(names):
                return [_call(row, called, test) for called, test in zip(names, tests, strict=True)]
    raise RewardError(
        f"code_tests cannot read the tests of row {row}: {shorten(tests)}; they are Python code, a list of it, a list "
        "of {'input', 'output'}, or {'inputs', 'outputs'} of equal length; all of them, or none, call a function that "
        "'fn_name' or, with the testtype functional, their metadata or the column of that name names"
    )


def _call(row: int, name: str, test: Mapping[str, Any]) -> dict[str, Any]:
    """The test that a function returns the output; inputs in one text are JSON, a line each, and so is the output.

    With `fn_name` a list of one value may be how the data set wraps the value.
    """
    arguments, result = test["input"], test["output"]
    try:
        if isinstance(arguments, str):
            arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
            result = json.loads(result) if isinstance(result, str) else result
        if not isinstance(arguments, (list, tuple)):  # of a dictionary, list() has the keys
            raise TypeError("they are no list")
        is_wrapped = "fn_name" in test and isinstance(result, (list, tuple)) and len(result) == 1
        call = {"function": name, "arguments": list(arguments), "results": [result, *(result if is_wrapped else ())]}
        marshal.dumps(call)
    except (ValueError, TypeError, RecursionError) as error:
        raise RewardError(
            f"code_tests cannot read the call of {name} of row {row}: {shorten(arguments)} gives {shorten(result)}; "
            f"arguments are a list of plain values, or a text with one in JSON a line ({error})"
        ) from None
    return call


@functools.lru_cache(maxsize=4096)  # completions of one prompt share their tests
def _names(sources: tuple[str, ...]) -> dict[str, Any]:
    """Names in tests as `exchange.run_tests` reads them: `library`, `shadowed` and `uncalled`.

    Names that tests do not define are the program's. But a program that answers `abs` or `isclose` itself would be its
    own judge, so helpers are Python's, save one that some assertion calls alone: `assert sum(1, 2) == 3`.
    Raises RewardError for a test function that nobody calls and only pytest can: all programs would pass it.
    """
    used, bound, bases, defined, of_pytest = set(), set(), set(), [], {}
    together, alone = set(), set()
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError) as error:
            shown = shorten(source, 100)
            warnings.warn(f"no program passes the tests {shown}: they are no Python ({error})", stacklevel=2)
            continue
        defined += [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        for node in tree.body:
            if isinstance(node, ast.AsyncFunctionDef) or (
                isinstance(node, ast.FunctionDef) and len(node.args.args) > len(node.args.defaults)
            ):
                of_pytest[node.name] = node.args
        for node in ast.walk(tree):
            match node:
                case ast.Name():
                    (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                    bound.add(node.name)
                case ast.arg():
                    bound.add(node.arg)
                case ast.alias():
                    bound.add((node.asname or node.name).partition(".")[0])
                case ast.Attribute(value=ast.Name(id=base)):
                    bases.add(base)
                case ast.Assert():
                    names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
                    (alone if len(names) == 1 else together).update(names)
    for name in sorted(of_pytest.keys() - used):
        if name.startswith("test"):
            raise RewardError(
                f"tests define {name}({ast.unparse(of_pytest[name])}) and never call it; code_tests calls plain "
                "functions without arguments, as it has no fixtures or parameters of pytest, nor an event loop: call it"
            )
    modules = {name: MODULES[name] for name in (used & bases & MODULES.keys()) - bound}
    helpers = {name: HELPERS[name] for name in (used & HELPERS.keys()) - bound - (alone - together)}
    return {
        "library": modules | helpers,
        "shadowed": sorted((alone - together - bound) & vars(builtins).keys()),
        "uncalled": [name for name in defined if name not in used],
    }


def _as_text(value: Any) -> str:
    if value is None:  # an input that is left out
        return ""
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
