"""Logits processors: changes to the logits of a row before it draws, by the tokens that the row has so far.

They act in the order of transformers' `generate` and of vLLM, before the temperature and the filters: logit bias,
repetition penalty, frequency and presence penalties, bad words, minimum length. Nothing is kept from step to step:
tokens are counted anew from the row, which costs a scatter of as many numbers as attention reads keys. So rows that
move between slots, turns and speculative tokens need nothing of their own.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.sampling import RowSampling, SamplingParams
from jaxrl_llm.rollout.slots import Prompts, Rows, set_places

ANYTHING = -2  # in a sequence: any token, or none


def processed_logits(logits, sampling: SamplingParams, prompts: Prompts, rows: Rows, proposed, eos: tuple[int, ...]):
    """The fp32 logits `[G,R,W,V]` that rows draw from, of those `[G,R,W,V]` of the policy.

    Draw w of a row is for its place `length + w`, behind its tokens so far and w of `proposed` `[G,R,W-1]`. Repetition
    is of all text, the prompt's too (transformers, vLLM); frequency and presence are of the tokens that the row has
    sampled (OpenAI, vLLM), in all its turns. `eos` are the tokens that the minimum length forbids.
    """
    logits, vocab = logits.astype(jnp.float32), logits.shape[-1]
    places, text, before = _text(logits, rows, proposed)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits = logits.at[..., np.asarray(ids)].add(np.asarray(biases, np.float32))
    if sampling.repetition_penalty != 1.0:
        logits = _less_repeated(logits, sampling.repetition_penalty, prompts, text, before)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = _counts_of_rows(text, before & ~rows.observed[..., None, :], vocab)
        logits -= sampling.frequency_penalty * counts
        logits -= sampling.presence_penalty * (counts > 0)
    if sampling.bad_words:
        words = padded_words(sampling.bad_words, len(sampling.bad_words), max(map(len, sampling.bad_words)), vocab)
        completes = _completes(words[..., :-1], prompts, text, places)
        logits = logits.at[..., words[:, -1]].min(jnp.where(completes, -jnp.inf, jnp.inf))
    if sampling.min_tokens and eos:
        early = (places < sampling.min_tokens)[..., None]
        ends = np.isin(np.arange(vocab), eos)
        logits = jnp.where(early & ends, -jnp.inf, logits)
    return logits


def processes_by_row(sampling: RowSampling, rows: Rows, vocab: int):
    """Booleans `[G,R]`, true where the logits of a row are changed before it draws its next token."""
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    changed = functools.reduce(jnp.logical_or, (x != none for x, none in zip(penalties, (1, 0, 0), strict=True)))
    changed |= (sampling.bias_ids < vocab).any(-1) | (sampling.bad_words[..., -1] < vocab).any(-1)
    return changed | (rows.length < sampling.min_tokens)


def processed_by_row(logits, sampling: RowSampling, prompts: Prompts, rows: Rows, proposed):
    """`processed_logits` with the settings of each row `[G,R]`; those of rows without any stay bit for bit.

    Settings that are sequences must be there; what `min_tokens` forbids are the row's own `ends`.
    """
    repetition, frequency, presence = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    logits, vocab = logits.astype(jnp.float32), logits.shape[-1]

    def put(logits, ids, values, how: str):
        """The logits `[G,R,W,V]` with values `[G,R,W,E]` added, or as least ones, at ids `[G,R,E]` of each row."""
        of_draw = jax.vmap(lambda x, at, value: getattr(x.at[at], how)(value, mode="drop"), (0, None, 0))
        return jax.vmap(jax.vmap(of_draw))(logits, ids, jnp.broadcast_to(values, (*logits.shape[:3], ids.shape[-1])))

    places, text, before = _text(logits, rows, proposed)
    logits = put(logits, sampling.bias_ids, sampling.biases[..., None, :], "add")
    logits = _less_repeated(logits, repetition[..., None, None], prompts, text, before)
    counts = _counts_of_rows(text, before & ~rows.observed[..., None, :], vocab)
    logits = logits - frequency[..., None, None] * counts - presence[..., None, None] * (counts > 0)
    words = sampling.bad_words
    completes = _completes(words[..., None, :, :-1], prompts, text, places)
    logits = put(logits, words[..., -1], jnp.where(completes, -jnp.inf, jnp.inf), "min")
    early = places < sampling.min_tokens[..., None]
    ends = jnp.where(sampling.ends < 0, vocab, sampling.ends)
    return put(logits, ends, jnp.where(early, -jnp.inf, jnp.inf)[..., None], "min")


def padded_words(words: Sequence[Sequence[int]], count: int, length: int, vocab: int) -> np.ndarray:
    """Sequences of token ids as one array `[count, length]`, in which places before a shorter one are ANYTHING.

    A last id of `vocab` is no sequence.
    """
    padded = np.full((count, length), ANYTHING, np.int32)
    padded[:, -1] = vocab
    for row, word in zip(padded, words, strict=False):
        row[length - len(word) :] = word
    return padded


def _text(logits, rows: Rows, proposed):
    """Places `[G,R,W]` that are drawn for, the text `[G,R,C]` with what is proposed, and what is before each place."""
    places = rows.length[..., None] + jnp.arange(logits.shape[-2])
    text = set_places(rows.tokens, places[..., :-1], proposed) if proposed.shape[-1] else rows.tokens
    return places, text, jnp.arange(text.shape[-1]) < places[..., None]


def _less_repeated(logits, penalty, prompts: Prompts, text, before):
    """The logits, those of tokens that prompt and text have made less by the repetition penalty."""
    vocab = logits.shape[-1]
    in_prompt = jax.vmap(lambda ids, real: _counts(ids, real, vocab))(prompts.tokens, prompts.mask)
    seen = _counts_of_rows(text, before, vocab) + in_prompt[:, None, None] > 0
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(seen, penalised, logits)


def _counts(ids, real, vocab: int):
    """The count `[V]` of each token among the ids `[C]` that are real."""
    return jnp.zeros(vocab, jnp.float32).at[ids].add(real.astype(jnp.float32))


def _counts_of_rows(text, real, vocab: int):
    """The counts `[G,R,W,V]` of text `[G,R,C]`, where `real` `[G,R,W,C]`; mapped, so that every device counts its
    rows."""
    of_row = jax.vmap(lambda ids, masks: jax.vmap(lambda real: _counts(ids, real, vocab))(masks))
    return jax.vmap(of_row)(text, real)


def _completes(prefixes, prompts: Prompts, text, places):
    """Booleans, true where the tokens in front of a place `[G,R,W]` equal a prefix of `[..., words, width]`."""
    width = prefixes.shape[-1]
    prompt_shape = (*text.shape[:2], prompts.tokens.shape[-1])
    whole = jnp.concatenate([jnp.broadcast_to(prompts.tokens[:, None], prompt_shape), text], axis=-1)
    in_prompt = jnp.broadcast_to(prompts.mask[:, None], prompt_shape)
    is_token = jnp.concatenate([in_prompt, jnp.ones(text.shape, bool)], axis=-1)
    whole = jnp.where(is_token, whole, -1)  # -1 where there is no token
    index = prompt_shape[-1] + places[..., None] - width + jnp.arange(width)
    recent = jnp.take_along_axis(whole[:, :, None], jnp.clip(index, 0, whole.shape[-1] - 1), axis=-1)
    recent = jnp.where(index < 0, -1, recent)
    return ((recent[..., None, :] == prefixes) | (prefixes == ANYTHING)).all(-1)
