"""What users' functions do to leave, and what comes from outside."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import traceback
import weakref

import pytest

from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.config.http_client import HttpClient, RequestError
from jaxrl_llm.config.resolve import ConfigError, import_file
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.user_code import PACKAGE, LeftError, contained, error_text, is_own_exit, without_locals


def raised_in(function):
    with contained():
        return function()


def leave(error):
    raise error


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), BaseException("own")])
def test_leaving_is_an_error_that_names_the_function(error):
    with pytest.raises(LeftError, match=r"in leave \(.*test_user_code.py:\d+\)"):
        raised_in(lambda: leave(error))


def test_errors_results_and_ctrl_c_pass():
    assert raised_in(lambda: 3) == 3
    with pytest.raises(KeyError):
        raised_in(lambda: {}["a"])
    with pytest.raises(KeyboardInterrupt):
        raised_in(lambda: signal.raise_signal(signal.SIGINT))
    outcome = []

    def in_a_thread():
        try:
            raised_in(lambda: leave(KeyboardInterrupt()))
        except LeftError as error:
            outcome.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert len(outcome) == 1


def test_a_cancellation_from_outside_passes():
    async def waits():
        with contained():
            await asyncio.sleep(60)

    async def cancels():
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancels())


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ("pass", 1, ""),
        ("os.execvp('no-program', ['x'])", 1, "FileNotFoundError"),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "sys.exit('why')"),
    ],
)
def test_a_process_that_a_function_forks_is_no_second_run(ends, code, words):
    source = f"""
import os
from jaxrl_llm.config.user_code import contained
with contained():
    if not (child := os.fork()):
        {ends}
print("goes on", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == (f"goes on {code}\n", 0)
    assert words in done.stderr and bool(done.stderr) == bool(words)


def test_os_exit_of_atexit_ends_the_process():
    code = "import atexit, os\nfrom jaxrl_llm.config.user_code import contained\nwith contained(): pass\n"
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}atexit.register(os._exit, 5)"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (5, "")


def test_files_that_leave_when_they_are_read(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"leaves.py:2: LeftError: it called sys.exit\(0\)"):
        import_file(tmp_path / "leaves.py")
    (tmp_path / "config.py").write_text("import sys\ndef get_config():\n    sys.exit()\n")
    with pytest.raises(ConfigError, match=r"config.py:3: LeftError: it called sys.exit\(None\)"):
        load_config_file(str(tmp_path / "config.py"))


def test_a_command_never_ends_well_by_an_exit_of_somebody_else(tmp_path):
    code = "import sys\nfrom jaxrl_llm.config.flags import run\ndef leaves(_): sys.exit(0)\nrun(leaves)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1 and "error: sys.exit(0) was called in leaves (<string>:3)" in ended.stderr


@pytest.mark.parametrize("size", [5, 10**6])  # what waits to be written, and what does not fit into a pipe
def test_a_command_whose_reader_has_gone_ends_without_a_word(size, tmp_path):
    code = f"import sys\nfrom jaxrl_llm.config.flags import run\nrun(lambda _: print('x' * {size}))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 141 and not list(tmp_path.iterdir())


def test_a_broken_pipe_of_the_users_is_an_error(tmp_path):
    code = "from jaxrl_llm.config.flags import run\ndef fails(_): raise BrokenPipeError('mine')\nrun(fails)"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1 and "error: BrokenPipeError: mine" in ended.stderr


LEFT = """
import atexit, concurrent.futures, multiprocessing, sys, threading, time
from jaxrl_llm.config import ConfigError, background
from jaxrl_llm.config.flags import run

background.END_SECONDS = 0.5

def main(argv):
    fork, wait = multiprocessing.get_context("fork"), (time.sleep, 60)
    if argv[0] == "thread":
        threading.Thread(target=time.sleep, args=[60], name="mine").start()
    elif argv[0] == "pools":
        concurrent.futures.ThreadPoolExecutor(2, "mine").submit(*wait)
        concurrent.futures.ProcessPoolExecutor(1, fork).submit(*wait)
        raise ConfigError("a failure")
    elif argv[0] == "nothing":
        concurrent.futures.ThreadPoolExecutor(2).submit(time.sleep, 0).result()
        atexit.register(lambda: (time.sleep(1), print("last")))

run(main)
"""


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("thread", 0, ["there still runs what your code has started: mine. It is left behind"]),
        ("pools", 2, ["error: a failure", "mine_0", "ForkProcess-1"]),
        ("nothing", 0, []),
    ],
)
def test_a_command_ends_though_threads_or_processes_of_users_do_not(what, code, words):
    command = [sys.executable, "-c", LEFT, what]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == code and all(x in ended.stderr for x in words), ended.stderr
    assert (ended.stdout, bool(ended.stderr)) == ("last\n" if what == "nothing" else "", what != "nothing")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abfs://data@acct.dfs.core.windows.net/m", "abfs://data@acct.dfs.core.windows.net/m"),
        ("hdfs://hadoop:word@nn:8020/m sftp://me@host/m", "hdfs://***@nn:8020/m sftp://me@host/m"),
        ("judge(url='http://me:hunter2@host/v1')", "judge(url='http://***@host/v1')"),
        ("https://token@host?a=1&api_key=sk-1&b=2#c", "https://***@host?a=1&api_key=***&b=2#c"),
        ("https://host/v1?key=AIza 'x'", "https://host/v1?key=*** 'x'"),
        ("https://host/?access_token=1;Signature=2", "https://host/?access_token=***;Signature=***"),
        ("https://host/a@b?monkeys=3", "https://host/a@b?monkeys=***"),
        ("me@host.org and a?key=b", "me@host.org and a?key=b"),
    ],
)
def test_masked(text, shown):
    assert masked(text) == shown
    assert masked({"a": (text, [text], 3)}) == {"a": (shown, [shown], 3)}
    assert str(ConfigError(f"{text}!")) == f"{shown}!".replace("***!", "***")


