"""How adapters start: PEFT's initialisations, what they leave the model, and folders that PEFT reads as its own."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from peft.utils.loftq_utils import _low_rank_decomposition
from transformers import AutoModelForCausalLM

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.model import add_adapters, load_model, make_up, save_adapter, save_hf
from jaxrl_llm.models.quantize import dequantize
from tests.models.adapters.test_lora import TOKENS, gradients_beside, in_peft, shaken

SHAPE = LoraConfig(rank=4, alpha=6.0, targets=("q", "v", "o", "gate", "down"))
Q = ("layers", "attention", "q")
KEY = jax.random.key(1)


@pytest.fixture(scope="module")
def base(llama_folder):
    return load_model(llama_folder)


def adapter_of(model, *path):
    for name in path or Q:
        model = model[name] if isinstance(model, dict) else model.params[name]
    return model


def peft_model(folder, **options):
    shape = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    return peft.get_peft_model(oracle, peft.LoraConfig(task_type="CAUSAL_LM", **(shape | options))).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("init", "rslora"), [("pissa", False), ("olora", True)])
def test_starts_from_the_matrices_are_those_of_peft(base, llama_folder, tmp_path, init, rslora):
    """Products and residual at the start, logits and gradients there and later, and both kinds of export."""
    model = add_adapters(base, dataclasses.replace(SHAPE, init=init, rslora=rslora), jax.random.key(0))
    np.testing.assert_array_equal(model(TOKENS), base(TOKENS))
    theirs = peft_model(llama_folder, init_lora_weights=init, use_rslora=rslora)
    scale = model.net.config.lora.scale
    with torch.no_grad():
        for layer, block in enumerate(theirs.base_model.model.model.layers):
            for part, names in (("attention", "qvo"), ("mlp", ("gate", "down"))):
                for name in names:
                    ours = jax.tree.map(lambda x, layer=layer: x[layer], model.params["layers"][part][name])
                    other = getattr(block.self_attn if part == "attention" else block.mlp, f"{name}_proj")
                    product = (other.lora_B["default"].weight @ other.lora_A["default"].weight).T.numpy()
                    np.testing.assert_allclose(ours["lora_a"] @ ours["lora_b"], product, atol=5e-6)
                    rest = other.base_layer.weight.T.numpy()
                    np.testing.assert_allclose(ours["kernel"] - scale * product, rest, atol=5e-6)
                    # Each pair of singular vectors has a sign of its own, which PEFT's adapter takes from ours.
                    signs = np.sign((ours["lora_b"] * other.lora_B["default"].weight.T.numpy()).sum(1))
                    other.lora_A["default"].weight.mul_(torch.tensor(signs)[:, None])
                    other.lora_B["default"].weight.mul_(torch.tensor(signs))
    gradients = gradients_beside(theirs, model)
    for layer, block in enumerate(theirs.base_model.model.model.layers):
        for name in "qv":
            other = getattr(block.self_attn, f"{name}_proj")
            for leaf, factor in (("lora_a", other.lora_A), ("lora_b", other.lora_B)):
                ours = gradients["layers"]["attention"][name][leaf][layer]
                np.testing.assert_allclose(ours, factor["default"].weight.grad.T, atol=2e-4)

    moved = shaken(model)
    assert np.abs(moved(TOKENS) - base(TOKENS)).max() > 0.1
    save_adapter(moved, tmp_path / "adapter")
    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert entries["r"] == 8
    with torch.no_grad():
        logits = in_peft(llama_folder, tmp_path / "adapter")(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(moved(TOKENS), logits, atol=1e-4)
    np.testing.assert_allclose(moved(TOKENS), load_model(tmp_path / "adapter")(TOKENS), atol=1e-4)
    save_hf(moved, tmp_path / "merged")
    np.testing.assert_allclose(load_model(tmp_path / "merged")(TOKENS), moved(TOKENS), atol=1e-4)
    off = dataclasses.replace(moved, params=lora.without_adapters(moved.params))
    np.testing.assert_array_equal(off(TOKENS), base(TOKENS))
    assert set(adapter_of(lora.split(moved.params)[1])) == {"lora_a", "lora_b"}  # what they started from is frozen


@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_power_iterations_find_the_principal_parts(llama_folder, quantize):
    """Of a matrix with a gap behind its r largest singular values; of one in few bits, of what it stands for."""
    base = load_model(llama_folder, quantize=quantize)
    low = np.random.default_rng(0).normal(size=(2, 3, 64, 2)).astype(np.float32)
    if quantize == "none":
        linear = base.params["layers"]["attention"]["v"]
        linear["kernel"] = linear["kernel"] + low[:, 0, :32] @ low[:, 1, : linear["kernel"].shape[-1]].swapaxes(1, 2)
    exact, found = (
        add_adapters(base, LoraConfig(rank=2, targets=("v",), init=init), jax.random.key(0))
        for init in ("pissa", "pissa_niter_30")
    )
    np.testing.assert_array_equal(exact(TOKENS), base(TOKENS))
    one, other = (adapter_of(model, "layers", "attention", "v") for model in (exact, found))
    if quantize == "none":
        np.testing.assert_allclose(other["lora_a"] @ other["lora_b"], one["lora_a"] @ one["lora_b"], atol=1e-4)
    assert other["lora_a"].shape == one["lora_a"].shape


@pytest.mark.slow
def test_adapters_make_up_for_few_bits(llama_folder, tmp_path):
    """LoftQ's first round: of each matrix what PEFT finds of W - Q, and a model nearer to the one in full."""
    full, base = load_model(llama_folder), load_model(llama_folder, quantize="nf4")
    started = add_adapters(base, dataclasses.replace(SHAPE, init="loftq"), KEY)
    np.testing.assert_array_equal(started(TOKENS), base(TOKENS))
    model = make_up(started, KEY)
    for part, names in (("attention", "qvo"), ("mlp", ("gate", "down"))):
        for name in names:
            ours, whole = model.params["layers"][part][name], full.params["layers"][part][name]["kernel"]
            stored = dequantize(ours["kernel"], "nf4", np.float32)
            product = SHAPE.scale * ours["lora_a"] @ ours["lora_b"]
            for matrix, kept, found in zip(whole, stored, product, strict=True):
                theirs = _low_rank_decomposition(torch.tensor(np.asarray(matrix - kept)), SHAPE.rank)
                np.testing.assert_allclose(found, (theirs["L"] @ theirs["R"]).numpy(), atol=2e-6)
                assert np.linalg.norm(matrix - kept - found) < 0.9 * np.linalg.norm(matrix - kept)
    error, before = (np.abs(x(TOKENS) - full(TOKENS)).mean() for x in (model, base))
    assert error < 0.9 * before
    # A plain adapter of the quantised model, for whoever reads it so.
    save_adapter(model, tmp_path / "adapter")
    again = load_model(llama_folder, adapter=tmp_path / "adapter", quantize="nf4")
    np.testing.assert_allclose(again(TOKENS), model(TOKENS), atol=1e-6)
    faster = make_up(add_adapters(base, dataclasses.replace(SHAPE, init="loftq_niter_30"), KEY), KEY)
    one, other = (adapter_of(x, *Q) for x in (model, faster))
    near = np.linalg.norm(other["lora_a"] @ other["lora_b"] - one["lora_a"] @ one["lora_b"])
    assert near < 0.1 * np.linalg.norm(one["lora_a"] @ one["lora_b"])


