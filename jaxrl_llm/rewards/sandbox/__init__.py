"""Execution of untrusted Python programs: in a process of their own, with limits, without network or secrets.

On Linux the program runs as its own user and in its own network, process, IPC and mount namespaces where the kernel
allows it: it sees the interpreter and a folder in memory. It may write in that folder and read the interpreter
(Landlock), and is refused the system calls that reach beyond them (seccomp); it has limits of memory, processor time,
file size, processes and open files, and is killed with all its descendants when it ends or its time is up. Where
bubblewrap is installed, all this stands in a sandbox of its making. These isolation layers are called walls; `walls()`
lists those that this machine offers. It is no virtual machine: a hole in the kernel is a way out, the limits of memory
hold for each process, and the interpreter's own folders can be read.

`run_tests` runs a program and its tests in two such processes (exchange.py): what a program does to its interpreter
does not reach the tests.
"""

import ast
import errno
import functools
import marshal
import math
import os
import py_compile
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.config.background import TimeUpError
from jaxrl_llm.rewards.sandbox.jail import DEVICES
from jaxrl_llm.rewards.signatures import RewardError

JAIL, GUARD, EXCHANGE = (Path(__file__).with_name(name) for name in ("jail.py", "guard.py", "exchange.py"))
# Beyond the interpreter's own folders: libraries, and what the dynamic linker and time zones read.
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
LINKERS = [str(path.resolve()) for pattern in ("lib*/ld-*", "lib/*/ld-*") for path in Path("/").glob(pattern)]
# bubblewrap's namespaces: of the network, messages, processes and host names, and nothing of its own outlives ours.
SEPARATE = ("--unshare-net", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--die-with-parent")
# As -I, but with the seed of hashes, by which sets are ordered: the same program gets the same reward.
ISOLATED, HASHES = (sys.executable, "-s", "-P"), {"PYTHONHASHSEED": "0"}
PATIENCE = 10.0  # seconds that the supervisor has beyond the program's time
BUSY = tuple(map(os.strerror, (errno.EAGAIN, errno.ENOMEM)))  # what fork says where processes or memory are used up
PAUSE = 1.0  # seconds until the second try there


class SandboxError(RewardError):
    """The sandbox itself failed, not the program in it."""


@dataclass(frozen=True)
class Limits:
    """The resources of a program: wall-clock seconds, MB of address space a process, processes, MB of each file.

    Processor time is limited to the wall-clock seconds. Output beyond `output_kb` is dropped. `folder_mb` bounds all
    files together where the folder is in memory (the wall "files namespace"). At `deadline`, by time.monotonic(), the
    program is ended too, and has no result: TimeUpError is raised.

    Raises RewardError: a limit that is not above 0, or a fraction of anything but seconds.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 256
    folder_mb: int = 64
    deadline: float = math.inf

    def __post_init__(self):
        for name, value in vars(self).items():
            if not (value > 0 and (math.isfinite(value) or name == "deadline")):
                raise RewardError(f"a program's limit {name} is a number above 0, not {value!r}")
            if name not in ("seconds", "deadline") and not isinstance(value, int):
                raise RewardError(f"a program's limit {name} is a whole number, not {value!r}")


@dataclass(frozen=True)
class Finished:
    """The end and output of a program: `ended` is "exit", "signal" or "timeout", `code` the exit code or signal.

    `passed` has the indices of the tests that passed; with tests the end is theirs.
    """

    ended: str
    code: int
    output: str
    errors: str
    walls: tuple[str, ...]
    passed: frozenset[int] = frozenset()

    @property
    def succeeded(self) -> bool:
        """True when it ended by itself with exit code 0."""
        return self.ended == "exit" and self.code == 0


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Finished:
    """Run a Python program; returns its end and its output.

    Its folder, its environment and its home are empty; the packages of this Python environment can be imported.
    Raises SandboxError when it cannot be run.
    """
    return _run(source, stdin.encode("utf-8", "replace"), limits or Limits(), with_tests=False)


def run_tests(source: str, job: dict[str, Any], limits: Limits | None = None) -> Finished:
    """Run a Python program and, in another process, the tests of a job (`exchange.run_tests`) that call it.

    The program gets what tests call it with, and answers with data; the tests hold what they expect.
    Raises SandboxError when they cannot be run.
    """
    return _run(source, marshal.dumps(job), limits or Limits(), with_tests=True)


def _run(source: str, stdin: bytes, limits: Limits, with_tests: bool) -> Finished:
    """The end of a program, which has a second try where the machine was too busy to start it."""
    try:
        return _run_once(source, stdin, limits, with_tests)
    except SandboxError as error:
        if not any(words in str(error) for words in BUSY):
            raise
    time.sleep(PAUSE)
    return _run_once(source, stdin, limits, with_tests)


def _run_once(source: str, stdin: bytes, limits: Limits, with_tests: bool) -> Finished:
    if time.monotonic() >= limits.deadline:
        raise TimeUpError
    outer = Path(tempfile.mkdtemp(prefix="sandbox-"))
    try:
        outer.chmod(0o711)  # the program's user is another one than this process's when that is root
        (outer / "root").mkdir()
        (folder := outer / "work").mkdir()
        folder.chmod(0o777)
        (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
        # Files without a name: no program can replace or reach them.
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
            tempfile.TemporaryFile() as status,
        ):
            given.write(stdin)
            given.seek(0)
            settings = _settings(outer, limits, status.fileno(), with_tests)
            command = [*ISOLATED, "-S", _compiled(JAIL), marshal.dumps(settings).hex()]
            if bubblewrap():
                command = [*_bubblewrap(settings), *command]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=output,
                    stderr=errors,
                    pass_fds=[status.fileno()],
                    cwd=folder,
                    env=HASHES,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"the sandbox failed ({error})") from error
            killer = threading.Timer(limits.seconds + PATIENCE, _kill, [process])
            killer.daemon = True
            killer.start()
            process.wait()
            killer.cancel()
            _kill(process)
            if time.monotonic() >= limits.deadline:
                raise TimeUpError
            most = limits.output_kb * 1024
            texts = [os.pread(file.fileno(), most, 0).decode("utf-8", "replace") for file in (output, errors)]
            report = os.pread(status.fileno(), os.fstat(status.fileno()).st_size, 0)
            return _finished(report, texts, process.returncode)
    finally:
        # Some file systems take milliseconds for a folder, and a program makes thousands where its folder is on a disk.
        cleaner = threading.Thread(target=_remove, args=(outer,))
        cleaner.start()
        cleaner.join(PATIENCE / 5)


@functools.cache
def walls() -> tuple[str, ...]:
    """The isolation layers of this machine.

    Of "bubblewrap", "limits", "user" (not root), "network namespace", "processes namespace", "files namespace" (nothing
    but the interpreter and the folder is there), "process count", "files" (Landlock) and "system calls" (seccomp).
    Without the last, or without any that keeps files away, an audit hook inside Python stands in for them.
    """
    return run_program("pass").walls


def missing_walls() -> tuple[str, ...]:
    """The dangers that only the audit hook keeps off here, among "network", "files", "processes", "system calls".

    "processes" are those of the same user, which a process namespace hides; "system calls" those of `jail.REFUSED`.
    """
    up = set(walls())
    keepers = {
        "network": {"network namespace", "system calls", "bubblewrap"},
        "files": {"files", "files namespace", "bubblewrap"},
        "processes": {"processes namespace", "bubblewrap"},
        "system calls": {"system calls"},
    }
    return tuple(name for name, keeping in keepers.items() if not keeping & up)


@functools.cache
def _compiled(path: Path) -> str:
    """The path of the byte code of a file, or of the file where that cannot be written: it starts a few ms sooner."""
    try:
        return py_compile.compile(str(path), doraise=True) or str(path)
    except (OSError, py_compile.PyCompileError):
        return str(path)


@functools.cache
def bubblewrap() -> str | None:
    """The path of bubblewrap's command, None where it is not installed or this machine lets it make no sandbox."""
    path = shutil.which("bwrap")
    options = (*SEPARATE, "--ro-bind", "/", "/", "--size", "4096", "--perms", "0777", "--tmpfs", "/dev")
    trial = [path or "", *options, sys.executable, "-I", "-S", "-c", ""]
    return path if path and subprocess.run(trial, capture_output=True, check=False).returncode == 0 else None


def _bubblewrap(settings: dict[str, Any]) -> list[str]:
    """The command line before jail.py's that puts it into a sandbox of bubblewrap."""
    folder, size = settings["folder"], str(settings["folder_mb"] * 2**20)
    program = ["--ro-bind", f"{folder}/program.py", f"{folder}/program.py"]
    shown = [word for path in (*settings["read"], _compiled(JAIL)) for word in ("--ro-bind", path, path)]
    devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
    # Root's rights are left to jail.py, which gives them up: it needs them to become another user.
    rights = ["--cap-add", "ALL"] if os.getuid() == 0 else []
    files = ["--size", size, "--perms", "0777", "--tmpfs", folder, *program]
    last = ["--dir", settings["root"], "--remount-ro", "/", "--chdir", folder, "--"]
    return [bubblewrap() or "", *SEPARATE, *rights, *shown, *devices, *files, *last]


def _settings(outer: Path, limits: Limits, status: int, with_tests: bool) -> dict[str, Any]:
    exchange, folder = _compiled(EXCHANGE), str(outer / "work")
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(GUARD), exchange}
    links = {str(Path(sys.executable).resolve().parent), str(Path(sys.executable).parent)}
    return {
        "status": status,
        "bubblewrap": bubblewrap() is not None,
        "root": str(outer / "root"),
        "folder": folder,
        "command": [*ISOLATED, "-B", "program.py"],
        "exchange": exchange if with_tests else None,
        "guard": str(GUARD),
        # No program of the system but the interpreter, and the linker that loads it.
        "execute": [str(Path(sys.executable).resolve()), *LINKERS],
        "read": sorted(path for path in (*prefixes, *links, *READABLE) if Path(path).exists()),
        "environment": {
            **HASHES,
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        "seconds": max(min(limits.seconds, limits.deadline - time.monotonic()), 1e-3),
        "processor_seconds": limits.seconds,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "file_mb": limits.file_mb,
        "folder_mb": limits.folder_mb,
    }


def _kill(process: subprocess.Popen) -> None:
    """Kill the supervisor's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _finished(status: bytes, texts: list[str], code: int) -> Finished:
    """The supervisor's report. Raises SandboxError where it did not get as far as to start the program."""
    report: dict[str, Any] = {}
    passed = set()
    for line in status.splitlines():
        entry = ast.literal_eval(line.decode())
        report |= entry
        passed |= {entry["passed"]} if "passed" in entry else set()
    if "failed" in report or not report:
        cause = report.get("failed") or f"its supervisor ended with {code}: {texts[1].strip()[-300:]}"
        raise SandboxError(f"the sandbox failed ({cause})")
    ended, number = report.get("ended", ("timeout", 0))
    return Finished(ended, number, *texts, walls=tuple(report.get("walls", ())), passed=frozenset(passed))


def _remove(folder: Path) -> None:
    """Delete a folder in which a program made what it liked, such as folders of any depth and without rights."""
    waiting = [folder]
    with suppress(OSError):
        while waiting:
            each = waiting.pop()
            for entry in list(os.scandir(each)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)  # noqa: PTH108
                    continue
                # To the top, and under a short name: a path as deep as its own might be too long for the system.
                os.chmod(entry.path, 0o700)  # noqa: PTH101
                waiting.append(
                    Path(entry.path).rename(folder / secrets.token_hex(8)) if each != folder else Path(entry)
                )
            if each != folder:
                each.rmdir()
        folder.rmdir()
