"""From logits to the tokens that follow in rows: changed logits, draws, proposals that were right, and ends."""

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout.automata import unpacked
from jaxrl_llm.rollout.processors import processed_by_row, processed_logits, processes_by_row
from jaxrl_llm.rollout.sampling import RowSampling, SamplingParams, sample, sample_by_row
from jaxrl_llm.rollout.slots import Prompts, Rows, ended, set_places


def append(
    sampling: SamplingParams, eos: tuple[int, ...], prompts: Prompts, rows: Rows, keys, logits, proposed, capacity: int
) -> Rows:
    """The rows with the tokens that follow in those that go on: observed ones, or drawn from logits `[G,R,W,V]`.

    The first of W always follows. Each other one was computed behind a proposed token, one of `[G,R,W-1]`, and follows
    if this is the token that was drawn there and was in the cache. So samples are those without proposals.
    """
    automata, own, width = prompts.automata, rows.sampling, logits.shape[-2]
    places = rows.length[..., None] + jnp.arange(width)
    observed = places < rows.known[..., None]
    draw = jax.vmap(lambda key, place: jax.random.uniform(jax.random.fold_in(key, place)), (None, 0))
    uniforms = jax.vmap(draw)(keys.reshape(-1), places.reshape(-1, width))
    guide_states = stop_states = None
    if automata.guide is not None:
        guide_states = automata.guide.before(rows.guide_state, proposed, observed)
    if own is None:
        drawn = _drawn(sampling, eos, prompts, rows, logits, uniforms, proposed, guide_states)
    else:
        drawn = _drawn_by_row(own, prompts, rows, logits, uniforms, proposed)
    tokens, logps = (x.reshape(places.shape) for x in drawn)
    if own is None:
        ends = ~observed & jnp.isin(tokens, jnp.asarray(eos, jnp.int32))
    else:
        ends = ~observed & (tokens[..., None] == own.ends[..., None, :]).any(-1)
    if automata.stop is not None:
        stop_states = automata.stop.before(rows.stop_state, proposed, observed)
        stop_states = automata.stop.step(stop_states, tokens)
        ends |= ~observed & (stop_states < 0) & (places + 1 >= sampling.min_tokens)
        stop_states = automata.stop.behind(stop_states, observed)
    if automata.guide is not None:
        guide_states = automata.guide.behind(automata.guide.step(guide_states, tokens), observed)
    right = (observed[..., :-1] | (tokens[..., :-1] == proposed)) & ~ends[..., :-1]
    fits = (places < rows.limit[..., None]) & (places <= capacity)
    follows = [~ended(rows)]
    for number in range(1, width):
        follows.append(follows[-1] & right[..., number - 1] & fits[..., number])
    follows = jnp.stack(follows, axis=-1)
    written = jnp.where(follows & ~observed, places, rows.tokens.shape[-1])  # past the end: dropped
    if own is not None and own.top_ids is not None and own.top_logps is not None:
        highest, top_ids = jax.lax.top_k(logits.astype(jnp.float32), own.top_ids.shape[-1])
        of_token = jnp.take_along_axis(logits.astype(jnp.float32), tokens[..., None], axis=-1)
        temperature = jnp.where(own.temperature == 0, 1.0, own.temperature)[..., None, None]
        top_logps = (highest - of_token) / temperature + logps[..., None]
        own = own._replace(
            top_ids=set_places(own.top_ids, written, top_ids), top_logps=set_places(own.top_logps, written, top_logps)
        )

    def state(before, behind):
        """The state behind the last token that follows."""
        if behind is None:
            return None
        count = follows.sum(-1, keepdims=True)
        last = jnp.take_along_axis(behind, jnp.maximum(count - 1, 0), axis=-1)
        return jnp.where(count > 0, last, before[..., None])[..., 0]

    return rows._replace(
        tokens=set_places(rows.tokens, written, tokens),
        logps=set_places(rows.logps, written, logps),
        length=rows.length + follows.sum(-1),
        finished=rows.finished | (follows & ends).any(-1),
        stop_state=state(rows.stop_state, stop_states),
        guide_state=state(rows.guide_state, guide_states),
        sampling=own,
    )


def _drawn(sampling: SamplingParams, eos: tuple[int, ...], prompts: Prompts, rows: Rows, logits, uniforms, proposed,
           guide_states) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Tokens and log-probs `[G*R*W]` of logits `[G,R,W,V]`, with one setting for all rows."""
    guide, by_draw, processed = prompts.automata.guide, (-1, logits.shape[-1]), None
    if sampling.processes:
        processed = processed_logits(logits, sampling, prompts, rows, proposed, eos)
    if guide is not None:
        allowed = guide.allows(guide_states, logits.shape[-1])
        processed = jnp.where(allowed, logits.astype(jnp.float32) if processed is None else processed, -jnp.inf)
    processed = None if processed is None else processed.reshape(by_draw)
    return sample(logits.reshape(by_draw), uniforms.reshape(-1), sampling, processed)


def _drawn_by_row(
    own: RowSampling, prompts: Prompts, rows: Rows, logits, uniforms, proposed
) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probs `[G*R*W]` of logits `[G,R,W,V]`, with the settings of each row."""
    width, vocab = logits.shape[-2:]
    changed = processes_by_row(own, rows, vocab) | (own.allowed is not None)
    changed = jnp.repeat(changed.reshape(-1), width)

    def process():
        processed = processed_by_row(logits, own, prompts, rows, proposed)
        if own.allowed is not None:  # of the next token alone: nothing is proposed then
            processed = jnp.where(unpacked(own.allowed, vocab)[..., None, :], processed, -jnp.inf)
        return processed.reshape(-1, vocab)

    of_tokens = RowSampling(*(jnp.repeat(x.reshape(-1, *x.shape[2:]), width, axis=0) for x in own[:5]))
    return sample_by_row(logits.reshape(-1, vocab), uniforms.reshape(-1), of_tokens, changed, process)
