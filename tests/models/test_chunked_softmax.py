"""Logits wherever they are formed: soft caps, their derivative, and heads in fp32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.algorithms.distillation import generalized_jsd, with_tail, without_tail
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models import chunked_divergences, chunked_softmax
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.models.layers import soft_cap
from jaxrl_llm.models.logprobs import chunked_logps, log_sum_squares, token_logps
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.5,
    logit_softcap=2.0, attention_softcap=1.5, sliding_window=3, sliding_layers=(0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return jax.jit(Net(CONFIG).init)(jax.random.key(0))


def test_soft_cap_by_hand():
    assert soft_cap(jnp.array(3.0), None) == 3.0
    assert float(soft_cap(jnp.array(3.0), 2.0)) == pytest.approx(2 * np.tanh(1.5), rel=1e-6)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("at_once", [2, 8, 64])
@pytest.mark.parametrize(("length", "counts"), [(14, (13, 14, 5)), (23, (21, 18))])
def test_gradients_of_rows_up_to_a_count(monkeypatch, at_once, length, counts, slopes):
    """Each column counts once, whatever parts of a chunk the last columns take: by hand in float64."""
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", at_once * 2 * 31)
    rng = np.random.default_rng(0)
    hidden, kernel, drawn = (rng.normal(size=size) for size in ((2, length, 8), (8, 31), (2, length)))
    targets = rng.integers(0, 31, (2, length))

    def loss(hidden, kernel, weights, count):
        known = chunked_softmax.Slopes(weights) if slopes else None
        return (weights * chunked_logps(hidden, kernel, targets, 0.7, slopes=known, count=count)[0]).sum()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1)))
    shares = np.exp(hidden @ kernel / 0.7)
    shares /= shares.sum(-1, keepdims=True)
    for count in counts:
        weights = np.where(np.arange(length) < count, drawn, 0)
        slope = weights[..., None] * (np.eye(31)[targets] - shares) / 0.7
        value = (weights * np.log(np.take_along_axis(shares, targets[..., None], -1)[..., 0])).sum()
        expected = value, slope @ kernel.T, np.einsum("ntd,ntv->dv", hidden, slope)
        found = compiled(*(x.astype(np.float32) for x in (hidden, kernel, weights)), np.int32(count))
        for a, b in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_kl_that_counts_for_nothing_does_not_overflow():
    """The first token is less likely than to the reference by a factor that float32 does not hold; its weight is 0."""
    slopes = chunked_softmax.Slopes(jnp.zeros((1, 2)), jnp.array([[0.0, 1.0]]), jnp.full((1, 2), -1.0), "k3")
    hidden, kernel, targets = jnp.array([[[200.0], [1.0]]]), jnp.array([[0.0, -1.0]]), jnp.ones((1, 2), jnp.int32)

    def loss(hidden, kernel):
        return chunked_logps(hidden, kernel, targets, 1.0, slopes=slopes)[0].sum()

    d_hidden, d_kernel = jax.jit(jax.grad(loss, (0, 1)))(hidden, kernel)
    assert d_hidden[0, 0, 0] == 0 and d_hidden[0, 1, 0] != 0 and jnp.isfinite(d_kernel).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_kl_of_whole_distributions(monkeypatch, softcap):
    """Values and gradients equal torch's of the logits formed whole; the reference has another head."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 2 * 2 * 31)  # two columns at a time
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype(np.float32) for size in ((2, 5, 16), (16, 31)) * 2]
    weights = rng.normal(size=(2, 5)).astype(np.float32)

    def weighed(hidden, kernel):
        reference = chunked_divergences.Distributions(*map(jnp.asarray, arrays[2:]))
        kl = chunked_divergences.chunked_kl(hidden, kernel, reference, 0.7, softcap)
        return (weights * kl).sum(), kl

    (_, found), gradients = jax.jit(jax.value_and_grad(weighed, (0, 1), has_aux=True))(*map(jnp.asarray, arrays[:2]))
    hidden, kernel, *reference = (torch.tensor(x, requires_grad=True) for x in arrays)
    logits = [h @ k for h, k in ((hidden, kernel), reference)]
    logits = [x if softcap is None else softcap * torch.tanh(x / softcap) for x in logits]
    policy, other = (torch.log_softmax(x / 0.7, -1) for x in logits)
    kl = torch.nn.functional.kl_div(other, policy, reduction="none", log_target=True).sum(-1)
    (torch.tensor(weights) * kl).sum().backward()
    expected = (x.detach().numpy() for x in (kl, hidden.grad, kernel.grad))
    for a, b in zip((found, *gradients), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_log_probs_go_through_the_cap(monkeypatch, temperature):
    """Values and gradients of log-probs and entropy equal those of the logits formed whole."""
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 2 * 2 * 31)  # two columns at a time
    rng = np.random.default_rng(0)
    hidden, kernel = jnp.asarray(rng.normal(size=(2, 5, 16)) * 2), jnp.asarray(rng.normal(size=(16, 31)))
    targets, weights = jnp.asarray(rng.integers(0, 31, (2, 5))), jnp.asarray(rng.normal(size=(2, 2, 5)))

    def whole(hidden, kernel):
        logps = jax.nn.log_softmax(soft_cap(hidden @ kernel, 2.0) / temperature)
        picked = jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
        return picked, -(jnp.exp(logps) * logps).sum(-1)

    def chunked(hidden, kernel):
        return chunked_logps(hidden, kernel, targets, temperature, softcap=2.0)[:2]

    def run(function):
        def weighed(*arguments):
            out = function(*arguments)
            return (weights[0] * out[0] + weights[1] * out[1]).sum(), out

        return jax.jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(hidden, kernel)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), run(chunked), run(whole))
    logps = jax.nn.log_softmax(soft_cap(hidden @ kernel, 2.0))
    np.testing.assert_allclose(log_sum_squares(hidden, kernel, 2.0), jax.nn.logsumexp(2 * logps, axis=-1), atol=1e-5)


