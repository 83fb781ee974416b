"""Matrices in the formats of compressed-tensors, against its own compressors and by hand."""

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import compressed_tensors
from jaxrl_llm.models.model import load_model, save_hf
from tests.models.files.quantized import TOKENS, check_model, check_slices, describe, make_quantized
from tests.models.oracles import make_oracle

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
# The format, what config_groups say of weights, and the rows and columns of a block.
KINDS = {
    "int4": ("pack-quantized", INT4, (1, 16)),
    "int4 asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, (1, 16)),
    "int4 ordered": ("pack-quantized", INT4 | {"symmetric": False, "actorder": "group"}, (1, 16)),
    "int8 packed": ("pack-quantized", INT8 | {"symmetric": False}, (1, 0)),
    "int8": ("int-quantized", INT8, (1, 0)),
    "int8 asymmetric": ("naive-quantized", INT8 | {"strategy": "tensor", "symmetric": False}, (0, 0)),
    "fp8": ("float-quantized", FP8, (0, 0)),
    "fp8 of channels": ("float-quantized", FP8 | {"strategy": "channel"}, (1, 0)),
    "fp8 of blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [24, 24]}, (24, 24)),
    "mxfp8": ("mxfp8-quantized", FP8 | {"strategy": "group", "group_size": 16}, (1, 16)),
    "nvfp4": ("nvfp4-pack-quantized", FP4, (1, 16)),
    "mxfp4": ("mxfp4-pack-quantized", FP4, (1, 16)),
}


