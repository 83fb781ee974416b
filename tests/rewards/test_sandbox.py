"""Programs in the sandbox: permitted actions, and escapes, each of which is tried for real."""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from contextlib import suppress
from pathlib import Path

import pytest

from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.sandbox import Limits, SandboxError, run_program, walls

LONG, SHORT = Limits(seconds=20.0), Limits(seconds=1.0)  # for programs that end, and for those that do not
linux = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")


def run(source, stdin="", limits=LONG):
    return run_program(textwrap.dedent(source), stdin, limits)


def needs(*names):
    missing = [name for name in names if name not in walls()]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")


def test_a_program_reads_its_input_and_prints():
    finished = run("a, b = map(int, input().split())\nprint(a * b)", "6 7\n")
    assert finished.succeeded and (finished.output, finished.errors) == ("42\n", "")
    assert "limits" in finished.walls


def test_a_program_prints_the_same_each_time():
    """Also where it goes through a set of texts, whose hashes Python draws anew for each process."""
    source = "import os\nprint(*{str(i) for i in range(100)}, 'PYTHONPATH' in os.environ)"
    assert run(source).output == run(source).output


def test_exit_codes_signals_and_errors():
    assert (run("raise SystemExit(3)").ended, run("raise SystemExit(3)").code) == ("exit", 3)
    failed = run("1 / 0")
    assert not failed.succeeded and "ZeroDivisionError" in failed.errors
    crashed = run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert not crashed.succeeded


def test_packages_and_the_folder_may_be_used():
    finished = run(
        """
        import json, os, pathlib, tempfile
        import numpy
        pathlib.Path("own.txt").write_text("kept")
        with tempfile.NamedTemporaryFile() as file: pass
        own = pathlib.Path("own.txt").read_text()
        print(json.dumps([own, float(numpy.ones(3).sum()), os.environ["HOME"] == os.getcwd()]))
        """
    )
    assert finished.output == '["kept", 3.0, true]\n', finished.errors


def test_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    run("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.symlink('/etc/passwd', 'link')")
    assert list(tmp_path.iterdir()) == []


def test_an_endless_loop_ends_with_its_time():
    started = time.monotonic()
    finished = run("print('on', flush=True)\nwhile True: pass", limits=SHORT)
    assert (finished.ended, finished.output) == ("timeout", "on\n")
    assert 0.9 < time.monotonic() - started < 8


def test_catching_every_signal_does_not_help():
    source = """
    import signal, time
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except OSError: pass
    while True:
        try: time.sleep(100)
        except BaseException: pass
    """
    assert run(source, limits=SHORT).ended == "timeout"


@linux
def test_a_memory_hog_gets_a_memory_error():
    finished = run("x = []\nwhile True: x.append(bytearray(10**7))", limits=Limits(seconds=20, memory_mb=256))
    assert finished.ended == "exit" and "MemoryError" in finished.errors


def test_a_fork_bomb_is_stopped_and_leaves_nothing(folders):
    source = """
    import os, time
    for _ in range(2000):
        try: os.fork()
        except OSError: break
    time.sleep(30)
    """
    started = time.monotonic()
    run(source, limits=SHORT)
    assert time.monotonic() - started < 10
    assert not _processes_of(folders)


def test_detached_grandchildren_are_killed(folders):
    source = """
    import os, sys, time
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("grandchild", flush=True)
                time.sleep(60)
            os._exit(0)
    except OSError:
        print("refused")
    time.sleep(0.3)
    print("done")
    """
    started = time.monotonic()
    finished = run(source)
    assert finished.output.endswith("done\n") and time.monotonic() - started < 15
    assert not _processes_of(folders)


def test_a_flood_of_output_is_truncated():
    finished = run("while True: print('x' * 100000)", limits=Limits(seconds=20, output_kb=4, file_mb=2))
    assert len(finished.output) == 4096 and not finished.succeeded


