"""The slot grid of requests: G prompts by R rows, which requests join and leave between chunks.

    prefill_requests(requests, ...)          -> Prompts, Rows    # their prompts' caches and first tokens (engine.py)
    join(params, grid, Prompts, Rows, ...)   -> Grid             # in places whose rows have ended
    regrouped(grid, SlotGrid)                -> Grid             # the rows that go on, in another grid
    decode_chunk(params, Prompts, Slots)     -> Slots            # the engine's
    newest(Slots, starts)                    -> Newest           # what the host reads after a chunk

Requests of their own have one row a prompt (R = 1): each leaves by itself. Where all are groups of rows of one prompt,
as in a rollout of training, the rows of a group read one cache, and the grid shrinks at the end. The number of a slot
is that of its prompt times R, and that of its row.

The caches of the grid are as wide as its longest prompt and its longest completion need, in powers of two. How the
caches of a mixer are laid out is its own matter: which axis holds the tokens is seen from the shapes at two widths.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.models.logprobs import Likeliest, likeliest
from jaxrl_llm.models.vision.row_images import row_images
from jaxrl_llm.rollout.assignment import reassign
from jaxrl_llm.rollout.engine import READ, Engine, prefill
from jaxrl_llm.rollout.grammar import Grammar
from jaxrl_llm.rollout.processors import padded_words
from jaxrl_llm.rollout.sampling import RowSampling, SamplingParams
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid
from jaxrl_llm.rollout.slots import Prompts, Rows, Slots, ended, flat
from jaxrl_llm.serving.prefixes import Prefix, resume

SMALLEST = 64  # tokens of the narrowest caches of prompts that a program decodes with
SHORTEST = 32  # and of the narrowest prompts that are prefilled, whose padding is computed like tokens
CAPACITY = 32  # tokens that the row caches of a new grid have room for
MOST_ENDS = 16  # ids that may end a row
MOST_BIASES = 1024  # tokens whose logits a request may change
MOST_WORDS, LONGEST_WORD = 64, 16  # sequences of tokens that it may forbid, and their tokens
MOST_TOP = 20  # likeliest tokens of a sampled place that a request may ask for
MOST_PROMPT_TOP = 128  # and of a place of its prompt


@dataclasses.dataclass(frozen=True, eq=False)
class RowRequest:
    """One completion of a prompt: the ids, the most tokens, how they are drawn, and the ids that end it.

    The row draws from `fold_in(key(seed), number)`, as row `number` of `generate` does. `top_logprobs` of the
    likeliest tokens are reported at each place. `grammar` is what the completion follows.
    """

    prompt: Sequence[int]
    limit: int
    sampling: SamplingParams
    ends: tuple[int, ...]
    seed: int
    number: int = 0
    top_logprobs: int = 0
    prompt_logprobs: int | None = None  # so many likeliest tokens at each place of the prompt; None: it is not scored
    grammar: Grammar | None = None
    adapter: str = ""  # the name of one of the queue's; none is the model itself
    tiles: Sequence[np.ndarray] | Tiles | None = None  # each [H,W,C] fp32, of the images of the prompt

    @property
    def width(self) -> int:
        """Tokens that its prompt is prefilled with, padding included."""
        return bucket(len(self.prompt), SHORTEST)


class Grid(NamedTuple):
    """The prompts and rows of all slots, on the devices."""

    prompts: Prompts
    slots: Slots

    @property
    def width(self) -> int:
        """Tokens that the caches of prompts have room for."""
        return self.prompts.tokens.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of prompts, and of rows of each: `(G, R)`."""
        return self.slots.rows.length.shape

    @property
    def sampling(self) -> RowSampling:
        """The settings of each row, which all rows of requests have."""
        assert self.slots.rows.sampling is not None
        return self.slots.rows.sampling

    @property
    def top(self) -> bool:
        """True where the likeliest tokens of each place are kept."""
        return self.sampling.top_ids is not None

    @property
    def guided(self) -> bool:
        """True where the rows have room for the tokens that a guide allows next."""
        return self.sampling.allowed is not None

    def with_sampling(self, **changes: Any) -> "Grid":
        """The grid whose rows have these settings changed."""
        rows = self.slots.rows._replace(sampling=self.sampling._replace(**changes))
        return self._replace(slots=self.slots.replace(rows=rows))


