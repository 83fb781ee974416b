"""`Watchdog`: ends a run that hangs, after it has written the stacks of its threads.

A phase of a step (rollout, reward, update, checkpoint, ...) that takes longer than `watch.hang_seconds` counts as a
hang: a reward function without end, a collective that another process never joins, a file system that does not answer.
A model that is being written may take longer, as long as its files grow.
The main thread may sit in a C call that never returns, so nothing is raised: the process writes all Python stacks and
ends with exit code 1. Checkpoints are atomic, so the last one is intact, and the same command goes on from it.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

import jax

from jaxrl_llm.config.resuming import way_on
from jaxrl_llm.distributed import processes
from jaxrl_llm.models.files.hf import STEPS
from jaxrl_llm.training.logging.stopwatch import Stopwatch

EXIT_CODE = 1
UPLOAD = "upload"  # the phase that may take any time: hours of a large model, and what sends it has limits of its own
STDERR = 2  # the file descriptor: sys.stderr may have been replaced
PARTIAL = ".*.partial-*"  # the folder of a model that is being written
MARGIN = 10.0  # seconds by which the timer in C, which cannot name the phase, comes later


class Watchdog:
    """A context manager that ends the process when a phase of `watch` other than UPLOAD takes more than `seconds`; 0
    turns it off.

    Stacks go to `folder/stacks.txt` (`stacks_<process>.txt` on processes after the first, `stacks_sampler_<number>.txt`
    on those that only sample) and to standard error. Should the hang hold the interpreter's lock (a regular expression
    that backtracks without end), no thread of Python runs: then a timer in C ends the process `MARGIN` seconds later,
    with the stacks on standard error alone.
    """

    def __init__(self, seconds: float, watch: Stopwatch, folder: Path):
        process, sampler = jax.process_index(), processes.sampler()
        of = f"_{process}" if process else "" if sampler is None else f"_sampler_{sampler}"
        self.path = folder / f"stacks{of}.txt"
        self._seconds = seconds
        self._watch = watch
        self._folder, self._written = folder, 0  # bytes of the models that are being written there
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._patrol, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            self._watch.changed = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            self._finished.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _patrol(self) -> None:
        pause = min(self._seconds / 10, 10.0)
        while not self._finished.wait(pause):
            # Set anew each time: it fires only when this thread no longer runs.
            faulthandler.dump_traceback_later(self._seconds + MARGIN, exit=True, file=STDERR)
            if (written := self._bytes_written()) != self._written:
                self._written, self._watch.changed = written, time.monotonic()
            if self._watch.phases[-1:] != [UPLOAD] and time.monotonic() - self._watch.changed > self._seconds:
                self._end()

    def _bytes_written(self) -> int:
        """The bytes of models in the run's folder that are not complete (`hf.replacing`)."""
        total = 0
        with contextlib.suppress(OSError):  # one is complete by now, or the file system does not answer
            for pattern in (f"{PARTIAL}/*", f"{STEPS}/{PARTIAL}/*"):
                total += sum(path.stat().st_size for path in self._folder.glob(pattern))
        return total

    def _end(self) -> None:
        phase = self._watch.phases[-1] if self._watch.phases else "the time between phases"
        text = (
            f"error: no progress for {self._seconds:g} s (watch.hang_seconds): the run hangs in {phase}; the stacks of "
            f"its threads are in {self.path}. The last checkpoint is intact: {way_on()} to go on from it"
        )
        try:
            print(text, file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(STDERR, all_threads=True)
            with self.path.open("w") as file:
                print(text, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        finally:
            os._exit(EXIT_CODE)
