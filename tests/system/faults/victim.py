"""The train command, killed from within: `victim.py PHASE ENTRY SECONDS --config=...`.

SIGKILL comes SECONDS after the process enters PHASE for the ENTRY-th time, or after it starts where PHASE is `start`.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager


def kill_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def main(phase: str, entry: int, seconds: float, arguments: list[str]) -> None:
    if phase == "start":
        kill_after(seconds)
    from jaxrl_llm.train import main as train
    from jaxrl_llm.training.logging.stopwatch import Stopwatch
    from jaxrl_llm.training.setup import run, sources

    class Fuse(Stopwatch):
        """A stopwatch that lights the fuse."""

        left = entry

        @contextmanager
        def __call__(self, name):
            if name == phase:
                Fuse.left -= 1
                if Fuse.left == 0:
                    kill_after(seconds)
            with super().__call__(name):
                yield

    run.Stopwatch = sources.Stopwatch = Fuse
    train(arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
