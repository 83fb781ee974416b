"""Checkpoints in object stores: servers on this machine that speak S3 and Google's storage, and real runs.

Needs `pip install "moto[server]" s3fs` and `pip install gcp-storage-emulator gcsfs`; skipped where they are missing.
"""

import importlib.util
import json
import shutil
import uuid
from pathlib import Path

import fsspec
import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils
from safetensors.numpy import load_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.checkpoint.manager import path_of
from jaxrl_llm.training.checkpoint.object_store import reach_s3, s3_store
from tests.system.faults.equality import assert_same_tree, metrics
from tests.system.processes.conftest import finish, free_port, start

NAME = "jaxrl-llm-runs"


@pytest.fixture(scope="module")
def variables():
    """Sets variables of the environment until the tests of this file end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            patch.delenv(name, raising=False)
            patch.delenv(name.upper(), raising=False)
        yield patch


@pytest.fixture(scope="module")
def s3(variables):
    """A bucket of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    port = free_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    for name, value in settings.items():
        variables.setenv(name, value)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    running.start()
    fsspec.filesystem("s3").mkdir(NAME)
    yield f"s3://{NAME}"
    running.stop()


@pytest.fixture(scope="module")
def gs(variables):
    """A bucket of a server that speaks as Google's storage does."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    server = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
    port = free_port()
    for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        variables.setenv(name, f"http://127.0.0.1:{port}")
    variables.setenv("GOOGLE_CLOUD_PROJECT", "test")
    running = server.create_server("127.0.0.1", port, in_memory=True, default_bucket=NAME)
    running.start()
    yield f"gs://{NAME}"
    running.stop()


@pytest.fixture(params=["s3", "gs"])
def bucket(request) -> str:
    """A folder of its own in a bucket."""
    return f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}"


def train(root: Path, folder: Path, checkpoints: str, *flags: str, count: int = 1) -> None:
    command = [
        "-m", "jaxrl_llm.train", f"--config={root}/configs/sft.py:tiny", f"--config.output_dir={folder}",
        "--config.total_steps=4", "--config.checkpoint.every=2", f"--config.checkpoint.folder={checkpoints}",
        "--config.logging.backends=jsonl", "--config.eval.every=-1", *flags,
    ]  # fmt: skip
    alone = [{"JAXRL_PROCESS_COUNT": "1"}] if count == 1 else None
    ended = finish(start(count, folder.parent, command, alone), timeout=900)
    assert all(process.code == 0 for process in ended), "\n".join(process.err[-3000:] for process in ended)


def files(checkpoints: str) -> list[str]:
    """The files in a folder of a bucket, without its name."""
    system, path = fsspec.core.url_to_fs(checkpoints)
    system.invalidate_cache()
    return [name.removeprefix(f"{path}/") for name in system.find(path)]


@pytest.mark.slow
def test_a_run_goes_on_from_a_bucket(bucket, root, tmp_path, run_python):
    """A save that was interrupted is passed over, and the run then equals the uninterrupted one, bit for bit."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(root, whole, str(tmp_path / "local"))
    train(root, part, bucket)
    assert {name.split("/")[0] for name in files(bucket)} == {"2", "4"}
    system, path = fsspec.core.url_to_fs(bucket)
    system.rm(f"{path}/4/commit_success.txt")  # as if killed before all of it was there
    shutil.rmtree(part / "hf")
    lines = (part / "metrics.jsonl").read_text().splitlines()
    (part / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= 3))
    train(root, part, bucket)
    assert metrics(part / "metrics.jsonl") == metrics(whole / "metrics.jsonl")
    assert_same_tree(*(load_file(run / "hf/model.safetensors") for run in (whole, part)))
    assert "4/commit_success.txt" in files(bucket)
    export = ("-m", "jaxrl_llm", "export", f"--run={part}", "--step=2", f"--output={tmp_path / 'second'}")
    assert run_python(*export).returncode == 0
    assert (tmp_path / "second" / "model.safetensors").is_file()


@pytest.mark.slow
def test_processes_share_a_bucket(bucket, root, tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "other"
    train(root, whole, bucket, "--config.mesh.fsdp=2", "--config.mesh.data=1", count=2)
    assert {name.split("/")[2] for name in files(bucket) if "/state/ocdbt.process_" in name} == {
        "ocdbt.process_0", "ocdbt.process_1",
    }  # fmt: skip
    train(root, other, str(tmp_path / "local"), f"--config.checkpoint.resume={bucket}/2")
    one, two = metrics(whole / "metrics.jsonl"), metrics(other / "metrics.jsonl")
    assert [line["step"] for line in two if line["step"]] == [3, 4]
    for line in two:
        (same,) = [x for x in one if x["step"] == line["step"]]
        assert line["loss"] == pytest.approx(same["loss"], rel=1e-4)


def test_the_store_that_the_environment_names(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert s3_store("s3://b/a/c") == {"driver": "s3", "bucket": "b", "path": "a/c"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert s3_store("s3://b/a")["aws_region"] == "eu-west-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert s3_store("s3://b/a")["endpoint"] == "http://minio:9000"


@pytest.mark.parametrize(
    ("path", "says"), [("gs://b/run", "pip install gcsfs"), ("hdfs://b/run", "give a folder, gs:// or s3")]
)
def test_a_store_that_is_out_of_reach_is_named(monkeypatch, path, says):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=says):
        path_of(path)


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_named(monkeypatch):
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(ConfigError, match=r"s3://b/run, which does not answer: .*127\.0\.0\.1"):
        path_of("s3://b/run")


def test_orbax_takes_a_bucket_of_s3_for_a_bucket():
    """Its own answer is an error: the path is not absolute."""
    reach_s3()
    spec = tensorstore_utils.build_kvstore_tspec
    assert spec("s3://b/run/1/state", use_ocdbt=True)["base"]["driver"] == "s3"
    assert spec("gs://b/run/1/state", use_ocdbt=True)["base"]["driver"] == "gcs"
    assert spec("/b/run/1/state", use_ocdbt=True)["base"]["driver"] == "file"
