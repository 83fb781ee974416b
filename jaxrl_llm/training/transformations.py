"""Parts of optimizers that optax lacks or defines otherwise than their authors, and ways to apply them: by layer, to a
few layers, to clipped gradients.

Their states name moments as optax does (`moments.MOMENTS`), so that these are stored in the type that is set; weight
decay is a number or a schedule, of the parameters of a mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxrl_llm.algorithms.random_streams import LAYERS
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import parameter_spec, path_name
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.moments import schedules_further, updates_made

Mask = Callable[[Params], Any]
Kind = TypeVar("Kind")
FIRST_DISTANCE = 1e-6  # Prodigy's, before there is an estimate: of all but the smallest steps far too little
CAME_EPS = 1e-30, 1e-16  # added to squares, of gradients and of what updates differ by from their mean
NEWTON_SCHULZ = 3.4445, -4.775, 2.0315  # coefficients that raise small singular values fast, as all of Muon's authors
CAME_CLIP = 1.0  # the largest root mean square of g over the root of its second moment


class ScheduleFree(NamedTuple):
    """State of `schedule_free_adamw`. The parameters that it changes are the averages x."""

    schedule: optax.ScaleByScheduleState
    count: jax.Array
    nu: Params
    z: Params  # in fp32
    largest_rate: jax.Array
    weights: jax.Array  # their sum so far


def schedule_free_adamw(
    rate: optax.Schedule, b1: float, b2: float, eps: float, weight_decay: optax.ScalarOrSchedule, mask: Mask
) -> optax.GradientTransformation:
    """AdamW with averaged parameters in place of a decaying rate (arXiv 2405.15682).

    With t the number of updates made, this one among them, lr the learning rate and g the gradient at
    `gradient_point`, y = (1 - b1) z + b1 x:

        z' = z - lr (g / (sqrt(v / (1 - b2^t)) + eps) + decay y)        v = b2 v + (1 - b2) g^2
        x' = (1 - c) x + c z'                                            c = r^2 / sum of the r^2, r = max(lr so far)

    x, which is sampled from, evaluated and exported, is what the change is of; z begins as x.
    """

    def init(params):
        zero = jnp.zeros((), jnp.int32)
        nu, z = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.copy, params)
        return ScheduleFree(optax.ScaleByScheduleState(zero), zero, nu, z, jnp.zeros(()), jnp.zeros(()))

    def update(updates, state, params: Any = None):
        count, made = state.count + 1, state.schedule.count
        lr = jnp.asarray(rate(made), jnp.float32)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        y, decay = gradient_point(b1)(params, state), _number(weight_decay, made)

        def moved(z, v, g, y, decays):
            direction = g / (jnp.sqrt(v / (1 - b2**count)) + eps)
            return z - lr * (direction + decay * y if decays else direction)

        z = jax.tree.map(moved, state.z, nu, updates, y, mask(params))
        largest = jnp.maximum(state.largest_rate, lr)
        weights = state.weights + largest**2
        share = jnp.where(weights > 0, largest**2 / weights, 0.0)  # no update of a rate of 0 has a weight
        changes = jax.tree.map(lambda x, z: share * (z - x), params, z)
        return changes, ScheduleFree(optax.ScaleByScheduleState(made + 1), count, nu, z, largest, weights)

    return optax.GradientTransformation(init, update)


def gradient_point(b1: float) -> Callable[[Params, optax.OptState], Params]:
    """The function of parameters and an optimizer's state that returns those at which gradients are taken: the
    parameters, or y of `schedule_free_adamw`."""

    def point(params: Params, state: optax.OptState) -> Params:
        own = state_of(state, ScheduleFree)
        return params if own is None else jax.tree.map(lambda x, z: b1 * x + (1 - b1) * z, params, own.z)

    return point


class Prodigy(NamedTuple):
    """State of `prodigy`."""

    schedule: optax.ScaleByScheduleState
    mu: Params  # of d g
    nu: Params
    start: Params  # the parameters of the first update, in fp32
    sums: Params  # of gradients, weighed
    numerator: jax.Array
    d: jax.Array


def prodigy(
    rate: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: optax.ScalarOrSchedule,
    mask: Mask,
    coef: float,
) -> optax.GradientTransformation:
    """AdamW whose learning rate is lr d, with d an estimate from below of the distance to the solution, times `coef`
    (arXiv 2306.06101, algorithm 4, without bias correction as in its authors' code).

    With p0 the parameters at the start, b3 = sqrt(b2), d0 = 1e-6, which d begins with, and g the gradient at p:

        n = b3 n + (d / d0) d lr <g, p0 - p>      s = b3 s + (d / d0) d lr g      d' = max(d, coef n / sum |s|)
        m = b1 m + (1 - b1) d g                   v = b2 v + (1 - b2) (d g)^2
        p' = p - d lr (m / (sqrt(v) + d' eps) + decay p)

    An update with a rate or a gradient of 0 leaves all as it is; optax's own ends in 0 / 0 there.
    """
    b3 = b2**0.5

    def init(params):
        mu, nu, sums = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        schedule, start = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), jax.tree.map(jnp.copy, params)
        return Prodigy(schedule, mu, nu, start, sums, jnp.zeros(()), jnp.full((), FIRST_DISTANCE))

    def update(updates, state, params: Any = None):
        made, d = state.schedule.count, state.d
        lr = jnp.asarray(rate(made), jnp.float32)
        decay, weight = _number(weight_decay, made), d / FIRST_DISTANCE * d * lr
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * d * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(d * g), state.nu, updates)
        sums = jax.tree.map(lambda s, g: b3 * s + weight * g, state.sums, updates)
        come = jax.tree.map(jnp.subtract, state.start, params)
        numerator = b3 * state.numerator + weight * optax.tree.vdot(updates, come)
        denominator = optax.tree.norm(sums, ord=1)
        grown = jnp.maximum(d, coef * numerator / jnp.where(denominator > 0, denominator, 1.0))

        def change(m, v, p, decays):
            direction = m / (jnp.sqrt(v) + grown * eps)
            return -d * lr * (direction + decay * p if decays else direction)

        changes = jax.tree.map(change, mu, nu, params, mask(params))
        schedule = optax.ScaleByScheduleState(made + 1)
        still = Prodigy(schedule, *state[1:])
        new = Prodigy(schedule, mu, nu, state.start, sums, numerator, grown)
        learns = (lr > 0) & (denominator > 0)
        changes = jax.tree.map(lambda x: jnp.where(learns, x, 0.0), changes)
        return changes, jax.tree.map(lambda a, b: jnp.where(learns, a, b), new, still)

    return optax.GradientTransformation(init, update)


class Came(NamedTuple):
    """State of `scale_by_came`. Of matrices `[..., in, out]` means over the other dimension are kept, `row` `[..., in]`
    and `col` `[..., out]`; of other parameters the whole second moment. What a parameter has not is one 0."""

    mu: Params
    nu: Params
    row: Params
    col: Params
    instability_row: Params
    instability_col: Params


def scale_by_came(b1: float, b2: float, b3: float) -> optax.GradientTransformation:
    """The direction of CAME (arXiv 2307.02047) for parameters that are no stacks: Adafactor's, with momentum and
    divided by a root of its instability.

    For a matrix, of which R(row, col) = row col' / mean(row) is the square that is kept in two parts,

        u = g / sqrt(R(rows and columns of g^2 + 1e-30, decaying by b2)), divided by its root mean square where > 1
        m = b1 m + (1 - b1) u
        direction = m / sqrt(R(rows and columns of (u - m)^2 + 1e-16, decaying by b3))

    For other parameters u is g over the root of the second moment, and the direction m.
    """

    def init(params):
        def rows(p):
            return jnp.zeros(p.shape[:-1] if p.ndim > 1 else (1,))

        def columns(p):
            return jnp.zeros(p.shape[:-2] + p.shape[-1:] if p.ndim > 1 else (1,))

        nu = jax.tree.map(lambda p: jnp.zeros(p.shape if p.ndim < 2 else (1,)), params)
        parts = (jax.tree.map(each, params) for each in (rows, columns, rows, columns))
        return Came(jax.tree.map(jnp.zeros_like, params), nu, *parts)

    def update(updates, state, params=None):
        del params

        def of_parameter(g, mu, nu, row, col, instability_row, instability_col):
            square = g * g + CAME_EPS[0]
            if g.ndim > 1:
                row, col = _decayed(row, square.mean(-1), b2), _decayed(col, square.mean(-2), b2)
                u = g * _inverse_root(row, col)
            else:
                nu = _decayed(nu, square, b2)
                u = g * jax.lax.rsqrt(nu)
            u /= jnp.maximum(jnp.sqrt(jnp.mean(u * u)) / CAME_CLIP, 1.0)
            direction = mu = _decayed(mu, u, b1)
            if g.ndim > 1:
                square = jnp.square(u - mu) + CAME_EPS[1]
                instability_row = _decayed(instability_row, square.mean(-1), b3)
                instability_col = _decayed(instability_col, square.mean(-2), b3)
                direction = mu * _inverse_root(instability_row, instability_col)
            return direction, mu, nu, row, col, instability_row, instability_col

        leaves, structure = jax.tree.flatten(updates)
        fields = zip(leaves, *map(structure.flatten_up_to, state), strict=True)
        made = zip(*(of_parameter(*each) for each in fields), strict=True) if leaves else [()] * 7
        directions, *new = (structure.unflatten(each) for each in made)
        return directions, Came(*new)

    return optax.GradientTransformation(init, update)


def orthogonalized(rms: float) -> optax.GradientTransformation:
    """Matrices `[..., in, out]` with singular values near 1 in place of their own, times `rms sqrt(max(in, out))`, so
    that their root mean square is near `rms`.

    Five Newton-Schulz steps from x over its Frobenius norm, `x' = a x + b x x^T x + c (x x^T)^2 x`, leave all but the
    smallest between 0.7 and 1.2. Source: Muon, Jordan et al. (2024), as torch.optim.Muon; the factor, arXiv 2502.16982.
    """
    a, b, c = NEWTON_SCHULZ

    def of_matrix(g):
        wide = g.shape[-2] <= g.shape[-1]
        x = g if wide else g.mT  # the shorter side first, as x x^T is then smaller
        x /= jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), 1e-7)
        for _ in range(5):
            square = x @ x.mT
            x = a * x + (b * square + c * square @ square) @ x
        return rms * max(g.shape[-2:]) ** 0.5 * (x if wide else x.mT)

    return optax.stateless(lambda updates, params: jax.tree.map(of_matrix, updates))


class GaLore(NamedTuple):
    """State of `scale_by_galore`: the moments `[..., r, out]` or `[..., in, r]` of gradients in the subspace `basis`
    `[..., in, r]` or `[..., out, r]`, of the shorter dimension of a matrix `[..., in, out]`."""

    count: jax.Array
    mu: Params
    nu: Params
    basis: Params  # in fp32, with orthonormal columns


def scale_by_galore(
    b1: float, b2: float, eps: float, rank: int, every: int, scale: float
) -> optax.GradientTransformation:
    """The direction of GaLore (arXiv 2403.03507) for matrices: `scale` times Adam's in a subspace of rank `rank`.

    The subspace is that of the largest singular values of the gradient, found anew at the first of each `every`
    updates; moments stay as they are when it changes, as in its authors' code. Of sharded gradients a device gathers
    and decomposes one matrix at a time; their projections are sums over the devices.
    """

    def init(params):
        def low(p):
            *lead, rows, columns = p.shape
            return jnp.zeros((*lead, rank, columns) if rows <= columns else (*lead, rows, rank))

        basis = jax.tree.map(lambda p: jnp.zeros((*p.shape[:-2], min(p.shape[-2:]), rank)), params)
        return GaLore(jnp.zeros((), jnp.int32), jax.tree.map(low, params), jax.tree.map(low, params), basis)

    @jax.default_matmul_precision("highest")
    def update(updates, state, params=None):
        del params
        count, mesh = state.count + 1, jax.sharding.get_abstract_mesh()

        def of_matrix(path, g, m, v, basis):
            wide = g.shape[-2] <= g.shape[-1]  # its rows are projected

            def leading():
                flat = g.reshape(-1, *g.shape[-2:])
                found = jax.lax.map(
                    lambda x: jnp.linalg.svd(x if wide else x.T, full_matrices=False)[0][:, :rank], flat
                )
                return found.reshape(basis.shape)

            def sharded(x, rows: bool, columns: bool):
                """Along the dimensions that it shares with g; ranks are whole, or XLA would gather all g in place of
                these."""
                if mesh.empty or not (axes := parameter_spec(path_name(path), g.shape, mesh)):
                    return x
                spec = *axes[:-2], axes[-2] if rows else None, axes[-1] if columns else None
                return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

            basis = jax.lax.cond(state.count % every == 0, leading, lambda: basis)
            if wide:
                q = sharded(basis, True, False)
                low = sharded(jnp.matmul(q.mT, g), False, True)
            else:
                q = sharded(basis.mT, False, True).mT
                low = sharded(jnp.matmul(g, q), True, False)
            m, v = _decayed(m, low, b1), _decayed(v, low * low, b2)
            step = sharded(m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps), not wide, wide)
            return scale * (jnp.matmul(q, step) if wide else jnp.matmul(step, q.mT)), m, v, basis

        found = jax.tree_util.tree_map_with_path(of_matrix, updates, state.mu, state.nu, state.basis)
        directions, *new = (jax.tree.map(lambda _, each, n=n: each[n], updates, found) for n in range(4))
        return directions, GaLore(count, *new)

    return optax.GradientTransformation(init, update)


class SampledLayers(NamedTuple):
    """State of `sampled_layers`: that of an optimizer of the layers that are updated, and of one of all other
    parameters."""

    layers: optax.OptState
    others: optax.OptState


def sampled_layers(
    optimizer: optax.GradientTransformation, clip: optax.GradientTransformation, count: int, every: int, seed: int
) -> optax.GradientTransformation:
    """LISA (arXiv 2403.17919): the optimizer for `count` layers, drawn anew for each `every` updates, and for all that
    is in no layer; other layers stay as they are, and `clip`, which has no state, sees no gradients of theirs.

    Moments are kept of as many layers, and begin anew with them. The draws come from `seed` and the number of updates
    made. Raises ConfigError for a network with fewer layers, or with layers of several shapes.
    """

    def stack_of(params) -> str:
        stacks = [name for name in params if name.endswith("layers")]
        if len(stacks) != 1:
            held = f"layers of {len(stacks)} shapes ({', '.join(stacks)})" if stacks else "no layers that are trained"
            raise ConfigError(
                f"optimizer.lisa_layers is {count}, which draws of layers of one shape, but this model has {held}: set "
                "it to 0"
            )
        total = jax.tree.leaves(params[stacks[0]])[0].shape[0]
        if count > total:
            raise ConfigError(f"optimizer.lisa_layers is {count}, but the model has {total} layers: set it to fewer")
        return stacks[0]

    def parts(tree, stack, index):
        """The layers of that index, and all that is in none, of a tree of parameters."""
        return jax.tree.map(lambda x: x[index], {stack: tree[stack]}), {n: x for n, x in tree.items() if n != stack}

    def init(params):
        layers, others = parts(params, stack_of(params), jnp.arange(count))
        return SampledLayers(optimizer.init(layers), optimizer.init(others))

    def update(updates, state, params: Any = None):
        stack, made = stack_of(params), updates_made(state.others)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), LAYERS), made // every)
        total = jax.tree.leaves(params[stack])[0].shape[0]
        index = jnp.sort(jax.random.permutation(key, total)[:count])
        of_layers, of_others = parts(params, stack, index)
        of_these, of_rest = parts(updates, stack, index)
        clipped: Any = clip.update({**of_these, **of_rest}, optax.EmptyState())[0]
        new = schedules_further(optimizer.init(of_layers), made)
        begun = jax.tree.map(lambda a, b: jnp.where(made % every == 0, a, b), new, state.layers)
        changes: Any
        changed: Any
        changes, layers = optimizer.update({stack: clipped.pop(stack)}, begun, of_layers)
        changed, others = optimizer.update(clipped, state.others, of_others)
        of_all = jax.tree.map(lambda p, x: jnp.zeros(p.shape, x.dtype).at[index].set(x), params[stack], changes[stack])
        return {**changed, stack: of_all}, SampledLayers(layers, others)

    return optax.GradientTransformation(init, update)


STACKS = {"layers": "stacked", "dense_layers": "dense"}  # stacks whose state has another name than their own


def per_layer(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation applied to every layer by itself, though parameters are stacked over layers.

    Layers of another kind than most are a stack of their own, with as many layers as there are of that kind.
    """

    def over_layers(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tree, *rest: (jax.vmap(function) if jax.tree.leaves(tree) else function)(tree, *rest)

    stacked = optax.GradientTransformation(over_layers(transformation.init), over_layers(transformation.update))

    def label(path, _) -> str:
        name = path_name(path)
        stack = next((part for part in name.split("/") if part.endswith("layers")), None)
        return "whole" if stack is None else "vision" if "vision/" in name else STACKS.get(stack, stack)

    def of_stacks(tree) -> optax.GradientTransformation:
        labels = jax.tree_util.tree_map_with_path(label, tree)
        stacks = {"vision", *STACKS.values(), *jax.tree.leaves(labels)} - {"whole"}
        return optax.partition({**dict.fromkeys(sorted(stacks), stacked), "whole": transformation}, labels)

    return optax.GradientTransformation(
        lambda params: of_stacks(params).init(params),
        lambda updates, state, params=None: of_stacks(updates).update(updates, state, params),
    )


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Gradients g times `limit / max(|g|, limit)`, |g| over all of them.

    One factor for all, unlike optax's division of each by the norm: XLA multiplies wherever a gradient is read, and
    holds no second copy of them.
    """

    def clipped(updates, params):
        del params
        factor = limit / jnp.maximum(optax.tree.norm(updates), limit)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates)

    return optax.stateless(clipped)


def _decayed(mean, x, decay: float):
    return decay * mean + (1 - decay) * x


def _inverse_root(row, col) -> jax.Array:
    """1 / sqrt(row col' / mean(row)), `[..., in, out]`."""
    return jax.lax.rsqrt(row / row.mean(-1, keepdims=True))[..., None] * jax.lax.rsqrt(col)[..., None, :]


def _number(value: optax.ScalarOrSchedule, count: jax.Array):
    return value(count) if callable(value) else value


def state_of(state: optax.OptState, kind: type[Kind]) -> Kind | None:
    """The state of that kind in an optimizer's, or None."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return next((x for x in leaves if isinstance(x, kind)), None)
