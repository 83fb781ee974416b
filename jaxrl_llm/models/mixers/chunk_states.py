"""The states between chunks of tokens, each of which follows from the one before, and their gradients.

A chunk makes of a state S `S <- kept S + change S + made`. Its matrix `change` and `made` are worked out for all chunks
side by side, and so is all that tokens read of the states: a turn of the loop over chunks is one product. Gradients are
states too, from the last chunk to the first: `G <- kept G + change^T G + made`, with what the chunk's outputs make.

The letters are those of delta_net.py; M chunks lead, `[M,N,h,r,...]`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.sharding import constrain


@jax.custom_vjp
def across(own, reads, kept, keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The values that tokens read of the states before their chunks and those that they add `[M,N,h,r,t,v]`, and the
    last state.

    The arrays are those of `delta_net.Chunk`. The first state is zeros.
    """
    return _across(own, reads, kept, keys)[0]


def _across(own, reads, kept, keys):
    size, by_key, change = own.shape[-2], keys.swapaxes(-1, -2), None
    if reads.shape[-2] > size:  # tokens correct what they take of the state
        change = -(by_key @ reads[..., :size, :])
    first = jnp.zeros((*own.shape[1:-2], keys.shape[-1], own.shape[-1]), own.dtype)
    states, last = _states(kept, change, by_key @ own, first)
    found, added = reads @ states, own
    if change is not None:
        taken, found = jnp.split(found, 2, axis=-2)
        added = own - taken
    return (found, added, last), (reads, kept, keys, change, states, added)


def _across_backward(residuals, gradients):
    reads, kept, keys, change, states, added = residuals
    of_found, of_added, of_last = gradients

    def of_reads(of_own):  # what is taken counts as much less of the own
        return of_found if change is None else jnp.concatenate([-of_own, of_found], axis=-2)

    made = reads.swapaxes(-1, -2) @ of_reads(of_added)
    turned = None if change is None else change.swapaxes(-1, -2)
    behind, _ = _states(kept, turned, made, of_last, reverse=True)  # gradients of the states behind each chunk
    of_own = of_added + keys @ behind
    of_kept = (behind * states).sum(-1)
    of_kept = of_kept.sum(-1, keepdims=True) if kept.shape[-1] == 1 else of_kept
    return of_own, of_reads(of_own) @ states.swapaxes(-1, -2), of_kept, added @ behind.swapaxes(-1, -2)


across.defvjp(_across, _across_backward)


def _states(kept, change, made, first, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """The states `[M,N,h,r,d,v]` before each chunk, in the order of the loop, and the one behind all."""

    def step(state, chunk):
        kept, change, made = chunk
        following = state * kept[..., None] + made
        return following if change is None else following + change @ state, state

    first = constrain(first, "rows", "heads", None, None, None)
    last, states = jax.lax.scan(step, first, (kept, change, made), reverse=reverse)
    return states, last
