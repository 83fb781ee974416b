"""Supervised fine-tuning with label smoothing, against transformers, and with NEFTune's noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.setup.objectives import objective_of
from tests.models.decoding import logits_of

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


def loss_of(config, params, batch):
    objective = objective_of(config, NET)
    return jax.jit(lambda p: objective.loss(p, objective.prepare(batch))[0])(params)


def loss_and_gradient(config, params, batch):
    objective = objective_of(config, NET)
    return jax.jit(jax.value_and_grad(lambda p: objective.loss(p, objective.prepare(batch))[0]))(params)


def test_label_smoothing_is_that_of_transformers(params):
    batch = batch_of()
    value, gradient = loss_and_gradient(config_of(label_smoothing=0.2), params, batch)
    logits = np.asarray(logits_of(NET, params, batch.inputs.tokens, batch.inputs.segments))
    logits = torch.tensor(logits, requires_grad=True)
    labels = torch.tensor(np.where(batch.mask > 0, batch.inputs.tokens, -100)).long()
    theirs = LabelSmoother(epsilon=0.2)({"logits": logits}, labels, shift_labels=True)
    np.testing.assert_allclose(float(value), float(theirs.detach()), rtol=1e-5)
    (wanted,) = torch.autograd.grad(theirs, logits)
    _, back = jax.vjp(lambda p: logits_of(NET, p, batch.inputs.tokens, batch.inputs.segments), params)
    (expected,) = back(jnp.asarray(wanted.numpy()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, expected)


def test_neftune_noise_reaches_the_embeddings(params):
    plain = loss_of(config_of(), params, batch_of())
    batch = batch_of(np.arange(4, dtype=np.uint32))
    tiny, large = (loss_of(config_of(neftune_alpha=alpha), params, batch) for alpha in (1e-6, 20.0))
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

    expected, by_params = jax.jit(jax.value_and_grad(naive))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, by_params)


def test_eaft_is_that_of_axolotl(params):
    """Its formula over the whole vocabulary, in torch; gradients are of the log-probs alone."""
    batch = batch_of()
    value, gradient = loss_and_gradient(config_of(loss="eaft(alpha=1.5, scale=1.0)"), params, batch)
    logits = logits_of(NET, params, batch.inputs.tokens, batch.inputs.segments)
    shifted = torch.tensor(np.asarray(logits)[:, :-1], requires_grad=True)
    mask, labels = torch.tensor(batch.mask[:, 1:] > 0), torch.tensor(batch.inputs.tokens[:, 1:]).long()
    top = torch.topk(shifted[mask].detach(), 31).values.softmax(-1)
    weights = (-(top * torch.log(top + 1e-10)).sum(-1)) ** 1.5
    theirs = (torch.nn.functional.cross_entropy(shifted[mask], labels[mask], reduction="none") * weights).mean()
    np.testing.assert_allclose(float(value), float(theirs.detach()), rtol=1e-5)
    (wanted,) = torch.autograd.grad(theirs, shifted)
    _, back = jax.vjp(lambda p: logits_of(NET, p, batch.inputs.tokens, batch.inputs.segments)[:, :-1], params)
    (expected,) = back(jnp.asarray(wanted.numpy()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, expected)
    for written, message in (
        ("eaft(scale=0)", "scale is 0, but it takes a number above 0"),
        ("eaft(alpha=-0.5)", "alpha is -0.5, but it takes a number 0 or more"),
        ("eaft(alpha='1')", "alpha is '1', a text, but it takes a number"),
    ):
        with pytest.raises(ConfigError, match=f"algorithm.loss.*{message}"):
            objective_of(config_of(loss=written), NET)
    scaled = loss_of(config_of(loss="eaft(alpha=1.5)"), params, batch)
    np.testing.assert_allclose(scaled, value / np.log(20) ** 1.5, rtol=1e-5)


def test_a_loss_of_ones_own_with_metrics(params, tmp_path):
    """Its numbers are those of the tokens in the mask: on padding, of log-prob 0, this one is infinite."""
    (tmp_path / "own.py").write_text(
        "import jax.numpy as jnp\n\nfrom jaxrl_llm.algorithms.losses import Metric\n\n\n"
        "def unlikely(logps):\n"
        "    metrics = {'own/p': Metric(jnp.exp(logps)), 'own/rows': Metric(logps, 'row_mean')}\n"
        "    return -jnp.log(-jnp.expm1(logps)), metrics\n\n\n"
        "def mean(logps):\n    return -logps.mean()\n"
    )
    batch, objective = batch_of(), objective_of(config_of(loss=f"{tmp_path}/own.py:unlikely"), NET)
    gradient, metrics = jax.jit(jax.grad(lambda p: objective.loss(p, objective.prepare(batch)), has_aux=True))(params)
    logits = jax.nn.log_softmax(logits_of(NET, params, batch.inputs.tokens, batch.inputs.segments))[:, :-1]
    logps = np.asarray(jnp.take_along_axis(logits, batch.inputs.tokens[:, 1:, None], axis=-1)[..., 0])
    mask = batch.mask[:, 1:]
    np.testing.assert_allclose(metrics["own/p"], np.exp(logps)[mask > 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["own/rows"], ((logps * mask).sum(1) / mask.sum(1)).mean(), rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    with pytest.raises(ConfigError, match=r"algorithm\.loss returns .* \(\), .* for each token, \(4, 9\)"):
        loss_and_gradient(config_of(loss=f"{tmp_path}/own.py:mean"), params, batch)


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