class Newest(NamedTuple):
    """The host's view of each slot: the row's length and end, and its tokens since the last time."""

    length: Any  # [S]
    ended: Any  # [S]
    finished: Any  # [S] with one of its ids; else at its limit
    tokens: Any  # [S,W] from the place `starts` of each on
    logps: Any  # [S,W]
    top_ids: Any  # [S,W,A], or None
    top_logps: Any


def bucket(length: int, smallest: int = SMALLEST) -> int:
    """The least power of two from `smallest` on that holds so many tokens."""
    return max(smallest, 1 << (length - 1).bit_length())


def prefill_requests(
    engine: Engine,
    params,
    requests: Sequence[RowRequest],
    top: bool,
    allowed: np.ndarray | None,
    found: tuple[Prefix, int] | None,
) -> tuple[Prompts, Rows, Any]:
    """Caches and first tokens of requests, whose prompts have one bucket, and the keys `[B,R]` of their rows.

    Each prompt (the same object) is computed once, for as many adjacent rows as the others have; one with images is by
    itself. `top` is whether the grid they join keeps the likeliest tokens, `allowed` `[B*R,V/32]` what the first tokens
    may be, in a grid with guided rows. `found` is a kept text and how many of its tokens the one prompt begins with.
    """
    own = list({id(r.prompt): r for r in requests}.values())
    prompts, segments = pad_prompts([list(r.prompt) for r in own], max(r.width for r in own))
    shape = (len(own), len(requests) // len(own))
    sampling = row_sampling(engine, requests, shape, top, allowed)
    seeds, numbers = (
        np.asarray([getattr(r, name) & 0xFFFFFFFF for r in requests], np.uint32) for name in ("seed", "number")
    )
    keys = _keys(seeds, numbers)
    group = dataclasses.replace(engine, group_size=shape[1])
    if found is None:
        (first, *_), images = requests, None
        if first.tiles is not None:
            images = row_images([first.prompt], [first.tiles], engine.net.config.vision)
        new_prompts, new_rows = prefill(
            group, params, prompts, segments, keys, sampling=sampling, images=images, steady=True
        )
    else:
        prefix, common = found
        behind = list(requests[0].prompt[common:])
        suffix = np.zeros((1, bucket(len(behind), READ)), np.int32)
        suffix[0, : len(behind)] = behind
        new_prompts, new_rows = resume(
            group, params, prefix.cache, np.int32(len(prefix.tokens)), np.int32(common), suffix, prompts, segments,
            keys, sampling, prefix.width,
        )  # fmt: skip
    new_rows = new_rows._replace(limit=np.asarray([r.limit for r in requests], np.int32).reshape(shape))
    return new_prompts, new_rows, keys.reshape(shape)


def row_sampling(
    engine: Engine, requests: Sequence[RowRequest], shape: tuple[int, int], top: bool, allowed: np.ndarray | None
) -> RowSampling:
    """The settings of requests, one for each place in `shape`, as arrays `[*shape, ...]` for sampling by row."""
    vocab = engine.net.config.vocab_size
    ends = np.full((len(requests), MOST_ENDS), -1, np.int32)
    bias_ids, biases = np.full((len(requests), MOST_BIASES), vocab, np.int32), np.zeros((len(requests), MOST_BIASES))
    for row, request in enumerate(requests):
        ends[row, : len(request.ends)] = request.ends
        for place, (token, bias) in enumerate(request.sampling.logit_bias):
            bias_ids[row, place], biases[row, place] = token, bias
    words = [padded_words(r.sampling.bad_words, MOST_WORDS, LONGEST_WORD, vocab) for r in requests]
    places = (*shape, engine.max_completion_length, MOST_TOP)

    def of(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.asarray([getattr(r.sampling, name) for r in requests], dtype).reshape(shape)

    def each(values: Any, dtype: Any) -> np.ndarray:
        values = np.asarray(values, dtype)
        return values.reshape(*shape, *values.shape[1:])

    return RowSampling(
        of("temperature"), of("top_p"), of("top_k", np.int32), of("min_p"), each(ends, np.int32),
        of("repetition_penalty"), of("frequency_penalty"), of("presence_penalty"),
        each(bias_ids, np.int32), each(biases, np.float32), each(words, np.int32), of("min_tokens", np.int32),
        None if allowed is None else each(allowed, np.uint32),
        np.zeros(places, np.int32) if top else None,
        np.zeros(places, np.float32) if top else None,
    )  # fmt: skip


def alone(slots: Sequence[int], group: int, size: int) -> SlotGrid:
    """A grid of `size` prompts with a row each: those in `slots` of one with `group` rows a prompt, and idle ones."""
    row = np.full((1, size, 1), IDLE, np.int32)
    row[0, : len(slots), 0] = slots
    return SlotGrid(np.maximum(row[:, :, 0], 0) // group, row)


def regrouped(engine: Engine, grid: Grid, planned: SlotGrid) -> Grid:
    """The grid whose slots have the rows of `planned`, numbers of slots of this one, which has no row caches then."""
    (prompts, slots), sources = grid, np.maximum(planned.row, 0).reshape(len(planned.row), -1)
    return Grid(*reassign(engine.decoder, prompts, slots.rows, slots.keys.reshape(-1), slots, planned, sources))


def score_prompts(engine: Engine, params, requests: Sequence[RowRequest]) -> list[Likeliest]:
    """The log-probs of the tokens of prompts, which have one bucket: numpy arrays `[P]` and `[P,A]` of each.

    Those of one prompt (the same object) at one temperature are computed once.
    """
    own = {(id(r.prompt), r.sampling.temperature or 1.0): r for r in requests}
    longest = max(len(r.prompt) for r in requests)
    prompts, segments = pad_prompts([list(r.prompt) for r in own.values()], bucket(longest))
    temperatures = np.asarray([temperature for _, temperature in own], np.float32)
    count = min(bucket(max(r.prompt_logprobs or 0 for r in requests), MOST_TOP), engine.net.config.vocab_size)
    found = jax.device_get(_likeliest(engine, params, prompts, segments, temperatures, count))
    width, scores = prompts.shape[1], {}
    for row, (key, r) in enumerate(own.items()):
        scores[key] = jax.tree.map(lambda x, row=row, r=r: x[row, width - len(r.prompt) :], found)
    return [scores[id(r.prompt), r.sampling.temperature or 1.0] for r in requests]


@functools.partial(jax.jit, static_argnames=("engine", "count"))
def _likeliest(engine: Engine, params, prompts, segments, temperature, count: int) -> Likeliest:
    return likeliest(engine.decoder.bind(params), prompts, segments, temperature, count)


@jax.jit
def _keys(seeds, numbers):
    return jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(seeds, numbers)


def everything(engine: Engine, rows: int) -> np.ndarray:
    """The bits `[rows, V/32]` with which every token may come next."""
    return np.full((rows, -(-engine.net.config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)


@functools.partial(jax.jit, static_argnames=("engine", "shape", "width", "top", "guided"))
def empty_grid(engine: Engine, params, shape: tuple[int, int], width: int, top: bool, guided: bool) -> Grid:
    """A grid `[G,R]` in which no row goes on; `top`: with room for the likeliest tokens of each place."""
    (size, group), slots = shape, shape[0] * shape[1]
    nothing = [RowRequest((0,), 0, SamplingParams(), (), 0)] * slots
    sampling = row_sampling(engine, nothing, shape, top, everything(engine, slots) if guided else None)
    keys, capacity = _keys(*(jnp.zeros(slots, jnp.uint32),) * 2), min(CAPACITY, engine.max_completion_length)

    def shapes():
        of_group, prompts = dataclasses.replace(engine, group_size=group), jnp.zeros((size, width), jnp.int32)
        new_prompts, rows = prefill(of_group, params, prompts, prompts, keys, sampling=sampling)
        return new_prompts, rows, engine.decoder.empty_caches(new_prompts.cache, group, capacity)

    # Rows at their limit, which is 0, go on no further.
    prompts, rows, cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(shapes))
    return Grid(prompts, Slots(cache, rows, keys.reshape(shape), jnp.zeros((), jnp.int32), capacity))


def with_top(grid: Grid) -> Grid:
    """The grid with room for the likeliest tokens of each place."""
    if grid.top:
        return grid
    places = (*grid.slots.rows.tokens.shape, MOST_TOP)
    return grid.with_sampling(top_ids=jnp.zeros(places, jnp.int32), top_logps=jnp.zeros(places, jnp.float32))


def with_allowed(grid: Grid, allowed: np.ndarray | None) -> Grid:
    """The grid whose rows may go on with the tokens `allowed` `[G*R,V/32]`; None: with any."""
    if allowed is None:
        return grid.with_sampling(allowed=None) if grid.guided else grid
    return grid.with_sampling(allowed=jnp.asarray(allowed).reshape(*grid.shape, -1))


@functools.partial(jax.jit, static_argnames=("engine", "width"))
def widened(engine: Engine, params, prompts: Prompts, width: int) -> Prompts:
    """The prompts in caches of `width` tokens, more or fewer than they had: what is left out must be padding."""
    count = len(prompts.tokens)

    def of_width(width: int):
        tokens = jnp.zeros((count, width), jnp.int32)
        keys = _keys(*(jnp.zeros(count, jnp.uint32),) * 2)
        return prefill(engine, params, tokens, tokens, keys)[0]

    own_first = {name for kind in engine.decoder.config.layer_configs for name in getattr(kind.mixer, "own_first", ())}

    def fitted(path, x, was, like):  # keys and values of images that are no tokens are none of a width
        more = [new - old for new, old in zip(like.shape, was.shape, strict=True)]
        if getattr(path[-1], "name", "") in own_first:
            return jnp.pad(x[tuple(slice(min(n, 0) or None) for n in more)], [(0, max(n, 0)) for n in more])
        return jnp.pad(x[tuple(slice(max(-n, 0), None) for n in more)], [(max(n, 0), 0) for n in more])

    sizes = (prompts.tokens.shape[1], width)
    shapes = (jax.eval_shape(functools.partial(of_width, size)) for size in sizes)
    return jax.tree_util.tree_map_with_path(fitted, prompts, *shapes)


def join(engine: Engine, params, grid: Grid, prompts: Prompts, rows: Rows, keys, index) -> Grid:
    """The grid with new prompts and their rows at the places `index` `[B]`; the prompts get its width."""

    def grown(old, new):
        """With room for as many images as the new prompts have; what pads them is not seen."""
        more = [max(0, b - a) for a, b in zip(old.shape, new.shape, strict=True)]
        more[engine.decoder.prompt_axis] = 0
        return jnp.pad(old, [(0, count) for count in more]) if any(more) else old

    # Before the grid is donated, as no array that grows can be where the old one was.
    cache = jax.tree.map(grown, grid.prompts.cache, prompts.cache)
    grid = grid._replace(prompts=grid.prompts._replace(cache=cache))
    return _join(engine, params, grid, prompts, rows, keys, index)


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="grid")
def _join(engine: Engine, params, grid: Grid, prompts: Prompts, rows: Rows, keys, index) -> Grid:
    axis = engine.decoder.prompt_axis
    if prompts.tokens.shape[1] != grid.width:
        prompts = widened(engine, params, prompts, grid.width)

    def put(old, new):  # of which the new prompts may have fewer images
        fewer = [0 if i == axis else b - a for i, (a, b) in enumerate(zip(new.shape, old.shape, strict=True))]
        new = jnp.pad(new, [(0, count) for count in fewer])
        return old.at[(slice(None),) * axis + (index,)].set(new.astype(old.dtype))

    def put_rows(old, new):
        return old.at[index].set(new)

    slots = grid.slots
    cache = engine.decoder.empty_caches(prompts.cache, rows.length.shape[1], slots.capacity)
    return Grid(
        Prompts(
            jax.tree.map(put, grid.prompts.cache, prompts.cache),
            put_rows(grid.prompts.tokens, prompts.tokens),
            put_rows(grid.prompts.mask, prompts.mask),
        ),
        slots.replace(
            cache=jax.tree.map(put, slots.cache, cache),
            rows=jax.tree.map(put_rows, slots.rows, rows),
            keys=put_rows(slots.keys, keys),
        ),
    )


@functools.partial(jax.jit, donate_argnames="slots")
def end_rows(slots: Slots, gone) -> Slots:
    """The slots in which the rows `gone` `[S]` go on no further."""
    return slots.replace(
        rows=slots.rows._replace(limit=jnp.where(gone.reshape(slots.rows.limit.shape), 0, slots.rows.limit))
    )


@functools.partial(jax.jit, static_argnames="width")
def newest(slots: Slots, starts, width: int) -> Newest:
    """The progress of the rows, with `width` tokens of each from the place `starts` `[S]` on."""
    rows = jax.tree.map(lambda x: flat(x, 0), slots.rows)
    places = jnp.minimum(starts[:, None] + jnp.arange(width), rows.tokens.shape[1] - 1)

    def window(x):
        return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)

    top = (None, None)
    if rows.sampling is not None and rows.sampling.top_ids is not None:
        top = (window(rows.sampling.top_ids), window(rows.sampling.top_logps))
    return Newest(rows.length, ended(rows), rows.finished, window(rows.tokens), window(rows.logps), *top)
