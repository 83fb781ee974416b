"""What holds for the decoder of every family: masks, positions, scanned and unrolled layers, heads, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models import layers
from jaxrl_llm.models.families.decoder import settings
from jaxrl_llm.models.kernels.fused_attention import check_attention
from jaxrl_llm.models.mixers import attention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net, unstack
from jaxrl_llm.models.transformer import attention_mask, segment_positions
from jaxrl_llm.training.setup.models import net_options
from tests.models.decoding import continued_logits, padded

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, qk_norm="head", init_scale=0.3
)


@pytest.fixture(scope="module")
def net():
    return Net(CONFIG)


@pytest.fixture(scope="module")
def params(net):
    return jax.jit(net.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return padded([rng.integers(0, 31, length) for length in (6, 9, 3)], "left")


@functools.partial(jax.jit, static_argnums=0)
def run(net, params, tokens, segments):
    return net.bind(params)(tokens, segments)


def test_segment_positions():
    segments = jnp.array([[0, 0, 1, 1, 2, 2, 2, 0], [1, 1, 1, 3, 0, 0, 2, 2]])
    expected = [[0, 0, 0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(segment_positions(segments), expected)


def test_attention_mask():
    expected = [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(attention_mask(jnp.array([[0, 1, 1, 2, 0]]))[0], np.array(expected, bool))


def test_a_token_changes_only_what_may_see_it(net, params):
    """Replacing one token changes the logits at the positions the mask gives, and at no other, bit for bit."""
    segments = np.array([0, 1, 1, 1, 2, 2, 0, 3, 3, 0])
    tokens = np.arange(10) + 3
    replaced = np.where(np.eye(10, dtype=bool), 30, tokens)
    logits = run(net, params, np.concatenate([tokens[None], replaced]), np.tile(segments, (11, 1)))
    changed = np.any(np.asarray(logits[1:] != logits[0]), axis=-1).T  # [position, replaced token]
    seen = np.asarray(attention_mask(segments[None])[0])
    real = segments > 0
    np.testing.assert_array_equal(changed[real], seen[real])


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(net, params, tokens, segments):
    def loss(params):
        return (jax.nn.log_softmax(net.bind(params)(tokens, segments)) ** 2).mean()

    return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def expected(net, params, rows):
    return loss_and_gradients(net, params, *rows)


def test_a_row_of_padding_has_finite_logits_and_gradients(net, params, rows):
    tokens, segments = rows
    loss, gradients = loss_and_gradients(net, params, tokens, segments * (np.arange(3) != 1)[:, None])
    assert np.isfinite(loss)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("scan_layers", "remat"),
    [
        (False, "none"),
        (True, "block"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((False, "block"), (True, "dots"), (True, "offload"), (False, "offload"))
        ),
    ],
)
def test_unrolled_and_remat_equal_scanned(params, rows, expected, scan_layers, remat):
    other = Net(dataclasses.replace(CONFIG, scan_layers=scan_layers, remat=remat))
    loss, gradients = loss_and_gradients(other, params, *rows)
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-5), gradients, expected[1])


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_remat_keeps_less_for_the_backward_pass(net, params, scan_layers):
    tokens = jnp.zeros((4, 16), int)

    def kept(remat) -> int:
        """Bytes that the forward pass hands to the backward pass."""
        other = Net(dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers))
        forward = jax.jit(lambda weights: jax.vjp(lambda w: other.bind(w).hidden(Inputs(tokens)), weights)[1])
        backward = jax.eval_shape(forward, params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))

    assert kept("block") < 0.7 * kept("none")
    assert kept("block") <= kept("offload") < kept("dots") < kept("none")


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_prefill_and_decode_equal_the_full_forward(net, params, rows, scan_layers):
    """Rows of one prompt with different continuations share its cache; every step's logits are exact."""
    tokens, segments = rows
    continuations = np.random.default_rng(2).integers(0, 31, (3, 2, 5))
    full_tokens = np.concatenate([np.repeat(tokens, 2, axis=0), continuations.reshape(6, 5)], axis=1)
    full_segments = np.concatenate([np.repeat(segments, 2, axis=0), np.ones((6, 5), int)], axis=1)
    full = np.asarray(run(net, params, full_tokens, full_segments))[:, -5:].reshape(3, 2, 5, -1)
    if scan_layers:
        found = continued_logits(net, params, tokens, segments, continuations)
    else:
        assert net.unrolled().config == dataclasses.replace(CONFIG, scan_layers=False)
        found = continued_logits(net.unrolled(), unstack(params, CONFIG), tokens, segments, continuations)
    np.testing.assert_allclose(found, full, atol=2e-5)


