"""Notices that a run is to leave its machine: the step is finished and saved, and the process ends with code 143.

SIGTERM is what Kubernetes, TPU VMs, Slurm's preemption and a plain `kill` send; SIGUSR1 and SIGUSR2 are what
`sbatch --signal` is usually told to send ahead of the time limit. The code is not 0, so that a job manager starts the
same command again, and it is the one that SIGTERM itself would leave.
"""

import signal
import threading
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

EXIT_CODE = 128 + signal.SIGTERM
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class Preempted(SystemExit):
    """Raised by a run that was told to leave, after it has saved its state; ends the process with code 143."""

    def __init__(self, step: int):
        super().__init__(EXIT_CODE)
        self.step = step


class Notices:
    """A context manager within which a signal of SIGNALS does not end the process but sets a note.

    The handlers of before are put back at the end. Only the main thread can set them: elsewhere (a notebook's worker
    thread) nothing is changed, and the runtime's own notices are all that is seen.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Notices":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number

    def reached(self, step: int) -> bool:
        """True when any process has been told to leave; all processes ask after each step, and get one answer."""
        if jax.process_count() == 1:
            return self.signal is not None
        told = self.signal is not None or multihost_utils.reached_preemption_sync_point(step)
        return bool(multihost_utils.process_allgather(np.array([told])).any())
