import asyncio
import contextlib
import copy
import functools
import math
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards import functions
from jaxrl_llm.rewards.combined import CombinedGrader
from jaxrl_llm.rewards.runner import Rewards, load_rewards
from jaxrl_llm.rewards.signatures import RewardError


def grade(specs, completions, columns=None, timeout=None, prompts=None):
    """The rewards of `completions`, with tokens 0, 1, 2, ... for their characters."""
    ids = [list(range(len(completion))) for completion in completions]
    prompts = prompts or [f"p{row}" for row in range(len(completions))]
    return load_rewards(specs, timeout=timeout)(prompts, completions, ids, columns or {})


def length(completions, **columns):
    return [len(completion) for completion in completions]


# --- what comes back --------------------------------------------------------------------------------------------------


def test_rewards_are_float32_columns():
    rewards = grade([length, "exact_match"], ["ab", "c"], {"answer": ["ab", "ab"]})
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [[2, 1], [1, 0]]


def test_fractions_are_kept():
    """Tunix's PPO stores rewards in an array of its token type and cuts 0.7 to 0."""
    rewards = grade(lambda completions, **_: [0.7, -1.9], ["a", "b"])
    np.testing.assert_array_equal(rewards[:, 0], np.float32([0.7, -1.9]))


def test_none_is_nan_also_for_all_functions():
    rewards = grade([lambda completions, **_: [1, None, None], lambda completions, **_: [None, 2, None]], list("abc"))
    np.testing.assert_array_equal(rewards, np.float32([[1, np.nan], [np.nan, 2], [np.nan, np.nan]]))


def test_nan_is_none_with_one_warning():
    def unsure(completions, **_):
        return [1.0, math.nan, {"score": np.float32("nan")}]

    with pytest.warns(UserWarning, match="reward 'unsure' returned NaN for row 1 and 1 more: it counts as") as all_:
        rewards = grade(unsure, list("abc"))
    np.testing.assert_array_equal(rewards[:, 0], np.float32([1, np.nan, np.nan]))
    assert len(all_) == 1


@pytest.mark.parametrize(
    "results",
    [
        [True, False],
        (1.0, 0.0),
        np.array([1.0, 0.0]),
        np.array([1, 0]),
        [np.float32(1), np.int64(0)],
        [np.array(1.0), 0],
        np.array([1, 0], dtype=object),
    ],
)
def test_every_sequence_of_numbers_is_taken(results):
    assert grade(lambda completions, **_: results, ["a", "b"])[:, 0].tolist() == [1.0, 0.0]


def test_results_may_be_a_tensor_or_a_jax_array():
    torch = pytest.importorskip("torch")
    assert grade(lambda completions, **_: torch.tensor([0.5, 1.0]), ["a", "b"])[:, 0].tolist() == [0.5, 1.0]
    import jax.numpy as jnp

    assert grade(lambda completions, **_: jnp.array([0.5, 1.0]), ["a", "b"])[:, 0].tolist() == [0.5, 1.0]


# --- what goes in -----------------------------------------------------------------------------------------------------


def test_columns_but_prompt_keep_their_names():
    seen = {}

    def spy(**arguments):
        seen.update(arguments)
        return [0.0, 0.0]

    columns = {"prompt": ["x", "y"], "answer": [1, 2], "task": ["m", "c"], "completion": ["u", "v"]}
    grade(spy, ["a", "bc"], columns)
    assert {seen.pop(name) is not None for name in ("trainer_state", "log_metric", "log_extra")} == {True}
    assert seen == {
        "prompts": ["p0", "p1"],
        "completions": ["a", "bc"],
        "completion_ids": [[0], [0, 1]],
        "answer": [1, 2],
        "task": ["m", "c"],
        "completion": ["u", "v"],
    }


def test_a_function_gets_what_it_names():
    def pick(completions, answer, unknown=3):
        assert unknown == 3
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert grade(pick, ["a", "b"], {"answer": ["a", "a"], "task": ["m", "c"]})[:, 0].tolist() == [1, 0]


