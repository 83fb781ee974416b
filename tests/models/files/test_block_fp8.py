"""Matrices in fp8 with a scale for each block, against transformers' numbers and by hand."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import block_fp8
from jaxrl_llm.models.files.mxfp4 import FP4
from jaxrl_llm.models.model import load_model
from tests.models.files.quantized import TOKENS, check_model, describe
from tests.models.oracles import make_oracle

QUANTIZED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def quantized(request, tmp_path_factory):
    """A folder with most matrices in fp8, the oracle that it was made of, and the folder's tensors."""
    oracle, folder = make_oracle(request.param), tmp_path_factory.mktemp("fp8")
    oracle.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "with_mqa.weight", "_b_proj.weight"))]:
        scales = torch.rand(*(-(-n // 8) for n in tensors[name].shape)) * 0.01 + 0.001
        whole = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)[: len(tensors[name]), : tensors[name].shape[1]]
        codes = (tensors[name] / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors |= {name: codes, name + "_scale_inv": scales}
        if not any(n % 8 for n in codes.shape):
            found = Fp8Dequantize(None)._dequantize_one(codes, scales)
            torch.testing.assert_close(found, codes.float() * whole, rtol=0, atol=0)
    save_file(tensors, folder / "model.safetensors")
    describe(folder, QUANTIZED)
    return folder, oracle, tensors


def numbers(tensors, name):
    """The numbers of a matrix, one after the other."""
    codes, scales = tensors[name].float().numpy(), tensors[name + "_scale_inv"].numpy()
    found = np.empty_like(codes)
    for row, column in np.ndindex(codes.shape):
        found[row, column] = codes[row, column] * scales[row // 8, column // 8]
    return found


def test_a_model_in_fp8_is_read_as_numbers(quantized, tmp_path):
    """All families' tables read them; the model computes as transformers does with the numbers, and exports those."""
    folder, oracle, tensors = quantized
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name in plain:
        if name + "_scale_inv" in tensors:
            plain[name] = torch.tensor(numbers(tensors, name))
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    oracle.config.save_pretrained(tmp_path)
    again = type(oracle).from_pretrained(tmp_path, attn_implementation="eager").eval()
    np.testing.assert_array_equal(load_model(folder)(TOKENS), load_model(tmp_path)(TOKENS))
    check_model(folder, again, tmp_path / "out")


@pytest.mark.parametrize("variant", ["ministral3", "minimax_m3_vl_text"])
def test_a_matrix_may_have_one_scale(variant, tmp_path):
    """As Ministral 3's have, and those of experts, beside scales of their inputs, which computing with numbers has no
    use for."""
    make_oracle(variant).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj"))]:
        dims = (1, 2) if tensors[name].ndim == 3 else (0, 1)
        scale = tensors[name].abs().amax(dims, keepdim=True) / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        plain[name] = tensors[name].float() * scale
        inputs = f"{name.removesuffix('weight')}{'' if name.endswith('weight') else '_'}activation_scale"
        tensors |= {name + "_scale_inv": scale.squeeze() if dims == (0, 1) else scale, inputs: torch.tensor(0.5)}
    expected = logits_of(tmp_path, plain)
    quantized = QUANTIZED | {"activation_scheme": "static", "weight_block_size": None}
    np.testing.assert_array_equal(logits_of(tmp_path, tensors, quantized), expected)


@pytest.mark.parametrize(
    ("method", "of_outputs", "beside"),
    [
        ("fp8", False, {"input_scale": torch.ones(1)}),  # as AutoFP8 writes it
        ("fbgemm_fp8", True, {"input_scale_ub": torch.ones(1)}),
    ],
)
def test_scales_of_matrices_and_outputs(method, of_outputs, beside, tmp_path):
    """By another name than DeepSeek's, beside scales of what has no use where numbers are computed with."""
    make_oracle("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1 if of_outputs else (0, 1), keepdim=True) / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        plain[name] = tensors[name].float() * scale
        tensors[name + "_scale"] = scale if of_outputs else scale.reshape(1)
        tensors |= {f"{name.removesuffix('weight')}{end}": x.clone() for end, x in beside.items()}
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    expected = logits_of(tmp_path, plain)
    quantized = {"quant_method": method, "activation_scheme": "static"}
    np.testing.assert_array_equal(logits_of(tmp_path, tensors, quantized), expected)


@pytest.mark.parametrize(
    ("dtype", "block"), [(torch.uint8, {"weight_block_size": [1, 4]}), (torch.float8_e8m0fnu, {})], ids=["u8", "e8m0"]
)
def test_scales_may_be_exponents(dtype, block, tmp_path):
    """MXFP8, as MiniMax-M3's experts and other matrices have it."""
    make_oracle("minimax_m3_vl_text").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj"))]:
        *lead, width = tensors[name].shape
        scales = torch.randint(119, 124, (*lead, width // 4), dtype=torch.uint8)
        tensors[name] = (tensors[name] / (scales.float() - 127).exp2().repeat_interleave(4, -1)).to(torch.float8_e4m3fn)
        plain[name] = Fp8Dequantize(None)._dequantize_one(tensors[name], scales, torch.float32)
        tensors[name + "_scale_inv"] = scales.view(dtype)
    expected = logits_of(tmp_path, plain)
    quantized = {"quant_method": "mxfp8", "activation_scheme": "dynamic", **block}
    np.testing.assert_array_equal(logits_of(tmp_path, tensors, quantized), expected)


def logits_of(folder, tensors, quantization=None):
    """The logits of some tokens by these tensors in the place of those of a folder."""
    save_file(tensors, folder / "model.safetensors")
    describe(folder, quantization)
    return np.asarray(load_model(folder)(TOKENS))


def test_any_slice_of_a_matrix(quantized):
    """Devices of a mesh read their parts, whatever blocks these begin and end in."""
    folder, _, tensors = quantized
    file = folder / "model.safetensors"
    with safe_open(file, "numpy") as handle:
        where = dict.fromkeys(handle.keys(), handle)
        found = block_fp8.with_matrices(where, dict.fromkeys(where, file), QUANTIZED)
        for name in [name for name in tensors if name + "_scale_inv" in tensors]:
            matrix, expected = found[name].get_slice(name), numbers(tensors, name)
            assert matrix.get_shape() == list(expected.shape)
            for at in np.s_[:, :], np.s_[3:11, 5:6], np.s_[8:16, 2:], np.s_[9:, :8]:
                np.testing.assert_array_equal(matrix[at], expected[at])


def test_a_file_is_mapped_once(tmp_path):
    """And not each of its matrices: a process has 65,530 maps, and Kimi K2 69,120 matrices of experts."""
    name, file = "x.{}.weight", tmp_path / "x.safetensors"
    tensors = {name.format(n): torch.ones(8, 8).to(torch.float8_e4m3fn) for n in range(40)}
    save_file(tensors | {f"{name.format(n)}_scale_inv": torch.ones(1, 1) for n in range(40)}, file)
    with safe_open(file, "numpy") as handle:
        where = dict.fromkeys(handle.keys(), handle)
        found = block_fp8.with_matrices(where, dict.fromkeys(where, file), QUANTIZED)
        assert len({id(memory(matrix.codes)) for matrix in found.values()}) == 1


def memory(array):
    """The memory that an array is a view of."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size = \[128\] is not supported; supported: two integers from 1"),
        ({"quant_method": "quark"}, "quant_method .* = 'quark' .* fp8, mxfp8, .* and float32"),
    ],
)
def test_other_fp8_is_refused(quantized, tmp_path, changed, message):
    entries = json.loads((quantized[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {"quantization_config": QUANTIZED | changed}))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_numbers_without_their_scales_are_refused(quantized, tmp_path):
    folder, _, tensors = quantized
    name = next(name for name in tensors if name + "_scale_inv" in tensors)
    save_file({key: x for key, x in tensors.items() if key != name + "_scale_inv"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"tensor {name} has dtype F8_E4M3, supported are"):
        load_model(tmp_path)


def test_scales_of_other_blocks_are_refused(quantized, tmp_path):
    folder, _, tensors = quantized
    name = next(name for name in tensors if name + "_scale_inv" in tensors and len(tensors[name]) == 32)
    cut = tensors[name + "_scale_inv"][:-1].contiguous()
    save_file(tensors | {name + "_scale_inv": cut}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=rf"{name} of shape .* has scales {name}_scale_inv .*: \[8, 8\]"):
        load_model(tmp_path)


@pytest.mark.slow
def test_deepseek_v4_has_experts_in_four_bits(tmp_path):
    """Two in a byte, with an exponent for each 4 inputs here, and scales whose names are those of their matrices."""
    make_oracle("deepseek_v4").save_pretrained(tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    plain = dict(tensors)
    for name in [name for name in tensors if re.search(r"\.w(q_b|o_b|[123])\.weight$", name)]:
        outputs, inputs = tensors[name].shape
        exponents = torch.tensor(rng.integers(118, 124, (outputs, inputs // 4)).astype(np.uint8))
        scales = torch.exp2(exponents.float() - 127).repeat_interleave(4, 1)
        if ".experts." in name:
            codes = rng.integers(0, 16, (outputs, inputs))
            plain[name] = torch.tensor(FP4[codes]) * scales
            tensors[name] = torch.tensor((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)).view(torch.int8)
        else:
            tensors[name] = (tensors[name] / scales).to(torch.float8_e4m3fn)
            plain[name] = tensors[name].float() * scales
        tensors[name.removesuffix("weight") + "scale"] = exponents.view(torch.float8_e8m0fnu)
    expected = logits_of(tmp_path, plain)
    found = logits_of(tmp_path, tensors, QUANTIZED | {"scale_fmt": "ue8m0"})
    np.testing.assert_array_equal(found, expected)
