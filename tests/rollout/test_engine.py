"""The engine: what a rollout holds, that it samples the model it is given, and that a row depends on itself alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout import assignment, draws
from jaxrl_llm.rollout import engine as engine_module
from jaxrl_llm.rollout.engine import Engine, prefill
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import Scheduler
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.rollout.speculative import prompt_lookup
from tests.models.decoding import padded, trainer_logps

VOCAB = 29
CONFIG = ModelConfig(
    vocab_size=VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, qk_norm="head", init_scale=0.4
)
NET = Net(CONFIG)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
WIDTH = 7
EOS = (3, 11)
ENGINE = Engine(SamplingParams(), net=NET, group_size=4, max_completion_length=12, eos=EOS, chunk=12)


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


def generate(engine, params, prompts=PROMPTS, key=0, first_row=0, width=WIDTH):
    """The rollout as numpy arrays, and the width of its prompts."""
    tokens, segments = padded([[5] * width, *prompts], "left")  # the first row only sets the width
    rollout = engine.generate(params, tokens[1:], segments[1:], jax.random.key(key), first_row)
    return jax.tree.map(np.asarray, rollout), width


def completions(engine, params, *args, **kwargs):
    """The sampled tokens of each row."""
    rollout, width = generate(engine, params, *args, **kwargs)
    return [row[width:][:length].tolist() for row, length in zip(rollout.tokens, rollout.lengths, strict=True)]


def test_the_layout_of_a_rollout(params):
    rollout, width = generate(ENGINE, params)
    tokens, segments = padded(PROMPTS, "left")
    np.testing.assert_array_equal(rollout.tokens[:, :width], np.repeat(tokens, 4, axis=0))
    np.testing.assert_array_equal(rollout.segments[:, :width], np.repeat(segments, 4, axis=0))
    sampled = np.arange(12) < rollout.lengths[:, None]
    np.testing.assert_array_equal(rollout.segments[:, width:], sampled)
    np.testing.assert_array_equal(rollout.mask, np.concatenate([np.zeros((12, width)), sampled], axis=1))
    np.testing.assert_array_equal(rollout.tokens[:, width:] * ~sampled, 0)
    np.testing.assert_array_equal(rollout.sample_logps != 0, rollout.mask > 0)
    assert rollout.mask.dtype == rollout.sample_logps.dtype == np.float32
    assert 1 <= rollout.lengths.min() < rollout.lengths.max() == 12  # the rows of this test end at different places


@pytest.mark.slow  # in which order numbers are added up is a matter of the machine's CPU too
def test_a_steady_prefill_does_not_depend_on_the_prompts_beside():
    """To the bit, for a net so wide that the CPU adds up products of few rows otherwise, and for short prompts."""
    net = Net(dataclasses.replace(CONFIG, layers=1, width=640, ffn=640, heads=8, head_dim=64))
    engine = Engine(SamplingParams(), net=net, group_size=2, max_completion_length=1, eos=())
    tokens = np.random.default_rng(0).integers(1, VOCAB, (8, 32)).astype(np.int32)
    segments, keys = np.ones_like(tokens), jax.random.split(jax.random.key(0), 16)

    def of(count, steady):
        rows = slice(0, count)
        return prefill(engine, params, tokens[rows], segments[rows], keys[: 2 * count], steady=steady)

    params = jax.jit(net.init)(jax.random.key(1))
    (whole, whole_rows), prompts = of(8, True), engine.decoder.prompt_axis
    for count in (1, 2, 3):
        few, rows = of(count, True)
        np.testing.assert_array_equal(rows.logps, whole_rows.logps[:count])
        first = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=count, axis=prompts)
        jax.tree.map(np.testing.assert_array_equal, few.cache, jax.tree.map(first, whole.cache))
    np.testing.assert_allclose(of(1, False)[1].logps, whole_rows.logps[:1], rtol=1e-4)  # the same but for rounding


def test_a_row_ends_with_its_first_end_of_text(params):
    """The row without end-of-text ids, truncated after the first of them: it is in the mask, nothing follows."""
    endless = completions(dataclasses.replace(ENGINE, eos=()), params, key=1)
    rollout, width = generate(ENGINE, params, key=1)
    assert set(EOS) <= {token for row in endless for token in row}  # both ids are met
    for number, row in enumerate(endless):
        assert len(row) == 12
        ends = [place for place, token in enumerate(row) if token in EOS]
        length = ends[0] + 1 if ends else 12
        assert rollout.lengths[number] == length == rollout.mask[number].sum()
        assert rollout.finished[number] == bool(ends)
        assert rollout.tokens[number, width:][:length].tolist() == row[:length]
    assert 0 < rollout.finished.sum() < len(endless)


@pytest.mark.parametrize("max_completion_length", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_an_immediate_end_is_one_token(params, max_completion_length):
    engine = dataclasses.replace(ENGINE, eos=tuple(range(VOCAB)), max_completion_length=max_completion_length)
    rollout, width = generate(engine, params)
    assert (rollout.lengths == 1).all() and rollout.finished.all()
    assert (rollout.mask[:, width] == 1).all() and (rollout.mask.sum(1) == 1).all()


def test_a_truncated_row_is_not_finished(params):
    rollout, width = generate(dataclasses.replace(ENGINE, eos=()), params)
    assert (rollout.lengths == 12).all() and not rollout.finished.any()
    assert rollout.tokens.shape == (12, width + 12)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        pytest.param(SamplingParams(0.6), marks=pytest.mark.slow),
        SamplingParams(1.4, top_k=9, top_p=0.7, min_p=0.1),
    ],
    ids=str,
)
def test_sample_logps_are_what_the_trainer_computes(params, sampling):
    """One number from two programs: cached steps of the engine, a whole forward pass of the policy."""
    rollout, width = generate(dataclasses.replace(ENGINE, sampling=sampling), params)
    inputs = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=width)
    logps, _ = trainer_logps(NET, params, inputs, sampling.temperature)
    np.testing.assert_allclose(rollout.sample_logps, logps * rollout.mask, atol=1e-4)


@pytest.mark.slow
def test_filters_act_while_decoding(params):
    """With top_k = 1 every sample is the greedy one."""
    found = [
        completions(dataclasses.replace(ENGINE, sampling=sampling), params)
        for sampling in (SamplingParams(1.3, top_k=1), SamplingParams(0.0))
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_rows_of_a_group_differ(params):
    rows = completions(dataclasses.replace(ENGINE, group_size=8), params)
    for start in range(0, len(rows), 8):
        assert len(set(map(tuple, rows[start : start + 8]))) == 8


def test_keys_and_row_numbers_choose_the_samples(params):
    first = completions(ENGINE, params, key=0)
    assert completions(ENGINE, params, key=0) == first
    for other in (completions(ENGINE, params, key=1), completions(ENGINE, params, key=0, first_row=12)):
        assert sum(a == b for a, b in zip(first, other, strict=True)) <= 1


def test_a_row_does_not_depend_on_its_neighbours(params):
    rows = completions(ENGINE, params)
    others = [[8, 8, 1], PROMPTS[1], [2]]
    assert completions(ENGINE, params, others)[4:8] == rows[4:8]
    assert completions(ENGINE, params, others)[:4] != rows[:4]


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_a_row_does_not_depend_on_the_batch(params, number):
    """A prompt alone, its rows numbered as in the batch."""
    rows = completions(ENGINE, params)[4 * number : 4 * number + 4]
    assert completions(ENGINE, params, [PROMPTS[number]], first_row=4 * number) == rows


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_order_of_prompts(params):
    """Rows are numbered by their place: a moved prompt, its numbers with it, gives the same rows."""
    rows = completions(ENGINE, params)
    turned = [PROMPTS[2], PROMPTS[0], PROMPTS[1]]
    assert completions(ENGINE, params, turned, first_row=8)[:4] == rows[8:]
    assert completions(ENGINE, params, turned, first_row=2**32 - 4)[4:] == rows[:8]  # numbers count modulo 2^32


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_group_size(params):
    rows = completions(ENGINE, params, [PROMPTS[0]])
    assert completions(dataclasses.replace(ENGINE, group_size=2), params, [PROMPTS[0]]) == rows[:2]


@pytest.mark.slow
def test_a_row_does_not_depend_on_padding(params):
    assert completions(ENGINE, params, width=16) == completions(ENGINE, params)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 100])
def test_a_row_does_not_depend_on_the_chunk(params, chunk):
    rollout, _ = generate(dataclasses.replace(ENGINE, chunk=chunk), params)
    expected, _ = generate(ENGINE, params)
    np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    np.testing.assert_array_equal(rollout.lengths, expected.lengths)
    np.testing.assert_allclose(rollout.sample_logps, expected.sample_logps, atol=1e-5)


def test_row_numbers_beyond_the_range_of_int32(params):
    start = 2**31 - 2
    rows = completions(ENGINE, params, [PROMPTS[0]] * 3, first_row=start)
    assert len(set(map(tuple, rows))) == 12
    assert completions(ENGINE, params, PROMPTS[:1], first_row=start + 4) == rows[4:8]


@functools.partial(jax.jit, static_argnums=0)
def next_greedy(net, params, tokens, segments, place):
    return net.bind(params)(tokens, segments)[:, place].argmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "tied"), [(False, False), (True, True)], ids=["unrolled", "scanned and tied"])
def test_greedy_equals_repeated_forward_passes(monkeypatch, scanned, tied):
    """24 tokens, the row cache growing from 10 to 24, against a forward pass of the whole row for every token."""
    net = Net(dataclasses.replace(CONFIG, tie_embeddings=tied, attention_bias=scanned, layers=3))
    monkeypatch.setattr(Engine, "decoder", property(lambda self: self.net if scanned else self.net.unrolled()))
    params = jax.jit(net.init)(jax.random.key(2))
    engine = Engine(SamplingParams(temperature=0.0), net=net, group_size=2, max_completion_length=24, eos=(), chunk=10)
    rollout, width = generate(engine, params)
    tokens, segments = padded(PROMPTS, "left")
    tokens, segments = (np.pad(x, ((0, 0), (0, 24))) for x in (tokens, segments))
    for place in range(width, width + 24):
        tokens[:, place] = next_greedy(net, params, tokens, segments, place - 1)
        segments[:, place] = 1
    np.testing.assert_array_equal(rollout.tokens, np.repeat(tokens, 2, axis=0))
    assert len(np.unique(tokens[:, width:])) > 3  # not one token repeated, which a broken cache could give too


def test_the_decoder_is_unrolled_on_cpu():
    assert not ENGINE.decoder.config.scan_layers
    assert NET.config.scan_layers


def counted(monkeypatch) -> list[int]:
    """A list that grows by one with every token the engine samples for its rows."""
    calls: list[int] = []
    real = draws.sample

    def sample(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return real(*arguments)

    monkeypatch.setattr(draws, "sample", sample)
    return calls


def test_decoding_stops_when_every_row_has_ended(params, monkeypatch):
    steps = counted(monkeypatch)
    engine = dataclasses.replace(ENGINE, max_completion_length=100, eos=tuple(range(0, VOCAB, 3)), chunk=100)
    rollout, _ = generate(engine, params)
    jax.effects_barrier()
    assert rollout.finished.all()
    assert len(steps) == rollout.lengths.max() < 100


def test_the_host_stops_between_chunks(params, monkeypatch):
    """Rows that have ended after the first chunk: the second one is never started."""
    chunks = []
    real = engine_module.decode_chunk

    def decode_chunk(engine, params, prompts, slots, steps, pause_at):
        chunks.append((int(steps), slots.capacity))
        return real(engine, params, prompts, slots, steps, pause_at)

    monkeypatch.setattr(engine_module, "decode_chunk", decode_chunk)
    generate(dataclasses.replace(ENGINE, eos=tuple(range(VOCAB))), params)
    assert chunks == []
    generate(dataclasses.replace(ENGINE, eos=(), chunk=3), params)
    assert chunks == [(2, 3), (3, 6), (3, 12), (3, 12)]  # decode steps (the first token is the prefill's), capacity


@pytest.mark.parametrize(
    ("setting", "useful"),
    [
        ({"slots": 6, "chunk": 4}, 0.5),
        pytest.param({"slots": 6, "chunk": 2}, 0.75, marks=pytest.mark.slow),
        pytest.param({"slots": 3, "chunk": 1}, 0.95, marks=pytest.mark.slow),
        pytest.param({"chunk": 1}, 0.8, marks=pytest.mark.slow),
        pytest.param({"chunk": 1, "shrink": 0.9}, 0.95, marks=pytest.mark.slow),
        pytest.param({"chunk": 12}, 0.5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_slot(params, setting, useful):
    """Few slots, in which rows wait and replace each other; a grid that shrinks; and one that does not."""
    rollout, _ = generate(dataclasses.replace(ENGINE, **setting), params)
    expected, _ = generate(ENGINE, params)
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(rollout.sample_logps, expected.sample_logps, atol=1e-5)
    assert useful < (rollout.lengths - 1).sum() / rollout.steps.sum() <= 1


@pytest.mark.parametrize(
    ("slots", "shards", "found"), [(0, 4, 6), (8, 4, 2), (9, 4, 2), (3, 4, 1), (1, 1, 1), (100, 4, 6)]
)
def test_slots_are_those_of_all_shards(slots, shards, found):
    """0 is one for each of the 6 rows of a shard; fewer slots than shards are one each, and not all."""
    assert dataclasses.replace(ENGINE, slots=slots).shard_slots(shards, 6) == found


@pytest.mark.slow
def test_a_grid_that_saves_little_is_not_compiled(params, monkeypatch):
    """All rows stay in the first grid while what another one could save is less than `compile_work`; samples do too."""
    shapes, real = set(), engine_module.decode_chunk

    def decode_chunk(engine, params, prompts, slots, steps, pause_at):
        shapes.add(slots.rows.length.shape)
        return real(engine, params, prompts, slots, steps, pause_at)

    monkeypatch.setattr(engine_module, "decode_chunk", decode_chunk)
    shrinking, _ = generate(dataclasses.replace(ENGINE, chunk=1), params)
    assert len(shapes) > 1
    shapes.clear()
    still, _ = generate(dataclasses.replace(ENGINE, chunk=1, compile_work=1e12), params)
    assert len(shapes) == 1
    np.testing.assert_array_equal(still.tokens, shrinking.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [{"speculative_tokens": 2, "slots": 6, "chunk": 2}, {"speculative_tokens": 5, "chunk": 3}], ids=str
)
def test_speculation_changes_no_sample(params, setting):
    found, _ = generate(dataclasses.replace(ENGINE, **setting), params)
    expected, _ = generate(dataclasses.replace(ENGINE, **setting | {"speculative_tokens": 0}), params)
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)


def test_right_proposals_save_steps(params):
    """A row needs as many steps as its text has, besides those that follow a right proposal; the slowest counts."""
    engine = dataclasses.replace(
        ENGINE,
        speculative_tokens=3,
        sampling=SamplingParams(temperature=0.0),
        max_completion_length=60,
        eos=(),
        chunk=60,
        group_size=1,
    )
    rollout, width = generate(engine, params, [PROMPTS[2], PROMPTS[2][::-1]])

    def steps(text) -> int:
        said, count = width + 1, 0  # the first token is the prefill's
        while said < len(text):
            rows, real = jnp.asarray(text[None, None, width:]), np.ones((1, width), bool)
            proposed = prompt_lookup(text[None, :width], real, rows, jnp.asarray([[said - width]]), 3)[0, 0]
            right = np.append(text[said : said + 3] == proposed[: len(text) - said], False)
            said, count = said + 1 + int(np.argmin(right)), count + 1
        return count

    assert rollout.steps[0] == max(map(steps, rollout.tokens)) < 55


@pytest.mark.slow
def test_a_group_of_one_with_few_slots(params):
    one = dataclasses.replace(ENGINE, group_size=1)
    assert completions(dataclasses.replace(one, slots=2, chunk=2), params) == completions(one, params)


@pytest.mark.parametrize(
    "setting", [{"slots": 6, "chunk": 4}, pytest.param({"chunk": 3}, marks=pytest.mark.slow)], ids=str
)
def test_rows_are_streamed_when_they_end(params, setting, monkeypatch):
    """Each once, with its tokens; those that end early before the last decode steps begin."""
    events = []
    real = engine_module.decode_chunk
    monkeypatch.setattr(engine_module, "decode_chunk", lambda *args: events.append(None) or real(*args))
    engine = dataclasses.replace(ENGINE, **setting)
    tokens, segments = padded(PROMPTS, "left")
    rollout = engine.generate(params, tokens, segments, jax.random.key(0), on_finished=lambda *row: events.append(row))
    streamed = dict(event for event in events if event is not None)
    assert len(streamed) == len(events) - events.count(None) == 12
    rows = zip(np.asarray(rollout.tokens), np.asarray(rollout.lengths), strict=True)
    assert [streamed[row] for row in range(12)] == [row[WIDTH:][:length].tolist() for row, length in rows]
    last = len(events) - 1 - events[::-1].index(None)
    assert 4 <= last - events.count(None) + 1 < 12


def test_a_prompt_is_stored_once(params):
    """B x P keys and values for the prompts, whatever K is; the row caches hold completions alone."""
    tokens, segments = (jnp.asarray(x) for x in padded(PROMPTS, "left"))
    engine = dataclasses.replace(ENGINE, group_size=64)
    grid = Scheduler(3, 64, 1, 192).grid

    def start(params):
        keys = row_keys(jax.random.key(0), np.uint32(0), 192)
        bank, rows = engine_module.prefill(engine, params, tokens, segments, keys)
        return assignment.assign(engine.decoder, bank, rows, keys, grid, 4)

    grid_prompts, slots = jax.eval_shape(start, params)
    assert {x.shape for x in jax.tree.leaves(grid_prompts.cache)} == {(3, 2, 7, 8)}  # B, J, P, d
    assert [x.shape for x in slots.cache[0]] == [(3, 64, 2, 8, 4), (3, 64, 2, 4, 8)]  # keys J, d, S; values J, S, d
    slots = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), slots.replace(keys=None))
    grown = assignment.grow(engine.decoder, slots, 9)
    assert [x.shape for x in grown.cache[1]] == [(3, 64, 2, 8, 9), (3, 64, 2, 9, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 6], ids=["all rows", "some at once"])
def test_row_caches_are_replaced_a_layer_at_a_time(slots, monkeypatch):
    """While caches grow, or rows move, those of one layer are held twice: never all layers' of both sizes."""
    layers = 3
    net = Net(dataclasses.replace(CONFIG, layers=layers))
    params = jax.jit(net.init)(jax.random.key(0))
    real, ratios, changes = assignment.replace_caches, [], []

    def replace_caches(caches, replace):
        old, made, totals = jax.tree.leaves([cache for _, cache in caches]), [], []

        def recorded(mixer, cache):
            made.extend(jax.tree.leaves(replace(mixer, cache)))
            totals.append(sum(x.nbytes for x in [*made, *old] if not x.is_deleted()))
            return jax.tree.unflatten(jax.tree.structure(cache), made[-2:])

        found = real(caches, recorded)
        before, after = (sum(x.nbytes for x in arrays) for arrays in (old, made))
        assert len(totals) == layers and all(x.is_deleted() for x in old)
        changes.append(after / before)
        ratios.append(max(totals) / max(before, after))
        return found

    monkeypatch.setattr(assignment, "replace_caches", replace_caches)
    engine = dataclasses.replace(ENGINE, net=net, slots=slots, max_completion_length=24, chunk=3)
    found, _ = generate(engine, params)
    assert set(changes) >= ({2.0, 1.0} if slots else {2.0, 0.5})  # grown; moved to as many slots, or to half of them
    assert max(ratios) <= 1 + 1 / layers
    monkeypatch.undo()
    expected, _ = generate(dataclasses.replace(ENGINE, net=net, max_completion_length=24, chunk=24, shrink=0.0), params)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)