def test_a_closed_client_refuses_requests():
    client = HttpClient(1)
    with pytest.raises(RequestError, match="Connection refused"):
        client.post("http://127.0.0.1:9/", b"", {}, 5.0, 10)
    client.close()


@pytest.mark.parametrize(
    ("package", "own"), [("jaxrl_llm", True), ("jaxrl_llm.config", True), ("", False), (None, False)]
)
def test_an_exit_of_this_package_also_when_its_module_runs_as_a_command(package, own):
    """`python -m jaxrl_llm.train` is the module __main__ of the package jaxrl_llm; a user's file is in none."""
    with pytest.raises(SystemExit) as caught:
        exec("raise SystemExit(143)", {"__name__": "__main__", "__package__": package})
    raised = caught.value
    raised.__traceback__ = raised.__traceback__.tb_next
    assert is_own_exit(raised) == own


def test_errors_name_the_line_of_the_user(tmp_path):
    """Also one that a library raises for it; those of this package alone, of a user's exit and of no code have none."""

    def described_error(function):
        try:
            with contained():
                function()
        except Exception as error:
            return error_text(error)

    file = tmp_path / "mine.py"
    file.write_text("import json\n\ndef reads():\n    json.loads('')\n\ndef leaves():\n    raise SystemExit(3)\n")
    mine = import_file(file)
    assert described_error(mine.reads) == f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}:4)"
    assert described_error(mine.leaves) == f"LeftError: it called sys.exit(3), in leaves ({file}:7)"
    file = tmp_path / "ends.py"
    file.write_text(
        "import os\n\ndef ends():\n    os._exit(0)\n\ndef forks():\n    if (child := os.fork()) == 0:\n"
        "        os._exit(7)\n    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n\n"
        "def runs():\n    os.execlp('true', 'true')\n"
    )
    ends = import_file(file)
    assert described_error(ends.ends) == f"LeftError: it called os._exit(0), in ends ({file}:4)"
    said = r"LeftError: it called os.execv\(b'.*/true'\), in runs "
    assert re.fullmatch(said + re.escape(f"({file}:12)"), described_error(ends.runs))
    with contained():
        assert ends.forks() == 7
    assert error_text(ValueError("never raised")) == "ValueError: never raised"
    long = error_text(ValueError("a" + 10**7 * "b" + "c"))
    assert len(long) < 5000 and long.startswith("ValueError: ab") and long.endswith("bc")
    with pytest.raises(ConfigError) as caught:
        import_file(tmp_path / "none.py")
    inside = caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this file
    assert error_text(inside) == f"ConfigError: {inside}"


def test_errors_hold_the_variables_of_users_functions_alone():
    """Those of the package, in which the arrays of a run are, go; also where another error came from the first."""
    made = []

    def memory():
        made.append(weakref.ref(held := set()))
        return held

    def callback(number):
        raise ZeroDivisionError

    code = """
def step(function):
    held = memory()
    function(1)

@without_locals
def train(function):
    held = memory()
    try:
        step(function)
    except ZeroDivisionError as error:
        raise ValueError from error
"""
    scope = {"memory": memory, "without_locals": without_locals}
    exec(compile(code, str(PACKAGE / "train.py"), "exec"), scope)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        scope["train"](callback)
    assert len(made) == 2 and not any(held() for held in made)
    frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(caught.value.__cause__.__traceback__)}
    assert frames["callback"].f_locals == {"number": 1} and not frames["step"].f_locals


def test_warnings_of_a_command_are_lines():
    """Of this package, of others (with their place) and of loggers, which a user may set up."""
    code = """
import logging, warnings
from jaxrl_llm.config.flags import run
from jaxrl_llm.rewards.runner import Rewards
from jaxrl_llm.rewards import runner

def main(_):
    exec(compile("import warnings\\nwarnings.warn('nan')", runner.__file__, "exec"), {})
    warnings.warn("old", DeprecationWarning)
    logging.getLogger("jaxrl_llm.data").warning("%d rows", 3)
    logging.basicConfig(format="mine: %(message)s")
    logging.getLogger("jaxrl_llm.data").warning("4 rows")

warnings.simplefilter("always")
run(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0 and ended.stderr.splitlines() == [
        "warning: nan",
        "warning: old (DeprecationWarning, <string>:9)",
        "warning: 3 rows",
        "mine: 4 rows",
    ]
