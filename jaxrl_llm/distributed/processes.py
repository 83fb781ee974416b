"""Multi-process runtime: start-up, collectives of the host, and failures that end all processes together.

Each process runs the same command. `join` makes it one of several, by the first of these that applies:

1. `processes.coordinator`, `processes.count` and `processes.index`, or the variables JAXRL_COORDINATOR,
   JAXRL_PROCESS_COUNT and JAXRL_PROCESS_INDEX;
2. the variables of PyTorch's launchers: MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK;
3. Slurm, Open MPI, a Kubernetes Job or JobSet, Cloud TPU, as `jax.distributed.initialize` reads them;
4. nothing: then this process is alone.

No process waits for one that is gone. Host work is done under `all_or_none`: what is raised in one process is raised in
all. Any other error is published through the coordinator (`report`), and a thread of every other process ends it with
that message. JAX's own heartbeat ends the run when a machine is lost.
"""

import collections
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.config import ConfigDict, ConfigError, default, flat, to_json
from jaxrl_llm.config.background import is_left_behind
from jaxrl_llm.config.resolve import exit_code
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed.clusters import (
    VARIABLES,
    described_cluster,
    devices_of_torch,
    join_cluster,
    own_devices,
    process_spec,
)
from jaxrl_llm.distributed.orbax import ocp
from jaxrl_llm.distributed.overlap import order_collectives
from jaxrl_llm.distributed.rendezvous import ProcessSpec, rendezvous
from jaxrl_llm.distributed.turns import yielded

# Folders of the coordinator's key-value store, with an entry for each process: its message, and the signs that it is
# alive and that it is leaving.
MESSAGES, ALIVE, LEAVING = "jaxrl_llm/messages/", "jaxrl_llm/alive/", "jaxrl_llm/leaving/"
NUMBERS, CALLS = "jaxrl_llm/numbers/", "jaxrl_llm/calls/"  # the first as above; in the second, of channels of calls
AT_ONCE = 1 << 30  # bytes of a process that all gather at a time: sizes are of 32 bits, and each holds those of all
BARRIER_MILLISECONDS = 7 * 24 * 3600 * 1000  # the watchdog ends processes that wait for a hanging one
POLL_SECONDS = 0.5  # between two readings of the store
ANSWER_SECONDS = 4.0  # for the others to answer
LEAVE_SECONDS = 30.0  # for a failed process to close its files
START_ALIKE = "Start all processes with the same command, packages and files"
PACKAGE = Path(__file__).parents[1]
NAMED_FILE = re.compile(r"[^\s\"':,()=]+\.py\b")  # a Python file in the text of a setting


