"""Execution of untrusted Python programs: in a process of their own, with limits, without network or secrets.

On Linux the program runs as its own user and in its own network, process and IPC namespaces where the kernel allows
it, may write in its temporary folder and read the interpreter (Landlock), and is refused the system calls that reach
beyond them (seccomp); it has limits of memory, processor time, file size, processes and open files, and is killed with
all its descendants when it ends or its time is up. These isolation layers are called walls; `walls()` lists those that
this machine offers. It is no virtual machine: a hole in the kernel is a way out, the limits of memory and files hold
for each process and each file, and the interpreter's own folders can be read.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError

JAIL, GUARD = Path(__file__).with_name("jail.py"), Path(__file__).with_name("guard.py")
# Beyond the interpreter's own folders: libraries, and what the dynamic linker and time zones read.
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
PATIENCE = 10.0  # seconds that the supervisor has beyond the program's time


class SandboxError(RewardError):
    """The sandbox itself failed, not the program in it."""


@dataclass(frozen=True)
class Limits:
    """The resources of a program: wall-clock seconds, MB of address space a process, processes, MB of each file.

    Processor time is limited to the wall-clock seconds. Output beyond `output_kb` is dropped.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 256


@dataclass(frozen=True)
class Finished:
    """The end and output of a program: `ended` is "exit", "signal" or "timeout", `code` the exit code or signal."""

    ended: str
    code: int
    output: str
    errors: str
    walls: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        """True when it ended by itself with exit code 0."""
        return self.ended == "exit" and self.code == 0


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Finished:
    """Run a Python program; returns its end and its output.

    Its folder, its environment and its home are empty; the packages of this Python environment can be imported.
    Raises SandboxError when it cannot be run.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as outer:
        folder = Path(outer) / "work"
        folder.mkdir()
        (Path(outer) / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
        _open_to_all(Path(outer), folder)
        reader, writer = os.pipe()
        try:
            settings = json.dumps(_settings(folder, limits, writer))
            with (
                (Path(outer) / "stdin").open("rb") as input_file,
                (folder / ".output").open("wb") as output,
                (folder / ".errors").open("wb") as errors,
            ):
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(JAIL), settings],
                    stdin=input_file,
                    stdout=output,
                    stderr=errors,
                    pass_fds=[writer],
                    cwd=folder,
                    env={},
                    start_new_session=True,
                )
            _wait(process, limits.seconds + PATIENCE)
            os.set_blocking(reader, False)
            walls, (ended, code) = _status(reader, process)
        finally:
            os.close(reader)
            os.close(writer)
        most = limits.output_kb * 1024
        texts = [_head(folder / name, most) for name in (".output", ".errors")]
    return Finished(ended, code, *texts, walls=tuple(walls))


@functools.cache
def walls() -> tuple[str, ...]:
    """The isolation layers of this machine.

    Of "limits", "user" (not root), "network namespace", "processes namespace", "process count", "files" (Landlock) and
    "system calls" (seccomp). Without the last two, an audit hook inside Python stands in for them.
    """
    return run_program("pass").walls


def missing_walls() -> tuple[str, ...]:
    """The resources that only the audit hook protects on this machine: of "network" and "files"."""
    up = walls()
    network = "network namespace" in up or "system calls" in up
    return (*(() if network else ("network",)), *(() if "files" in up else ("files",)))


def _settings(folder: Path, limits: Limits, status: int) -> Mapping[str, Any]:
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(GUARD)}
    links = {str(Path(sys.executable).resolve().parent), str(Path(sys.executable).parent)}
    return {
        "status": status,
        "folder": str(folder),
        "command": [sys.executable, "-I", "-B", "program.py"],
        "guard": str(GUARD),
        "read": sorted(path for path in (*prefixes, *links, *READABLE) if Path(path).exists()),
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        "seconds": limits.seconds,
        "cpu_seconds": limits.seconds,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "file_mb": limits.file_mb,
    }


def _open_to_all(outer: Path, folder: Path) -> None:
    """Give the program's user access to its folder; it is another user than this process's when that is root."""
    outer.chmod(0o711)
    folder.chmod(0o777)


def _wait(process: subprocess.Popen, seconds: float) -> None:
    """Wait for the supervisor, and kill its process group when it ends or exceeds its time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _status(reader: int, process: subprocess.Popen) -> tuple[list[str], tuple[str, int]]:
    """The walls and the end that the supervisor reports. Raises SandboxError when it reports something else."""
    try:
        lines = os.read(reader, 65536).decode().splitlines()
    except BlockingIOError:
        lines = []
    reports = [json.loads(line) for line in lines]
    failures = [report for report in reports if isinstance(report, str)]
    if failures or not reports or len(reports) > 2:
        raise SandboxError(
            f"the sandbox failed ({'; '.join(failures) or f'its supervisor ended with {process.returncode}'})"
        )
    if len(reports) == 1:
        return (
            ([], tuple(reports[0])) if reports[0][0] in ("exit", "signal", "timeout") else (reports[0], ("timeout", 0))
        )
    return reports[0], tuple(reports[1])


def _head(path: Path, size: int) -> str:
    """The first `size` bytes of a file that the program may have replaced: a link or a device is not followed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(handle, "rb") as file:
        return file.read(size).decode("utf-8", "replace")