@pytest.mark.slow
def test_sampler_and_trainer_agree_on_capped_logits(params):
    """The sampler's log-probs are the trainer's, through soft caps and a window, on prompts longer than it."""
    net = Net(CONFIG)
    rng = np.random.default_rng(0)
    tokens, segments = jnp.asarray(rng.integers(0, 31, (2, 7))), jnp.asarray([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    rollout = Engine(SamplingParams(temperature=0.8), 2, 6, net=net, eos=(30,)).generate(
        params, tokens, segments, jax.random.key(1)
    )
    logps, _ = jax.jit(lambda p, t, s: token_logps(net, p, Inputs(t, s, prompt_width=7), 0.8))(
        params, rollout.tokens, rollout.segments
    )
    np.testing.assert_allclose(np.asarray(logps * rollout.mask), rollout.sample_logps, atol=2e-5)
    assert np.abs(rollout.sample_logps).max() > 0.1


def test_an_fp32_head_multiplies_unrounded_numbers(params):
    """With a bf16 network: logits, log-probs and sampling all use the product in fp32 with the parameters' own head."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 7)))
    half = Net(dataclasses.replace(CONFIG, dtype="bfloat16", logit_softcap=None))
    exact = Net(dataclasses.replace(half.config, fp32_head=True))
    hidden = jax.jit(lambda p: half.bind(p).hidden(Inputs(tokens)))(params)
    assert hidden.dtype == jnp.bfloat16
    product = hidden.astype(jnp.float32) @ params["head"]["kernel"]
    np.testing.assert_allclose(jax.jit(lambda p: exact.bind(p)(tokens))(params), product, atol=1e-5)
    rounded = jax.jit(lambda p: half.bind(p)(tokens))(params)
    assert np.abs(rounded - product).max() > 1e-3
    logps, _ = jax.jit(lambda p: token_logps(exact, p, Inputs(tokens, jnp.ones_like(tokens))))(params)
    expected = jnp.take_along_axis(jax.nn.log_softmax(product[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(logps[:, 1:], expected, atol=1e-5)
    for tied in (False, True):
        decoder = Net(dataclasses.replace(exact.config, tie_embeddings=tied))
        dtypes = {path_name(p): x.dtype for p, x in jax.tree_util.tree_leaves_with_path(
            jax.eval_shape(lambda p, net=decoder: decoding_params(p, net), decoder.shapes())
        )}  # fmt: skip
        chunked_softmax = "embed/weight" if tied else "head/kernel"
        assert dtypes.pop(chunked_softmax) == jnp.float32
        assert {dtype for path, dtype in dtypes.items() if not path.endswith("scale")} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    "beta", [pytest.param(0.0, marks=pytest.mark.slow), 0.3, pytest.param(1.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("top_k", "of_policy", "tail", "least"),
    [(0, False, True, None), (4, False, True, -4.0), (4, True, True, None), (4, True, False, -4.0)],
)
def test_the_divergence_of_a_teacher(monkeypatch, beta, top_k, of_policy, tail, least):
    """Values and gradients are those of both logits formed whole; the teacher's are capped and of more tokens."""
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 2 * 2 * 31)  # two columns at a time
    rng = np.random.default_rng(0)
    sizes = (2, 5, 16), (16, 31), (2, 5, 8), (8, 33), (2, 5)
    hidden, kernel, other, head, weights = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
    theirs = jax.nn.log_softmax(soft_cap((other @ head)[..., :31], 1.5) / 0.7)

    def whole(hidden, kernel):
        own = jax.nn.log_softmax(soft_cap(hidden @ kernel, 2.0) / 0.7)
        if top_k:
            ids = jax.lax.top_k(own if of_policy else theirs, top_k)[1]
            both = (jnp.take_along_axis(x, ids, -1) for x in (own, theirs))
            both = (x if least is None else jnp.maximum(x, least) for x in both)
            return generalized_jsd(*map(with_tail if tail else without_tail, both), beta)
        return generalized_jsd(own, theirs, beta)

    def chunked(hidden, kernel):
        teacher = chunked_divergences.Distributions(other, head, jnp.float32(1.5))
        if top_k and not of_policy:
            teacher = chunked_divergences.chunked_top(other, head[:, :31], 0.7, top_k, 1.5)
        options = (top_k if of_policy else 0, tail, least)
        return chunked_divergences.chunked_divergence(hidden, kernel, teacher, 0.7, beta, 2.0, None, *options)

    def run(function):
        def weighed(*arguments):
            return (weights * (divergence := function(*arguments))).sum(), divergence

        return jax.jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(hidden, kernel)

    found, expected = run(chunked), run(whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert np.abs(expected[1][1]).max() > 0.001
    if not top_k:  # a policy with more tokens than its teacher
        narrow = chunked_divergences.Distributions(other, head[:, :29])
        own = jax.nn.log_softmax((hidden @ kernel)[..., :29])
        by_hand = generalized_jsd(own, jax.nn.log_softmax(other @ head[:, :29]), beta)
        np.testing.assert_allclose(
            chunked_divergences.chunked_divergence(hidden, kernel, narrow, 1.0, beta), by_hand, atol=1e-5
        )
