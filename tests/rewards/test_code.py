"""Programs that are run against tests."""

import json
import re
import time

import pytest

from jaxrl_llm.rewards import code
from jaxrl_llm.rewards.code import code_tests, program_of
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.rewards.sandbox import run_program
from jaxrl_llm.rewards.signatures import RewardError
from tests.rewards.programs import ASSERTIONS, RIGHT, WRONG

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
SUBTRACT = "```python\ndef add(a, b):\n    return a - b\n```"
DOUBLE = "```\nprint(int(input()) * 2)\n```"


def test_programs_are_found():
    assert program_of(ADD) == "def add(a, b):\n    return a + b\n"
    assert program_of("print(1)") == "print(1)"
    assert program_of("```py\na\n```\n then ```python3\nb\n```") == "b\n"
    assert program_of("```python\ncut off") == "cut off\n"
    assert program_of("Both ```f``` and ```g```: see ```python\na\n```\nThis is ```f``` again.") == "a\n"
    assert program_of("Mind the ``` in it.\n```python\na\n```\n") == "a\n"
    assert program_of("```python\na\n```\nIt prints:\n```\n6\n```\n```text\n7\n```") == "a\n"
    assert program_of("```\na\n```\n```cpp\nb\n```") == "b\n"
    assert program_of("<think>```python\na\n```</think>```Python\r\n# ```x```\r\nb\r\n```\r\n") == "# ```x```\nb\n"
    assert program_of("1. As\n   ``` py title=x\n   if a:\n\n       b\n   ```") == "if a:\n\n    b\n"


def test_tests_in_python():
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    completions = [ADD, SUBTRACT, [{"role": "assistant", "content": ADD}], "no code", ADD]
    columns = [tests, tests, tests, tests, None]
    assert code_tests(completions, columns) == [1.0, 0.0, 1.0, 0.0, None]
    assert code_tests(completions[:2], [tests] * 2, partial=True) == [1.0, 0.5]
    assert code_tests([ADD, SUBTRACT], ["assert add(1, 2) == 3\nassert add(2, 2) == 4"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1\n", "21\n"], "outputs": ["2", "42\n\n"]},
        [{"input": "1", "output": "2\n"}, {"input": "21", "output": "42  \n"}],
        json.dumps({"inputs": [["1"], ["21"]], "outputs": [["2"], ["42"]]}),
        {"input": ["1\n", "21\n"], "output": ["2\n", "42\n"]},
    ],
)
def test_tests_of_input_and_output(tests):
    assert code_tests([DOUBLE, "print(2)"], [tests] * 2, partial=True) == [1.0, 0.5]


def test_printed_numbers_and_white_space():
    same = [("6", "\n6\n"), ("1 2", " 1 2"), ("1.0", "1"), ("0.30000000000000004", "0.3"), ("1  2 \n\n", "1 2"),
            ("Case 1: 0.5", "Case 1: 0.50"), ("a\r\nb", "a\nb"), ("-0.0", "0"), ("1e3", "1000"), ("nan", "nan"),
            ("5" * 9, "5" * 9)]  # fmt: skip
    other = [("12345678901234567", "12345678901234568"), ("1.001", "1"), ("01", "1"), ("1 2", "1\n2"), ("1 2", "1"),
             ("", "1"), ("nan", "1"), ("1e999", "9" * 400), ("inf", "1e999"), ("0.5a", "0.50a"), ("a\n\nb", "a\nb"),
             ("2e-6", "1e-6"), ("1_0", "10.0"), ("1" * 5000, "1" * 4999 + "2.0")]  # fmt: skip
    assert not [pair for pair in same if not code.same_output(*pair)]
    assert not [pair for pair in other if code.same_output(*pair)]
    # A pattern that tried all splits of the digits would take hours.
    assert not code.same_output("9" * 200_000 + "x", "9" * 200_000 + "y")
    assert code_tests(["print(0.1 + 0.2)"], [{"inputs": [""], "outputs": ["\n0.3\n"]}]) == [1.0]


def test_an_output_of_any_length_can_pass():
    tests = {"inputs": [""], "outputs": ["x" * 400_000]}
    assert code_tests(["print('x' * 400_000)", "print('x' * 400_001)"], [tests] * 2) == [1.0, 0.0]


def test_the_first_failure_decides(monkeypatch):
    ran = []
    monkeypatch.setattr(code, "run_program", lambda source, *rest: ran.append(rest[0]) or run_program(source, *rest))
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "5", "3"]}
    assert code_tests(["print(input())"], [tests]) == [0.0] and ran == ["1", "2"]
    assert code_tests(["print(input())"], [tests], partial=True) == [pytest.approx(2 / 3)] and len(ran) == 5

    began = time.monotonic()
    slow = "import time\ndef f(x):\n    time.sleep(x)\n    return x"
    assert code_tests([slow], [["assert f(0) == 1", "assert f(4) == 4"]]) == [0.0]
    assert code_tests([slow], [{"fn_name": "f", "inputs": [[0], [4]], "outputs": [1, 4]}]) == [0.0]
    assert time.monotonic() - began < 4