@pytest.mark.parametrize("at_once", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_several_tokens_of_a_row_at_once(net, params, rows, at_once):
    """As one by one, with a window that ends in the prompt or in the row, and capped scores."""
    continuations = np.random.default_rng(2).integers(0, 31, (3, 2, 5))
    other = Net(dataclasses.replace(CONFIG, sliding_window=3, sliding_layers=(1,), attention_softcap=2.0))
    for each in (net, other):
        found = continued_logits(each, params, *rows, continuations, at_once)
        np.testing.assert_allclose(found, continued_logits(each, params, *rows, continuations), atol=2e-5)


def test_given_positions_count_relatively(net, params, rows):
    """Rotary attention sees distances only: shifting all positions changes nothing, stretching them does."""
    tokens, segments = rows
    positions = segment_positions(jnp.asarray(segments))
    at = jax.jit(lambda positions: net.bind(params)(tokens, segments, positions))
    real = segments > 0
    logits = np.asarray(at(positions))[real]
    np.testing.assert_allclose(np.asarray(at(positions + 3))[real], logits, atol=2e-5)
    assert np.abs(np.asarray(at(positions * 2))[real] - logits).max() > 0.05
    np.testing.assert_allclose(run(net, params, *rows)[real], logits, atol=1e-6)


def test_shapes_are_those_of_init(net, params):
    for one in (net, net.unrolled()):
        made = jax.eval_shape(one.init, jax.random.key(1))
        for shapes in (made, params):
            assert jax.tree.map(lambda x: (x.shape, x.dtype), one.shapes()) == jax.tree.map(
                lambda x: (x.shape, x.dtype), shapes
            )


def test_init_draws_every_layer_anew(params):
    assert params["layers"]["attention"]["q"]["kernel"].std() == pytest.approx(CONFIG.init_scale, rel=0.1)
    layers = params["layers"]["mlp"]["up"]["kernel"]
    assert not np.array_equal(layers[0], layers[1])


def test_parameter_paths(net, params):
    paths = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert {"embed/weight", "layers/attention/q/kernel", "layers/attention/q_norm/scale", "norm/scale"} < paths
    unrolled = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(unstack(params, CONFIG))}
    assert {"layers/0/mlp/down/kernel", "layers/1/mlp/down/kernel", "head/kernel"} < unrolled


def test_score_head_gives_one_number_a_token(params, rows):
    net = Net(dataclasses.replace(CONFIG, head="score"))
    assert "head" not in net.shapes()
    assert net.shapes()["score"]["kernel"].shape == (16, 1)
    score = jnp.asarray(np.random.default_rng(0).normal(size=(16, 1)), jnp.float32)
    params = {name: params[name] for name in ("embed", "layers", "norm")} | {"score": {"kernel": score}}
    scores = run(net, params, *rows)
    assert scores.shape == rows[0].shape
    assert scores.dtype == jnp.float32
    hidden = jax.jit(lambda p: net.bind(p).hidden(Inputs(*rows)))(params)
    np.testing.assert_allclose(scores, (hidden @ score)[..., 0], atol=1e-6)
    with pytest.raises(ConfigError, match="score head and no language-model head"):
        net.bind(params).logits(hidden)


def test_a_language_model_has_no_scores(net, params):
    with pytest.raises(ConfigError, match="no score head"):
        net.bind(params).scores(jnp.zeros((1, 2, 16)))


