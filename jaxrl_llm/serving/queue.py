"""The request queue: one thread that owns the devices, and decodes whatever rows are asked for at the time.

Between two chunks of decode steps it ends rows that were cancelled, prefills those that wait (first come, first served)
and lets them join the slot grid. What a row is given depends on its request alone, never on who else is served, up to
the rounding of programs of another size.

Groups of rows of one prompt, as trainers ask for them, decode side by side in a grid of their own shape while it has
room for all that wait; it shrinks as they end, as a rollout's does. When others come it is one of single rows again.

The grid decodes with one adapter at a time: a turn of an adapter takes the rows that had been asked for when it began,
and further ones while nobody waits for another.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed.sharding import row_shards
from jaxrl_llm.models.logprobs import Likeliest
from jaxrl_llm.rollout.engine import Engine, assign, decode_chunk
from jaxrl_llm.rollout.grammar import GrammarRow
from jaxrl_llm.rollout.scheduler import IDLE, Scheduler, SlotGrid
from jaxrl_llm.serving.errors import lacks_memory
from jaxrl_llm.serving.grid import (
    CAPACITY,
    Grid,
    RowRequest,
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
from jaxrl_llm.serving.prefixes import Prefix, PrefixCache, kept_cache
from jaxrl_llm.serving.weights import Adapter, Weights

GROUP = 4  # the fewest rows of a prompt for which programs of a grid of groups are compiled
PREFILL_ROWS = 8  # prompts that are prefilled in one program
PREFILL_TOKENS = 8192  # that are prefilled between two chunks, so that rows which decode do not wait long
THREAD = "decoding"  # the name of the thread of a queue


class Tokens(NamedTuple):
    """Tokens of a row since the last time. `finish_reason` is "stop" with one of its ids, "length", or None."""

    ids: list[int]
    logps: list[float]
    top_ids: list[list[int]]  # the likeliest at each place; empty where they were not asked for
    top_logps: list[list[float]]
    finish_reason: str | None


class StoppedError(Exception):
    """The queue takes no requests any more, or has failed."""


@dataclasses.dataclass(eq=False)
class Handle:
    """A row that was asked for: `deliver` gets its tokens, or the error that ended it, in the queue's thread."""

    request: RowRequest
    deliver: Callable[[Tokens | BaseException], None]
    asked: float = dataclasses.field(default_factory=time.monotonic)
    slot: int | None = None
    cancelled: bool = False
    scores: Likeliest | None = None  # of the prompt's tokens, where they were asked for, before the first token comes
    in_grammar: GrammarRow | None = None  # how far it is in its grammar
    ids: list[int] = dataclasses.field(default_factory=list)  # its tokens so far
    version: int = 0  # of the weights that its prompt was computed with
    newest: int = 0  # and of those of its last token


@dataclasses.dataclass
class Counts:
    """Totals since the start, and what is so at the moment; the numbers of `/metrics`."""

    prompt_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    generated_tokens: int = 0
    finished_rows: int = 0
    cancelled_rows: int = 0
    refused_rows: int = 0
    decode_steps: int = 0
    weight_version: int = 0
    running: int = 0
    waiting: int = 0


