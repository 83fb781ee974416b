"""Many processes that run as one: how they find each other, what they tell each other, and how they end together.

Each process runs the same command. `join` makes it one of several, from the first of these that says so:

1. `processes.coordinator`, `processes.count` and `processes.index`, or the variables JAXRL_COORDINATOR,
   JAXRL_PROCESS_COUNT and JAXRL_PROCESS_INDEX;
2. Slurm, Open MPI, a Kubernetes Job or JobSet, Cloud TPU, as `jax.distributed.initialize` reads them;
3. nothing: then this process is the whole run.

Then no process waits for one that is gone. Host work is done under `all_or_none`, which raises in all what was
raised in one. An error anywhere else is told through the coordinator (`report`), and a thread of every other process ends it
with that message. JAX's own heartbeat ends the run when a machine is lost.
"""

import collections
import contextlib
import glob
import importlib.metadata
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from jaxrl_llm.config import ConfigDict, ConfigError, default, flat, to_json
from jaxrl_llm.config.resolve import exit_code
from jaxrl_llm.distributed.rendezvous import ProcessSpec, rendezvous

VARIABLES = {
    "coordinator": "JAXRL_COORDINATOR",
    "count": "JAXRL_PROCESS_COUNT",
    "index": "JAXRL_PROCESS_INDEX",
}
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Folders of the coordinator's key-value store, with an entry for each process: what it has to say, that it lives, that
# it leaves.
WORDS, HERE, LEAVING = "jaxrl_llm/words/", "jaxrl_llm/here/", "jaxrl_llm/leaving/"
POLL, ANSWER, LEAVE = 0.5, 4.0, 30.0  # seconds: between looks, until all have answered, until a failed process is gone


class AgreedError(ConfigError):
    """A failure that every process raises at the same point, and its code, which ends them all."""

    def __init__(self, words: str, code: int = 2):
        super().__init__(words)
        self.code = code


@dataclass
class Group:
    """This process's part in the run: where it is, on which machines the others are, and whether it has failed."""

    place: ProcessSpec
    hosts: list[str]
    own_words: str | None = None  # those of the error that it is about to report
    failed: bool = False
    code: int = 1  # that it ends with then
    over: threading.Event = field(default_factory=threading.Event)
    listener: threading.Thread | None = None

    def name(self, index: int) -> str:
        """A process as messages name it."""
        return f"process {index} ({self.hosts[index]})"


_groups: list[Group] = []  # the one of this process, once it has joined


def join(config: ConfigDict | None = None) -> None:
    """Makes this process one of the run's, before anything else asks JAX for devices; alone, it changes nothing.

    `processes.coordinator`, `count` and `index` of the configuration are none afterwards: where a process runs is no
    part of the record of a run. Raises ConfigError: settings that are incomplete, processes that do not meet within
    `processes.meet_seconds`, or that differ in their count, configuration or versions.
    """
    config = default() if config is None else config
    c = config.processes
    place, meet_seconds, heartbeat = _place(c.coordinator, c.count, c.index), c.meet_seconds, c.heartbeat_seconds
    c.coordinator = c.count = c.index = None
    if place is not None and place.count == 1:
        return
    cluster = _cluster() if place is None else None
    if place is None and cluster is None:
        return
    limits: dict[str, Any] = {"heartbeat_timeout_seconds": heartbeat, "shutdown_timeout_seconds": meet_seconds}
    if place is not None:
        rendezvous(place, meet_seconds)
        jax.distributed.initialize(
            place.coordinator, place.count, place.index, cluster_detection_method="deactivate",
            initialization_timeout=meet_seconds, **limits,
        )  # fmt: skip
    elif not _initialize(cluster or "", meet_seconds, limits):
        return
    _check_devices()
    own = ProcessSpec(place.coordinator if place else cluster or "", jax.process_count(), jax.process_index())
    group = Group(own, _introduce(config))
    group.listener = threading.Thread(target=_listen, args=(group,), daemon=True, name="other processes")
    group.listener.start()
    _groups[:] = [group]


