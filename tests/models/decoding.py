"""The plainest use of prefill, decode and whole rows, which tests compare with other ways to the same logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.mixers.mixer import DecodeInputs

# What the trainer computes. Outside of a program each operation is compiled by itself, which takes seven times as long.
trainer_logps = jax.jit(token_logps, static_argnums=(0, 3))


def padded(documents, side: str):
    """Tokens (padding is token 5, which documents hold too) and segments of the documents, padded to one length."""
    width = max(map(len, documents))
    tokens, segments = np.full((len(documents), width), 5), np.zeros((len(documents), width), int)
    for row, document in enumerate(documents):
        place = slice(width - len(document), width) if side == "left" else slice(0, len(document))
        tokens[row, place], segments[row, place] = document, 1
    return tokens, segments


@functools.partial(jax.jit, static_argnums=0)
def logits_of(net, params, tokens, segments):
    """Logits [B, T, V] of whole rows."""
    return net.bind(params)(tokens, segments)


@functools.partial(jax.jit, static_argnums=0)
def prefill(net, params, tokens, segments):
    hidden, prompt, _ = net.bind(params).prefill(tokens, segments)
    return net.bind(params).logits(hidden), prompt


@functools.partial(jax.jit, static_argnums=0)
def decode(net, params, tokens, segments, prompt, rows, number):
    """Logits [B, repeats, W, V] of tokens [B, repeats, W], which come next behind `number` of each row."""
    repeats, width = tokens.shape[1:]
    written = jnp.full((len(tokens), repeats), number)
    positions = segments.sum(1)[:, None] + jnp.tile(number + jnp.arange(width), repeats)
    inputs = DecodeInputs(positions, segments > 0, written)
    hidden, rows, _ = net.bind(params).decode(tokens.reshape(len(tokens), -1), inputs, prompt, rows)
    return net.bind(params).logits(hidden).reshape(*tokens.shape, -1), rows


def row_caches(net, prompt, repeats: int, steps: int):
    """Row caches filled with what an earlier row may have left there."""
    return jax.tree.map(lambda x: jnp.full_like(x, 7), net.empty_caches(prompt, repeats, steps))


def continued_logits(net, params, tokens, segments, continuations, at_once: int = 1):
    """Logits [B, repeats, steps, V] of decoding the given continuations [B, repeats, steps] of prefilled prompts."""
    _, prompt = prefill(net, params, tokens, segments)
    _, repeats, steps = continuations.shape
    rows = row_caches(net, prompt, repeats, steps)
    found = []
    for number in range(0, steps, at_once):
        following = continuations[..., number : number + at_once]
        logits, rows = decode(net, params, following, segments, prompt, rows, number)
        found.append(logits)
    return np.concatenate(found, axis=2)


def decode_greedily(net, params, tokens, segments, steps: int, repeats: int):
    """Tokens [B, repeats, steps]: prompts are prefilled once and each is continued by `repeats` rows."""
    logits, prompt = prefill(net, params, tokens, segments)
    token = jnp.repeat(logits[:, -1].argmax(-1)[:, None], repeats, axis=1)
    rows = row_caches(net, prompt, repeats, steps)
    found = [token]
    for number in range(steps - 1):
        logits, rows = decode(net, params, token[..., None], segments, prompt, rows, number)
        token = logits[:, :, 0].argmax(-1)
        found.append(token)
    return np.stack(found, axis=-1)


def whole_rows_of_decoding(net, params, documents, continuations, packs=(2, 4)):
    """The rows `[6,T]` of three documents with two continuations `[3,2,6]` each, and their segments, once their logits
    are those of decoding one token and three at once, and those of the rows `packs` those of both in one row."""
    tokens, segments = padded(documents, "left")
    whole = np.concatenate([np.repeat(tokens, 2, 0), continuations.reshape(6, 6)], axis=1)
    ids = np.concatenate([np.repeat(segments, 2, 0), np.ones((6, 6), int)], axis=1)
    expected = np.asarray(logits_of(net, params, whole, ids))[:, tokens.shape[1] :].reshape(3, 2, 6, -1)
    for at_once in (1, 3):
        found = continued_logits(net, params, tokens, segments, continuations, at_once)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    packed = np.concatenate([whole[row][ids[row] > 0] for row in packs])
    lengths = [int((ids[row] > 0).sum()) for row in packs]
    together = np.asarray(logits_of(net, params, packed[None], np.repeat([1, 2], lengths)[None]))[0]
    alone = [np.asarray(logits_of(net, params, whole[[row]], ids[[row]]))[0][ids[row] > 0] for row in packs]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)
    return whole, ids