class AgreedError(ConfigError):
    """A failure that every process raises at the same point; all end with its `code`."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


@dataclass
class Group:
    """The processes of the run as this one knows them, and its own failure, if it has failed."""

    spec: ProcessSpec  # of this process
    hosts: list[str]  # of all processes
    own_message: str | None = None  # of the error that it is about to report
    failed: bool = False
    code: int = 1  # that it ends with then
    lost: set[int] = field(default_factory=set)  # processes that no longer answer, for which nobody waits again
    finished: threading.Event = field(default_factory=threading.Event)
    listener: threading.Thread | None = None

    def name(self, index: int) -> str:
        """The name of a process in messages: its index, and its host in brackets."""
        return f"process {index} ({self.hosts[index]})"


_groups: list[Group] = []  # empty, or the one of this process once it has joined
_calls = collections.defaultdict[str, Iterator[int]](itertools.count)  # of `_exchanged`, by their channels
_thread = threading.local()  # its `beside` is true in the block of that name
_waits: list[float] = []  # seconds in which this process waited for others, until they are asked after
_roles: list[int | None] = []  # empty, or the number of this process among those that only sample, None of a learner


def is_split() -> bool:
    """True once the processes of the run have joined as learners and as processes that only sample."""
    return bool(_roles)


def sampler() -> int | None:
    """The number of this process, from 0, among those that only sample, or None for any other."""
    return _roles[0] if _roles else None


def join(config: ConfigDict | None = None, samplers: int = 0) -> None:
    """Makes this process one of the run's, before anything else asks JAX for devices; alone, it changes nothing.

    The last `samplers` of the processes only sample (`sampler`). Each of these stays alone, so that no collective of
    the others waits for it; the others join each other.

    `processes.coordinator`, `count` and `index` of the configuration are none afterwards: they are no part of the
    record of a run. Raises ConfigError for incomplete settings, and for processes that do not meet within
    `processes.rendezvous_seconds` or differ in their count, configuration, versions or code.
    """
    config = default() if config is None else config
    c = config.processes
    spec, meet_seconds = process_spec(c.coordinator, c.count, c.index), c.rendezvous_seconds
    c.coordinator = c.count = c.index = None
    if samplers:
        if spec is None:
            raise ConfigError(
                f"rollout.processes is {samplers}, but this process is not told its place among the others: set "
                f"processes.coordinator, count and index for each, or {', '.join(VARIABLES.values())} (docs/"
                "asynchronous.md); or set rollout.processes to 0"
            )
        if samplers >= spec.count:
            raise ConfigError(
                f"rollout.processes is {samplers}, but the run has "
                f"{amount(spec.count, 'process', 'processes')}, of which at least one trains: start more, or "
                "set it lower"
            )
        learners = spec.count - samplers
        _roles[:] = [spec.index - learners if spec.index >= learners else None]
        if spec.index >= learners:
            own_devices()
            # GKE tells the slices of a job of each other, and the TPU's runtime would wait for the other samplers'.
            for name in [name for name in os.environ if name.startswith("MEGASCALE_")]:
                del os.environ[name]
            return
        spec = ProcessSpec(spec.coordinator, learners, spec.index)
    if spec is not None and spec.count == 1:
        own_devices()
        return
    cluster = described_cluster() if spec is None else None
    if spec is None and cluster is None:
        return
    limits = {"heartbeat_timeout_seconds": c.heartbeat_seconds, "shutdown_timeout_seconds": meet_seconds}
    if spec is not None:
        rendezvous(spec, meet_seconds)  # names the missing processes, which JAX does not
        jax.distributed.initialize(
            spec.coordinator,
            spec.count,
            spec.index,
            devices_of_torch(),
            cluster_detection_method="deactivate",
            initialization_timeout=meet_seconds,
            **limits,
        )
    elif not join_cluster(cluster or "", meet_seconds, limits):
        return
    order_collectives()  # before devices are asked for
    _check_devices()
    own = ProcessSpec(spec.coordinator if spec else cluster or "", jax.process_count(), jax.process_index())
    if jax.process_index():  # what is read, and how, is the same in all: the first says what there is to say of it
        logging.getLogger("jaxrl_llm.data").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"jaxrl_llm\.(config|data|models)\b")
    group = Group(own, check_agreed(agreed_facts(config), START_ALIKE))
    group.listener = threading.Thread(target=_listen, args=(group,), daemon=True, name="other processes")
    group.listener.start()
    _groups[:] = [group]


def _check_devices() -> None:
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"the processes have different numbers of devices ({dict(sorted(counts.items()))}, by process): give each "
            "as many, with CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS"
        )


def check_agreed(facts: dict[str, Any], fix: str) -> list[str]:
    """Raises AgreedError, with a sentence on its `fix`, for the first process whose facts, by name, are not those of
    process 0; returns the host of every process. All must call it."""
    everyone = gather({"host": socket.gethostname(), "facts": facts})
    first = everyone[0]["facts"]
    for index, other in enumerate(everyone):
        theirs = other["facts"]
        differ = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if differ:
            shown = "; ".join(f"{name} is {theirs.get(name)!r} there, {first.get(name)!r} here" for name in differ[:8])
            raise AgreedError(
                f"process {index} ({other['host']}) is set up differently from process 0 ({everyone[0]['host']}): "
                f"{shown}. {fix}"
            )
    return [other["host"] for other in everyone]


def agreed_facts(config: ConfigDict) -> dict[str, Any]:
    """The settings, the versions of packages, and the checksums of this package's code and of the Python files that
    settings name, by name, in which all processes of a run agree."""
    settings = to_json(config)
    versions = {f"the version of {name}": _version(name) for name in ("jaxrl_llm", "jax", "jaxlib", "transformers")}
    named = {name: Path(name).expanduser() for name in NAMED_FILE.findall(settings)}
    own = (path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(PACKAGE / "configs"))
    code = {"the code of jaxrl_llm": [*own]}  # the configurations lie in it where it is installed, and are settings
    code |= {f"the code of {name}": [file] for name, file in named.items() if file.is_file()}
    texts = {name: b"".join(file.read_bytes() for file in files) for name, files in code.items()}
    checksums = {name: hashlib.sha256(text).hexdigest()[:16] for name, text in texts.items()}
    return versions | checksums | flat(json.loads(settings))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a checkout that was never installed


def gather(value: Any) -> list[Any]:
    """The values of all processes (anything JSON writes; None costs least), in their order. All must call it."""
    if jax.process_count() == 1:
        return [value]
    if getattr(_thread, "beside", False):
        return list(map(json.loads, _exchanged("beside", json.dumps(value))))
    rows = gather_bytes(np.frombuffer(b"" if value is None else json.dumps(value).encode(), np.uint8))
    return [json.loads(row.tobytes()) if len(row) else None for row in rows]


def gather_bytes(data: np.ndarray) -> list[np.ndarray]:
    """The bytes `[n]` uint8 of all processes, in their order. All must call it."""
    if jax.process_count() == 1:
        return [data]
    began = time.perf_counter()
    parts = multihost_utils.process_allgather(np.array(divmod(len(data), AT_ONCE), np.int32)).reshape(-1, 2)
    sizes = parts[:, 0].astype(np.int64) * AT_ONCE + parts[:, 1]
    _waits.append(time.perf_counter() - began)
    if not sizes.any():
        return [data] * len(sizes)
    # Each other width is a program that is compiled: up to a quarter more, so that lengths of a run share a few.
    step = 1 << max(int(sizes.max()).bit_length() - 3, 10)
    padded = np.zeros(-(-int(sizes.max()) // step) * step, np.uint8)
    padded[: len(data)] = data
    pieces = [padded[start : start + AT_ONCE] for start in range(0, len(padded), AT_ONCE)]
    found = [multihost_utils.process_allgather(piece).reshape(len(sizes), -1) for piece in pieces]
    rows = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def of_each(own: dict[str, float]) -> list[dict[str, float]]:
    """The numbers that each process gave at its newest call, process 0 at the one before this, with the seconds that
    it had `waited` for others since its last; on process 0. On any other, and at the first call, this process's own
    alone.

    No process waits for another one here.
    """
    own = {**own, "waited": sum(_waits, 0.0)}
    _waits.clear()
    found: dict[int, dict[str, float]] = {}
    with _coordinator_may_be_gone():
        if jax.process_index() == 0:
            found = {index: json.loads(text) for index, text in _entries(NUMBERS).items()}
        _client().key_value_set(f"{NUMBERS}{jax.process_index()}", json.dumps(own), allow_overwrite=True)
    return [found[index] for index in sorted(found)] if len(found) == jax.process_count() else [own]


def most(number: int) -> int:
    """The largest of the numbers of all processes, by way of the coordinator: `gather` would wait for what the devices
    compute already. All must call it."""
    return number if jax.process_count() == 1 else max(map(int, _exchanged("most", str(number))))


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """In here this thread's `gather`, and what calls it, goes by way of the coordinator, to the threads of the other
    processes that are in here.

    So it needs no program, which would have to come in one order with those that other threads start. What is gathered
    should be small. One thread of a process may be in here at a time.
    """
    _thread.beside = True
    try:
        yield
    finally:
        _thread.beside = False


def _exchanged(channel: str, text: str) -> list[str]:
    """The texts of all processes in their order, by way of the coordinator; the calls of a channel meet each other."""
    call, client, own = next(_calls[channel]), _client(), jax.process_index()
    folder = f"{CALLS}{channel}/"
    client.key_value_set(f"{folder}{call}/{own}", text)
    with yielded():
        client.wait_at_barrier(f"{folder}{call}", BARRIER_MILLISECONDS)
    texts = _entries(f"{folder}{call}/")
    if call:
        client.key_value_delete(f"{folder}{call - 1}/{own}")  # all have read them, as all are here
    return [texts[index] for index in sorted(texts)]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Guards host work between collectives: if it fails in one process, all raise AgreedError.

    The message is the error's, after the process it comes from. With one process the error itself is raised.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    failures = gather(None if error is None else (_message(error), exit_code(error)))
    if error is not None and not isinstance(error, ConfigError):
        traceback.print_exception(error)
    for index, failure in enumerate(failures):
        if failure is not None:
            name = _groups[0].name(index) if _groups else f"process {index}"
            raise AgreedError(f"{name}: {failure[0]}", failure[1]) from error


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Reports an error to the other processes before anything outside the block is closed, which may wait for them."""
    try:
        yield
    except BaseException as error:
        report(error)
        raise


