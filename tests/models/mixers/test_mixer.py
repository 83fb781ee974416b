"""The mixer protocol: a mixer of the test's own, with a recurrent state, trains, is saved in stacks, and is sampled."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import segment_positions
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.decoding import continued_logits, logits_of, padded, trainer_logps
from tests.rollout.test_multi_turn import Echo


class AverageCache(NamedTuple):
    """The states of a prompt `[..., G, D, 1]`, its last one, or of rows `[..., G, R, D, S]`, one a place."""

    state: jax.Array


class MovingAverage(nnx.Module):
    """A moving average of values over a segment: `s_t = decay s_{t-1} + (1 - decay) v_t`, decay by layer.

    Rows keep the state of every place, so that a decode step may be repeated or begin behind rejected tokens.
    """

    path = "average"
    shares_prefixes = False

    def __init__(self, config, rngs):
        self.v = Linear(config.width, config.width, config, rngs)
        self.o = Linear(config.width, config.width, config, rngs)

    @staticmethod
    def layer_arrays(config, layer):
        return np.float32(0.5 if layer.window is None else 0.8)

    @staticmethod
    def flops(config, tokens, pairs):
        return 4.0 * config.width * tokens

    def prefill(self, x, inputs, arrays):
        values = self.v(x)

        def step(state, token):
            value, position, segment = token
            following = arrays * jnp.where(position[:, None] == 0, 0.0, state) + (1 - arrays) * value
            state = jnp.where(segment[:, None] == 0, 0.0, following)
            return state, state

        tokens = (values.swapaxes(0, 1), inputs.positions.T, inputs.segments.T)
        last, states = jax.lax.scan(step, jnp.zeros_like(values[:, 0]), tokens)
        return self.o(states.swapaxes(0, 1)), AverageCache(last[..., None])

    def decode(self, x, inputs, prompt, cache, arrays):
        values = self.v(x).reshape(*inputs.length.shape, -1, x.shape[-1])  # [G,R,W,D]
        before = jnp.maximum(inputs.length - 1, 0)[..., None, None]
        state = jnp.take_along_axis(cache.state, before, axis=-1)[..., 0]
        state = jnp.where(inputs.length[..., None] == 0, prompt.state[:, None, :, 0], state)
        states, outputs = cache.state, []
        for number in range(values.shape[2]):
            state = arrays * state + (1 - arrays) * values[:, :, number]
            here = jnp.arange(states.shape[-1]) == (inputs.length + number)[..., None, None]
            states = jnp.where(here, state[..., None], states)
            outputs.append(state)
        return self.o(jnp.stack(outputs, axis=2).reshape(x.shape)), AverageCache(states)

    @staticmethod
    def empty_cache(prompt, rows, size):
        *lead, width, _ = prompt.state.shape
        return AverageCache(jnp.zeros((*lead, rows, width, size), prompt.state.dtype))

    @staticmethod
    def grow_cache(cache, size):
        more = (0, size - cache.state.shape[-1])
        return AverageCache(jnp.pad(cache.state, ((0, 0),) * (cache.state.ndim - 1) + (more,)))


CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4,
    mixers=(MovingAverage, MovingAverage, Attention, MovingAverage), sliding_window=4, sliding_layers=(0, 2),
)  # fmt: skip
NET = Net(CONFIG)
ENGINE = Engine(SamplingParams(), net=NET, group_size=3, max_completion_length=10, eos=(3, 11), chunk=4)


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return padded([rng.integers(0, 31, length) for length in (6, 9, 3)], "left")


def test_layers_are_stacked_by_kind(params):
    """A stack of each mixer; layers in a row that differ in numbers alone are one run."""
    assert CONFIG.stacks == {"layers": (2,), "average_layers": (0, 1, 3)}
    runs = [(run.stack, run.layers, run.start) for run in CONFIG.layer_runs]
    assert runs == [("average_layers", (0, 1), 0), ("layers", (2,), 0), ("average_layers", (3,), 2)]
    assert params["average_layers"]["average"]["v"]["kernel"].shape == (3, 16, 16)
    assert set(params["layers"]) == {"input_norm", "attention", "post_attention_norm", "mlp"}


@pytest.mark.slow
def test_unrolled_equals_scanned(params, rows):
    tokens, segments = rows

    def loss(net, params):
        return jnp.where(segments[..., None] > 0, jnp.sin(net.bind(params)(tokens, segments)), 0).sum()

    found = [jax.jit(jax.value_and_grad(lambda p, net=net: loss(net, p)))(params) for net in (NET, NET.unrolled())]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), *found)


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_decode_equals_prefill(params, rows, scan_layers):
    """Tokens one by one, and in steps of two."""
    net = NET if scan_layers else NET.unrolled()
    tokens, segments = rows
    continuations = np.random.default_rng(2).integers(0, 31, (3, 2, 4))
    full = np.concatenate([np.repeat(tokens, 2, axis=0), continuations.reshape(6, 4)], axis=1)
    full_segments = np.concatenate([np.repeat(segments, 2, axis=0), np.ones((6, 4), int)], axis=1)
    expected = np.asarray(logits_of(NET, params, full, full_segments))[:, -4:].reshape(3, 2, 4, -1)
    for at_once in (1, 2):
        found = continued_logits(net, params, tokens, segments, continuations, at_once)
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 4, "chunk": 2, "speculative_tokens": 2},
        {"slots": 4, "chunk": 2},
        {"speculative_tokens": 2},
        {"weights_dtype": "int8", "slots": 5},
    ],
    ids=str,
)
def test_the_engine_samples_it(params, rows, changes):
    """With slots that refill, caches that grow and proposals that fail: the log-probs are those of a forward pass."""
    tokens, segments = rows
    engine = dataclasses.replace(ENGINE, **changes)
    rollout = jax.tree.map(np.asarray, engine.generate(params, tokens, segments, jax.random.key(1)))
    assert rollout.lengths.min() < rollout.lengths.max()
    if "weights_dtype" not in changes:
        expected = jax.tree.map(np.asarray, ENGINE.generate(params, tokens, segments, jax.random.key(1)))
        np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=tokens.shape[1])
    logps = np.asarray(trainer_logps(NET, params, inputs)[0]) * rollout.mask
    np.testing.assert_allclose(rollout.sample_logps, logps, atol=0.3 if "weights_dtype" in changes else 1e-4)


@pytest.mark.slow
def test_observations_enter_its_state(params, rows):
    """Rows of several turns, that wait while others decode."""
    tokens, segments = rows
    server = Echo(slow=(1, 6))
    rollout = jax.tree.map(np.asarray, ENGINE.generate(params, tokens, segments, jax.random.key(1), turn_server=server))
    assert (rollout.lengths > rollout.mask.sum(1)).any()
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=tokens.shape[1])
    logps = np.asarray(trainer_logps(NET, params, inputs)[0]) * rollout.mask
    np.testing.assert_allclose(rollout.sample_logps, logps, atol=1e-4)


def test_shared_prefixes_are_refused(params, rows):
    """Packed rows see a group's prefix through a mask, which a recurrent state does not."""
    tokens, segments = (jnp.asarray(x) for x in rows)
    inputs = Inputs(tokens, segments, segment_positions(segments), prefix_segments=segments)
    with pytest.raises(ConfigError, match="rows of a group share a prefix"):
        NET.bind(params).hidden(inputs)
