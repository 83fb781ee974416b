"""Sampling: the distribution drawn, what the filters keep (transformers is the oracle), and the log-probs reported."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jaxrl_llm.config.schema import COLDEST, sampling_option
from jaxrl_llm.rollout.sampling import (
    BLOCK,
    RowSampling,
    SamplingParams,
    inverse_cdf,
    kept_shares,
    sample,
    sample_by_row,
)

VOCABULARIES = [2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 300, 5000]
LARGEST_UNIFORM = 1 - 2.0**-24
FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100_000},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


def random_logits(rows: int, vocab: int, scale: float, seed: int = 0):
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * scale


@jax.jit
def draw(probs, uniforms):
    """The token drawn from probs [V] by each of the uniforms."""
    return jax.vmap(lambda u: inverse_cdf(probs[None], u[None])[0])(uniforms)


@pytest.mark.parametrize(
    ("vocab", "scale"),
    [
        pytest.param(vocab, scale, id=f"{vocab}-{name}", marks=() if vocab in often else pytest.mark.slow)
        for name, scale, often in (
            ("uniform", 0.0, (BLOCK,)), ("flat", 1.0, (BLOCK + 1,)), ("peaky", 6.0, (2, BLOCK - 1, 300))
        )
        for vocab in VOCABULARIES
    ],
)  # fmt: skip
def test_equal_steps_of_u_give_every_token_its_share(vocab, scale):
    """u at the middle of M equal intervals: a token of probability p is drawn M p times, give or take one."""
    logits = random_logits(1, vocab, scale)[0]
    probs = np.exp(logits - logits.max())
    count = 50_000
    drawn = draw(probs, ((np.arange(count) + 0.5) / count).astype(np.float32))
    expected = count * probs.astype(np.float64) / probs.sum(dtype=np.float64)
    assert np.abs(np.bincount(drawn, minlength=vocab) - expected).max() <= 1.1


@pytest.mark.parametrize(
    ("sampling", "vocab", "scale"),
    [
        pytest.param(*case, id=f"{name}-{case[1]}-{case[2]}", marks=() if case[1:] == often else pytest.mark.slow)
        for name, sampling, often in (
            ("whole", SamplingParams(), (300, 3.0)), ("filtered", SamplingParams(0.7, top_p=0.9, top_k=50), (300, 0.3))
        )
        for case in itertools.product((sampling,), (7, 300, 5000), (0.3, 3.0))
    ],
)  # fmt: skip
def test_samples_follow_the_distribution(sampling, vocab, scale):
    """Chi-square of 40,000 samples against the probabilities that float64 gives."""
    logits = random_logits(1, vocab, scale, seed=1)
    count = 40_000
    uniforms = jax.random.uniform(jax.random.key(3), (count,))
    drawn = jax.jit(jax.vmap(lambda u: sample(jnp.asarray(logits), u[None], sampling)[0][0]))(uniforms)
    log_weights = logits[0].astype(np.float64) / sampling.temperature
    kept = np.asarray(kept_shares(jax.nn.softmax(logits / sampling.temperature), sampling))[0] > 0
    probs = np.where(kept, np.exp(log_weights - log_weights.max()), 0)
    expected, found = count * probs / probs.sum(), np.bincount(drawn, minlength=vocab)
    assert not found[expected == 0].any()
    rare = expected < 5
    if rare.any() and expected[rare].sum() >= 5:
        pooled = [(x[~rare], x[rare].sum()) for x in (found, expected)]
        found, expected = (np.append(*x) for x in pooled)
    else:
        found, expected = found[~rare], expected[~rare]
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-3


def test_the_coldest_temperature_is_greedy_and_finite():
    """With the largest logits that models have, next to 0 for a row that has none, and with settings of each row."""
    logits = np.concatenate([random_logits(8, 300, scale) for scale in (1e-3, 1.0, 1e4)])
    logits[:, 7] = -np.inf  # a token that is forbidden
    uniforms = np.linspace(0, LARGEST_UNIFORM, len(logits), dtype=np.float32)
    options, coldest, row = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, COLDEST, np.ones(len(logits), np.float32)
    by_row = RowSampling(coldest * row, row, 0 * row.astype(np.int32), 0 * row, -np.ones((len(row), 1), np.int32))
    for tokens, logps in (
        sample(logits, uniforms, SamplingParams(coldest, **options)),
        sample_by_row(logits, uniforms, by_row, np.zeros(len(row), bool), lambda: logits),
    ):
        sure = np.diff(np.sort(logits, axis=1)[:, -2:], axis=1)[:, 0] > 50 * coldest
        assert sure.sum() >= 14
        np.testing.assert_array_equal(np.asarray(tokens)[sure], logits.argmax(axis=1)[sure])
        assert np.isfinite(logps).all() and not np.asarray(logps)[sure].any()


def test_lower_temperatures_are_greedy():
    """In generation, evaluations and requests alike, as clients that divide by it write 1e-5."""
    assert SamplingParams(1e-5, top_k=3) == SamplingParams(0.0, top_k=3) != SamplingParams(COLDEST, top_k=3)
    assert sampling_option("eval.temperature", None).accepts(1e-30)


def test_the_chi_square_can_fail():
    """The same count against probabilities 3 % off is refused: the tests above see errors of that size."""
    found = np.full(7, 40_000 / 7)
    expected = found * np.array([1.03, 0.97, 1.03, 0.97, 1.03, 0.97, 1])
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue < 1e-3


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_of_probability_zero_are_never_drawn(vocab):
    """At both ends of [0,1), on and next to every step of the cumulative sum, where rounding could choose them."""
    rng = np.random.default_rng(vocab)
    probs = (rng.exponential(size=vocab) * (rng.random(vocab) < 0.3)).astype(np.float32)
    probs[[0, -1]] = 0
    probs[vocab // 2] = 0 if vocab > 2 else 1
    if not probs.any():
        probs[1] = 1
    steps = (np.cumsum(probs, dtype=np.float64) / probs.sum(dtype=np.float64)).astype(np.float32)
    uniforms = np.concatenate([steps, np.nextafter(steps, 0), np.nextafter(steps, 2), steps * (1 - 2**-22)])
    uniforms = np.unique(np.append(uniforms[uniforms < 1], [0, LARGEST_UNIFORM])).astype(np.float32)
    drawn = np.asarray(draw(probs, uniforms))
    assert (probs[drawn] > 0).all()
    assert drawn[0] == np.flatnonzero(probs)[0] and drawn[-1] == np.flatnonzero(probs)[-1]
    assert (np.diff(drawn) >= 0).all()  # a larger u never draws an earlier token


@pytest.mark.parametrize("only", [0, 1, BLOCK - 1, BLOCK, 299])
def test_a_single_possible_token_is_always_drawn(only):
    probs = np.zeros(300, np.float32)
    probs[only] = 1e-30  # probabilities may have any scale
    np.testing.assert_array_equal(draw(probs, np.array([0, 0.5, LARGEST_UNIFORM], np.float32)), only)


def test_rows_are_drawn_each_from_its_own_probabilities():
    probs = jax.nn.softmax(random_logits(40, 300, 2.0))
    uniforms = jax.random.uniform(jax.random.key(0), (40,))
    one_by_one = [int(draw(row, u[None])[0]) for row, u in zip(probs, uniforms, strict=True)]
    np.testing.assert_array_equal(inverse_cdf(probs, uniforms), one_by_one)


def kept_by_transformers(logits, sampling: SamplingParams):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return (warpers(torch.zeros((len(logits), 1), dtype=torch.long), torch.tensor(logits)) > -torch.inf).numpy()


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(filters, vocab, scale):
    sampling = SamplingParams(**filters)
    logits = random_logits(8, vocab, scale, seed=2)
    logps = jax.nn.log_softmax(logits / sampling.temperature)
    found = np.asarray(jax.jit(kept_shares, static_argnums=1)(jnp.exp(logps), sampling))
    np.testing.assert_array_equal(found > 0, kept_by_transformers(logits, sampling))
    np.testing.assert_allclose(found[found > 0], np.exp(logps)[found > 0], rtol=1e-6)  # kept, and not renormalised


def test_hand_computed_filters():
    logps = jnp.log(jnp.array([[0.4, 0.05, 0.3, 0.2, 0.05]]))

    def kept(**filters):
        return np.flatnonzero(kept_shares(jnp.exp(logps), SamplingParams(**filters))[0]).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 2]
    assert kept(top_p=0.39) == [0]
    assert kept(top_p=0.41) == [0, 2]  # the token that crosses the mass stays
    assert kept(top_p=0.75) == [0, 2, 3]
    assert kept(top_p=1e-30) == [0]  # never nothing
    assert kept(min_p=0.6) == [0, 2]
    assert kept(top_k=3, top_p=0.44) == [0]  # top-p is of the mass that top-k left, 0.9: its 44 % is 0.396
    assert kept(top_p=0.44) == [0, 2]


def test_ties_are_kept_together():
    logps = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.1, 0.2]]))
    for filters in ({"top_k": 2}, {"top_p": 0.5}):
        assert np.flatnonzero(kept_shares(jnp.exp(logps), SamplingParams(**filters))[0]).tolist() == [1, 2, 4]


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_top_p_of_a_large_vocabulary(scale):
    """The nucleus by sorting in float64: its size agrees within the tokens whose mass is in float32's rounding."""
    logits = random_logits(3, 40_000, scale, seed=4)
    for row in np.exp(np.asarray(jax.nn.log_softmax(logits)), dtype=np.float64):
        descending = np.sort(row)[::-1]
        found = np.asarray(kept_shares(jnp.asarray(row, jnp.float32)[None], SamplingParams(top_p=0.9)))[0]
        mass = np.cumsum(descending) / descending.sum()
        low, high = np.searchsorted(mass, [0.9 - 1e-5, 0.9 + 1e-5]) + 1
        assert low <= (found > 0).sum() <= high
        assert found[found > 0].min() >= descending[high - 1] * (1 - 1e-5)


