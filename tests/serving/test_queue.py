"""The request queue: rows come, go and are cancelled, and each gets what it gets alone."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.commands.generate import prompt_rows
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.delta_net import GatedDeltaNet
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.short_conv import ShortConv
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import quantized_as
from jaxrl_llm.rollout.engine import COMPILE_WORK, Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.grid import CAPACITY, RowRequest
from jaxrl_llm.serving.handles import Handle, Tokens
from jaxrl_llm.serving.queue import RequestQueue, StoppedError
from jaxrl_llm.training.setup.worker import eos_ids

LONGEST = 40


@pytest.fixture(scope="module")
def model():
    return jaxrl_llm.load_model("embedded:sort")


@pytest.fixture
def queue(model):
    engine = Engine(SamplingParams(), 1, LONGEST, net=model.net, eos=(), chunk=4, compile_work=COMPILE_WORK)
    queue = RequestQueue(engine, model.params, 4)
    queue.start()
    yield queue
    queue.stop(60)
    assert queue.failure is None


class Collected:
    """The tokens of a row, as they are delivered."""

    def __init__(self, request: RowRequest):
        self.handle = Handle(request, self.deliver)
        self.done, self.ids, self.logps, self.top = threading.Event(), [], [], []
        self.reason = self.error = None

    def deliver(self, tokens: Tokens | BaseException) -> None:
        assert not self.done.is_set(), "nothing follows the end"
        if isinstance(tokens, BaseException):
            self.error = tokens
        else:
            self.ids += tokens.ids
            self.logps += tokens.logps
            self.top += list(zip(tokens.top_ids, tokens.top_logps, strict=True))
            self.reason = tokens.finish_reason
        if self.error is not None or self.reason is not None:
            self.done.set()

    def wait(self) -> list[int]:
        assert self.done.wait(600) and self.error is None  # a busy machine compiles slowly
        return self.ids


def ask(queue: RequestQueue, *requests: RowRequest) -> list[Collected]:
    rows = [Collected(request) for request in requests]
    queue.submit([row.handle for row in rows])
    return rows


def random_requests(
    count: int, seed: int, ends: tuple[int, ...], sizes: tuple[int, ...] = (1, 9, 60, 100, 200), most: int = LONGEST
) -> list[RowRequest]:
    """Prompts of any length (of several buckets), limits and settings; some are greedy, some filtered, some neither."""
    draw = np.random.default_rng(seed)
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.05),
        SamplingParams(0.7, top_p=0.9, top_k=20, min_p=0.01),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(0.8, top_k=30, frequency_penalty=0.7, presence_penalty=0.4),
    ]
    return [
        RowRequest(
            prompt=draw.integers(32, 127, int(draw.choice(sizes))).tolist(),
            limit=int(draw.integers(1, most + 1)),
            sampling=settings[draw.integers(len(settings))],
            ends=ends if draw.random() < 0.7 else (),
            seed=int(draw.integers(2**31)),
            number=int(draw.integers(3)),
            top_logprobs=int(draw.choice([0, 0, 0, 2])),
        )
        for _ in range(count)
    ]


@pytest.mark.slow
def test_a_row_is_that_of_generate(queue, model):
    """Greedy and drawn, of the seed and the number that `generate` gives its rows."""
    ids = prompt_rows(model, ["sort:90817="])[0]["prompt_ids"]
    for temperature in (0.0, 1.0):
        (texts,) = jaxrl_llm.generate(model, ["sort:90817="], 12, temperature, samples=3, seed=5)
        sampling = SamplingParams(temperature)
        rows = ask(queue, *(RowRequest(ids, 12, sampling, eos_ids(model), 5, number) for number in range(3)))
        assert [model.tokenizer.decode(row.wait(), skip_special_tokens=True) for row in rows] == texts
    assert len(set(map(tuple, (row.ids for row in rows)))) > 1


@pytest.mark.slow
def test_rows_of_any_settings_are_those_of_the_engine(queue, model):
    """Tokens and log-probs of every setting: the engine's program of that setting alone is the oracle."""
    for request in random_requests(12, 3, eos_ids(model)):
        (row,) = ask(queue, request)
        engine = Engine(request.sampling, 1, request.limit, net=model.net, eos=request.ends)
        prompts = np.asarray([request.prompt], np.int32)
        key = jax.random.key(request.seed)
        rollout = engine.generate(model.params, prompts, np.ones_like(prompts), key, first_row=request.number)
        expected = np.asarray(rollout.tokens)[0, prompts.shape[1] :][: int(rollout.lengths[0])].tolist()
        assert row.wait() == expected, request
        assert row.reason == ("stop" if bool(rollout.finished[0]) else "length")
        logps = np.asarray(rollout.sample_logps)[0, prompts.shape[1] :][: len(expected)]
        np.testing.assert_allclose(row.logps, logps, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_row_gets_what_it_gets_alone(queue, model, seed):
    """Random arrivals and cancellations: the tokens and log-probs that come are those of the same row, asked alone."""
    compare_with_alone(queue, random_requests(16, seed, eos_ids(model)), seed)


@pytest.mark.slow
def test_every_row_of_a_small_grid_gets_what_it_gets_alone(model):
    """The same with two slots, few buckets of prompts and one capacity, for which few programs are compiled."""
    queue = RequestQueue(Engine(SamplingParams(), 1, CAPACITY, net=model.net, eos=(), chunk=4), model.params, 2)
    queue.start()
    compare_with_alone(queue, random_requests(12, 0, eos_ids(model), (1, 9, 60, 100), CAPACITY), 0)
    queue.stop(60)


def compare_with_alone(queue: RequestQueue, requests: list[RowRequest], seed: int) -> None:
    draw = np.random.default_rng(100 + seed)
    together, cancelled = [], []
    while len(together) < len(requests):
        count = int(draw.integers(1, 6))
        together += ask(queue, *requests[len(together) : len(together) + count])
        if draw.random() < 0.3:
            row = together[int(draw.integers(len(together)))]
            queue.cancel([row.handle])
            cancelled.append(row)
        if draw.random() < 0.5:
            together[int(draw.integers(len(together)))].done.wait(draw.random() * 0.2)
    for row in together:
        if row not in cancelled:
            row.wait()
    for row in together:
        (alone,) = ask(queue, row.handle.request)
        alone.wait()
        if row in cancelled:
            assert alone.ids[: len(row.ids)] == row.ids
            continue
        assert (row.ids, row.reason) == (alone.ids, alone.reason)
        np.testing.assert_allclose(row.logps, alone.logps, atol=1e-4)
        assert len(row.top) == (len(row.ids) if row.handle.request.top_logprobs else 0)


@pytest.mark.slow
def test_the_likeliest_tokens(queue, model):
    """The sampled token's log-prob is the one among the likeliest, which are sorted and full-vocabulary."""
    ids = prompt_rows(model, ["sort:4821="])[0]["prompt_ids"]
    (row,) = ask(queue, RowRequest(ids, 8, SamplingParams(0.5), (), 1, top_logprobs=3))
    row.wait()
    logits = np.asarray(model(np.asarray([ids + row.ids])))[0, len(ids) - 1 : -1] / 0.5
    logps = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    for place, (top_ids, top_logps) in enumerate(row.top):
        assert top_ids == np.argsort(-logps[place], kind="stable")[:3].tolist()
        np.testing.assert_allclose(top_logps, logps[place][top_ids], atol=1e-4)
        np.testing.assert_allclose(row.logps[place], logps[place][row.ids[place]], atol=1e-4)


@pytest.mark.slow
def test_a_prompt_of_several_rows_is_computed_once(queue, model, monkeypatch):
    """Choices of one answer share the prefill, in 32 places, whatever their settings; each is what it is alone."""
    from jaxrl_llm.serving import grid, running

    shapes, pad = [], grid.pad_prompts
    monkeypatch.setattr(
        grid, "pad_prompts", lambda prompts, width: shapes.append((len(prompts), width)) or pad(prompts, width)
    )
    ids = prompt_rows(model, ["sort:90817="])[0]["prompt_ids"]
    settings = [SamplingParams(), SamplingParams(0.0), SamplingParams(1.5, top_k=4), SamplingParams(top_p=0.5)]
    requests = [RowRequest(ids, 5 + number, each, (), 3, number) for number, each in enumerate(settings)]
    together = ask(queue, *requests)
    for row in together:
        row.wait()
    assert shapes == [(1, 32)]
    for row in together:
        (alone,) = ask(queue, row.handle.request)
        assert alone.wait() == row.ids and len(row.ids) == row.handle.request.limit
    assert shapes == [(1, 32)] * 5
    monkeypatch.setattr(running, "PREFILL_TOKENS", 32)  # a prompt counts once among those that join
    counted = queue.counts.prompt_tokens
    for row in ask(queue, *requests[:2]):
        row.wait()
    assert shapes == [(1, 32)] * 6 and queue.counts.prompt_tokens == counted + len(ids)


@pytest.mark.slow
def test_groups_share_their_prompts_and_shrink(model, monkeypatch):
    """As the engine's own rollout; a stranger that joins makes single rows of what is left, and changes none."""
    from jaxrl_llm.serving import running as module

    shapes, joining, decode = [], [], module.decode_chunk

    def seen(engine, params, prompts, slots, *steps):
        shapes.append(slots.rows.length.shape)
        if len(shapes) == 3 and joining:
            queue.submit([joining.pop().handle])
        return decode(engine, params, prompts, slots, *steps)

    monkeypatch.setattr(module, "decode_chunk", seen)
    prompts = [[50 + number] * (40 + number) for number in range(3)]
    limits = [40, 6, 38, 5, 12, 30, 9, 7, 33, 8, 4, 40]
    requests = [RowRequest(prompts[row // 4], limit, SamplingParams(), (), 3, row) for row, limit in enumerate(limits)]
    padded, segments = pad_prompts(prompts, 64)
    engine = Engine(SamplingParams(), 4, LONGEST, net=model.net, eos=(), chunk=4)
    rollout = engine.generate(model.params, padded, segments, jax.random.key(3), limits=np.asarray(limits))
    expected = [row[64 : 64 + limit].tolist() for row, limit in zip(np.asarray(rollout.tokens), limits, strict=True)]
    queue = RequestQueue(dataclasses.replace(engine, group_size=1), model.params, 12, prefix_bytes=2**24)
    queue.start()
    stranger = RowRequest(list(range(40, 90)), 9, SamplingParams(0.0, repetition_penalty=1.2), (), 1)
    for alone in (True, False):
        shapes.clear()
        other = Collected(stranger)
        joining += [] if alone else [other]
        assert [row.wait() for row in ask(queue, *requests)] == expected
        sizes = [g * r for g, r in shapes]
        assert shapes[0] == (3, 4) and (min(sizes) < 12 if alone else (12, 1) in shapes), shapes
    assert ask(queue, stranger)[0].wait() == other.wait()
    turn = [*prompts[1], *expected[5], 65]  # a row of a group was kept
    rollout = dataclasses.replace(engine, group_size=1).generate(
        model.params, np.asarray([turn]), np.ones((1, len(turn)), np.int32), jax.random.key(1), limits=np.asarray([6])
    )
    (row,) = ask(queue, RowRequest(turn, 6, SamplingParams(), (), 1))
    assert row.wait() == np.asarray(rollout.tokens)[0, len(turn) :][:6].tolist() and queue.counts.prefix_hits == 1
    queue.stop(60)
    assert queue.failure is None


@pytest.mark.slow
def test_an_empty_grid_is_traced_once(model, monkeypatch):
    """A queue makes one whenever it was idle: each trace would stay in memory."""
    from jaxrl_llm.serving import grid

    traced, prefill = [], grid.prefill
    monkeypatch.setattr(grid, "prefill", lambda *args, **kwargs: traced.append(args) or prefill(*args, **kwargs))
    params = jax.jit(model.net.init)(jax.random.key(0))
    for number, width in enumerate((64, 128, 64, 128, 64)):
        engine = Engine(SamplingParams(), 1, 7, net=model.net, eos=(), chunk=5)  # another object that is equal
        empty = grid.empty_grid(engine, engine.decoding_params(params), (2, 1), width, False, False)
        assert empty.width == width and not np.asarray(empty.slots.rows.limit).any()
        assert len(traced) == min(number + 1, 2)


@pytest.mark.slow
def test_a_cancelled_row_leaves_its_slot(queue):
    endless = [RowRequest([40 + i], LONGEST, SamplingParams(), (), i) for i in range(12)]
    rows = ask(queue, *endless)
    queue.cancel([row.handle for row in rows])
    (last,) = ask(queue, RowRequest([50], 3, SamplingParams(), (), 1))
    assert len(last.wait()) == 3
    assert queue.counts.cancelled_rows >= 8  # some may have ended before they were cancelled
    assert sum(row.done.is_set() for row in rows) <= 4


@pytest.mark.slow
def test_rows_that_have_ended_are_cancelled_in_a_grid_that_shrank():
    """As the end of a session cancels them, with slots that are no more: the queue goes on."""
    net = Net(CONFIG)
    engine = Engine(SamplingParams(), 1, LONGEST, net=net, eos=(), chunk=2, compile_work=0.0)
    queue = RequestQueue(engine, jax.jit(net.init)(jax.random.key(0)), 8)
    shrank, regroup = threading.Event(), queue._running.regroup

    def seen(planned):
        regroup(planned)
        shrank.set()

    queue._running.regroup = seen
    queue.start()
    prompt, limits = [5] * 9, [LONGEST, *[3] * 7]
    rows = ask(queue, *(RowRequest(prompt, limit, SamplingParams(), (), 0, row) for row, limit in enumerate(limits)))
    assert [len(row.wait()) for row in rows[1:]] == [3] * 7 and shrank.wait(60)
    queue.cancel([row.handle for row in rows])
    (other,) = ask(queue, RowRequest([6] * 9, 4, SamplingParams(), (), 1))
    assert len(other.wait()) == 4
    queue.stop(60)
    assert queue.failure is None and queue.counts.cancelled_rows <= 1


@pytest.mark.slow
def test_new_parameters_count_from_the_next_chunk(queue, model):
    ids = prompt_rows(model, ["sort:4821="])[0]["prompt_ids"]
    request = RowRequest(ids, 6, SamplingParams(0.0), (), 0)
    (before,) = ask(queue, request)
    before.wait()
    halved = jax.tree.map(lambda x: x * 0.5, model.params)
    queue.call(lambda: queue.replace(halved)).result(60)
    assert queue.counts.weight_version == 1
    (after,) = ask(queue, request)
    assert after.wait() != before.ids


@pytest.mark.slow
def test_parameters_that_cannot_be_placed_change_nothing(queue, model):
    """And what is asked of a queue that has ended is told so, where it would be waited for."""
    ids = prompt_rows(model, ["sort:4821="])[0]["prompt_ids"]
    request = RowRequest(ids, 6, SamplingParams(0.0), (), 0)
    (before,) = ask(queue, request)
    before.wait()
    assert queue.call(lambda: queue.replace({"embed": None})).exception(60) is not None
    assert queue.counts.weight_version == 0
    (after,) = ask(queue, request)
    assert after.wait() == before.ids
    queue.stop(60)
    assert isinstance(queue.call(lambda: queue.replace(model.params)).exception(60), StoppedError)


@pytest.mark.slow
def test_a_prompt_that_cannot_be_computed_is_told_alone(queue, monkeypatch):
    """No memory for one prompt: the rows beside it and behind it are what they are alone."""
    from jaxrl_llm.serving import running as module

    prefill = module.prefill_requests

    def limited(engine, params, requests, *others):
        if any(len(request.prompt) == 60 for request in requests):
            raise MemoryError("none left")
        return prefill(engine, params, requests, *others)

    requests = [RowRequest([60 + i] * (60 if i % 3 == 1 else 5), 20, SamplingParams(), (), i) for i in range(9)]
    alone = [ask(queue, request)[0] for request in requests if len(request.prompt) == 5]
    expected = [row.wait() for row in alone]
    monkeypatch.setattr(module, "prefill_requests", limited)
    rows = ask(queue, *requests)
    assert [row.wait() for row in rows if len(row.handle.request.prompt) == 5] == expected
    for row in rows:
        if len(row.handle.request.prompt) == 60:
            assert row.done.wait(60) and isinstance(row.error, MemoryError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # of a program of such a width
def test_a_prompt_without_memory_for_its_caches_is_told_alone(queue):
    """A grid as wide as it cannot be allocated: rows that go on or come beside it are what they are alone."""
    rows = [RowRequest([60 + i] * 5, 20, SamplingParams(), (), i) for i in range(3)]
    expected = [ask(queue, row)[0].wait() for row in rows]
    huge = RowRequest(range(2**50), 4, SamplingParams(), (), 0)
    going, *others = ask(queue, RowRequest([50], LONGEST, SamplingParams(), (), 7), rows[0], huge, *rows[1:])
    assert [row.wait() for row in (others[0], *others[2:])] == expected and len(going.wait()) == LONGEST
    assert others[1].done.wait(60) and "Out of memory" in str(others[1].error)
    (alone,) = ask(queue, huge)
    assert alone.done.wait(60) and alone.error is not None
    assert ask(queue, rows[0])[0].wait() == expected[0]
    assert queue.counts.running == queue.counts.waiting == 0


@pytest.mark.slow
def test_rows_of_a_prompt_are_scored_once(queue, monkeypatch):
    from jaxrl_llm.serving import grid

    counts, likeliest = [], grid._likeliest
    monkeypatch.setattr(grid, "_likeliest", lambda *args: counts.append(len(args[2])) or likeliest(*args))
    prompt = list(range(40, 60))
    asked = [RowRequest(prompt, 3, SamplingParams(), (), 0, row, prompt_logprobs=1) for row in range(3)]
    rows = ask(queue, *asked, dataclasses.replace(asked[0], prompt_logprobs=None))
    assert all(len(row.wait()) == 3 for row in rows) and counts == [1]
    first, *others, unscored = (row.handle.scores for row in rows)
    assert first.logps.shape == (20,) and all(scores is first for scores in others) and unscored is None


@pytest.mark.slow
def test_a_stopped_queue_ends_its_rows_and_takes_no_more(queue):
    rows = ask(queue, *(RowRequest([60 + i], 20, SamplingParams(), (), i) for i in range(9)))
    queue.stop(60)
    assert all(len(row.wait()) == 20 for row in rows)
    with pytest.raises(StoppedError):
        ask(queue, rows[0].handle.request)


def test_a_failure_is_given_to_every_row(queue, monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("jaxrl_llm.serving.running.decode_chunk", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    rows = ask(queue, *(RowRequest([60 + i], 20, SamplingParams(), (), i) for i in range(9)))
    for row in rows:
        assert row.done.wait(60) and isinstance(row.error, RuntimeError)
    with pytest.raises(StoppedError, match="a bug"):
        ask(queue, rows[0].handle.request)
    assert isinstance(queue.call(queue.clear_prefixes).exception(60), RuntimeError)
    queue.failure = None  # which the fixture looks at


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["decode_chunk", "join", "newest", "regrouped"])
def test_rows_without_memory_to_decode_on_are_told_and_others_are_served(queue, monkeypatch, lacking):
    """At a step, at its end, when a row joins and when groups become single rows: the grid is lost, the queue is not.

    Rows that wait for a slot and those that come later are what they are alone.
    """
    from jaxrl_llm.serving import running as module

    request = RowRequest([60], 20, SamplingParams(), (), 5)
    expected, before = ask(queue, request)[0].wait(), queue.counts.refused_rows
    true, came, failed = getattr(module, lacking), threading.Event(), threading.Event()
    others = [Collected(each) for each in (request, dataclasses.replace(request, prompt=[60]))]

    def limited(*args):
        if failed.is_set() or not (came.is_set() or lacking in ("join", "newest")):
            return true(*args)
        failed.set()
        if lacking == "join":  # as where it has taken the grid already
            jax.tree.map(lambda x: x.delete(), args[2])
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    def deliver(tokens):
        if not came.is_set():
            came.set()
            queue.submit([row.handle for row in others])
        going[0].deliver(tokens)

    monkeypatch.setattr(module, lacking, limited)
    prompt = [61]
    going = [Collected(RowRequest(prompt, LONGEST, SamplingParams(), (), 7, number)) for number in range(queue.size)]
    going[0].handle.deliver = deliver
    queue.submit([row.handle for row in going])
    assert [row.wait() for row in others] == [expected] * 2 and failed.is_set()
    for row in going:
        assert row.done.wait(60) and "RESOURCE_EXHAUSTED" in str(row.error) and row.error.__traceback__ is None
    assert queue.counts.refused_rows == before + queue.size
    assert queue.failure is None and queue.counts.running == 0


CONFIG = ModelConfig(vocab_size=97, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4)
KINDS = {
    "sliding": (dataclasses.replace(CONFIG, sliding_window=20, sliding_layers=(0, 1)), {}),
    "quantised": (dataclasses.replace(CONFIG, quantize="int8"), {}),
    "scanned": (dataclasses.replace(CONFIG, quantize="int8", scan_layers=True), {"cache_dtype": "bfloat16"}),
    "fp8 caches": (CONFIG, {"cache_dtype": "fp8"}),
    "speculative": (CONFIG, {"speculative_tokens": 2}),
    "latents": (
        dataclasses.replace(CONFIG, kv_heads=4, head_dim=12, rotary_head_dim=4, latent_size=10, value_head_dim=6,
                            mixers=(LatentAttention,) * 3),
        {},
    ),
    "recurrent": (
        dataclasses.replace(CONFIG, mixers=(GatedDeltaNet, Attention, GatedDeltaNet), delta_key_heads=2,
                            delta_value_heads=4, delta_key_dim=6, delta_value_dim=5, delta_conv=4),
        {},
    ),
    "convolved": (dataclasses.replace(CONFIG, mixers=(ShortConv, Attention, ShortConv), conv_size=3), {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["join", "kept_cache", "with_top"])
def test_a_row_for_which_there_is_no_memory_is_told_alone(monkeypatch, name):
    """At any of its allocations: the grid is what it was. What would only be kept for later is not."""
    from jaxrl_llm.serving import running as module

    net, true = Net(CONFIG), getattr(module, name)
    engine = Engine(SamplingParams(), 1, LONGEST, net=net, eos=(), chunk=8)
    queue = RequestQueue(engine, jax.jit(net.init)(jax.random.key(0)), 2, prefix_bytes=2**20)
    queue.start()
    going = RowRequest([62] * 64, LONGEST, SamplingParams(), (), 2)
    failing = RowRequest([61] * 64, 5, SamplingParams(), (), 1, top_logprobs=1)
    expected = ask(queue, going)[0].wait()

    def limited(*args):
        if name != "join" or 1 in args[-1]:  # the slot of the second row
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return true(*args)

    monkeypatch.setattr(module, name, limited)
    first, told = Collected(going), Collected(failing)

    def deliver(tokens):
        if not first.ids:  # it goes on when the other one comes
            queue.submit([told.handle])
        first.deliver(tokens)

    first.handle.deliver = deliver
    queue.submit([first.handle])
    assert first.wait() == expected and told.done.wait(60)
    assert (told.error is None) == (name == "kept_cache")
    queue.stop(60)
    assert queue.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(kind):
    """Caches that are widened, shrunk and grown under rows that go on: the tokens are those of the engine."""
    config, options = KINDS[kind]
    net = Net(config)
    params = jax.jit(Net(dataclasses.replace(config, quantize="none")).init)(jax.random.key(0))
    if config.quantize != "none":
        params = quantized_as(params, net.base.shapes(), config.quantized_at)
    queue = RequestQueue(Engine(SamplingParams(), 1, 80, 4, net=net, eos=(), **options), params, 3)
    queue.start()
    draw = np.random.default_rng(1)
    requests = [
        RowRequest(draw.integers(0, 97, size).tolist(), limit, SamplingParams(), (5,), seed)
        for seed, (size, limit) in enumerate([(10, 70), (40, 30), (150, 20), (300, 5), (12, 78), (9, 3), (70, 40)])
    ]
    rows = ask(queue, *requests)
    for row, request in zip(rows, requests, strict=True):
        engine = Engine(SamplingParams(), 1, 80, net=net, eos=request.ends, **options)
        prompts = np.asarray([request.prompt], np.int32)
        limits = np.asarray([request.limit])
        rollout = engine.generate(params, prompts, np.ones_like(prompts), jax.random.key(request.seed), limits=limits)
        expected = np.asarray(rollout.tokens)[0, prompts.shape[1] :][: int(rollout.lengths[0])].tolist()
        assert row.wait() == expected
    queue.stop(60)


ON_A_MESH = """
import jax, numpy as np
from jaxrl_llm.distributed.sharding import make_mesh
from tests.serving.test_queue import CONFIG, Engine, Net, RequestQueue, RowRequest, SamplingParams, ask, pad_prompts

net, mesh = Net(CONFIG), make_mesh(2)
params = jax.jit(net.init)(jax.random.key(0))
engine = Engine(SamplingParams(), 4, 16, 8, net=net, eos=())
prompts, limits = [[5] * 9, [6] * 12], np.asarray([3, 2, 3, 15, 2, 3, 3, 15])
rollout = engine.generate(params, *pad_prompts(prompts, 64), jax.random.key(3), limits=limits)
rows = np.asarray(rollout.tokens)[:, 64:]
queue = RequestQueue(Engine(SamplingParams(), 1, 16, 8, net=net, eos=()), params, 8, mesh)
sizes, regroup = [], queue._running.regroup
queue._running.regroup = lambda planned: sizes.append(planned.row.shape) or regroup(planned)
queue.start()
requests = [
    RowRequest(prompts[row // 4], int(limit), SamplingParams(), (), 3, row) for row, limit in enumerate(limits)
]
for number, row in enumerate(ask(queue, *requests)):
    assert row.wait() == rows[number, : limits[number]].tolist()
queue.stop(60)
print(sizes[-1])
"""


@pytest.mark.slow
def test_groups_on_two_devices(run_python):
    """Each has as many slots in every grid."""
    done = run_python("-c", ON_A_MESH, devices=2)
    assert done.returncode == 0 and done.stdout.strip() == "(2, 1, 1)", done.stdout + done.stderr
