"""The lock on a run's folder: one run at a time, and none in the way of the next after its process is gone."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.runtime import lock
from jaxrl_llm.training.runtime.lock import RunLock


def left_behind(folder, **changed):
    """Leaves a lock of this process in the folder, with other entries as `changed` says."""
    entries = {**RunLock(folder)._own, "beat": "000000000003", **changed}
    folder.mkdir(exist_ok=True)
    (folder / lock.LOCK).write_text(json.dumps(entries) + "\n")


@pytest.fixture
def patience(monkeypatch):
    """Tenths of seconds in place of seconds."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.5)


@pytest.fixture
def dead_pid():
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_a_second_run_is_refused_by_name(tmp_path):
    with RunLock(tmp_path / "run"):
        words = (
            rf"output_dir .*run is in use by another run, process {os.getpid()} on \S+, since \d{{4}}-\d\d-\d\d \d\d:"
        )
        with pytest.raises(ConfigError, match=words), RunLock(tmp_path / "run"):
            pass
        with RunLock(tmp_path / "other"):
            pass
    with RunLock(tmp_path / "run"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_a_run_that_was_killed_is_no_obstacle(tmp_path, capsys, dead_pid):
    left_behind(tmp_path, pid=dead_pid)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / lock.LOCK).read_text())["pid"] == os.getpid()
    assert time.monotonic() - began < lock.WATCH_SECONDS
    assert re.search(rf"was left locked by process {dead_pid} on .*, which is gone; this run", capsys.readouterr().err)


def test_a_process_that_nobody_has_waited_for_is_gone(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # it ends now, and stays a zombie
    started = lock._start_of(process.pid)
    while lock._start_of(process.pid) is not None:
        time.sleep(0.01)
    left_behind(tmp_path, pid=process.pid, started=started)
    with RunLock(tmp_path):
        pass
    process.wait()


def test_another_process_with_the_same_number_is_not_the_holder(tmp_path, capsys):
    left_behind(tmp_path, started="17")
    with RunLock(tmp_path):
        assert "which is gone" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [{"host": "elsewhere"}, {"boot": "another"}, {"namespace": "pid:[1]"}])
def test_what_cannot_be_known_is_watched(tmp_path, patience, capsys, changed):
    left_behind(tmp_path, **changed)
    with RunLock(tmp_path):
        assert "waiting 0.5 s for a sign of life" in capsys.readouterr().err

    left_behind(tmp_path, **changed, beat="000000000004")
    end = threading.Event()

    def beats():
        while not end.wait(0.05):
            left_behind(tmp_path, **changed, beat=f"{time.monotonic_ns():020d}")

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="is in use by another run"), RunLock(tmp_path):
            pass
    finally:
        end.set()
        thread.join()


def test_an_old_beat_needs_no_watch(tmp_path, capsys):
    left_behind(tmp_path, host="elsewhere")
    old = time.time() - 3600
    os.utime(tmp_path / lock.LOCK, (old, old))
    with RunLock(tmp_path):
        assert "waiting" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 1}'])
def test_a_lock_that_cannot_be_read(tmp_path, patience, text):
    (tmp_path / lock.LOCK).write_text(text)
    with RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint\.folder .*file/run cannot be written: .*Not a directory"):
        RunLock(tmp_path / "file" / "run", "checkpoint.folder").__enter__()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"output_dir .* cannot be written: .*File too large"):
            RunLock(tmp_path / "run").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "run").iterdir())  # an empty lock would be watched for a while


def test_it_beats_and_notices_that_it_was_taken(tmp_path, patience):
    with RunLock(tmp_path) as held:
        before = (tmp_path / lock.LOCK).read_text()
        time.sleep(0.3)
        after = (tmp_path / lock.LOCK).read_text()
        assert before != after and len(before) == len(after)
        held.check()
        left_behind(tmp_path, host="elsewhere", pid=7)
        time.sleep(0.3)
        with pytest.raises(ConfigError, match=r"was taken over by process 7 on elsewhere.*writes nothing more"):
            held.check()
    assert (tmp_path / lock.LOCK).exists()  # which is the other's


def test_of_two_that_take_over_one_succeeds(tmp_path, dead_pid):
    left_behind(tmp_path, pid=dead_pid)
    stale = (tmp_path / lock.LOCK).read_text()
    with RunLock(tmp_path):
        late = RunLock(tmp_path)
        assert not late._remove(stale)  # it judged the lock before the other one took it
        with pytest.raises(ConfigError, match="in use"):
            late.__enter__()


def test_in_a_bucket(tmp_path, patience, monkeypatch, capsys):
    """The same without exclusive creation, appends and renames."""
    monkeypatch.setattr(lock, "is_remote", lambda _: True)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.01)
    with RunLock(tmp_path, "checkpoint.folder") as held:
        time.sleep(0.2)
        assert held._beats > 1
        with (
            pytest.raises(ConfigError, match=r"checkpoint\.folder .* is in use"),
            RunLock(tmp_path, "checkpoint.folder"),
        ):
            pass
    left_behind(tmp_path, host="elsewhere")
    with RunLock(tmp_path):
        assert "which is gone" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
