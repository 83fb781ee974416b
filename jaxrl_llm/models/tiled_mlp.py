"""A feed-forward of some tokens at a time, for long rows (TiledMLP of ALST, arXiv 2506.13996)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import FSDP, activation_spec, all_gathered, is_sharded, parameter_spec, path_name
from jaxrl_llm.models.layers import FeedForward


def tiled_mlp(mlp: FeedForward, x, tile: int):
    """`mlp(x)` `[N,T,D]`, computed of `tile` tokens of a device at a time; of all at once where that is 0.

    The backward pass keeps x alone and computes each tile again. In a layer that is rematerialised this is no more
    work: nothing there needs what the first recomputation would return. Gradients of matrices are added up over tiles
    in the parameters' type, and over devices once, behind the last tile. Where `mesh.tensor` shards the channels, and
    with dropout, whose numbers a tile would repeat, all tokens are computed at once.
    """
    if not tile or x.ndim != 3:
        return mlp(x)
    mesh: Any = jax.sharding.get_abstract_mesh()
    axes = {axis for axis, size in mesh.shape.items() if size > 1} if is_sharded() else set()
    rows = activation_spec(x.shape, "rows", "positions", None) if axes else ()
    tokens = x.shape[0] * x.shape[1] // math.prod(mesh.shape[axis] for axis in axes)
    maps = [each for each in (mlp.gate, mlp.up, mlp.down) if each is not None]
    dropped = any(each.lora_key is not None for each in maps)
    if tokens <= tile or dropped or axes != set(jax.tree.leaves(tuple(rows))):
        return mlp(x)
    graph, state = nnx.split(mlp)

    def over_tiles(state, x):
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def compute(part):
            return nnx.merge(graph, state)(part[None])[0]

        flat = x.reshape(-1, x.shape[-1])
        full = len(flat) // tile * tile
        out = jax.lax.map(compute, flat[:full].reshape(-1, tile, flat.shape[-1])).reshape(full, -1)
        if full < len(flat):
            out = jnp.concatenate([out, compute(flat[full:])])
        return out.reshape(x.shape)

    if not axes:
        return over_tiles(state, x)
    paths = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path[:-1]), state)
    specs = jax.tree.map(lambda path, leaf: parameter_spec(f"mlp/{path}", leaf.shape, mesh), paths, state)
    # Matrices that are read as they are kept, of DoRA's lengths and what quantisation makes of them, are not rounded.
    rounds = all(each.lora_m is None and each.qat == "none" and each.matmul_dtype == "auto" for each in maps)

    def local(state, x):
        def whole(path, spec, leaf):
            return _whole(leaf, spec, axes, x.dtype if rounds and path.endswith("/kernel") else leaf.dtype)

        return over_tiles(jax.tree.map(whole, paths, specs, state), x)

    return jax.shard_map(local, in_specs=(specs, rows), out_specs=rows)(state, x)


def _whole(leaf, spec, axes: set[str], dtype):
    """A parameter gathered from its shards, which are sent in that type; the sum of its gradients is scattered."""
    copies = tuple(axes.difference(jax.tree.leaves(tuple(spec))))

    def gathered(x):
        return jax.lax.pcast(all_gathered(x, spec, FSDP), copies, to="varying")

    if leaf.dtype == dtype:
        return gathered(leaf)

    @jax.custom_vjp
    def rounded(x):  # fewer bytes are sent, but gradients are added up as precisely as they are kept
        return gathered(x.astype(dtype)).astype(x.dtype)

    def backward(_, gradient):
        for dim, names in enumerate(spec):
            if names is not None:
                gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=dim, tiled=True)
        return (jax.lax.psum(gradient, copies),)

    rounded.defvjp(lambda x: (rounded(x), None), backward)
    return rounded(leaf)
