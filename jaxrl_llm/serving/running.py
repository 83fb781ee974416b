"""The rows in slots: they join the grid, get tokens and leave it, all in the one thread that owns the devices.

Groups of rows of one prompt, as trainers ask for them, decode side by side in a grid of their own shape while it has
room for all that wait; it shrinks as they end, as a rollout's does. When others come it is one of single rows again.
"""

import dataclasses
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.distributed.sharding import row_shards
from jaxrl_llm.rollout.assignment import assign
from jaxrl_llm.rollout.engine import Engine, decode_chunk
from jaxrl_llm.rollout.grammar import GrammarRow
from jaxrl_llm.rollout.scheduler import IDLE, Scheduler, SlotGrid
from jaxrl_llm.rollout.slots import Prompts
from jaxrl_llm.serving.grid import (
    CAPACITY,
    Grid,
    alone,
    bucket,
    empty_grid,
    end_rows,
    everything,
    join,
    newest,
    prefill_requests,
    regrouped,
    score_prompts,
    widened,
    with_allowed,
    with_top,
)
from jaxrl_llm.serving.handles import PREFILL_ROWS, Handle, Tokens, batches, distinct_prompts, pieces, rows_of_each
from jaxrl_llm.serving.metrics import Counts
from jaxrl_llm.serving.prefixes import Prefix, PrefixCache, kept_cache
from jaxrl_llm.serving.weights import Weights

PREFILL_TOKENS = 8192  # of prompts that are prefilled between two chunks, so that rows which decode do not wait long


