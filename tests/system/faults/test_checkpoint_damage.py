"""Checkpoints that are damaged, or cannot be written: each is named, and a good one is used or written in its place."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, from_json
from jaxrl_llm.config.flags import run
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.checkpoint import manager
from jaxrl_llm.training.checkpoint.manager import Checkpoints, find
from jaxrl_llm.training.checkpoint.orbax_manager import Keep
from jaxrl_llm.training.update import State
from tests.system.faults.equality import assert_same_run

STATE = State(jnp.zeros((), jnp.int32), {"w": jax.random.normal(jax.random.key(0), (64, 256))}, ())


def save(checkpoints: Checkpoints, *steps: int, **options) -> None:
    for step in steps:
        checkpoints.save(step, STATE, {"x": step}, **options)
    checkpoints.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Three checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(folder) as checkpoints:
        save(checkpoints, 1, 2, 3)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of them."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.glob("*/**/*") if path.is_file())


def test_every_flipped_bit_is_noticed(folder):
    chance = random.Random(0)
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert [checkpoints.damage(step) for step in (1, 2, 3)] == [None] * 3
        paths = files(folder / "3")
        assert len(paths) > 5 and max(path.stat().st_size for path in paths) > 10_000
        for path in paths:
            good = path.read_bytes()
            for _ in range(3):
                bad = bytearray(good or b" ")
                bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
                path.write_bytes(bad)
                assert str(path) in (checkpoints.damage(3) or "")
            path.write_bytes(good)
        assert checkpoints.damage(3) is None


def test_the_array_storage_alone_does_not_notice(folder):
    """Why there are hashes: without them other numbers are restored, in silence."""
    path = max(files(folder / "3"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with Checkpoints(folder, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(3, STATE, make_mesh(1, 1, 1))
        assert (np.asarray(restored.params["w"]) != np.asarray(STATE.params["w"])).any()
        assert "has changed since it was saved" in checkpoints.damage(3)


def test_a_state_is_restored_after_free(folder):
    like = jax.tree.map(jnp.copy, STATE)
    manager.free(like)
    assert like.params["w"].is_deleted()
    with Checkpoints(folder, read_only=True) as checkpoints:
        restored, host = checkpoints.restore(2, like, make_mesh(1, 1, 1))
    np.testing.assert_array_equal(restored.params["w"], STATE.params["w"])
    assert host == {"x": 2}


def truncate(step: Path) -> str:
    path = max(files(step), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-7])
    return "bytes"


def remove_a_file(step: Path) -> str:
    (step / "host/metadata").unlink()
    return "host/metadata is missing"


def remove_a_part(step: Path) -> str:
    shutil.rmtree(step / "state")
    return "is missing"


def remove_the_hashes(step: Path) -> str:
    (step / "hashes.json").unlink()
    return "hashes.json cannot be read"


def garble_the_hashes(step: Path) -> str:
    (step / "hashes.json").write_text("{")
    return "hashes.json cannot be read"


def empty_the_hashes(step: Path) -> str:
    (step / "hashes.json").write_text("{}")
    return "hashes.json cannot be read (it names no files"


HARMS = truncate, remove_a_file, remove_a_part, remove_the_hashes, garble_the_hashes, empty_the_hashes


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_passed_over(folder, harm):
    text = harm(folder / "3")
    with Checkpoints(folder) as checkpoints:
        step, problems = checkpoints.newest_intact()
        assert step == 2
        assert (
            len(problems) == 1 and problems[0].startswith("the checkpoint of step 3 is damaged") and text in problems[0]
        )
        with pytest.raises(ConfigError, match=r"step 3 is damaged.*there are also steps 1, 2"):
            checkpoints.check(3)
    assert find(folder)[1:] == (2, problems)
    with pytest.raises(ConfigError, match="step 3 is damaged"):  # what was asked for by name is not replaced
        find(folder / "3")
    assert find(folder / "1")[1] == 1


def test_a_run_may_be_named_by_a_number(folder):
    """As that of a job: it is no step."""
    for path in (folder.parent / "4711", folder.parent / "4712" / "checkpoints"):
        shutil.copytree(folder, path)
    assert [find(folder.parent / name)[1] for name in ("4711", "4712", "4711/2", "4712/2", "4712/checkpoints/2")] == [
        3, 3, 2, 2, 2,
    ]  # fmt: skip


def test_all_checkpoints_damaged_ends_the_run(folder):
    for step in (1, 2, 3):
        truncate(folder / str(step))
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ConfigError, match=r"no checkpoint in .* can be used: .*step 3.*step 1.*resume=never"):
            checkpoints.newest_intact()
        assert checkpoints.steps() == [1, 2, 3]


def test_what_is_kept(tmp_path):
    keep = Keep(newest=1, steps=4, best="reward")
    with Checkpoints(tmp_path, keep) as checkpoints:
        for step, reward in enumerate([0.1, 0.7, float("nan"), 0.3, 0.6, 0.2], 1):
            checkpoints.save(step, STATE, {}, metrics={"reward": reward, "loss": 1.0})
    with Checkpoints(tmp_path, keep) as checkpoints:  # what is known of them comes from the disk
        assert checkpoints.steps() == [2, 4, 6]  # the best, the one that 4 divides, the newest
        save(checkpoints, 7, metrics={"reward": 0.9})
        assert checkpoints.steps() == [4, 7]
        with pytest.raises(ConfigError, match=r"checkpoint\.best is 'reward', but step 8 has no such metric"):
            save(checkpoints, 8, metrics={"loss": 1.0})


def test_the_smallest_is_best(tmp_path):
    with Checkpoints(tmp_path, Keep(newest=1, best="eval/loss", best_mode="min")) as checkpoints:
        for step, loss in enumerate([0.5, 0.2, 0.4], 1):
            save(checkpoints, step, metrics={"eval/loss": loss})
        save(checkpoints, 4, metrics={"loss": 0.1})  # no evaluation at this step
        assert checkpoints.steps() == [2, 4]


@pytest.mark.parametrize("text", ['{"rew', "[]", ""])
def test_damaged_metrics_are_those_of_one_checkpoint(tmp_path, text):
    keep = Keep(newest=1, best="reward")
    with Checkpoints(tmp_path, keep) as checkpoints:
        save(checkpoints, 1, metrics={"reward": 0.5})
        save(checkpoints, 2, metrics={"reward": 0.1})
    (tmp_path / "1/metrics/metrics").write_text(text)
    with Checkpoints(tmp_path, keep) as checkpoints:
        assert checkpoints.newest_intact() == (2, [])
        (tmp_path / "2/metrics/metrics").write_text(text)
    with pytest.raises(ConfigError, match=r"no checkpoint .* can be used: .*step 2 is damaged: .*2/metrics/metrics"):
        find(tmp_path)
    with Checkpoints(tmp_path, keep) as checkpoints:
        save(checkpoints, 3, metrics={"reward": 0.3})
        assert checkpoints.steps() == [3]


def test_old_ones_are_kept_by_the_hour(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, Keep(newest=1, hours=1 / 3600)) as checkpoints:  # one a second
        save(checkpoints, 1, 2)
        subprocess.run(["sleep", "1.1"], check=True)
        save(checkpoints, 3, 4)
        assert checkpoints.steps() == [1, 3, 4]


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(request, tmp_path):
    """A disk of one megabyte, or of the parameter's size."""
    path = tmp_path / "disk"
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={getattr(request, 'param', '1m')}", "none", str(path)):
        pytest.skip("mounting a tmpfs takes the rights of root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_reported_and_tried_again(small_disk, monkeypatch):
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.05)
    with Checkpoints(small_disk / "checkpoints", Keep(newest=1)) as checkpoints:
        save(checkpoints, 1)
        assert checkpoints.warnings() == [] and not checkpoints.retry_due
        fill(small_disk / "filler")
        save(checkpoints, 2)
        (news,) = checkpoints.warnings()
        assert "the checkpoint of step 2 could not be written to" in news and "No space left on device" in news
        assert checkpoints.warnings() == []
        subprocess.run(["sleep", "0.1"], check=True)
        assert checkpoints.retry_due
        (small_disk / "filler").unlink()
        save(checkpoints, 3)
        assert not checkpoints.retry_due and checkpoints.warnings() == []
        assert checkpoints.steps() == [3] and checkpoints.damage(3) is None
        assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["3"]  # no remains