class RequestQueue:
    """Rows that come and go, decoded side by side in `size` slots.

    `params` are those of the engine's net. The engine has group_size 1; its max_completion_length bounds every row, and
    its sampling and eos do not matter: each request brings its own. shrink and compile_work are of grids of groups.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        size: int,
        mesh: Any = None,
        adapters: Mapping[str, Adapter] | None = None,
        prefix_bytes: int = 0,
        adapts: bool = False,
    ):
        """`adapters` of the net are what `models.model.load_adapter` gives, by the names that requests call them; with
        `adapts` there may be others later.

        Texts that were computed are kept for those that go on with them, in so many bytes; none of a recurrent net.
        """
        self._prefixes = PrefixCache(prefix_bytes if engine.net.config.shares_prefixes else 0)
        self.engine, self.size, self.mesh, self.counts = engine, size, mesh, Counts()
        self._weights = Weights(engine, params, mesh, adapters, adapts)
        self.adapters, self._turn = self._weights.adapters, 0.0  # since when that of the weights has its turn
        self._condition = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._calls: deque[tuple[Callable[[], Any], Callable[[BaseException | None], None]]] = deque()
        self._cancelled: list[Handle] = []
        self._stopping = self._ended = False
        self.failure: BaseException | None = None
        self._rows: list[Handle | None] = [None] * size
        self._group, self._shrinks = 1, False  # rows of a prompt in the grid; whether it was filled with groups
        self._parameters = sum(x.size for x in jax.tree.leaves(params))
        self._lengths = np.zeros(size, np.int64)
        self._grid: Grid | None = None
        self._steps = 0  # decode steps of the grid that are counted
        self._collected: list[tuple[Handle, Tokens | BaseException]] = []  # read, and delivered beside the next chunk
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, handles: Sequence[Handle]) -> None:
        """Adds rows to those that wait; raises StoppedError when the queue is stopped or has failed."""
        with self._condition:
            if self._weights.released:
                raise StoppedError("there are no weights at the moment")
            if gone := {handle.request.adapter for handle in handles} - {"", *self.adapters}:
                raise StoppedError(f"{gone.pop()} was let go; ask again")
            if self._stopping or self.failure is not None:
                raise StoppedError("the server is stopping" if self.failure is None else f"it failed: {self.failure}")
            self._waiting.extend(handles)
            self.counts.waiting = len(self._waiting)
            self._condition.notify()

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Ends rows before their end: they get no more tokens, and leave their slots before the next chunk."""
        with self._condition:
            for handle in handles:
                handle.cancelled = True
                try:
                    self._waiting.remove(handle)
                    self.counts.cancelled_rows += 1
                except ValueError:  # it has a slot, or gets one now
                    self._cancelled.append(handle)
            self.counts.waiting = len(self._waiting)
            self._condition.notify()

    def replace(self, params: Any) -> None:
        """Takes other parameters of the net, or none where it raises. For functions that `call` has called.

        Rows that go on keep the caches of the earlier ones: a version of weights is `counts.weight_version`.
        """
        self._weights.set(params)
        self.clear_prefixes()
        self.counts.weight_version += 1

    def clear_prefixes(self) -> None:
        """Lets the kept texts go. For functions that `call` has called."""
        self._prefixes.clear()
        self.counts.prefix_bytes = 0

    def release(self) -> None:
        """Lets the parameters and all caches go until the next `replace`; rows that have not ended get no more.

        For functions that `call` has called.
        """
        with self._condition:
            self._weights.release()
            self._grid = None
            self.clear_prefixes()
            for handle in (*self._rows, *self._waiting):
                if handle is not None:
                    handle.cancelled = True
            self._rows = [None] * self.size
            self._waiting.clear()

    def call(self, call: Callable[[], Any], done: Callable[[BaseException | None], None]) -> None:
        """Has the queue's thread, which owns the devices, call a function between two chunks.

        `done` gets what it raised, or None; where the queue ends before, StoppedError or its failure.
        """
        with self._condition:
            if not self._ended:
                self._calls.append((call, done))
                self._condition.notify()
                return
        done(self.failure or StoppedError("the queue has stopped"))

    async def called(self, call: Callable[[], Any]) -> Any:
        """What a function returns that `call` has called, or raises what it raises; for coroutines."""
        loop, found = asyncio.get_running_loop(), []
        future: asyncio.Future[Any] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not future.done():
                future.set_result(found[0]) if error is None else future.set_exception(error)

        def done(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(tell, error)

        self.call(lambda: found.append(call()), done)
        return await future

    def forget_adapter(self, name: str) -> bool:
        """Lets an adapter go unless it is in use; True where it did. For functions that `call` has called."""
        with self._condition:
            if any(handle.request.adapter == name for handle in (*self._rows, *self._waiting) if handle is not None):
                return False
            self._weights.forget(name)
        self._prefixes.forget(name)  # there may be another by its name later
        self.counts.prefix_bytes = self._prefixes.bytes
        return True

    def set_adapter(self, name: str, adapter: Adapter) -> None:
        """Takes an adapter, or another one by the same name, which rows under way do not see. For functions that `call`
        has called."""
        if name in self.adapters:
            self._prefixes.forget(name)
            self.counts.prefix_bytes = self._prefixes.bytes
        self._weights.add(name, adapter)

    def stop(self, wait: float | None = None) -> None:
        """Takes no more requests; returns when the rows that were asked for have ended, or after `wait` seconds."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(wait)

    def _run(self) -> None:
        try:
            with self._weights.on_mesh():
                self._loop()
        except BaseException as error:
            with self._condition:
                self.failure = error
                pending = dict.fromkeys([*(h for h in self._rows if h is not None), *self._waiting])
                self._waiting.clear()
            self._deliver()
            for handle in pending:
                handle.deliver(error)
            raise
        finally:
            with self._condition:
                self._ended = True
            for _, done in self._calls:  # who waits for a call would wait for ever
                done(self.failure or StoppedError("the queue has stopped"))

    def _loop(self) -> None:
        while True:
            try:
                if not self._take_requests():
                    return
                decoding = self._dispatch()
                self._deliver()  # while the devices compute
                if decoding:
                    self._collect()
            except Exception as error:
                if not lacks_memory(error):
                    raise
                self._lose_grid(error)

    def _deliver(self) -> None:
        collected, self._collected = self._collected, []
        for handle, tokens in collected:
            if not handle.cancelled:
                handle.deliver(tokens)

    def _take_requests(self) -> bool:
        """Lets cancelled rows go and waiting ones join; False when the queue is stopped and nothing is left to do."""
        with self._condition:
            while not (self._collected or self._waiting or self._cancelled or self._calls or any(self._rows)):
                if self._stopping:
                    return False
                self._condition.wait()
            cancelled, self._cancelled = set(self._cancelled), []
            calls = list(self._calls)
            self._calls.clear()
        for call, done in calls:
            failed = None
            try:
                call()
            except Exception as error:
                failed = error
            done(failed)
        # By the rows, as the slot of a handle that has ended may be another row's by now, or beyond a grid that shrank.
        self._end([slot for slot, handle in enumerate(self._rows) if handle in cancelled])
        joining, prompt_tokens, regroups = [], 0, False
        with self._condition:
            adapter = self._weights.adapter
            own = [handle for handle in self._waiting if handle.request.adapter == adapter]
            if self._weights.stale and any(self._rows):
                own = []
            if len(own) == len(self._waiting) or (not any(self._rows) and own[:1] == [self._waiting[0]]):
                self._turn = time.monotonic()
            elif not any(self._rows):
                adapter, self._turn = self._waiting[0].request.adapter, time.monotonic()
                own = [h for h in self._waiting if h.request.adapter == adapter]
            own = [handle for handle in own if handle.asked <= self._turn]
            if own and not any(self._rows):
                self._rows = [None] * self.size
                self._lengths = np.zeros(self.size, np.int64)
                self._group = _group(own, self.size)
                self._shrinks = self._group > 1
            group, size = self._group, len(self._rows)
            free = [slot for slot in range(0, size, group) if not any(self._rows[slot : slot + group])]
            # A group's slots are idle until its last row ends: with others waiting single rows are faster.
            if own and self._shrinks:
                regroups = size < self.size or _group(own, group * len(free)) != group
            for handles in _pieces(own, group)[: 0 if regroups else len(free)]:
                if joining and prompt_tokens + handles[0].request.width > PREFILL_TOKENS:
                    break
                prompt_tokens += handles[0].request.width
                joining += handles
            for handle in joining:
                self._waiting.remove(handle)
            self.counts.waiting = len(self._waiting)
        try:
            weights = self._weights
            gone = weights.params is None and joining
            if adapter != weights.adapter or gone or (weights.stale and not any(self._rows)):
                weights.turn_to(adapter)
            if regroups:  # those that wait join after a chunk
                live = [slot for slot, handle in enumerate(self._rows) if handle is not None]
                self._regroup(alone(live, self._group, self.size))
                self._shrinks = False
            if joining:
                self._join(joining, free)
        except BaseException as error:
            if lacks_memory(error):
                self._lose_grid(error, joining)
                return True
            with self._condition:
                self._waiting.extendleft(reversed(joining))  # they are told as those that wait
            raise
        self.counts.running = sum(handle is not None for handle in self._rows)
        return True

    def _end(self, gone: list[int]) -> None:
        """Frees slots whose rows are to go on no further."""
        if gone and self._grid is not None:
            mask = np.zeros(len(self._rows), bool)
            mask[gone] = True
            self._grid = self._grid._replace(slots=end_rows(self._grid.slots, mask))
            for slot in gone:
                self._keep_row(slot)
                self._rows[slot] = None
            self.counts.cancelled_rows += len(gone)

    def _join(self, joining: list[Handle], free: list[int]) -> None:
        """Prefills the rows, those of one bucket together, and gives them slots; those without memory get the error."""
        joining, size = [handle for handle in joining if self._begins(handle)], len(self._rows)
        if not joining:
            return
        top = any(handle.request.top_logprobs for handle in joining)
        guided = any(handle.in_grammar is not None for handle in joining)
        live = [handle for handle in self._rows if handle is not None]
        width = max(bucket(len(handle.request.prompt)) for handle in (*live, *joining))
        grid, kind = self._grid, ((size // self._group, self._group), width, top, guided)
        try:
            if grid is None or not live:  # an empty grid is as small as these rows allow
                if (
                    grid is None
                    or (grid.shape, grid.width, grid.top, grid.guided) != kind
                    or grid.slots.capacity > CAPACITY
                ):
                    self._grid = grid = None  # whose memory the next one may need
                    grid, self._steps = empty_grid(self.engine, self._weights.params, *kind), 0
            else:
                if grid.width < width or grid.width > 2 * width:
                    grid = grid._replace(prompts=widened(self.engine, self._weights.params, grid.prompts, width))
                grid = with_top(grid) if top else grid
                if guided and not grid.guided:
                    grid = with_allowed(grid, everything(self.engine, size))
        except Exception as error:  # others go on, as the grid is what it was
            pieces = _pieces(joining, self._group)
            for number, rows in enumerate(pieces if len(pieces) > 1 else ()):
                self._join(rows, free[number:])
            if len(pieces) == 1:
                self._refuse(joining, error)
            return
        top, guided = grid.top, grid.guided
        for number, handle in enumerate(joining):
            slot = handle.slot = free[number // self._group] + number % self._group
            self._rows[slot] = handle
            self._lengths[slot] = 0
        # Kept texts are found by their tokens, which do not tell images apart.
        seeing = {id(handle.request.prompt) for handle in joining if handle.request.tiles is not None}
        begun = {
            id(prompt): None if id(prompt) in seeing else self._prefixes.find(prompt, self._weights.adapter)
            for prompt in _prompts(joining)
        }
        batches = deque(
            _batches(joining, seeing | {key for key, found in begun.items() if found is not None}, self._group)
        )
        while batches:
            some = batches.popleft()
            requests = [handle.request for handle in some]
            allowed, found = self._allowed(some) if guided else None, begun[id(requests[0].prompt)]
            scored = [handle for handle in some if handle.request.prompt_logprobs is not None]
            try:
                prompts, rows, keys = prefill_requests(self.engine, self._weights.params, requests, top, allowed, found)
                if scored:
                    scores = score_prompts(self.engine, self._weights.params, [handle.request for handle in scored])
                    for handle, own in zip(scored, scores, strict=True):
                        handle.scores = own
                own_prompts = prompts
                if rows.length.shape[1] != self._group:  # in a grid of single rows each leaves by itself
                    count = len(some)
                    single = alone(range(count), count, count)
                    own_prompts, begun_slots = assign(self.engine, prompts, rows, keys.reshape(-1), single, 1)
                    rows, keys = begun_slots.rows, begun_slots.keys
                places = np.asarray([handle.slot for handle in some[:: self._group]]) // self._group
                grid = join(self.engine, self._weights.params, grid, own_prompts, rows, keys, places)
            except Exception as error:  # no memory for a long prompt: others go on, as the grid is what it was
                if any(x.is_deleted() for x in jax.tree.leaves(grid)):  # but where it was to become the new one
                    raise
                if len(some) > self._group:
                    batches.extendleft(_pieces(some, self._group))
                    continue
                for handle in some:
                    assert handle.slot is not None
                    self._rows[handle.slot] = None
                self._refuse(some, error)
                continue
            if found is not None:
                self.counts.prefix_hits += 1
                self.counts.prefix_tokens += found[1]
            for index, prompt in enumerate(_prompts(some) if requests[0].tiles is None else ()):
                self._keep(
                    prompt, prompts.cache, tuple(None for _ in prompts.cache), (index, 0), prompts.tokens.shape[1]
                )
            for handle in some:
                handle.version = self.counts.weight_version
            self.counts.prompt_tokens += sum(len(request.prompt) for request in requests)
        self._grid = grid

    def _refuse(self, handles: Sequence[Handle], error: BaseException) -> None:
        """Tells rows why they cannot begin, or go on."""
        traceback.print_exception(error)
        # Without frames, which hold arrays: who is told may keep the error.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._collected += [(handle, error) for handle in handles]
        self.counts.refused_rows += len(handles)

    def _lose_grid(self, error: BaseException, joining: Sequence[Handle] = ()) -> None:
        """Lets the grid go, of which a step without memory has left a part, with its rows and those that were joining.

        Kept texts go too: there is more room for those that wait.
        """
        told = {handle for handle, tokens in self._collected if isinstance(tokens, BaseException)}
        rows = dict.fromkeys(handle for handle in (*self._rows, *joining) if handle is not None)
        self._grid, self._rows, self.counts.running = None, [None] * self.size, 0
        self.clear_prefixes()
        self._refuse([handle for handle in rows if handle not in told], error)

    def _keep_row(self, slot: int) -> None:
        """Keeps the text of a row that has ended; its newest token is not in its cache."""
        handle, grid = self._rows[slot], self._grid
        if handle is not None and handle.request.tiles is not None:
            return
        if handle is not None and grid is not None and handle.ids and handle.version == self.counts.weight_version:
            text = [*handle.request.prompt, *handle.ids[:-1]]
            place = divmod(slot, self._group)
            self._keep(text, grid.prompts.cache, grid.slots.cache, place, grid.width + len(handle.ids) - 1)

    def _keep(self, tokens: Sequence[int], prompts: Any, rows: Any, place: tuple[int, int], end: int) -> None:
        """Keeps a text whose last token is before the place `end` of the caches of a prompt and a row."""
        weights = self._weights
        if not weights.stale and self._prefixes.wants(tokens, weights.adapter):  # else the next rows have other ones
            width = bucket(len(tokens))
            try:
                cache = kept_cache(self.engine, prompts, rows, *np.asarray((*place, end), np.int32), width)
            except (jax.errors.JaxRuntimeError, MemoryError):  # without memory for it, it is computed again
                return
            self._prefixes.add(Prefix(np.asarray(tokens, np.int32), weights.adapter, cache, width))
            self.counts.prefix_bytes = self._prefixes.bytes

    def _regroup(self, planned: SlotGrid) -> None:
        """Goes on with the rows of a grid of other slots, which has them by their present ones."""
        assert self._grid is not None
        self._grid, self._steps = regrouped(self.engine, self._grid, planned), 0
        order, self._group = planned.numbers(len(self._rows)).ravel(), planned.row.shape[2]
        self._rows = [None if slot == IDLE else self._rows[slot] for slot in order]
        self._lengths = np.where(order == IDLE, 0, self._lengths[order])
        for slot, handle in enumerate(self._rows):
            if handle is not None:
                handle.slot = slot

    def _begins(self, handle: Handle) -> bool:
        """True where a row can start in its grammar; its handle gets the error where it cannot."""
        try:
            if handle.request.grammar is not None:
                handle.in_grammar = GrammarRow(handle.request.grammar)
        except Exception as error:
            self._collected.append((handle, error))
            return False
        return True

    def _allowed(self, handles: Sequence[Handle | None]) -> np.ndarray:
        """The bits `[B,V/32]` of the tokens with which rows may go on."""
        allowed = everything(self.engine, len(handles))
        for bits, handle in zip(allowed, handles, strict=True):
            if handle is not None and handle.in_grammar is not None:
                bits[:] = handle.in_grammar.bits
        return allowed

    def _dispatch(self) -> bool:
        """Starts a chunk of decode steps; False where no row goes on."""
        engine, guided = self.engine, any(handle is not None and handle.in_grammar for handle in self._rows)
        if guided:  # one step behind tokens that the host has seen; samples are the same without proposals
            engine = dataclasses.replace(engine, speculative_tokens=0)
            if any(h is not None and h.in_grammar and not self._lengths[slot] for slot, h in enumerate(self._rows)):
                self._collect()
        pause_at = self._shrink()
        live = [slot for slot, handle in enumerate(self._rows) if handle is not None]
        if not live or self._grid is None:
            return False
        self._grid = with_allowed(self._grid, self._allowed(self._rows) if guided else None)
        # A row that was prefilled has a token that the host has not seen yet.
        reached = max(1, int(self._lengths[live].max()))
        slots = self.engine.with_room(self._grid.slots, min(reached + 1, self.engine.max_completion_length))
        ahead = 1 if guided else max(1, min(self.engine.chunk, slots.capacity - reached))
        # With others waiting, an eighth of the slots is refilled as soon as it is free.
        if self._waiting:
            pause_at = max(0, len(live) - max(1, self.size // 8))
        params, steps = self._weights.params, (np.int32(ahead), np.int32(pause_at))
        slots = decode_chunk(engine, params, self._grid.prompts, slots, *steps)
        self._grid = self._grid._replace(slots=slots)
        return True

    def _shrink(self) -> int:
        """Goes on in a smaller grid where that is worth it; returns at how few rows it is to be asked again."""
        live = [handle is not None for handle in self._rows]
        if self._waiting or not self._shrinks or self._grid is None or not any(live):
            return 0
        left = max(h.request.limit - self._lengths[slot] for slot, h in enumerate(self._rows) if h is not None)
        size, group, shards = len(self._rows), self._group, 1 if self.mesh is None else row_shards(self.mesh)
        if size // group % shards or not self.engine.worth_shrinking(self._parameters, int(left), size):
            return 0
        lengths = (self._grid.width, self.engine.max_completion_length)
        scheduler = Scheduler(size // group // shards, group, shards, size // shards, self.engine.shrink, lengths)
        by_prompt = np.reshape(live, (shards, -1, group))
        if (planned := scheduler.next(by_prompt)) is None:
            return scheduler.pause_at(by_prompt)
        self._regroup(planned)
        return self._shrink()

    def _collect(self) -> None:
        """Reads what rows have got, when the chunk has ended; rows that have ended leave their slots."""
        assert self._grid is not None
        slots = self._grid.slots
        starts = self._lengths.astype(np.int32)
        # A chunk's tokens, where every speculative one is right, and the one of the prefill.
        most = 1 + self.engine.chunk * (1 + self.engine.speculative_tokens)
        found, total = jax.device_get((newest(slots, starts, most), slots.steps))
        self.counts.decode_steps += int(total) - self._steps
        self._steps = int(total)
        for slot, handle in enumerate(self._rows):
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
                self._rows[slot] = None
                self.counts.finished_rows += 1
            if count or reason is not None:
                self._collected.append((handle, new))
            if handle.in_grammar is not None and reason is None:
                try:
                    handle.in_grammar.consume(new.ids)
                except Exception as error:
                    self._collected.append((handle, error))
                    self._end([slot])


def _prompts(handles: Sequence[Handle]) -> list[Sequence[int]]:
    """The prompts, each once."""
    return list({id(handle.request.prompt): handle.request.prompt for handle in handles}.values())


def _group(handles: Sequence[Handle], size: int) -> int:
    """Rows of each prompt, where all that wait are groups of as many and `size` slots have room for them; else 1."""
    prompts = [id(handle.request.prompt) for handle in handles]
    group = next((number for number, prompt in enumerate(prompts) if prompt != prompts[0]), len(prompts))
    whole = group >= GROUP and len(prompts) <= size and not size % group and not len(prompts) % group
    whole = whole and all(len(_prompts(rows)) == 1 for rows in _pieces(handles, group))
    return group if whole and all(handle.request.grammar is None for handle in handles) else 1


def _pieces(handles: Sequence[Handle], size: int) -> list[list[Handle]]:
    """The rows, `size` at a time."""
    return [list(handles[start : start + size]) for start in range(0, len(handles), size)]


def _batches(handles: Sequence[Handle], begun: Collection[int], group: int) -> Iterator[list[Handle]]:
    """The rows that are prefilled together: those of one prompt, and the others of one bucket, `group` rows of each.

    `begun` are the ids of prompts of which a part is kept, or that have images: each is by itself.

    In powers of two: few programs are compiled, and no row is computed for nothing.
    """
    rows_of, batches = Counter(id(handle.request.prompt) for handle in handles), {}
    for rows in _pieces(handles, group):
        request = rows[0].request
        prompt = id(request.prompt)
        by_prompt = rows_of[prompt] > group or prompt in begun
        kind, most = request.width, PREFILL_ROWS
        if by_prompt:
            kind, most = prompt, 1 if group > 1 else PREFILL_ROWS
        batches.setdefault((by_prompt, kind, most), []).append(rows)
    for (*_, most), batch in batches.items():
        while batch:
            count = min(most, 1 << (len(batch).bit_length() - 1))
            yield [handle for rows in batch[:count] for handle in rows]
            batch = batch[count:]