class Running:
    """The grid of slots, the row in each, and the texts that are kept behind rows that have ended.

    `collected` is what rows have got, to be delivered. shrink and compile_work of the engine are of grids of groups.
    """

    def __init__(self, engine: Engine, weights: Weights, size: int, mesh: Any, prefix_bytes: int, counts: Counts):
        """`size` slots; kept texts have up to `prefix_bytes`, and there are none of a recurrent net."""
        self.engine, self.weights, self.size, self.mesh, self.counts = engine, weights, size, mesh, counts
        self.rows: list[Handle | None] = [None] * size
        self.collected: list[tuple[Handle, Tokens | BaseException]] = []
        self._group, self._shrinks = 1, False  # rows of a prompt in the grid; whether it was filled with groups
        self._lengths = np.zeros(size, np.int64)
        self._grid: Grid | None = None
        self._steps = 0  # decode steps of the grid that are counted
        self._parameters = sum(x.size for x in jax.tree.leaves(weights.params))
        self._prefixes = PrefixCache(prefix_bytes if engine.net.config.shares_prefixes else 0)

    def __bool__(self) -> bool:
        """True while there are rows."""
        return any(self.rows)

    def chosen(self, handles: list[Handle]) -> tuple[list[Handle], bool]:
        """The rows that may join now, first come, first served, and whether `make_single` has to come first.

        Prompts of more than PREFILL_TOKENS together wait for the next chunk.
        """
        if handles and not self:
            self.rows = [None] * self.size
            self._lengths = np.zeros(self.size, np.int64)
            self._group = rows_of_each(handles, self.size)
            self._shrinks = self._group > 1
        group, free = self._group, self._free()
        # A group's slots are idle until its last row ends: with others waiting single rows are faster.
        shrank = len(self.rows) < self.size
        if handles and self._shrinks and (shrank or rows_of_each(handles, group * len(free)) != group):
            return [], True
        joining: list[Handle] = []
        tokens, rows_of = 0, Counter[int]()
        for rows in pieces(handles[: group * len(free)], group):
            prompt = id(rows[0].request.prompt)
            if rows_of[prompt] % PREFILL_ROWS == 0:  # so many are of one prefill
                tokens += rows[0].request.width
            if joining and tokens > PREFILL_TOKENS:
                break
            rows_of[prompt] += 1
            joining += rows
        return joining, False

    def _free(self) -> list[int]:
        """The first slot of each place in the grid that has no row."""
        group = self._group
        return [slot for slot in range(0, len(self.rows), group) if not any(self.rows[slot : slot + group])]

    def make_single(self) -> None:
        """Goes on in a grid of single rows, in all slots."""
        live = [slot for slot, handle in enumerate(self.rows) if handle is not None]
        self.regroup(alone(live, self._group, self.size))
        self._shrinks = False

    def regroup(self, planned: SlotGrid) -> None:
        """Goes on with the rows of a grid of other slots, which has them by their present ones."""
        assert self._grid is not None
        self._grid, self._steps = regrouped(self.engine, self._grid, planned), 0
        order, self._group = planned.numbers(len(self.rows)).ravel(), planned.row.shape[2]
        self.rows = [None if slot == IDLE else self.rows[slot] for slot in order]
        self._lengths = np.where(order == IDLE, 0, self._lengths[order])
        for slot, handle in enumerate(self.rows):
            if handle is not None:
                handle.slot = slot

    def join(self, joining: Sequence[Handle]) -> None:
        """Prefills the rows, those of one bucket together, and gives them slots; those without memory get the error."""
        able = []
        for handle in joining:
            try:
                if handle.request.grammar is not None:
                    handle.in_grammar = GrammarRow(handle.request.grammar)
                able.append(handle)
            except Exception as error:  # it cannot even begin
                self.collected.append((handle, error))
        if able:
            self._join(able)
        self.counts.running = sum(handle is not None for handle in self.rows)

    def _join(self, joining: list[Handle]) -> None:
        free = self._free()
        try:
            grid = self._grid_for(joining)
        except Exception as error:  # others go on, as the grid is what it was
            if len(joining) == self._group:
                self._refuse(joining, error)
                return
            for rows in pieces(joining, self._group):
                self._join(rows)
            return
        for number, handle in enumerate(joining):
            slot = handle.slot = free[number // self._group] + number % self._group
            self.rows[slot] = handle
            self._lengths[slot] = 0
        # Kept texts are found by their tokens, which do not tell images apart.
        seeing = {id(handle.request.prompt) for handle in joining if handle.request.tiles is not None}
        begun = {
            id(prompt): None if id(prompt) in seeing else self._prefixes.find(prompt, self.weights.adapter)
            for prompt in distinct_prompts(joining)
        }
        apart = seeing | {prompt for prompt, found in begun.items() if found is not None}
        waiting = deque(batches(joining, apart, self._group))
        while waiting:
            some = waiting.popleft()
            requests = [handle.request for handle in some]
            found = begun[id(requests[0].prompt)]
            try:
                grid, prompts = self._prefill(some, grid, found)
            except Exception as error:  # no memory for a long prompt: others go on, as the grid is what it was
                if any(x.is_deleted() for x in jax.tree.leaves(grid)):  # but where it was to become the new one
                    raise
                if len(some) > self._group:
                    waiting.extendleft(pieces(some, self._group))
                    continue
                for handle in some:
                    assert handle.slot is not None
                    self.rows[handle.slot] = None
                self._refuse(some, error)
                continue
            if found is not None:
                self.counts.prefix_hits += 1
                self.counts.prefix_tokens += found[1]
            for index, prompt in enumerate(distinct_prompts(some) if requests[0].tiles is None else ()):
                self._keep(
                    prompt, prompts.cache, tuple(None for _ in prompts.cache), (index, 0), prompts.tokens.shape[1]
                )
            for handle in some:
                handle.version, handle.cached = self.counts.weight_version, 0 if found is None else found[1]
            self.counts.prompt_tokens += sum(map(len, distinct_prompts(some)))
        self._grid = grid

    def _prefill(self, handles: list[Handle], grid: Grid, found: tuple[Prefix, int] | None) -> tuple[Grid, Prompts]:
        """The grid with the rows in their slots, behind the kept text that is `found` for them; and their prompts."""
        engine, params, requests = self.engine, self.weights.params, [handle.request for handle in handles]
        allowed = self._allowed(handles) if grid.guided else None
        prompts, rows, keys = prefill_requests(engine, params, requests, grid.top, allowed, found)
        if scored := [handle for handle in handles if handle.request.prompt_logprobs is not None]:
            scores = score_prompts(engine, params, [handle.request for handle in scored])
            for handle, own in zip(scored, scores, strict=True):
                handle.scores = own
        own_prompts = prompts
        if rows.length.shape[1] != self._group:  # in a grid of single rows each leaves by itself
            count = len(handles)
            single = alone(range(count), count, count)
            own_prompts, begun_slots = assign(engine.decoder, prompts, rows, keys.reshape(-1), single, 1)
            rows, keys = begun_slots.rows, begun_slots.keys
        places = np.asarray([handle.slot for handle in handles[:: self._group]]) // self._group
        return join(engine, params, grid, own_prompts, rows, keys, places), prompts

    def _grid_for(self, joining: Sequence[Handle]) -> Grid:
        """The grid with room for what the rows ask for beside those that go on: width, likeliest tokens, guides."""
        top = any(handle.request.top_logprobs for handle in joining)
        guided = any(handle.in_grammar is not None for handle in joining)
        live = [handle for handle in self.rows if handle is not None]
        width = max(bucket(len(handle.request.prompt)) for handle in (*live, *joining))
        size, grid = len(self.rows), self._grid
        if grid is None or not live:  # an empty grid is as small as these rows allow
            kind = ((size // self._group, self._group), width, top, guided)
            if (
                grid is None
                or (grid.shape, grid.width, grid.top, grid.guided) != kind
                or grid.slots.capacity > CAPACITY
            ):
                self._grid = grid = None  # whose memory the next one may need
                grid, self._steps = empty_grid(self.engine, self.weights.params, *kind), 0
            return grid
        if grid.width < width or grid.width > 2 * width:
            grid = grid._replace(prompts=widened(self.engine, self.weights.params, grid.prompts, width))
        grid = with_top(grid) if top else grid
        return with_allowed(grid, everything(self.engine, size)) if guided and not grid.guided else grid

    def _refuse(self, handles: Sequence[Handle], error: BaseException) -> None:
        """Tells rows why they cannot begin, or go on."""
        traceback.print_exception(error)
        # Without frames, which hold arrays: who is told may keep the error.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.collected += [(handle, error) for handle in handles]
        self.counts.refused_rows += len(handles)

    def dispatch(self, others_wait: bool) -> bool:
        """Starts a chunk of decode steps; False where no row goes on."""
        engine, guided = self.engine, any(handle is not None and handle.in_grammar for handle in self.rows)
        if guided:  # one step behind tokens that the host has seen; samples are the same without proposals
            engine = dataclasses.replace(engine, speculative_tokens=0)
            if any(h is not None and h.in_grammar and not self._lengths[slot] for slot, h in enumerate(self.rows)):
                self.collect()
        pause_at = 0 if others_wait else self._shrink()
        live = [slot for slot, handle in enumerate(self.rows) if handle is not None]
        if not live or self._grid is None:
            return False
        self._grid = with_allowed(self._grid, self._allowed(self.rows) if guided else None)
        # A row that was prefilled has a token that the host has not seen yet.
        reached = max(1, int(self._lengths[live].max()))
        slots = self.engine.with_room(self._grid.slots, min(reached + 1, self.engine.max_completion_length))
        ahead = 1 if guided else max(1, min(self.engine.chunk, slots.capacity - reached))
        if others_wait:  # an eighth of the slots is refilled as soon as it is free
            pause_at = max(0, len(live) - max(1, self.size // 8))
        params, steps = self.weights.params, (np.int32(ahead), np.int32(pause_at))
        slots = decode_chunk(engine, params, self._grid.prompts, slots, *steps)
        self._grid = self._grid._replace(slots=slots)
        return True

    def _allowed(self, handles: Sequence[Handle | None]) -> np.ndarray:
        """The bits `[B,V/32]` of the tokens with which rows may go on."""
        allowed = everything(self.engine, len(handles))
        for bits, handle in zip(allowed, handles, strict=True):
            if handle is not None and handle.in_grammar is not None:
                bits[:] = handle.in_grammar.bits
        return allowed

    def _shrink(self) -> int:
        """Goes on in a smaller grid where that is worth it; returns at how few rows it is to be asked again."""
        live = [handle is not None for handle in self.rows]
        if not self._shrinks or self._grid is None or not any(live):
            return 0
        left = max(h.request.limit - self._lengths[slot] for slot, h in enumerate(self.rows) if h is not None)
        size, group, shards = len(self.rows), self._group, 1 if self.mesh is None else row_shards(self.mesh)
        if size // group % shards or not self.engine.worth_shrinking(self._parameters, int(left), size):
            return 0
        lengths = (self._grid.width, self.engine.max_completion_length)
        scheduler = Scheduler(size // group // shards, group, shards, size // shards, self.engine.shrink, lengths)
        by_prompt = np.reshape(live, (shards, -1, group))
        if (planned := scheduler.next(by_prompt)) is None:
            return scheduler.pause_at(by_prompt)
        self.regroup(planned)
        return self._shrink()

    def collect(self) -> None:
        """Reads what rows have got, when the chunk has ended; rows that have ended leave their slots."""
        assert self._grid is not None
        slots = self._grid.slots
        starts = self._lengths.astype(np.int32)
        # A chunk's tokens, where every speculative one is right, and the one of the prefill.
        most = 1 + self.engine.chunk * (1 + self.engine.speculative_tokens)
        found, total = jax.device_get((newest(slots, starts, most), slots.steps))
        self.counts.decode_steps += int(total) - self._steps
        self._steps = int(total)
        for slot, handle in enumerate(self.rows):
            if handle is None:
                continue
            count = int(found.length[slot] - self._lengths[slot])
            self._lengths[slot] = found.length[slot]
            top = handle.request.top_logprobs
            reason = ("stop" if found.finished[slot] else "length") if found.ended[slot] else None
            new = Tokens(
                found.tokens[slot, :count].tolist(),
                found.logps[slot, :count].tolist(),
                found.top_ids[slot, :count, :top].tolist() if top else [],
                found.top_logps[slot, :count, :top].tolist() if top else [],
                reason,
            )
            self.counts.generated_tokens += count
            handle.ids += new.ids
            handle.newest = self.counts.weight_version
            if reason is not None:
                self._keep_row(slot)
                self.rows[slot] = None
                self.counts.finished_rows += 1
            if count or reason is not None:
                self.collected.append((handle, new))
            if handle.in_grammar is not None and reason is None:
                try:
                    handle.in_grammar.consume(new.ids)
                except Exception as error:
                    self.collected.append((handle, error))
                    self.end([slot])

    def end(self, gone: list[int]) -> None:
        """Frees slots whose rows go on no further, because nobody waits for them."""
        if gone and self._grid is not None:
            mask = np.zeros(len(self.rows), bool)
            mask[gone] = True
            self._grid = self._grid._replace(slots=end_rows(self._grid.slots, mask))
            for slot in gone:
                self._keep_row(slot)
                self.rows[slot] = None
            self.counts.cancelled_rows += len(gone)

    def _keep_row(self, slot: int) -> None:
        """Keeps the text of a row that has ended; its newest token is not in its cache."""
        handle, grid = self.rows[slot], self._grid
        if handle is None or grid is None or handle.request.tiles is not None:
            return
        if handle.ids and handle.version == self.counts.weight_version:
            text = [*handle.request.prompt, *handle.ids[:-1]]
            place = divmod(slot, self._group)
            self._keep(text, grid.prompts.cache, grid.slots.cache, place, grid.width + len(handle.ids) - 1)

    def _keep(self, tokens: Sequence[int], prompts: Any, rows: Any, place: tuple[int, int], end: int) -> None:
        """Keeps a text whose last token is before the place `end` of the caches of a prompt and a row."""
        weights = self.weights
        if not weights.stale and self._prefixes.wants(tokens, weights.adapter):  # else the next rows have other ones
            width = bucket(len(tokens))
            try:
                cache = kept_cache(self.engine, prompts, rows, *np.asarray((*place, end), np.int32), width)
            except (jax.errors.JaxRuntimeError, MemoryError):  # without memory for it, it is computed again
                return
            self._prefixes.add(Prefix(np.asarray(tokens, np.int32), weights.adapter, cache, width))
            self.counts.prefix_bytes = self._prefixes.bytes

    def forget_prefixes(self, adapter: str | None = None) -> None:
        """Lets the kept texts go, or those of an adapter alone."""
        self._prefixes.forget(adapter)
        self.counts.prefix_bytes = self._prefixes.bytes

    def lose(self, error: BaseException, joining: Sequence[Handle] = ()) -> None:
        """Lets the grid go, of which a step without memory has left a part, with its rows and those that were joining.

        Kept texts go too: there is more room for those that wait.
        """
        told = {handle for handle, tokens in self.collected if isinstance(tokens, BaseException)}
        rows = dict.fromkeys(handle for handle in (*self.rows, *joining) if handle is not None)
        self.let_go()
        self._refuse([handle for handle in rows if handle not in told], error)

    def let_go(self) -> None:
        """Drops rows, caches and kept texts, so that their memory is free."""
        self._grid, self.rows, self.counts.running = None, [None] * self.size, 0
        self.forget_prefixes()
