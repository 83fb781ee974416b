"""Speculative tokens without a second model: prompt lookup, as text often repeats itself (arXiv 2304.04487)."""

import jax.numpy as jnp

CONTEXT = 2  # tokens that must be the same for what followed them to be proposed again


def prompt_lookup(prompts, prompt_mask, rows, length, count: int):
    """`count` tokens `[G,R,count]` that may follow each row: those after the latest earlier occurrence of its last two.

    prompts `[G,P]` with their mask, rows `[G,R,C]` of which `length` `[G,R]` tokens are sampled. Any tokens if
    the last two do not occur before: the engine verifies what is proposed.
    """
    prompt_shape = (*rows.shape[:2], prompts.shape[1])
    text = jnp.concatenate([jnp.broadcast_to(prompts[:, None], prompt_shape), rows], axis=-1)
    real = jnp.concatenate([jnp.broadcast_to(prompt_mask[:, None], prompt_shape), jnp.ones(rows.shape, bool)], axis=-1)
    end = prompt_shape[-1] + length[..., None]  # of the text so far
    starts = jnp.arange(text.shape[-1] - CONTEXT)
    same = (starts + CONTEXT < end) & real[..., : len(starts)]
    for number in range(CONTEXT):
        last = jnp.take_along_axis(text, jnp.maximum(end - CONTEXT + number, 0), axis=-1)
        same &= text[..., number : number + len(starts)] == last
    follows = jnp.max(jnp.where(same, starts + CONTEXT, 0), axis=-1, keepdims=True)
    ahead = jnp.arange(count) % (end - follows)  # behind the text's end it goes round: a loop goes on
    return jnp.take_along_axis(text, follows + ahead, axis=-1)
