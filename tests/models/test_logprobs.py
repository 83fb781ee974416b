"""Log-probs and entropies of a policy against a plain log-softmax over whole logits: values, gradients, memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.models import chunked_softmax
from jaxrl_llm.models.logprobs import chunked_logps, token_logps, token_statistics
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import segment_positions
from tests.models.decoding import padded

VOCAB = 37
CONFIG = ModelConfig(vocab_size=VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4)
DOCUMENTS = [np.random.default_rng(seed).integers(0, VOCAB, length) for seed, length in enumerate((6, 11, 3, 1))]


def packed():
    """Three documents in a row, with padding before, between and after them; a token id may be that of padding."""
    tokens = np.random.default_rng(9).integers(0, VOCAB, (2, 11))
    return tokens, np.array([[0, 1, 1, 1, 0, 2, 2, 3, 3, 3, 0], [1, 1, 2, 2, 2, 2, 2, 5, 0, 0, 0]])


LAYOUTS = {
    "left": lambda: padded(DOCUMENTS, "left"),
    "right": lambda: padded(DOCUMENTS, "right"),
    "packed": packed,
}


@functools.cache
def net_and_params(**changes):
    net = Net(dataclasses.replace(CONFIG, **changes))
    return net, jax.jit(net.init)(jax.random.key(1))


def naive(net, params, tokens, segments, temperature):
    """Log-probs and entropies [N,T] with the logits [N,T,V] in memory."""
    logits = net.bind(params)(tokens, segments)[:, :-1] / temperature
    logps = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    predicted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return tuple(jnp.pad(jnp.where(predicted, x, 0.0), ((0, 0), (1, 0))) for x in (chosen, entropy))


def values_and_gradients(function, params, coefficients):
    """The two arrays `function(params)` gives, and the gradient of their sum weighted by random coefficients."""

    def loss(params):
        found = function(params)
        return sum((c * x).sum() for c, x in zip(coefficients, found, strict=True)), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return found, gradients


@pytest.mark.parametrize(
    ("layout", "tied", "temperature"),
    [
        ("left", True, 0.7),
        pytest.param("right", False, 1.0, marks=pytest.mark.slow),
        pytest.param("packed", False, 0.7, marks=pytest.mark.slow),
        pytest.param("packed", True, 1.0, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_whole_logits(monkeypatch, layout, tied, temperature):
    """For both outputs at once, three columns at a time, with respect to every parameter of the model."""
    net, params = net_and_params(tie_embeddings=tied, layers=1)
    tokens, segments = (jnp.asarray(x) for x in LAYOUTS[layout]())
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 3 * tokens.shape[0] * VOCAB)
    coefficients = np.random.default_rng(0).normal(size=(2, *tokens.shape)).astype(np.float32)
    found, gradients = values_and_gradients(
        lambda p: token_logps(net, p, Inputs(tokens, segments), temperature), params, coefficients
    )
    expected, expected_gradients = values_and_gradients(
        lambda p: naive(net, p, tokens, segments, temperature), params, coefficients
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_gradients))
    assert largest > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), gradients, expected_gradients)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def score(net, params, tokens, segments, temperature=1.0, prompt_width=0):
    return token_logps(net, params, Inputs(tokens, segments, prompt_width=prompt_width), temperature)


@pytest.mark.parametrize("prompt_width", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_columns_of_the_prompt_are_zero_and_the_others_unchanged(prompt_width):
    net, params = net_and_params()
    tokens, segments = LAYOUTS["left"]()
    for found, whole in zip(
        score(net, params, tokens, segments, 1.0, prompt_width), score(net, params, tokens, segments), strict=True
    ):
        assert found.shape == whole.shape
        np.testing.assert_array_equal(found[:, :prompt_width], 0)
        np.testing.assert_allclose(found[:, prompt_width:], whole[:, prompt_width:], atol=1e-6)


def test_nothing_is_predicted_on_padding_and_at_starts():
    net, params = net_and_params()
    tokens, segments = packed()
    expected = np.array([[0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0], [0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0]])
    logps, entropy = score(net, params, tokens, segments)
    np.testing.assert_array_equal(np.asarray(logps) != 0, expected)
    np.testing.assert_array_equal(np.asarray(entropy) != 0, expected)


@pytest.mark.parametrize("prompt_width", [0, 1])
def test_rows_without_a_token_to_predict_are_zero(prompt_width):
    """Rows of one token: there is no column for the head."""
    net, params = net_and_params(layers=1)
    tokens = np.ones((2, 1), int)
    for found in score(net, params, tokens, tokens, 1.0, prompt_width):
        np.testing.assert_array_equal(found, [[0.0], [0.0]])
    hidden, kernel, targets = random_parts(2, 0, 8, 50)
    for gradient in jax.grad(weighted, argnums=(0, 1))(hidden, kernel, targets):
        np.testing.assert_array_equal(gradient, 0.0)


def test_all_layouts_give_a_document_the_same_numbers():
    net, params = net_and_params()
    joined = np.concatenate(DOCUMENTS)[None], np.repeat(np.arange(1, 5), [len(x) for x in DOCUMENTS])[None]
    scored = [score(net, params, *layout) for layout in (LAYOUTS["left"](), LAYOUTS["right"](), joined)]
    starts = np.cumsum([0, *map(len, DOCUMENTS)])
    for left, right, whole in zip(*scored, strict=True):
        for number, document in enumerate(DOCUMENTS):
            length = len(document)
            expected = right[number, :length]
            np.testing.assert_allclose(left[number, left.shape[1] - length :], expected, atol=1e-5)
            np.testing.assert_allclose(whole[0, starts[number] : starts[number] + length], expected, atol=1e-5)


def test_without_segments_rows_are_whole():
    net, params = net_and_params()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 11))
    for found, expected in zip(
        score(net, params, tokens, None), score(net, params, tokens, np.ones((2, 11), int)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_positions_may_be_given():
    net, params = net_and_params()
    tokens, segments = (jnp.asarray(x) for x in packed())
    positions = segment_positions(segments)
    expected = score(net, params, tokens, segments)[0]
    given = jax.jit(lambda positions: token_logps(net, params, Inputs(tokens, segments, positions))[0])
    np.testing.assert_allclose(given(positions), expected, atol=1e-5)
    assert np.abs(given(3 * positions) - expected).max() > 1e-2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_hand_computed(temperature):
    """Two tokens with logits 1 and 0: p = sigmoid(1 / temperature)."""
    hidden, kernel = jnp.array([[[1.0]]]), jnp.array([[1.0, 0.0]])
    p = 1 / (1 + np.exp(-1 / temperature))
    for target, expected in ((0, np.log(p)), (1, np.log(1 - p))):
        logps, entropy, _ = chunked_logps(hidden, kernel, jnp.array([[target]]), temperature)
        np.testing.assert_allclose(logps, [[expected]], rtol=1e-6)
        np.testing.assert_allclose(entropy, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], rtol=1e-6)


def test_statistics_and_the_log_of_the_sum_of_squared_probabilities():
    net, params = net_and_params()
    tokens, segments = (jnp.asarray(x) for x in packed())
    inputs = Inputs(tokens, segments)
    found = jax.jit(lambda p: token_statistics(net, p, inputs, mean_logit=True, squares=True))(params)
    logps, entropy, likeliest, mean_logits, squares, *_ = found
    logits = np.asarray(jax.jit(lambda p: net.bind(p)(tokens, segments))(params), np.float64)[:, :-1]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    right = logits.argmax(-1) == np.asarray(tokens)[:, 1:]
    expected = ((squares, np.log((probs**2).sum(-1))), (mean_logits, logits.mean(-1)), (likeliest, right))
    for got, wanted in expected:
        np.testing.assert_allclose(got[:, 1:], np.where(logps[:, 1:] != 0, wanted, 0), atol=1e-5)
    np.testing.assert_allclose((logps, entropy), score(net, params, tokens, segments), atol=1e-6)


def random_parts(rows: int, length: int, width: int, vocab: int, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (rows, length, width), dtype)
    return hidden, jax.random.normal(keys[1], (width, vocab)), jax.random.randint(keys[2], (rows, length), 0, vocab)


def weighted(hidden, kernel, targets):
    """A loss of both outputs, not linear in them, so that the gradients of all tokens differ."""
    logps, entropy, _ = chunked_logps(hidden, kernel, targets, 0.7)
    return (logps**2).sum() + jnp.sin(entropy).sum()


def weighted_naive(hidden, kernel, targets):
    logps = jax.nn.log_softmax(hidden.astype(jnp.float32) @ kernel / 0.7)
    chosen = jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
    return (chosen**2).sum() + jnp.sin(-(jnp.exp(logps) * logps).sum(-1)).sum()


@pytest.mark.parametrize("columns", [0.5, 3, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 10, 1000))])
def test_any_number_of_columns_at_a_time(monkeypatch, columns):
    """0.5: fewer logits than one column has."""
    parts = random_parts(3, 10, 8, 50)
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", int(columns * 3 * 50))
    found, gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1)))(*parts)
    expected, expected_gradients = jax.jit(jax.value_and_grad(weighted_naive, argnums=(0, 1)))(*parts)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_bfloat16_hidden_states_keep_float32_log_probs():
    """The product is accumulated in fp32: the numbers are those of the rounded inputs, not rounded once more."""
    hidden, kernel, targets = random_parts(3, 10, 8, 50, jnp.bfloat16)
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    logps, entropy, _ = chunked_logps(hidden, kernel, targets, 1.0)
    expected = jax.nn.log_softmax(hidden.astype(jnp.float32) @ rounded)
    assert logps.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logps, np.take_along_axis(expected, targets[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_allclose(entropy, -(jnp.exp(expected) * expected).sum(-1), atol=1e-5)
    found = jax.jit(jax.grad(weighted, argnums=(0, 1)))(hidden, kernel, targets)
    exact = jax.jit(jax.grad(weighted_naive, argnums=(0, 1)))(hidden.astype(jnp.float32), rounded, targets)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32]
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.02 * np.abs(b).max())


def test_extreme_logits_have_finite_gradients():
    """Probabilities of exactly 0 and 1."""
    hidden, kernel, targets = random_parts(2, 5, 8, 50)
    gradients = jax.jit(jax.grad(weighted, argnums=(0, 1)))(hidden * 1e3, kernel, targets)
    assert all(np.isfinite(x).all() for x in gradients)
    peaked = jnp.argmax(hidden * 1e3 @ kernel, axis=-1)
    logps, entropy, _ = chunked_logps(hidden * 1e3, kernel, peaked, 1.0)
    np.testing.assert_allclose((logps, entropy), 0.0, atol=1e-2)


@pytest.mark.parametrize(("kept", "products"), [(4, 1), (2, 2)])
def test_few_logits_are_formed_once(monkeypatch, kept, products):
    """Those of 10 columns, 3 chunks: kept for the backward pass or formed again, which gives the same."""
    parts = random_parts(1, 10, 8, 64)
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 4 * 64)
    monkeypatch.setattr(chunked_softmax, "KEPT", kept)

    def loss(hidden, kernel, targets, count):
        logps, entropy, _ = chunked_logps(hidden, kernel, targets, 0.7, count=count)
        return (logps**2).sum() + jnp.sin(entropy).sum()

    traced = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*parts, None))
    assert traced.count("f32[4,64] = dot_general") == products
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(*parts, jnp.array(7))
    expected = jax.jit(jax.grad(weighted_naive, argnums=(0, 1)))(parts[0][:, :7], parts[1], parts[2][:, :7])
    np.testing.assert_allclose(found[0][:, :7], expected[0], atol=1e-5 * np.abs(expected[0]).max())
    assert not found[0][:, 8:].any()


@pytest.mark.parametrize(("vocabulary", "columns"), [(49152, 256), (151936, 128), (2**25, 1)])
def test_columns_at_once_divide_common_lengths(vocabulary, columns):
    assert chunked_softmax.columns_at_once(1, vocabulary) == columns


def array_sizes(jaxpr):
    """The number of elements of every array a program makes, its inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from array_sizes(inner)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"])
