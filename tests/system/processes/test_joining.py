"""Sources from which a process learns that it is one of several; nothing here starts another one."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.distributed import clusters, processes
from jaxrl_llm.distributed.rendezvous import ProcessSpec
from jaxrl_llm.distributed.sharding import in_process_order

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """No variable of a cluster, whatever machine the test runs on."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JAXRL_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(clusters.glob, "glob", lambda pattern: [])


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone():
    config = default()
    processes.join(config)
    assert config == default()
    assert processes.gather({"a": 1}) == [{"a": 1}]


def test_code_that_differs_is_told(tmp_path, monkeypatch):
    """That of the package, whose version says nothing of a checkout, and files that settings name."""
    config, own = default(), tmp_path / "my_rewards.py"
    config.rewards.functions, config.data.format = (f"{own}:score(a=1)", "exact_match"), "nowhere.py:row"
    found = []
    for text in ("a", "b"):
        own.write_text(text)
        found.append(processes.agreed_facts(config))
    assert [name for name in found[0] if found[0][name] != found[1][name]] == [f"the code of {own}"]
    assert not any("nowhere" in name for name in found[0])
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "grpo.py").touch()  # lies in an installed package, and beside a checkout
    monkeypatch.setattr(processes, "PACKAGE", tmp_path)
    found = [processes.agreed_facts(config)]
    (tmp_path / "configs" / "grpo.py").write_text("c")
    assert processes.agreed_facts(config) == found[0]
    own.write_text("c")
    assert processes.agreed_facts(config)["the code of jaxrl_llm"] != found[0]["the code of jaxrl_llm"]


def test_keys_come_before_variables(monkeypatch):
    set_all(monkeypatch, {"JAXRL_COORDINATOR": "a:1", "JAXRL_PROCESS_COUNT": "4", "JAXRL_PROCESS_INDEX": "3"})
    assert clusters.process_spec(None, None, None) == ProcessSpec("a:1", 4, 3)
    assert clusters.process_spec("b:2", None, 0) == ProcessSpec("b:2", 4, 0)


@pytest.mark.parametrize("given", [("a:1", None, None), ("a:1", 2, None), (None, 2, 1), (None, None, 1)])
def test_what_belongs_together(given):
    with pytest.raises(ConfigError, match=r"processes\.\w+ is missing \(or the variable JAXRL_\w+\)"):
        clusters.process_spec(*given)


def test_a_variable_that_is_no_number(monkeypatch):
    monkeypatch.setenv("JAXRL_PROCESS_COUNT", "two")
    with pytest.raises(ConfigError, match="JAXRL_PROCESS_COUNT is 'two'"):
        clusters.process_spec("a:1", None, 0)


def test_a_count_of_one_is_alone_wherever_it_runs(monkeypatch):
    set_all(monkeypatch, SLURM | {"JAXRL_PROCESS_COUNT": "1"})
    processes.join(default())  # would meet node1 otherwise


def test_open_mpi_numbers_the_processes(monkeypatch):
    set_all(monkeypatch, {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"})
    assert clusters.process_spec("a:1", None, None) == ProcessSpec("a:1", 8, 5)


TORCHRUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "spec", "devices"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, ProcessSpec("node1:29501", 4, 3), [1]),
        ({"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, ProcessSpec("node1:29501", 4, 3), [1]),
        ({"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}, ProcessSpec("node1:29501", 4, 3), None),
        ({}, ProcessSpec("node1:29501", 4, 3), None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ProcessSpec("", 1, 0), None),
        ({"RANK": ""}, None, None),
        ({"JAXRL_PROCESS_COUNT": "1"}, ProcessSpec("", 1, 0), None),
    ],
)
def test_launchers_of_pytorch_tell_the_place(monkeypatch, variables, spec, devices):
    set_all(monkeypatch, TORCHRUN | variables)
    assert clusters.process_spec(None, None, None) == spec
    assert clusters.devices_of_torch() == devices


@pytest.mark.parametrize(("index", "count"), [(1, 2), (0, 2), (0, 1)])
@pytest.mark.parametrize("launcher", ["ours", "torch"])
def test_who_joins_no_others_of_jax_has_its_own_devices(monkeypatch, index, count, launcher):
    """A sampler, a learner that is the only one, a run of one process: they may share a machine."""
    settings = dict[str, str]()
    monkeypatch.setattr(processes.jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(processes, "_roles", [])
    if launcher == "ours":
        place = {"JAXRL_COORDINATOR": "a:1", "JAXRL_PROCESS_COUNT": str(count), "JAXRL_PROCESS_INDEX": str(index)}
        set_all(monkeypatch, place | {"JAX_LOCAL_DEVICE_IDS": str(index)})
    else:
        place = {"WORLD_SIZE": str(count), "RANK": str(index), "LOCAL_RANK": str(index)}
        set_all(monkeypatch, TORCHRUN | place | {"LOCAL_WORLD_SIZE": "2"})
    processes.join(default(), samplers=count - 1)
    assert settings == {f"jax_{vendor}_visible_devices": str(index) for vendor in ("cuda", "rocm")}


@pytest.mark.parametrize(
    ("variables", "cluster"),
    [
        ({}, None),
        (SLURM, "Slurm"),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),  # the batch script itself, outside srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "Cloud TPU"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, "Cloud TPU"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
    ],
)
def test_the_cluster_is_seen(monkeypatch, variables, cluster):
    set_all(monkeypatch, variables)
    assert clusters.described_cluster() == cluster


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": "4"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "4", "JAX_LOCAL_DEVICE_IDS": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, None),
        ({}, None),
    ],
)
def test_a_lone_task_has_all_devices(monkeypatch, variables, devices):
    set_all(monkeypatch, variables)
    assert clusters._devices_of_a_lone_task() == devices


def test_a_cluster_that_jax_cannot_read(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # Open MPI 5 names no coordinator

    def refuse(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(processes.jax.distributed, "initialize", refuse)
    with pytest.raises(ConfigError, match=r"Open MPI .* set JAXRL_COORDINATOR, .* or JAXRL_PROCESS_COUNT=1"):
        processes.join(default())


def test_errors_are_raised_as_they_are_when_alone():
    with pytest.raises(KeyError, match="x"), processes.all_or_none():
        raise KeyError("x")
    with pytest.raises(KeyError, match="x"), processes.reporting():
        raise KeyError("x")
    assert not processes.report(ConfigError("x"))


def test_rows_are_in_the_order_of_processes():
    def devices(owners, *shape):
        return np.array([SimpleNamespace(process_index=owner) for owner in owners]).reshape(shape)

    assert in_process_order(devices([0, 0, 1, 1], 1, 4, 1, 1, 1))
    assert in_process_order(devices([0, 0, 1, 1], 2, 1, 1, 1, 2))
    assert not in_process_order(devices([0, 1, 0, 1], 1, 4, 1, 1, 1))  # a TPU slice, arranged by its wires
    assert not in_process_order(devices([1, 1, 0, 0], 2, 2, 1, 1, 1))
