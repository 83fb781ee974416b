"""Reward functions at run time: settings for late and failing rows, worker processes, and logs."""

import asyncio
import io
import os
import pickle
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from jaxrl_llm.rewards import functions
from jaxrl_llm.rewards.call import Log
from jaxrl_llm.rewards.runner import TrainerState, load_rewards
from jaxrl_llm.rewards.sandbox import walls
from jaxrl_llm.rewards.signatures import RewardError
from jaxrl_llm.rewards.workers.bounded import LATE, run_bounded
from jaxrl_llm.rewards.workers.pool import PlainUnpickler

NAN = np.nan


def submit(specs, completions, columns=None, state=None, **options):
    rows = len(completions)
    prompts, ids = [f"p{row}" for row in range(rows)], [[row] for row in range(rows)]
    rewards = load_rewards(specs, **options)
    try:
        return rewards.submit(prompts, completions, ids, columns or {}, state or TrainerState()).result()
    finally:
        rewards.close()


def numbers(*args, **options):
    return submit(*args, **options).rewards[:, 0]


# --- rows that fail ---------------------------------------------------------------------------------------------------


def divide(completions, answer, **_):
    return [1 / number for number in answer]


async def divide_async(completions, answer, **_):
    await asyncio.sleep(0)
    return [1 / number for number in answer]


class Divider:
    name = "divide"

    def grade(self, sample):
        return 1 / sample.columns["answer"]


class AsyncDivider:
    name = "divide"

    async def grade(self, sample):
        return 1 / sample.columns["answer"]


@pytest.mark.parametrize("reward", [divide, divide_async, Divider(), AsyncDivider()])
@pytest.mark.parametrize("timeout", [None, 10.0])
def test_failing_rows_get_none_and_a_warning(reward, timeout):
    with pytest.warns(
        UserWarning, match=r"raised ZeroDivisionError: division by zero \(.*py:\d+\), on row 1 \(.*'prompts': 'p1'"
    ):
        graded = submit(reward, list("abc"), {"answer": [1, 0, 4]}, timeout=timeout, on_error="none")
    np.testing.assert_array_equal(graded.rewards[:, 0], np.float32([1, NAN, 0.25]))
    [(name, count)] = graded.logged.totals.items()
    assert name.endswith("/errors") and count == 1


@pytest.mark.parametrize("reward", [Divider(), AsyncDivider()])
def test_failing_rows_of_row_graders_stop_the_run(reward):
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: division by zero \(.*py:\d+\), on row 1 "):
        submit(reward, list("abc"), {"answer": [1, 0, 4]})


def test_the_retry_keeps_row_numbers_and_memory():
    calls = []

    def grade(completions, row_numbers, batch_memory, **_):
        calls.append((list(row_numbers), batch_memory.setdefault("batch", len(calls))))
        if "b" in completions:
            raise KeyError("b")
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match="on row 1"):
        assert np.isnan(numbers(grade, list("abc"), on_error="none")).tolist() == [False, True, False]
    assert calls == [([0, 1, 2], 0), ([0], 0), ([1], 0), ([2], 0), ([0, 2], 0)]


def test_the_numbers_of_prompts_are_those_of_the_rows(worker_file):
    """In a second call without failing rows, and in worker processes; None where nobody says them."""
    seen = []

    def grade(completions, prompt_numbers, **_):
        seen.append(prompt_numbers)
        if "b" in completions:
            raise KeyError("b")
        return [1.0] * len(completions)

    rewards = load_rewards(grade, on_error="none")
    with pytest.warns(UserWarning, match="on row 1"):
        rewards.submit(["p"] * 3, list("abc"), [[1]] * 3, {}, prompt_numbers=[0, 0, 1]).result()
    assert seen == [[0, 0, 1], [0], [0], [1], [0, 1]]
    numbers(grade, ["a"])
    assert seen[-1] is None
    rewards = load_rewards(f"{worker_file}:prompt", workers=1)
    try:
        graded = rewards.submit(["p"] * 3, list("abc"), [[1]] * 3, {}, prompt_numbers=[4, 4, 5]).result()
    finally:
        rewards.close()
    assert graded.rewards[:, 0].tolist() == [4, 4, 5]


