"""The supervisor of a sandboxed program: `python -I jail.py SETTINGS`, started by sandbox.py.

Its child puts the walls (isolation layers) up and becomes the program. Standard library only: it runs without this
package. The first line that it writes to the status pipe lists the walls that are up, the second the program's end.
Each wall is tried by itself, because kernels, containers and users differ in what they allow.
"""
# It loads no more modules than it needs, hence no pathlib.
# ruff: noqa: PTH112, PTH116, PTH120, PTH123, PTH208

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
import time

# Linux numbers: prctl options, clone flags, Landlock.
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 38, 22, 36
NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_MOUNT_NS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, WRITE_FILE, READ_DIR, EXECUTE = 1 << 2, 1 << 1, 1 << 3, 1 << 0
ALL_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights by Landlock version
NOBODY = 65534

# (x86_64, aarch64) numbers of the system calls that a program has no use for; None where there is none.
REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "open_by_handle_at": (304, 265), "personality": (135, 92),
    "sched_setscheduler": (144, 119), "setpriority": (141, 140), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "quotactl": (179, 60), "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip
SIGNALS = {"kill": (62, 129), "tkill": (200, 130), "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138)}
FORKS = {"fork": (57, None), "vfork": (58, None)}
CLONE, CLONE3 = (56, 220), (435, 435)
CLONE_THREAD = 0x00010000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

libc = ctypes.CDLL(None, use_errno=True)


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32)]


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


class Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def checked(result: int) -> int:
    """`result` of a C function, or its OSError."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int) -> None:
    checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def readable_by_others(paths: list[str]) -> bool:
    """True when a user without rights of its own can reach and read the paths."""
    for path in paths:
        for each in [path, *_parents(path)]:
            mode = os.stat(each).st_mode
            if not mode & (0o001 if each != path or os.path.isdir(each) else 0o004):
                return False
    return True


def _parents(path: str) -> list[str]:
    path, parents = os.path.realpath(path), []
    while path != "/":
        path = os.path.dirname(path)
        parents.append(path)
    return parents


def become_nobody(settings: dict) -> bool:
    """Give up root's rights, where the interpreter can be read without them."""
    if os.getuid() != 0 or not readable_by_others(settings["read"]):
        return False
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return True


def own_namespaces() -> list[str]:
    """Enter new network, process, IPC and user namespaces; returns the names of those that are walls."""
    if libc.unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC) == 0:
        return ["network", "processes"]
    return []


