"""Hyper-connections: by hand, and against the modules of the families that have them in transformers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.hy_v4 import modeling_hy_v4 as hy_v4

from jaxrl_llm.models.hyper_connections import HyperConnection, HyperStreams, sinkhorn
from jaxrl_llm.models.model_config import ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 4,
    "ffn": 4,
    "norm_eps": 1e-3,
}
SHAPE |= {"width": 6, "hyper_streams": 3, "hyper_eps": 1e-3}
ENTRIES = SimpleNamespace(
    hidden_size=6, hc_mult=3, hc_eps=1e-3, hc_sinkhorn_iters=4, hc_magnitude=1.5, rms_norm_eps=SHAPE["norm_eps"]
)


def mixed(post, comb, residual, out):
    return post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), residual)


def through_theirs(connection, streams):
    """The streams behind the tanh of what is read, as the families' decoder layers have it."""
    if isinstance(connection, hy_v4.HYV4HyperConnection):
        post, read = connection(streams)
        return post.unsqueeze(-1) * torch.tanh(read).unsqueeze(-2) + streams
    post, comb, read = connection(streams)
    return mixed(post, comb, streams, torch.tanh(read))


def random_like(module, rng) -> dict[str, np.ndarray]:
    """Numbers for the parameters of a module of theirs, which has them from now on."""
    arrays = {name: rng.normal(size=tuple(x.shape)).astype(np.float32) for name, x in module.named_parameters()}
    for name, x in module.named_parameters():
        x.data = torch.tensor(arrays[name])
    return {name.removeprefix("hc_"): x for name, x in arrays.items()}


def weights_of(arrays):
    return {"proj": {"kernel": arrays["fn"].T}, "scale": arrays["scale"], "shift": arrays["base"]}


@pytest.mark.parametrize(
    ("connection", "head", "fields"),
    [
        (deepseek_v4.DeepseekV4HyperConnection, deepseek_v4.DeepseekV4HyperHead, {"hyper_sinkhorn": 4}),
        (hy_v4.HYV4HyperConnection, hy_v4.HYV4HyperHead, {"hyper_scale": 1.5}),
        (
            glm5_next.Glm5NextTextHyperConnection,
            lambda _: glm5_next.Glm5NextTextHyperHead(),
            {"hyper_sinkhorn": 4, "hyper_head": "mean"},
        ),
    ],
)
def test_streams_and_gradients_are_those_of_transformers(connection, head, fields):
    rng = np.random.default_rng(0)
    theirs, their_head = connection(ENTRIES), head(ENTRIES)
    params = {"streams": {"weights": weights_of(random_like(theirs, rng))}, "head": {}}
    if "hyper_head" not in fields:
        params["head"] = {"weights": weights_of(random_like(their_head, rng))}
    x = rng.normal(size=(2, 3, 3, 6)).astype(np.float32)
    given = torch.tensor(x, requires_grad=True)
    expected = their_head(through_theirs(theirs, given))
    (expected**2).sum().backward()

    config = ModelConfig(**SHAPE, **fields)
    connections = nnx.split(HyperConnection(config, nnx.Rngs(0)))[0]
    heads = nnx.split(HyperStreams(config, nnx.Rngs(0)))[0]

    def through_ours(params, x):
        read, added = nnx.merge(connections, params["streams"])(x)
        out = nnx.merge(heads, params["head"]).gathered(added(jnp.tanh(read)))
        return (out**2).sum(), out

    (_, found), gradients = jax.jit(jax.value_and_grad(through_ours, argnums=(0, 1), has_aux=True))(params, x)
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-5)
    assert given.grad is not None
    np.testing.assert_allclose(gradients[1], given.grad, rtol=1e-4, atol=1e-5)
    for part, module in (("streams", theirs), ("head", their_head)):
        grads = {name.removeprefix("hc_"): np.asarray(x.grad) for name, x in module.named_parameters()}
        wanted = {"weights": weights_of(grads)} if grads else {}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradients[0][part], wanted)


def test_rows_and_columns_of_the_mix_add_to_one():
    """And the streams, whose mean it keeps, are mixed by its columns."""
    logits = np.random.default_rng(1).normal(size=(3, 3, 5)).astype(np.float32)
    mix = sinkhorn(logits, 30, 0.0)
    np.testing.assert_allclose(mix.sum(0), 1.0, atol=1e-6)
    np.testing.assert_allclose(mix.sum(1), 1.0, atol=1e-5)
    once = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(sinkhorn(logits, 1, 0.0), once / once.sum(0), rtol=1e-5)


def test_streams_that_are_not_mixed_by_hand():
    """With weights of 0 each stream is read by half, and takes half of `hyper_scale` of the output."""
    config = dataclasses.replace(ModelConfig(**SHAPE), hyper_eps=0.0, hyper_scale=3.0, init_scale=0.0)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, 3, 6)), jnp.bfloat16)
    read, added = HyperConnection(config, nnx.Rngs(0))(x)
    wide = np.asarray(x, np.float32)
    np.testing.assert_allclose(np.asarray(read, np.float32), wide.sum(2) / 2, rtol=1e-2, atol=1e-2)
    out = added(jnp.ones_like(read))
    assert out.dtype == read.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), wide + 1.5, rtol=1e-2, atol=1e-2)
    streams = HyperStreams(config, nnx.Rngs(0))
    spread = streams.spread_out(x[:, :, 0])
    assert spread.shape == x.shape
    np.testing.assert_allclose(np.asarray(streams.gathered(spread), np.float32), 1.5 * wide[:, :, 0], rtol=1e-2)
