"""Short convolutions, delta nets and Mamba behind them: decoding against whole rows, and rows that are sampled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.delta_net import GatedDeltaNet
from jaxrl_llm.models.mixers.kimi_delta import KimiDelta
from jaxrl_llm.models.mixers.mamba1 import Mamba1
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.mixers.mixer import AttentionInputs
from jaxrl_llm.models.mixers.short_conv import AT_ONCE, ShortConv
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.conftest import variants
from tests.models.decoding import continued_logits, logits_of, padded, trainer_logps
from tests.rollout.test_multi_turn import Echo

SHAPE = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3
)  # fmt: skip
CONFIGS = {
    "delta net": dataclasses.replace(
        SHAPE, mixers=(GatedDeltaNet, Attention), attention_gate="queries", delta_key_heads=2, delta_value_heads=4,
        delta_key_dim=6, delta_value_dim=5, delta_conv=4,
    ),
    "mamba": dataclasses.replace(
        SHAPE, mixers=(Mamba2, Attention), delta_key_heads=2, delta_value_heads=4, delta_key_dim=6, delta_value_dim=5,
        delta_conv=4, conv_bias=True,
    ),
    "kimi": dataclasses.replace(
        SHAPE, mixers=(KimiDelta, Attention), delta_key_heads=2, delta_value_heads=2, delta_key_dim=6,
        delta_value_dim=5, delta_conv=4,
    ),
    "mamba 1": dataclasses.replace(
        SHAPE, mixers=(Mamba1, Attention), delta_key_heads=1, delta_value_heads=20, delta_key_dim=6, delta_value_dim=1,
        delta_conv=4, conv_bias=True, step_rank=3, state_norm_eps=1e-3,
    ),
    "convolution": dataclasses.replace(SHAPE, mixers=(ShortConv, Attention), conv_size=3),
}  # fmt: skip


@pytest.fixture(scope="module", params=variants(CONFIGS, quick=("delta net",)))
def net(request):
    return Net(CONFIGS[request.param])


def engine_of(net) -> Engine:
    return Engine(SamplingParams(), net=net, group_size=3, max_completion_length=10, eos=(3, 11), chunk=4)


@pytest.fixture(scope="module")
def params(net):
    return jax.jit(net.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return padded([rng.integers(0, 31, length) for length in (6, 9, 2)], "left")


@pytest.mark.slow
def test_prefill_and_decode_equal_the_full_forward(net, params, rows):
    """Tokens one by one and three at once, from prompts shorter than the convolution too."""
    tokens, segments = rows
    continuations = np.random.default_rng(2).integers(0, 31, (3, 2, 6))
    full = np.concatenate([np.repeat(tokens, 2, axis=0), continuations.reshape(6, 6)], axis=1)
    full_segments = np.concatenate([np.repeat(segments, 2, axis=0), np.ones((6, 6), int)], axis=1)
    expected = np.asarray(logits_of(net, params, full, full_segments))[:, -6:].reshape(3, 2, 6, -1)
    for at_once in (1, 3):
        found = continued_logits(net, params, tokens, segments, continuations, at_once)
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", variants(("delta net", "kimi", "mamba"), quick=("mamba",)))
def test_rows_are_computed_on_accelerators_as_on_cpus(name, monkeypatch):
    """In longer chunks, with padding on both sides and documents that end in chunks: all gradients too."""
    mixer = CONFIGS[name].mixers[0](CONFIGS[name], nnx.Rngs(0))
    mixer.log_decay[...] = jnp.full_like(mixer.log_decay[...], -4)  # states outlive chunks
    graph, params = nnx.split(mixer)
    rng, segments = np.random.default_rng(0), np.ones((3, 150), int)
    segments[0, :7], segments[1, 140:], segments[2, 5:9], segments[2, 9:] = 0, 0, 2, 3
    x, wanted = jnp.asarray(rng.normal(size=(2, 3, 150, 16)) * (segments > 0)[..., None], jnp.float32)
    inputs = AttentionInputs(np.tile(np.arange(150), (3, 1)), jnp.asarray(segments), None)

    def loss(params, x):
        out, cache = nnx.merge(graph, params).prefill(x, inputs, ())
        return (out * wanted).sum() + (cache.state**2).sum(), (out, cache)

    def run(backend):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), run("gpu"), run("cpu"))


def test_more_tokens_at_once_than_are_kept_are_refused(net, params, rows):
    many = np.zeros((3, 1, AT_ONCE + 1), int)
    with pytest.raises(ConfigError, match="decode up to 64 tokens of a row at once, and not 65"):
        continued_logits(net, params, *rows, many, AT_ONCE + 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"slots": 4, "chunk": 2, "speculative_tokens": 2}, {"slots": 5}], ids=str)
def test_the_engine_samples_it(net, params, rows, changes):
    """With slots that refill and proposals that fail: the log-probs are those of a forward pass."""
    tokens, segments = rows
    engine = dataclasses.replace(engine_of(net), **changes)
    rollout = jax.tree.map(np.asarray, engine.generate(params, tokens, segments, jax.random.key(1)))
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=tokens.shape[1])
    logps = np.asarray(trainer_logps(net, params, inputs)[0]) * rollout.mask
    np.testing.assert_allclose(rollout.sample_logps, logps, atol=1e-4)


@pytest.mark.slow
def test_observations_enter_its_state(net, params, rows):
    """Rows of several turns, that wait while others decode."""
    tokens, segments = rows
    engine, server = (
        dataclasses.replace(engine_of(net), max_completion_length=16, eos=(2, 3, 8, 11, 19)),
        Echo(slow=(1, 6)),
    )
    rollout = jax.tree.map(np.asarray, engine.generate(params, tokens, segments, jax.random.key(1), turn_server=server))
    assert (rollout.lengths > rollout.mask.sum(1)).any()
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=tokens.shape[1])
    logps = np.asarray(trainer_logps(net, params, inputs)[0]) * rollout.mask
    np.testing.assert_allclose(rollout.sample_logps, logps, atol=1e-4)


def test_decays_are_those_of_the_trainer_in_16_bits_too(net, params):
    """What works in fp32 is not rounded for the sampler; matrices are."""
    decoder = engine_of(Net(dataclasses.replace(net.config, dtype="bfloat16")))
    (layer, _) = decoder.decoding_params(params)["layers"].values()
    kept = {name for name, x in layer[net.config.mixers[0].path].items() if getattr(x, "dtype", None) == np.float32}
    expected = {"delta net": {"log_decay", "step_bias", "norm_scale"}, "convolution": set()}
    expected["kimi"] = expected["delta net"]
    expected["mamba"] = expected["delta net"] | {"skip", "conv_bias"}
    expected["mamba 1"] = {"log_rates", "step_bias", "skip", "conv_bias"}
    assert kept == expected[next(name for name, config in CONFIGS.items() if config == net.config)]
    assert layer["mlp"]["down"]["kernel"].dtype == jax.numpy.bfloat16
