"""Models whose matrices are stored in few bits, and what the tests of all formats compare with their numbers."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from jaxrl_llm.models.model import load_model, save_hf
from tests.models.oracles import make_oracle, oracle_logits

TOKENS = np.random.default_rng(0).integers(0, 97, (1, 9))
SLICES = np.s_[:, :], np.s_[3:11, 5:6], np.s_[8:16, 2:], np.s_[9:, :8], np.s_[4:4, :], np.s_[:, 4:4]


def describe(folder, entry):
    """Writes the quantization_config of a folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))


def make_quantized(folder, stored, beside=lambda name: {}):
    """Writes a Qwen3 of whose linear maps `stored(name, matrix)` gives the tensors and the numbers, and `beside(name)`
    further tensors; returns the oracle with these numbers, and the numbers by name."""
    oracle = make_oracle("qwen3")
    oracle.save_pretrained(folder)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        own, numbers[name] = stored(name, tensors.pop(name))
        tensors |= {part: torch.as_tensor(x) for part, x in (own | beside(name)).items()}
    save_file(tensors, folder / "model.safetensors")
    oracle.load_state_dict({name: torch.tensor(x) for name, x in numbers.items()}, strict=False)
    return oracle, numbers


def check_model(folder, oracle, out):
    """The model computes with the numbers, as the oracle does, and is exported as these."""
    model = load_model(folder)
    np.testing.assert_allclose(model(TOKENS), oracle_logits(oracle, TOKENS), rtol=2e-5, atol=2e-5)
    save_hf(model, out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    np.testing.assert_array_equal(load_model(out)(TOKENS), model(TOKENS))


def check_slices(found, numbers, rtol=0.0):
    """Devices of a mesh read their parts, whatever words, blocks and groups these begin and end in."""
    for name, expected in numbers.items():
        matrix = found[name].get_slice(name)
        assert matrix.get_shape() == list(expected.shape)
        for at in SLICES:
            np.testing.assert_allclose(matrix[at], expected[at], rtol=rtol)
