"""The lock on a run's folder: one run, or server of runs, at a time writes there.

`.lock` in the folder names the process that holds it, with a counter that the process raises every BEAT_SECONDS. It is
taken over at once when the process is known to be gone (it ran on this machine since that was started, as after
`kill -9`) or its last beat is older than OLD_SECONDS. Where neither is known (another machine or container, a reboot)
the counter is watched: when it stands still for WATCH_SECONDS the process counts as gone. No two clocks are compared.
"""

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.checkpoint.object_store import is_remote, path_of

LOCK = ".lock"
BEAT_SECONDS = 10.0
WATCH_SECONDS = 45.0
OLD_SECONDS = 600.0
SETTLE_SECONDS = 2.0  # in which the last of two writers of an object in a bucket shows


class RunLock:
    """A context manager that holds the lock on `folder`, which may be in an object store, for the run of this process.

    `setting` names the folder in messages, and `what` is a run there, or a server. Entering raises ConfigError when
    another one holds it, with its host, process id and start, or the folder cannot be written. Files are made
    exclusively, which also holds on network file systems; object stores have no such operation, and two runs that start
    there within SETTLE_SECONDS may both go on.
    """

    def __init__(self, folder: str | Path, setting: str = "output_dir", what: str = "run"):
        self.folder, self.setting, self.what = path_of(folder), setting, what
        self.path = self.folder / LOCK
        self._own = {**_this_process(), "id": uuid.uuid4().hex}
        self._beats = 0
        self._taker: str | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lock of the run")

    def __enter__(self) -> "RunLock":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not self._create():
                text = self._read()
                if text is not None:  # not released meanwhile
                    self._take_over(text)
        except OSError as error:
            raise ConfigError(
                f"{self.setting} {self.folder} cannot be written: {error}; make room, or set another {self.setting}"
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if _holder(self._read()).get("id") == self._own["id"]:
                self.path.unlink()

    def check(self) -> None:
        """Raises ConfigError when another run has taken the lock over, as this process showed no sign of life."""
        if self._taker is not None:
            raise ConfigError(
                f"{self.setting} {self.folder} was taken over by {self._taker} while this process stood still for more "
                f"than {WATCH_SECONDS:g} s: this {self.what} writes nothing more there"
            )

    def _text(self) -> str:
        # Of one length, so that a beat overwrites the file in place: a full disk cannot empty it.
        return json.dumps({**self._own, "beat": f"{self._beats:012d}"}) + "\n"

    def _create(self) -> bool:
        """Makes the file of the lock, and returns False where there is one."""
        text = self._text()
        if is_remote(self.folder):
            if self.path.exists():
                return False
            self.path.write_text(text)
            time.sleep(SETTLE_SECONDS)
            return self._read() == text
        try:
            file = self.path.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(text)
        except OSError:
            self.path.unlink()  # the disk is full: an empty lock would keep the next run waiting
            raise
        return True

    def _read(self) -> str | None:
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return None

    def _take_over(self, text: str) -> None:
        """Removes the lock whose text this is, once its process is known to be gone; raises ConfigError otherwise."""
        holder = _holder(text)
        alive = _is_alive(holder)
        if alive is None and not self._is_old():
            _warn(f"{self.path} is held by {_name(holder)}; waiting {WATCH_SECONDS:g} s for a sign of life")
            alive = _changes(self._read, text)
        if alive:
            raise ConfigError(
                f"{self.setting} {self.folder} is in use by another {self.what}, {_name(holder)}; wait for it, stop "
                f"it, or set another {self.setting}"
            )
        if self._remove(text):
            _warn(f"{self.folder} was left locked by {_name(holder)}, which is gone; this {self.what} takes it over")

    def _is_old(self) -> bool:
        """True when the last beat is older than OLD_SECONDS by the clock of the file system itself."""
        if is_remote(self.folder):
            return False
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.folder) as now:
            now.write(b"now")
            now.flush()
            return os.fstat(now.fileno()).st_mtime - self.path.stat().st_mtime > OLD_SECONDS
        return False

    def _remove(self, text: str) -> bool:
        """Removes the file if its text is still this one; of several processes that try, one succeeds."""
        if is_remote(self.folder):
            if self._read() == text:
                self.path.unlink(missing_ok=True)
            return True
        aside = self.path.with_name(f"{LOCK}.{self._own['id']}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return False
        same = aside.read_text(encoding="utf-8") == text
        if not same and not self.path.exists():  # a faster process's own lock
            aside.rename(self.path)
        aside.unlink(missing_ok=True)
        return same

    def _beat(self) -> None:
        """Raises the counter until the end, or until the lock is another's."""
        while not self._end.wait(BEAT_SECONDS):
            with contextlib.suppress(Exception):  # each store has errors of its own; the next beat may succeed
                holder = _holder(self._read())
                if holder.get("id", self._own["id"]) != self._own["id"]:
                    self._taker = _name(holder)
                    return
                self._beats += 1
                if is_remote(self.folder):
                    self.path.write_text(self._text())
                else:
                    with self.path.open("r+", encoding="utf-8") as file:
                        file.write(self._text())


def _this_process() -> dict[str, Any]:
    """The identity of this process among all of this machine and of others."""
    namespace = boot = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        "started": _start_of(os.getpid()),
        "namespace": namespace,
        "boot": boot,
    }


def _start_of(pid: int) -> str | None:
    """The start of a process in clock ticks since the machine's, or "" if that is not known, or None without one."""
    if not Path("/proc/self/stat").is_file():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass  # it is another user's
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie has ended, and waits for its parent to notice


def _holder(text: str | None) -> dict[str, Any]:
    """The entries of a lock, empty where it cannot be read: it is just being written, or no lock."""
    try:
        entries = json.loads(text or "")
    except ValueError:
        return {}
    return entries if isinstance(entries, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """True while the process of a lock runs, or None where this process cannot know."""
    own = _this_process()
    if any(holder.get(name) != own[name] for name in ("host", "boot", "namespace")):
        return None
    if not isinstance(pid := holder.get("pid"), int):
        return None
    started = _start_of(pid)
    if started is None:
        return False
    return None if started == "" else started == holder.get("started")


def _changes(read: Callable[[], str | None], text: str) -> bool:
    """True as soon as another text is read, False when it stays for WATCH_SECONDS."""
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, WATCH_SECONDS / 10))
        if (now := read()) != text:
            return now is not None
    return False


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "an unknown process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
