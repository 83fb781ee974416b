"""Checkpoints of torch: refused unless allowed, read without torch, and never run."""

import io
import os
import pickle
import random
import resource
import types
import zipfile

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.files import pickles
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.models.files.pickles import PickleFile, Tensor
from jaxrl_llm.models.model import load_model
from jaxrl_llm.training.setup.models import build_model


@pytest.fixture
def folder(tmp_path):
    for file in (EMBEDDED / "sort").iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(EMBEDDED / "sort" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    return tmp_path


def test_a_pickled_checkpoint_is_refused_unless_allowed(folder):
    with pytest.raises(ConfigError, match=r"pytorch_model.bin\) are not read unless model.allow_pickle"):
        load_model(folder)
    found, expected = load_model(folder, allow_pickle=True).params, load_model("embedded:sort").params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_settings_of_a_model(folder):
    """Those of a run's model: one that is pickled, and one whose head has numbers that are not rounded."""
    config, mesh = default(), make_mesh(devices=jax.devices()[:1])
    config.model.path, config.model.dtype = str(folder), "bfloat16"
    with jax.set_mesh(mesh):
        with pytest.raises(ConfigError, match=r"pytorch_model.bin\) are not read unless model.allow_pickle"):
            build_model(config, mesh)
        config.model.allow_pickle = True
        rounded = build_model(config, mesh)
        config.model.fp32_head = True
        exact = build_model(config, mesh)
        logits = [np.asarray(model(np.arange(97, 105)[None])) for model in (rounded, exact)]
    expected = load_model("embedded:sort").params
    jax.tree.map(np.testing.assert_array_equal, exact.params, expected)
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.1


def test_shards_by_index(folder):
    tensors = load_file(EMBEDDED / "sort" / "model.safetensors")
    names = sorted(tensors)
    (folder / "pytorch_model.bin").unlink()
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": %s}' % str(where).replace("'", '"'), encoding="utf-8")  # noqa: UP031
    found, expected = load_model(folder, allow_pickle=True).params, load_model("embedded:sort").params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_tensors_of_every_kind_and_layout(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "turned": base.T,
        "part": base[1:3, ::2],
        "parameter": torch.nn.Parameter(base * 2),
        **{str(kind): base.to(kind) for kind in (torch.float64, torch.float16, torch.bfloat16, torch.int64)},
        "scalar": torch.tensor(3.5),
    }
    torch.save(tensors, tmp_path / "x.bin")
    with PickleFile(tmp_path / "x.bin") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_slice(name)
            assert tuple(found.get_shape()) == tuple(tensor.shape)
            np.testing.assert_array_equal(np.asarray(found[...], np.float64), tensor.detach().double().numpy())
        np.testing.assert_array_equal(file.get_slice("turned")[2:4, 1:], base.T[2:4, 1:].numpy())
        assert file.get_slice("torch.bfloat16").get_dtype() == "BF16"


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("wrapped", [False, True], ids=["whole", "inside"])
def test_nothing_in_a_pickle_is_run(tmp_path, wrapped):
    evil = Evil(tmp_path / "made")
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"x": evil} if wrapped else evil))
    with pytest.raises(ConfigError, match=r"asks to run posix.mkdir"):
        PickleFile(tmp_path / "x.bin")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"x": 1})])
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x.bin is damaged, or no checkpoint of torch 1.6"):
        PickleFile(tmp_path / "x.bin")


def test_a_truncated_file_is_named(folder):
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="is damaged"):
        load_model(folder, allow_pickle=True)


def test_something_else_than_tensors_is_refused(tmp_path):
    torch.save({"x": 1}, tmp_path / "x.bin")
    with pytest.raises(ConfigError, match="must hold tensors by name"):
        PickleFile(tmp_path / "x.bin")


def rezipped(file, change=lambda name, data: data, **options):
    """The bytes of a zip archive after change(name, data) of each entry, with hashes that are right."""
    target = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(target, "w", **options) as made:
        for name in archive.namelist():
            made.writestr(name, change(name, archive.read(name)))
    return target.getvalue()


@pytest.fixture
def small(tmp_path):
    base = torch.arange(48, dtype=torch.float32)
    tensors = {"a": base.reshape(6, 8)[1:5, ::2], "b": base.to(torch.bfloat16), "c": torch.ones(3, 1).expand(3, 4)}
    torch.save(tensors, tmp_path / "x.bin")
    return tmp_path / "x.bin", {name: tensor.double().numpy() for name, tensor in tensors.items()}


def contents(path):
    with PickleFile(path) as file:
        return {name: np.asarray(file.get_slice(name)[...], np.float64) for name in file.keys()}  # noqa: SIM118


