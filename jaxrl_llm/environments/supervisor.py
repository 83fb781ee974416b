"""The supervisor of a command agent: `python -I -S supervisor.py PARENT COMMAND...`, started by agents.py.

It runs the command, ends as that does, and kills its own process group, the command in it, when the process PARENT is
gone, however that ended. Standard library only.
"""

import os
import signal
import subprocess
import sys
import threading
import time


def end_with(parent: int) -> None:
    """End this process group once the parent process is another one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    code = subprocess.call(sys.argv[2:])
    sys.exit(128 - code if code < 0 else code)  # of a signal as a shell has it
