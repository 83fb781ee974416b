"""Routing replay: the sampler's choice of experts is recorded as it was made, and the update follows it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.moe import MixtureOfExperts
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.packing.planner import PackingSpec, TypicalRows, make_packer
from jaxrl_llm.training.passes import scored_logps
from tests.rollout.test_engine import EOS, PROMPTS, generate

CONFIG = ModelConfig(
    vocab_size=29, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.6,
    experts=6, experts_per_token=2, expert_ffn=12, dense_layers=(1,),
)  # fmt: skip
NET = Net(CONFIG)
ENGINE = Engine(SamplingParams(), 4, 12, net=NET, eos=EOS, chunk=12, record_experts=True)


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


def own_experts(params, tokens, segments):
    """The experts `[N,T,L,k]` that the network chooses for whole rows, sorted."""
    return np.sort(jax.jit(lambda p: NET.bind(p).prefill(tokens, segments)[2])(params), axis=-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"slots": 4, "chunk": 2}, marks=pytest.mark.slow),
        pytest.param({"slots": 4, "chunk": 2, "speculative_tokens": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_is_recorded_is_what_the_network_chooses(params, options):
    """On every token but the last of a row, which no later token has read; prompts padded on the left."""
    rollout, _ = generate(dataclasses.replace(ENGINE, **options), params)
    found, expected = np.sort(rollout.experts, axis=-1), own_experts(params, rollout.tokens, rollout.segments)
    assert found.shape == (12, 19, 2, 2) and found.dtype == np.int8
    entered = rollout.segments.astype(bool)
    for row, length in enumerate(rollout.lengths):
        entered[row, 7 + length - 1] = False
    np.testing.assert_array_equal(found[entered], expected[entered])
    np.testing.assert_array_equal(found[~entered], -1)
    if options:
        plain, _ = generate(dataclasses.replace(ENGINE, record_experts=False, **options), params)
        assert plain.experts is None
        np.testing.assert_array_equal(plain.sample_logps, rollout.sample_logps)


def test_replayed_experts_are_weighted_by_the_router():
    layer = MixtureOfExperts(dataclasses.replace(CONFIG, experts_per_token=2), nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)
    replayed = np.array([[0, 1], [5, 2], [-1, -1], [3, 4]])
    out, chosen, _ = layer(x, None, jnp.asarray(replayed, jnp.int8))
    _, own, _ = layer(x)
    np.testing.assert_array_equal(chosen, np.where(replayed < 0, own, replayed))
    weights = np.take_along_axis(np.asarray(jax.nn.softmax(x @ layer.router.kernel[...])), np.asarray(chosen), -1)
    np.testing.assert_allclose(out, layer.experts(x, jnp.asarray(weights), chosen), atol=1e-6)


def packed(inputs: Inputs, mask) -> Inputs:
    """The inputs with a layout that packs their rows."""
    sample = TypicalRows(*(np.asarray(x) for x in (inputs.tokens, inputs.segments, mask)), inputs.prompt_width)
    spec = PackingSpec("true", 0, 0, 0, group_size=4, whole_groups=False, documents=False, noise=False)
    layout = make_packer(spec, CONFIG, make_mesh(), Positions(), sample).passing(inputs.tokens, inputs.segments, mask)
    return inputs.replace(layout=layout)


@pytest.mark.slow
def test_the_update_follows_a_sampler_that_rounds(params):
    """Of a sampler with matrices in 8 bits some tokens have other experts: log-probs are nearer with its own."""
    rollout, _ = generate(dataclasses.replace(ENGINE, weights_dtype="int8"), params, PROMPTS * 8)
    entered = rollout.experts[..., 0, 0] >= 0
    others = np.sort(rollout.experts, -1) != own_experts(params, rollout.tokens, rollout.segments)
    assert 0 < others[entered].any((-1, -2)).mean() < 0.5
    plain = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=7)

    def logps(inputs):
        return scored_logps(NET, params, inputs, 1.0, len(rollout.tokens), 1)

    alone, with_replay = (np.asarray(logps(x)) for x in (plain, plain.replace(experts=rollout.experts)))
    apart = [np.abs(x - rollout.sample_logps)[rollout.mask > 0].mean() for x in (alone, with_replay)]
    assert apart[1] < 0.8 * apart[0], apart
    in_packed_rows = logps(packed(plain.replace(experts=rollout.experts), jnp.asarray(rollout.mask)))
    np.testing.assert_allclose(in_packed_rows * rollout.mask, with_replay * rollout.mask, atol=2e-5)
