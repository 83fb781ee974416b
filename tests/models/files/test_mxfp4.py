"""Matrices of experts in MXFP4 against what transformers makes of the same bytes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import mxfp4
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.models.quantize import dequantize
from tests.models.files.quantized import describe
from tests.models.oracles import VARIANTS, make_oracle, oracle_logits


@pytest.mark.slow
def test_a_model_in_mxfp4_is_read_as_numbers(tmp_path, monkeypatch):
    """All 16 codes and scales of 2^-6 to 2^2; the model computes as transformers does with the numbers."""
    monkeypatch.setitem(VARIANTS, "wide", lambda: VARIANTS["gpt_oss"]().__class__(**{
        **VARIANTS["gpt_oss"]().to_dict(), "intermediate_size": 64, "hidden_size": 32
    }))  # fmt: skip
    oracle = make_oracle("wide")
    oracle.save_pretrained(tmp_path / "model")
    tensors, rng = load_file(tmp_path / "model/model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, d_in, d_out = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, d_out, d_in // 32, 16), np.uint8)
        scales = rng.integers(121, 126, (experts, d_out, d_in // 32), np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        oracle.get_parameter(name).data.copy_(numbers)
    save_file(tensors, tmp_path / "model/model.safetensors")
    describe(tmp_path / "model", {"quant_method": "mxfp4"})
    model = load_model(tmp_path / "model")
    gate, up = (model.params["layers"]["mlp"]["experts"][part]["kernel"][1] for part in ("gate", "up"))
    whole = oracle.model.layers[1].mlp.experts.gate_up_proj.detach().numpy()
    np.testing.assert_array_equal(gate, whole[..., ::2])
    np.testing.assert_array_equal(up, whole[..., 1::2])
    tokens = rng.integers(0, 97, (1, 9))
    np.testing.assert_allclose(model(tokens), oracle_logits(oracle, tokens), atol=1e-4)

    # Kept in MXFP4, where a byte has two numbers: every number stays.
    kept = load_model(tmp_path / "model", quantize_experts="mxfp4")
    for part, numbers in model.params["layers"]["mlp"]["experts"].items():
        stored = kept.params["layers"]["mlp"]["experts"][part]["kernel"]
        assert {x.dtype for x in stored.values()} == {np.dtype("uint8")}
        assert sum(x.nbytes for x in stored.values()) == numbers["kernel"].size * (1 / 2 + 1 / 32)
        np.testing.assert_array_equal(dequantize(stored, "mxfp4", jnp.float32), numbers["kernel"])
    np.testing.assert_allclose(kept(tokens), model(tokens), atol=1e-5)
    save_hf(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    np.testing.assert_array_equal(load_model(tmp_path / "out")(tokens), model(tokens))


def test_scales_of_another_shape_are_refused(tmp_path):
    save_file(
        {"x_blocks": np.zeros((2, 3, 1, 16), np.uint8), "x_scales": np.zeros((2, 3, 2), np.uint8)}, tmp_path / "x"
    )
    with safe_open(tmp_path / "x", "numpy") as file, pytest.raises(ConfigError, match="tensor x_blocks has shape"):
        mxfp4.with_matrices(dict.fromkeys(file.keys(), file))
