"""What every test shares: tests run on the CPU and never reach the network, unless the environment says otherwise."""

import dataclasses
import gc
import importlib.metadata
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's, in each of the processes that share the cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a process would compile 280 modules of the package: 0.4 s each time
sys.dont_write_bytecode = False
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # checks read XLA's warnings, which the package turns off

# A script's background jobs start with Ctrl-C ignored, and some tests press it.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
# Libraries that tests compare with; without one its tests are skipped, and on CI the whole run fails.
ORACLES = {"torch": "2", "trl": "1.16", "peft": "0.18", "math_verify": "0.8", "openai": "1.60"}
ORACLES |= {"tinker": "0.38", "schedulefree": "1.4", "prodigyopt": "1.1.2", "came-pytorch": "0.1.3"}
ORACLES |= {"starlette": "0.40", "uvicorn": "0.30", "outlines_core": "0.2.11", "llguidance": "1.0"}

MOST_MAPS = 30_000  # of memory, behind which compiled programs are freed
TESTS_BETWEEN = 32  # quick ones, after which they are counted: to read as many takes longer than most tests
TASK_ROWS = 512  # of the built-in task: to tokenise all 16,384 takes longer than most runs of two steps
ALLOCATIONS = 50_000  # after which young objects are looked through: JAX's own 700 take a twentieth of the time
PROGRAMS_A_CONTEXT = 100  # of MLIR: a new one for each program takes a twelfth of the suite's time

# Most of the suite's time is compilation: LLVM does not optimise, and what tests and their processes compile is kept.
# One module of LLVM a program: to split it for the cores costs more than it gains where every core has its own tests.
OPTIMIZATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
SEVERAL_DEVICES = "--xla_force_host_platform_device_count={}"
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # later ones do not know the flag, which is fatal
    OPTIMIZATION += " --xla_cpu_use_fusion_emitters=false"  # takes half of the compiler's time away
    # XLA aborts where a device comes 40 seconds late, as on cores that many share; a hang meets the limit of its test.
    SEVERAL_DEVICES += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
os.environ.setdefault("XLA_FLAGS", OPTIMIZATION)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
# The smallest programs too: to read one takes a fifth of the time that compiling it takes, and to write it none.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker (`-n auto`) more than there are cores: a tenth of the time is spent in waiting for other processes."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ends a run on CI in which a suite of comparisons would vanish."""
    missing = [name for name, oldest in ORACLES.items() if not _installed(name, oldest)]
    if missing and os.environ.get("CI"):
        pytest.exit(f"oracles are missing or too old: {', '.join(missing)}; pip install -e '.[dev]'", returncode=1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Imports without the garbage collector, and lets it pass over what they made, 840,000 objects, from then on.

    To look through them in vain, again and again, takes more than a quarter of the time that they do.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(ALLOCATIONS)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends without pytest's own two searches for garbage, which take seconds among all that the tests have made."""
    gc.freeze()


def _installed(name: str, oldest: str) -> bool:
    try:
        return Version(importlib.metadata.version(name)) >= Version(oldest)
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def tests_run() -> Iterator[int]:
    """The numbers of the tests of this process, from 1."""
    return itertools.count(1)


@pytest.fixture(autouse=True)
def room_for_programs(request: pytest.FixtureRequest, tests_run: Iterator[int]):
    """Frees compiled programs: each takes maps of memory, of which Linux gives a process 65,530 before it crashes."""
    yield
    maps = Path("/proc/self/maps")
    due = next(tests_run) % TESTS_BETWEEN == 0 or "slow" in request.keywords  # one of which may compile hundreds
    if due and maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        import jax  # not above: it reads the variables that are set there

        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def small_tasks() -> int:
    """Gives the built-in tasks few rows to train on, in this process, and returns how many they have otherwise."""
    from jaxrl_llm.data import tasks

    whole, tasks.SIZES["train"] = tasks.SIZES["train"], TASK_ROWS
    return whole


@pytest.fixture
def whole_tasks(monkeypatch: pytest.MonkeyPatch, small_tasks: int):
    """Gives the built-in tasks all their rows."""
    from jaxrl_llm.data import tasks

    monkeypatch.setitem(tasks.SIZES, "train", small_tasks)


@pytest.fixture(autouse=True)
def tasks_of_processes(request: pytest.FixtureRequest):
    """Gives tasks all their rows in a test that starts processes, where they have them, or that reads `tiny_run`."""
    if {"run_python", "together", "tiny_run"} & set(request.fixturenames):
        request.getfixturevalue("whole_tasks")


@pytest.fixture(scope="session", autouse=True)
def shared_contexts():
    """Lowers `PROGRAMS_A_CONTEXT` programs in one context of MLIR, where JAX makes one for each."""
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:  # a private function, which another version of JAX may not have
        return
    kept = threading.local()

    def context():
        if getattr(kept, "left", 0) == 0:
            kept.context, kept.left = make(), PROGRAMS_A_CONTEXT
        kept.left -= 1
        return kept.context

    mlir.make_ir_context = context


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, small_tasks: int):
    """The Result of two steps of configs/grpo.py, with a checkpoint of each, on a task with all its rows.

    The first of xdist's workers that asks for it trains it, and the others read its files.
    """
    import jax
    from filelock import FileLock

    import jaxrl_llm
    from jaxrl_llm.config.flags import load_config_file
    from jaxrl_llm.data import tasks
    from jaxrl_llm.train import Result
    from jaxrl_llm.training.setup.mesh import build_mesh
    from jaxrl_llm.training.setup.models import build_model

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "tiny_run"
    folder.mkdir(exist_ok=True)
    config, kept = load_config_file(f"{ROOT / 'configs' / 'grpo.py'}:tiny"), folder / "result"
    with FileLock(folder / "lock"):
        if kept.exists():
            params, metrics = pickle.loads(kept.read_bytes())
            model = build_model(config, build_mesh(config))
            params = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), params, model.params)
            return Result(dataclasses.replace(model, params=params, changed=True), metrics, folder / "run")
        config.output_dir = str(folder / "run")
        config.checkpoint.every = 1
        config.logging.backends = ("jsonl",)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tasks.SIZES, "train", small_tasks)
            result = jaxrl_llm.train(config)
        kept.write_bytes(pickle.dumps((jax.device_get(result.model.params), result.metrics)))
        return result


@pytest.fixture
def x64():
    """Runs the test in double precision, so that values can be compared to the last digits of an independent one."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python command line in its own process: `run_python("-c", code, devices=8)`.

    The process starts in a temporary folder, imports this checkout, and has `devices` CPU devices.
    """

    def run(*arguments: str, devices: int = 1, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{OPTIMIZATION} {SEVERAL_DEVICES.format(devices) if devices > 1 else ''}",
        }
        if devices > 1:  # threads of XLA's pool, else one a core: devices that wait for others would hold all of them
            environment["NPROC"] = str(2 * devices)
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=timeout, check=False
        )

    return run