def mutated(data, chance):
    """The bytes with a few of them changed, or cut, or with a stretch doubled."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data))
        kind = chance.randrange(5)
        if kind < 3:
            data[at] = chance.choice((0, 255, data[at] ^ (1 << chance.randrange(8)), chance.randrange(256)))
        elif kind == 3:
            del data[at : at + chance.randrange(1, 9)]
        else:
            data[at:at] = data[at : at + chance.randrange(1, 9)]
    return bytes(data)


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_file_is_refused_or_read_right(small, seed):
    path, expected = small
    path.write_bytes(mutated(path.read_bytes(), random.Random(seed)))
    try:
        found = contents(path)
    except ConfigError:
        return
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name])


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_pickle_reads_nothing_beyond_its_storages(small, seed):
    """The hashes of the archive are right here: only the reader's own checks are left."""
    path, expected = small
    chance = random.Random(seed)
    path.write_bytes(rezipped(path, lambda n, x: mutated(x, chance) if n.endswith("data.pkl") else x))
    try:
        found = contents(path)
    except ConfigError:
        return
    numbers = {number for tensor in expected.values() for number in np.ravel(tensor)} | set(range(48))
    for tensor in found.values():
        if tensor.size < 1e4:
            assert {float(x) for x in np.ravel(tensor)} <= numbers or tensor.dtype != np.float64


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "fits"),
    [
        (0, (4,), (1,), True),
        (1, (4,), (1,), False),
        (0, (2, 2), (2, 1), True),
        (0, (2, 2), (3, 1), False),
        (4, (0, 9), (9, 1), True),
        (5, (0,), (1,), False),
        (0, (10**6, 4), (0, 1), True),  # an expanded tensor
        (0, (2**40, 2**40), (2**40, 1), False),
        (3, (), (), True),
        (4, (), (), False),
    ],
)
def test_a_view_ends_within_its_storage(tmp_path, offset, shape, stride, fits):
    storage = pickles.Storage("x/data/0", pickles.Kind(np.float32, "F32"), 4)
    file = types.SimpleNamespace(file=tmp_path / "x.bin")
    file.tensors = {"w": Tensor(file.file, zipfile.ZipFile(io.BytesIO(), "w"), storage, offset, shape, stride)}
    if fits:
        assert PickleFile.get_slice(file, "w").shape == shape
        return
    with pytest.raises(ConfigError, match=r"x\.bin: tensor w of shape .* is larger than its storage: .* there are 4"):
        PickleFile.get_slice(file, "w")


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "1", None, 2**70])
def test_offsets_shapes_and_strides_are_counts(tmp_path, wrong):
    reader = pickles._Reader(types.SimpleNamespace(file="x", archive=None), io.BytesIO())
    storage = pickles.Storage("x/data/0", pickles.Kind(np.float32, "F32"), 4)
    for offset, shape, stride in ((wrong, (1,), (1,)), (0, (wrong,), (1,)), (0, (2,), (wrong,))):
        if wrong == 2**70:
            assert reader._rebuild(storage, offset, shape, stride).end > 4 or shape == (1,)
        else:
            with pytest.raises(ValueError, match="a tensor has offset"):
                reader._rebuild(storage, offset, shape, stride)
    with pytest.raises(ValueError, match="not as many strides"):
        reader._rebuild(storage, 0, (1, 1), (1,))


def test_a_wrong_index_takes_no_memory(small):
    """LONG_BINPUT with the largest index, for which the reader in C asks for tens of gigabytes."""
    path, _ = small
    pickled = b"\x80\x02}r\xff\xff\xff\xff."
    path.write_bytes(rezipped(path, lambda name, data: pickled if name.endswith("data.pkl") else data))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**34, limits[1]))
        assert contents(path) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_compressed_and_big_endian_files_are_refused(small):
    path, _ = small
    good = path.read_bytes()
    path.write_bytes(rezipped(path, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(ConfigError, match="should hold 48 numbers"):
        PickleFile(path)
    path.write_bytes(good)
    path.write_bytes(rezipped(path, lambda name, data: b"big" if name.endswith("byteorder") else data))
    with pytest.raises(ConfigError, match="its bytes are in the order b'big'"):
        PickleFile(path)


def test_a_storage_that_is_shorter_than_it_says(small):
    path, _ = small
    path.write_bytes(rezipped(path, lambda name, data: data[:-4] if name.endswith("data/0") else data))
    with pytest.raises(ConfigError, match=r"data/0 has 188 bytes, and should hold 48 numbers of F32"):
        PickleFile(path)
