"""Files by which processes that only sample and learners meet: whole or absent, of this start, and bit for bit."""

import errno
import os
import resource
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.background import in_thread
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.processes import AgreedError, join
from jaxrl_llm.models.files.weight_changes import ENCODING
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts import file_queue, rollout_files, sampler
from jaxrl_llm.training.rollouts.experience import pack
from jaxrl_llm.training.rollouts.file_queue import FileQueue
from jaxrl_llm.training.rollouts.rollout_files import (
    Heartbeat,
    HeartbeatReader,
    Rendezvous,
    policy_changes,
    policy_on_host,
    policy_params,
    read_facts,
    read_file,
    read_policy,
    start_learners,
    write_file,
)
from jaxrl_llm.training.runtime.preemption import Preempted
from tests.training.rollouts.test_rollout_queue import MESH, rollouts_of


class Numbers:
    """A pipeline of batches that are numbered."""

    def __init__(self):
        self.drawn = 0

    def __next__(self):
        self.drawn += 1

    def get_state(self):
        return {"position": 2 * self.drawn}


def queue_of(folder: Path, staleness: int = 1, seconds: float = 20.0, steps: int = 4) -> FileQueue:
    rendezvous = Rendezvous(folder, 2, seconds, seconds)
    publish = lambda params: {"w": jnp.full(2, params, jnp.bfloat16)}  # noqa: E731
    return FileQueue(rendezvous, staleness, steps, publish, (), Numbers(), {"seed": 0}, MESH, Stopwatch())


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, {"a": 1}, b"one\ntwo")
    assert read_file(path) == ({"a": 1}, b"one\ntwo") and [*tmp_path.iterdir()] == [path]

    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout_files.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, {"a": 2}, b"three")
    assert read_file(path) == ({"a": 1}, b"one\ntwo")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="file is damaged: start the run again"):
        read_file(path)


def test_parts_of_a_file_are_read_alone(tmp_path):
    path, parts = tmp_path / "file", [b"one\n", b"", b"three"]
    write_file(path, {"a": 1}, parts)
    assert [read_file(path, number) for number in range(3)] == [({"a": 1}, part) for part in parts]
    path.write_bytes(path.read_bytes()[:-1])
    assert read_file(path, 0)[1] == b"one\n"
    for number in (2, 3):
        with pytest.raises(ConfigError, match="file is damaged"):
            read_file(path, number)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """NFS tells a reader of the file before that its handle is stale."""
    opened, stale = Path.open, [OSError(errno.ESTALE, "Stale file handle")] * 2

    def open_or_fail(path, *mode):
        if stale:
            raise stale.pop()
        return opened(path, *mode)

    write_file(tmp_path / "learner.json", {"number": 2})
    monkeypatch.setattr(Path, "open", open_or_fail)
    assert read_facts(tmp_path / "learner.json") == {"number": 2}


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch, caplog):
    """What was written of the file does not keep the disk full, and another error is raised at once."""
    path, synced, room = tmp_path / "file", os.fsync, [0, 0, 1]

    def fsync(number):
        assert [*tmp_path.iterdir()] == [tmp_path / f".file.{rollout_files.OWN}"]
        if not room.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(number)

    monkeypatch.setattr(rollout_files, "ROOM_SECONDS", 0.01)
    monkeypatch.setattr(rollout_files.os, "fsync", fsync)
    write_file(path, {"a": 1}, b"one", wait_seconds=20)
    assert read_file(path) == ({"a": 1}, b"one") and caplog.text.count("No space left on device; waiting 20 s") == 1
    path.unlink()
    room[:] = [0] * 1000
    with pytest.raises(ConfigError, match=f"{path} cannot be written: No space left on device; make room"):
        write_file(path, {"a": 1}, b"one", wait_seconds=0.1)
    assert not [*tmp_path.iterdir()] and len(room) < 999