def report(error: BaseException) -> bool:
    """Shows the error and ends the other processes with it; returns False where all raise it, or there are no others.

    This process has LEAVE_SECONDS to close its files.
    """
    group = _groups[0] if _groups else None
    if group is None or isinstance(error, AgreedError | SystemExit):
        return False
    if group.failed:
        return True
    group.own_message = _message(error)
    _put(group, ALIVE)  # one that fails alike may ask when this one has left
    text = _with_cause(group, group.own_message)
    if text == group.own_message and not isinstance(error, ConfigError | KeyboardInterrupt):
        traceback.print_exception(error)
    group.failed = True
    print(f"error: {group.name(group.spec.index)}: {text}", file=sys.stderr, flush=True)
    group.code = exit_code(error) if text == group.own_message else 1  # a lost process is no error of the user's
    _put(group, MESSAGES, json.dumps({"failed": text, "code": group.code, "lost": sorted(group.lost)}))
    timer = threading.Timer(LEAVE_SECONDS, os._exit, (group.code,))
    timer.daemon = True
    timer.start()
    return True


def _with_cause(group: Group, text: str) -> str:
    """The text of an error, or the names of the processes that do not answer, if there are any.

    A collective breaks off in all processes when one of them ends. If that one has reported its error, the listener
    ends this process with it while this function waits; if all have failed alike, each goes on closing its files.
    """
    _put(group, MESSAGES, "{}")
    if silent := _missing_from(group, ALIVE):
        group.lost.update(silent)
        names = " and ".join(group.name(index) for index in silent)
        return f"{names} does not answer: it was killed, or its machine is lost ({text.splitlines()[0]})"
    if any(message.get("failed", text) != text for message in _messages(group).values()):
        time.sleep(ANSWER_SECONDS)
    return text