def test_conversational_inputs_arrive_as_messages():
    completions = [[{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]]
    prompts = [[{"role": "user", "content": "?"}]] * 2

    def check(prompts, completions, **_):
        assert prompts[0][0]["role"] == "user"
        return [float(completion[0]["content"] == "yes") for completion in completions]

    rewards = load_rewards([check, "exact_match"])(prompts, completions, [[1], [2]], {"answer": ["yes", "yes"]})
    assert rewards.tolist() == [[1, 1], [0, 0]]


def test_options_win_over_columns():
    partial = functools.partial(functions.target_length, target=1)
    assert grade(partial, ["abc"], {"target": [9]})[:, 0].tolist() == [-2.0]


# --- how functions are named ------------------------------------------------------------------------------------------


def test_names_of_every_kind(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
        "class Judge:\n    def __call__(self, completions, **kwargs):\n        return [1.0 for c in completions]\n"
        "judge = Judge()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    specs = [
        "exact_match",
        length,
        [f"{tmp_path}/my_rewards.py:short", ["my_rewards:judge"]],
        "my_rewards.short",
        functools.partial(functions.soft_overlong, max_length=4, cache=2),
        "soft_overlong(max_length=2, cache=1)",
    ]
    rewards = load_rewards(specs)
    assert rewards.names == ("exact_match", "length", "short", "Judge", "short_2", "soft_overlong", "soft_overlong_2")
    values = rewards(["p"], ["abc"], [[1, 2, 3]], {"answer": ["abc"]})
    assert values.tolist() == [[1.0, 3.0, -3.0, 1.0, -3.0, -0.5, -1.0]]


def test_names_stay_unique():
    def a(completions, **_):
        return [0.0]

    def a_2(completions, **_):
        return [0.0]

    assert Rewards([a_2, a, a]).names == ("a_2", "a", "a_3")


def test_a_single_name_is_a_list_of_one():
    assert load_rewards("exact_match").names == load_rewards(functions.exact_match).names == ("exact_match",)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_matsh", "rewards.functions: unknown name 'exact_matsh'; known are "),
        ("exact_matsh", "the closest is exact_match"),
        ("math:pi", "rewards.functions: math:pi is 3.14159"),
        (
            "soft_overlong(max_length=2, cach=1)",
            "soft_overlong has no option 'cach'; it takes max_length, cache",
        ),
        ("target_length(columns=2)", "target_length has no option 'columns'; it takes target"),
        ("soft_overlong(2, 1)", "cannot read the options of 'soft_overlong(2, 1)'"),
        ("soft_overlong(max_length=x)", "cannot read the options"),
        ("soft_overlong(max_length=2", "unknown name"),
        (7, "a reward is a function or a name, not 7"),
    ],
)
def test_wrong_specifications(spec, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_rewards([spec])


def test_weights():
    assert load_rewards([length, length]).weights.tolist() == [1, 1]
    assert load_rewards([length, length], ()).weights.tolist() == [1, 1]
    weights = load_rewards([length, length], [0.5, 2]).weights
    assert weights.dtype == np.float32
    assert weights.tolist() == [0.5, 2]
    for wrong in (1.0, ["high"], [None]):
        with pytest.raises(RewardError, match=r"rewards.weights is .*; it is one number for each function"):
            load_rewards("exact_match", wrong)
    with pytest.raises(RewardError, match=re.escape("rewards.weights has 1 number for 2 functions (length, length_2)")):
        load_rewards([length, length], [1.0])
    with pytest.raises(RewardError, match="every weight is a finite number"):
        load_rewards([length], [math.nan])
    with pytest.raises(RewardError, match="there is no reward function"):
        load_rewards([])
    with pytest.raises(RewardError, match=r"rewards.timeout is 0"):
        load_rewards(length, timeout=0)


# --- failures ---------------------------------------------------------------------------------------------------------


def divide(completions, answer, **_):
    return [1 / number for number in answer]


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_errors_name_function_row_and_cause(timeout):
    with pytest.raises(RewardError) as caught:
        grade(["exact_match", divide], ["a", "b", "c"], {"answer": [1, 2, 0]}, timeout)
    text = str(caught.value)
    place = rf"\({re.escape(divide.__code__.co_filename)}:{divide.__code__.co_firstlineno + 1}\)"
    assert re.search(rf"reward 'divide' raised ZeroDivisionError: division by zero {place}, on row 2 \(", text)
    assert "'prompts': 'p2'" in text
    assert "'answer': 0" in text
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    frames = []
    trace = cause.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "divide" in frames


def test_a_failure_of_the_batch_names_all_rows():
    def whole_batch_only(completions, **_):
        if len(completions) > 1:
            raise KeyError("batch")
        return [0.0]

    with pytest.raises(RewardError, match=r"raised KeyError: 'batch' \(.*py:\d+\), called with rows 0 to 2"):
        grade(whole_batch_only, list("abc"))


def leave(completions, **_):
    sys.exit(0)


def interrupt(completions, **_):
    raise KeyboardInterrupt


async def leave_async(completions, **_):
    sys.exit(0)


async def cancel(completions, **_):
    raise asyncio.CancelledError


async def leave_in_a_task(completions, **_):
    await asyncio.gather(leave_async(completions))


def recurse(completions, **_):
    def again():  # Python 3.13.0 counts no depth of a function with `**`, which would take all memory
        return again()

    return again()


class Leaver:
    name = "leave_by_row"

    def grade(self, sample):
        sys.exit(1)


class AsyncLeaver:
    name = "leave_by_row"

    async def grade(self, sample):
        sys.exit(1)


@pytest.mark.parametrize(
    ("reward", "name", "said"),
    [
        (leave, "leave", r"LeftError: it called sys.exit\(0\)"),
        (interrupt, "interrupt", r"LeftError: it raised KeyboardInterrupt"),
        (leave_async, "leave_async", r"LeftError: it called sys.exit\(0\)"),
        (cancel, "cancel", r"LeftError: it raised CancelledError"),
        (leave_in_a_task, "leave_in_a_task", r"LeftError: it called sys.exit\(0\)"),
        (recurse, "recurse", "RecursionError"),
        (Leaver(), "leave_by_row", r"LeftError: it called sys.exit\(1\)"),
        (AsyncLeaver(), "leave_by_row", r"LeftError: it called sys.exit\(1\)"),
        (CombinedGrader([leave_async, leave]), "combined", r"LeftError: it called sys.exit\(0\)"),
    ],
)
@pytest.mark.parametrize("timeout", [None, 20.0])
def test_a_reward_that_leaves_is_an_error_with_its_name(reward, name, said, timeout):
    with pytest.raises(RewardError, match=f"reward {name!r} raised {said}"):
        grade(reward, ["a"], timeout=timeout)


@pytest.mark.parametrize("method", ["setup", "close"])
@pytest.mark.parametrize("is_async", [False, True])
def test_setup_and_close_that_leave(method, is_async):
    class Grader:
        def grade(self, sample):
            return 0.0

    async def leaves_async(self):
        sys.exit(0)

    setattr(Grader, method, leaves_async if is_async else lambda self: sys.exit(0))
    rewards = load_rewards(Grader())
    if method == "close":
        rewards.setup()
    with pytest.raises(RewardError, match=rf"{method}\(\) of reward 'Grader' raised LeftError"):
        getattr(rewards, method)()


@pytest.mark.parametrize("combined", [False, True])
def test_what_was_set_up_is_closed_where_others_raise(combined):
    closed = []

    class Grader:
        def __init__(self, name, fails=()):
            self.__name__, self.fails = name, fails

        def setup(self):
            assert "setup" not in self.fails

        def close(self):
            closed.append(self.__name__)
            assert "close" not in self.fails

        def __call__(self, completions, **_):
            return [0.0] * len(completions)

    graders = [Grader("a", ("close",)), Grader("b"), Grader("c", () if combined else ("setup",))]
    rewards = load_rewards(CombinedGrader(graders) if combined else graders)
    with pytest.raises(RewardError, match=r"setup\(\) of reward 'c'") if not combined else contextlib.nullcontext():
        rewards.setup()
    with pytest.raises(RewardError, match=r"close\(\) of reward"):
        rewards.close()
    assert closed == ["a", "b", "c"][: 3 if combined else 2]
    rewards.close()
    assert len(closed) == (3 if combined else 2) and rewards.loop._loop is None


def test_ctrl_c_in_a_reward_stops_the_run():
    def pressed(completions, **_):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)

    for function in (pressed, lambda completions, **_: asyncio.run(asyncio.to_thread(pressed, completions))):
        with pytest.raises(KeyboardInterrupt):
            load_rewards(function, on_error="none")(["p"], ["a"], [[1]], {})