def test_the_output_is_no_file_of_the_folder():
    assert run("import os\nos.rename('program.py', 'x')\nos.mkdir('program.py')\nprint(os.listdir())").output == (
        "['program.py', 'x']\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
        "import socket\nsocket.getaddrinfo('example.com', 80)",
        "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/dbus/system_bus_socket')",
    ],
)
def test_there_is_no_network(source):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        finished = run(source.format(port=server.getsockname()[1]))
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not finished.succeeded


@linux
def test_system_calls_past_python_are_refused():
    needs("system calls")
    source = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def tried(call, *arguments):
        return call(*arguments), ctypes.get_errno()
    print(tried(libc.socket, 2, 1, 0), tried(libc.unshare, 0x10000000), tried(libc.ptrace, 16, 1, 0, 0),
          tried(libc.mount, b"none", b"/tmp", b"tmpfs", 0, None), tried(libc.memfd_create, b"unlimited", 0))
    """
    assert run(source).output == "(-1, 1) (-1, 1) (-1, 1) (-1, 1) (-1, 1)\n"


def test_files_outside_cannot_be_written(tmp_path):
    tmp_path.chmod(0o777)
    target = tmp_path / "escaped"
    for source in (
        f"open({str(target)!r}, 'w').write('x')",
        f"import os\nos.mkdir({str(target)!r})",
        f"import os\nos.symlink({str(tmp_path)!r}, 'out')\nopen('out/escaped', 'w').write('x')",
        f"import os\nopen('x', 'w').close()\nos.rename('x', {str(target)!r})",
        f"import os\nopen('x', 'w').close()\nos.link('x', {str(target)!r})",
    ):
        assert not run(source).succeeded, source
        assert not target.exists(), source


def test_secrets_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "sk-secret")
    (tmp_path / "key").write_text("sk-secret")
    (tmp_path / "key").chmod(0o644)
    sources = [
        "import os\nprint(os.environ)",
        f"print(open({str(tmp_path / 'key')!r}).read())",
        f"print(open('/proc/{os.getpid()}/environ').read())",
        "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
        "import glob\nfor p in glob.glob('/proc/*/environ'): print(open(p).read())",
        f"import os\nfor fd in range(3, 64):\n    try: print(os.read(fd, 1000))\n    except OSError: pass",  # noqa: F541
    ]
    for source in sources:
        finished = run(source)
        assert "sk-secret" not in finished.output + finished.errors, source


def test_other_processes_cannot_be_killed():
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run(f"import os\nfor pid in (os.getppid(), {os.getpid()}, {victim.pid}):\n    os.kill(pid, 9)")
        for each in ("os.getppid()", str(os.getpid()), str(victim.pid), "-1"):
            run(f"import os\nos.kill({each}, 9)")
        run("import os\nos.killpg(os.getpgid(os.getppid()), 9)")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_a_signal_to_the_process_above_is_no_failure_of_the_sandbox():
    """Which would end the run: Python has a handler for SIGINT, so the first process of a namespace takes it."""
    source = """
    import os, signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for target in (os.getppid(), 1, -1):
        try: os.kill(target, signal.SIGINT)
        except OSError: pass
    time.sleep(0.1)
    print("here")
    """
    assert run(source).output == "here\n"


@linux
def test_a_file_system_of_its_own_that_cannot_be_made_is_a_wall_less(tmp_path, monkeypatch):
    """As where pivot_root has another number, or the root is in memory: the program still finds its folder."""
    needs("files namespace")
    (jail := tmp_path / "jail.py").write_text(
        sandbox.JAIL.read_text().replace("PIVOT_ROOT = {", "PIVOT_ROOT = {} and {")
    )
    monkeypatch.setattr(sandbox, "JAIL", jail)
    finished = run("print(1)")
    assert finished.output == "1\n" and "files namespace" not in finished.walls, finished.errors


def test_the_status_pipe_cannot_be_forged():
    source = """
    import os
    for fd in range(3, 256):
        try: os.write(fd, b'["exit", 0]\\n')
        except OSError: pass
    raise SystemExit(1)
    """
    finished = run(source)
    assert (finished.ended, finished.code) == ("exit", 1)


@linux
def test_every_wall_that_this_machine_offers_is_up():
    modules = Path("/sys/kernel/security/lsm")
    if Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        assert "system calls" in walls()
    if modules.exists() and "landlock" in modules.read_text():
        assert "files" in walls()
    if subprocess.run(["unshare", "--user", "--net", "--pid", "--fork", "true"], check=False).returncode == 0:
        assert {"network namespace", "processes namespace"} <= set(walls())
    if os.getuid() == 0 and "network namespace" in walls():
        assert "user" in walls(), "the interpreter can be read in the file system of the program"


@linux
def test_an_environment_in_a_private_folder_takes_no_wall_away(tmp_path):
    if "user" not in walls():
        pytest.skip("programs keep this process's user")
    venv.create(folder := tmp_path / "environment", symlinks=True)
    folder.chmod(0o700)  # as mktemp -d makes it
    script = f"import sys; sys.path += {sys.path}; from jaxrl_llm.rewards import sandbox; print(sandbox.walls())"
    result = subprocess.run([folder / "bin" / "python", "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == str(walls()), result.stderr


@pytest.mark.skipif(sandbox.bubblewrap() is None, reason="bubblewrap is not installed")
def test_bubblewrap_takes_no_other_wall_away(monkeypatch):
    name, *others = walls()
    assert name == "bubblewrap"
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: None)
    assert list(walls.__wrapped__()) == others


@linux
@pytest.mark.skipif(sandbox.bubblewrap() is None, reason="bubblewrap is not installed")
def test_bubblewrap_alone_keeps_files_and_network_away(tmp_path):
    """Where Landlock, seccomp and further namespaces are not to be had, it holds by itself."""
    (tmp_path / "key").write_text("secret")
    settings = {"read": sandbox.READABLE, "folder": str(tmp_path / "work"), "folder_mb": 1, "root": "/root"}
    source = f"""
