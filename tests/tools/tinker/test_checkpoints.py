"""The folder of saved runs: names, lists, times that end, and writes that fail."""

import datetime

import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.model import load_adapter
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker import checkpoints
from jaxrl_llm.tools.tinker.checkpoints import INFO, Place, Store, expiry, place_of
from jaxrl_llm.tools.tinker.training_run import TrainingRun, lora_config

RUN = "0123abcd:train:0"
INFOS = {"base_model": "embedded:sort", "user_metadata": {"a": 1}}


@pytest.fixture(scope="module")
def trained(sorter):
    """A run."""
    return TrainingRun(sorter, lora_config(1), 0)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def at(name: str, kind: str = "weights", run: str = RUN) -> Place:
    return Place(run, kind, name)


def in_days(days: float) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days)).isoformat()


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_folder_that_was_taken_over_is_not_written(tmp_path, trained):
    def check():
        raise ConfigError("taken over")

    with pytest.raises(ConfigError, match="taken over"):
        Store(tmp_path, check).save(at("a"), trained, INFOS)
    assert not list(tmp_path.iterdir())


def test_paths_name_places_and_are_those_of_places():
    for place in (at("a"), at("A_1.b-c", "sampler_weights"), at("000003", run="a1_-.:b")):
        assert place_of(place.path) == place


@pytest.mark.parametrize(
    "path",
    [
        None, 3, "", "a", "run/weights/a", f"tinker://{RUN}/weights", f"tinker://{RUN}/weights/", f"tinker://{RUN}//a",
        f"tinker://{RUN}/weights/..", f"tinker://{RUN}/weights/../x", f"tinker://{RUN}/weights/a/b", "tinker://../weights/a",
        f"tinker://{RUN}/tokenizer/a", f"tinker://{RUN}/weights/.a", f"tinker://{RUN}/weights/a\n", f"tinker://{RUN}/weights/a\\b",
        f"tinker://{RUN}/weights/{'a' * 129}", f"https://{RUN}/weights/a",
    ],
)  # fmt: skip
def test_other_paths_name_nothing(store, sorter, path):
    for call in (place_of, store.info, store.delete, lambda path: store.load(path, sorter)):
        with pytest.raises(BadRequestError, match=r"^path is .*; it takes tinker://RUN/weights/NAME or"):
            call(path)


@pytest.mark.parametrize("name", ["", "..", "../x", "../../../x", "a/b", "/tmp/x", ".a", "a b", "a\0", "a" * 129])
def test_names_that_leave_the_folder_are_refused(store, trained, name):
    with pytest.raises(BadRequestError, match=r"the name of weights is .*; it takes letters, digits"):
        store.save(at(name), trained, INFOS, overwrite=True)
    assert files(store.root.parent) == []


def test_a_taken_name_is_another_s_unless_it_is_overwritten(store, trained, sorter):
    store.save(at("a"), trained, {**INFOS, "number": 1})
    store.save(at("a", "sampler_weights"), trained, INFOS)  # another kind, and another run, have names of their own
    store.save(at("a", run="other"), trained, INFOS)
    with pytest.raises(BadRequestError, match=f"^tinker://{RUN}/weights/a exists already; give another name, or"):
        store.save(at("a"), trained, {**INFOS, "number": 2})
    assert store.info(at("a").path)["number"] == 1
    changed = TrainingRun(sorter, lora_config(1), 1)
    store.save(at("a"), changed, {**INFOS, "number": 2}, overwrite=True)
    assert store.info(at("a").path)["number"] == 2
    _, adapters, _ = store.load(at("a").path, sorter)
    for own, other in zip(jax.tree.leaves(changed.weights), jax.tree.leaves(adapters), strict=True):
        np.testing.assert_array_equal(own, other)
    assert len(store.all()) == 3


def test_the_newest_is_last(store, trained):
    for name in ("b", "a", "c"):
        store.save(at(name), trained, INFOS)
    store.save(at("d", "sampler_weights", "other"), trained, INFOS)
    assert [place.name for place, _ in store.all()] == ["b", "a", "c", "d"]
    assert [place.name for place, _ in store.all(RUN)] == ["b", "a", "c"]
    assert [place.name for place, _ in store.all("none")] == []
    store.save(at("b"), trained, INFOS, overwrite=True)
    assert [place.name for place, _ in store.all(RUN)] == ["a", "c", "b"]
    assert all(info["base_model"] == "embedded:sort" for _, info in store.all())


def test_what_is_shown(store, trained):
    store.save(at("a"), trained, {**INFOS, "expires_at": expiry(60)})
    store.save(at("b", "sampler_weights"), trained, INFOS)
    first, second = (store.shown(*each) for each in store.all())
    assert (first["checkpoint_id"], first["checkpoint_type"]) == ("weights/a", "training")
    assert (second["checkpoint_id"], second["checkpoint_type"]) == ("sampler_weights/b", "sampler")
    assert (first["tinker_path"], first["user_metadata"]) == (f"tinker://{RUN}/weights/a", {"a": 1})
    assert first["size_bytes"] > second["size_bytes"] > 1000  # the moments
    left = datetime.datetime.fromisoformat(first["expires_at"]) - datetime.datetime.fromisoformat(first["time"])
    assert 59 < left.total_seconds() <= 60
    assert second["expires_at"] is None