def test_outputs_of_a_function_in_lists_of_one():
    tests = {"fn_name": "f", "inputs": [["abc"], ["x"]], "outputs": [["cba"], ["x"]]}
    programs = [f"def f(s): return {value}" for value in ("s[::-1]", "[s[::-1]]", "s", "[[s[::-1]]]")]
    assert code_tests(programs, [tests] * 4) == [1.0, 1.0, 0.0, 0.0]
    apart = [{"fn_name": "f", "type": "function_call", "input": ["abc"], "output": ["cba"]}]
    assert code_tests(programs, [apart] * 4) == [1.0, 1.0, 0.0, 0.0]
    pair = {"fn_name": "f", "inputs": [["ab"]], "outputs": [["a", "b"]]}
    assert code_tests(["def f(s): return 'a'", "def f(s): return tuple(s)"], [pair] * 2) == [0.0, 1.0]


def test_tests_of_a_function():
    tests = {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [3, 10]}
    assert code_tests([ADD, SUBTRACT], [json.dumps(tests)] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('0'); print('1')",
        "raise KeyboardInterrupt",
        "import sys\nprint(sys.stdin.read())\nfor i in range(3): print('\\n' + 'a' * 32 + str(i))",
        "import builtins\nbuiltins.print = lambda *a: None\nclass AssertionError(Exception): pass",
        "while True: pass",
    ],
)
def test_wrong_programs_pass_nothing(program):
    assert code_tests([program], [["assert solve() == 1"]], seconds=1.0) == [0.0]


@pytest.mark.slow
def test_a_hanging_test_fails_itself_and_later_ones():
    tests = ["assert f(1) == 1", "assert f(-1) == 1", "assert f(2) == 2"]
    program = "def f(x):\n    while x < 0: pass\n    return x"
    assert code_tests([program], [tests], partial=True, seconds=3.0) == [pytest.approx(1 / 3)]


def test_a_program_that_prints_while_it_is_tested():
    assert code_tests(["def f():\n    print('noise', end='')\n    return 1"], [["assert f() == 1"] * 2]) == [1.0]


TEXTS = {"inputs": "1\n", "outputs": "2\n"}  # of which no character is a test


@pytest.mark.parametrize("tests", [7, [], "", {"inputs": ["1"], "outputs": []}, TEXTS, [{"input": "1"}], [1]])
def test_tests_of_no_known_form(tests):
    with pytest.raises(RewardError, match=re.escape("code_tests cannot read the tests of row 0")):
        code_tests(["x"], [tests])


def test_functions_and_classes_of_pytest():
    """A class is set up; what only pytest can call is refused, for every program would pass it."""
    programs = ["def f(x): return x + 1", "def f(x): return x"]
    for arguments in ("", ", method"):
        setup = f"    def setup_method(self{arguments}):\n        self.x = 1\n"
        test = f"class TestF:\n{setup}    def test_f(self):\n        assert f(self.x) == 2"
        assert code_tests(programs, [test] * 2) == [1.0, 0.0]
    with_argument = "def test_f(g, x=1):\n    assert g(x) == 2\n"
    assert code_tests(programs, [f"{with_argument}test_f(f)"] * 2) == [1.0, 0.0]
    for test in (with_argument, "async def test_f():\n    assert f(1) == 2"):
        with pytest.raises(RewardError, match=r"tests define test_f\(.*\) and never call it; code_tests calls plain"):
            code_tests(programs, [test] * 2)


def test_by_name_with_options():
    rewards = load_rewards("code_tests(partial=True, seconds=5)")
    columns = {"tests": [["assert add(1, 2) == 3", "assert add(1, 0) == 1"]]}
    assert rewards(["p"], [SUBTRACT], [[1]], columns).tolist() == [[0.5]]


def test_missing_walls_are_reported(monkeypatch):
    monkeypatch.setattr(code, "missing_walls", lambda: ("network",))
    with pytest.warns(UserWarning, match="nothing but Python itself keeps programs from network"):
        assert code_tests([ADD], [["assert add(1, 1) == 2"]]) == [1.0]
    with pytest.raises(RewardError, match="nothing but Python itself"):
        code_tests([ADD], [["assert add(1, 1) == 2"]], require_walls=True)


def scores(cases):
    got = code_tests([case[0] for case in cases.values()], [case[1] for case in cases.values()], seconds=20)
    return dict(zip(cases, got, strict=True))


def test_right_programs_of_every_kind_score_1():
    assert scores(RIGHT) == dict.fromkeys(RIGHT, 1.0)


def test_programs_that_cheat_score_0():
    assert scores(WRONG) == dict.fromkeys(WRONG, 0.0)


def test_a_package_that_is_not_installed_is_none_of_the_programs(monkeypatch):
    monkeypatch.setitem(code.MODULES, "pd", "no_such_package")
    cheat = "class pd:\n  def isna(x): return True\ndef double(x): return 1"
    assert code_tests([cheat], ["assert pd.isna(double(2))"]) == [0.0]