def test_arguments_are_copies_at_every_depth():
    def spoils(prompts, completions, completion_ids, tags, **_):
        prompts[0][0]["content"] = completions[0] = "spoiled"
        completion_ids[0].clear()
        tags[0]["deep"].append(3)
        return [0.0]

    class SpoilingGrader:
        def grade(self, sample):
            sample.columns["tags"]["deep"].clear()
            return 0.0

    seen = []
    tags = [{"deep": [1, 2]}]

    def sees(**columns):
        seen.append(copy.deepcopy(columns))
        return [0.0]

    prompt = [{"role": "user", "content": "a"}]
    load_rewards([spoils, SpoilingGrader(), sees])([prompt], ["b"], [[1, 2]], {"tags": tags})
    assert seen[0]["prompts"] == [[{"role": "user", "content": "a"}]] and seen[0]["completion_ids"] == [[1, 2]]
    assert seen[0]["completions"] == ["b"] and seen[0]["tags"] == tags == [{"deep": [1, 2]}]


@pytest.mark.parametrize(
    "results", [{1.0, 2.0}, frozenset((1.0, 2.0)), {1.0: 1, 2.0: 2}.keys(), iter([1.0, 2.0]), b"ab"]
)
def test_results_without_an_order_are_refused(results):
    with pytest.raises(RewardError, match=r"reward 'grade' returned .*; it returns a list of 2 numbers"):
        grade_results(results)