def _place(coordinator: str | None, count: int | None, index: int | None) -> ProcessSpec | None:
    """The place that keys and variables name, None when they name none; raises ConfigError when they are incomplete."""
    given: dict[str, Any] = {"coordinator": coordinator, "count": count, "index": index}
    for name, variable in VARIABLES.items():
        text = os.environ.get(variable)
        if given[name] is None and text:
            if name != "coordinator" and not text.isdigit():
                raise ConfigError(f"{variable} is {text!r}, but it takes an integer")
            given[name] = text if name == "coordinator" else int(text)
    if given["coordinator"] and "OMPI_COMM_WORLD_SIZE" in os.environ:
        for name, variable in (("count", "OMPI_COMM_WORLD_SIZE"), ("index", "OMPI_COMM_WORLD_RANK")):
            given[name] = int(os.environ[variable]) if given[name] is None else given[name]
    if given["count"] == 1 and not given["index"]:
        return ProcessSpec("", 1, 0)
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return None
    if missing:
        raise ConfigError(
            f"processes.{missing[0]} is missing (or the variable {VARIABLES[missing[0]]}): processes.coordinator, "
            "processes.count and processes.index belong together"
        )
    return ProcessSpec(**given).checked()


def _cluster() -> str | None:
    """The kind of cluster whose environment says that this is one of several processes, None when there is none."""
    env = os.environ
    if all(name in env for name in SLURM) and int(env["SLURM_NTASKS"]) > 1:
        return "Slurm"
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return "Open MPI"
    if "," in env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES", "")):
        return "Cloud TPU"
    if int(env.get("MEGASCALE_NUM_SLICES", 1)) > 1:
        return "Cloud TPU"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "Kubernetes"
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")  # noqa: PTH207 (no folder to start from)
    if chips and importlib.util.find_spec("libtpu") and "TPU_SKIP_MDS_QUERY" not in env:
        return "Cloud TPU"
    return None


def _initialize(cluster: str, seconds: int, limits: dict[str, Any]) -> bool:
    """Joins as the cluster says; False when that is a run of one process."""

    def late() -> None:
        print(
            f"error: the processes of this run did not all meet within {seconds} s (processes.meet_seconds), as "
            f"{cluster} describes it to {_self()}: look for the one that has not started or ended with an error, and "
            "whether machines can reach each other",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(2)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        # JAX gives each task of Slurm one device; the only task of a machine has them all.
        local = _devices_of_a_lone_task()
        jax.distributed.initialize(local_device_ids=local, initialization_timeout=seconds + 60, **limits)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{cluster} seems to run this process with others, but JAX cannot tell how ({error}): set "
            f"{', '.join(VARIABLES.values())} for each, or {VARIABLES['count']}=1 to run this one alone"
        ) from error
    finally:
        timer.cancel()
    return jax.process_count() > 1


def _devices_of_a_lone_task() -> list[int] | None:
    env = os.environ
    alone = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")).partition("(")[0] == "1"
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    return list(range(int(gpus))) if alone and gpus.isdigit() and "JAX_LOCAL_DEVICE_IDS" not in env else None


def _self() -> str:
    return f"a process on {socket.gethostname()}"


def _check_devices() -> None:
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"the processes have different numbers of devices ({dict(sorted(counts.items()))}, by process): give each "
            "as many, with CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS"
        )


def _introduce(config: ConfigDict) -> list[str]:
    """The host of every process; raises AgreedError for the first difference from process 0."""
    versions = {f"the version of {name}": _version(name) for name in ("jaxrl_llm", "jax", "jaxlib", "transformers")}
    own = {"host": socket.gethostname(), "facts": versions | flat(json.loads(to_json(config)))}
    all_of_them = gather(own)
    first = all_of_them[0]["facts"]
    for index, other in enumerate(all_of_them):
        facts = other["facts"]
        differ = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
        if differ:
            shown = "; ".join(f"{name} is {facts.get(name)!r} there, {first.get(name)!r} here" for name in differ[:8])
            raise AgreedError(
                f"process {index} ({other['host']}) is set up differently from process 0 ({all_of_them[0]['host']}): "
                f"{shown}. Start all processes with the same command and packages"
            )
    return [other["host"] for other in all_of_them]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a checkout that was never installed


def gather(value: Any) -> list[Any]:
    """What every process gave (anything JSON writes; None costs least), in their order. All must call."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(b"" if value is None else json.dumps(value).encode(), np.uint8)
    sizes = np.atleast_1d(multihost_utils.process_allgather(np.int32(len(data))))
    if not sizes.any():
        return [None] * len(sizes)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    parts = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(part[:size].tobytes()) if size else None for part, size in zip(parts, sizes, strict=True)]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Work of this process's host, between collectives: where it fails in one process, all raise AgreedError.

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
    told = gather(None if error is None else (_told(error), exit_code(error)))
    if error is not None and not isinstance(error, ConfigError):
        traceback.print_exception(error)
    for index, failure in enumerate(told):
        if failure is not None:
            who = _groups[0].name(index) if _groups else f"process {index}"
            raise AgreedError(f"{who}: {failure[0]}", failure[1]) from error


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Tells the other processes of an error before anything outside the block is closed, which may wait for them."""
    try:
        yield
    except BaseException as error:
        report(error)
        raise


