"""The optimizer and its learning rate: optax by name, with fp32 arithmetic whatever the parameters' type."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import scale_by_ademamix, scale_by_adopt

from jaxrl_llm.config.resolve import ConfigError, naming, resolve_with_options
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.moe import ROUTER
from jaxrl_llm.models.vision.clipped import BOUNDS
from jaxrl_llm.training.moments import stored_in
from jaxrl_llm.training.transformations import (
    clip_by_global_norm,
    orthogonalized,
    per_layer,
    prodigy,
    sampled_layers,
    scale_by_came,
    scale_by_galore,
    schedule_free_adamw,
)

# Ends of the paths of parameters that are not trained: the correction of a router, the scale of a layer's output, what
# standardises and clips in Gemma 4's encoder, and two numbers of xIELU.
UNTRAINED = (
    "mlp/correction", "/out_scale", "/std_bias", "/std_scale", *(f"/{name}" for name in BOUNDS), "activation/beta",
    "activation/eps",
)  # fmt: skip
MATRICES = ("/kernel", "/lora_a", "/lora_b")  # last names in the paths of matrices
MUON_MOMENTUM, MUON_RMS = 0.95, 0.2  # the root mean square of AdamW's updates: one learning rate serves both


@dataclass(frozen=True)
class OptimizerSpec:
    """The settings of an optimizer and of its learning rate. Steps are training steps."""

    name: str
    learning_rate: float
    schedule: str
    total_steps: int
    schedule_steps: int  # at which the schedule ends; 0: total_steps
    updates_per_step: int
    warmup_steps: int
    warmup_init: float
    min_lr_ratio: float
    cycles: float
    power: float
    stable_steps: int
    decay_steps: int
    decay_shape: str
    b1: float
    b2: float
    b3: float
    mixing: float
    mixing_steps: int
    d_coef: float
    galore_rank: int
    galore_every: int
    galore_scale: float
    lisa_layers: int
    lisa_every: int
    eps: float
    weight_decay: float
    weight_decay_end: float | None
    weight_decay_shape: str
    no_decay: tuple[str, ...]
    moment_dtype: str
    max_grad_norm: float
    freeze_router: bool
    seed: int  # of the rounding of moments


def learning_rate_schedule(spec: OptimizerSpec) -> optax.Schedule:
    """The learning rate of each optimizer update, `[]` of its count.

    Warm-up rises linearly from `warmup_init` and reaches the peak after `warmup_steps`; as in transformers its first
    update has the rate that it starts at. Then, with p from 0 to 1 over the rest of `schedule_steps` (else of
    `total_steps`) and 1 after it, and m = `min_lr_ratio`, the peak is multiplied by

        constant      1
        linear        1 - (1 - m) p
        cosine        m + (1 - m) (1 + cos(2 pi cycles p)) / 2     (arXiv 1608.03983)
        cosine_with_restarts  the half wave of each cycle, m + (1 - m) (1 + cos(pi (cycles p mod 1))) / 2; m at the end
        polynomial    m + (1 - m) (1 - p)^power
        inverse_sqrt  max(m, sqrt(w / t)), t updates after the start, w of them warm-up (10,000 without)
        wsd           1, and over the last `decay_steps`, or those behind `stable_steps`, m + (1 - m) f(q), q from 0 to
                      1 over them (arXiv 2404.06395): f is 1 - q (linear), (1 + cos(pi q)) / 2 (cosine), 2 x 0.5^q - 1
                      (exponential), 1 - sqrt(q) (1-sqrt, arXiv 2405.18392), or 1 up to the end (constant)
        rex           m + (1 - m) (1 - p) / (1 - 0.9 p): slow at first and steep at the end (arXiv 2107.04197, with the
                      0.9 of axolotl)

    Counts are training steps times updates per step.
    """
    updates = spec.updates_per_step
    warmup = spec.warmup_steps * updates
    after_warmup = max((spec.schedule_steps or spec.total_steps) * updates - warmup, 1)
    if spec.stable_steps and spec.schedule == "wsd":  # which a critic's may be alone
        after_warmup = (spec.stable_steps + spec.decay_steps) * updates
    rises = optax.linear_schedule(spec.warmup_init, spec.learning_rate, warmup)

    def schedule(count):
        t, factor = jnp.maximum(count - warmup, 0), 1.0
        if spec.schedule == "inverse_sqrt":
            scale = warmup or 10_000
            factor = jnp.maximum(jnp.sqrt(scale / (scale + t)), spec.min_lr_ratio)
        elif spec.schedule != "constant":
            height = HEIGHTS[spec.schedule](spec, t, after_warmup, spec.decay_steps * updates)
            factor = (1 - spec.min_lr_ratio) * height + spec.min_lr_ratio
        after = spec.learning_rate * factor
        return jnp.where(count < warmup, rises(count), after) if warmup else after

    return schedule


DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda q: 1 - q,
    "cosine": lambda q: 0.5 * (1 + jnp.cos(jnp.pi * q)),
    "exponential": lambda q: 2 * 0.5**q - 1,
    "1-sqrt": lambda q: 1 - jnp.sqrt(q),
    "constant": lambda q: jnp.where(q < 1, 1.0, 0.0),
}
# Heights of schedules, from 1, the peak, to 0, `min_lr_ratio` of it: t updates after warm-up, of n; wsd decays over the
# last `decay` of them.
HEIGHTS: dict[str, Callable[[OptimizerSpec, jax.Array, int, int], jax.Array]] = {
    "linear": lambda spec, t, n, decay: 1 - jnp.minimum(t, n) / n,
    "cosine": lambda spec, t, n, decay: 0.5 * (1 + jnp.cos(2 * spec.cycles * jnp.pi * jnp.minimum(t, n) / n)),
    "cosine_with_restarts": lambda spec, t, n, decay: jnp.where(
        t < n, 0.5 * (1 + jnp.cos(jnp.pi * jnp.mod(spec.cycles * t / n, 1.0))), 0.0
    ),
    "polynomial": lambda spec, t, n, decay: (1 - jnp.minimum(t, n) / n) ** spec.power,
    "wsd": lambda spec, t, n, decay: DECAYS[spec.decay_shape](jnp.clip((t - (n - decay)) / decay, 0.0, 1.0)),
    "rex": lambda spec, t, n, decay: (1 - jnp.minimum(t / n, 1.0)) / (1 - 0.9 * jnp.minimum(t / n, 1.0)),
}


def build_optimizer(spec: OptimizerSpec, schedule: optax.Schedule | None = None) -> optax.GradientTransformation:
    """Clipping to the global norm, then the named optimizer; `schedule` takes the place of that of `spec`.

    adamw (arXiv 1711.05101); adafactor with an explicit learning rate (arXiv 1804.04235) and came (arXiv 2307.02047),
    each layer by itself; lion (arXiv 2302.06675); sgd with momentum b1; muon (arXiv 2502.16982) and galore_adamw (arXiv
    2403.03507) for the matrices of the layers and adamw for the rest; ademamix (arXiv 2409.03137); adopt (arXiv
    2411.02853); schedule_free_adamw (arXiv 2405.15682); prodigy (arXiv 2306.06101). Weight decay is decoupled
    (`weight_decay_of`) and leaves out the parameters of `no_decay`. Moments are computed in fp32 and stored in
    `moment_dtype`, whatever the parameters' type. With `lisa_layers` so many layers are updated at a time. With
    `freeze_router` routers are left as they are. Any other name is that of a function of the user's, which is called
    with the schedule of the learning rate and its options, and returns an optimizer of optax; raises ConfigError where
    it cannot be called or returns something else.
    """
    rate = schedule or learning_rate_schedule(spec)
    if spec.name in OPTIMIZERS:
        named = stored_in(OPTIMIZERS[spec.name](spec, rate), spec.moment_dtype, spec.seed)
        if spec.lisa_layers:
            clip = clip_by_global_norm(spec.max_grad_norm) if spec.max_grad_norm else optax.identity()
            every = spec.lisa_every * spec.updates_per_step
            named = sampled_layers(named, clip, spec.lisa_layers, every, spec.seed)
            spec = replace(spec, max_grad_norm=0.0)
        return wrapped_optimizer(spec, named)
    make, options = own_function(spec.name)
    try:
        with contained():
            made = make(rate, **options)
    except Exception as error:
        raise ConfigError(f"optimizer.name: {spec.name} raised {error_text(error)}") from error
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer.name: {spec.name} returned {type(made).__name__}, but it must return an optimizer of optax (a "
            "GradientTransformation)"
        )
    return own_optimizer(spec, made)


def own_function(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The user's function that `optimizer.name` names, and its options; raises ConfigError where they cannot be found
    or read."""
    with naming(f"optimizer.name is {name!r}"):
        return resolve_with_options(name, {})