def grade_results(results):
    def grade(completions, **_):
        return results

    return load_rewards(grade)(["p"] * 2, ["a", "b"], [[1]] * 2, {})


@pytest.mark.parametrize(
    "name", ["int", "float", "dict", "len", "print", "exit", "open", "object", "sorted", "Exception"]
)
def test_functions_that_are_no_rewards(name):
    with pytest.raises(RewardError, match=name):
        load_rewards(f"builtins:{name}")(["p"], ["a"], [[1]], {})


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([1.0], "returned 1 result for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 results for 2 completions"),
        (1.0, "returned 1.0; it returns a list of 2 numbers"),
        (None, "returned None; it returns a list"),
        ("ab", "returned 'ab'; it returns a list"),
        ({"a": 1, "b": 2}, "it returns a list of 2 numbers"),
        (np.float32(1.0), "it returns a list of 2 numbers"),
        (np.zeros((2, 1)), "for row 0; return a finite number, or None"),
        ([10**5000, 1.0], "returned a value of int for row 0; return a finite number, or None"),
        ([math.inf, 1.0], "returned inf for row 0; return a finite number, or None where the function does not apply"),
        ([1.0, -1e39], "returned -1e+39 for row 1"),
        ([1.0, 10**400], "for row 1"),
        (["1.0", 1.0], "returned '1.0' for row 0"),
        ([[1.0], 1.0], "returned [1.0] for row 0"),
        ([1j, 1.0], "returned 1j for row 0"),
    ],
)
def test_wrong_results_name_function_and_row(results, message):
    def bad(completions, **_):
        return results

    with pytest.raises(RewardError, match=re.escape("reward 'bad' ") + ".*" + re.escape(message)):
        grade(bad, ["a", "b"])


@pytest.mark.parametrize("error", [ValueError("half way"), SystemExit(0)])
def test_results_that_raise_when_they_are_read(error):
    """They are the function's, as what it raises itself, and a SystemExit would end the run with code 0."""

    class Lazy(list):
        def __iter__(self):
            yield 1.0
            raise error

    with pytest.raises(RewardError, match=r"reward 'grade' returned a Lazy, which raised"):
        grade_results(Lazy([1.0, 2.0]))


def test_results_that_are_fewer_than_they_say():
    class Short(list):
        def __len__(self):
            return 2

    with pytest.raises(RewardError, match="returned 1 result for 2 completions"):
        grade_results(Short([1.0]))


def test_a_generator_is_refused():
    def lazy(completions, **_):
        yield 1.0

    with pytest.raises(RewardError, match="reward 'lazy' returned <generator"):
        grade(lazy, ["a"])