def report(error: BaseException) -> bool:
    """True once the error is shown here and ends the other processes; False where all raise it, or there are no others.

    This process has `LEAVE` seconds to close what it has open.
    """
    group = _groups[0] if _groups else None
    if group is None or isinstance(error, AgreedError | SystemExit):
        return False
    if group.failed:
        return True
    group.own_words = _told(error)
    text = _with_cause(group, group.own_words)
    if text == group.own_words and not isinstance(error, ConfigError | KeyboardInterrupt):
        traceback.print_exception(error)
    group.failed = True
    print(f"error: {group.name(group.place.index)}: {text}", file=sys.stderr, flush=True)
    group.code = exit_code(error) if text == group.own_words else 1  # a lost process is nothing to mend
    _say(group, {"failed": text, "code": group.code})
    timer = threading.Timer(LEAVE, os._exit, (group.code,))
    timer.daemon = True
    timer.start()
    return True


def _with_cause(group: Group, text: str) -> str:
    """The text of an error, named after the processes that do not answer, if there are any.

    A collective breaks off in all processes when one of them ends. What that one had to say ends this one meanwhile;
    where all have failed alike, each goes on closing what it has open.
    """
    _say(group, {})
    if silent := _waiting_for(group, HERE):
        names = " and ".join(group.name(index) for index in silent)
        return f"{names} does not answer: it was killed, or its machine is lost ({text.splitlines()[0]})"
    if any(word.get("failed", text) != text for word in _words(group).values()):
        time.sleep(ANSWER)
    return text


def end(code: int | str | None) -> NoReturn:
    """Exits: after a failure that only this process knew of without waiting for the others, else with all of them."""
    group = _groups[0] if _groups else None
    if group is not None and group.failed:
        _leave(group, group.code)
    if group is not None and group.listener is not None:
        group.over.set()
        group.listener.join()
    sys.exit(code)


def _leave(group: Group, code: int) -> NoReturn:
    """Exits at once; process 0 after the others, which JAX would end in the middle of their last words."""
    _note(group, LEAVING)
    if group.place.index == 0:
        _waiting_for(group, LEAVING)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(group: Group, word: dict[str, Any]) -> None:
    with _coordinator_may_be_gone():
        _client().key_value_set(f"{WORDS}{group.place.index}", json.dumps(word), allow_overwrite=True)


def _note(group: Group, folder: str) -> None:
    with _coordinator_may_be_gone():
        _client().key_value_set(f"{folder}{group.place.index}", "", allow_overwrite=True)


def _waiting_for(group: Group, folder: str) -> list[int]:
    """The other processes without a note in the folder, once there are none or ANSWER seconds have passed."""
    others = set(range(group.place.count)) - {group.place.index}
    for _ in range(int(ANSWER / POLL)):
        with _coordinator_may_be_gone():
            others -= {int(key.rsplit("/", 1)[1]) for key, _ in _client().key_value_dir_get(folder)}
        if not others:
            break
        time.sleep(POLL)
    return sorted(others)


def _words(group: Group) -> dict[int, dict[str, Any]]:
    """What other processes have said."""
    words: dict[int, dict[str, Any]] = {}
    with _coordinator_may_be_gone():
        words = {int(key.rsplit("/", 1)[1]): json.loads(word) for key, word in _client().key_value_dir_get(WORDS)}
    words.pop(group.place.index, None)
    return words


def _listen(group: Group) -> None:
    """Answers the others, and ends this process when one of them has failed, unless it has failed itself."""
    while not group.over.wait(POLL):
        words = _words(group)
        if not words:
            continue
        _note(group, HERE)
        for index, word in sorted(words.items()):
            if "failed" in word and not group.failed and word["failed"] != group.own_words:
                print(f"error: {group.name(index)}: {word['failed']}", file=sys.stderr, flush=True)
                _leave(group, word["code"])


def _client() -> Any:
    return multihost.get_jax_distributed_client()


@contextlib.contextmanager
def _coordinator_may_be_gone() -> Iterator[None]:
    """Calls to a coordinator that has ended raise; JAX itself then ends this process, with a message of its own."""
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        yield
