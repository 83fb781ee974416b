"""Checkpoints of torch: refused unless allowed, read without torch, and never run."""

import os
import pickle
import zipfile

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.hf import EMBEDDED
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.pickles import PickleFile


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
