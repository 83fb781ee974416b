"""The sampling engine: prefill once per prompt, then jitted chunks of decode steps for its K completions.

    start(params, prompts [B,P])         -> RowState   # one prefill per prompt, and every row's first token
    decode_chunk(params, RowState, n)    -> RowState   # up to n steps, no host in between
    finish(prompts, RowState)            -> Rollout    # rows [N,T]

A prompt's keys and values are stored once and read by its K rows; each row owns the cache of its completion, which
grows as the rows do. Randomness is one uniform per row and position, from the row's own key: a sample does not depend
on its neighbours.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.layers import KeyValues, empty_rows, longer_rows
from jaxrl_llm.models.transformer import Net, Params, unstack
from jaxrl_llm.rollout.logits import Sampling, sample
from jaxrl_llm.sharding import constrain, path_name


class RowState(NamedTuple):
    """Everything a decode step reads and writes: K rows of each of B prompts."""

    prompt: Any  # KeyValues [B,J,P,d] per layer
    prompt_mask: jax.Array  # [B,P] False on padding
    rows: Any  # KeyValues of rows per layer, [B,K,J,d,S] and [B,K,J,S,d]; S grows up to C
    tokens: jax.Array  # [B,K,C] sampled so far, 0 after the end
    logps: jax.Array  # [B,K,C]
    length: jax.Array  # [B,K] tokens sampled
    finished: jax.Array  # [B,K] ended with an end-of-text token
    keys: jax.Array  # [B,K]


class Rollout(NamedTuple):
    """Sampled rows: prompt padded on the left, completion on the right, rows of a prompt adjacent."""

    tokens: jax.Array  # [N,T]
    segments: jax.Array  # [N,T] 1 on prompt and completion, 0 on padding
    mask: jax.Array  # [N,T] float32, 1 on sampled tokens, the end-of-text token included
    sample_logps: jax.Array  # [N,T], 0 outside the mask
    lengths: jax.Array  # [N] sampled tokens
    finished: jax.Array  # [N] ended with an end-of-text token (not cut at max_completion_length)


@dataclasses.dataclass(frozen=True)
class Engine:
    """Samples `group_size` completions per prompt.

    eos: ids that end a row. chunk: decode steps between two looks by the host, and the first size of the row cache.
    """

    net: Net
    sampling: Sampling
    group_size: int
    max_completion_length: int
    eos: tuple[int, ...]
    chunk: int = 32

    @property
    def decoder(self) -> Net:
        """The net that decodes: unrolled on CPU, where slicing scanned weights and caches costs more than compiling."""
        return self.net.unrolled() if jax.default_backend() == "cpu" else self.net

    def generate(self, params: Params, prompts, segments, key, first_row: int = 0) -> Rollout:
        """Completions of prompts `[B,P]`, padded on the left, segments `[B,P]` 0 on padding.

        Row i draws from `fold_in(key, first_row + i)`.
        """
        params = _decoding_params(params, self.decoder)
        size = min(self.chunk, self.max_completion_length)
        state = _start(self, params, prompts, segments, key, np.uint32(first_row), size)
        steps = 1
        while steps < self.max_completion_length and not bool(_all_done(self, state)):
            if steps >= size:
                size = min(2 * size, self.max_completion_length)
                state = _grow(state, size)
            state = _decode_chunk(self, params, state, jnp.asarray(min(steps + self.chunk, size)))
            steps = min(steps + self.chunk, size)
        return _finish(prompts, segments, state)


@functools.partial(jax.jit, static_argnames="decoder")
def _decoding_params(params: Params, decoder: Net) -> Params:
    """The parameters in the type they are computed in, so that a step reads no more than it must.

    Norm scales stay as they are: norms run in fp32, and a rounded scale would make sampler and trainer differ.
    """

    def leaf(path, x):
        return x if path_name(path).endswith("scale") else x.astype(decoder.config.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, params)
    return params if decoder.config.scan_layers else unstack(params)


@functools.partial(jax.jit, static_argnames=("engine", "size"))
def _start(engine: Engine, params, prompts, segments, key, first_row, size: int) -> RowState:
    """The state after one prefill per prompt and the first token of each row, with row caches for `size` tokens."""
    batch, k, c = prompts.shape[0], engine.group_size, engine.max_completion_length
    model = engine.decoder.bind(params)
    hidden, prompt = model.prefill(prompts, segments)
    rows = _per_layer(lambda layer: empty_rows(layer, k, size), prompt)
    logits = jnp.repeat(model.logits(hidden[:, -1]), k, axis=0)
    ids = first_row + jnp.arange(batch * k, dtype=jnp.uint32).reshape(batch, k)
    state = RowState(
        prompt=prompt,
        prompt_mask=segments != 0,
        rows=rows,
        tokens=jnp.zeros((batch, k, c), jnp.int32),
        logps=jnp.zeros((batch, k, c), jnp.float32),
        length=jnp.zeros((batch, k), jnp.int32),
        finished=jnp.zeros((batch, k), bool),
        keys=jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(ids),
    )
    return _append(engine, state, logits)


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="state")
def _decode_chunk(engine: Engine, params, state: RowState, until) -> RowState:
    """Steps until every row is done or `until` tokens long."""
    model = engine.decoder.bind(params)
    prompt_length = state.prompt_mask.sum(-1)[:, None]

    def step(state: RowState) -> RowState:
        last = state.length - 1  # the newest token, sampled but not yet in the cache
        tokens = jnp.take_along_axis(state.tokens, last[:, :, None], axis=-1)[:, :, 0]
        hidden, rows = model.decode(tokens, prompt_length + last, state.prompt, state.prompt_mask, state.rows, last)
        logits = model.logits(hidden).reshape(tokens.size, -1)
        return _append(engine, state._replace(rows=rows), logits)

    def more(state: RowState):
        return jnp.any(~state.finished & (state.length < until))

    return jax.lax.while_loop(more, step, state)


def _append(engine: Engine, state: RowState, logits) -> RowState:
    """The state with one more token in every row that has not ended, from logits `[B*K,V]`."""
    draw = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))
    uniforms = draw(state.keys.reshape(-1), state.length.reshape(-1))
    tokens, logps = (x.reshape(state.length.shape) for x in sample(logits, uniforms, engine.sampling))
    live = ~state.finished & (state.length < engine.max_completion_length)
    b, k = jnp.indices(state.length.shape, sparse=True)
    here = (b, k, jnp.where(live, state.length, state.tokens.shape[-1]))  # past the end: dropped
    return state._replace(
        tokens=state.tokens.at[here].set(tokens, mode="drop"),
        logps=state.logps.at[here].set(logps, mode="drop"),
        length=state.length + live,
        finished=state.finished | (live & jnp.isin(tokens, jnp.asarray(engine.eos, jnp.int32))),
    )


@functools.partial(jax.jit, static_argnames="engine")
def _all_done(engine: Engine, state: RowState):
    return jnp.all(state.finished | (state.length >= engine.max_completion_length))


@functools.partial(jax.jit, static_argnames="size")
def _grow(state: RowState, size: int) -> RowState:
    """The state with room for `size` completion tokens in the row caches."""
    return state._replace(rows=_per_layer(lambda layer: longer_rows(layer, size), state.rows))


def _per_layer(function, caches):
    """`function` of the KeyValues of each layer, or of all of them where layers are stacked."""
    return jax.tree.map(function, caches, is_leaf=lambda x: isinstance(x, KeyValues))


@jax.jit
def _finish(prompts, segments, state: RowState) -> Rollout:
    batch, k, c = state.tokens.shape

    def rows(prompt_part, completion_part):
        part = jnp.repeat(prompt_part, k, axis=0)
        return constrain(jnp.concatenate([part, completion_part.reshape(batch * k, c)], axis=1), "rows", None)

    sampled = jnp.arange(c) < state.length[..., None]
    return Rollout(
        tokens=rows(prompts, state.tokens),
        segments=rows(segments, sampled.astype(segments.dtype)),
        mask=rows(jnp.zeros(prompts.shape, jnp.float32), sampled.astype(jnp.float32)),
        sample_logps=rows(jnp.zeros(prompts.shape, jnp.float32), state.logps),
        lengths=state.length.reshape(-1),
        finished=state.finished.reshape(-1),
    )