import os, socket
print(os.path.exists({str(tmp_path / "key")!r}), os.path.exists("/proc"), [name for _, name in socket.if_nameindex()])
for path in ("/new", "/usr/new"):
    try: open(path, "w")
    except OSError as error: print(error.strerror)
try: open("big", "w").write("x" * 2**21)
except OSError as error: print(error.strerror)
"""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "program.py").write_text(source)
    settings["read"] = [path for path in (*settings["read"], sys.base_prefix) if Path(path).exists()]
    command = [*sandbox._bubblewrap(settings), str(Path(sys.executable).resolve()), "-I", "program.py"]
    output = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
    refused = ["Read-only file system"] * 2
    assert output.stdout.splitlines() == ["False False ['lo']", *refused, "No space left on device"], output.stderr


def test_a_bubblewrap_that_this_machine_does_not_let_work_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sandbox.bubblewrap.__wrapped__() is None


@pytest.mark.parametrize(
    ("up", "missing"),
    [
        (("limits",), ("network", "files", "processes", "system calls")),
        (("limits", "files", "system calls"), ("processes",)),
        (("limits", "network namespace", "processes namespace", "files namespace"), ("system calls",)),
        (("limits", "processes namespace", "files", "system calls"), ()),
        (("bubblewrap", "limits"), ("system calls",)),
    ],
)
def test_missing_walls(monkeypatch, up, missing):
    monkeypatch.setattr(sandbox, "walls", lambda: up)
    assert sandbox.missing_walls() == missing


@linux
def test_a_program_sees_the_interpreter_and_its_folder_alone(tmp_path):
    needs("files namespace")
    source = f"""
    import os
    def seen(path):
        try: return bool(os.stat(path))
        except OSError: return False
    print([path for path in ({str(tmp_path)!r}, {__file__!r}, "/etc/passwd", "/proc/1", "/home", "/var") if seen(path)])
    print(sorted(os.listdir(".")), seen({sys.executable!r}))
    """
    assert run(source).output == "[]\n['program.py'] True\n"


# Reaches for files and processes of the same user, by Python and by system call; what succeeds prints ESCAPED.
REACHING = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, function, *arguments):
    try:
        if function(*arguments) != -1: print("ESCAPED", name)
    except OSError: pass
for path in ("FILE", os.path.realpath(os.__file__)):
    tried("chmod", os.chmod, path, 0o777)
    tried("utime", os.utime, path, (1, 1))
    tried("chown", os.chown, path, os.getuid(), os.getgid())
    tried("setxattr", os.setxattr, path, "user.x", b"1")
    tried("link", os.link, path, "linked")
handle = os.open(os.path.realpath(os.__file__), os.O_RDONLY)
tried("fchmod", os.fchmod, handle, 0o777)
tried("attributes", libc.ioctl, handle, 0x40086602, ctypes.byref(ctypes.c_long(0)))
if os.uname().machine == "x86_64":
    for number in (234, 200, 129): tried(number, libc.syscall, number, OTHER, OTHER, 10)
    tried("kexec_file_load", libc.syscall, 320, 0, 0, 0, 0, 0)
    tried("ioprio_set", libc.syscall, 251, 1, OTHER, 0)
tried("kill", os.kill, OTHER, 10)
tried("prlimit", resource.prlimit, OTHER, resource.RLIMIT_FSIZE, (100, 100))
tried("processors", os.sched_setaffinity, OTHER, [0])
tried("priority", os.setpriority, os.PRIO_PROCESS, OTHER, 19)
tried("scheduler", os.sched_setscheduler, OTHER, os.SCHED_BATCH, os.sched_param(0))
own = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, own)
os.sched_setaffinity(0, os.sched_getaffinity(0))
import numpy, tempfile, threading
with tempfile.NamedTemporaryFile() as file: pass
threading.Thread(target=print, args=("done",)).start()
"""

