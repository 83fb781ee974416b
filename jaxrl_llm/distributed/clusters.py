"""The place of a process among those of its run: as keys and variables tell it, or as a cluster describes it."""

import glob
import importlib.util
import os
import socket
import sys
import threading
from typing import Any

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import TransientError
from jaxrl_llm.distributed.rendezvous import ProcessSpec

VARIABLES = {"coordinator": "JAXRL_COORDINATOR", "count": "JAXRL_PROCESS_COUNT", "index": "JAXRL_PROCESS_INDEX"}
TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # of torchrun, accelerate, Kubeflow's PyTorchJob
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def process_spec(coordinator: str | None, count: int | None, index: int | None) -> ProcessSpec | None:
    """The ProcessSpec of keys and variables, or else of a launcher of PyTorch, or None without any.

    Raises ConfigError when they are incomplete.
    """
    settings: dict[str, Any] = {"coordinator": coordinator, "count": count, "index": index}
    for name, variable in VARIABLES.items():
        text = os.environ.get(variable)
        if settings[name] is None and text:
            if name != "coordinator" and not text.isdigit():
                raise ConfigError(f"{variable} is {text!r}, but it takes an integer")
            settings[name] = text if name == "coordinator" else int(text)
    if settings["coordinator"] and "OMPI_COMM_WORLD_SIZE" in os.environ:
        for name, variable in (("count", "OMPI_COMM_WORLD_SIZE"), ("index", "OMPI_COMM_WORLD_RANK")):
            settings[name] = int(os.environ[variable]) if settings[name] is None else settings[name]
    if settings["count"] == 1 and not settings["index"]:
        return ProcessSpec("", 1, 0)
    missing = [name for name, value in settings.items() if value is None]
    if len(missing) == 3:
        return _torch_spec()
    if missing:
        raise ConfigError(
            f"processes.{missing[0]} is missing (or the variable {VARIABLES[missing[0]]}): processes.coordinator, "
            "processes.count and processes.index belong together"
        )
    return ProcessSpec(**settings).checked()


def _torch_spec() -> ProcessSpec | None:
    """The ProcessSpec of the variables that launchers of PyTorch set, or None without all of them.

    The port is the next one, as torchrun itself listens on theirs.
    """
    host, *numbers = (os.environ.get(name, "") for name in TORCH)
    if not host or not all(number.isdigit() for number in numbers):
        return None
    port, count, index = map(int, numbers)
    return ProcessSpec("", 1, 0) if count == 1 else ProcessSpec(f"{host}:{port + 1}", count, index).checked()


def devices_of_torch() -> list[int] | None:
    """The device of a process that a launcher of PyTorch has started beside others of its machine; None for all."""
    env = os.environ
    shared = all(name in env for name in TORCH) and int(env.get("LOCAL_WORLD_SIZE", 1)) > 1 and "LOCAL_RANK" in env
    own = "JAX_LOCAL_DEVICE_IDS" in env or "," not in env.get("CUDA_VISIBLE_DEVICES", ",")  # chosen by the user
    return [int(env["LOCAL_RANK"])] if shared and not own else None


def own_devices() -> None:
    """Leaves this process the GPUs of its machine that are its own, as `jax.distributed.initialize` does for one that
    joins others: it joins none, but may share the machine with some."""
    ids = os.environ.get("JAX_LOCAL_DEVICE_IDS") or ",".join(map(str, devices_of_torch() or ()))
    for vendor in ("cuda", "rocm") if ids else ():
        jax.config.update(f"jax_{vendor}_visible_devices", ids)


def described_cluster() -> str | None:
    """The kind of cluster whose environment describes several processes, or None when there is none."""
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


def join_cluster(cluster: str, seconds: int, limits: dict[str, Any]) -> bool:
    """Joins as the cluster describes, and returns False when that is a run of one process.

    Raises ConfigError where JAX cannot tell the processes of the cluster; where they do not meet within `seconds`, the
    process ends.
    """

    def exit_late() -> None:
        print(
            f"error: the processes of this run did not all meet within {seconds} s (processes.rendezvous_seconds), as "
            f"{cluster} describes it to a process on {socket.gethostname()}: look for the one that has not started or "
            "ended with an error, and whether machines can reach each other",
            file=sys.stderr,
            flush=True,
        )
        os._exit(TransientError.code)

    timer = threading.Timer(seconds, exit_late)
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