def test_logits_of_all_positions_are_never_made(monkeypatch, tied):
    """No array of the loss and its gradient is as large as [N,T,V]; plain logits are, so the search does see them."""
    rows, length, vocab = 4, 64, 5000
    net, params = net_and_params(tie_embeddings=tied, vocab_size=vocab)
    tokens, segments = jnp.zeros((rows, length), jnp.int32), jnp.ones((rows, length), jnp.int32)
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 8 * rows * vocab)

    def largest(function):
        loss = jax.value_and_grad(lambda p: sum(x.sum() for x in function(p)))
        return max(array_sizes(jax.make_jaxpr(loss)(params).jaxpr))

    assert largest(lambda p: token_logps(net, p, Inputs(tokens, segments))) == 8 * rows * vocab
    assert largest(lambda p: naive(net, p, tokens, segments, 1.0)) >= rows * (length - 1) * vocab


def temporary_bytes(function, length: int) -> int:
    """What the compiled gradient needs beyond its inputs and outputs, for 4 rows, width 8 and a vocabulary of 2000."""
    gradient = jax.jit(jax.grad(function, argnums=(0, 1)))
    return gradient.lower(*random_parts(4, length, 8, 2000)).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_logits(monkeypatch):
    """From 128 to 1024 columns: growth is a few arrays [N,T,D], far below one [N,T,V]."""
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 16 * 4 * 2000)
    more_logits = 4 * (1024 - 128) * 2000 * 4
    assert temporary_bytes(weighted, 1024) - temporary_bytes(weighted, 128) < more_logits / 50
    assert temporary_bytes(weighted_naive, 1024) - temporary_bytes(weighted_naive, 128) > more_logits
