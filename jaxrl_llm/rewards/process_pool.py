"""Worker processes for reward functions that compute: each call, or part of a call, runs in a process of its own.

A worker is a Python that imports this package without JAX. It is started when it is first needed, ends with the process
that started it, and is killed, its children with it, when its work is late. Functions travel by name, so they are those
of modules and files, not ones made inside a function, a notebook cell or the main script.
"""

import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from jaxrl_llm.rewards.calls import Call, Ended, RewardError, WorkerDiedError, rows_ended

START_SECONDS = 120.0  # for a worker to start; it counts for no function
PARTS_PER_WORKER = 4  # a row grader's rows are cut finer than workers, so that none waits long for the slowest


class Task(NamedTuple):
    """A call, or some rows of a row grader's call, and the specification of its function (None: pickled itself)."""

    call: Call
    spec: str | None
    rows: tuple[int, ...] | None


class Worker:
    """One process and the pipe to it."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (sys.path holds texts)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from jaxrl_llm.rewards.process_pool import serve; serve()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self.pipe = Connection(ours.detach())

    def wait_until_ready(self) -> None:
        """Returns when the process takes tasks. Raises RewardError when it does not start."""
        try:
            if self.pipe.poll(START_SECONDS):
                self.pipe.recv_bytes()
                return
        except (EOFError, ConnectionResetError):
            pass
        self.kill()
        raise RewardError(f"a worker process for rewards did not start (exit code {self.process.returncode})")

    def kill(self) -> None:
        """Ends the process and every process of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