def test_other_starts(base):
    """Their distributions are those that PEFT draws from; A B is 0 but for random."""
    made = {}
    for init in ("kaiming", "gaussian", "orthogonal", "random"):
        model = add_adapters(base, LoraConfig(8, targets=("q",), init=init), jax.random.key(0))
        made[init] = adapter_of(model)
        assert set(made[init]) == {"kernel", "lora_a", "lora_b"}
    a, b = made["gaussian"]["lora_a"], made["gaussian"]["lora_b"]
    assert 0.9 < np.std(a) * 8 < 1.1
    assert not np.any(b)
    a, b = made["orthogonal"]["lora_a"], made["orthogonal"]["lora_b"]
    np.testing.assert_allclose(a @ b, np.zeros((2, a.shape[1], b.shape[2])), atol=1e-6)
    theirs = peft.tuners.lora.Linear(
        torch.nn.Linear(400, 400), "x", peft.LoraConfig(init_lora_weights="orthogonal"), r=8, lora_alpha=1
    )
    for ours, other in ((a, theirs.lora_A["x"]), (b, theirs.lora_B["x"])):
        assert 0.7 < np.std(ours) / other.weight.detach().numpy().std() < 1.4
    np.testing.assert_array_equal(made["random"]["lora_a"], made["kaiming"]["lora_a"])
    assert 0.9 < np.abs(made["random"]["lora_b"]).max() * 8**0.5 <= 1.0  # torch's of a linear layer of 8 inputs


def test_dora_leaves_columns_of_zeros_as_they_are():
    """Such as those of layers that LLaMA Pro adds, which compute nothing at first."""
    config = LoraConfig(2, targets=("o",), dora=True)
    kernel = jnp.zeros((3, 2)).at[:, 0].set(2.0)
    linear = {"kernel": kernel, "lora_a": jnp.ones((3, 2)), "lora_b": jnp.zeros((2, 2))}
    linear = lora.with_magnitudes({**linear, "lora_m": jnp.zeros(2)})
    a, b, m = (linear[name] for name in ("lora_a", "lora_b", "lora_m"))
    np.testing.assert_array_equal(lora.rescaling(kernel, a, b, m, config), 1.0)
    np.testing.assert_allclose(lora.merged_kernel(linear, config), kernel)
    moved = lora.merged_kernel({**linear, "lora_b": b + 0.1, "lora_m": m + 0.5}, config)
    np.testing.assert_allclose(jnp.linalg.norm(moved, axis=0), [12**0.5 + 0.5, 0.5], rtol=1e-5)


def test_what_a_start_does_not_go_with(base):
    with pytest.raises(ConfigError, match=r"lora.init is pissa, .* but those of experts \(experts.down_proj\) do not"):
        LoraConfig(2, init="pissa", targets=("experts.down_proj",))
    with pytest.raises(ConfigError, match=r"lora.init is olora, .* but those of DoRA do not: set it to kaiming, or"):
        LoraConfig(2, init="olora", dora=True)
    with pytest.raises(ConfigError, match=r"lora.init is loftq, .* but those of experts \(experts.down_proj\) do not"):
        LoraConfig(2, init="loftq", targets=("experts.down_proj",))
    with pytest.raises(ConfigError, match=r"lora.init is orthogonal, which takes an even rank, but the rank is 3"):
        LoraConfig(3, init="orthogonal")
    with pytest.raises(ConfigError, match=r"pissa and the rank 40, but layers/attention/q has a matrix of 32 x"):
        add_adapters(base, LoraConfig(40, targets=("q",), init="pissa"), jax.random.key(0))