def test_a_failing_batch_gets_none_everywhere():
    def whole(completions, **_):
        if len(completions) > 1:
            raise KeyError("batch")
        return [0.0]

    with pytest.warns(UserWarning, match="called with rows 0 to 2"):
        graded = submit(whole, list("abc"), on_error="none")
    assert np.isnan(graded.rewards).all()
    assert graded.logged.totals == {"rewards/whole/errors": 3}


# --- rows that are late -----------------------------------------------------------------------------------------------


def sleep(completions, **_):
    time.sleep(3)
    return [1.0] * len(completions)


async def sleep_async(completions, **_):
    await asyncio.sleep(3)


class Slow:
    name = "slow"

    def grade(self, sample):
        time.sleep(3 if sample.text == "slow" else 0)
        return 1.0


class AsyncSlow:
    name = "slow"

    async def grade(self, sample):
        await asyncio.sleep(3 if sample.text == "slow" else 0)
        return 1.0


@pytest.mark.parametrize(("on_timeout", "value"), [("none", NAN), ("-2", -2.0), (0, 0.0)])
@pytest.mark.parametrize("reward", [sleep, sleep_async])
def test_late_batches_get_the_value(reward, on_timeout, value):
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"took more than rewards.timeout=0.1 seconds"):
        graded = submit(reward, ["a", "b"], timeout=0.1, on_timeout=on_timeout)
    np.testing.assert_array_equal(graded.rewards[:, 0], np.float32([value, value]))
    assert list(graded.logged.totals.values()) == [2]
    assert time.monotonic() - started < 2.5


def test_late_rows_leave_the_others_their_rewards():
    with pytest.warns(UserWarning, match=r"row 2 was not done: .*'completions': 'slow'"):
        assert numbers(Slow(), ["a", "b", "slow"], timeout=0.6, on_timeout=-1.0).tolist() == [1, 1, -1]
    with pytest.warns(UserWarning, match="row 1 was not done"):
        assert numbers(AsyncSlow(), ["a", "slow", "c"], timeout=0.6, on_timeout="-1").tolist() == [1, -1, 1]
    with pytest.raises(RewardError, match=r"reward 'slow' took more than .*row 0 was not done"):
        numbers(Slow(), ["slow", "b"], timeout=0.2)


@pytest.mark.parametrize("spec", ["code_tests(at_once=2)", "combined(graders=['code_tests(at_once=2)'])"])
def test_no_program_runs_on_behind_a_late_batch(spec):
    walls()  # found out once, by a program
    tests = ["import time; time.sleep(3)"] * 6
    with pytest.warns(UserWarning, match=r"took more than rewards.timeout=0.5 seconds"):
        assert numbers(spec, ["x = 1"] * 6, {"tests": tests}, timeout=0.5, on_timeout=-1.0).tolist() == [-1] * 6
    deadline = time.monotonic() + 2
    while left := [thread for thread in threading.enumerate() if thread.name.startswith("programs")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    "spec", ["regex_match(pattern='(a+)+$')", "combined(graders=['regex_match(pattern=\"(a+)+$\")'])"]
)
def test_no_late_pattern_keeps_the_next_batch_waiting(spec):
    texts, options = ["a" * 40 + "b"] * 300, {"timeout": 1.0, "on_timeout": -1.0}
    assert numbers(spec, ["aa"], timeout=60.0).tolist() == [1.0]  # workers have started
    with pytest.warns(UserWarning, match=r"took more than rewards.timeout=1.0 seconds"):
        assert numbers(spec, texts, **options).tolist() == [-1.0] * 300
    started = time.monotonic()
    assert numbers(spec, ["aa"], timeout=60.0).tolist() == [1.0]
    assert time.monotonic() - started < 10


