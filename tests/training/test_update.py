"""The update: independent of micro-batches, donated, on schedule, and safe against a gradient that is no number."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config import default, from_json, to_json
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.microbatch import split_rows
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.optimizers import learning_rate_schedule
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import optimizer_spec, update_spec
from jaxrl_llm.training.update import ADDS_IN_PLACE, init_state, make_update
from tests.training.objectives.test_policy_gradient import NET, PARAMS, make_batch


@functools.cache
def made(text: str):
    """The optimizer and the update of a configuration in JSON, which is compiled once."""
    config = from_json(text)
    optimizer, mesh = make_optimizer(config), make_mesh(devices=jax.devices()[:1])
    return optimizer, make_update(objective_of(config, NET), optimizer, update_spec(config), mesh)


def run_update(config, batch, steps: int = 1):
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        optimizer, update = made(to_json(config))
        state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, mesh, config.optimizer.offload)
        for _ in range(steps):
            state, metrics = update(state, jax.tree.map(jnp.asarray, batch))
    return state, {name: metric.value for name, metric in metrics.items()}


def config_with(**changes):
    config = default()
    config.optimizer.learning_rate = 1e-3
    config.optimizer.eps = (
        1e-4  # Adam divides by the gradient's size; without this the smallest ones would be all rounding
    )
    config.algorithm.beta = 0.04
    config.rollout.max_completion_length = 4
    for name, value in changes.items():
        section, leaf = name.split("__")
        config[section][leaf] = value
    return config


@pytest.mark.parametrize(
    ("aggregation", "sizes"),
    [
        ("token", (2,)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sequence", (1, 4)), ("constant", (2,)))),
    ],
)
def test_microbatches_do_not_change_the_update(aggregation, sizes):
    batch = make_batch(rows=8)
    whole, whole_metrics = run_update(config_with(algorithm__aggregation=aggregation), batch)
    for rows in sizes:
        config = config_with(algorithm__aggregation=aggregation, batch__microbatch_rows=rows)
        parts, metrics = run_update(config, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts.params, whole.params)
        for name in whole_metrics:
            np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_microbatches_do_not_change_the_update_of_rows_with_weights_of_their_own():
    batch = make_batch(rows=8)
    weights = np.linspace(0, 1, 8, dtype=np.float32)
    batch = batch.replace(kl_weight=weights, loss_weight=weights[::-1])
    whole, _ = run_update(config_with(), batch)
    parts, _ = run_update(config_with(batch__microbatch_rows=2), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts.params, whole.params)
    plain, _ = run_update(config_with(), make_batch(rows=8))
    changes = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), plain.params, whole.params))
    assert max(changes) > 1e-4


@pytest.mark.slow
def test_microbatch_token_depends_on_microbatches():
    batch = make_batch(rows=8)
    losses = [
        run_update(config_with(algorithm__aggregation="microbatch_token", batch__microbatch_rows=rows), batch)[1][
            "loss"
        ]
        for rows in (0, 2)
    ]
    assert abs(losses[0] - losses[1]) > 1e-4


def test_update_is_adamw_of_summed_gradient():
    config = config_with(optimizer__weight_decay=0.1, optimizer__max_grad_norm=0.05)
    batch = make_batch()
    objective = objective_of(config, NET)
    gradient = jax.jit(jax.grad(lambda p: objective.loss(p, objective.prepare(batch))[0]))(PARAMS)
    norm = float(optax.tree.norm(gradient))
    state, metrics = run_update(config, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > 0.05
    for path, p in jax.tree_util.tree_leaves_with_path(PARAMS):
        g = np.asarray(_at(gradient, path)) * 0.05 / norm
        decay = 0.0 if path[-1].key in ("scale", "bias") else 0.1
        # One Adam step from zero moments: m/(1-b1) = g, v/(1-b2) = g^2.
        expected = p - 1e-3 * (g / (np.abs(g) + 1e-4) + decay * p)
        np.testing.assert_allclose(_at(state.params, path), expected, atol=2e-7)


def _at(tree, path):
    for part in path:
        tree = tree[part.key]
    return tree


def test_the_state_is_donated():
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        optimizer, update = made(to_json(config_with()))
        state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, mesh)
        batch = jax.tree.map(jnp.asarray, make_batch())
        size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
        compiled = update.lower(state, batch).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= size
        new, _ = compiled(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
        assert not any(x.is_deleted() for x in jax.tree.leaves((new.params, batch)))


@pytest.mark.slow
def test_offloaded_moments_change_nothing():
    batch = make_batch()
    for name in ("adamw", "adafactor"):
        plain, _ = run_update(config_with(optimizer__name=name), batch)
        state, _ = run_update(config_with(optimizer__name=name, optimizer__offload=True), batch)
        jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
        assert kinds == {"pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}


def in_bfloat16(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def test_parameters_in_bfloat16_move_as_those_in_fp32_do():
    """At a rate of a hundredth of their spacing; rounded to the nearest, hardly any of them would move."""
    start = {"w": 0.02 * jax.random.normal(jax.random.key(3), (20_000,))}
    config = config_with(optimizer__learning_rate=1e-6, optimizer__eps=1e-8)
    mesh = make_mesh(devices=jax.devices()[:1])
    objective = Objective(lambda batch: batch, lambda params, batch: (params["w"].astype(jnp.float32).sum(), {}))

    def moved(params, seed=0):
        config.seed = seed
        with jax.set_mesh(mesh):
            optimizer = make_optimizer(config)
            state = init_state(jax.tree.map(jnp.array, params), optimizer, mesh)
            update = make_update(objective, optimizer, update_spec(config), mesh)
            for _ in range(50):
                state, _ = update(state, jax.tree.map(jnp.asarray, make_batch()))
        return np.asarray(state.params["w"].astype(jnp.float32)) - np.asarray(params["w"].astype(jnp.float32))

    exact, rounded = moved(start), moved(in_bfloat16(start))
    np.testing.assert_allclose(exact.mean(), -5e-5, rtol=1e-3)
    np.testing.assert_allclose(rounded.mean(), -5e-5, rtol=0.05)
    np.testing.assert_array_equal(moved(in_bfloat16(start)), rounded)  # the draws come from the seed and the step
    assert (moved(in_bfloat16(start), seed=1) != rounded).any()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_gradients_of_microbatches_add_up_in_fp32(monkeypatch, backend):
    """The norm of 128 equal gradients of 1 + 2^-7: in bfloat16 their sum would stop growing at 256."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr("jaxrl_llm.training.update.is_sharded", lambda: backend == "gpu")
    config = config_with(batch__microbatch_rows=1, optimizer__max_grad_norm=0.0)
    mesh = make_mesh(devices=jax.devices()[:1])
    objective = Objective(
        lambda batch: batch, lambda params, batch: (params["w"].astype(jnp.float32).sum() * (1 + 2**-7) * 4, {})
    )
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(config)
        state = init_state({"w": jnp.ones(1, jnp.bfloat16)}, optimizer, mesh)
        update = make_update(objective, optimizer, update_spec(config), mesh)
        _, metrics = update(state, jax.tree.map(jnp.asarray, make_batch(rows=129)))
    np.testing.assert_allclose(metrics["grad_norm"].value, 129 * 4 * (1 + 2**-7), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "tied"), list(itertools.product([False, True], repeat=2)))
