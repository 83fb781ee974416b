"""Matmuls of rows that are sorted into groups, each group with a matrix of its own.

A group is cut into blocks of rows, the last of them smaller (arXiv 2211.15841). On GPUs a kernel computes all blocks at
once, as XLA would multiply every row with every group's matrix; on CPUs a loop goes over them; TPUs have XLA's kernels.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.models.kernels.cpu_matmul import matmul, matmul_transposed, over_rows
from jaxrl_llm.models.quantize import BYTES as LARGEST
from jaxrl_llm.models.quantize import LEVELS, Kernel, as_factors, as_fp8, dequantize, scales_of, widened

BLOCKS = (16, 128)  # the fewest and the most rows of a block
RESULT = "grouped_matmul"  # as which policies of rematerialisation know results
COLUMNS = 128  # of the results of a program of a GPU's kernel, at most
BYTES = 128  # of a row that such a program reads at once
WIDE = 64  # such columns where matrices are of 4 bits, which take more of its registers
PROGRAMS = 512  # that fill a GPU, counting blocks that may be empty: fewer are split
AHEAD = 3  # blocks of codes that it reads before it needs them


def grouped_matmul(x, kernels: Kernel, sizes, kind: str = "none", interpret: bool = False) -> jax.Array:
    """`[m,o]`: the first `sizes[0]` rows of x `[m,i]` times `kernels[0]`, the next `sizes[1]` times `kernels[1]`, ...

    kernels are `[E,i,o]` of the type of x, or quantised as `kind` says, without a gradient; sizes `[E]` int32. Rows
    behind the last group give zeros and get none but zeros as gradients. Sums are in fp32. In a shard_map all three
    vary along the same axes. `interpret` runs the kernels of GPUs without one, for tests.
    """
    method = _method(interpret)
    if isinstance(kernels, dict):
        out = cast(jax.Array, _of_stored(method, kind, x, kernels, sizes))
    elif method.outer is None:
        out = method.matmul(x, kernels, sizes, False, x.dtype)
    else:
        out = _grouped(method, x, kernels, sizes)
    return checkpoint_name(out, RESULT)


class _Method(NamedTuple):
    """`matmul(x, kernels, sizes, transposed, dtype, kind)` is the grouped matmul in `dtype`, with the matrices, of any
    type or of 4 bits as `kind` says, transposed or as they are; `outer(x, y, kernels, sizes)` of each group the sum
    over its rows of `x_i y_o`, in the shape of the kernels. Without it JAX has the gradient."""

    matmul: Callable[..., Any]
    outer: Callable[..., Any] | None = None


def _method(interpret: bool) -> _Method:
    backend = jax.default_backend()
    if backend == "tpu" and not interpret:
        return _Method(_ragged)
    if backend == "cpu" and not interpret:
        return _Method(looped_matmul, looped_outer)
    methods = (functools.partial(function, interpret=interpret) for function in (_by_kernel, _outer_by_kernel))
    return _Method(*methods)


def _ragged(x, kernels: Kernel, sizes, transposed: bool, dtype, kind: str = "none"):
    kernels = dequantize(kernels, kind, x.dtype) if isinstance(kernels, dict) else kernels
    kernels = widened(kernels.swapaxes(1, 2) if transposed else kernels, x.dtype)
    # XLA's kernels leave what they find in rows behind the last group.
    here = (jnp.arange(len(x)) < sizes.sum())[:, None]
    out = jax.lax.ragged_dot(jnp.where(here, x, 0), kernels, sizes, preferred_element_type=dtype)
    return jnp.where(here, out, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_stored(method: _Method, kind: str, x, kernels: dict[str, jax.Array], sizes):
    return _by_stored(method, kind, x, kernels, sizes, False)


def _by_stored(method: _Method, kind: str, x, kernels: dict[str, jax.Array], sizes, transposed: bool):
    """The grouped matmul with quantised matrices: of 8 bits their codes are multiplied with; those of 4 bits are
    converted, of the layer that is computed alone, on CPUs those of groups that have rows, and by the kernel for few
    rows as they are read."""
    if kind not in LARGEST:
        return method.matmul(x, kernels, sizes, transposed, x.dtype, kind)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    # A column is scaled behind the sum over its inputs, and before the one over columns.
    scales, largest = kernels["absmax"][jnp.minimum(group, sizes.size - 1), 0], LARGEST[kind][1]
    if transposed:
        x = (x * scales).astype(x.dtype)
        return (method.matmul(x, kernels["codes"], sizes, True, jnp.float32) / largest).astype(x.dtype)
    return (method.matmul(x, kernels["codes"], sizes, False, jnp.float32) * (scales / largest)).astype(x.dtype)


# The backward pass converts the matrices again: autodiff would keep those of every layer as numbers.
_of_stored.defvjp(
    lambda method, kind, x, kernels, sizes: (_by_stored(method, kind, x, kernels, sizes, False), (kernels, sizes)),
    lambda method, kind, kept, gradient: (_by_stored(method, kind, gradient, kept[0], kept[1], True), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(method: _Method, x, kernels, sizes):
    return method.matmul(x, kernels, sizes, False, x.dtype)


def _forward(method: _Method, x, kernels, sizes):
    # What a gradient that is not asked for would read is not kept: experts may be frozen.
    kept = x.value if kernels.perturbed else None, kernels.value, sizes.value
    return method.matmul(x.value, kernels.value, sizes.value, False, x.value.dtype), kept


def _backward(method: _Method, kept, gradient):
    x, kernels, sizes = kept
    assert method.outer is not None
    of_kernels = None if x is None else method.outer(x, gradient, kernels, sizes)
    return method.matmul(gradient, kernels, sizes, True, gradient.dtype), of_kernels, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def _block_rows(rows: int, groups: int) -> int:
    """Rows of a block: those of a group of average size, rounded up to a power of two."""
    return min(max(2 ** math.ceil(math.log2(max(rows / groups, 1))), BLOCKS[0]), BLOCKS[1])


def _most_blocks(rows: int, groups: int) -> int:
    return rows // _block_rows(rows, groups) + min(rows, groups)


def _place(sizes, number, rows: int):
    """The group of a block of `rows`, its first row, and the row behind its group; of blocks too many there is none."""
    blocks = (sizes + (rows - 1)) // rows
    before = jnp.cumsum(blocks) <= number  # groups all of whose blocks come before
    group = before.astype(jnp.int32).sum()
    start = jnp.where(before, sizes, 0).sum() + (number - jnp.where(before, blocks, 0).sum()) * rows
    return group, start, jnp.where(jnp.arange(sizes.size) <= group, sizes, 0).sum()


def _over_blocks(step, total, x, sizes):
    """`total` after `step(total, group, start, end)` for each block of the rows of x that there may be.

    A loop of which rematerialisation sees no matmuls: it would save those of all blocks, full or not.
    """
    size, most = _block_rows(len(x), sizes.size), _most_blocks(len(x), sizes.size)
    places = jax.vmap(lambda number: _place(sizes, number, size))(jnp.arange(most))
    counted = jax.lax.while_loop(
        lambda state: state[0] < most,
        lambda state: (state[0] + 1, step(state[1], *(place[state[0]] for place in places))),
        (0, total),
    )
    return counted[1]


def _rows(array, size: int):
    """The `size` rows of an array from any on, as a function of the first; zeros behind the last."""
    padded = jnp.pad(array, ((0, size), (0, 0)))
    return lambda start: jax.lax.dynamic_slice_in_dim(padded, start, size)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def looped_matmul(x, kernels: Kernel, sizes, transposed: bool, dtype, kind: str = "none"):
    """`_Method.matmul` of CPUs: a loop over blocks of rows, of which those behind the last group are skipped."""
    size = _block_rows(len(x), sizes.size)
    rows_of_x = _rows(x, size)

    def matrix(group):
        own = jax.tree.map(lambda x: x[group], kernels)
        return dequantize(own, kind, x.dtype) if isinstance(own, dict) else widened(own, x.dtype)

    def step(out, group, start, end):
        def product():
            made = (matmul_transposed if transposed else matmul)(rows_of_x(start), matrix(group))
            return jnp.where((start + jnp.arange(size) < end)[:, None], made, 0).astype(out.dtype)

        made = jax.lax.cond(start < end, product, lambda: jnp.zeros_like(out[:size]))
        return jax.lax.dynamic_update_slice_in_dim(out, made, start, axis=0)

    # In fp32: to write a block of 16-bit rows XLA would convert all of them. The zeros that a block writes behind its
    # group are where the next one begins.
    width = jax.eval_shape(matrix, 0).shape[0 if transposed else 1]
    out = jnp.zeros_like(x, jnp.float32, (len(x) + size, width))
    return _over_blocks(step, out, x, sizes)[: len(x)].astype(dtype)


@jax.jit
def looped_outer(x, y, kernels, sizes):
    """`_Method.outer` of CPUs: a loop over blocks of rows, which adds each product to its group's sum."""
    size = _block_rows(len(x), sizes.size)
    rows_of_x, rows_of_y = _rows(x, size), _rows(y, size)

    def step(total, group, start, end):
        group = jnp.minimum(group, len(kernels) - 1)

        def product():
            inside = (start + jnp.arange(size) < end)[:, None]
            return over_rows(jnp.where(inside, rows_of_x(start), 0), rows_of_y(start))

        made = total[group] + jax.lax.cond(start < end, product, lambda: jnp.zeros_like(total[0]))
        return jax.lax.dynamic_update_index_in_dim(total, made, group, axis=0)

    return _over_blocks(step, jnp.zeros_like(kernels, jnp.float32), x, sizes).astype(kernels.dtype)


