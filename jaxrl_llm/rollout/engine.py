"""The sampling engine: prefill once per prompt, then jitted chunks of decode steps for its K completions.

    prefill(params, prompts [B,P])               -> Prompts, Rows    # one pass per prompt, each row's first token
    assign(Prompts, Rows, SlotGrid)              -> Prompts, Slots   # the rows that decode side by side (scheduler.py)
    decode_chunk(params, Prompts, Slots, steps)  -> Slots            # jitted steps, no host in between
    finish(prompts, Rows)                        -> Rollout          # rows [N,T]

The caches of a prompt are computed once and read by its rows in the slot grid; each row owns the cache of its
completion, which grows as the rows do. The mixers of the model make and read caches: here they are pytrees. Decoding
pauses when enough rows have ended: their slots go to rows that wait, or the grid shrinks. Randomness is one uniform per
row and position, from the row's own key: a sample depends neither on its neighbours nor on its slot, nor on which
speculative tokens are computed beside it (speculative.py).

With a `TurnServer` rows have several turns: a row that ends a turn waits for its observation tokens, and goes on behind
them. These are in no mask. Many are read at once, rows that have them alone; few are decoded like others and cost a
step each. Rows that have `Begun` read what they have sampled before in the same way.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import local_range, on_device, row_shards
from jaxrl_llm.models.adapters.lora import copied, has_adapters
from jaxrl_llm.models.cast import copied_to_decode, decoding_params, in_precision
from jaxrl_llm.models.mixers.mixer import DecodeInputs
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.quantize import BYTES, FP8, narrowed
from jaxrl_llm.models.rope import check_length
from jaxrl_llm.rollout.assignment import assign, grow, reassign
from jaxrl_llm.rollout.automata import NO_AUTOMATA, Automata
from jaxrl_llm.rollout.borders import Borders, OnBorder
from jaxrl_llm.rollout.draws import append
from jaxrl_llm.rollout.grammar import Grammar, GrammarRows
from jaxrl_llm.rollout.multi_turn import MIN_TOKENS, TurnServer, TurnTracker, slots_to_read
from jaxrl_llm.rollout.sampling import RowSampling, SamplingParams
from jaxrl_llm.rollout.scheduler import IDLE, Scheduler
from jaxrl_llm.rollout.slots import (
    Begun,
    Prompts,
    Rollout,
    Rows,
    Slots,
    collect,
    ended,
    finish,
    flat,
    insert_observations,
    newest_tokens,
    next_tokens,
    number_states,
    observations_to_come,
    put,
    resumed,
    row_keys,
    set_places,
    status,
    take,
)
from jaxrl_llm.rollout.speculative import prompt_lookup
from jaxrl_llm.rollout.streaming import FinishedRows, OnFinished

READ = 64  # the most observation tokens of a row that are read at once
# Programs of one more grid compile in seconds: a few tenths of a second (on CPUs) in each rollout are worth that.
COMPILE_WORK = 2e9
# XLA's CPU backend adds up products of fewer rows than the first in another order, which depends on how many there are.
# The logits of up to the second number of prompts are computed as those of just as many.
STEADY_ROWS, STEADY_PROMPTS = 64, 8


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """The settings of an engine, which the keys `rollout.*` are.

    chunk: decode steps between two looks by the host, and the first capacity of the row caches. slots: rows that decode
    at once, over all devices; 0 is all. cache_dtype: of the caches, a type or fp8; None is the decoder's. shrink: the
    slot grid is replaced when the rows that are left, with none waiting, fit into this share of it. weights_dtype: of
    the matrices, see `cast.in_precision`; None is the net's. speculative_tokens: tokens of a row that are proposed and
    verified beside its newest one; samples are the same, and right ones come at once. compile_work: multiply-adds that
    a smaller grid must be able to save in a rollout, to be worth compiling. record_experts: keep which experts each
    token went to (see `Rollout.experts`).
    """

    sampling: SamplingParams
    group_size: int
    max_completion_length: int
    chunk: int = 32
    slots: int = 0
    cache_dtype: str | None = None
    shrink: float = 0.5
    weights_dtype: str | None = None
    speculative_tokens: int = 0
    compile_work: float = 0.0
    record_experts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(RolloutSpec):
    """Samples `group_size` completions per prompt from a net; the ids `eos` end a row.

    automata: of stop strings and guided decoding; arguments of the programs, which take no part in what the engine
    equals. grammar: what completions follow; each step then waits for the host.
    """

    net: Net
    eos: tuple[int, ...]
    automata: Automata = dataclasses.field(default=NO_AUTOMATA, compare=False)
    grammar: Grammar | None = dataclasses.field(default=None, compare=False)

    @property
    def decoder(self) -> Net:
        """The net that decodes, with its layers unrolled: a scan copies the caches of all layers several times a step.

        On CPU matrices in fewer bits are scanned: its compiler would convert all of them before the first step.
        """
        net = in_precision(self.net, self.weights_dtype)
        on_cpu = jax.default_backend() == "cpu"
        return net.scanned() if on_cpu and net.config.quantized != "none" else net.unrolled()

    def decoding_params(self, params: Params) -> Params:
        """The policy's parameters as the decoder computes with them: cast, merged and unstacked, on the devices."""
        return decoding_params(on_device(params), self.decoder)

    def policy_copy(self, params: Params) -> Params:
        """A copy that no update donates, of which `decoding_params` makes the same parameters.

        It is in the type that decodes already, unless adapters are merged or matrices quantised before: then what is
        trained is copied as it is, and what is frozen shared.
        """
        if has_adapters(params) or self.decoder.config.quantized != "none":
            return copied(params)
        return copied_to_decode(params, self.decoder)

    def generate(
        self,
        params: Params,
        prompts,
        segments,
        key,
        first_row: int = 0,
        turn_server: TurnServer | None = None,
        limits=None,
        on_finished: OnFinished | None = None,
        images: Images | None = None,
        begun: Begun | None = None,
        on_border: OnBorder | None = None,
    ) -> Rollout:
        """Completions of prompts `[B,P]`, padded on the left, segments `[B,P]` 0 on padding; `images` are the prompts'.

        Row i draws from `fold_in(key, first_row + i)`. A row whose observation tokens leave no room to sample one is
        truncated. `limits` `[N]` are the most tokens of each row, where that is less than max_completion_length.
        `on_finished` is called with every row of this process, from 0, and its tokens, soon after it ends, while others
        are decoded; not with a `turn_server`. Rows that have `begun` go on, by their own keys, and keep the log-probs
        of what they have (those that had ended are not all reported as finished); not together with a `turn_server`, a
        grammar, or experts that are recorded. `on_border` is asked before each chunk, by which parameters rows go on,
        and whether they do (not with a `turn_server`, whose answers come by the clock): what was computed before stays,
        keys and values too. Raises ConfigError for rows that the model's rotary positions do not allow to be sampled.
        """
        check_length(self.net.config.rope, prompts.shape[1] + self.max_completion_length)
        shards, longest, count = _shards(), self.max_completion_length, prompts.shape[0] * self.group_size
        params = self.decoding_params(params)
        parameters = sum(x.size for x in jax.tree.leaves(params))
        automata, in_grammar = self.automata, None
        if self.grammar is not None:
            self._check_grammar(turn_server)
            in_grammar = GrammarRows(self.grammar, count)
            automata = automata._replace(guide=in_grammar.start())
        if begun is None:
            keys = row_keys(key, np.uint32(first_row), count)
        else:
            keys = jax.random.wrap_key_data(jnp.asarray(begun.keys), impl=jax.random.key_impl(key))
        all_prompts, rows = prefill(self, params, prompts, segments, keys, automata, images=images)
        if begun is not None:
            rows = resumed(rows, begun, automata)
        if limits is not None:
            rows = rows._replace(limit=jnp.minimum(rows.limit, np.asarray(limits).reshape(rows.limit.shape)))
        scheduler = self._scheduler(prompts.shape, begun, parameters)
        first_own = local_range(prompts).start * self.group_size
        turns = None if turn_server is None else TurnTracker(turn_server, count, first_own, longest)
        finished_rows = FinishedRows(on_finished if turns is None else None, count, first_own)
        borders = Borders(on_border, count, begun)
        grid, executed = scheduler.grid, 0
        grid_prompts, slots = assign(self.decoder, all_prompts, rows, keys, grid, min(self.chunk, longest))
        while True:
            # The only wait for the devices: the host plans on the numbers of the chunk before.
            lengths, has_ended, finished, to_come, steps = (np.asarray(x) for x in status(slots))
            live = busy = (grid.row != IDLE) & ~has_ended.reshape(grid.row.shape)
            borders.look(grid, lengths, finished)
            if turns is not None:
                observations = turns.exchange(grid, slots.rows.tokens, lengths, finished, wait=not live.any())
                if observations is not None:
                    slots = insert_observations(slots, *observations)
                    continue
                busy = live | turns.waiting_slots(grid)
            # What a row has sampled before is never decoded: that would draw, and move the states of automata.
            least = 1 if turns is None else MIN_TOKENS
            if (reading := slots_to_read(to_come.reshape(shards, -1), least)) is not None:
                width = min(READ, longest)
                slots = self.with_room(slots, int((lengths + np.minimum(to_come, width)).max()))
                slots = read_observations(self, params, grid_prompts, slots, reading, width)
                executed += reading.size * width
                continue
            collected = finished_rows.collect(grid, slots.rows.tokens, lengths, has_ended)
            left = longest - int(lengths.reshape(busy.shape)[busy].max()) if busy.any() else 0
            shrinks = self.worth_shrinking(parameters, left, grid.slots)
            following = scheduler.next(busy) if scheduler.waiting.size or shrinks else None
            if following is not None:
                executed += int(steps) * grid.slots
                rows = collect(rows, slots, grid, shards)
                sources = following.slots_in(grid)
                grid_prompts, slots = reassign(self.decoder, all_prompts, rows, keys, slots, following, sources)
                grid = following
            elif live.any():
                border = borders.ask()
                if border.ends:
                    finished_rows.report(collected)
                    break
                if border.params is not None:
                    params = self.decoding_params(border.params)
                reached = int(lengths.reshape(live.shape)[live].max())
                slots = self.with_room(slots, reached + 1)
                ahead = min(self.chunk, slots.capacity - reached)
                # For what is left of the last chunk a smaller grid saves less than its program costs to compile.
                pauses = turns is None and ((shrinks and longest - reached >= self.chunk) or scheduler.waiting.size)
                pause_at = scheduler.pause_at(live) if pauses else 0
                if in_grammar is not None:
                    ahead, guide = 1, in_grammar.next(grid, newest_tokens(slots), lengths, live)
                    grid_prompts = grid_prompts._replace(automata=automata._replace(guide=guide))
                    slots = number_states(slots)
                slots = decode_chunk(self, params, grid_prompts, slots, np.int32(ahead), np.int32(pause_at))
            finished_rows.report(collected)
            if following is None and not busy.any():
                break
        executed += int(steps) * grid.slots
        rows = collect(rows, slots, grid, shards)
        if on_border is not None and begun is not None:  # where it has ended early, rows without a slot are not read
            rows = rows._replace(length=jnp.maximum(rows.length, rows.known))
        return finish(prompts, segments, rows, np.float32(executed), all_prompts.experts)

    def _scheduler(self, shape: tuple[int, int], begun: Begun | None, parameters: int) -> Scheduler:
        """The scheduler of the rows of prompts `[B,P]`, in whose grid those that have ended before have no slot."""
        (prompts, width), shards, longest = shape, _shards(), self.max_completion_length
        local = prompts // shards
        slots = self.shard_slots(shards, local * self.group_size)
        scheduler = Scheduler(local, self.group_size, shards, slots, self.shrink, (width, longest))
        if begun is not None:
            over = (begun.finished | (begun.lengths >= longest)).reshape(shards, -1)
            shrinks = self.worth_shrinking(parameters, longest, scheduler.grid.slots)
            while shrinks or scheduler.waiting.size:
                row = scheduler.grid.row
                if scheduler.next((row != IDLE) & ~over[np.arange(shards)[:, None, None], row]) is None:
                    break
        return scheduler

    def _check_grammar(self, turn_server: TurnServer | None) -> None:
        """Raises ConfigError for what cannot be together with a grammar, which is followed a token at a time."""
        others = {
            "rollout.speculative_tokens": self.speculative_tokens,
            "an environment": turn_server is not None,
            "a run of several processes": jax.process_count() > 1,
        }
        for name, value in others.items():
            if value:
                raise ConfigError(f"a grammar (structured_grammar) is not followed with {name}: leave one of them out")

    def shard_slots(self, shards: int, rows: int) -> int:
        """The slots in each of so many shards of `rows` rows: an equal part, and one at least."""
        return min(max(self.slots // shards, 1), rows) if self.slots else rows

    def worth_shrinking(self, parameters: int, left: int, slots: int) -> bool:
        """True where a smaller grid may save more than its programs cost while rows decode `left` tokens more."""
        return left * slots * (1 - self.shrink) * parameters > self.compile_work

    def with_room(self, slots: Slots, needed: int) -> Slots:
        """The slots, whose row caches are doubled until they have room for `needed` tokens."""
        while slots.capacity < needed:
            slots = grow(self.decoder, slots, min(2 * slots.capacity, self.max_completion_length))
        return slots


def _shards() -> int:
    """The shards of rows on the mesh that is set."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else row_shards(mesh)


@functools.partial(jax.jit, static_argnames=("engine", "steady"))
def prefill(
    engine: Engine,
    params,
    prompts,
    segments,
    keys,
    automata: Automata = NO_AUTOMATA,
    sampling: RowSampling | None = None,
    images: Images | None = None,
    steady: bool = False,
) -> tuple[Prompts, Rows]:
    """The prompts' caches, and all rows `[B,K]` with their first token, from one forward pass per prompt.

    `sampling` are settings of each row, in the place of the engine's. `steady` gives each of up to STEADY_PROMPTS
    prompts the same bits alone and beside others of its width: a CPU computes copies of the first with few short ones.
    """
    model, (count, width) = engine.decoder.bind(params), prompts.shape
    steady = steady and jax.default_backend() == "cpu" and images is None
    copies = max(0, -(-STEADY_ROWS // width) - count) if steady else 0
    hidden, cache, experts = model.prefill(_with_copies(prompts, copies), _with_copies(segments, copies), images)
    if copies:
        hidden, experts = jax.tree.map(lambda x: x[:count], (hidden, experts))
        cache = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, count, axis=engine.decoder.prompt_axis), cache)
    alike = max(0, STEADY_PROMPTS - count) if steady else 0
    logits = model.logits(_with_copies(hidden[:, -1], alike))[:count]
    if engine.cache_dtype is not None:
        dtype = engine.cache_dtype
        if dtype == "fp8":  # TPUs would write a cache of bytes anew, as fp8, to read it
            dtype = FP8 if jax.default_backend() == "tpu" else BYTES["fp8"][0]
        dtype = jnp.dtype(dtype)
        cache = jax.tree.map(lambda x: narrowed(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)
    made, rows = first_tokens(engine, cache, prompts, segments, logits, keys, sampling, automata)
    return made._replace(experts=_recorded(engine, experts)), rows


def _with_copies(x, count: int) -> jax.Array:
    """`x` `[B, ...]` with so many copies of the first row behind it."""
    return jnp.concatenate([x, jnp.repeat(x[:1], count, axis=0)]) if count else x


def _recorded(engine: Engine, experts) -> jax.Array | None:
    """Experts in the least bits that hold their numbers, None where the engine does not record them."""
    if not engine.record_experts or experts is None:
        return None
    return experts.astype(jnp.int8 if engine.net.config.routed_experts <= 127 else jnp.int16)


def first_tokens(
    engine: Engine, cache, prompts, segments, logits, keys, sampling: RowSampling | None,
    automata: Automata = NO_AUTOMATA,
) -> tuple[Prompts, Rows]:  # fmt: skip
    """The result of `prefill`, of the prompts' caches and the logits `[B,V]` behind them."""
    shape = (prompts.shape[0], engine.group_size)
    logits = jnp.repeat(logits, engine.group_size, axis=0).reshape(*shape, 1, -1)
    tokens_shape, c = (*shape, engine.max_completion_length), engine.net.config
    layers, experts = sum(kind.experts for kind in c.layer_configs), None
    if layers:  # -1 for tokens of which nothing is recorded yet
        experts = _recorded(engine, jnp.full((*tokens_shape, layers, c.experts_per_token), -1))
    rows = Rows(
        tokens=jnp.zeros(tokens_shape, jnp.int32),
        logps=jnp.zeros(tokens_shape, jnp.float32),
        observed=jnp.zeros(tokens_shape, bool),
        length=jnp.zeros(shape, jnp.int32),
        known=jnp.zeros(shape, jnp.int32),
        limit=jnp.full(shape, engine.max_completion_length, jnp.int32),
        finished=jnp.zeros(shape, bool),
        stop_state=None if automata.stop is None else jnp.zeros(shape, jnp.int32),
        guide_state=None if automata.guide is None else jnp.zeros(shape, jnp.int32),
        sampling=sampling,
        experts=experts,
    )
    made, no_proposals = Prompts(cache, prompts, segments != 0, automata), jnp.zeros((*shape, 0), jnp.int32)
    return made, append(engine.sampling, engine.eos, made, rows, keys.reshape(shape), logits, no_proposals, 0)


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="slots")
def decode_chunk(engine: Engine, params, prompts: Prompts, slots: Slots, steps, pause_at=0) -> Slots:
    """`steps` decode steps, or fewer: until no shard has more than `pause_at` rows that go on."""
    model = engine.decoder.bind(params)
    start = slots.steps

    def step(slots: Slots) -> Slots:
        rows = slots.rows
        # The newest token, which is sampled but not yet in the cache, and W - 1 more: observed, or proposed.
        places, tokens = next_tokens(rows, 1 + engine.speculative_tokens)
        if engine.speculative_tokens:
            proposed = prompt_lookup(prompts.tokens, prompts.mask, rows.tokens, rows.length, engine.speculative_tokens)
            is_held = places < jnp.maximum(rows.known, rows.length)[..., None]
            tokens = jnp.where(is_held, tokens, jnp.concatenate([tokens[..., :1], proposed], axis=-1))
        positions, by_prompt = prompts.mask.sum(-1)[:, None, None] + places, (len(rows.length), -1)
        inputs = DecodeInputs(positions.reshape(by_prompt), prompts.mask, rows.length - 1)
        hidden, cache, experts = model.decode(tokens.reshape(by_prompt), inputs, prompts.cache, slots.cache)
        rows = _with_experts(engine, rows, places, experts)
        logits = model.logits(hidden).reshape(*tokens.shape, -1)
        rows = append(engine.sampling, engine.eos, prompts, rows, slots.keys, logits, tokens[..., 1:], slots.capacity)
        return Slots(cache, rows, slots.keys, slots.steps + 1, slots.capacity)

    def more(slots: Slots):
        live = ~ended(slots.rows)
        go_on = (slots.steps < start + steps) & (live.reshape(_shards(), -1).sum(-1).max() > pause_at)
        if not engine.speculative_tokens:
            return go_on
        # Rows whose proposals are right may fill their caches before the steps are done.
        return go_on & (jnp.where(live, slots.rows.length, 0).max() <= slots.capacity)

    return jax.lax.while_loop(more, step, slots)


def _with_experts(engine: Engine, rows: Rows, places, experts) -> Rows:
    """The rows with the experts `[G,R*W,L,k]` of the tokens at places `[G,R,W]`, where the engine records them.

    Those of a wrong proposal are written over once the token that is there in its stead is computed.
    """
    if (found := _recorded(engine, experts)) is None:
        return rows
    found = found.reshape(*places.shape, *found.shape[2:])
    return rows._replace(experts=set_places(rows.experts, places, found))


@functools.partial(jax.jit, static_argnames=("engine", "width"), donate_argnames="slots")
def read_observations(engine: Engine, params, prompts: Prompts, slots: Slots, index, width: int) -> Slots:
    """The slots after up to `width` observation tokens in each of those at `index` `[shards, m]`; past the end: none.

    The newest token of a row enters its cache with the next one, so the last observed one is decoded like others.
    """
    shards, axis = len(index), engine.decoder.prompt_axis
    g, r = slots.rows.length.shape
    # One row of each of m prompts: slots that read, and whose prompts are taken along, are few.
    index_in = jnp.minimum(index, g * r // shards - 1)
    rows = jax.tree.map(lambda x: take(flat(x, 0), index_in, 0), slots.rows)
    prompt = jax.tree.map(lambda x: take(x, index_in // r, axis), prompts.cache)
    cache = jax.tree.map(lambda x: jnp.expand_dims(take(flat(x, axis), index_in, axis), axis + 1), slots.cache)
    mask, (places, tokens) = take(prompts.mask, index_in // r, 0), next_tokens(rows, width)
    inputs = DecodeInputs(mask.sum(-1)[:, None] + places, mask, places[:, :1])
    _, cache, experts = engine.decoder.bind(params).decode(tokens, inputs, prompt, cache)
    everyone = slots.rows
    if rows.experts is not None:
        read = _with_experts(engine, jax.tree.map(lambda x: x[:, None], rows), places[:, None], experts).experts
        everyone = everyone._replace(experts=put(everyone.experts, index, read, 0))
    cache = jax.tree.map(lambda everyone, values: put(everyone, index, values, axis), slots.cache, cache)
    length = (rows.length + jnp.minimum(observations_to_come(rows), width))[:, None]
    length = put(slots.rows.length, index, length, 0)
    return slots.replace(cache=cache, rows=everyone._replace(length=length))
