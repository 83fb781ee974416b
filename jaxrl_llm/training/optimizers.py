"""The optimizer and its learning rate, from the configuration: optax by name."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxrl_llm.distributed.sharding import path_name

MUON_RMS = 0.2  # of an update, as AdamW's are: one learning rate serves both (arXiv 2502.16982)


def learning_rate_schedule(config) -> optax.Schedule:
    """The learning rate of each optimizer update, `[]` of its count.

    Warm-up rises linearly from 0 and reaches the peak after `warmup_steps` (or `warmup_ratio` of all steps); as in
    transformers its first update has rate 0. Then, with p from 0 to 1 over the rest and m = `min_lr_ratio`, the peak is
    multiplied by

        constant      1
        linear        1 - (1 - m) p
        cosine        m + (1 - m) (1 + cos(2 pi cycles p)) / 2     (arXiv 1608.03983)
        inverse_sqrt  max(m, sqrt(w / t)), t updates after the start, w of them warm-up (10,000 without)
        wsd           1, and over the last `decay_steps` m + (1 - m) f(q), q from 0 to 1 over them (arXiv 2404.06395):
                      f is 1 - q (linear), (1 + cos(pi q)) / 2 (cosine) or 2 x 0.5^q - 1 (exponential)

    Counts are training steps times updates per step.
    """
    c = config.optimizer
    updates = config.batch.minibatches * config.algorithm.num_iterations
    total = config.total_steps * updates
    warmup = warmup_steps(config) * updates
    shape = SHAPES[c.schedule](c, warmup, max(total - warmup, 1), c.decay_steps * updates)
    rises = optax.linear_schedule(0.0, c.learning_rate, warmup)

    def schedule(count):
        after = c.learning_rate * shape(jnp.maximum(count - warmup, 0))
        return jnp.where(count < warmup, rises(count), after) if warmup else after

    return schedule


def warmup_steps(config) -> int:
    """The training steps of the warm-up, rounded up."""
    return config.optimizer.warmup_steps or math.ceil(config.optimizer.warmup_ratio * config.total_steps)


def _linear(c, warmup: int, after: int, decay: int):
    return optax.linear_schedule(1.0, c.min_lr_ratio, after)


def _cosine(c, warmup: int, after: int, decay: int):
    def shape(count):
        wave = 0.5 * (1 + jnp.cos(2 * c.cycles * jnp.pi * jnp.minimum(count, after) / after))
        return (1 - c.min_lr_ratio) * wave + c.min_lr_ratio

    return shape


def _inverse_sqrt(c, warmup: int, after: int, decay: int):
    scale = warmup or 10_000
    return lambda count: jnp.maximum(jnp.sqrt(scale / (scale + count)), c.min_lr_ratio)


DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda q: 1 - q,
    "cosine": lambda q: 0.5 * (1 + jnp.cos(jnp.pi * q)),
    "exponential": lambda q: 2 * 0.5**q - 1,
}


def _wsd(c, warmup: int, after: int, decay: int):
    def shape(count):
        q = jnp.clip((count - (after - decay)) / decay, 0.0, 1.0)
        return c.min_lr_ratio + (1 - c.min_lr_ratio) * DECAYS[c.decay_shape](q)

    return shape


SHAPES: dict[str, Callable[..., Callable[[Any], Any]]] = {
    "constant": lambda c, *_: optax.constant_schedule(1.0),
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
}


def make_optimizer(config) -> optax.GradientTransformation:
    """Clipping to the global norm, then the named optimizer.

    adamw (arXiv 1711.05101); adafactor with an explicit learning rate (arXiv 1804.04235), each layer by itself; lion
    (arXiv 2302.06675); sgd with momentum b1; muon (arXiv 2502.16982) for the matrices of the layers and adamw for the
    rest. Weight decay is decoupled and leaves out the parameters of `no_decay`. Moments are computed in fp32 and stored
    in `moment_dtype`, whatever the parameters' type. With `model.freeze_router` routers are left as they are.
    """
    c = config.optimizer
    optimizer = stored_in(OPTIMIZERS[c.name](c, learning_rate_schedule(config)), c.moment_dtype)
    if config.model.freeze_router:  # their gradients are 0; this is about weight decay
        optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), _routers))
    return optax.chain(optax.clip_by_global_norm(c.max_grad_norm), optimizer) if c.max_grad_norm else optimizer


def decayed(c) -> Callable[[Any], Any]:
    """Which parameters weight decay applies to."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith(tuple(c.no_decay)), params
    )


def _adamw(c, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decayed(c))


def _adafactor(c, rate: optax.Schedule) -> optax.GradientTransformation:
    statistics = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0))
    return optax.chain(
        per_layer(statistics), optax.add_decayed_weights(c.weight_decay, decayed(c)), optax.scale_by_learning_rate(rate)
    )


def _lion(c, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(rate, c.b1, c.b2, weight_decay=c.weight_decay, mask=decayed(c))


def _sgd(c, rate: optax.Schedule) -> optax.GradientTransformation:
    momentum = [optax.trace(c.b1)] if c.b1 else []
    return optax.chain(
        *momentum, optax.add_decayed_weights(c.weight_decay, decayed(c)), optax.scale_by_learning_rate(rate)
    )


def _muon(c, rate: optax.Schedule) -> optax.GradientTransformation:
    def is_matrix(path, x) -> bool:
        return _in_layers(path) and x.ndim > 2

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda *leaf: "muon" if is_matrix(*leaf) else "adamw", params)

    def last_two(params):  # the leading dimensions (layers, experts) are a batch of matrices
        return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), params)

    matrices = muon(
        rate,
        weight_decay=c.weight_decay,
        weight_decay_mask=decayed(c),
        muon_weight_dimension_numbers=last_two,
        consistent_rms=MUON_RMS,
    )
    return optax.partition({"muon": matrices, "adamw": _adamw(c, rate)}, labels)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}


def _routers(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith("router/kernel"), params)


def _in_layers(path) -> bool:
    return "layers" in path_name(path)


def per_layer(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation applied to every layer by itself, though parameters are stacked over layers."""

    def over_layers(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tree, *rest: (jax.vmap(function) if jax.tree.leaves(tree) else function)(tree, *rest)

    stacked = optax.GradientTransformation(over_layers(transformation.init), over_layers(transformation.update))

    def label(path, _) -> str:
        # Layers without experts, among layers with them, are a stack of their own.
        return ("dense" if "dense_layers" in path_name(path) else "stacked") if _in_layers(path) else "whole"

    def labels(params):
        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"stacked": stacked, "dense": stacked, "whole": transformation}, labels)


def stored_in(transformation: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """The transformation computing in fp32, with its floating-point state stored in `dtype`."""

    def cast(tree, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def init(params):
        return cast(transformation.init(cast(params, jnp.float32)), dtype)

    def update(updates, state, params=None):
        params = None if params is None else cast(params, jnp.float32)
        updates, state = transformation.update(cast(updates, jnp.float32), cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)