def test_what_is_deleted_is_gone(store, trained, sorter):
    for name in ("a", "b"):
        store.save(at(name), trained, INFOS)
    store.delete(at("a").path)
    for call in (store.info, store.delete, lambda path: store.load(path, sorter)):
        with pytest.raises(BadRequestError, match=f"there are no weights {at('a').path}") as caught:
            call(at("a").path)
        assert caught.value.status == 404
    assert [place.name for place, _ in store.all()] == ["b"]
    assert not (store.root / RUN / "weights" / "a").exists()


def test_there_is_nothing_where_nothing_was_saved(store):
    assert store.all() == []
    with pytest.raises(BadRequestError, match="there are no weights"):
        store.info(at("a").path)


@pytest.mark.parametrize("asked", ["all", "info", "load", "save"])
def test_what_is_over_is_deleted_whoever_asks(store, trained, sorter, asked):
    store.save(at("old"), trained, {**INFOS, "expires_at": in_days(-1)})
    store.save(at("young"), trained, {**INFOS, "expires_at": in_days(1)})
    if asked == "all":
        assert [place.name for place, _ in store.all()] == ["young"]
    elif asked == "save":  # the name is free
        store.save(at("old"), trained, INFOS)
        assert [place.name for place, _ in store.all()] == ["young", "old"]
        return
    else:
        with pytest.raises(BadRequestError, match="there are no weights"):
            store.info(at("old").path) if asked == "info" else store.load(at("old").path, sorter)
    assert [path.name for path in (store.root / RUN / "weights").iterdir()] == ["young"]
    store.load(at("young").path, sorter, moments=True)


@pytest.mark.parametrize("seconds", [0, -1, 1.5, "60", True, 2**31, 10**30])
def test_times_are_whole_seconds(seconds):
    with pytest.raises(BadRequestError, match="ttl_seconds is "):
        expiry(seconds)
    assert expiry(None) is None


def test_weights_to_sample_from_have_no_moments(store, trained, sorter):
    store.save(at("a", "sampler_weights"), trained, INFOS)
    path = at("a", "sampler_weights").path
    assert store.load(path, sorter)[2] is None
    with pytest.raises(BadRequestError, match="was saved to sample from, and has no optimizer state"):
        store.load(path, sorter, moments=True)


def test_a_write_that_fails_leaves_what_was_there(store, trained, sorter):
    store.save(at("a"), trained, {**INFOS, "number": 1})
    before = files(store.root)
    for name in ("a", "b"):
        with pytest.raises(TypeError):  # the last file that is written
            store.save(at(name), trained, {"user_metadata": object()}, overwrite=True)
        spent = TrainingRun(sorter, lora_config(1), 0)
        jax.tree.leaves(spent.adam.nu)[-1].delete()
        with pytest.raises(RuntimeError, match="deleted"):  # the moments, behind the adapters
            store.save(at(name), spent, INFOS, overwrite=True)
        jax.tree.leaves(spent.weights)[-1].delete()
        with pytest.raises(RuntimeError, match="deleted"):
            store.save(at(name), spent, INFOS, overwrite=True)
        assert files(store.root) == before
    assert store.info(at("a").path)["number"] == 1
    assert [path.name for path in (store.root / RUN / "weights").iterdir()] == ["a"]


def test_a_folder_that_cannot_be_made_is_an_error(store, trained):
    store.root.mkdir()
    (store.root / RUN).write_text("in the way")
    with pytest.raises(OSError, match=RUN):
        store.save(at("a"), trained, INFOS)
    assert files(store.root) == [RUN]
    assert store.all() == []


def test_what_a_killed_server_left_is_not_listed_and_goes(store, trained, sorter):
    """When the next one starts; what it was about to write over is there again."""
    store.save(at("a.1"), trained, INFOS)
    store.save(at("b"), trained, INFOS)
    weights = store.root / RUN / "weights"
    for name in (".c.partial-17", ".b.partial-17"):
        (weights / name).mkdir()
        (weights / name / INFO).write_bytes((weights / "b" / INFO).read_bytes())
    (weights / "a.1").rename(weights / ".a.1.earlier-17")  # the new one was to follow
    assert [place.name for place, _ in store.all()] == ["b"]
    again = Store(store.root)
    assert [place.name for place, _ in again.all()] == ["a.1", "b"]
    assert sorted(path.name for path in weights.iterdir()) == ["a.1", "b"]
    again.load(at("a.1").path, sorter, moments=True)


def test_weights_that_are_written_over_meanwhile_are_not_mixed(store, trained, sorter, monkeypatch):
    """Adapters of one and moments of the other."""
    store.save(at("a"), trained, INFOS)

    def meanwhile(*arguments):
        found = load_adapter(*arguments)
        store.save(at("a"), trained, INFOS, overwrite=True)
        return found

    monkeypatch.setattr(checkpoints, "load_adapter", meanwhile)
    with pytest.raises(BadRequestError, match="weights/a was written over while it was read; load it again"):
        store.load(at("a").path, sorter, moments=True)
