"""Published weights: what a version holds, that patches give the weights of a full one, and what is refused by name."""

import dataclasses
import json
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import LoraConfig, adapters_of, combine
from jaxrl_llm.models.files.weight_changes import ENCODING
from jaxrl_llm.models.files.weight_versions import LocalCheckpoint, PatchError, Publisher, publisher
from jaxrl_llm.models.model import add_adapters, file_tensors, load_model, save_hf

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model():
    return load_model("embedded:sort", "float32")


@pytest.fixture
def bucket():
    """A folder behind a URL."""
    yield "memory://bucket/policy"
    store = fsspec.filesystem("memory")
    if store.exists("/bucket"):
        store.rm("/bucket", recursive=True)


def moved(model, step: int, share: float = 0.02):
    """The model with other numbers in this share of its weights."""
    rng = np.random.default_rng(step)

    def move(x):
        return jnp.where(rng.random(x.shape) < share, x * (1 + 2.0**-6), x)

    return dataclasses.replace(model, params=jax.tree.map(move, model.params))


def tensors(folder: str | Path) -> dict[str, bytes]:
    """The bytes of each tensor of a folder, by safetensors' own reader."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118
    return found


def saved(model, folder: Path, dtype: str = "bfloat16") -> dict[str, bytes]:
    save_hf(model, folder, dtype, overwrite=True)
    return tensors(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("url", [False, True], ids=["folder", "URL"])
def test_patches_give_the_weights_bit_for_bit(model, tmp_path, url, bucket):
    """Each version, taken in turn, is what `save_hf` writes; one of all weights leaves none of those before it."""
    folder = bucket if url else str(tmp_path / "policy")
    publish, local = Publisher(folder), LocalCheckpoint()
    shares = []
    for step in range(1, 7):
        policy = moved(model, step, 0.02 if step != 3 else 0.0)
        path = publish.publish(policy, "bfloat16", full_every=4)
        assert path == f"{folder}/weight_v{step:06d}"
        taken = local.take(path)
        assert tensors(taken) == saved(policy, tmp_path / "expected")
        assert (Path(taken) / "config.json").read_bytes() == (tmp_path / "expected" / "config.json").read_bytes()
        shares.append((publish.metrics.get("weights/changed_share"), publish.metrics["weights/written_share"]))
        if step == 4:
            there = fsspec.url_to_fs(folder)[0].ls(fsspec.url_to_fs(folder)[1], detail=False)
            assert len(there) == 4
    assert [changed is None for changed, _ in shares] == [True, False, False, False, True, False]
    assert [written for changed, written in shares if changed is None] == [1.0, 1.0]
    assert 0.03 < shares[1][0] < 0.05  # both steps moved two in a hundred
    assert 0 < shares[1][1] < 0.2
    fs, root = fsspec.url_to_fs(folder)
    assert sorted(name.rpartition("/")[2] for name in fs.ls(root, detail=False)) == ["weight_v000005", "weight_v000006"]
    local.clear()
    assert not Path(taken).exists()


def test_the_layout_is_the_public_one(model, tmp_path):
    """One number that changes: the bytes of the files, and the way to apply them that slime's page describes."""
    zstandard = pytest.importorskip("zstandard")
    publish = Publisher(str(tmp_path))
    old = tensors(publish.publish(model, "bfloat16", 9))
    params = jax.tree.map(lambda x: x, model.params)
    weight = params["embed"]["weight"].astype(jnp.bfloat16)
    params["embed"]["weight"] = weight.at[3, 5].set(jnp.nextafter(weight[3, 5], jnp.bfloat16(9))).astype(jnp.float32)
    path = Path(publish.publish(dataclasses.replace(model, params=params), "bfloat16", 9))
    assert names(path) == ["model-00001-of-00001.safetensors", INDEX]
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"] == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    ((name, file),) = index["weight_map"].items()
    with safe_open(path / file, "numpy") as opened:
        packed, metadata = opened.get_tensor(name), opened.metadata()
    change = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed.tobytes()), np.uint8)
    new = np.frombuffer(old[name], np.uint8) ^ change
    place = 2 * (3 * weight.shape[1] + 5)
    assert set(np.flatnonzero(change)) <= {place, place + 1} and change.any()
    assert metadata == {name: xxhash.xxh3_128_hexdigest(new)}
    assert new.view(jnp.bfloat16).reshape(weight.shape)[3, 5] == params["embed"]["weight"][3, 5]
    assert publish.metrics["weights/changed_share"] == pytest.approx(1 / sum(len(x) // 2 for x in old.values()))


def test_what_is_published_is_what_is_saved(model, tmp_path):
    """With adapters the merged matrices, and in another type these numbers: a patch of one type is of no other."""
    adapted = add_adapters(model, LoraConfig(4, 8.0, targets=("q", "v")), jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.01 if x.ndim else x, adapters_of(adapted.params))
    adapted = dataclasses.replace(adapted, params=combine(model.params, params))
    assert {name: x.tobytes() for name, x in file_tensors(adapted, "bfloat16")} == saved(adapted, tmp_path / "saved")
    publish, local = Publisher(str(tmp_path / "policy")), LocalCheckpoint()
    for dtype in ("bfloat16", "float16", "float16", "float32"):
        path = publish.publish(adapted, dtype, 9)
        assert tensors(local.take(path)) == saved(adapted, tmp_path / "saved", dtype)
        assert ("weights/changed_share" in publish.metrics) == path.endswith("3")
    path = publish.publish(model, "", 9)  # another net, in the type of its parameters
    assert tensors(local.take(path)) == saved(model, tmp_path / "saved", "float32")
    assert "weights/changed_share" not in publish.metrics


def test_a_patch_of_other_weights_is_refused(model, tmp_path):
    publish, local = Publisher(str(tmp_path / "policy")), LocalCheckpoint()
    paths = [publish.publish(moved(model, step), "bfloat16", 9) for step in range(3)]
    with pytest.raises(
        PatchError, match=r"weight_v000002 is a patch of version 1, but no version is held here: publish"
    ):
        local.take(paths[1])
    local.take(paths[0])
    with pytest.raises(PatchError, match=r"weight_v000003 is a patch of version 2, but version 1 of .*policy is held"):
        local.take(paths[2])
    local.take(paths[1])  # the refusal changed nothing
    elsewhere = tmp_path / "elsewhere" / "weight_v000003"
    elsewhere.parent.mkdir()
    Path(paths[2]).rename(elsewhere)
    with pytest.raises(PatchError, match=r"is a patch of version 2, but version 2 of .*policy is held"):
        local.take(str(elsewhere))
    assert local.take("embedded:sort") == "embedded:sort"  # whose weights are then those of the server
    elsewhere.rename(paths[2])
    with pytest.raises(PatchError, match="but no version is held"):
        local.take(paths[2])
    path = publish.publish(moved(model, 3), "bfloat16", 9, full=True)
    assert tensors(local.take(path)) == saved(moved(model, 3), tmp_path / "expected")


DAMAGE = {
    "lost": lambda path: (path / "model-00001-of-00001.safetensors").unlink(),
    "short": lambda path: shorten(path / "model-00001-of-00001.safetensors"),
    "base": lambda path: edit(path, version="000002"),  # other weights than those it was made of
    "tensors": lambda path: edit(path, lm_head="model-00001-of-00001.safetensors"),
}


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def edit(path: Path, version: str = "", **tensors: str) -> None:
    """Says that the patch is of version 2, or names further tensors."""
    index = json.loads((path / INDEX).read_text())
    index["metadata"] |= {"base_version": version} if version else {}
    index["weight_map"] |= tensors
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_patch_is_refused(model, tmp_path, kind):
    """By its checksums or its reader; what it may have spoilt is no base of others."""
    publish, local = Publisher(str(tmp_path)), LocalCheckpoint()
    paths = [publish.publish(moved(model, step), "bfloat16", 9) for step in range(4)]
    for path in paths[:2]:
        local.take(path)
    damaged = paths[3 if kind == "base" else 2]
    DAMAGE[kind](Path(damaged))
    with pytest.raises(PatchError, match=r"weight_v00000\d does not fit the weights that it names"):
        local.take(damaged)
    with pytest.raises(PatchError, match="no version is held"):
        local.take(paths[2])
    path = publish.publish(model, "bfloat16", 9, full=True)
    assert tensors(local.take(path)) == saved(model, tmp_path / "expected")


def test_another_encoding_is_refused(model, tmp_path):
    publish, local = Publisher(str(tmp_path)), LocalCheckpoint()
    paths = [publish.publish(moved(model, step), "bfloat16", 9) for step in range(2)]
    local.take(paths[0])
    index = Path(paths[1]) / INDEX
    entries = json.loads(index.read_text())
    entries["metadata"] = {**entries["metadata"], **ENCODING, "delta_encoding": "overwrite"}
    index.write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"is a patch with \{'delta_encoding': 'overwrite'\}; what can be read is"):
        local.take(paths[1])


def test_a_run_goes_on_behind_the_versions_that_it_finds(model, tmp_path):
    """With all weights, as it does not know those of before; what else is in the folder stays."""
    folder = tmp_path / "policy"
    for step in range(3):
        Publisher(str(folder)).publish(moved(model, step), "bfloat16", 9)
        (folder / "notes.txt").touch()
        assert names(folder) == ["notes.txt", f"weight_v{step + 1:06d}"]
    (folder / "weight_v000041").mkdir()
    publish = Publisher(str(folder))
    assert publish.publish(model, "bfloat16", 9).endswith("weight_v000042")


def test_training_and_evaluations_share_a_publisher(tmp_path):
    first = publisher(str(tmp_path))
    assert publisher(f"{tmp_path}/") is first and publisher(str(tmp_path / "other")) is not first
    del first
    assert not publisher(str(tmp_path)).metrics


def test_what_fails_is_no_base(model, tmp_path, monkeypatch):
    """A full disk: the next version holds all weights."""
    publish, local = Publisher(str(tmp_path)), LocalCheckpoint()
    local.take(publish.publish(model, "bfloat16", 9))
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_llm.models.files.weight_versions.save_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            publish.publish(moved(model, 1), "bfloat16", 9)
    assert names(tmp_path) == ["weight_v000001"]
    path = publish.publish(moved(model, 2), "bfloat16", 9)
    assert "weights/changed_share" not in publish.metrics
    assert tensors(local.take(path)) == saved(moved(model, 2), tmp_path / "expected")


def full_disk(*arguments):
    raise OSError("no space")


SHARDED = """
import dataclasses, sys
import jax, numpy as np
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.files.weight_versions import LocalCheckpoint, Publisher

publish, local = Publisher(sys.argv[1]), LocalCheckpoint()
sharded = load_model("embedded:sort", "float32", mesh=make_mesh(fsdp=2, tensor=2))
for step in range(3):
    params = jax.tree.map(lambda x: x * (1 + step * 2.0**-7), sharded.params)
    folder = local.take(publish.publish(dataclasses.replace(sharded, params=params), "bfloat16", 9))
for path, mesh in ((folder, make_mesh(tensor=4)), (folder, None)):
    taken = load_model(path, "float32", mesh=mesh)
    for x, y in zip(jax.tree.leaves(taken.params), jax.tree.leaves(params), strict=True):
        assert (np.asarray(x) == np.asarray(y).astype("bfloat16").astype(np.float32)).all()
"""


@pytest.mark.slow
def test_sharded_parameters(run_python, tmp_path):
    """A policy on one mesh, a server on another: the same numbers."""
    ended = run_python("-c", SHARDED, str(tmp_path), devices=4)
    assert ended.returncode == 0, ended.stderr
