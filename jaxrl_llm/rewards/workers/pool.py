"""Worker processes for reward functions that compute: each call, or some of its rows, runs in a process of its own.

Functions travel by name, so they are those of modules and files, not ones made inside a function, a notebook cell or
the main script.
"""

import contextlib
import functools
import inspect
import io
import math
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from jaxrl_llm.config.background import in_thread
from jaxrl_llm.rewards.call import Call, Outcome
from jaxrl_llm.rewards.signatures import RewardError
from jaxrl_llm.rewards.workers.frames import MARK_BYTES, Frames, SpoiledError, is_ours

END_SECONDS = 2.0  # for a worker whose pipe has closed to end by itself, so that its exit code is known
START_SECONDS = 120.0  # for a worker to start; it counts for no function
TASKS_PER_WORKER = 4  # a row grader's rows are split finer than workers, so that none waits long for the slowest


class WorkerDiedError(Exception):
    """The worker process of a call ended in the middle of it, or its pipe was spoiled."""


class PlainUnpickler(pickle.Unpickler):
    """Reads plain values and errors of Python's and ours, and nothing else: code that what a model wrote came to run
    behind walls could write the message, which is read outside of them."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        found = getattr(sys.modules.get(module_name), global_name, None)
        if is_ours(module_name) and isinstance(found, type) and issubclass(found, Exception):
            return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no value of a walled worker")


class Worker:
    """One process, `walled` or not, and the pipe to it; both end with the process that started them."""

    def __init__(self, walled: bool = False):
        ours, theirs = socket.socketpair()
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (sys.path holds texts)
        # Each thread of a numerical library would take some of the memory that walls leave.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if walled else {}
        command = [sys.executable, "-m", "jaxrl_llm.rewards.workers.process", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, "walled"] if walled else command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, which is killed with the children that functions start
            env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self.pipe = Frames(ours, secrets.token_bytes(MARK_BYTES))
        ours.sendall(self.pipe.mark)

    def wait_until_ready(self) -> None:
        """Return when the process takes tasks. Raises RewardError when it does not start."""
        with contextlib.suppress(EOFError, OSError):
            if wait([self.pipe.socket], START_SECONDS):
                self.pipe.receive()
                return
        self.kill()
        raise RewardError(f"a worker process for rewards did not start (exit code {self.process.returncode})")

    def died(self, error: Exception) -> WorkerDiedError:
        """The error of the function that was running when the pipe failed with `error`; ends the process."""
        if isinstance(error, SpoiledError):
            self.kill()
            return WorkerDiedError(f"{error} of its worker process; a function must leave that alone")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        code = self.process.poll()
        self.kill()
        if code is None:
            return WorkerDiedError("it closed the pipe of its worker process")
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerDiedError(f"its worker process ended with {cause}")

    def kill(self) -> None:
        """End the process and every process of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.socket.close()


@dataclass(eq=False)
class Job:
    """A call with the specification of its function (None: the function is pickled), and what came back so far."""

    call: Call
    spec: str | None
    outcome: Outcome = field(default_factory=Outcome)
    began: float = math.inf  # time.monotonic() when its first task was sent

    def is_late(self, timeout: float | None, deadline: float) -> bool:
        """True when results are missing `timeout` seconds after the first task began, or at the deadline."""
        now = time.monotonic()
        passed = now >= deadline or (timeout is not None and now - self.began > timeout)
        return passed and bool(self.outcome.missing(self.call.keys))

    def message(self, keys: Sequence[int]) -> bytes:
        """The task for a worker: the call and which of its keys to run. Raises RewardError: it cannot be pickled."""
        call = self.call
        try:
            function = None if self.spec is not None else pickle.dumps(call.function)
            # It would be pickled by name, which a worker would look up in another main module.
            if function is not None and b"__main__" in function:
                raise pickle.PicklingError("it is defined in the main script")
            of_call = call.name, call.arguments, call.services, call.row_numbers, call.prompt_numbers
            return pickle.dumps((self.spec, function, *of_call, keys))
        except Exception as error:
            raise RewardError(
                f"reward {call.name!r} cannot be sent to a worker process ({error}); define it in a module or file and "
                "name it module:function or path/to/file.py:function, or set rewards.workers to 0"
            ) from error