def test_a_missing_column_is_named_with_the_closest():
    def needs(completions, answered, **_):
        return [0.0]

    message = "reward 'needs' needs 'answered', which is neither a column nor set as an option; there are prompts, "
    with pytest.raises(RewardError, match=message + "completions, completion_ids, answer, task; the closest is answer"):
        grade(needs, ["a"], {"answer": ["1"], "task": ["m"]})
    with pytest.raises(RewardError, match="reward 'soft_overlong' needs 'max_length'"):
        grade("soft_overlong", ["a"])
    for columns, words in (
        ({"task": ["m"]}, "task; rewards.functions has it unless others are named: name yours$"),
        ({"environment_reward": [1.0]}, "name yours, or environment for what its steps earn$"),
        ({"chosen": ["a"], "rejected": ["b"]}, r"name yours, or measure .* by the loss alone \(eval.measure=loss\)$"),
    ):
        with pytest.raises(RewardError, match=f"reward 'exact_match' needs 'answer', .*{words}"):
            grade("exact_match", ["a"], columns)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numeric_answer(tolerance=-1)", "numeric_answer: tolerance is -1"),
        ("cosine_scaled(max_length='x')", "the options of the reward 'cosine_scaled': TypeError"),
        ("regex_match(pattern='(')", r"regex_match: '\(' is no regular expression"),
        ("soft_overlong(max_length=4, cache=10)", "cache is 10; it is from 0 to max_length"),
        ("cosine_scaled(max_length=0)", "cosine_scaled: max_length is 0"),
        ("code_tests(seconds=0)", "seconds"),
    ],
)
def test_options_are_checked_before_there_are_rows(name, message):
    with pytest.raises(RewardError, match=message):
        load_rewards(name)


def test_arguments_by_position_alone_are_refused():
    def positional(completions, /):
        return [1.0]

    with pytest.raises(RewardError, match="reward 'positional' takes 'completions' by its position alone"):
        load_rewards(positional).check_columns([])


def test_a_function_that_sees_no_rows_is_refused():
    def blind(trainer_state):
        return [1.0]

    with pytest.raises(RewardError, match=r"reward 'blind' takes no column, and neither .*: give it the argument "):
        grade(blind, ["a"])


