"""Guesses of what rows say next, from what they hold already: text is often said twice (arXiv 2304.04487)."""

import jax.numpy as jnp

CONTEXT = 2  # tokens that must be the same for what followed them to be guessed again


def guesses(prompts, prompt_mask, rows, length, count: int):
    """`count` tokens `[G,R,count]` that may follow each row: those that followed its last two tokens when last said.

    prompts `[G,P]` with their mask, rows `[G,R,C]` of which `length` `[G,R]` tokens are said. Any tokens where the last
    two were never said before: whether a guess is right is found out anyway.
    """
    whole = (*rows.shape[:2], prompts.shape[1])
    text = jnp.concatenate([jnp.broadcast_to(prompts[:, None], whole), rows], axis=-1)
    real = jnp.concatenate([jnp.broadcast_to(prompt_mask[:, None], whole), jnp.ones(rows.shape, bool)], axis=-1)
    end = whole[-1] + length[..., None]  # of the text so far
    starts = jnp.arange(text.shape[-1] - CONTEXT)
    said = (starts + CONTEXT < end) & real[..., : len(starts)]
    for number in range(CONTEXT):
        last = jnp.take_along_axis(text, jnp.maximum(end - CONTEXT + number, 0), axis=-1)
        said &= text[..., number : number + len(starts)] == last
    follows = jnp.max(jnp.where(said, starts + CONTEXT, 0), axis=-1, keepdims=True)
    ahead = jnp.arange(count) % (end - follows)  # behind the text's end it goes round: a loop goes on
    return jnp.take_along_axis(text, follows + ahead, axis=-1)
