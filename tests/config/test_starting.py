"""Ctrl-C while a command starts, and where Python would lose it."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from jaxrl_llm.config.starting import imports


def test_imports_are_without_collector_and_end_at_ctrl_c():
    assert gc.isenabled() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with imports():
        assert not gc.isenabled() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert gc.isenabled() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_user_does_with_ctrl_c_stays():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with imports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", [("jaxrl_llm.train",), ("jaxrl_llm", "train")])
def test_ctrl_c_ends_a_command_that_imports(root, tmp_path, command):
    """No traceback, and no run that goes on, as often where a callback of JAX had the signal."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    arguments = [sys.executable, "-X", "importtime", "-m", *command, "--config=grpo:tiny"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        assert process.stderr is not None
        assert any("jax._src" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == -signal.SIGINT and "Traceback" not in said and not [*tmp_path.iterdir()]


def test_ctrl_c_in_a_callback_of_the_collector(run_python):
    """It is not lost, and ends what the command waits for."""
    code = """
import gc, signal, time
from jaxrl_llm.config.flags import run
def main(argv):
    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(600)
    print("it went on")
run(main)
"""
    result = run_python("-c", code)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.startswith("error: stopped by Ctrl-C")