@pytest.mark.parametrize("name", ["exact_match", "boxed_accuracy", "gsm8k_accuracy", "numeric_answer", "math_accuracy"])
@pytest.mark.parametrize("column", ["answer", "ground_truth"])
def test_answers_that_are_lists_are_refused(name, column):
    """No completion would be equal to one; functions of the user's own may read them."""
    if (name, column) != ("exact_match", "ground_truth"):
        with pytest.raises(RewardError, match=f"reward '{name}' compares .* of row 1 is \\['5', 'five'\\]: make it"):
            grade(name, ["5", "5"], {column: ["5", ["5", "five"]]})

    def own(completions, answer):
        return [float(text in wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert grade(own, ["5"], {"answer": [["5", "five"]]}).tolist() == [[1.0]]


@pytest.mark.parametrize("name", ["exact_match", "boxed_accuracy", "gsm8k_accuracy", "numeric_answer"])
def test_empty_fields_of_a_table_are_no_answers(name):
    completions, answers = ["nan", r"\boxed{nan}", "#### 5"], [float("nan"), np.float32("nan"), None]
    assert np.isnan(load_rewards(name)(["p"] * 3, completions, [[1]] * 3, {"answer": answers})).all()
    assert load_rewards(name)(["p"], ["9" * 300], [[1]], {"answer": [10**400]}).tolist() == [[0.0]]
    assert np.isnan(load_rewards("code_tests")(["p"], ["x"], [[1]], {"tests": [float("nan")]})).all()


def test_right_answers_in_columns_of_other_libraries():
    """As `solution` of TRL's accuracy_reward; `answer` goes before them, and functions of the user's own are strict."""

    def own(completions, answer, **_):
        return [1.0] * len(completions)

    texts, wrong = [r"\boxed{5}"] * 2, ["6", "6"]
    for columns in ({"solution": [r"so $\boxed{5}$", "6"]}, {"ground_truth": ["5", "6"], "solution": wrong}):
        assert grade("boxed_accuracy", texts, columns)[:, 0].tolist() == [1.0, 0.0]
    assert grade("boxed_accuracy", texts, {"solution": wrong, "answer": ["5", "5"]})[:, 0].tolist() == [1.0, 1.0]
    for function, name in ((own, "own"), ("exact_match", "exact_match")):
        with pytest.raises(RewardError, match=f"reward '{name}' needs 'answer'"):
            grade(function, texts, {"solution": wrong})


def test_inputs_that_do_not_fit():
    with pytest.raises(RewardError, match="answer has 1 value for 2 prompts"):
        grade(length, ["a", "b"], {"answer": [1]})
    with pytest.raises(RewardError, match="a column named 'completions', which rewards use themselves; rename it"):
        grade(length, ["a"], {"completions": ["x"]})


# --- time limits and async --------------------------------------------------------------------------------------------


def test_a_function_that_hangs_stops_at_the_limit():
    release = threading.Event()

    def hang(completions, **_):
        release.wait(60)
        return [0.0]

    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward 'hang' took more than rewards.timeout=0.2 seconds"):
        grade([length, hang], ["a"], timeout=0.2)
    assert time.monotonic() - started < 10
    release.set()


def test_a_hung_function_does_not_block_exit(run_python):
    code = (
        "import time\n"
        "from jaxrl_llm.rewards.runner import load_rewards\n"
        "def hang(completions, **_): time.sleep(600)\n"
        "load_rewards(hang, timeout=0.2)(['p'], ['a'], [[1]], {})\n"
    )
    result = run_python("-c", code, timeout=60)
    assert result.returncode == 1
    assert "reward 'hang' took more than" in result.stderr


@pytest.mark.slow
def test_a_hung_grader_of_several_does_not_block_exit(run_python):
    code = (
        "import time\n"
        "from jaxrl_llm.rewards.combined import CombinedGrader\n"
        "from jaxrl_llm.rewards.runner import load_rewards\n"
        "def hang(completions, **_): time.sleep(600)\n"
        "class Hang:\n"
        "    def grade(self, sample): time.sleep(1)\n"
        "rewards = load_rewards(CombinedGrader([hang, Hang()]), timeout=0.2, on_timeout=0)\n"
        "assert rewards(['p'], ['a'], [[1]], {}).tolist() == [[0.0]]\n"
        "time.sleep(1.2)\n"
    )
    result = run_python("-c", code, timeout=60)
    assert result.returncode == 0 and "Traceback" not in result.stderr


def test_no_limit_means_the_callers_thread():
    """Some graders use signals, which work in the main thread only."""
    threads = []

    def where(completions, **_):
        threads.append(threading.current_thread())
        return [0.0]

    grade(where, ["a"])
    grade(where, ["a"], timeout=5.0)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def meeting():
    """Two async functions that only end when both are running."""
    arrived = []

    def make(name, value):
        async def meet(completions, **_):
            arrived.append(name)
            while len(arrived) < 2:
                await asyncio.sleep(0.001)
            return [value] * len(completions)

        return meet

    return [make("first", 1.0), make("second", 2.0)]


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_async_functions_run_at_the_same_time(timeout):
    first, second = meeting()
    assert grade([first, length, second], ["ab", "c"], timeout=timeout).tolist() == [[1, 2, 2], [1, 1, 2]]


def test_async_rewards_in_a_running_event_loop():
    async def cell():
        return grade(meeting(), ["ab"])

    assert asyncio.run(cell()).tolist() == [[1, 2]]


def test_an_async_object_and_its_failures():
    class Judge:
        async def __call__(self, completions, answer, **_):
            await asyncio.sleep(0)
            return [1 / number for number in answer]

    assert grade(Judge(), ["a", "b"], {"answer": [4, 2]})[:, 0].tolist() == [0.25, 0.5]
    with pytest.raises(RewardError, match=r"reward 'Judge' raised ZeroDivisionError: .*, on row 1 ") as caught:
        grade([length, Judge()], ["a", "b"], {"answer": [1, 0]})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_async_time_limit_names_those_that_are_late():
    async def late(completions, **_):
        await asyncio.sleep(60)

    async def quick(completions, **_):
        return [1.0]

    async def blocking(completions, **_):
        time.sleep(3)

    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward 'late' took more than rewards.timeout=0.2 seconds"):
        grade([quick, late], ["a"], timeout=0.2)
    with pytest.raises(RewardError, match="reward 'blocking' took more than"):
        grade([blocking], ["a"], timeout=0.2)
    assert time.monotonic() - started < 10