def test_a_policy_keeps_every_bit():
    params = {"a": {"kernel": jax.random.normal(jax.random.key(0), (3, 5), jnp.bfloat16)}, "scale": jnp.arange(4.0)}
    arrays = policy_on_host(params)
    got = policy_params(arrays, jax.tree.map(jnp.zeros_like, params))
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert got["a"]["kernel"].dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match="has other parameters than the model that this process has loaded"):
        policy_params(arrays, {"scale": params["scale"]})


def bits(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in arrays.items()}


def test_changes_of_a_policy_are_those_of_its_bits(tmp_path):
    """Of many numbers the array; -0 is not 0, and nan is the same nan."""
    one = {
        "few": np.linspace(-1, 1, 400).astype(jnp.bfloat16).reshape(20, 20),
        "all": np.arange(100, dtype=np.float32),
        "none": np.full((3, 3), np.nan, np.float32),
        "int8": np.arange(100, dtype=np.int8),
    }
    one["few"][0, 0] = 0.0
    two = {name: x.copy() for name, x in one.items()}
    two["few"][0, 0], two["few"][19, 19], two["int8"][7] = -0.0, np.nan, -5
    two["all"] += 1
    index, payload, changed = policy_changes(two, one)
    few, all_, none, int8 = (entry[3] for entry in index)
    assert 0 < few < 60 and (all_, none) == (-1, 0) and 0 < int8 < 40 and changed == 103
    assert len(payload) == few + 400 + int8
    three = {name: x.copy() for name, x in two.items()}
    three["few"][5, 5] = 7
    before = bits(one)
    for name, base, (arrays, held) in (("a", "", (one, {})), ("b", "a", (two, one)), ("c", "b", (three, two))):
        index, payload, _ = policy_changes(arrays, held)
        write_file(tmp_path / name, {"arrays": index, "base": base, "encoding": ENCODING}, payload)
    for held, arrays in (("", {}), ("a", one), ("b", two), ("of another start", three)):
        read = read_policy(tmp_path / "c", str(tmp_path / held) if len(held) == 1 else held, arrays)[1]
        assert bits(read) == bits(three) and {x.dtype for x in read.values()} == {x.dtype for x in one.values()}
    assert bits(one) == before
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:-1])
    assert bits(read_policy(tmp_path / "c", str(tmp_path / "b"), two)[1]) == bits(three)  # it need not be read
    with pytest.raises(ConfigError, match="b is damaged"):
        read_policy(tmp_path / "c", "", {})
    with pytest.raises(ConfigError, match="c changes another policy than b: few has another checksum"):
        read_policy(tmp_path / "c", str(tmp_path / "b"), three)
    write_file(tmp_path / "d", {"arrays": index, "base": "c"}, payload)  # as earlier versions wrote them
    with pytest.raises(ConfigError, match=r"d is encoded as None, and what can be read is .*xor.*: start all"):
        read_policy(tmp_path / "d", str(tmp_path / "c"), three)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_policies_are_kept_as_long_as_one_is_made_of_them(tmp_path, monkeypatch, staleness):
    """One of two samplers begins anew with each batch, and finds all files that its policy is made of; others go."""
    monkeypatch.setattr(file_queue, "WHOLE_EVERY", 3)
    queue = queue_of(tmp_path, staleness, steps=12)
    queue._publish = lambda version: {"w": jnp.zeros(64, jnp.bfloat16).at[version].set(1)}
    files, errors = [], []

    def answer():
        held = "", {}
        made, newest = 0, [0, 0]
        signs = [Heartbeat(tmp_path / f"sampler_{index}.json", 20.0) for index in (0, 1)]
        while made < 12:
            for index in (0, 1) if queue._folder != tmp_path else ():
                if job := sampler._job(queue._folder, index, 2, newest[index]):
                    path, step = job
                    version = int(path.name.split("_")[1])
                    _, arrays = read_policy(path, *held) if index else read_policy(path, "", {})
                    held = (str(path), arrays) if index else held
                    if np.flatnonzero(arrays["['w']"]) != [version]:
                        errors.append((step, arrays))
                    files.append(len([*queue._folder.glob("policy_*")]))
                    batch = pack([rollouts_of(step, version)]).tobytes()
                    write_file(path.with_name(f"batch_{step:08d}"), {"version": version, "seconds": {}}, batch)
                    signs[index].update(folder=path.parent.name, made=step)
                    newest[index], made = step, made + 1
            time.sleep(0.01)

    thread = threading.Thread(target=answer, daemon=True)
    with start_learners(queue._rendezvous), queue, jax.set_mesh(MESH):
        thread.start()
        for step in range(1, 13):
            _, metrics = queue.take(step - 1, step - 1, None)
            if "weights/changed_share" in metrics:
                assert metrics["weights/changed_share"] == 2 / 64
                assert 0 < metrics["weights/written_share"] < 0.4
        thread.join()
    assert not errors and max(files) <= 3 + staleness + 1