def test_a_blocked_loop_is_replaced():
    async def block(completions, **_):
        if completions == ["block"]:
            time.sleep(2)
        return [1.0]

    rewards = load_rewards(block, timeout=0.1, on_timeout=0.0)
    with pytest.warns(UserWarning, match="took more than"):
        assert rewards(["p"], ["block"], [[1]], {}).tolist() == [[0.0]]
    assert rewards(["p"], ["a"], [[1]], {}).tolist() == [[1.0]]


@pytest.mark.parametrize("options", [{"on_timeout": "never"}, {"on_timeout": "nan"}, {"on_error": "skip"}])
def test_wrong_settings(options):
    [(name, value)] = options.items()
    with pytest.raises(RewardError, match=f"rewards.{name} is '{value}'; it is stop"):
        load_rewards("exact_match", **options)


# --- beside each other ------------------------------------------------------------------------------------------------


def test_submit_starts_async_functions():
    started = []

    async def judge(completions, **_):
        started.append(time.monotonic())
        return [1.0]

    pending = load_rewards(judge).submit(["p"], ["a"], [[1]], {})
    deadline = time.monotonic() + 5
    while not started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started
    assert pending.result().rewards.tolist() == [[1.0]]


# --- worker processes -------------------------------------------------------------------------------------------------

WORKER_FILE = """
import os, re, signal, socket, subprocess, sys, time

def process(completions, **kwargs):
    return [float(os.getpid())] * len(completions)

def logs(completions, log_metric, log_extra, trainer_state, **kwargs):
    log_metric("mine/length", len(completions[0]))
    log_extra("note", completions)
    return [trainer_state.global_step] * len(completions)

def returns_a_function(completions, **kwargs):
    return [lambda: 1.0]

def logs_a_function(completions, log_extra, **kwargs):
    log_extra("note", [lambda: 1.0])
    return [1.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "raise":
        raise ValueError("bad row")
    if solution_str == "hang":
        os.system("sleep 60")
    return {"score": float(solution_str == ground_truth), "process": os.getpid()}

def partly(completions, row_numbers):
    if "crash" in completions:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "raise" in completions:
        raise ValueError(f"bad row in {os.getpid()}")
    return [{"score": row, "process": os.getpid()} for row in row_numbers]

def hang(completions, **kwargs):
    time.sleep(60)

def leave(completions, **kwargs):
    sys.exit(0)

def junk(completions, **kwargs):
    os.write(int(sys.argv[1]), b"garbage" * 1000)
    return [1.0] * len(completions)

def closed(completions, **kwargs):
    os.close(int(sys.argv[1]))
    time.sleep(0.1)

def pattern(completions, **kwargs):
    re.match("(a+)+$", "a" * 40 + "!")

def interrupt(completions, **kwargs):
    raise KeyboardInterrupt

def prompt(completions, prompt_numbers):
    return prompt_numbers

class BadError(Exception):
    pass

def raises(texts):
    raise BadError("of a module that is nowhere else")

def attempts(tries):
    def kind(function, *arguments):
        try:
            function(*arguments)
        except Exception as error:
            return type(error).__name__
    return [kind(eval(f"lambda: {text}", globals())) for text in tries]

class Call:
    def __reduce__(self):
        return eval, ("1.0",)

def answers_by_a_call(texts):
    return [Call() if text == "call" else 1.0 for text in texts]

def dies(ends):
    return [1.0 if each is None else bytearray(2**33) if each else os._exit(3) for each in ends]
"""


@pytest.fixture(scope="module")
def worker_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("workers") / "worker_rewards.py"
    path.write_text(WORKER_FILE)
    return path


def test_functions_run_in_worker_processes(worker_file):
    specs = [f"{worker_file}:process", "exact_match", f"{worker_file}:logs", "soft_overlong(max_length=1, cache=1)"]
    graded = submit(specs, ["ab", "c"], {"answer": ["ab", "x"]}, TrainerState(5, 9), workers=2)
    assert graded.rewards[0, 0] == graded.rewards[1, 0] != os.getpid()
    assert graded.rewards[:, 1:].tolist() == [[1, 5, -1], [0, 5, -1]]
    assert graded.logged.metrics == {"mine/length": [2.0]} and graded.logged.columns == {"note": ["ab", "c"]}