@pytest.mark.parametrize(
    "filters",
    [{}, *(pytest.param(x, marks=pytest.mark.slow if len(x) == 1 else ()) for x in FILTERS)],
    ids=str,
)
def test_log_probs_are_of_the_whole_vocabulary_at_the_temperature(filters):
    sampling = SamplingParams(**filters)
    logits = random_logits(16, 300, 2.0, seed=5)
    tokens, logps = jax.jit(sample, static_argnums=2)(logits, jax.random.uniform(jax.random.key(0), (16,)), sampling)
    expected = torch.log_softmax(torch.tensor(logits).double() / sampling.temperature, -1).numpy()
    np.testing.assert_allclose(logps, expected[np.arange(16), tokens], atol=1e-5)
    assert kept_by_transformers(logits, sampling)[np.arange(16), tokens].all()
    assert tokens.dtype == jnp.int32 and logps.dtype == jnp.float32


def test_greedy():
    """The likeliest token whatever u is, with its log-prob at temperature 1."""
    logits = random_logits(16, 300, 2.0)
    for u in (0.0, LARGEST_UNIFORM):
        tokens, logps = sample(jnp.asarray(logits), jnp.full(16, u), SamplingParams(temperature=0.0, top_p=0.5))
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
        np.testing.assert_allclose(logps, np.asarray(jax.nn.log_softmax(logits)).max(-1), rtol=1e-6)


