"""Supervised fine-tuning with label smoothing, against transformers, and with NEFTune's noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.transformer import ModelConfig, Net
from jaxrl_llm.training.objectives.sft import neftune_noise
from jaxrl_llm.training.setup.objectives import objective_of

NET = Net(ModelConfig(vocab_size=31, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, init_scale=0.3))
WIDTH = 9


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


def config_of(**algorithm):
    config = default()
    config.algorithm.name = "sft"
    for name, value in algorithm.items():
        config.algorithm[name] = value
    return config


def batch_of(seeds=None):
    random = np.random.default_rng(1)
    tokens = random.integers(1, 31, (4, WIDTH)).astype(np.int32)
    segments = (np.arange(WIDTH) < np.array([9, 7, 4, 2])[:, None]).astype(np.int32)
    mask = segments * (np.arange(WIDTH) > 0)
    return Batch(Inputs(tokens, segments), mask.astype(np.float32), seeds=seeds)


def loss_and_gradient(config, params, batch):
    objective = objective_of(config, NET)
    return jax.jit(jax.value_and_grad(lambda p: objective.loss(p, objective.prepare(batch))[0]))(params)


def test_label_smoothing_is_that_of_transformers(params):
    batch = batch_of()
    value, gradient = loss_and_gradient(config_of(label_smoothing=0.2), params, batch)
    logits = np.asarray(NET.bind(params)(batch.inputs.tokens, batch.inputs.segments))
    logits = torch.tensor(logits, requires_grad=True)
    labels = torch.tensor(np.where(batch.mask > 0, batch.inputs.tokens, -100)).long()
    theirs = LabelSmoother(epsilon=0.2)({"logits": logits}, labels, shift_labels=True)
    np.testing.assert_allclose(float(value), float(theirs.detach()), rtol=1e-5)
    (wanted,) = torch.autograd.grad(theirs, logits)
    _, back = jax.vjp(lambda p: NET.bind(p)(batch.inputs.tokens, batch.inputs.segments), params)
    (expected,) = back(jnp.asarray(wanted.numpy()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, expected)


def test_neftune_noise_has_the_size_of_the_paper_and_comes_from_the_seeds():
    seeds = np.array([1, 2, 3, 1], np.uint32)
    noise = np.asarray(neftune_noise(batch_of(seeds), 16, 5.0))
    sizes = 5.0 / np.sqrt(np.array([9, 7, 4, 2]) * 16)
    for row, length, size in zip(noise, (9, 7, 4, 2), sizes, strict=True):
        assert (row[length:] == 0).all()
        assert 0.8 * size < np.abs(row[:length]).max() <= size
        assert abs(row[:length].mean()) < size / 2
    np.testing.assert_allclose(noise[0, :2] / sizes[0], noise[3, :2] / sizes[3], rtol=1e-5)  # the same seed
    assert not np.allclose(noise[0], noise[1])


def test_neftune_noise_reaches_the_embeddings(params):
    plain, _ = loss_and_gradient(config_of(), params, batch_of())
    batch = batch_of(np.arange(4, dtype=np.uint32))
    tiny, _ = loss_and_gradient(config_of(neftune_alpha=1e-6), params, batch)
    large, _ = loss_and_gradient(config_of(neftune_alpha=20.0), params, batch)
    np.testing.assert_allclose(tiny, plain, rtol=1e-5)
    assert abs(large - plain) > 1e-3


def test_dft_weighs_each_token_by_its_probability(params):
    batch = batch_of()
    value, gradient = loss_and_gradient(config_of(loss="dft"), params, batch)
    weights = batch.mask / batch.mask.sum()

    def naive(p):
        logits = NET.bind(p)(batch.inputs.tokens, batch.inputs.segments)
        logps = jax.nn.log_softmax(logits)[:, :-1]
        logps = jnp.take_along_axis(logps, batch.inputs.tokens[:, 1:, None], axis=-1)[..., 0]
        return -(weights[:, 1:] * jax.lax.stop_gradient(jnp.exp(logps)) * logps).sum()

    expected, by_params = jax.value_and_grad(naive)(params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, by_params)


def test_losses_of_sft(params, tmp_path):
    plain, gradient = loss_and_gradient(config_of(), params, batch_of())
    (tmp_path / "own.py").write_text("def likelihood(logps, scale=1.0):\n    return -scale * logps\n")
    own, its_gradient = loss_and_gradient(
        config_of(loss=f"{tmp_path / 'own.py'}:likelihood(scale=1.0)"), params, batch_of()
    )
    np.testing.assert_allclose(own, plain, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), its_gradient, gradient)
    with pytest.raises(ConfigError, match=r"algorithm\.loss: .*'dtf'.* the closest is dft"):
        objective_of(config_of(loss="dtf"), NET)
    with pytest.raises(ConfigError, match="it smooths the targets of nll"):
        objective_of(config_of(loss="dft", label_smoothing=0.1), NET)


def test_neftune_is_for_sft():
    config = default()
    config.algorithm.neftune_alpha = 5.0
    with pytest.raises(ConfigError, match="only sft"):
        validate(config)


@pytest.mark.slow
def test_a_run_with_noise_is_noisy_in_training_alone(root, tmp_path):
    def run(name, **algorithm):
        config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
        config.output_dir, config.total_steps = str(tmp_path / name), 1
        config.eval.every, config.logging.backends = 0, ("jsonl",)
        for key, value in algorithm.items():
            config.algorithm[key] = value
        return jaxrl_llm.train(config).metrics

    plain, noisy, again = run("plain"), run("noisy", neftune_alpha=5.0), run("again", neftune_alpha=5.0)
    assert noisy[0]["eval/loss"] == plain[0]["eval/loss"]
    assert noisy[1]["loss"] != plain[1]["loss"]
    assert noisy[1]["loss"] == again[1]["loss"]
