"""The sampling engine: prefill once per prompt, then jitted chunks of decode steps for its K completions.

    prefill(params, prompts [B,P])               -> Prompts, Rows    # one pass per prompt, each row's first token
    seat(Prompts, Rows, Grid)                    -> Prompts, Slots   # the rows that decode side by side (schedule.py)
    decode_chunk(params, Prompts, Slots, steps)  -> Slots            # jitted steps, no host in between
    finish(prompts, Rows)                        -> Rollout          # rows [N,T]

A prompt's keys and values are stored once and read by its rows in the grid; each row owns the cache of its completion,
which grows as the rows do. Decoding pauses when enough rows have ended: their slots go to rows that wait, or to nobody,
and the grid shrinks. Randomness is one uniform per row and position, from the row's own key: a sample depends
neither on its neighbours nor on its slot, nor on what is guessed of it (drafts.py).

With a `TurnServer` rows have several turns: a row that ends a turn waits for its observation tokens, and goes on behind
them. These are in no mask. Many are read at once, rows that have them alone; few are decoded like others and cost a
step each.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed.sharding import constrain, path_name, row_shards
from jaxrl_llm.models.cast import in_precision
from jaxrl_llm.models.layers import KeyValues, empty_rows, longer_rows
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.quantize import BYTES, narrowed, quantized_as
from jaxrl_llm.models.rope import check_length
from jaxrl_llm.models.transformer import Net, Params, unstack
from jaxrl_llm.rollout.multi_turn import TurnServer, TurnTracker, slots_to_read
from jaxrl_llm.rollout.sampling import Sampling, sample
from jaxrl_llm.rollout.scheduler import IDLE, Grid, Schedule
from jaxrl_llm.rollout.speculative import guesses
from jaxrl_llm.rollout.streaming import Handout, Listener

READ = 64  # the most given tokens of a row that are read at once


class Prompts(NamedTuple):
    """What the rows of a prompt share, for each prompt of the batch or place of the grid."""

    cache: Any  # KeyValues [G,J,P,d] per layer
    tokens: jax.Array  # [G,P]
    mask: jax.Array  # [G,P] False on padding


class Rows(NamedTuple):
    """What is sampled, of all rows `[B,K]` or of those in the grid `[G,R]`."""

    tokens: jax.Array  # [..., C] so far, 0 after the end; those between length and known are given and come next
    logps: jax.Array  # [..., C] of sampled tokens, 0 of given ones
    given: jax.Array  # [..., C] True on tokens that are not sampled
    length: jax.Array  # tokens so far
    known: jax.Array  # tokens so far, and those that are given next
    limit: jax.Array  # tokens there may be
    finished: jax.Array  # ended with an end-of-text token


class Slots(NamedTuple):
    """Everything a decode step changes: R rows at each of the grid's G places."""

    cache: Any  # KeyValues of rows per layer, [G,R,J,d,S] and [G,R,J,S,d]; S grows up to C
    rows: Rows
    keys: jax.Array  # [G,R]
    steps: jax.Array  # [] decode steps so far in this grid


class Rollout(NamedTuple):
    """Sampled rows: prompt padded on the left, completion on the right, rows of a prompt adjacent."""

    tokens: jax.Array  # [N,T]
    segments: jax.Array  # [N,T] 1 on prompt and completion, 0 on padding
    mask: jax.Array  # [N,T] float32, 1 on sampled tokens, the end-of-text token included
    sample_logps: jax.Array  # [N,T], 0 outside the mask
    lengths: jax.Array  # [N] tokens of the completion, sampled or given
    finished: jax.Array  # [N] ended with an end-of-text token (not cut at max_completion_length)
    steps: jax.Array  # [N] float32, the decode steps of all slots, idle ones included, in equal parts