def test_programs_that_take_all_they_can_score_0():
    programs = [
        "import sys\ndef double(x):\n    while True: sys.stdout.write('x' * 2**20)",
        "import os\nfor fd in range(3, 20):\n    try:\n        while True: os.write(fd, b'x' * 2**20)\n"
        "    except OSError: pass",
        "def double(x): return 'x' * 2**27",
        "from decimal import Decimal\ndef double(x): return Decimal('1e999999999')",
        "def double(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'[' * 10**5 + bytes(range(256)))\n"
        "    except OSError: pass",
    ]
    assert code_tests(programs, [ASSERTIONS] * len(programs), seconds=2.0) == [0.0] * len(programs)


def test_calls_of_humaneval_and_livecodebench():
    check = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
    programs = ["def f(x): return x + 1", "def f(x): return x"]
    assert code_tests(programs, [check] * 2, entry_point=["f"] * 2) == [1.0, 0.0]
    assert code_tests(programs, [check + "check(f)"] * 2) == [1.0, 0.0]
    with pytest.raises(RewardError, match="never call it: end them with check"):
        code_tests(programs, [check] * 2)

    programs = ["class Solution:\n    def g(self, a, b): return sum(a) + b", "def g(a, b): return 7"]
    functional = json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}])
    assert code_tests(programs, [functional] * 2, metadata=['{"func_name": "g"}'] * 2) == [1.0, 0.0]
    with pytest.raises(RewardError, match="or, with the testtype functional, their metadata or the column of that"):
        code_tests(programs, [functional] * 2)
    of_deepcoder = [{**test, "metadata": {"func_name": "g"}} for test in json.loads(functional)]
    assert code_tests(programs, [json.dumps(of_deepcoder)] * 2) == [1.0, 0.0]
    of_synthetic = {"language": "python", "test_cases": [{"fn_name": "g", "input": [[1, 2], 3], "output": 6}]}
    assert code_tests(programs, [of_synthetic] * 2) == [1.0, 0.0]
    # Starter code of LeetCode's kind, which is judged with these names; plain Python has none of them.
    starter = "class Solution:\n    def g(self, a: List[int]) -> Optional[int]:\n        return "
    programs = [
        starter + "math.gcd(*a) + heappop(a) + reduce(max, a, 0)",
        "from __future__ import annotations\n" + starter + "len(Counter(a)) + 6",
        "def g(a, depth=20_000): return 8 if depth == 0 else g(a, depth - 1)",
        "def math(x): return x\ndef g(a): return math(8)",
        starter + "not_there(a)",
    ]
    test = {"fn_name": "g", "inputs": [[[2, 4]]], "outputs": [8]}
    assert code_tests(programs, [test] * 5) == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert code_tests(programs[:1], ["assert Solution().g([2, 4]) == 8"]) == [0.0]

    for arguments in ("[1", [object()], {"a": 1}):
        with pytest.raises(RewardError, match="cannot read the call of f of row 0"):
            code_tests(["x"], [{"fn_name": "f", "inputs": [arguments], "outputs": [1]}])


@pytest.mark.parametrize(
    "tests",
    [
        "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n",
        "class TestF:\n    def test_one(self):\n        assert f(1) == 2\n",
        "import unittest\nclass Tests(unittest.TestCase):\n    def test_one(self): self.assertEqual(f(1), 2)\n",
        "import unittest\nclass Tests(unittest.TestCase):\n    def test_one(self): self.assertEqual(f(1), 2)\n"
        "if __name__ == '__main__':\n    unittest.main()",
        "count = 0\ndef test():\n    global count\n    count += 1\n    assert f(count) == 2\ntest()\n",
    ],
)
def test_tests_of_pytest_and_unittest_are_run(tests):
    programs = ["def f(x): return x + 1", "def f(x): return x", "def f(x): raise SystemExit(0)"]
    assert code_tests(programs, [tests] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_limits_are_above_0(seconds):
    with pytest.raises(RewardError, match="limit seconds is a number above 0"):
        code_tests(["x"], [["assert x"]], seconds=seconds)
    with pytest.raises(RewardError, match=r"limit memory_mb is a whole number, not 100\.5"):
        code_tests([ADD], [["assert add(1, 1) == 2"]], memory_mb=100.5)


def test_inputs_and_outputs_that_are_left_out():
    program = "import sys; print(repr(sys.stdin.read()))"
    assert code_tests([program], [[{"input": None, "output": "''"}]]) == [1.0]
    with pytest.raises(RewardError, match="code_tests cannot read the tests of row 0"):
        code_tests([DOUBLE], [[{"input": "1", "output": None}]])


def test_tests_that_are_no_python_are_warned_of():
    with pytest.warns(UserWarning, match="no program passes the tests 'doubles its argument': they are no Python"):
        assert code_tests([DOUBLE], ["doubles its argument"]) == [0.0]