def test_rows_are_shared_and_survive_each_other(worker_file):
    texts = ["4", "5", "crash", "4", "raise", "hang", "exit", "4"]
    started = time.monotonic()
    with pytest.warns(UserWarning, match="reward 'compute_score'") as warned:
        graded = submit(
            str(worker_file), texts, {"ground_truth": ["4"] * 8}, workers=2, timeout=5.0, on_timeout=-1, on_error="none"
        )
    assert time.monotonic() - started < 20
    np.testing.assert_array_equal(graded.rewards[:, 0], np.float32([1, 0, NAN, 1, NAN, -1, NAN, 1]))
    assert graded.logged.totals == {"rewards/compute_score/errors": 3, "rewards/compute_score/timeouts": 1}
    messages = " ".join(str(warning.message) for warning in warned)
    line = worker_file.read_text().splitlines().index('        raise ValueError("bad row")') + 1
    for part in (
        "ended with signal SIGSEGV, on row 2",
        f"ValueError: bad row ({worker_file}:{line}), on row 4",
        "ended with exit code 3, on row",
    ):
        assert part in messages


@pytest.mark.parametrize("text", ["raise", "crash"])
def test_rows_on_which_a_batch_function_fails_are_found_in_workers(worker_file, text):
    """Never in this process, which such a function may end."""
    with pytest.warns(UserWarning, match=r"reward 'partly' raised .*, on row 1 \(") as warned:
        graded = submit(f"{worker_file}:partly", ["a", text, "b"], workers=1, on_error="none")
    np.testing.assert_array_equal(graded.rewards[:, 0], np.float32([0, NAN, 2]))
    processes = graded.logged.columns["partly/process"]
    assert processes[1] is None and os.getpid() not in processes
    assert not any(f"bad row in {os.getpid()}" in str(warning.message) for warning in warned)
    assert graded.logged.totals == {"rewards/partly/errors": 1}


def test_a_worker_that_hangs_is_killed(worker_file):
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward 'hang' took more than rewards.timeout=1.5 seconds"):
        submit(f"{worker_file}:hang", ["a"], workers=1, timeout=1.5)
    assert time.monotonic() - started < 10


def test_bounded_calls_are_behind_walls(worker_file, tmp_path):
    if missing := {"files", "system calls"} - set(walls()):
        pytest.skip(f"this machine does not offer {missing}")
    tries = [f"open({str(tmp_path / 'new')!r}, 'w')", "socket.socket()", "subprocess.run(['true'])",
             f"os.kill({os.getpid()}, 0)", "bytearray(2**33)", f"open({str(worker_file)!r}).close()"]  # fmt: skip
    results = run_bounded("attempts", f"{worker_file}:attempts", {"tries": tries}, 60.0)
    assert results == ["PermissionError", "PermissionError", results[2], "PermissionError", "MemoryError", None]
    assert results[2] in ("PermissionError", "BlockingIOError") and not (tmp_path / "new").exists()


def test_what_is_behind_walls_answers_with_values_alone(worker_file):
    """A pickle may call anything where it is read, outside of the walls."""
    results = run_bounded("calls", f"{worker_file}:answers_by_a_call", {"texts": ["call", "value"]}, 60.0)
    assert results == [LATE, 1.0]
    with pytest.raises(RuntimeError, match="BadError: of a module that is nowhere else"):
        run_bounded("raises", f"{worker_file}:raises", {"texts": ["a"]}, 60.0)

    def read(value):
        return PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()

    assert [type(read(error("x"))) for error in (ValueError, RewardError)] == [ValueError, RewardError]
    for value in (Log(), subprocess.SubprocessError("x")):  # the state of a class of ours could be set for all
        with pytest.raises(pickle.UnpicklingError, match="is no value of a walled worker"):
            read(value)