def test_a_failed_save_is_told_in_a_line(tmp_path, monkeypatch, capfd):
    """What is true is said: why it failed, and which checkpoint is there; Orbax's tracebacks are not shown."""
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.5)  # writes of the failed try end before the next
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    reason = rf"the checkpoint of step 2 could not be written to {tmp_path}/checkpoints: \[Errno 27\] File too large"
    there = rf"the newest checkpoint is of step 1, in {tmp_path}/checkpoints"
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(ConfigError, match=f"^{reason}; {there}; the trained model is in hf$"))
        stack.enter_context(checkpoints)
        save(checkpoints, 1)
        assert checkpoints.outcome() == f"the newest checkpoint is of step 1, in {tmp_path}/checkpoints"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            save(checkpoints, 2, final=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        told = checkpoints.warnings()
        assert len(told) == manager.FINAL_TRIES and told[-1].endswith("File too large")  # the last is not tried again
        assert "tries again" in told[0]
        checkpoints.exported = "hf"
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_error_has_what_is_saved_in_its_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])

    def fails(arguments):
        error = ConfigError("it failed")
        error.add_note("there is no checkpoint")
        raise error

    with pytest.raises(SystemExit):
        run(fails)
    assert capsys.readouterr().err == "error: it failed; there is no checkpoint\n"


