"""Moments in 8 bits: what is stored, how far it is from float32, and updates made with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.rounding import stochastic_round
from jaxrl_llm.config import default
from jaxrl_llm.models.quantize import FP8
from jaxrl_llm.training.moments import Blocks, block_of, from_blocks, in_blocks, stored_in
from jaxrl_llm.training.setup.run import make_optimizer

RANGE = 448 * 2**9  # the largest number of a block over the smallest that is not 0


def optimizer_of(moment_dtype="float8", **settings):
    config = default()
    config.optimizer.moment_dtype, config.optimizer.max_grad_norm = moment_dtype, 0.0
    for name, value in settings.items():
        config.optimizer[name] = value
    return make_optimizer(config)


def improve(optimizer, params, gradient_of, steps):
    """The parameters after `steps` updates, and what `gradient_of(params, number)` gives beside the gradient."""

    def step(carry, number):
        params, state = carry
        shown, gradient = gradient_of(params, number)
        changes, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, changes), state), (shown, changes)

    (params, _), seen = jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(steps)))(
        (params, optimizer.init(params))
    )
    return params, *jax.tree.map(np.asarray, seen)


@pytest.mark.parametrize("squares", [False, True])
def test_the_error_of_one_round_trip(squares):
    """At most the spacing, an eighth; of the smallest 1 / 229,376 of the largest, so that outliers cost little."""
    x = np.random.default_rng(0).normal(size=(3, 40, 512)).astype(np.float32)
    x[0, ::3, 7], x[1, :, 300], x[2, 5] = 1e4, -3e-4, 0.0
    x = np.square(x) if squares else x
    stored = in_blocks(jnp.asarray(x), squares, jax.random.key(0))
    assert stored.codes.shape == x.shape and stored.codes.dtype == jnp.uint8
    assert stored.scales.shape == (3, 40, 8) and stored.scales.dtype == jnp.float32
    found = np.asarray(from_blocks(stored, squares))
    root = (lambda x: np.sign(x) * np.sqrt(np.abs(x))) if squares else lambda x: x
    largest = np.abs(root(x)).reshape(3, 40, 8, 64).max(-1).repeat(64, -1)
    assert (np.abs(root(found) - root(x)) <= 1.001 * np.maximum(np.abs(root(x)) / 8, largest / RANGE)).all()
    np.testing.assert_allclose(np.abs(root(found)).reshape(3, 40, 8, 64).max(-1).repeat(64, -1), largest, rtol=1e-6)
    np.testing.assert_array_equal(found[2, 5], 0.0)
    again = in_blocks(jnp.asarray(found), squares, jax.random.key(1))
    assert (np.asarray(again.codes) == np.asarray(stored.codes)).mean() > 0.999  # what is stored already stays


def test_the_mean_of_many_round_trips():
    """Also of numbers far below the largest, where the spacing is that of the smallest."""
    x = jnp.asarray([[1.0, -0.3, 0.013, -4e-5, 6e-6, 1e-6, 0.0, -1.0] * 32])
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = np.asarray(jax.vmap(lambda key: from_blocks(in_blocks(x, False, key), False))(keys), np.float64)
    spacing = np.maximum(np.abs(x) / 8, 1 / RANGE)
    assert (np.abs(draws.mean((0, 1)).reshape(32, 8).mean(0) - x[0, :8]) < 0.01 * spacing[0, :8]).all()


@pytest.mark.parametrize("dtype", ["float16", FP8])
@pytest.mark.parametrize("share", [0.1, -0.7, 2.3, 6.9])
def test_numbers_below_the_normal_ones_keep_their_mean(dtype, share):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    draws = np.asarray(stochastic_round(jnp.full(100_000, share * smallest), dtype, jax.random.key(1)), np.float64)
    np.testing.assert_array_equal(np.unique(draws / smallest), [np.floor(share), np.ceil(share)])
    np.testing.assert_allclose(draws.mean() / smallest, share, atol=0.01)


def test_a_root_above_zero_never_becomes_zero():
    squares = jnp.full((1, 32), 1e-20).at[0, 0].set(1.0).at[0, 1].set(0.0).at[0, 2].set(-0.25)
    found = np.sqrt(np.abs(np.asarray(from_blocks(in_blocks(squares, True, jax.random.key(0)), True))))
    np.testing.assert_allclose(found[0, :4], [1.0, 0.0, 0.5, 1 / RANGE], rtol=1e-6)
    np.testing.assert_array_equal(found[0, 4:], found[0, 3])


@pytest.mark.slow
def test_an_outlier_makes_updates_of_its_block_smaller_and_never_larger():
    """Its second moment outlasts the first, so that roots of the others are below what a block has: not 0, then."""
    params = {"head": {"kernel": jnp.zeros((128, 32))}}

    def gradient_of(params, number):
        noise = jax.random.normal(jax.random.key(number), (128, 32))
        return jnp.zeros(()), {"head": {"kernel": noise.at[:, 3].set(jnp.where(number == 0, 1e9, 0.0))}}

    largest = {}
    for dtype in ("float32", "float8"):
        _, _, changes = improve(optimizer_of(dtype, learning_rate=1.0), params, gradient_of, 300)
        largest[dtype] = np.abs(changes["head"]["kernel"]).max()
    assert 0 < largest["float8"] <= 1.3 * largest["float32"]


def test_blocks_without_a_gradient_stay():
    params = {"embed": {"weight": jnp.ones((64, 512))}}

    def gradient_of(params, number):
        return jnp.zeros(()), {"embed": {"weight": jnp.zeros((64, 512)).at[::2].set(0.1)}}

    params, _, _ = improve(optimizer_of(learning_rate=0.01), params, gradient_of, 5)
    np.testing.assert_array_equal(params["embed"]["weight"][1::2], 1.0)
    np.testing.assert_allclose(params["embed"]["weight"][::2], 0.95, rtol=5e-3)


@pytest.mark.parametrize(("name", "b2"), [("adamw", 0.999), ("lion", 0.99)])
@pytest.mark.slow
def test_moments_of_a_part_of_a_block_fall(name, b2):
    """Gradients of every other number become ten times smaller: rounded to the nearest, their roots would stay."""
    params, sizes = {"head": {"kernel": jnp.zeros((8, 512))}}, []
    for dtype in ("float32", "float8"):

        def gradient_of(params, number):
            noise = jax.random.normal(jax.random.key(number), (8, 512)) + 0.2
            return jnp.zeros(()), {"head": {"kernel": noise.at[:, ::2].multiply(jnp.where(number < 100, 1.0, 0.1))}}

        optimizer = optimizer_of(dtype, name=name, b2=b2, learning_rate=1.0)
        changes = improve(optimizer, params, gradient_of, 800)[-1]["head"]["kernel"]
        changes = changes.reshape(8, 100, 8, 256, 2)  # ... of those that fall, of those that do not
        sizes.append((np.sqrt((changes**2).mean((1, 2, 3))), changes.mean((1, 2, 3))))
    for exact, found in zip(*sizes, strict=True):
        np.testing.assert_allclose(found[:, 0], exact[:, 0], rtol=0.2)
        np.testing.assert_allclose(found[:, 1], exact[:, 1], rtol=0.05)


@pytest.mark.slow
def test_losses_follow_those_of_adamw_in_float32():
    """Of a network of two layers that learns what another one says: 1 % apart, while they become a quarter."""
    keys = jax.random.split(jax.random.key(0), 4)
    teacher = {name: {"kernel": jax.random.normal(key, (64, 64)) / 8} for name, key in zip("ab", keys, strict=False)}
    params = {name: {"kernel": jax.random.normal(key, (64, 64)) / 8} for name, key in zip("ab", keys[2:], strict=True)}

    def loss(params, number):
        x = jax.random.normal(jax.random.fold_in(keys[0], number), (128, 64))
        wanted, found = (jnp.tanh(x @ net["a"]["kernel"]) @ net["b"]["kernel"] for net in (teacher, params))
        return jnp.mean((wanted - found) ** 2)

    def losses(dtype):
        return improve(optimizer_of(dtype, learning_rate=3e-3), params, jax.value_and_grad(loss), 150)[1]

    exact, found = losses("float32"), losses("float8")
    assert exact[-1] < exact[0] / 4
    np.testing.assert_allclose(found, exact, rtol=0.01)


@pytest.mark.parametrize(
    "name", ["adamw", "muon", "ademamix", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lion", "sgd", "adopt"))]
)
def test_what_is_stored_in_8_bits(name):
    """Large arrays of two dimensions or more, at little over a byte a number; others stay float32."""
    shapes = {
        "head": {"kernel": (512, 1024)},
        "layers": {
            "q": {"kernel": (2, 256, 512), "bias": (2, 512), "lora_a": (2, 1024, 4)},
            "norm": {"scale": (4, 1024)},
            "delta": {"conv": (2, 1024, 1, 4)},
        },
        "norm": {"scale": (8192,)},
    }
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    state = jax.jit(optimizer_of(name=name).init)(params)
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, Blocks))
    count = 0
    for path, x in leaves:
        keys = [key.key for key in path if getattr(key, "key", name) not in ("muon", "adamw", name)]
        if isinstance(x, Blocks):
            count += 1
            assert keys in (["head", "kernel"], ["layers", "q", "kernel"], ["layers", "norm", "scale"])
            assert x.codes.nbytes + x.scales.nbytes <= (1 + 4 / 64) * x.codes.size
        elif keys[-1:] in (["bias"], ["lora_a"], ["conv"]):
            assert x.dtype == jnp.float32
    moments = {"adamw": 2, "adopt": 2, "ademamix": 3}
    assert count == 3 * moments.get(name, 1) + (name == "muon") * 2  # of muon's, adamw has the head and the scales


@pytest.mark.parametrize(
    ("size", "block"),
    [(4096, 256), (2048, 256), (1024, 128), (11008, 172), (151936, 16), (14336, 256), (64, 64), (16, 16), (257, 1)],
)
def test_numbers_that_share_a_scale(size, block):
    assert block_of(size) == block


def test_moments_of_an_optimizer_of_ones_own():
    """Also such as start elsewhere than at 0, or that have a second moment below 0."""
    params = {"kernel": jnp.ones((8, 1024))}
    optimizer = stored_in(
        optax.chain(optax.scale_by_schedule(lambda _: 1.0), optax.scale_by_rms(initial_scale=4.0)), "float8", 0
    )
    state = jax.jit(optimizer.init)(params)
    stored = next(x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Blocks)) if isinstance(x, Blocks))
    np.testing.assert_allclose(from_blocks(stored, True), 4.0, rtol=1e-6)
    changes, _ = optimizer.update(params, state, params)
    np.testing.assert_allclose(changes["kernel"], 1 / np.sqrt(0.9 * 4 + 0.1), rtol=1e-4)