def end(code: int | str | None) -> NoReturn:
    """Exits with `code`: at once after a failure of this process alone, otherwise together with the others.

    So after Ctrl-C, and after a failure that leaves functions behind: a program of JAX may be under way, with which the
    end of the interpreter aborts.
    """
    group = _groups[0] if _groups else None
    if group is not None and group.failed:
        _leave(group, group.code)
    if group is not None and group.listener is not None:
        group.finished.set()
        group.listener.join()
    if code and isinstance(code, int) and (code == 130 or is_left_behind()):
        _exit_at_once(code)
    sys.exit(code)


def _leave(group: Group, code: int) -> NoReturn:
    """Exits at once; process 0 after the others: it is the coordinator, and JAX ends them when it is gone."""
    _put(group, LEAVING)
    if group.spec.index == 0:
        _missing_from(group, LEAVING)
    _exit_at_once(code)


def _exit_at_once(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _put(group: Group, folder: str, value: str = "") -> None:
    """Sets this process's entry in a folder of the coordinator's store."""
    with _coordinator_may_be_gone():
        _client().key_value_set(f"{folder}{group.spec.index}", value, allow_overwrite=True)


def _entries(folder: str) -> dict[int, str]:
    """The entries of processes in a folder of the coordinator's store, by their index."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in _client().key_value_dir_get(folder)}


def _missing_from(group: Group, folder: str) -> list[int]:
    """The other processes without an entry in the folder, once there are none or ANSWER_SECONDS have passed."""
    others = set(range(group.spec.count)) - {group.spec.index} - group.lost
    for _ in range(int(ANSWER_SECONDS / POLL_SECONDS)):
        with _coordinator_may_be_gone():
            others -= _entries(folder).keys()
        if not others:
            break
        time.sleep(POLL_SECONDS)
    return sorted(others)


def _messages(group: Group) -> dict[int, dict[str, Any]]:
    """The messages of other processes, by index; one that has failed gives its error as `failed`, with `code`."""
    messages: dict[int, dict[str, Any]] = {}
    with _coordinator_may_be_gone():
        messages = {index: json.loads(message) for index, message in _entries(MESSAGES).items()}
    messages.pop(group.spec.index, None)
    return messages


def _listen(group: Group) -> None:
    """Answers the others, and ends this process when one of them has failed, unless it has failed itself."""
    while not group.finished.wait(POLL_SECONDS):
        messages = _messages(group)
        if not messages:
            continue
        _put(group, ALIVE)
        for index, message in sorted(messages.items()):
            if "failed" in message and not group.failed and message["failed"] != group.own_message:
                print(f"error: {group.name(index)}: {message['failed']}", file=sys.stderr, flush=True)
                group.lost.update(message["lost"])
                _leave(group, message["code"])


def _client() -> Any:
    return ocp.multihost.get_jax_distributed_client()


@contextlib.contextmanager
def _coordinator_may_be_gone() -> Iterator[None]:
    """Calls to a coordinator that has ended raise; JAX itself then ends this process, with a message of its own."""
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        yield