def test_bfloat16_computation_gives_fp32_logits_near_the_exact_ones(net, params, rows):
    half = Net(dataclasses.replace(CONFIG, dtype="bfloat16"))
    exact, found = run(net, params, *rows), run(half, params, *rows)
    assert found.dtype == jnp.float32
    assert jax.eval_shape(lambda p: half.bind(p).hidden(Inputs(*rows)), params).dtype == jnp.bfloat16
    error = np.abs(found - exact)[rows[1] > 0]
    assert 0 < error.mean() < 0.02 * np.abs(exact).max()


def test_parameters_keep_their_dtype():
    net = Net(dataclasses.replace(CONFIG, param_dtype="bfloat16", attention_bias=True))
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(net.init, jax.random.key(0)))} == {jnp.dtype("bfloat16")}


def test_queries_in_blocks_attend_to_the_same_keys(net, params, rows, monkeypatch):
    """Blocks of a quarter of the row, which see no key behind them; the last one is smaller."""
    windowed = Net(dataclasses.replace(CONFIG, sliding_window=3, sliding_layers=(1,)))
    for one in (net, windowed):
        whole, real = one.bind(params)(*rows), rows[1] != 0
        with monkeypatch.context() as patch:
            patch.setattr(attention, "SMALLEST_BLOCK", 2)
            np.testing.assert_allclose(one.bind(params)(*rows)[real], whole[real], atol=1e-5)


def test_cudnn_attention_is_the_same(monkeypatch, net, params, rows):
    """With XLA in the place of cuDNN: grouped heads, masks and scale, and gradients."""
    real = jax.nn.dot_product_attention

    def by_xla(*arguments, implementation, **options):
        assert implementation == "cudnn"
        return real(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    tokens, segments = rows
    other = Net(dataclasses.replace(CONFIG, attention="cudnn"))

    @functools.partial(jax.jit, static_argnums=0)
    def found(net, params):
        def loss(params):
            hidden = net.bind(params).hidden(Inputs(tokens, segments))
            return jnp.where(segments[..., None] != 0, jnp.sin(hidden), 0.0).sum()

        return jax.value_and_grad(loss)(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found(net, params), found(other, params))


def test_models_of_every_setting_can_be_saved():
    """What the configuration sets, and config.json says nothing about, is no reason to refuse."""
    assert set(net_options(default())) - {"head"} <= set(settings(CONFIG))


def test_attention_that_cannot_be_had_is_refused():
    config = dataclasses.replace(CONFIG, attention="cudnn", attention_softcap=30.0)
    with pytest.raises(ConfigError, match=r"this is a cpu; .* model.dtype is float32; it does not cap scores"):
        check_attention(config, "cpu")
    check_attention(dataclasses.replace(CONFIG, attention="cudnn", dtype="bfloat16"), "gpu")
    check_attention(CONFIG, "cpu")
    splash = dataclasses.replace(CONFIG, attention="splash")
    with pytest.raises(ConfigError, match="'splash': it runs on TPUs, and this is a gpu"):
        check_attention(splash, "gpu")
    check_attention(splash, "tpu")


def test_products_side_by_side_on_gpus(params, rows, monkeypatch):
    """Queries with keys and gates with ups in one product: the values and gradients of products of their own."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", attention="xla")
    tokens, segments = (jnp.asarray(x) for x in rows)

    def found():
        def loss(params):  # a new function, which jax traces anew
            hidden = Net(config).bind(params).hidden(Inputs(tokens, segments))
            return (hidden.astype(jnp.float32) ** 2 * (segments > 0)[..., None]).sum(), hidden

        products = str(jax.make_jaxpr(loss)(params)).count("dot_general")
        return products, *jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    products, (value, hidden), gradients = found()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(layers, "LARGE", 0)
    fewer, (joint_value, joint_hidden), joint_gradients = found()
    assert products - fewer == 2  # in the body of the scan over layers
    np.testing.assert_allclose(joint_value, value, rtol=1e-5)
    np.testing.assert_allclose(joint_hidden.astype(np.float32), hidden.astype(np.float32), atol=0.02)
    for path, x in jax.tree_util.tree_leaves_with_path(gradients):
        other = functools.reduce(lambda tree, key: tree[key.key], path, joint_gradients)
        np.testing.assert_allclose(other, x, atol=0.02 * float(jnp.abs(x).max()) + 1e-6, err_msg=path_name(path))
