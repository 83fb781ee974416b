"""The state of decoding: all rows, the slots that some of them decode in, and how rows move between the two.

No network is called here. Arrays of all rows are `[B,K,...]`, those of slots `[G,R,...]` (scheduler.py). A row never
leaves its shard of the mesh: indices are numbers within a shard.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.rollout.automata import NO_AUTOMATA, Automata
from jaxrl_llm.rollout.sampling import RowSampling
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid


class Prompts(NamedTuple):
    """Caches and tokens that the rows of a prompt share, of each prompt of the batch or of the slot grid."""

    cache: Any  # the mixers' caches, a tuple of one a run of layers
    tokens: jax.Array  # [G,P]
    mask: jax.Array  # [G,P] False on padding
    automata: Automata = NO_AUTOMATA  # that every row is read by
    experts: jax.Array | None = None  # [G,P,L,k] of each token, where they are recorded


class Rows(NamedTuple):
    """Sampled tokens and their state, of all rows `[B,K]` or of those in slots `[G,R]`."""

    tokens: jax.Array  # [..., C] so far, 0 after the end; those between length and known are observations to come
    logps: jax.Array  # [..., C] of sampled tokens, 0 of observation tokens
    observed: jax.Array  # [..., C] True on observation tokens
    length: jax.Array  # tokens so far
    known: jax.Array  # tokens so far, and the observation tokens that come next
    limit: jax.Array  # the most tokens
    finished: jax.Array  # ended with an end-of-text token, or a stop string
    stop_state: jax.Array | None = None  # of the automaton for stop strings, where there is one
    guide_state: jax.Array | None = None
    sampling: RowSampling | None = None  # settings of each row; None: those of the engine
    experts: jax.Array | None = None  # [..., C, L, k] of the tokens that entered the caches, where they are recorded


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache", "rows", "keys", "steps"], meta_fields=["capacity"]
)
@dataclasses.dataclass(frozen=True)
class Slots:
    """Everything a decode step changes: R rows of each of the grid's G prompts."""

    cache: Any  # the mixers' row caches, a tuple of one a run of layers
    rows: Rows
    keys: jax.Array  # [G,R]
    steps: jax.Array  # [] decode steps so far in this grid
    capacity: int  # tokens that the row caches have room for; grows up to C

    def replace(self, **changes) -> "Slots":
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


class Begun(NamedTuple):
    """Completions of which something may be sampled already, on the host: rows `[N]` go on behind it."""

    keys: np.ndarray  # [N,...] data of each row's own key
    tokens: np.ndarray  # [N,C] so far, 0 behind them
    logps: np.ndarray  # [N,C] as they were sampled
    lengths: np.ndarray  # [N] tokens so far
    finished: np.ndarray  # [N] ended with an end-of-text token or stop string

    def padded(self, count: int) -> "Begun":
        """These completions with `count` finished rows behind them, which make the rows a multiple of the shards."""
        grown = Begun(*(np.concatenate([x, np.repeat(x[-1:], count, axis=0)]) for x in self))
        grown.finished[len(self.finished) :] = True
        grown.lengths[len(self.finished) :] = 1
        return grown


class Rollout(NamedTuple):
    """Sampled rows: prompt padded on the left, completion on the right, rows of a prompt adjacent."""

    tokens: jax.Array  # [N,T]
    segments: jax.Array  # [N,T] 1 on prompt and completion, 0 on padding
    mask: jax.Array  # [N,T] float32, 1 on sampled tokens, the end-of-text token included
    sample_logps: jax.Array  # [N,T], 0 outside the mask
    lengths: jax.Array  # [N] tokens of the completion, sampled or observed
    finished: jax.Array  # [N] ended with an end-of-text token or stop string (not truncated at max_completion_length)
    steps: jax.Array  # [N] float32, the decode steps of all slots, idle ones included, in equal shares
    experts: jax.Array | None = None  # [N,T,L,k] of each token, where recorded; -1 on each row's last, and padding