def test_a_row_that_ends_its_process_or_fills_the_memory_is_late_alone(worker_file):
    for end in (False, True):
        results = run_bounded("dies", f"{worker_file}:dies", {"ends": [None] * 7 + [end]}, 60.0)
        assert results == [1.0] * 7 + [LATE]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leave", r"raised LeftError: it called sys.exit\(0\)"),
        ("interrupt", r"raised LeftError: it raised KeyboardInterrupt"),
        ("junk", "raised WorkerDiedError: something else than messages came through the pipe of its worker process"),
        ("closed", "raised WorkerDiedError: it"),
    ],
)
def test_a_worker_that_is_left_or_spoiled(worker_file, name, said):
    rewards = load_rewards([f"{worker_file}:{name}"], workers=1)
    with pytest.raises(RewardError, match=f"reward '{name}' {said}"):
        rewards(["p"], ["a"], [[1]], {})
    rewards.close()


def test_a_time_limit_holds_for_a_pattern_without_workers(worker_file):
    """A function with a name runs in a process when there is a limit, for a thread cannot be ended."""
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward 'pattern' took more than rewards.timeout=1.0 seconds"):
        submit(f"{worker_file}:pattern", ["a"], timeout=1.0)
    assert time.monotonic() - started < 30
    assert numbers(f"{worker_file}:process", ["a"]).tolist() == [os.getpid()]
    assert numbers(f"{worker_file}:process", ["a"], {"lock": [threading.Lock()]}, timeout=60.0).tolist() == [
        os.getpid()
    ]
    assert numbers(f"{worker_file}:process", ["a"], timeout=60.0).tolist() != [os.getpid()]


def test_what_cannot_come_back_from_a_worker_is_an_error(worker_file):
    for name, what in (("returns_a_function", "result"), ("logs_a_function", "log")):
        with pytest.raises(RewardError, match=f"reward '{name}' raised RuntimeError: its {what} cannot be sent: "):
            submit(f"{worker_file}:{name}", ["a"], workers=1)


def test_functions_that_cannot_travel_are_named():
    with pytest.raises(
        RewardError, match=r"reward '<lambda>' cannot be sent to a worker process .*rewards.workers to 0"
    ):
        submit(lambda completions, **_: [0.0], ["a"], workers=1)


def test_a_worker_that_died_is_replaced(worker_file):
    rewards = load_rewards(f"{worker_file}:process", workers=1)
    first = int(rewards(["p"], ["a"], [[1]], {})[0, 0])
    os.kill(first, signal.SIGKILL)
    rewards.workers.idle[0].process.wait()
    assert int(rewards(["p"], ["a"], [[1]], {})[0, 0]) != first
    rewards.close()


def test_functions_of_modules_travel_as_they_are():
    assert numbers(functions.exact_match, ["a", "b"], {"answer": ["a", "a"]}, workers=1).tolist() == [1, 0]


@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_end_with_their_parent(run_python, worker_file, hangs):
    code = f"""
import time
from jaxrl_llm.rewards.runner import load_rewards
batch = (["p"], ["a"], [[1]], {{}})
rewards = load_rewards("{worker_file}:process", workers=1)
print(int(rewards(*batch)[0, 0]), flush=True)
if {hangs}:
    hung = load_rewards("{worker_file}:hang", workers=1)
    hung.workers.idle = rewards.workers.idle
    hung.submit(*batch)
    time.sleep(0.3)
"""
    worker = int(run_python("-c", code, timeout=60).stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker went on")


# --- what functions log -----------------------------------------------------------------------------------------------


def test_log_metric_and_log_extra():
    def first(completions, log_metric, log_extra, **kwargs):
        for completion in completions:
            log_metric("accuracy", float(completion == "a"))
        log_extra("seen", [completion.upper() for completion in completions])
        return [0.0] * len(completions)

    def second(completions, log_metric=None):
        log_metric("accuracy", 1.0)
        return [0.0] * len(completions)

    logged = submit([first, second], ["a", "b"]).logged
    assert logged.metrics == {"accuracy": [1.0, 0.0, 1.0]} and logged.columns == {"seen": ["A", "B"]}


def test_log_extra_of_the_wrong_length():
    def short(completions, log_extra, **kwargs):
        log_extra("seen", ["x"])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="reward 'short' gave log_extra 1 value of 'seen' for 2 completions"):
        submit(short, ["a", "b"])