def test_batches_are_asked_for_and_taken_in_order(tmp_path):
    """Two samplers answer, the second first; a checkpoint holds what is made and not trained on yet."""
    (tmp_path / "old").mkdir()
    queue = queue_of(tmp_path)

    def answer():
        while not (folder := [x for x in tmp_path.iterdir() if x.is_dir() and x.name != "old"]):
            time.sleep(0.01)
        made, newest = [], [0, 0]
        signs = [Heartbeat(tmp_path / f"sampler_{index}.json", 20.0) for index in (0, 1)]
        while len(made) < 4:
            for index in (1, 0):
                if job := sampler._job(folder[0], index, 2, newest[index]):
                    path, step = job
                    version, first, _ = map(int, path.name.split("_")[1:])
                    header, arrays = read_policy(path, "", {})
                    assert header["pipeline"]["position"] == 2 * (first - 1) and step % 2 == index
                    np.testing.assert_array_equal(arrays["['w']"], [version, version])
                    batch = pack([rollouts_of(step, version)]).tobytes()
                    write_file(path.with_name(f"batch_{step:08d}"), {"version": version, "seconds": {}}, batch)
                    signs[index].update(folder=path.parent.name, made=step)
                    made.append(step)
                    newest[index] = step
            time.sleep(0.01)

    thread = threading.Thread(target=answer, daemon=True)
    with start_learners(queue._rendezvous), queue, jax.set_mesh(MESH):
        assert not (tmp_path / "old").exists()
        thread.start()
        for step in range(1, 5):
            rollouts, metrics = queue.take(step - 1, step - 1, None)
            assert (rollouts.rollout.tokens[0, 0], rollouts.version) == (step, max(0, step - 2))
            assert metrics["rollout/age"] == min(step - 1, 1)
            if step == 2:
                arrays = queue.get_arrays()
        thread.join()
        assert read_facts(queue._folder / "jobs.json")["taken"] == 4
        assert {path.name.partition("_")[0] for path in queue._folder.iterdir()} == {"jobs.json", "policy"}
    assert read_facts(queue._folder / "jobs.json")["end"] == {"code": 0, "error": ""}
    again = queue_of(tmp_path)
    again.restore(arrays)

    def go_on():
        with start_learners(again._rendezvous), again, jax.set_mesh(MESH):
            for reader in again._readers:
                reader._rendezvous = again._rendezvous._replace(start_seconds=0.0)
            assert again.take(2, 2, None)[0].version == 1  # of the checkpoint
            again.take(3, 3, None)

    with pytest.raises(ConfigError, match=r"sampler 0 of 2.* step 4.* no sign of life"):
        go_on()
    end = read_facts(again._folder / "jobs.json")["end"]
    assert end["code"] == 1 and "sampler 0 of 2" in end["error"]  # a lost machine is no error of the user's