@functools.partial(jax.jit, static_argnames="count")
def row_keys(key, first_row, count: int):
    """The keys `[N]` of the rows: `fold_in(key, first_row + i)`."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(first_row + jnp.arange(count, dtype=jnp.uint32))


@jax.jit
def resumed(rows: Rows, begun: Begun, automata: Automata) -> Rows:
    """The rows of a prefill, those of which tokens are given with these in place of the one that was drawn.

    Behind the first they are known, as observation tokens are, and still to be read; automata are in the state behind
    them all. Rows that have ended are as they were.
    """
    shape = rows.length.shape
    tokens, logps, lengths, finished = (
        constrain(x.reshape(*shape, *x.shape[1:]), "rows", *(None,) * x.ndim) for x in map(jnp.asarray, begun[1:])
    )
    given, over = lengths > 0, finished | (lengths >= rows.limit)

    def state(automaton, drawn):
        """The state behind the given tokens, or that behind the one that was drawn."""
        if automaton is None:
            return None

        def step(states, at):
            place, newest = at
            return jnp.where(place < lengths, automaton.behind(automaton.step(states, newest), False), states), None

        read = jnp.arange(tokens.shape[-1]), jnp.moveaxis(tokens, -1, 0)
        return jnp.where(given, jax.lax.scan(step, jnp.zeros_like(lengths), read)[0], drawn)

    return rows._replace(
        tokens=jnp.where(given[..., None], tokens, rows.tokens),
        logps=jnp.where(given[..., None], logps, rows.logps),
        length=jnp.where(given, jnp.where(over, lengths, 1), rows.length),
        known=jnp.where(given, lengths, rows.known),
        finished=jnp.where(given, finished, rows.finished),
        stop_state=state(automata.stop, rows.stop_state),
        guide_state=state(automata.guide, rows.guide_state),
    )


def ended(rows: Rows):
    """True for rows that are decoded no further: their completion has ended, or there is no room left for it."""
    return rows.finished | (rows.length >= rows.limit)


def observations_to_come(rows: Rows):
    """The number of observation tokens, known and not sampled, that come next in each row; 0 in rows that have
    ended."""
    return jnp.where(ended(rows), 0, jnp.maximum(jnp.minimum(rows.known, rows.limit) - rows.length, 0))


def next_tokens(rows: Rows, width: int):
    """Places of the newest token of each row and of those behind it, `[..., width]`, and the tokens that are there."""
    places = rows.length[..., None] - 1 + jnp.arange(width)
    return places, jnp.take_along_axis(rows.tokens, jnp.minimum(places, rows.tokens.shape[-1] - 1), axis=-1)


def set_places(rows, places, values):
    """The rows `[G,R,C,...]` with values `[G,R,W,...]` at places `[G,R,W]` of each; those past the end are dropped.

    Mapped over rows, so that no row number is among the indices: every device writes its own.
    """
    return jax.vmap(jax.vmap(lambda row, place, value: row.at[place].set(value, mode="drop")))(rows, places, values)


def take(x, index, axis: int):
    """Entries `index` `[shards, m]` along `axis`, each from its own shard: no data moves between devices."""
    # Every size is said: a cache has no numbers where prompts are shorter than what it is of.
    by_shard = x.reshape(*x.shape[:axis], len(index), x.shape[axis] // len(index), *x.shape[axis + 1 :])
    taken = jax.vmap(lambda a, i: jnp.take(a, i, axis=axis), in_axes=(axis, 0), out_axes=axis)(by_shard, index)
    taken = taken.reshape(*x.shape[:axis], index.size, *x.shape[axis + 1 :])
    return constrain(taken, *(None,) * axis, "rows", *(...,) * (taken.ndim - axis - 1))  # heads stay sharded


def put(x, index, values, axis: int):
    """x with values at `index` `[shards, m]`, each in its own shard; past the end they are dropped.

    `axis` and the next one are those of prompts and rows, in both; m runs through both axes of the values.
    """
    by_shard, values = (
        a.reshape(*a.shape[:axis], len(index), a.shape[axis] * a.shape[axis + 1] // len(index), *a.shape[axis + 2 :])
        for a in (x, values)
    )
    lead = (slice(None),) * axis
    write = jax.vmap(lambda a, i, v: a.at[(*lead, i)].set(v, mode="drop"), in_axes=(axis, 0, axis), out_axes=axis)
    return write(by_shard, index, values).reshape(x.shape)


def flat(x, axis: int):
    """x with its axes `axis` and `axis + 1`, of prompts and rows, as one."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


