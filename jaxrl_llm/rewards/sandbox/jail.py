"""The supervisor of a sandboxed program: `python -S jail.py SETTINGS`, started by this folder's `__init__`.

Its child puts the walls (isolation layers) up and becomes the program; with tests, a second child puts up walls of its
own and runs them (exchange.py). Standard library only: it runs without this package. It reports lines of Python
literals: the walls that are up, each test that passed, and the end. Each wall is tried by itself, because kernels,
containers and users differ in what they allow.
"""
# It starts once for each program, so it loads no more modules than it needs: no pathlib, no typing, no json.
# ruff: noqa: PTH103, PTH110, PTH112, PTH114, PTH115, PTH116, PTH120, PTH123, PTH208, PTH211

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# Linux numbers: prctl options, clone flags, mount flags, Landlock.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_MOUNT_NS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1 << 1, 1 << 2, 1 << 12, 1 << 14, 1 << 18, 1 << 1
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_READ_ONLY = 442, -100, 0x8000, 1
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, WRITE_FILE, READ_DIR, EXECUTE = 1 << 2, 1 << 1, 1 << 3, 1 << 0
ALL_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights by Landlock version
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NOBODY = 65534

# (x86_64, aarch64) numbers of the system calls that a program has no use for; None where there is none.
REFUSED = {
    # network, other processes, namespaces, mounts
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # the kernel and the machine
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "personality": (135, 92), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "acct": (163, 89), "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    # scheduling
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
    # System V and POSIX messages, shared memory and semaphores
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "mq_open": (240, 180),
    # files in memory, which no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # modes, owners, times and attributes of files, for which Landlock has no right, and cuts by name: since version 3
    "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
# Refused without a process namespace, where other processes of the user could be signalled.
SIGNALS = {"tkill": (200, 130), "pidfd_send_signal": (424, 424)}
FORKS = {"fork": (57, None), "vfork": (58, None)}
# Calls of which an argument decides: (numbers, argument, values, whether these are the allowed ones). SELF is this
# process's id; 0 means the same in the first two.
SELF = -1
BY_ARGUMENT = {
    "prlimit64": ((302, 261), 0, (0, SELF), True),
    "sched_setaffinity": ((203, 122), 0, (0, SELF), True),
    "ioctl": ((16, 29), 1, (0x40086602, 0x401C5820, 0x40087602), False),  # attributes of files
}
SIGNALS_BY_ARGUMENT = {
    "kill": ((62, 129), 0, (SELF,), True),
    "tgkill": ((234, 131), 0, (SELF,), True),
    "rt_sigqueueinfo": ((129, 138), 0, (SELF,), True),
    "rt_tgsigqueueinfo": ((297, 240), 0, (SELF,), True),
    "fcntl": ((72, 25), 1, (8, 10, 15), False),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals when a file is ready
}
CLONE, CLONE3 = (56, 220), (435, 435)
CLONE_THREAD = 0x00010000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
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
    """The `result` of a function of C; raises OSError with its errno for a negative one."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int) -> None:
    checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def readable_by_others(paths: list[str]) -> bool:
    """True when a user without rights of its own can reach and read the paths."""
    for path in paths:
        above = os.path.realpath(path)
        while above != "/":
            above = os.path.dirname(above)
            if not os.stat(above).st_mode & 0o001:
                return False
    return all(map(is_open, paths))


def is_open(path: str) -> bool:
    """True when the rights of a file or folder itself let every user read it."""
    needed = 0o005 if os.path.isdir(path) else 0o004
    return os.stat(path).st_mode & needed == needed


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = (source.encode(), target.encode(), kind.encode() if kind else None)
    checked(libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def separate(settings: dict) -> list[str]:
    """Enter namespaces of the network, IPC and mounts, which the program and its tests share; returns the walls."""
    flags, user = NEW_NET | NEW_IPC | NEW_MOUNT_NS, os.getuid()
    group = os.getgid()
    if libc.unshare(flags) != 0:  # not root
        if libc.unshare(flags | NEW_USER) != 0:
            return []
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return ["network namespace", *(["files namespace"] if own_root(settings) else [])]


def own_root(settings: dict) -> bool:
    """Replace the file system by one that has the interpreter, read-only, and a folder in memory for the program."""
    root, folder = settings["root"], settings["folder"]
    try:
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
        shown: list[str] = []
        waiting = sorted((*settings["read"], *DEVICES), reverse=True)
        while waiting:
            path = waiting.pop()
            if any(f"{path}/".startswith(f"{above}/") for above in shown) or not os.path.exists(path):
                continue
            shown.append(path)
            entries = (
                [] if is_open(path) or not os.path.isdir(path) else [f"{path}/{name}" for name in os.listdir(path)]
            )
            if entries and all(os.path.exists(entry) and is_open(entry) for entry in entries):
                # A private folder of public files, as mkdtemp's: its entries are shown in a folder that is open.
                os.makedirs(root + path, exist_ok=True)
                for entry in entries:
                    if os.path.islink(entry):
                        os.symlink(os.readlink(entry), root + entry)
                    else:
                        show(root, entry)
                continue
            show(root, path)
        os.makedirs(root + folder, exist_ok=True)
        attributes = (ctypes.c_uint64 * 4)(MOUNT_READ_ONLY, 0, 0, 0)
        where = (ctypes.c_int(AT_FDCWD), root.encode(), ctypes.c_uint(AT_RECURSIVE))
        checked(libc.syscall(MOUNT_SETATTR, *where, ctypes.byref(attributes), ctypes.c_size_t(32)))
        most = f"size={settings['folder_mb']}m,nr_inodes=20000,mode=777"
        mount("tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, most)
        with open("program.py", "rb") as old, open(f"{root}{folder}/program.py", "wb") as new:
            new.write(old.read())
        os.chdir(root)
        checked(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."))
        checked(libc.umount2(b".", MNT_DETACH))
        return True
    except (OSError, KeyError):
        return False
    finally:
        os.chdir(folder)


def show(root: str, path: str) -> None:
    """Mount a file or folder at its own path below `root`."""
    if os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.close(os.open(root + path, os.O_CREAT | os.O_EXCL))
    mount(path, root + path, None, MS_BIND | MS_REC)


def become_nobody(settings: dict) -> bool:
    """Give up root's rights, where the interpreter can be read without them."""
    if os.getuid() != 0 or not readable_by_others(settings["read"]):
        return False
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # in a user namespace that has no other user
        return False
    return True


def drop_capabilities() -> None:
    """Give up what root may do, for this process and what it executes."""
    for number in range(64):
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def limit(settings: dict) -> None:
    """Set the resource limits: seconds of the processor, bytes of memory and of a file, open files, no core dumps."""
    megabyte = 2**20
    limits = {
        resource.RLIMIT_CPU: int(settings["processor_seconds"]) + 1,
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


def restrict_files(settings: dict) -> bool:
    """Allow reading in the interpreter's folders, executing it, and writing in the program's folder (Landlock)."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    every = (1 << ALL_FILE_RIGHTS.get(version, 16)) - 1
    ruleset = Ruleset(every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    handle = checked(libc.syscall(LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0)))
    rights = dict.fromkeys(settings["read"], READ_FILE | READ_DIR) | dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE)
    rights |= dict.fromkeys(settings["execute"], READ_FILE | EXECUTE)
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
    if os.uname().machine not in ARCHITECTURES:
        return False
    column, architecture = ARCHITECTURES[os.uname().machine]
    names = REFUSED | ({} if may_signal else SIGNALS) | ({} if may_fork else FORKS)
    numbers = [pair[column] for pair in names.values() if pair[column] is not None]
    load, equal, at_least, test, give = 0x20, 0x15, 0x35, 0x45, 0x06
    error, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 twins of the calls
    for number in numbers:
        steps += [(equal, 0, 1, number), (give, 0, 0, error | 1)]
    for pair, argument, values, allowed in (BY_ARGUMENT | ({} if may_signal else SIGNALS_BY_ARGUMENT)).values():
        values = [os.getpid() if value == SELF else value for value in values]
        verdicts = [allow, error | 1] if allowed else [error | 1, allow]
        steps += [(equal, 0, len(values) + 3, pair[column]), (load, 0, 0, 16 + 8 * argument)]
        steps += [(equal, len(values) - index, 0, value) for index, value in enumerate(values)]
        steps += [(give, 0, 0, verdicts[1]), (give, 0, 0, verdicts[0])]
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
    processes = libc.unshare(NEW_PID) == 0  # where separate() left the rights to
    up += ["user"] if become_nobody(settings) else []
    root = os.getuid() == 0
    user = libc.unshare(NEW_USER | (0 if processes else NEW_PID)) == 0
    up += ["processes namespace"] if processes or user else []
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # The kernel counts no processes of root, and outside a user namespace all those of a user.
    up += ["process count"] if user and not root else []
    return [*up, *(["files"] if restrict_files(settings) else [])]


def last_walls(settings: dict, up: list[str]) -> None:
    """Put up the walls that leave nothing more to arrange."""
    counted = "process count" in up
    if counted:
        most = settings["processes"] + 2  # of this user in this user namespace: this one, and the namespace's first
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if sys.platform == "linux":
        drop_capabilities()
        up += ["system calls"] if refuse_system_calls("processes namespace" in up, counted) else []


def become_program(settings: dict, up: list[str], pipe: tuple[int, int] | None) -> NoReturn:
    """Put up the last walls and replace this process by the program; `pipe` joins it to its tests."""
    command = list(settings["command"])
    if pipe:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what stands there is the tests
        for end in pipe:
            os.set_inheritable(end, True)
        command[-1:] = [settings["exchange"], *map(str, pipe)]
    last_walls(settings, up)
    report(settings, walls=up)
    if not {"files", "files namespace", "bubblewrap"} & set(up) or "system calls" not in up:
        guard = [settings["guard"], settings["folder"]]
        command = [*command, *guard] if pipe else [*command[:-1], *guard, command[-1]]
    os.execve(command[0], command, settings["environment"])


def run_tests(settings: dict, up: list[str], pipe: tuple[int, int]) -> None:
    """Put up the last walls and run the tests that standard input has."""
    with open(0, "rb", closefd=False) as file:
        job = marshal.loads(file.read())
    null = os.open(os.devnull, os.O_RDWR)
    for handle in range(3):
        os.dup2(null, handle)
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)  # no other process of the user may look into this one
    last_walls(settings, up)
    with open(settings["exchange"], "rb") as file:
        code = file.read()
    exchange: dict = {"__name__": "exchange"}
    compiled = settings["exchange"].endswith(".pyc")  # 16 bytes of header, and the code
    exec(marshal.loads(code[16:]) if compiled else compile(code, settings["exchange"], "exec"), exchange)
    exchange["run_tests"](job, *pipe, lambda index: report(settings, passed=index))


def report(settings: dict, **line: object) -> None:
    os.write(settings["status"], f"{line!r}\n".encode())


def end_of(child: int) -> tuple[str, int]:
    """The end of a child process: (exit, code) or (signal, number)."""
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "signal", os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)  # a process that waits for another one ends with 128 + its signal
    return ("signal", code - 128) if code > 128 else ("exit", code)


def end_with(child: int) -> NoReturn:
    kind, number = end_of(child)
    os._exit(128 + number if kind == "signal" else number)


def start(settings: dict, up: list[str], unused: list[int], leaf: Callable[[list[str]], None]) -> int:
    """The id of a new process, in which, or in a descendant of which, `leaf` runs behind walls."""
    supervisor, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        for handle in unused:
            os.close(handle)
        up = [*up, *put_walls_up(settings)]
        if sys.platform == "linux":
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(125)
        if "processes namespace" in up:
            if first := os.fork():
                end_with(first)
            # The first process of a namespace: when it ends, the kernel ends all the others in it. Its group is its
            # own, for a signal to a group reaches beyond the namespace.
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if program := os.fork():
                end_with(program)
        leaf(up)
        os._exit(0)
    except BaseException as error:
        report(settings, failed=f"{type(error).__name__}: {error}")
        os._exit(125)


def kill_children(known: list[int], processes: int | None) -> None:
    """Kill every descendant of this process, those that left their parents among them; `processes` is /proc, opened."""
    for child in known:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    for turn in range(1000):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if turn > 10 and processes is not None:  # where no namespace ends with its first process
            for child in _children(processes):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def _children(processes: int) -> list[int]:
    children = []
    for entry in filter(str.isdigit, os.listdir(processes)):
        with contextlib.suppress(OSError):
            handle = os.open(f"{entry}/stat", os.O_RDONLY, dir_fd=processes)
            with os.fdopen(handle, "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            if parent == os.getpid():
                children.append(int(entry))
    return children


def supervise(settings: dict) -> None:
    """Run the program, and its tests, and report the end; none of the processes is left when this returns."""
    up, processes, private = ["bubblewrap"] if settings["bubblewrap"] else [], None, []
    # A program may send signals to the first process of its namespace, which takes those that it has a handler for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        with contextlib.suppress(OSError):
            processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            private.append(processes)
        up += separate(settings)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if settings["exchange"]:
        (from_tests, to_program), (from_program, to_tests) = os.pipe(), os.pipe()
        ours, theirs = (from_tests, to_tests), (from_program, to_program)
        children = [
            start(settings, up, [*private, *theirs], lambda up: become_program(settings, up, ours)),
            start(settings, up, [*private, *ours], lambda up: run_tests(settings, up, theirs)),
        ]
        for handle in (*ours, *theirs):
            os.close(handle)
    else:
        children = [start(settings, up, private, lambda up: become_program(settings, up, None))]

    def late(*_: object) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, settings["seconds"])
    try:
        end = end_of(children[-1])
    except TimeoutError:
        end = ("timeout", 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    kill_children(children, processes)
    report(settings, ended=end)


if __name__ == "__main__":
    arguments = marshal.loads(bytes.fromhex(sys.argv[1]))
    os.set_inheritable(arguments["status"], False)
    supervise(arguments)