def test_no_name_is_looked_for_before_it_is_told(tmp_path, monkeypatch):
    """A client of NFS would believe for up to a minute that it is not there, once it was not found."""
    queue, names = queue_of(tmp_path), ("stat", "exists", "is_file", "open", "read_bytes")
    looked, told = [], threading.Event()
    for name in names:
        of_path = getattr(Path, name)

        def noting(path, *given, of_path=of_path, **more):
            if path.name.startswith("batch_") and not told.is_set():
                looked.append(path)
            return of_path(path, *given, **more)

        monkeypatch.setattr(Path, name, noting)

    def answer():
        time.sleep(0.5)
        sign = Heartbeat(tmp_path / "sampler_1.json", 20.0)
        sign.update(folder="of another start", made=9)
        time.sleep(0.5)
        told.set()
        batch = pack([rollouts_of(1, 0)]).tobytes()
        write_file(queue._folder / "batch_00000001", {"version": 0, "seconds": {}}, batch)
        sign.update(folder=queue._folder.name, made=1)

    with start_learners(queue._rendezvous), queue, jax.set_mesh(MESH):
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert queue.take(0, 0, None)[0].rollout.tokens[0, 0] == 1
        thread.join()
    assert not looked


@pytest.mark.parametrize("taken", [False, True])
def test_a_sampler_that_is_started_again(tmp_path, monkeypatch, taken):
    """It tells the batch that the one before it made, and makes none that is taken while it looks for it."""
    rendezvous, config, found_one = Rendezvous(tmp_path, 1, 20.0, 2.0), default(), threading.Event()
    parts = types.SimpleNamespace(mesh=MESH, rewards=load_rewards(len), copy_policy=lambda params: params)
    model = types.SimpleNamespace(params={}, net=types.SimpleNamespace(config=types.SimpleNamespace(frozen=())))
    setup = types.SimpleNamespace(model=model, stopwatch=Stopwatch(), environments=None)
    monkeypatch.setattr(sampler, "build_producer", lambda _: (types.SimpleNamespace(worker=parts), setup))
    monkeypatch.setattr(sampler, "_check_settings", lambda *_: None)
    queue = FileQueue(rendezvous, 0, 1, lambda x: {}, (), Numbers(), {}, MESH, Stopwatch())
    batch, sign, find = "batch_00000001", Heartbeat(tmp_path / "sampler_0.json", 20.0), sampler._job

    def find_and_take(folder, *place):
        found = find(folder, *place)
        if taken and found is not None:  # after the first look
            queue._write_jobs(taken=1)
            (queue._folder / batch).unlink(missing_ok=True)
        if found is not None:
            found_one.set()
        return found

    monkeypatch.setattr(sampler, "_job", find_and_take)
    with start_learners(rendezvous), queue, jax.set_mesh(MESH):
        queue._policies.append((1, queue._folder / "policy_00000000_00000001_00000001", ""))
        write_file(queue._folder / batch, {"version": 0, "seconds": {}}, pack([rollouts_of(1, 0)]).tobytes())
        queue._write_jobs()
        done = in_thread(lambda: sampler._sample(config, 0, rendezvous, sign), "sampler")
        assert found_one.wait(20)
        if not taken:
            assert queue._read(1).rollout.tokens[0, 0] == 1
        time.sleep(0.3)
    assert done.result(20) is None
    assert read_facts(tmp_path / "sampler_0.json").get("made") == (None if taken else 1)