def own_optimizer(spec: OptimizerSpec, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer of the user's own in place of the named one; the number of its updates is counted before it."""
    counted = optax.chain(optax.scale_by_schedule(lambda _: 1.0), optimizer)
    return wrapped_optimizer(spec, stored_in(counted, spec.moment_dtype, spec.seed))


def wrapped_optimizer(spec: OptimizerSpec, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer after clipping to the global norm, and without effect on routers where these are frozen."""

    def routers(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith(ROUTER), params)

    if spec.freeze_router:  # their gradients are 0; this is about weight decay
        optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), routers))
    return optax.chain(clip_by_global_norm(spec.max_grad_norm), optimizer) if spec.max_grad_norm else optimizer


def with_rate_factors(
    optimizer: optax.GradientTransformation, factors: Mapping[str, tuple[float, ...]]
) -> optax.GradientTransformation:
    """The optimizer with learning rates of their own for some parameters: that of the schedule times a factor.

    `factors` are by the path of a parameter, one number or one for each layer of a stack. What an optimizer changes is
    in proportion to its learning rate, decoupled weight decay too, so its changes are multiplied; its state is the
    same with and without factors.
    """

    def scaled(path, x):
        factor = factors.get(path_name(path))
        return x if factor is None else x * jnp.array(factor, x.dtype).reshape(-1, *(1,) * (x.ndim - 1))

    def update(updates, state, params=None):
        changes, state = optimizer.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(scaled, changes), state

    return optax.GradientTransformation(optimizer.init, update)


def weight_decay_of(spec: OptimizerSpec) -> optax.ScalarOrSchedule:
    """The weight decay: a number, or that of each update where it moves to `weight_decay_end` over the run.

    It goes there by p, the share of the updates that were made (linear), or by (1 - cos(pi p)) / 2 (cosine): Megatron's
    weight_decay_incr_style.
    """
    if spec.weight_decay_end is None:
        return spec.weight_decay
    start, change = spec.weight_decay, spec.weight_decay_end - spec.weight_decay
    total = max(spec.total_steps * spec.updates_per_step, 1)

    def schedule(count):
        p = jnp.minimum(count / total, 1.0)
        return start + change * (p if spec.weight_decay_shape == "linear" else 0.5 * (1 - jnp.cos(jnp.pi * p)))

    return schedule


def decayed(spec: OptimizerSpec) -> Callable[[Any], Any]:
    """The mask of the parameters that weight decay applies to, of a tree of parameters.

    Nothing moves those of UNTRAINED, nor routers that are frozen.
    """
    still = (*spec.no_decay, *UNTRAINED, *(ROUTER if spec.freeze_router else ()))
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: not path_name(path).endswith(still), params)


def _adamw(spec: OptimizerSpec, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, spec.b1, spec.b2, spec.eps, weight_decay=weight_decay_of(spec), mask=decayed(spec))


def _descent(
    spec: OptimizerSpec, rate: optax.Schedule, *direction: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Steps in a direction, that of the transformations, with decoupled weight decay."""
    decay = optax.add_decayed_weights(weight_decay_of(spec), decayed(spec))
    return optax.chain(*direction, decay, optax.scale_by_learning_rate(rate))


def _is_matrix(path, x) -> bool:
    """True for matrices of the layers; biases of experts have as many dimensions, and so have convolutions."""
    name = path_name(path)
    return "layers" in name and x.ndim > 2 and name.endswith(MATRICES)


def _muon(spec: OptimizerSpec, rate: optax.Schedule) -> optax.GradientTransformation:
    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda *leaf: "muon" if _is_matrix(*leaf) else "adamw", params)

    momentum = optax.trace(MUON_MOMENTUM, nesterov=True)  # m = 0.95 m + g, and g + 0.95 m is made orthogonal
    matrices = _descent(spec, rate, momentum, orthogonalized(MUON_RMS))
    return optax.partition({"muon": matrices, "adamw": _adamw(spec, rate)}, labels)


def _ademamix(spec: OptimizerSpec, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW with `m1 + mixing m2` in place of its first moment, where m2 decays by b3 and has no bias correction.

    Over `mixing_steps`, of which a share p is done after an update, the weight is `p mixing` and the decay has a half
    life that rises linearly from that of b1: `exp(log b1 log b3 / ((1 - p) log b3 + p log b1))`, at most b3.
    """
    updates = spec.mixing_steps * spec.updates_per_step
    first, last = (math.log(max(decay, 1e-8)) for decay in (min(spec.b1, spec.b3), spec.b3))

    def mixing(count):
        return spec.mixing * jnp.minimum((count + 1) / updates, 1.0)

    def b3(count):
        p = jnp.minimum((count + 1) / updates, 1.0)
        return jnp.minimum(jnp.exp(first * last / ((1 - p) * last + p * first)), spec.b3)

    slow = (b3, mixing) if updates else (spec.b3, spec.mixing)
    return _descent(spec, rate, scale_by_ademamix(spec.b1, spec.b2, *slow, spec.eps))


def _galore_adamw(spec: OptimizerSpec, rate: optax.Schedule) -> optax.GradientTransformation:
    def labels(params):
        def of_leaf(path, x):
            return "galore" if _is_matrix(path, x) and min(x.shape[-2:]) > spec.galore_rank else "adamw"

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    every = spec.galore_every * spec.updates_per_step
    galore = scale_by_galore(spec.b1, spec.b2, spec.eps, spec.galore_rank, every, spec.galore_scale)
    return optax.partition({"galore": _descent(spec, rate, galore), "adamw": _adamw(spec, rate)}, labels)


STATISTICS = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0))
OPTIMIZERS: dict[str, Callable[[OptimizerSpec, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": lambda spec, rate: _descent(spec, rate, per_layer(STATISTICS)),
    "lion": lambda spec, rate: optax.lion(
        rate, spec.b1, spec.b2, weight_decay=weight_decay_of(spec), mask=decayed(spec)
    ),
    "sgd": lambda spec, rate: _descent(spec, rate, *([optax.trace(spec.b1)] if spec.b1 else [])),
    "muon": _muon,
    "ademamix": _ademamix,
    # Gradients over the root of the second moment of those before, at most t^(1/4) each, then momentum; the first one
    # only begins that moment.
    "adopt": lambda spec, rate: _descent(spec, rate, scale_by_adopt(spec.b1, spec.b2, spec.eps)),
    "schedule_free_adamw": lambda spec, rate: schedule_free_adamw(
        rate, spec.b1, spec.b2, spec.eps, weight_decay_of(spec), decayed(spec)
    ),
    "prodigy": lambda spec, rate: prodigy(
        rate, spec.b1, spec.b2, spec.eps, weight_decay_of(spec), decayed(spec), spec.d_coef
    ),
    "came": lambda spec, rate: _descent(spec, rate, per_layer(scale_by_came(spec.b1, spec.b2, spec.b3))),
    "galore_adamw": _galore_adamw,
}