@functools.partial(jax.jit, static_argnames="shards")
def collect(rows: Rows, slots: Slots, grid: SlotGrid, shards: int) -> Rows:
    """All rows, those that are in slots with their newest samples; `grid` tells the row in each slot."""
    count = rows.length.size // shards
    index = jnp.where(grid.row == IDLE, count, grid.row).reshape(shards, -1)  # past the end: dropped
    return jax.tree.map(lambda everyone, values: put(everyone, index, values, 0), rows, slots.rows)


@functools.partial(jax.jit, donate_argnames="slots")
def insert_observations(slots: Slots, tokens, counts, truncated) -> Slots:
    """The slots with `counts` `[G,R]` of the tokens `[G,R,W]` to come next in their rows; `truncated` rows end."""
    rows = slots.rows
    offset = jnp.arange(tokens.shape[-1])
    places = jnp.where(offset < counts[..., None], rows.length[..., None] + offset, rows.tokens.shape[-1])
    rows = rows._replace(
        tokens=set_places(rows.tokens, places, tokens),
        observed=set_places(rows.observed, places, jnp.ones_like(places, bool)),
        known=jnp.where(counts > 0, rows.length + counts, rows.known),
        limit=jnp.where(truncated, rows.length, rows.limit),
        finished=rows.finished & (counts == 0) & ~truncated,
        stop_state=None if rows.stop_state is None else jnp.where(counts > 0, 0, rows.stop_state),
        guide_state=None if rows.guide_state is None else jnp.where(counts > 0, 0, rows.guide_state),
    )
    return slots.replace(rows=rows)


@jax.jit
def status(slots: Slots):
    """Length, end, end of text and observation tokens to come of each row, and the grid's steps; on every process."""
    numbers = (slots.rows.length, ended(slots.rows), slots.rows.finished, observations_to_come(slots.rows), slots.steps)
    if jax.sharding.get_abstract_mesh().empty:
        return numbers
    return jax.lax.with_sharding_constraint(numbers, PartitionSpec())


@jax.jit
def newest_tokens(slots: Slots):
    """The last token `[G,R]` of each row in a slot, which the next decode step reads."""
    return next_tokens(slots.rows, 1)[1][..., 0]


@functools.partial(jax.jit, donate_argnames="slots")
def number_states(slots: Slots) -> Slots:
    """The slots, each in the state of a guide that has its number."""
    shape = slots.rows.length.shape
    states = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
    return slots.replace(rows=slots.rows._replace(guide_state=states))


@jax.jit
def finish(prompts, segments, rows: Rows, executed, prompt_experts=None) -> Rollout:
    """The `Rollout` of prompts `[B,P]` and all rows; `executed` are the decode steps of all slots.

    `prompt_experts` `[B,P,L,k]` are those of the prompts' tokens, where experts are recorded.
    """
    batch, k, c = rows.tokens.shape

    def joined(of_prompts, of_completions):
        repeated = jnp.repeat(of_prompts, k, axis=0)
        completions = of_completions.reshape(batch * k, c, *of_completions.shape[3:])
        joined = jnp.concatenate([repeated, completions], axis=1)
        return constrain(joined, "rows", *(None,) * (joined.ndim - 1))

    experts = None
    if prompt_experts is not None and rows.experts is not None:
        # The newest token of a row may have entered its cache or not, by when others ended: it has none.
        entered = jnp.arange(c) < rows.length[..., None] - 1
        of_prompts = jnp.where((segments != 0)[..., None, None], prompt_experts, -1)
        experts = joined(of_prompts, jnp.where(entered[..., None, None], rows.experts, -1))
    present = jnp.arange(c) < rows.length[..., None]
    sampled = present & ~rows.observed
    return Rollout(
        tokens=joined(prompts, jnp.where(present, rows.tokens, 0)),
        segments=joined(segments, present.astype(segments.dtype)),
        mask=joined(jnp.zeros(prompts.shape, jnp.float32), sampled.astype(jnp.float32)),
        sample_logps=joined(jnp.zeros(prompts.shape, jnp.float32), rows.logps),
        lengths=rows.length.reshape(-1),
        finished=rows.finished.reshape(-1),
        steps=constrain(jnp.full((batch * k,), executed / (batch * k)), "rows"),
        experts=experts,
    )