def test_a_read_only_disk_keeps_its_checkpoint(small_disk, monkeypatch):
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.05)
    checkpoints = Checkpoints(small_disk / "checkpoints")
    save(checkpoints, 1)
    assert mount("-o", "remount,ro", str(small_disk))
    save(checkpoints, 2, final=True)  # which is tried again, in vain
    assert len(checkpoints.warnings()) == manager.FINAL_TRIES
    with pytest.raises(ConfigError, match=r"step 2 could not be written to .*[Rr]ead-only"), checkpoints:
        pass  # the end of the run
    assert find(small_disk / "checkpoints")[1:] == (1, [])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints cannot be kept in .*give another output_dir"):
        Checkpoints(tmp_path / "file" / "checkpoints")


@pytest.mark.slow
def test_a_run_goes_on_before_a_damaged_checkpoint(tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run.output_dir, tmp_path / "run")
    path = max(files(run / "checkpoints/2"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[99] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="step 2 is damaged: the content of"):
        jaxrl_llm.export(run, tmp_path / "exported")

    config = from_json((run / "config.json").read_text())
    config.output_dir = str(run)
    jaxrl_llm.train(config)
    assert "warning: the checkpoint of step 2 is damaged: the content of" in capsys.readouterr().err
    assert_same_run(tiny_run.output_dir, run)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ENOSPC, 2), (errno.EDQUOT, 2)])
def test_of_several_processes_a_save_that_failed_ends_the_run(tmp_path, monkeypatch, number, code):
    """A file system that fails once may work after a new start; one that is full needs somebody to make room."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 1, final=True)
    checkpoints._saving = 2
    monkeypatch.setattr(manager.jax, "process_count", lambda: 2)
    words = f"step 2 could not be written to .*{os.strerror(number)}; the newest checkpoint is of step 1, in "
    with pytest.raises(ConfigError, match=words) as raised:
        checkpoints._fail(OSError(number, os.strerror(number)))
    assert raised.value.code == code