class Workers:
    """`count` worker processes."""

    def __init__(self, count: int):
        self.count = count
        self.idle: list[Worker] = []
        self.lock = threading.Lock()  # batches take turns

    def start(self, calls: list[tuple[Call, str | None]], timeout: float | None) -> "Future[list[Ended]]":
        """The future of `run`, in a thread that does not keep the process alive."""
        future: Future[list[Ended]] = Future()

        def work() -> None:
            try:
                with self.lock:
                    future.set_result(self.run(calls, timeout))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="reward workers").start()
        return future

    def run(self, calls: list[tuple[Call, str | None]], timeout: float | None) -> list[Ended]:
        """How each call, with the specification of its function, ended; they share the workers.

        A call's time limit counts from its first part's start. Raises RewardError for a function that cannot travel.
        """
        progress = [Progress(call, spec) for call, spec in calls]
        waiting = [(index, task) for index, each in enumerate(progress) for task in each.tasks(self.count)]
        busy: dict[Worker, tuple[int, Task]] = {}
        try:
            while waiting or busy:
                self._start(progress, waiting, busy)
                waiting += self._receive(progress, busy, timeout)
                for each in progress:
                    each.late = each.late or (timeout is not None and each.age() > timeout and not each.done())
                for worker in [w for w, (index, _) in busy.items() if progress[index].late]:
                    del busy[worker]
                    worker.kill()
                waiting = [(index, task) for index, task in waiting if not progress[index].late]
        finally:
            for worker in busy:
                worker.kill()
        return [each.ended() for each in progress]

    def close(self) -> None:
        """Ends the idle workers."""
        for worker in self.idle:
            worker.kill()
        self.idle.clear()

    def _start(self, progress: list["Progress"], waiting: list[tuple[int, Task]], busy: dict[Worker, Any]) -> None:
        wanted = min(len(waiting), self.count - len(busy))
        self.idle = [worker for worker in self.idle if worker.process.poll() is None]
        fresh = [Worker() for _ in range(wanted - len(self.idle))]  # they start beside each other
        self.idle += fresh
        for worker in fresh:
            worker.wait_until_ready()
        for _ in range(wanted):
            (index, task), worker = waiting.pop(0), self.idle.pop()
            busy[worker] = (index, task)
            message = _message(task)
            progress[index].begin()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is seen when it is read
                worker.pipe.send_bytes(message)

    def _receive(self, progress: list["Progress"], busy: dict[Worker, Any], timeout: float | None
                 ) -> list[tuple[int, Task]]:  # fmt: skip
        """Takes what the workers have sent; waits for the first of it, or for the first time limit.

        Returns the rows that dead workers have not come to.
        """
        left_over = []
        left = [timeout - progress[index].age() for index, _ in busy.values()] if timeout is not None else [1e6]
        pipes = {worker.pipe: worker for worker in busy}
        for pipe in wait(list(pipes), max(min(left, default=0.0), 0.0)):
            worker = pipes[pipe]  # type: ignore[index]
            index, task = busy[worker]
            try:
                kind, *rest = pickle.loads(worker.pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                del busy[worker]
                worker.kill()
                if (rest := progress[index].died(task, worker.process.returncode)) is not None:
                    left_over.append((index, rest))
                continue
            progress[index].take(kind, rest)
            if kind == "end":
                self.idle.append(worker)
                del busy[worker]
        return left_over


class Progress:
    """What has come back of one call."""

    def __init__(self, call: Call, spec: str | None):
        self.call, self.spec = call, spec
        self.late = False
        self.results: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}
        self.open = 0
        self.began: float | None = None

    def tasks(self, workers: int) -> Iterable[Task]:
        """The call, or the parts that a row grader's rows are cut into."""
        rows = self.call.rows
        size = -(-rows // (workers * PARTS_PER_WORKER)) if self.call.by_row else max(rows, 1)
        for start in range(0, rows if self.call.by_row else 1, max(size, 1)):
            self.open += 1
            part = tuple(range(start, min(start + size, rows))) if self.call.by_row else None
            yield Task(self.call, self.spec, part)

    def begin(self) -> None:
        """A part has started."""
        self.began = self.began or time.monotonic()

    def age(self) -> float:
        """Seconds since the first part started."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def done(self) -> bool:
        """True when every part has ended."""
        return self.open == 0

    def take(self, kind: str, rest: list[Any]) -> None:
        """One message of a worker: (result, index, value), (error, index, error) or (end, log)."""
        if kind == "result":
            self.results[rest[0]] = rest[1]
        elif kind == "error":
            self.errors[rest[0]] = rest[1]
        else:
            self.open -= 1
            for name, values in rest[0].metrics.items():
                self.call.log.metrics[name].extend(values)
            for name, values in rest[0].columns.items():
                self.call.log.columns[name].extend(values)
            for name, value in rest[0].totals.items():
                self.call.log.totals[name] += value

    def died(self, task: Task, code: int) -> Task | None:
        """The worker ended in the middle of `task`: its row has failed. Returns the task of the rows after it."""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        left = [row for row in task.rows or (0,) if row not in self.results and row not in self.errors]
        if left:
            self.errors[left[0]] = WorkerDiedError(f"its worker process ended with {how}")
        if len(left) > 1:
            return task._replace(rows=tuple(left[1:]))
        self.open -= 1
        return None

    def ended(self) -> Ended:
        """How the call ended."""
        if self.call.by_row:
            return rows_ended(self.call.rows, self.results, self.errors)
        if self.errors:
            return Ended(error=self.errors[0])
        return Ended(late=True) if self.late else Ended(self.results[0])


def travels(function: Any) -> bool:
    """True for what a worker process can run: a plain function. Objects stay where they were made."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.isfunction(function) or inspect.isbuiltin(function)


def _message(task: Task) -> bytes:
    call, spec, rows = task
    try:
        function = None if spec is not None else pickle.dumps(call.function)
        if function is not None and b"__main__" in function:
            raise pickle.PicklingError("it is defined in the main script")
        return pickle.dumps((spec, function, call.name, call.arguments, call.services, rows))
    except Exception as error:
        raise RewardError(
            f"reward {call.name!r} cannot be sent to a worker process ({error}); define it in a module or file and "
            "name it module:function or path/to/file.py:function, or set rewards.workers to 0"
        ) from error


def serve() -> None:
    """What a worker process does: takes tasks from its pipe and sends results, until the pipe closes."""
    from jaxrl_llm.rewards.grader import load_grader

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    functions: dict[Any, Any] = {}
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            spec, pickled, name, arguments, services, rows = pickle.loads(pipe.recv_bytes())
            key = spec or pickled
            try:
                if key not in functions:
                    functions[key] = load_grader(spec) if spec is not None else pickle.loads(pickled)
                call = Call(name, functions[key], arguments, services)
            except Exception as error:
                for row in (0,) if rows is None else rows:
                    _send(pipe, ("error", row, error))
                call, rows = Call(name, print, {}), ()
            for index in (0,) if rows is None else rows:
                try:
                    _send(pipe, ("result", index, call.row(index) if rows is not None else call()))
                except Exception as error:
                    _send(pipe, ("error", index, error))
            _send(pipe, ("end", call.log))


def _end_with(parent: int) -> None:
    """Ends this process, and all that it started, when the process that started it is gone, whatever is running."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _send(pipe: Connection, message: tuple[Any, ...]) -> None:
    try:
        data = pickle.dumps(message)
        pickle.loads(data)  # some errors can be written and not read
    except Exception:
        data = pickle.dumps((*message[:2], RuntimeError(f"{type(message[-1]).__name__}: {message[-1]}")))
    pipe.send_bytes(data)