def test_a_full_disk_is_named(tmp_path):
    queue, limits = queue_of(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    with start_learners(queue._rendezvous), queue, jax.set_mesh(MESH):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(ConfigError, match=rf"output_dir {tmp_path}/.* cannot be written: .*File too large"):
                queue.take(0, 0, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_takes_the_place_of_no_other_error(tmp_path, monkeypatch):
    """Samplers are not told the end then; they see that the learners are silent."""
    queue = queue_of(tmp_path)

    def fsync(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail():
        with start_learners(queue._rendezvous), queue:
            monkeypatch.setattr(rollout_files.os, "fsync", fsync)
            raise ValueError("its own")

    began = time.monotonic()
    with pytest.raises(ValueError, match="its own"):
        fail()
    assert time.monotonic() - began < 15 and "end" not in read_facts(queue._folder / "jobs.json")


@pytest.mark.parametrize(("error", "code"), [(ValueError("no judge"), 1), (ConfigError("no judge"), 2)])
def test_a_sampler_tells_its_error(tmp_path, error, code):
    queue = queue_of(tmp_path)

    def fail():
        with Heartbeat(tmp_path / "sampler_1.json", 10):
            raise error

    def take():
        with start_learners(queue._rendezvous), queue, jax.set_mesh(MESH):
            with pytest.raises(type(error), match="no judge"):
                fail()
            queue.take(0, 0, None)

    with pytest.raises(ConfigError, match=rf"sampler 1 of 2.*{type(error).__name__}: no judge") as raised:
        take()
    assert raised.value.code == code
    assert not (tmp_path / "sampler_1.json").exists()  # the next start is not told of it


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("another seed"), 2), (Preempted(None, "before the first step"), 143)]
)
def test_learners_that_fail_before_their_queue_opens_end_samplers(tmp_path, monkeypatch, error, code):
    """They have written no end of the queue then, and a sampler need not wait until it takes them for lost."""
    parts = types.SimpleNamespace(mesh=MESH, rewards=load_rewards(len), copy_policy=lambda params: params)
    model = types.SimpleNamespace(params={}, net=types.SimpleNamespace(config=types.SimpleNamespace(frozen=())))
    setup = types.SimpleNamespace(model=model, stopwatch=Stopwatch(), environments=None)
    made = types.SimpleNamespace(worker=parts), setup
    rendezvous, config = Rendezvous(tmp_path, 1, 20.0, 20.0), default()

    def build(config):  # learners fail while the sampler loads its model
        with pytest.raises(type(error)), start_learners(rendezvous):
            raise error
        return made

    monkeypatch.setattr(sampler, "build_producer", build)
    sign = Heartbeat(tmp_path / "sampler_0.json", 20.0)
    with pytest.raises(AgreedError, match=rf"the learners have ended: {type(error).__name__}") as ended:
        sampler._sample(config, 0, rendezvous, sign)
    assert ended.value.code == code


def test_signs_of_life(tmp_path):
    rendezvous, path = Rendezvous(tmp_path, 1, 0.0, 0.2), tmp_path / "learner.json"
    with Heartbeat(path, 0.2):
        pass
    reader = HeartbeatReader(path, rendezvous)
    assert not reader.look() and not reader.seen  # it is of a process that is gone
    with Heartbeat(path, 0.2):
        for _ in range(5):
            assert reader.look() and reader.seen
            time.sleep(0.1)
    reader.look()
    time.sleep(0.3)
    assert not reader.look()


def test_what_needs_the_batches_of_others_is_refused():
    refused = {
        "algorithm.dynamic_sampling": True,
        "rollout.devices": 1,
        "data.curriculum_easy": 0.9,
        "teacher.context": "success",
    }
    for key, value in refused.items():
        config = default()
        config.rollout.processes, config.teacher.path = 2, "self" if key.startswith("teacher.") else None
        config.update_from_flattened_dict({key: value})
        with pytest.raises(ConfigError, match=rf"rollout\.processes is 2, but {key} is .*: set the one to 0"):
            validate(config)


def test_a_sampler_is_alone_on_its_slice(monkeypatch):
    """GKE describes the slices of a job as parts of one program."""
    monkeypatch.setattr(processes, "_roles", [])
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    config = default()
    config.processes.coordinator, config.processes.count, config.processes.index = "localhost:1", 3, 2
    join(config, 2)
    assert processes.sampler() == 1 and "MEGASCALE_NUM_SLICES" not in os.environ


def test_roles_need_places():
    config = default()
    with pytest.raises(ConfigError, match=r"rollout\.processes is 2, but this process is not told its place"):
        join(config, 2)
    config.processes.coordinator, config.processes.count, config.processes.index = "localhost:1", 2, 1
    with pytest.raises(ConfigError, match=r"rollout\.processes is 2, but the run has 2 processes"):
        join(config, 2)