# Runs programs where unshare() fails, as in a container that forbids namespaces.
WITHOUT_NAMESPACES = """
import ctypes, subprocess, sys, warnings
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.sandbox import jail
from jaxrl_llm.rewards.code import code_tests
jail.prctl(jail.PR_SET_NO_NEW_PRIVS, 1)
jail.REFUSED, jail.BY_ARGUMENT = {name: jail.REFUSED[name] for name in ("unshare", "mount")}, {}
assert jail.refuse_system_calls(True, True)
print(sandbox.missing_walls())
finished = sandbox.run_program(PROGRAM)
print(finished.output, finished.errors)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(code_tests(["def f(x): return x", "def f(x): return 1"], [["assert f(2) == 2"]] * 2), len(caught))
try:
    code_tests(["x"], [["assert x"]], require_walls=True)
except sandbox.RewardError as error:
    print(error)
"""


@linux
@pytest.mark.parametrize("namespaces", [True, False])
def test_files_and_processes_of_the_user_are_out_of_reach(tmp_path, namespaces):
    needs("system calls", "files")
    (target := tmp_path / "key").write_text("secret")
    target.chmod(0o640)
    before = target.stat()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = REACHING.replace("FILE", str(target)).replace("OTHER", str(other.pid))
        if namespaces:
            finished = run(program)
            assert finished.output == "done\n", finished.errors
        else:
            script = WITHOUT_NAMESPACES.replace("PROGRAM", repr(program))
            result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
            missing, output, _, graded, refusal = result.stdout.splitlines()
            assert (missing, output, graded) == ("('processes',)", "done", "[1.0, 0.0] 1"), (
                result.stdout + result.stderr
            )
            assert "nothing but Python itself keeps programs from processes" in refusal
        assert other.poll() is None
        after = target.stat()
        assert (after.st_mode, after.st_mtime, after.st_uid) == (before.st_mode, before.st_mtime, before.st_uid)
    finally:
        other.kill()
        other.wait()


@linux
def test_programs_of_the_system_are_not_started():
    needs("files")
    finished = run("import os\nos.execv('/usr/bin/env', ['env'])")
    assert "PermissionError" in finished.errors


@linux
def test_capabilities_are_gone():
    source = """
    import ctypes
    libc, data = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()
    libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
    print(sum(data), sum(libc.prctl(23, number, 0, 0, 0) for number in range(41)))
    """
    assert run(source).output == "0 0\n"