@pytest.mark.slow
def test_caches_in_another_type(params):
    """bfloat16 keys and values under a float32 network: half the memory, log-probs close to the policy's."""
    rollout, width = generate(dataclasses.replace(ENGINE, cache_dtype="bfloat16"), params)
    tokens, segments = jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments)
    logps, _ = trainer_logps(NET, params, Inputs(tokens, segments, prompt_width=width))
    error = np.abs(rollout.sample_logps - logps * rollout.mask).max()
    assert 1e-4 < error < 0.2


@pytest.mark.slow
def test_bfloat16_decoding_stays_close(params):
    """Caches and products in bfloat16, log-probs still float32 and those of the policy to bfloat16's rounding."""
    net = Net(dataclasses.replace(CONFIG, dtype="bfloat16"))
    rollout, width = generate(dataclasses.replace(ENGINE, net=net), params)
    tokens, segments = jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments)
    logps, _ = trainer_logps(NET, params, Inputs(tokens, segments, prompt_width=width))
    assert rollout.sample_logps.dtype == np.float32
    assert np.abs(rollout.sample_logps - logps * rollout.mask).max() < 0.3


ON_A_MESH = """
import dataclasses, jax, numpy as np
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.distributed.sharding import make_mesh, rows_to_global, shardings

config = ModelConfig(vocab_size=300, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32, init_scale=0.4)
rng = np.random.default_rng(0)
prompts, segments = rng.integers(0, 300, (4, 6)).astype(np.int32), np.ones((4, 6), np.int32)
segments[1, :3] = 0
mesh, key = make_mesh(2, 2, 2), jax.random.key(1)
for tied, chunk, slots, filters in ((False, 5, 0, {}), (True, 1, 8, {"temperature": 0.8, "top_p": 0.9, "top_k": 100})):
    net = Net(dataclasses.replace(config, tie_embeddings=tied))
    params = jax.jit(net.init)(jax.random.key(0))
    engine = Engine(SamplingParams(**filters), 3, 10, chunk, slots, net=net, eos=(5, 6, 7, 8))
    temperature = engine.sampling.temperature
    score = jax.jit(lambda p, t, s: token_logps(net, p, Inputs(t, s, prompt_width=6), temperature))
    one = engine.generate(params, prompts, segments, key)
    scores = score(params, one.tokens, one.segments)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        many = engine.generate(placed, *rows_to_global((prompts, segments), mesh), key)
        many_scores = score(placed, many.tokens, many.segments)
    assert len(many.tokens.sharding.device_set) == 8, many.tokens.sharding
    assert many.tokens.sharding.shard_shape(many.tokens.shape) == (3, 16), many.tokens.sharding
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name), err_msg=name)
    np.testing.assert_allclose(many.sample_logps, one.sample_logps, atol=1e-5)
    for a, b in zip(many_scores, scores):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(many.sample_logps, many_scores[0] * many.mask, atol=1e-4)
    assert len(set(map(tuple, np.asarray(one.tokens[:, 6:])))) == 12
print("same")
"""


@pytest.mark.slow
def test_the_same_tokens_on_eight_devices(run_python):
    """Rows on data and fsdp, heads and vocabulary on tensor: the tokens of one device, and its log-probs."""
    done = run_python("-c", ON_A_MESH, devices=8)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stdout + done.stderr
