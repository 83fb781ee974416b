"""Prompts in caches of the grid's width, whatever the width they were computed in: next tokens see the same of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.mixers.pooled_attention import PooledAttention
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.engine import Engine, prefill
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.serving.grid import widened
from tests.models.decoding import decode, row_caches
from tests.models.mixers import test_compressed_attention, test_pooled_attention, test_pooled_latents

CONFIGS = {
    "compressed": test_compressed_attention.CONFIG,
    "blocks": dataclasses.replace(test_pooled_attention.CONFIG, mixers=(PooledAttention,) * 3),
    "pools": test_pooled_latents.CONFIG,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_are_the_same_in_every_width(kind):
    """Of layers that keep more of prompts than their tokens."""
    engine = Engine(SamplingParams(temperature=0.0), 1, 8, net=Net(CONFIGS[kind]), eos=())
    params = engine.decoding_params(jax.jit(engine.net.init)(jax.random.key(0)))
    rng, made = np.random.default_rng(0), {}
    documents, following = [rng.integers(0, 31, n) for n in (13, 11)], rng.integers(0, 31, (2, 1, 4))
    for width in (16, 32):
        rows = [np.pad(document, (width - len(document), 0)) for document in documents]
        segments = [np.arange(width) >= width - len(document) for document in documents]
        arrays = (jnp.asarray(np.stack(x), jnp.int32) for x in (rows, segments))
        made[width] = prefill(engine, params, *arrays, row_keys(jax.random.key(0), np.uint32(0), 2))[0]

    def logits(prompts):
        rows = row_caches(engine.decoder, prompts.cache, 1, 8)
        return decode(engine.decoder, params, following, prompts.mask, prompts.cache, rows, 0)[0]

    expected = logits(made[16])
    np.testing.assert_allclose(logits(widened(engine, params, made[16], 32)), expected, atol=2e-5)
    np.testing.assert_allclose(logits(widened(engine, params, made[32], 16)), expected, atol=2e-5)
