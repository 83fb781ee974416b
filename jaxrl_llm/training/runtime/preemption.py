"""Preemption: on a signal the step is finished and saved, and the process ends with code 143.

Kubernetes, TPU VMs, Slurm's preemption and a plain `kill` send SIGTERM; `sbatch --signal` usually sends SIGUSR1 or
SIGUSR2 ahead of the time limit. The code is not 0, so that a job manager starts the same command again, and it is the
one that SIGTERM itself would leave.
"""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config.resuming import way_on

EXIT_CODE = 128 + signal.SIGTERM
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_open: list["Notices"] = []  # the innermost last


class Preempted(SystemExit):
    """Raised by a preempted run after it has saved its state; ends the process with code 143.

    `step` is the last one that was made, None where the run was not between two steps. Its notes are the last line of
    the command, which process 0 writes.
    """

    def __init__(self, step: int | None, where: str):
        super().__init__(EXIT_CODE)
        self.step = step
        if jax.process_index() == 0:
            self.add_note(f"stopped by a signal {where}: {way_on()} to go on")


class Notices:
    """A context manager that takes the signals of SIGNALS: they are noted in `signal` and do not end the process.

    The earlier handlers are restored at the end, and in every process that is forked meanwhile: a reward function may
    have a pool of processes, which ends them with SIGTERM. Only the main thread can set handlers: in another one (a
    notebook's worker thread) nothing changes, and only the notices of JAX's runtime count.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._answer: Any = False  # of the step before, where steps overlap
        self._where: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Notices":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._take) for number in SIGNALS}
            _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if self in _open:
            _open.remove(self)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        if self._where is not None:
            raise Preempted(None, self._where)

    @contextlib.contextmanager
    def ending(self, where: str) -> Iterator[None]:
        """While the block runs, a signal ends it at once: there is no step to finish. `where` says so in the message.

        With several processes such a signal is noted like others: one alone would leave the rest in a collective. Of
        nested blocks the outer one says where.
        """
        outer = self._where
        self._where = outer or (where if jax.process_count() == 1 else None)
        try:
            yield
        finally:
            self._where = outer

    def reached(self, step: int, overlaps: bool = False) -> bool:
        """True when any process has been preempted. All processes call it after each step, and get one answer.

        The answer comes from the devices, after what these compute already. Where steps overlap it is that of the step
        before: to wait for this one's would be to wait for its update.
        """
        if jax.process_count() == 1:
            return self.signal is not None
        # A cloud may notify one process alone; stopping at different steps would leave collectives without partners.
        notified = self.signal is not None or multihost_utils.reached_preemption_sync_point(step)
        mesh = Mesh(np.array(jax.devices()), "devices")
        own = np.full(jax.local_device_count(), notified)
        of_all = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), own)
        newest = _any(NamedSharding(mesh, PartitionSpec()))(of_all)
        answer, self._answer = (self._answer if overlaps else newest), newest
        return bool(answer)


@functools.lru_cache(maxsize=1)
def _any(everywhere: NamedSharding):
    return jax.jit(jnp.any, out_shardings=everywhere)  # kept: a new jit object would compile each step


os.register_at_fork(after_in_child=lambda: [notices.__exit__() for notices in reversed(_open[:])])  # once for all