@dataclasses.dataclass(frozen=True)
class Engine:
    """Samples `group_size` completions per prompt.

    eos: ids that end a row. chunk: decode steps between two looks by the host, and the first size of the row cache.
    slots: rows that decode at once, over all devices; 0 is all. cache_dtype: of keys and values, a type or fp8; None is
    the decoder's. shrink: the grid is replaced when the rows that are left, with none waiting, fit into this share of
    it. weights_dtype: of the matrices, see `precision.in_precision`; None is the net's. drafts: tokens of a row that
    are guessed and computed beside its newest one; samples are the same, and those that were guessed come at once.
    """

    net: Net
    sampling: Sampling
    group_size: int
    max_completion_length: int
    eos: tuple[int, ...]
    chunk: int = 32
    slots: int = 0
    cache_dtype: str | None = None
    shrink: float = 0.5
    weights_dtype: str | None = None
    drafts: int = 0

    @property
    def decoder(self) -> Net:
        """The net that decodes: unrolled on CPU, where slicing scanned weights and caches costs more than compiling.

        With matrices in fewer bits it is scanned everywhere.
        """
        net = in_precision(self.net, self.weights_dtype)
        return net.unrolled() if jax.default_backend() == "cpu" and net.config.quantize == "none" else net

    def decoding_params(self, params: Params) -> Params:
        """What the decoder computes with."""
        return _decoding_params(params, self.decoder)

    def generate(
        self, params: Params, prompts, segments, key, first_row: int = 0, turn_server: TurnServer | None = None,
        limits=None, listener: Listener | None = None,
    ) -> Rollout:  # fmt: skip
        """Completions of prompts `[B,P]`, padded on the left, segments `[B,P]` 0 on padding.

        Row i draws from `fold_in(key, first_row + i)`. A row whose given tokens leave no room to sample one is cut.
        `limits` `[N]` are the most tokens of each row, where that is less than max_completion_length. `listener` is
        called with every row of this process, from 0, and its tokens, soon after it ends, while others are decoded;
        not with a `turn_server`.
        """
        check_length(self.net.config.rope, prompts.shape[1] + self.max_completion_length)
        shards, longest = _shards(), self.max_completion_length
        params = self.decoding_params(params)
        keys = _row_keys(key, np.uint32(first_row), prompts.shape[0] * self.group_size)
        bank, rows = _prefill(self, params, prompts, segments, keys)
        if limits is not None:
            rows = rows._replace(limit=jnp.minimum(rows.limit, np.asarray(limits).reshape(rows.limit.shape)))
        local = prompts.shape[0] // shards
        count = local * self.group_size
        slots, lengths = min(self.slots // shards or count, count), (prompts.shape[1], longest)
        schedule = Schedule(local, self.group_size, shards, slots, self.shrink, lengths)
        size, executed = min(self.chunk, longest), 0
        turns = None if turn_server is None else TurnTracker(turn_server, count * shards, longest)
        handout = Handout(listener if turns is None else None, count * shards)
        grid, places, slots = schedule.grid, *_seat(self, bank, rows, keys, None, schedule.grid, None, size)
        while True:
            lengths, ended, finished, given, steps = (np.asarray(x) for x in _status(slots))
            live = busy = (grid.row != IDLE) & ~ended.reshape(grid.row.shape)
            ready = handout.take(grid, slots.rows.tokens, lengths, ended)
            if turns is not None:
                observations = turns.exchange(grid, slots.rows.tokens, lengths, finished, wait=not live.any())
                if observations is not None:
                    slots = _give(slots, *observations)
                    continue
                if (reading := slots_to_read(given.reshape(shards, -1))) is not None:
                    width = min(READ, longest)
                    slots, size = _with_room(slots, size, int((lengths + np.minimum(given, width)).max()), longest)
                    slots = _read(self, params, places, slots, reading, width)
                    executed += reading.size * width
                    continue
                busy = live | turns.waiting_slots(grid)
            following = schedule.next(busy) if schedule.waiting.size or busy.any() else None
            if following is not None:
                executed += int(steps) * grid.slots
                rows = _collect(rows, slots, grid, shards)
                places, slots = _seat(self, bank, rows, keys, slots, following, _sources(grid, following), size)
                grid = following
            elif live.any():
                reached = int(lengths.reshape(live.shape)[live].max())
                slots, size = _with_room(slots, size, reached + 1, longest)
                ahead = min(self.chunk, size - reached)
                # For what is left of the last chunk a smaller grid saves less than its program costs to compile.
                pauses = turns is None and (longest - reached >= self.chunk or schedule.waiting.size)
                few = schedule.few(live) if pauses else 0
                slots = _decode_chunk(self, params, places, slots, np.int32(ahead), np.int32(few))
            handout.give(ready)
            if following is None and not busy.any():
                break
        executed += int(steps) * grid.slots
        return _finish(prompts, segments, _collect(rows, slots, grid, shards), np.float32(executed))


def _shards() -> int:
    """The parts that rows are cut into on the current mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else row_shards(mesh)


@functools.partial(jax.jit, static_argnames="decoder")
def _decoding_params(params: Params, decoder: Net) -> Params:
    """The parameters in the type they are computed in, so that a step reads no more than it must, adapters merged.

    Norm scales stay as they are: norms run in fp32, and a rounded scale would make sampler and trainer differ. So does
    the head where logits are formed in fp32. Matrices of 8 bits are made of the merged ones; those that are quantised
    already stay as they are, beside their adapters.
    """
    params = merge(params, decoder.config.lora)
    if decoder.config.quantize != "none":
        params = quantized_as(params, decoder.base.shapes(), decoder.config.quantize)
    head = "embed/weight" if decoder.config.tie_embeddings else "head/kernel"
    kept = ("scale", "codes", "absmax", *([head] if decoder.config.fp32_head else []))

    def leaf(path, x):
        return x if path_name(path).endswith(kept) else x.astype(decoder.config.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, params)
    return params if decoder.config.scan_layers else unstack(params, decoder.config.dense_layers)


@functools.partial(jax.jit, static_argnames="count")
def _row_keys(key, first_row, count: int):
    """The keys `[N]` of the rows: each its own, by its number."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(first_row + jnp.arange(count, dtype=jnp.uint32))


@functools.partial(jax.jit, static_argnames="engine")
def _prefill(engine: Engine, params, prompts, segments, keys) -> tuple[Prompts, Rows]:
    """The prompts' caches, and all rows `[B,K]` with their first token, from one forward pass per prompt."""
    shape = (prompts.shape[0], engine.group_size)
    model = engine.decoder.bind(params)
    hidden, cache = model.prefill(prompts, segments)
    if engine.cache_dtype is not None:
        dtype = BYTES["fp8"][0] if engine.cache_dtype == "fp8" else jnp.dtype(engine.cache_dtype)
        cache = jax.tree.map(lambda x: narrowed(x, dtype), cache)
    logits = jnp.repeat(model.logits(hidden[:, -1]), engine.group_size, axis=0).reshape(*shape, 1, -1)
    whole = (*shape, engine.max_completion_length)
    rows = Rows(
        tokens=jnp.zeros(whole, jnp.int32),
        logps=jnp.zeros(whole, jnp.float32),
        given=jnp.zeros(whole, bool),
        length=jnp.zeros(shape, jnp.int32),
        known=jnp.zeros(shape, jnp.int32),
        limit=jnp.full(shape, engine.max_completion_length, jnp.int32),
        finished=jnp.zeros(shape, bool),
    )
    no_guesses = jnp.zeros((*shape, 0), jnp.int32)
    return Prompts(cache, prompts, segments != 0), _append(engine, rows, keys.reshape(shape), logits, no_guesses, 0)


@functools.partial(jax.jit, static_argnames=("engine", "size"))
def _seat(engine: Engine, bank: Prompts, rows: Rows, keys, slots: Slots | None, grid: Grid, sources, size: int):
    """The grid's prompts and slots, with row caches for `size` tokens: of `slots`, those of the slots `sources`."""
    shards, g, r = grid.row.shape
    axis = _places_axis(engine)
    everyone = (shards * g, r) == rows.length.shape and slots is None
    places = bank
    if not everyone:
        places = jax.tree.map(lambda x: _take(x, grid.prompt, axis, "heads"), bank.cache)
        places = Prompts(places, *(_take(x, grid.prompt, 0) for x in (bank.tokens, bank.mask)))
    if slots is None:
        cache = _per_layer(lambda layer: empty_rows(layer, r, size), places.cache)
    else:

        def move(x):
            taken = _take(_flat(x, axis), sources, axis, "heads")
            return taken.reshape(*x.shape[:axis], shards * g, r, *x.shape[axis + 2 :])

        cache = jax.tree.map(move, slots.cache)

    def seated(x):
        return _take(x, jnp.maximum(grid.row, 0).reshape(shards, -1), 0).reshape(shards * g, r, *x.shape[1:])

    own = Rows(*(seated(_flat(x, 0)) for x in rows))
    own = own._replace(finished=own.finished | (grid.row == IDLE).reshape(shards * g, r))
    return places, Slots(cache, own, seated(keys), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames="shards")
def _collect(rows: Rows, slots: Slots, grid: Grid, shards: int) -> Rows:
    """All rows, with what those in the grid have sampled."""
    count = rows.length.size // shards
    index = jnp.where(grid.row == IDLE, count, grid.row).reshape(shards, -1)  # past the end: dropped
    return jax.tree.map(lambda whole, part: _put(whole, index, part, 0), rows, slots.rows)


def _sources(old: Grid, new: Grid) -> np.ndarray:
    """The old slot `[shards, G*R]` of each row of the new grid, any for rows that had none: their caches are empty."""
    sources = np.zeros((len(new.row), new.row[0].size), np.int32)
    for shard, (before, after) in enumerate(zip(old.row, new.row, strict=True)):
        place = {number: slot for slot, number in enumerate(before.ravel()) if number != IDLE}
        sources[shard] = [place.get(number, 0) for number in after.ravel()]
    return sources


def _take(x, index, axis: int, *dims: str | None):
    """Entries `index` `[shards, m]` along `axis`, each from its own shard's part: no data moves between devices.

    `dims` are those behind the axis, for `constrain`.
    """
    parts = x.reshape(*x.shape[:axis], len(index), -1, *x.shape[axis + 1 :])
    taken = jax.vmap(lambda a, i: jnp.take(a, i, axis=axis), in_axes=(axis, 0), out_axes=axis)(parts, index)
    taken = taken.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    return constrain(taken, *(None,) * axis, "rows", *dims, *(None,) * (taken.ndim - axis - 1 - len(dims)))


def _put(whole, index, part, axis: int):
    """The whole with the part's entries at `index` `[shards, m]`, each in its own shard; past the end they are dropped.

    `axis` and the next one are those of places and rows, in both; m goes over the part's.
    """
    cut, own = (x.reshape(*x.shape[:axis], len(index), -1, *x.shape[axis + 2 :]) for x in (whole, part))
    lead = (slice(None),) * axis
    write = jax.vmap(lambda x, i, y: x.at[(*lead, i)].set(y, mode="drop"), in_axes=(axis, 0, axis), out_axes=axis)
    return write(cut, index, own).reshape(whole.shape)


def _flat(x, axis: int):
    """x with its axes `axis` and `axis + 1` as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="slots")
def _decode_chunk(engine: Engine, params, places: Prompts, slots: Slots, steps, few=0) -> Slots:
    """`steps` decode steps, or fewer: until no shard has more than `few` rows that go on."""
    model = engine.decoder.bind(params)
    start, room = slots.steps, jax.tree.leaves(slots.cache)[0].shape[-1]

    def step(slots: Slots) -> Slots:
        rows = slots.rows
        last = rows.length - 1  # the newest token, sampled but not yet in the cache
        at, ahead = _ahead(engine, places, rows)
        positions, flat = places.mask.sum(-1)[:, None, None] + at, (len(last), -1)
        hidden, cache = model.decode(
            ahead.reshape(flat), positions.reshape(flat), places.cache, places.mask, slots.cache, last
        )
        logits = model.logits(hidden).reshape(*ahead.shape, -1)
        rows = _append(engine, rows, slots.keys, logits, ahead[..., 1:], room)
        return Slots(cache, rows, slots.keys, slots.steps + 1)

    def more(slots: Slots):
        live = ~_ended(slots.rows)
        go_on = (slots.steps < start + steps) & (live.reshape(_shards(), -1).sum(-1).max() > few)
        # Rows whose guesses are right may fill their caches before the steps are done.
        return go_on & (jnp.where(live, slots.rows.length, 0).max() <= room) if engine.drafts else go_on

    return jax.lax.while_loop(more, step, slots)


def _held(rows: Rows, width: int):
    """The places of the newest token of each row and of the next ones, `[..., width]`, and what the row holds there."""
    at = rows.length[..., None] - 1 + jnp.arange(width)
    return at, jnp.take_along_axis(rows.tokens, jnp.minimum(at, rows.tokens.shape[-1] - 1), axis=-1)


def _ahead(engine: Engine, places: Prompts, rows: Rows):
    """Places and tokens `[G,R,W]` of each row's newest token and of those beside it, which are given or guessed."""
    at, held = _held(rows, 1 + engine.drafts)
    if not engine.drafts:
        return at, held
    guessed = guesses(places.tokens, places.mask, rows.tokens, rows.length, engine.drafts)
    is_held = at < jnp.maximum(rows.known, rows.length)[..., None]
    return at, jnp.where(is_held, held, jnp.concatenate([held[..., :1], guessed], axis=-1))


@functools.partial(jax.jit, static_argnames=("engine", "width"), donate_argnames="slots")
def _read(engine: Engine, params, places: Prompts, slots: Slots, index, width: int) -> Slots:
    """The slots after up to `width` given tokens in each of those in `index` `[shards, m]`; past the end there is none.

    The newest token of a row enters its cache with the next one, so the last given one is decoded like others.
    """
    shards, axis = len(index), _places_axis(engine)
    g, r = slots.rows.length.shape
    here = jnp.minimum(index, g * r // shards - 1)
    rows = Rows(*(_take(_flat(x, 0), here, 0) for x in slots.rows))
    prompt = jax.tree.map(lambda x: _take(x, here // r, axis, "heads"), places.cache)
    cache = jax.tree.map(lambda x: jnp.expand_dims(_take(_flat(x, axis), here, axis, "heads"), axis + 1), slots.cache)
    mask, (at, tokens) = _take(places.mask, here // r, 0), _held(rows, width)
    positions, model = mask.sum(-1)[:, None] + at, engine.decoder.bind(params)
    _, cache = model.decode(tokens, positions, prompt, mask, cache, at[:, :1])
    cache = jax.tree.map(lambda whole, part: _put(whole, index, part, axis), slots.cache, cache)
    length = (rows.length + jnp.minimum(_given(rows), width))[:, None]
    return slots._replace(cache=cache, rows=slots.rows._replace(length=_put(slots.rows.length, index, length, 0)))


def _ended(rows: Rows):
    return rows.finished | (rows.length >= rows.limit)


def _given(rows: Rows):
    """How many given tokens come next in each row."""
    return jnp.where(_ended(rows), 0, jnp.maximum(jnp.minimum(rows.known, rows.limit) - rows.length, 0))


def _append(engine: Engine, rows: Rows, keys, logits, guessed, room: int) -> Rows:
    """The rows with the tokens that follow in those that have not ended: given ones, or drawn from logits `[G,R,W,V]`.

    The first of W always follows. Each other was computed behind a guess, one of `[G,R,W-1]`, and follows if this is
    the token before it and was in the cache, which has `room`.
    """
    width = logits.shape[-2]
    places = rows.length[..., None] + jnp.arange(width)
    draw = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)), (None, 0))
    uniforms = jax.vmap(draw)(keys.reshape(-1), places.reshape(-1, width))
    drawn = sample(logits.reshape(-1, logits.shape[-1]), uniforms.reshape(-1), engine.sampling)
    tokens, logps = (x.reshape(places.shape) for x in drawn)
    given = places < rows.known[..., None]
    ends = ~given & jnp.isin(tokens, jnp.asarray(engine.eos, jnp.int32))
    right = (given[..., :-1] | (tokens[..., :-1] == guessed)) & ~ends[..., :-1]
    fits = (places < rows.limit[..., None]) & (places <= room)
    follows = [~_ended(rows)]
    for number in range(1, width):
        follows.append(follows[-1] & right[..., number - 1] & fits[..., number])
    follows = jnp.stack(follows, axis=-1)
    here = jnp.where(follows & ~given, places, rows.tokens.shape[-1])  # past the end: dropped
    return rows._replace(
        tokens=_written(rows.tokens, here, tokens),
        logps=_written(rows.logps, here, logps),
        length=rows.length + follows.sum(-1),
        finished=rows.finished | (follows & ends).any(-1),
    )


def _written(rows, places, values):
    """The rows `[G,R,C]` with values at places of each, both `[G,R,W]`; every device writes its own."""
    return jax.vmap(jax.vmap(lambda row, place, value: row.at[place].set(value, mode="drop")))(rows, places, values)


@functools.partial(jax.jit, donate_argnames="slots")
def _give(slots: Slots, tokens, counts, cut) -> Slots:
    """The slots with `counts` `[G,R]` of the tokens `[G,R,W]` to come next in rows, which go on; `cut` rows end."""
    rows = slots.rows
    place = jnp.arange(tokens.shape[-1])
    here = jnp.where(place < counts[..., None], rows.length[..., None] + place, rows.tokens.shape[-1])
    rows = rows._replace(
        tokens=_written(rows.tokens, here, tokens),
        given=_written(rows.given, here, jnp.ones_like(here, bool)),
        known=jnp.where(counts > 0, rows.length + counts, rows.known),
        limit=jnp.where(cut, rows.length, rows.limit),
        finished=rows.finished & (counts == 0) & ~cut,
    )
    return slots._replace(rows=rows)


@jax.jit
def _status(slots: Slots):
    """Lengths and ends of the grid's rows, what they are given next, and its steps, whole on every process."""
    status = (slots.rows.length, _ended(slots.rows), slots.rows.finished, _given(slots.rows), slots.steps)
    if jax.sharding.get_abstract_mesh().empty:
        return status
    return jax.lax.with_sharding_constraint(status, PartitionSpec())


def _with_room(slots: Slots, size: int, needed: int, longest: int) -> tuple[Slots, int]:
    """The slots, whose row caches have room for `size` tokens, with room for `needed`, and what they have then."""
    while size < needed:
        size = min(2 * size, longest)
        slots = _grow(slots, size)
    return slots, size


@functools.partial(jax.jit, static_argnames="size")
def _grow(slots: Slots, size: int) -> Slots:
    """The slots with room for `size` completion tokens in the row caches."""
    return slots._replace(cache=_per_layer(lambda layer: longer_rows(layer, size), slots.cache))


def _places_axis(engine: Engine) -> int:
    """Of the grid's places in caches: after the layers, where these are stacked."""
    return 1 if engine.decoder.config.scan_layers else 0


def _per_layer(function, caches):
    """`function` of the KeyValues of each layer, or of all of them where layers are stacked."""
    return jax.tree.map(function, caches, is_leaf=lambda x: isinstance(x, KeyValues))


@jax.jit
def _finish(prompts, segments, all_rows: Rows, executed) -> Rollout:
    batch, k, c = all_rows.tokens.shape

    def rows(prompt_part, completion_part):
        part = jnp.repeat(prompt_part, k, axis=0)
        return constrain(jnp.concatenate([part, completion_part.reshape(batch * k, c)], axis=1), "rows", None)

    written = jnp.arange(c) < all_rows.length[..., None]
    sampled = written & ~all_rows.given
    return Rollout(
        tokens=rows(prompts, jnp.where(written, all_rows.tokens, 0)),
        segments=rows(segments, written.astype(segments.dtype)),
        mask=rows(jnp.zeros(prompts.shape, jnp.float32), sampled.astype(jnp.float32)),
        sample_logps=rows(jnp.zeros(prompts.shape, jnp.float32), all_rows.logps),
        lengths=all_rows.length.reshape(-1),
        finished=all_rows.finished.reshape(-1),
        steps=constrain(jnp.full((batch * k,), executed / (batch * k)), "rows"),
    )
