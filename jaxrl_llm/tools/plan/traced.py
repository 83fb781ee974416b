"""Floating-point operations of a traced program: its matrix products, those in loops as often as they turn."""

import math

from jax.extend import core


def traced_flops(jaxpr, turns: tuple[float, ...] = ()) -> float:
    """Operations of all products in a (closed) jaxpr, on all devices together.

    `turns` are those of loops whose number is not known before, the outer ones first, 1 where it says nothing; of
    branches the heaviest counts. The only Pallas kernels here are of causal attention, and skip half of their blocks.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_flops(equation, turns) for equation in jaxpr.eqns)


def _flops(equation, turns: tuple[float, ...]) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2.0 * math.prod(out) * math.prod(left[i] for i in contracted)
    if name.startswith("ragged_dot"):
        return _ragged(*(x.aval.shape for x in (*equation.invars[:2], equation.outvars[0])))
    within = turns[1:] if name == "while" else turns
    inside = [traced_flops(x, within) for value in params.values() for x in _jaxprs(value)]
    if name == "scan":
        return params["length"] * sum(inside)
    if name == "while":
        return (turns or (1.0,))[0] * sum(inside)
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid) * sum(inside) / 2
    if name == "cond":
        return max(inside)
    if name == "shard_map":
        axes = next(params[key] for key in ("newly_manual_axes", "manual_axes") if key in params)  # as jax calls them
        return sum(inside) * math.prod(params["mesh"].shape[axis] for axis in axes)
    return sum(inside)


def _ragged(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> float:
    """Operations of rows `[m,k]` with one matrix each of `[g,k,n]`, or of the gradient `[g,k,n]` of those."""
    if len(out) == 3:
        return 2.0 * math.prod(left) * right[-1]
    return 2.0 * math.prod(out) * left[-1]


def _jaxprs(value):
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)