def in_words(codes, bits):
    """Codes `[rows, n]` of which the smallest is 0, in words of 32 bits, as many as are needed."""
    count = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // count)), np.int64)
    for row, column in np.ndindex(codes.shape):
        words[row, column // count] |= int(codes[row, column]) << (bits * (column % count))
    return words.astype(np.uint32).view(np.int32)


def stored(name, shape, kind, draw):
    """The tensors of a matrix in a format, of which codes and scales are drawn, and its numbers, one by one."""
    how, weights, block = KINDS[kind]
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    grid = -(-shape[0] // rows), -(-shape[1] // columns)
    scales, zeros = torch.tensor(draw.uniform(0.01, 0.02, grid), dtype=torch.bfloat16), np.zeros(grid, int)
    order, tensors, factors = np.arange(shape[1]) // columns, {}, scales.float().numpy()
    if weights["type"] == "int":
        half, bits = 2 ** (weights["num_bits"] - 1), weights["num_bits"]
        codes = numbers = draw.integers(-half, half, shape)
        if weights.get("symmetric") is False:
            zeros = draw.integers(-half, half, grid)
        if weights.get("actorder"):
            tensors["g_idx"] = torch.tensor(order := draw.permutation(order), dtype=torch.int32)
        if how == "pack-quantized":
            tensors |= {"packed": torch.tensor(in_words(codes + half, bits)), "shape": torch.tensor(shape)}
            if weights.get("symmetric") is False:
                tensors["zero_point"] = torch.tensor(in_words((zeros + half).T, bits).T.copy())
        else:
            tensors[""] = torch.tensor(codes, dtype=torch.int8)
            if weights.get("symmetric") is False:
                tensors["zero_point"] = torch.tensor(zeros.reshape(-1), dtype=torch.int8)
    elif weights["num_bits"] == 8:
        codes = torch.tensor(draw.uniform(-400, 400, shape)).to(torch.float8_e4m3fn)
        tensors[""], numbers = codes, codes.float().numpy()
    else:
        codes = draw.integers(0, 16, shape)
        tensors["packed"] = torch.tensor(codes[:, ::2] | codes[:, 1::2] << 4, dtype=torch.uint8)
        numbers = np.float32(E2M1)[codes]
    if how == "nvfp4-pack-quantized":
        scales = torch.tensor(draw.uniform(100, 400, grid)).to(torch.float8_e4m3fn)
        over = np.float32(draw.uniform(20000, 40000))
        tensors["global_scale"], factors = torch.tensor([over]), scales.float().numpy() / over
    if how.startswith("mxfp"):
        scales = torch.tensor(draw.integers(119, 124, grid), dtype=torch.uint8)
        factors = 2.0 ** (scales.float().numpy() - 127)
    tensors["scale"] = scales.reshape(-1) if block == (0, 0) else scales
    found = np.empty(shape, np.float32)
    for row, column in np.ndindex(found.shape):
        at = row // rows, order[column]
        found[row, column] = np.float32(numbers[row, column] - zeros[at]) * factors[at]
    return {f"{name}_{end}" if end else name: x for end, x in tensors.items()}, found


def described(folder, *groups, **entries):
    """Writes the quantization_config of a folder whose groups have these weights."""
    groups = {f"group_{n}": {"targets": ["Linear"], "weights": weights} for n, weights in enumerate(groups)}
    entry = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **entries}
    describe(folder, entry)
    return entry


@pytest.fixture(scope="module", params=KINDS)
def quantized(request, tmp_path_factory):
    """A folder whose linear maps are quantised, the oracle with their numbers, these by name, and the entry."""
    folder, draw = tmp_path_factory.mktemp("compressed"), np.random.default_rng(1)
    oracle, numbers = make_quantized(
        folder,
        lambda name, matrix: stored(name, matrix.shape, request.param, draw),
        lambda name: {f"{name.removesuffix('weight')}{end}": torch.ones(1) for end in ("input_scale", "k_scale")},
    )
    how, weights, _ = KINDS[request.param]
    return folder, oracle, numbers, described(folder, weights, format=how)


def test_a_quantised_model_is_read_as_numbers(quantized, tmp_path):
    folder, oracle, *_ = quantized
    check_model(folder, oracle, tmp_path / "out")


def test_any_slice_of_a_matrix(quantized):
    folder, _, numbers, entry = quantized
    file = folder / "model.safetensors"
    with safe_open(file, "numpy") as handle:
        where = dict.fromkeys(handle.keys(), handle)
        found = compressed_tensors.with_matrices(where, dict.fromkeys(where, file), entry)
        assert not [name for name in found if "weight_" in name or name.endswith("_scale")]
        check_slices(found, numbers, rtol=3e-7)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4 ordered"])  # which it has given up
def test_what_compressed_tensors_writes(kind, tmp_path):
    """By its own compressors, of matrices that they quantise."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    how, weights, block = KINDS[kind]
    shape = (48, 64)
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    args = package.quantization.QuantizationArgs(**{"symmetric": True, **weights})
    scheme = package.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    matrix = torch.randn(shape, generator=torch.manual_seed(0))
    grid = -(-shape[0] // rows), -(-shape[1] // columns)
    largest = {"int": 2 ** (weights["num_bits"] - 1), "float": 448 if weights["num_bits"] == 8 else 6}[weights["type"]]
    scale = torch.full(grid, 4.0 / largest) * (1 + torch.arange(grid[0] * grid[1]).reshape(grid) / 100)
    state = {"weight": matrix, "weight_scale": scale.reshape(-1) if block == (0, 0) else scale}
    if how == "nvfp4-pack-quantized":
        state |= {"weight_global_scale": torch.tensor([64.0]), "weight_scale": scale * 64}
    if how.startswith("mxfp"):
        state["weight_scale"] = scale = 2.0 ** scale.log2().round()
    if weights.get("symmetric") is False:
        zeros = torch.arange(grid[0] * grid[1], dtype=torch.int8).reshape(grid) % 5 - 2
        state["weight_zero_point"] = zeros.reshape(-1) if block == (0, 0) else zeros
    compressor = BaseCompressor.get_value_from_registry(how)
    written = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(written), scheme)["weight"].float().numpy()
    tensors = {f"x.{name}": x.contiguous() for name, x in written.items()}
    save_file(tensors, file := tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text("{}")
    entry = described(tmp_path, weights, format=how)
    with safe_open(file, "numpy") as handle:
        where = dict.fromkeys(handle.keys(), handle)
        found = compressed_tensors.with_matrices(where, dict.fromkeys(where, file), entry)
        assert list(found) == ["x.weight"]
        np.testing.assert_allclose(found["x.weight"][:, :], expected, rtol=1e-6)


def test_layers_may_be_stored_in_several_ways(tmp_path):
    """As mixed-precision says, and matrices that are left as they are beside them."""
    make_oracle("qwen3").save_pretrained(tmp_path)
    tensors, draw = load_file(tmp_path / "model.safetensors"), np.random.default_rng(2)
    plain = dict(tensors)
    for name, kind in {"down": "fp8 of blocks", "up": "int4 ordered", "gate": "nvfp4"}.items():
        name = f"model.layers.1.mlp.{name}_proj.weight"
        own, numbers = stored(name, tensors.pop(name).shape, kind, draw)
        tensors |= own
        plain[name] = torch.tensor(numbers)
    save_file(plain, tmp_path / "model.safetensors")
    expected = load_model(tmp_path)(TOKENS)
    save_file(tensors, tmp_path / "model.safetensors")
    kinds = ("fp8 of blocks", "int4 ordered", "nvfp4")
    weights = [KINDS[kind][1] for kind in kinds]
    described(tmp_path, weights[0] | {"block_structure": "24x24"}, *weights[1:], format="mixed-precision")
    np.testing.assert_allclose(load_model(tmp_path)(TOKENS), expected, atol=1e-5)


def test_experts_of_kimi_k25(tmp_path):
    """Whose quantization_config is that of the text part, and whose files name a whole of which the text is a part."""
    oracle = make_oracle("deepseek_v3")
    oracle.save_pretrained(tmp_path)
    tensors, draw = load_file(tmp_path / "model.safetensors"), np.random.default_rng(3)
    plain = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        own, numbers = stored(name, tensors.pop(name).shape, "int4", draw)
        tensors |= own
        plain[name] = torch.tensor(numbers)
    save_file(plain, tmp_path / "model.safetensors")
    expected = load_model(tmp_path)(TOKENS)
    save_file({f"language_model.{name}": x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    entry = described(tmp_path, INT4, format="pack-quantized")
    text = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": entry}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    model = load_model(tmp_path)
    np.testing.assert_array_equal(model(TOKENS), expected)
    save_hf(model, tmp_path / "out")
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("int4", lambda x: x.pop("x.weight_scale"), "lacks tensors that belong to x.weight: x.weight_scale"),
        ("int4", lambda x: x.pop("x.weight_shape"), "lacks tensors that belong to x.weight: x.weight_shape"),
        ("int4 ordered", lambda x: x.pop("x.weight_g_idx"), "lacks tensors that belong to x.weight: x.weight_g_idx"),
        ("int4 ordered", lambda x: x["x.weight_g_idx"].add_(1), "x.weight_g_idx names no group, of 2, for each of 32"),
        (
            "int4",
            lambda x: x.update({"x.weight_shape": torch.tensor([16, 40])}),
            r"x.weight_packed has shape \(16, 4\), which x.weight_shape = \[16, 40\] has with neither 2 nor",
        ),
        (
            "int8 asymmetric",
            lambda x: x.update({"x.weight_zero_point": torch.zeros(2, dtype=torch.int8)}),
            r"x.weight has zero points of shape \(2,\) and scales x.weight_scale of shape \(1,\)",
        ),
        (
            "fp8 of channels",
            lambda x: x.update({"x.weight_scale": x["x.weight_scale"][:7].clone()}),
            r"x.weight of shape \(16, 32\) has scales x.weight_scale of shape \(7, 1\), which are of no blocks",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, kind, changed, message):
    tensors, _ = stored("x.weight", (16, 32), kind, np.random.default_rng(4))
    changed(tensors)
    save_file(tensors, file := tmp_path / "x")
    (tmp_path / "config.json").write_text("{}")
    entry = described(tmp_path, KINDS[kind][1], format=KINDS[kind][0])
    with safe_open(file, "numpy") as handle:
        where = dict.fromkeys(handle.keys(), handle)
        with pytest.raises(ConfigError, match=message):
            compressed_tensors.with_matrices(where, dict.fromkeys(where, file), entry)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"format": "marlin-24"}, "format of quantization_config = 'marlin-24' is not supported; supported: dense, fl"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "format of sparsity_config .* = 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, r"transform_config .* = \['u'\] .* not rotated"),
    ],
)
def test_other_formats_are_refused(tmp_path, entries, message):
    make_oracle("qwen3").config.save_pretrained(tmp_path)
    described(tmp_path, INT4, **entries)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "quantize", "keeps"),
    [
        ("int4 of 32", "int4", True),
        ("int4", "int4", False),  # whose scales are of fewer inputs
        ("int4 asymmetric", "int4", False),
        ("int8", "int8", True),
        ("int8 asymmetric", "int8", False),
        ("fp8", "fp8", True),
        ("fp8 of channels", "fp8", True),
        ("fp8 of blocks", "fp8", False),
        ("int8", "nf4", False),
    ],
)
def test_stored_again_in_its_own_bits_every_number_stays(kind, quantize, keeps, tmp_path, monkeypatch):
    """Though no number of a column or a block is the largest that its scale has."""
    monkeypatch.setitem(KINDS, "int4 of 32", ("pack-quantized", INT4 | {"group_size": 32}, (1, 32)))
    make_oracle("qwen3").save_pretrained(tmp_path)
    tensors, numbers, draw = load_file(tmp_path / "model.safetensors"), {}, np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "up_proj.weight"))]:
        own, numbers[name] = stored(name, tensors.pop(name).shape, kind, draw)
        tensors |= own
    save_file(tensors, tmp_path / "model.safetensors")
    described(tmp_path, KINDS[kind][1], format=KINDS[kind][0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(tmp_path, quantize=quantize)
    assert any(f"once more, to be held in {quantize}: " in str(x.message) for x in caught) != keeps
    save_hf(model, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    for name, expected in numbers.items():
        assert np.allclose(written[name], expected, rtol=1e-6) == keeps