def test_gradients_added_in_place_are_the_same(monkeypatch, scan, tied):
    """CPUs, and several GPUs, add those of a layer to its part of the sums, where the backward pass makes them."""
    net = Net(dataclasses.replace(NET.config, scan_layers=scan, tie_embeddings=tied, remat="block"))
    config, mesh = config_with(batch__microbatch_rows=2), make_mesh(devices=jax.devices()[:1])
    batch, optimizer = jax.tree.map(jnp.asarray, make_batch(rows=8)), optax.sgd(lambda count: 1.0)
    before, after = jax.device_get(net.init(jax.random.key(0))), {}
    for backend, several in (("gpu", False), ("gpu", True), ("cpu", False)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        monkeypatch.setitem(ADDS_IN_PLACE, "gpu", lambda several=several: several)
        with jax.set_mesh(mesh):
            update = make_update(objective_of(config, net), optimizer, update_spec(config), mesh)
            state = init_state(jax.tree.map(jnp.asarray, before), optimizer, mesh)
            assert ("Ref{" in str(jax.make_jaxpr(update)(state, batch))) == (several or backend == "cpu")
            after[backend, several] = update(state, batch)[0].params
    plain = after.pop(("gpu", False))
    for params in after.values():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, plain)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), plain, before)
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_nonfinite_gradient_changes_nothing():
    batch = make_batch()
    batch = batch.replace(advantages=np.full_like(batch.advantages, np.inf))
    state, metrics = run_update(config_with(), batch)
    assert metrics["nonfinite_gradient"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.opt_state))


@pytest.mark.parametrize("rows", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_rows_that_are_all_masked_have_no_means(rows):
    """What is no number moves no controller and raises no alarm; the loss of no token is 0."""
    batch = make_batch()
    batch = batch.replace(mask=np.zeros_like(batch.mask))
    state, metrics = run_update(config_with(algorithm__entropy_coef=0.1, batch__microbatch_rows=rows), batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["nonfinite_gradient"] == 0
    assert all(np.isnan(metrics[name]) for name in ("entropy", "kl", "ratio/mean"))
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)


def test_schedules():
    config = default()
    config.total_steps, config.optimizer.learning_rate = 10, 1.0
    config.optimizer.warmup_steps, config.optimizer.min_lr_ratio = 2, 0.2
    config.optimizer.schedule = "linear"
    rates = [float(learning_rate_schedule(optimizer_spec(config))(i)) for i in (0, 1, 2, 6, 10)]
    np.testing.assert_allclose(rates, [0.0, 0.5, 1.0, 0.6, 0.2], rtol=1e-6)
    config.optimizer.schedule = "cosine"
    rates = [float(learning_rate_schedule(optimizer_spec(config))(i)) for i in (2, 4, 6, 10, 12)]
    half = 0.2 + 0.8 * 0.5 * (1 + np.cos(np.pi / 4))
    np.testing.assert_allclose(rates, [1.0, half, 0.6, 0.2, 0.2], rtol=1e-6)
    config.batch.minibatches, config.algorithm.num_iterations = 2, 3
    np.testing.assert_allclose(float(learning_rate_schedule(optimizer_spec(config))(6)), 0.5, rtol=1e-6)


def test_split_rows_of_every_shard():
    batch = make_batch(rows=8).replace(labels=np.arange(8))
    np.testing.assert_array_equal(split_rows(batch.labels, 4, 1), [[0, 1], [2, 3], [4, 5], [6, 7]])
    np.testing.assert_array_equal(split_rows(batch.labels, 2, 2), [[0, 1, 4, 5], [2, 3, 6, 7]])