@linux
def test_files_are_bounded_together():
    needs("files namespace")
    source = "for i in range(20):\n    with open(str(i), 'wb') as file: file.write(bytes(10**6))"
    finished = run(source, limits=Limits(seconds=20, folder_mb=8))
    assert "No space left on device" in finished.errors


def test_folders_of_any_depth_and_without_rights_are_deleted(tmp_path):
    top, here = tmp_path / "top", Path.cwd()
    (top / "work").mkdir(parents=True)
    try:
        os.chdir(top / "work")
        for _ in range(1200):
            os.mkdir("a" * 10)  # noqa: PTH102
            os.chdir("a" * 10)
        os.symlink("/etc", "link")  # noqa: PTH211
        Path("file").touch(mode=0)
    finally:
        os.chdir(here)
    (top / "work").chmod(0)
    sandbox._remove(top)
    assert not top.exists()


def test_a_program_that_ends_its_supervisor_has_failed(monkeypatch):
    status = b"{'walls': ['limits']}\n{'passed': 1}\n"
    finished = sandbox._finished(status, ["", ""], -9)
    assert not finished.succeeded and finished.ended == "timeout"


def test_a_sandbox_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(sandbox, "JAIL", Path("/nonexistent/jail.py"))
    with pytest.raises(SandboxError, match="the sandbox failed"):
        run("pass")


def test_a_busy_machine_is_tried_once_more(tmp_path, monkeypatch):
    """Where no process can be started here, nor the supervisor start one; other errors are not tried again."""
    words, starts, popen = "Resource temporarily unavailable", [], subprocess.Popen
    (jail := tmp_path / "jail.py").write_text(f"raise BlockingIOError(11, {words!r})")

    def start(command, **options):
        starts.append(command)
        if len(starts) == 1:
            raise BlockingIOError(11, words)
        return popen(command, **options)

    monkeypatch.setattr(sandbox, "PAUSE", 0.0)
    sandbox.bubblewrap()  # which starts a process the first time
    monkeypatch.setattr(subprocess, "Popen", start)
    assert run("print(1)").output == "1\n" and len(starts) == 2
    monkeypatch.setattr(sandbox, "JAIL", jail)
    with pytest.raises(SandboxError, match=words):
        run("pass")
    assert len(starts) == 4
    monkeypatch.setattr(sandbox, "JAIL", tmp_path / "missing.py")
    with pytest.raises(SandboxError):
        run("pass")
    assert len(starts) == 5


# --- the audit hook, where the kernel gives no walls ------------------------------------------------------------------


def guarded(folder, source):
    (folder / "program.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-I", str(sandbox.GUARD), str(folder), "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)


def test_the_audit_hook_lets_plain_programs_run(tmp_path):
    source = """
    import json, pathlib
    import numpy
    pathlib.Path("own.txt").write_text("kept")
    print(json.dumps([__name__, pathlib.Path("own.txt").read_text()]))
    """
    assert guarded(tmp_path, source).stdout == '["__main__", "kept"]\n'


@pytest.mark.parametrize(
    "source",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.kill(os.getppid(), 0)",
        "open('/tmp/jaxrl_llm_escaped', 'w')",
        "import os\nos.open('/tmp/jaxrl_llm_escaped', os.O_CREAT | os.O_WRONLY)",
        "import os\nos.rename('program.py', '/tmp/jaxrl_llm_escaped')",
        "print(open('/etc/hostname').read())",
        "import ctypes\nctypes.CDLL(None).getpid()",
        "import ctypes\nctypes.CDLL('libc.so.6')",
    ],
)
def test_the_audit_hook_refuses(tmp_path, source):
    result = guarded(tmp_path, source)
    assert result.returncode == 1 and "PermissionError: the sandbox refuses" in result.stderr
    assert not Path("/tmp/jaxrl_llm_escaped").exists()


@pytest.fixture
def folders(monkeypatch):
    """A folder that has the programs' folders of this test alone: others run beside it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def _processes_of(folder):
    """The command lines of processes whose home lies in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if f"HOME={folder}/".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes())
    return found