def limit(settings: dict) -> None:
    """Set the resource limits."""
    megabyte = 2**20
    limits = {
        resource.RLIMIT_CPU: int(settings["cpu_seconds"]) + 1,
        resource.RLIMIT_FSIZE: settings["file_mb"] * megabyte,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":  # macOS accepts this limit and does not keep it
        limits[resource.RLIMIT_AS] = settings["memory_mb"] * megabyte
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def limit_processes(most: int) -> None:
    """Allow this user at most `most` processes (in this user namespace)."""
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def restrict_files(settings: dict) -> bool:
    """Allow reading in the interpreter's folders and writing in the program's folder, nothing else (Landlock)."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    every = (1 << ALL_FILE_RIGHTS.get(version, 16)) - 1
    ruleset = Ruleset(every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    handle = checked(libc.syscall(LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0)))
    reading = READ_FILE | READ_DIR | EXECUTE
    devices = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
    rights = dict.fromkeys(settings["read"], reading) | dict.fromkeys(devices, READ_FILE | WRITE_FILE)
    rights[settings["folder"]] = every
    for path, allowed in rights.items():
        with contextlib.suppress(FileNotFoundError):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                allowed &= READ_FILE | WRITE_FILE | EXECUTE
            rule = PathRule(allowed, parent)
            checked(libc.syscall(LANDLOCK_ADD, handle, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0)))
            os.close(parent)
    checked(libc.syscall(LANDLOCK_RESTRICT, handle, ctypes.c_uint32(0)))
    os.close(handle)
    return True


def refuse_system_calls(may_signal: bool, may_fork: bool) -> bool:
    """Let the system calls of REFUSED fail with "operation not permitted" (seccomp)."""
    if platform.machine() not in ARCHITECTURES:
        return False
    column, architecture = ARCHITECTURES[platform.machine()]
    names = REFUSED | ({} if may_signal else SIGNALS) | ({} if may_fork else FORKS)
    numbers = [pair[column] for pair in names.values() if pair[column] is not None]
    load, equal, at_least, test, give = 0x20, 0x15, 0x35, 0x45, 0x06
    error, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 twins of the calls
    for number in numbers:
        steps += [(equal, 0, 1, number), (give, 0, 0, error | 1)]
    # The C library falls back from clone3, whose flags a filter cannot read, to clone.
    steps += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, error | 38)]
    if not may_fork:
        steps += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (test, 1, 0, CLONE_THREAD), (give, 0, 0, error | 11)]
    steps += [(give, 0, 0, allow)]
    program = (Instruction * len(steps))(*(Instruction(*step) for step in steps))
    return libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(steps), program)), 0, 0) == 0


def put_walls_up(settings: dict) -> list[str]:
    """Put up the walls that this machine allows; returns their names."""
    up = ["limits"]
    limit(settings)
    if sys.platform != "linux":
        return up
    up += ["user"] if become_nobody(settings) else []
    root = os.getuid() == 0  # asked here: in a user namespace the answer is another
    namespaces = own_namespaces()
    up += [f"{name} namespace" for name in namespaces]
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # The kernel counts no processes of root, and outside a user namespace all those of a user.
    counts = bool(namespaces) and not root
    return [*up, *(["files"] if restrict_files(settings) else []), *(["process count"] if counts else [])]


def become(settings: dict, up: list[str], status: int) -> None:
    """Put up the last walls and replace this process by the program."""
    counted = "process count" in up
    if counted:
        limit_processes(settings["processes"] + 2)  # this process and the namespace's first
    if sys.platform == "linux" and refuse_system_calls("processes namespace" in up, counted):
        up += ["system calls"]
    os.write(status, json.dumps(up).encode() + b"\n")
    command = list(settings["command"])
    if "files" not in up or "system calls" not in up:
        command = [command[0], "-I", settings["guard"], settings["folder"], *command[1:]]
    os.execve(command[0], command, settings["environment"])


def wait_for(child: int, deadline: float) -> tuple[str, int]:
    """The end of a child process: (exit, code), (signal, number) or (timeout, 0)."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended == child:
            return ("signal", os.WTERMSIG(status)) if os.WIFSIGNALED(status) else ("exit", os.WEXITSTATUS(status))
        if time.monotonic() > deadline:
            return "timeout", 0
        time.sleep(0.002)


def kill_children() -> None:
    """Kill every descendant of this process, those that left their parents among them."""
    for _ in range(1000):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = _children()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _children() -> list[int]:
    children = []
    with contextlib.suppress(FileNotFoundError):  # without /proc the process group is all there is
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        parent = int(file.read().rpartition(b")")[2].split()[1])
                    if parent == os.getpid():
                        children.append(int(entry))
    return children


def run_first(settings: dict, up: list[str], status: int) -> None:
    """The first process of a namespace: when it ends, the kernel ends all the others in it."""
    child = os.fork()
    if child == 0:
        become(settings, up, status)
    kind, number = wait_for(child, time.monotonic() + settings["seconds"] + 60)
    os._exit(128 + number if kind == "signal" else number)


def supervise(settings: dict, status: int) -> None:
    """Run the program and report its end; none of its processes is left when this returns."""
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    deadline = time.monotonic() + settings["seconds"]
    child = os.fork()
    if child == 0:
        try:
            up = put_walls_up(settings)
            first = os.fork() if "processes namespace" in up else 0
            if first == 0:
                if sys.platform == "linux":
                    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                run_first(settings, up, status) if "processes namespace" in up else become(settings, up, status)
            kind, number = wait_for(first, deadline + 60)
            os._exit(128 + number if kind == "signal" else number)
        except BaseException as error:
            os.write(status, json.dumps(f"{type(error).__name__}: {error}").encode() + b"\n")
            os._exit(125)
    kind, number = wait_for(child, deadline)
    if kind == "exit" and number > 128:
        kind, number = "signal", number - 128
    kill_children()
    os.write(status, json.dumps([kind, number]).encode() + b"\n")


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    os.set_inheritable(arguments["status"], False)
    supervise(arguments, arguments["status"])