class Workers:
    """`count` worker processes, each started when it is first needed and replaced when it was killed.

    With `walled`, for functions of ours that read what a model wrote, they are behind `process.put_walls_up`.
    """

    def __init__(self, count: int, walled: bool = False):
        self.count, self.walled = count, walled
        self.idle: list[Worker] = []
        self.lock = threading.Lock()  # batches take turns

    def start(self, calls: list[tuple[Call, str | None]], timeout: float | None) -> "Future[list[Outcome]]":
        """The future of `run`, in a thread that does not keep the process alive."""

        def work() -> list[Outcome]:
            with self.lock:
                return self.run(calls, timeout)

        return in_thread(work, "reward workers")

    def run(
        self, calls: list[tuple[Call, str | None]], timeout: float | None, deadline: float = math.inf
    ) -> list[Outcome]:
        """The outcome of each call, given with the specification of its function; the calls share the workers.

        A call's time limit, in seconds, counts from the start of its first task; `deadline`, by time.monotonic(), ends
        them all. Raises RewardError for a function that cannot travel.
        """
        jobs, waiting = [Job(call, spec) for call, spec in calls], []
        for job in jobs:
            size = max(-(-len(job.call.keys) // (self.count * TASKS_PER_WORKER)), 1)
            waiting += [(job, job.call.keys[i : i + size]) for i in range(0, len(job.call.keys), size)]
        busy: dict[Worker, tuple[Job, Sequence[int]]] = {}
        try:
            while waiting or busy:
                count = min(len(waiting), self.count - len(busy))
                self.idle = [worker for worker in self.idle if worker.process.poll() is None]
                # All start before the first is waited for.
                new = [Worker(self.walled) for _ in range(count - len(self.idle))]
                self.idle += new
                for worker in new:
                    worker.wait_until_ready()
                for _ in range(count):
                    (job, keys), worker = waiting.pop(0), self.idle.pop()
                    busy[worker] = job, keys
                    message = job.message(keys)
                    job.began = min(job.began, time.monotonic())
                    with contextlib.suppress(OSError):  # its death is seen below
                        worker.pipe.send(message)

                first = min(job.began for job, _ in busy.values())
                until = min(deadline, math.inf if timeout is None else first + timeout)
                seconds = None if math.isinf(until) else max(until - time.monotonic(), 0.0)
                readable = wait([worker.pipe.socket for worker in busy], seconds)
                for worker in [worker for worker in busy if worker.pipe.socket in readable]:
                    job, keys = busy[worker]
                    try:
                        for message in worker.pipe.read():
                            reader = PlainUnpickler if self.walled else pickle.Unpickler
                            kind, key, value = reader(io.BytesIO(message)).load()
                            if kind == "log":
                                if not self.walled:
                                    job.call.log.extend(value)
                                self.idle.append(worker)
                                del busy[worker]
                            else:
                                (job.outcome.results if kind == "result" else job.outcome.errors)[key] = value
                    except Exception as error:  # of the pipe, or of reading a result in this process
                        busy.pop(worker, None)
                        died = worker.died(error)
                        # The row that the worker was at has failed; the rows after it go to another worker.
                        if missing := job.outcome.missing(keys):
                            job.outcome.errors[missing[0]] = died
                            waiting += [(job, missing[1:])] if missing[1:] else []

                # Killing is the only way to stop a function; the worker is replaced when one is needed.
                for worker in [worker for worker, (job, _) in busy.items() if job.is_late(timeout, deadline)]:
                    del busy[worker]
                    worker.kill()
                waiting = [(job, keys) for job, keys in waiting if not job.is_late(timeout, deadline)]
        finally:
            for worker in busy:
                worker.kill()
        return [job.outcome for job in jobs]

    def close(self) -> None:
        """End the idle workers."""
        for worker in self.idle:
            worker.kill()
        self.idle.clear()


def travels(function: object) -> bool:
    """True for what a worker process can run: a plain function. Objects stay where they were made."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.isfunction(function) or inspect.isbuiltin(function)