def test_bfloat16_logits_give_float32_log_probs():
    logits = jnp.asarray(random_logits(4, 300, 2.0), jnp.bfloat16)
    tokens, logps = sample(logits, jnp.full(4, 0.5), SamplingParams(temperature=0.9))
    expected = jax.nn.log_softmax(logits.astype(jnp.float32) / 0.9)
    np.testing.assert_allclose(
        logps, np.take_along_axis(np.asarray(expected), np.asarray(tokens)[:, None], 1)[:, 0], rtol=1e-6
    )
    assert logps.dtype == jnp.float32


@pytest.mark.parametrize("vocab", [300, *(pytest.param(vocab, marks=pytest.mark.slow) for vocab in (7, BLOCK, 5000))])
def test_gpus_draw_the_same_in_fewer_passes(vocab, monkeypatch):
    """They read logits once where nothing is filtered, and several times less for a nucleus."""
    logits = random_logits(200, vocab, 3.0)
    logits[:, 3] = -np.inf  # a token that cannot be
    uniforms = np.random.default_rng(1).random(200).astype(np.float32)

    def found():  # by functions of its own, which are traced anew for each backend
        settings = (SamplingParams(temperature=0.7), SamplingParams(top_p=0.9, top_k=30))
        return [jax.jit(lambda *rows, by=setting: sample(*rows, by))(logits, uniforms) for setting in settings]

    expected = found()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for (tokens, logps), (expected_tokens, expected_logps) in zip(found(), expected, strict=True):
        np.testing.assert_array_equal(tokens, expected_tokens)
        np.testing.assert_allclose(logps, expected_logps, atol=3e-6)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_settings_by_row_are_those_of_each_row(backend, monkeypatch):
    """Rows of different settings in one batch: tokens and log-probs of each are, bit for bit, those of `sample`."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    settings = [SamplingParams(), SamplingParams(temperature=0), *(SamplingParams(**filters) for filters in FILTERS)]
    logits, draws = random_logits(1, 300, 3.0)[0], 50
    uniforms = np.random.default_rng(1).random(draws).astype(np.float32)
    rows = [setting for setting in settings for _ in range(draws)]
    columns = (np.asarray([getattr(row, name) for row in rows]) for name in ("temperature", "top_p", "top_k", "min_p"))
    by_row = RowSampling(*(x.astype(np.int32 if x.dtype == int else np.float32) for x in columns), np.empty((0, 1)))
    # Functions of its own are traced anew for each backend.
    whole, unchanged = jax.jit(lambda x, *more: sample_by_row(x, *more, lambda: x)), np.zeros(len(rows), bool)
    tokens, logps = whole(np.tile(logits, (len(rows), 1)), np.tile(uniforms, len(settings)), by_row, unchanged)
    for number, setting in enumerate(settings):
        alone = jax.jit(lambda *given, by=setting: sample(*given, by))(np.tile(logits, (draws, 1)), uniforms)
        part = slice(number * draws, (number + 1) * draws)
        np.testing.assert_array_equal(tokens[part], alone[0])
        np.testing.assert_allclose(logps[part], alone[1], rtol=1e-6)
