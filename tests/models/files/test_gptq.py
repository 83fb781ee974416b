"""Matrices in the formats of GPTQ and AWQ, packed by hand."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.files import gptq, hf
from jaxrl_llm.models.model import load_model, save_hf
from tests.models.files.quantized import TOKENS, check_model, check_slices, describe, make_quantized
from tests.models.oracles import make_oracle

GROUP = 16
# quant_method, bits, whether groups are of inputs in any order, and other entries of quantization_config.
KINDS = {
    "gptq": ("gptq", 4, False, {"checkpoint_format": "gptq"}),
    "gptq ordered": ("gptq", 4, True, {"desc_act": True, "sym": False}),
    "gptq_v2": ("gptq", 4, True, {"format": "GPTQ_V2"}),
    "gptq of 8 bits": ("gptq", 8, False, {"dynamic": {"+:.*q_proj": {"bits": 8}}}),
    "gptq of 2 bits": ("gptq", 2, False, {"sym": False}),
    "awq": ("awq", 4, False, {"version": "gemm", "zero_point": True}),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each place in a word, as AutoAWQ's `order_map`


def in_words(codes, bits, order=None, less=False):
    """Codes `[rows, n]` in words of 32 bits, one by one; with `less`, each is less by one, as whole words are."""
    count = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // count), np.int64)
    for row, word in np.ndindex(words.shape):
        for place in range(count):
            words[row, word] += int(codes[row, word * count + (order or range(count))[place]] - less) << (bits * place)
    return (words % 2**32).astype(np.uint32).view(np.int32)


def stored(module, matrix, kind, draw):
    """The tensors of a matrix `[out,in]` in a format, whose numbers are drawn, and these numbers, one by one."""
    method, bits, is_ordered, entry = KINDS[kind]
    outputs, inputs = matrix
    count = inputs // GROUP
    codes = draw.integers(0, 2**bits, (outputs, inputs))
    zeros = draw.integers(0, 2**bits, (outputs, count))  # zeros of 0 among them, whose -1 borrows from the next
    scales = draw.uniform(0.01, 0.02, (outputs, count)).astype(np.float16)
    order = np.arange(inputs) // GROUP
    order = draw.permutation(order) if is_ordered else order
    numbers = np.empty((outputs, inputs), np.float32)
    for o, i in np.ndindex(numbers.shape):
        numbers[o, i] = np.float32(codes[o, i] - zeros[o, order[i]]) * np.float32(scales[o, order[i]])
    if method == "awq":
        words = {"qweight": in_words(codes.T, 4, AWQ_ORDER), "qzeros": in_words(zeros.T, 4, AWQ_ORDER)}
    else:
        less = entry.get("format") != "GPTQ_V2"
        words = {"qweight": in_words(codes, bits).T, "qzeros": in_words(zeros.T, bits, less=less)}
        words |= {"g_idx": order.astype(np.int32)}
    tensors = {f"{module}.{part}": np.ascontiguousarray(x) for part, x in (words | {"scales": scales.T}).items()}
    return tensors, numbers


@pytest.fixture(scope="module", params=KINDS)
def quantized(request, tmp_path_factory):
    """A folder whose linear maps are quantised, the oracle with their numbers, and these by name."""
    folder, draw = tmp_path_factory.mktemp("gptq"), np.random.default_rng(1)
    oracle, numbers = make_quantized(
        folder, lambda name, matrix: stored(name.removesuffix(".weight"), matrix.shape, request.param, draw)
    )
    method, bits, _, entry = KINDS[request.param]
    describe(folder, {"quant_method": method, "bits": 4 if "dynamic" in entry else bits, "group_size": GROUP, **entry})
    return folder, oracle, numbers


def test_a_quantised_model_is_read_as_numbers(quantized, tmp_path):
    folder, oracle, _ = quantized
    check_model(folder, oracle, tmp_path / "out")


def test_any_slice_of_a_matrix(quantized):
    folder, _, numbers = quantized
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    with safe_open(folder / "model.safetensors", "numpy") as handle:
        found = gptq.with_matrices(dict.fromkeys(handle.keys(), handle), entry)
        assert not [name for name in found if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]
        check_slices(found, numbers)


def test_stored_again_in_int4_every_number_stays(tmp_path):
    """With a zero point of 8 and 64 inputs for each scale or more, also where no number is the largest of its scale."""
    make_oracle("qwen3").save_pretrained(tmp_path)
    tensors, draw = load_file(tmp_path / "model.safetensors"), np.random.default_rng(3)
    codes, scales = draw.integers(1, 15, (64, 32)), draw.uniform(0.01, 0.02, (1, 64)).astype(np.float16)
    name = "model.layers.1.self_attn.q_proj"
    del tensors[f"{name}.weight"]
    zeros = in_words(np.full((1, 64), 7), 4)
    own = {"qweight": in_words(codes, 4).T, "scales": scales, "qzeros": zeros, "g_idx": np.zeros(32, np.int32)}
    tensors |= {f"{name}.{part}": np.ascontiguousarray(x) for part, x in own.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    describe(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": -1})
    save_hf(load_model(tmp_path, quantize="int4"), tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    expected = (codes - 8) * scales.T.astype(np.float32)
    np.testing.assert_allclose(written[f"{name}.weight"], expected, rtol=1e-6)


def test_biases_of_zeros_are_none(tmp_path):
    """AutoGPTQ gives each matrix a bias; other numbers than zeros have no place."""
    folder, draw = tmp_path, np.random.default_rng(2)
    make_oracle("qwen3").save_pretrained(folder)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj"
    own, _ = stored(name, tensors.pop(f"{name}.weight").shape, "gptq", draw)
    describe(folder, {"quant_method": "gptq", "bits": 4, "group_size": GROUP})
    save_file(tensors | own, folder / "model.safetensors")
    expected = np.asarray(load_model(folder)(TOKENS))
    bias = np.zeros(48, np.float16)
    save_file(tensors | own | {f"{name}.bias": bias}, folder / "model.safetensors")
    np.testing.assert_array_equal(load_model(folder)(TOKENS), expected)
    bias[3] = 1
    save_file(tensors | own | {f"{name}.bias": bias}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"config.json gives no place to: {name}.bias"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda x: x.pop("x.scales"), "lacks tensors that belong to x.weight: x.scales"),
        (lambda x: x.pop("x.g_idx"), "lacks tensors that belong to x.weight: x.g_idx"),
        (
            lambda x: x.update({"x.qzeros": np.tile(x["x.qzeros"], (1, 3))[:, :3]}),
            r"are I32 \[4, 16\], F16 \[2, 16\], I32 \[2, 3\], .* 2 or 4 or 8",
        ),
        (
            lambda x: x.update({"x.qweight": x["x.qweight"][:, :8]}),
            r"are I32 \[4, 8\], F16 \[2, 16\], I32 \[2, 2\], which is no",
        ),
        (lambda x: x.update({"x.g_idx": x["x.g_idx"] + 1}), "x.g_idx names no group, of 2, for each of 32 inputs"),
        (lambda x: x.update({"x.g_idx": x["x.g_idx"][:8]}), "x.g_idx names no group, of 2, for each of 32 inputs"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, changed, message):
    tensors, _ = stored("x", (16, 32), "gptq", np.random.default_rng(4))
    changed(tensors)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "x")
    entry = {"quant_method": "gptq", "group_size": 16, "desc_act": True}
    with safe_open(tmp_path / "x", "numpy") as handle, pytest.raises(ConfigError, match=message):
        gptq.with_matrices(dict.fromkeys(handle.keys(), handle), entry)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bits": 3}, "bits of quantization_config, of gptq, = 3 is not supported; supported: 2, 4, 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format .*, of gptq, = 'marlin' .* gptq, gptq_v2"),
        ({"is_marlin_format": True}, "quantization_config.is_marlin_format = True"),
        ({"quant_method": "awq", "bits": 8}, "bits of quantization_config, of awq, = 8 .* supported: 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version .*, of awq, = 'gemv' .* supported: gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "quantization_config.backend = 'llm-awq'"),
        ({"quant_method": "aqlm"}, "quant_method .* = 'aqlm' .* gptq, awq, bitsandbytes, compressed-tensors, fp8"),
    ],
)
def test_other_formats_are_refused(tmp_path, entry, message):
    make_oracle("qwen3").config.save_pretrained(tmp_path)
    describe(tmp_path, {"quant_method": "gptq", "bits": 4, **entry})
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_matrices_that_a_family_stores_the_other_way_are_refused(tmp_path):
    """GPT-2's, the square ones of which would be read transposed."""
    make_oracle("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    module = "transformer.h.0.attn.c_proj"
    parts, _ = stored(module, tensors.pop(f"{module}.weight").shape, "gptq", np.random.default_rng(0))
    save_file(tensors | parts, tmp_path / "model.safetensors")
    describe(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": GROUP})
    with pytest.raises(ConfigError, match=r"c_proj.weight is stored as \[in, out\] by this family, .* gptq and awq"):
        load_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_adapters_train_on_a_model_in_four_bits(root, tmp_path, quantize, capsys):
    """A run by the adapters of an AWQ, which stays as it was read, and the merged model that it leaves, as numbers."""
    base, draw = tmp_path / "base", np.random.default_rng(5)
    shutil.copytree(hf.locate("embedded:sort"), base)
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= stored(name.removesuffix(".weight"), tensors.pop(name).shape, "awq", draw)[0]
    save_file(tensors, base / "model.safetensors")
    describe(base, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"})
    config = load_config_file(f"{root / 'configs/sft.py'}:tiny")
    config.output_dir, config.model.path, config.model.quantize = str(tmp_path / "run"), str(base), quantize
    config.lora.rank, config.lora.targets, config.eval.every = 4, ("all-linear",), -1
    config.optimizer.warmup_steps, config.logging.backends = 0, ("jsonl",)
    result = jaxrl_llm.train(config)
    told = "has matrices in few bits (awq), which are read as numbers: " in capsys.readouterr().err
    assert told == (quantize == "none")
    start = load_model(base, quantize=quantize)
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(result.model.params), start.params)
    adapted = load_model(result.output_dir / "adapter", quantize=quantize)
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    moved = np.abs(adapted(TOKENS) - start(TOKENS)).max()
    np.testing.assert_allclose(load_model(result.output_dir / "hf")(TOKENS), adapted(TOKENS), atol=moved / 100)
    assert "quantization_config" not in (result.output_dir / "hf/config.json").read_text()