@pytest.mark.parametrize(
    ("service", "given", "message"),
    [
        ("log_metric", (3, 1.0), "log_metric takes a name that is a text, not 3"),
        ("log_extra", (None, [1]), "log_extra takes a name that is a text, not None"),
        ("log_extra", ("seen", "a"), "log_extra takes a list with a value for each completion, not 'a'"),
    ],
)
def test_wrong_arguments_of_what_functions_log(service, given, message):
    def logs(completions, log_metric, log_extra):
        {"log_metric": log_metric, "log_extra": log_extra}[service](*given)
        return [0.0]

    with pytest.raises(RewardError, match=f"reward 'logs' raised TypeError: {message}"):
        submit(logs, ["a"])


@pytest.mark.parametrize("column", ["prompt", "taken", "exact_match"])
def test_log_extra_of_a_column_that_is_taken(column):
    def first(completions, log_extra):
        log_extra("taken", ["x"])
        return [0.0]

    def second(completions, log_extra):
        log_extra(column, ["x"])
        return [0.0]

    with pytest.raises(RewardError, match=f"reward 'second' gave log_extra the column '{column}', which is taken"):
        submit([first, second, "exact_match"], ["a"], {"answer": ["a"]})


def test_trainer_state_holds_the_step():
    def late_bonus(completions, trainer_state, **kwargs):
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    assert numbers(late_bonus, ["a"], state=TrainerState(3, 4)).tolist() == [0.75]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_log_of_a_batch_that_failed_is_that_of_its_second_call(is_async):
    """Neither the call that broke off nor the search for the failing row is logged."""

    def fails(completions, answer, log_metric, log_total, log_extra):
        log_metric("calls", 1.0)
        log_total("rows", len(completions))
        log_extra("seen", completions)
        return [1 / number for number in answer]

    async def fails_async(completions, answer, log_metric, log_total, log_extra):
        return fails(completions, answer, log_metric, log_total, log_extra)

    reward = fails_async if is_async else fails
    with pytest.warns(UserWarning, match="on row 0"):
        logged = submit(reward, ["a", "b", "c"], {"answer": [0, 1, 2]}, on_error="none").logged
    assert logged.metrics == {"calls": [1.0]}
    assert logged.totals == {"rows": 2, f"rewards/{reward.__name__}/errors": 1}
    assert logged.columns == {"seen": [None, "b", "c"]}


@pytest.mark.parametrize("is_async", [False, True])
def test_columns_of_calls_that_broke_off_are_dropped(is_async):
    async def each(completions, wait, log_metric, log_extra):
        for completion in completions[:2]:
            log_metric("calls", 1.0)
            log_extra("seen", [completion])
        if wait[0] < 0:
            raise OSError("the service is gone")
        await asyncio.sleep(wait[0])
        return [0.0] * len(completions)

    def in_thread(completions, wait, log_metric, log_extra):
        return asyncio.run(each(completions, wait, log_metric, log_extra))

    reward = each if is_async else in_thread
    with pytest.warns(UserWarning, match="took more than"):
        logged = submit(reward, list("abcd"), {"wait": [1.0] * 4}, timeout=0.2, on_timeout="none").logged
    assert logged.columns == {} and logged.metrics == {"calls": [1.0, 1.0]}
    assert logged.totals == {f"rewards/{reward.__name__}/timeouts": 4}
    with pytest.warns(UserWarning, match="the service is gone"):
        logged = submit(reward, list("abcd"), {"wait": [-1.0] * 4}, on_error="none").logged
    assert logged.columns == {} and logged.totals == {f"rewards/{reward.__name__}/errors": 4}


def test_log_extra_of_the_wrong_length_beside_a_failing_row():
    def short(completions, answer, log_extra):
        log_extra("seen", ["x"])
        return [1 / number for number in answer]

    with (
        pytest.warns(UserWarning, match="on row 0"),
        pytest.raises(RewardError, match="reward 'short' gave log_extra 1 value of 'seen' for 2 completions"),
    ):
        submit(short, ["a", "b", "c"], {"answer": [0, 1, 2]}, on_error="none")
