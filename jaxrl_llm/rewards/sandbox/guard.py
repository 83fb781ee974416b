"""An audit hook around a program, where the kernel offers no isolation: `python guard.py FOLDER program.py`.

The hook refuses the network, other processes and files outside the program's folder. Code that intends to can bypass it
(through memory that ctypes reaches, or a broken extension); it stops accidents.
Standard library only.
"""

import os
import runpy
import sys

REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
           "os.killpg", "pty.", "ctypes.", "os.setuid", "signal.pthread_kill", "urllib.")  # fmt: skip
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
           "os.truncate", "os.utime", "shutil.")  # fmt: skip


def guard(folder: str) -> None:
    """Install the hook, for a program in `folder`, until the process ends: an audit hook cannot be removed."""
    inside = os.path.realpath(folder) + os.sep
    readable = tuple(os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix, "/usr", "/lib"))

    def check(event: str, arguments: tuple) -> None:
        # ctypes opens the interpreter itself when it is imported, as NumPy and pandas do.
        if event.startswith(REFUSED) and (event, arguments) != ("ctypes.dlopen", (None,)):
            raise PermissionError(f"the sandbox refuses {event}")
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = bool(arguments[2] & ~(os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)))
            if not (path + os.sep).startswith((inside,) if writes else (inside, *readable, "/dev/")):
                raise PermissionError(f"the sandbox refuses to open {path}")
        if event.startswith(CHANGES):
            for path in arguments:
                if isinstance(path, (str, bytes)) and not os.path.realpath(os.fsdecode(path)).startswith(inside):
                    raise PermissionError(f"the sandbox refuses {event} of {os.fsdecode(path)}")

    sys.addaudithook(check)


if __name__ == "__main__":
    _, folder, program = sys.argv
    guard(folder)
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
