"""Real processes on this machine that run as one."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import OPTIMIZATION, ROOT, SEVERAL_DEVICES

STARTED: list[subprocess.Popen[str]] = []  # by the test that runs


class Ended(NamedTuple):
    """The exit code and output of a process."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(
    count: int,
    folder: Path,
    arguments: Sequence[str],
    environment: Sequence[Mapping[str, str]] | None = None,
    devices: int = 1,
) -> list[subprocess.Popen[str]]:
    """`count` processes of the same Python command line, with so many devices each; each with JAXRL_ variables, or
    those of `environment`."""
    port = free_port()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    flags = f"{OPTIMIZATION} {SEVERAL_DEVICES.format(devices) if devices > 1 else ''}"
    shared = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if devices > 1:  # as in tests/conftest.py
        shared["NPROC"] = str(2 * devices)
    processes = []
    for index in range(count):
        own = {
            "JAXRL_COORDINATOR": f"localhost:{port}",
            "JAXRL_PROCESS_COUNT": str(count),
            "JAXRL_PROCESS_INDEX": str(index),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env={**shared, **(own if environment is None else environment[index])},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    STARTED.extend(processes)
    return processes


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[Ended]:
    """The end of each process; raises TimeoutExpired, and kills all, when one still runs after `timeout` seconds."""
    try:
        # At once: a process whose output nobody reads waits when the pipe is full, and the others wait for it.
        with ThreadPoolExecutor(len(processes)) as readers:
            texts = list(readers.map(lambda process: process.communicate(timeout=timeout), processes))
    finally:
        for process in processes:
            process.kill()
    return [
        Ended(process.returncode, "".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]")), err)
        for process, (out, err) in zip(processes, texts, strict=True)
    ]


def wait_for_lines(path: Path, count: int, processes: Sequence[subprocess.Popen[str]], timeout: float = 300) -> None:
    """Returns once the file has so many lines; fails with what all have said when a process has ended before."""
    until = time.monotonic() + timeout
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        if any(process.poll() is not None for process in processes) or time.monotonic() > until:
            for process in processes:
                process.kill()
            pytest.fail(f"{path.name} has no {count} lines:\n{finish(processes, 60)}")
        time.sleep(0.01)


@pytest.fixture
def together(tmp_path) -> Callable[..., list[Ended]]:
    """Runs a Python command line in several processes: `together(2, "-m", "jaxrl_llm.train", ...)`."""

    def run(count: int, *arguments: str, environment=None, timeout: float = 300, devices: int = 1) -> list[Ended]:
        return finish(start(count, tmp_path, arguments, environment, devices), timeout)

    return run