def _by_kernel(x, kernels: Kernel, sizes, transposed: bool, dtype, kind: str = "none", interpret: bool = False):
    # Imported here: only runs on GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    if isinstance(kernels, dict):
        codes, scales = kernels["codes"], scales_of(kernels)
        if not transposed and reads_codes(len(x), codes, scales):
            return by_codes(x, codes, scales, sizes, dtype, kind, interpret)
        kernels = dequantize(kernels, kind, x.dtype)
    kernels = as_fp8(kernels)
    nothing = 0 if jnp.issubdtype(kernels.dtype, jnp.integer) else 0.0
    inner, depth = x.shape[1], BYTES // x.dtype.itemsize

    def block(refs, group, low, high, rows, columns, total):
        x_ref, kernels_ref = refs

        def step(number, total):
            at = number * depth
            is_inner = at + jnp.arange(depth) < inner
            here, masks = (rows.at, pl.ds(at, depth)), (is_inner, columns.inside)
            ours = triton.load(x_ref.at[here], mask=rows.inside[:, None] & is_inner[None], other=0.0)
            there = pl.ds(at, depth), columns.at
            if transposed:
                there, masks = there[::-1], masks[::-1]
            mask = masks[0][:, None] & masks[1][None]
            matrix = triton.load(kernels_ref.at[(group, *there)], mask=mask, other=nothing)
            return total + triton.dot(ours, matrix.astype(x.dtype), trans_b=transposed)

        return jax.lax.fori_loop(low, high, step, total)

    width, steps = kernels.shape[1 if transposed else 2], -(-inner // depth)
    return _over_programs(block, steps, (x, kernels), sizes, (dtype, width), "grouped_matmul", interpret, COLUMNS)


def reads_codes(rows: int, codes, scales) -> bool:
    """True where `by_codes` serves: for groups of a block's rows, so that it converts codes once, and whole blocks of
    numbers that share a scale, of which a product of tensor cores has 16 or more."""
    return rows <= BLOCKS[1] * len(codes) and codes.shape[1] >= 16 * scales.shape[1]


def by_codes(x, codes, scales, sizes, dtype, kind: str, interpret: bool):
    """The grouped matmul on GPUs with matrices of 4 bits, codes and scales as `quantize` has them.

    Numbers are rounded as `dequantize` does, and leave no program. A program has the next blocks of codes in registers:
    Triton's own pipeline (`num_stages`) would have the level of every number in shared memory, where it is written by
    an instruction of its own. Of few groups several programs share a sum, as long as parts of it are fewer bytes than
    codes.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    depth = codes.shape[1] // scales.shape[1]  # of bytes that share a scale

    def block(refs, group, low, high, rows, columns, total):
        x_ref, codes_ref, scales_ref, levels_ref = refs
        group = jnp.minimum(group, len(codes) - 1)  # blocks are read ahead of none too

        def read(number):
            number = jnp.minimum(number, scales.shape[1] - 1)
            at, mask = pl.ds(number * depth, depth), columns.inside
            codes = triton.load(codes_ref.at[group, at, columns.at], mask=mask[None], other=0)
            return codes, triton.load(scales_ref.at[group, number, columns.at], mask=mask)

        def step(number, state):
            total, (codes, scale), *others = state
            others.append(read(number + AHEAD))
            pairs, factor = codes.astype(jnp.int32), as_factors(scale)[None]
            for half, each in enumerate((pairs & 15, pairs >> 4)):  # inputs 2i and 2i + 1
                here = pl.ds((half * scales.shape[1] + number) * depth, depth)
                ours = triton.load(x_ref.at[rows.at, here], mask=rows.inside[:, None], other=0.0)
                total += triton.dot(ours, (triton.load(levels_ref.at[each]) * factor).astype(x.dtype))
            return total, *others

        return jax.lax.fori_loop(low, high, step, (total, *(read(low + number) for number in range(AHEAD))))[0]

    halves = x.reshape(len(x), -1, 2).swapaxes(1, 2).reshape(x.shape)
    levels = LEVELS[kind] + jnp.zeros_like(x, jnp.float32, (16,))  # which says along which axes it varies
    splits = min(PROGRAMS * WIDE // (_most_blocks(len(x), len(codes)) * codes.shape[2]), codes.shape[1] // (8 * len(x)))
    run = functools.partial(_over_programs, block, scales.shape[1], (halves, codes, scales, levels), sizes)
    return run((dtype, codes.shape[2]), "grouped_matmul_of_codes", interpret, WIDE, max(splits, 1), stages=1)


class _Part(NamedTuple):
    """Rows or columns of a program, and which of them there are."""

    at: Any
    inside: jax.Array


def _over_programs(
    block, steps: int, arrays, sizes, out, name: str, interpret: bool, most: int, splits: int = 1, stages: int = 3
):
    """The grouped matmul, of that type and width, of which each block of rows of the first array and at most so many
    columns are `block(refs, group, low, high, rows, columns, zeros)`, with the matrices of the second array, of all
    steps, or of a split's share of them."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    dtype, width = out
    rows, groups = len(arrays[0]), len(arrays[1])
    size = _block_rows(rows, groups)
    columns = min(4 * size, most)  # few rows wait for matrices, which more programs read faster

    def kernel(*refs):
        *refs, sizes_ref, out_ref = refs
        group, start, end = _place(sizes_ref[...], pl.program_id(0), size)
        first, split = pl.program_id(1) * columns, pl.program_id(2)
        ours = _Part(pl.ds(start, size), start + jnp.arange(size) < end)
        there = _Part(pl.ds(first, columns), first + jnp.arange(columns) < width)
        # What is behind the last group is a group without a matrix.
        low, high = ((group < groups).astype(jnp.int32) * (steps * n // splits) for n in (split, split + 1))
        total = block(refs, group, low, high, ours, there, jnp.zeros((size, columns), jnp.float32))
        mask = ours.inside[:, None] & there.inside[None]
        triton.store(out_ref.at[split, ours.at, there.at], total.astype(out_ref.dtype), mask=mask)

    sizes = jnp.append(sizes, rows - sizes.sum())
    grid = (_most_blocks(rows, groups) + 1, pl.cdiv(width, columns), splits)
    warps = 8 if size == BLOCKS[1] else 4
    of_splits = dtype if splits == 1 else jnp.float32, (splits, rows, width)
    found = _run(kernel, grid, arrays, sizes, of_splits, warps, name, interpret, stages)
    return found[0] if splits == 1 else found.sum(axis=0).astype(dtype)


def _outer_by_kernel(x, y, kernels, sizes, interpret: bool):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    depth = BYTES // x.dtype.itemsize  # rows that are read at once

    def kernel(x_ref, y_ref, sizes_ref, out_ref):
        group, sizes = pl.program_id(0), sizes_ref[...]
        start, end = (jnp.where(jnp.arange(sizes.size) < last, sizes, 0).sum() for last in (group, group + 1))
        firsts = pl.program_id(1) * COLUMNS, pl.program_id(2) * COLUMNS
        insides = [first + jnp.arange(COLUMNS) < n for first, n in zip(firsts, kernels.shape[1:], strict=True)]

        def step(number, total):
            at = start + number * depth
            is_row = (at + jnp.arange(depth) < end)[:, None]
            left, right = (
                triton.load(ref.at[pl.ds(at, depth), pl.ds(first, COLUMNS)], mask=is_row & inside[None], other=0.0)
                for ref, first, inside in zip((x_ref, y_ref), firsts, insides, strict=True)
            )
            return total + triton.dot(left, right, trans_a=True)

        total = jnp.zeros((COLUMNS, COLUMNS), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(end - start, depth), step, total)
        place = out_ref.at[(group, *(pl.ds(first, COLUMNS) for first in firsts))]
        triton.store(place, total.astype(out_ref.dtype), mask=insides[0][:, None] & insides[1][None])

    grid = (len(kernels), *(pl.cdiv(n, COLUMNS) for n in kernels.shape[1:]))
    return _run(kernel, grid, (x, y), sizes, (kernels.dtype, kernels.shape), 8, "grouped_outer", interpret)


def _run(kernel, grid, arrays, sizes, out, warps: int, name: str, interpret: bool, stages: int = 3):
    """The result, of that type and shape, of a kernel over arrays and sizes, which are as many as a power of two."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    extra = 2 ** math.ceil(math.log2(sizes.size)) - sizes.size
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.eval_shape(lambda: jnp.zeros_like(arrays[0], *out)),  # which says along which axes it varies
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arrays, jnp.pad(sizes, (0, extra)))
