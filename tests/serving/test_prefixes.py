"""Kept texts: a request that goes on with one is answered as without, and computes less."""

import httpx
import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.models.adapters.lora import LoraConfig, split
from jaxrl_llm.models.model import add_adapters
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import quantized_as
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.grid import RowRequest
from jaxrl_llm.serving.prefixes import Prefix, PrefixCache
from jaxrl_llm.serving.queue import RequestQueue
from tests.serving.test_queue import CONFIG, KINDS, Collected, ask

LONGEST = 64


@pytest.fixture(scope="module")
def model():
    return jaxrl_llm.load_model("embedded:sort")


def started(net, params, prefix_bytes: int, **options) -> RequestQueue:
    queue = RequestQueue(
        Engine(SamplingParams(), 1, LONGEST, 4, net=net, eos=(), **options), params, 2, prefix_bytes=prefix_bytes
    )
    queue.start()
    return queue


def compare(
    queue: RequestQueue, plain: RequestQueue, requests: list[RowRequest], atol: float = 1e-4
) -> list[list[int]]:
    """The tokens of rows that are asked together; both queues give the same."""
    rows, others = ask(queue, *requests), ask(plain, *requests)
    for row, other in zip(rows, others, strict=True):
        assert row.wait() == other.wait()
        np.testing.assert_allclose(row.logps, other.logps, atol=atol)
    return [row.ids for row in rows]


def texts(count: int, vocabulary: int = 97) -> list[int]:
    return np.random.default_rng(count).integers(0, vocabulary, count).tolist()


@pytest.mark.slow
def test_a_second_turn(model):
    """It is answered as without kept texts, and only what is new is computed; other weights have none."""
    queue, plain = (started(model.net, model.params, size) for size in (2**24, 0))
    first, counts = texts(80), queue.counts
    (answer,) = compare(queue, plain, [RowRequest(first, 12, SamplingParams(), (), 1)])
    second = [*first, *answer, *texts(9)]
    compare(queue, plain, [RowRequest(second, 12, SamplingParams(), (), 2)])
    assert counts.prefix_hits == 1 and counts.prefix_tokens == 80 + 11  # the last token was never read
    third = ask(queue, RowRequest([*second[:-1], 1], 2, SamplingParams(), (), 3))[0]
    assert len(third.wait()) == 2 and third.handle.cached == len(second) - 1 and counts.prefix_hits == 2
    halved = jax.tree.map(lambda x: x * 0.5, model.params)
    queue.call(lambda: queue.replace(halved)).result(60)
    (row,) = ask(queue, RowRequest(second, 5, SamplingParams(), (), 5))
    assert len(row.wait()) == 5 and counts.prefix_hits == 2 and row.handle.cached == 0
    for each in (queue, plain):
        each.stop(60)


def test_a_row_of_an_adapter_that_was_replaced_is_not_kept(model):
    """It ends with the weights that it began with, and the next row of that name has others."""
    config = LoraConfig(2, 8.0, targets=("q",))
    adapter = config, split(add_adapters(model, config, jax.random.key(0)).params)[1]
    engine = Engine(SamplingParams(), 1, LONGEST, 4, net=model.net, eos=())
    queue = RequestQueue(engine, model.params, 2, None, {"poet": adapter}, 2**24)
    queue.start()
    for replaced in (False, True):
        row = Collected(RowRequest(texts(80 + replaced), 8, SamplingParams(), (), 1, adapter="poet"))
        deliver, replacing = row.handle.deliver, [lambda: queue.set_adapter("poet", adapter)] * replaced

        def delivered(tokens, deliver=deliver, replacing=replacing):
            if replacing:  # between its first chunk and its second
                queue.call(replacing.pop())
            deliver(tokens)

        row.handle.deliver = delivered
        queue.submit([row.handle])
        assert len(row.wait()) == 8 and bool(queue.counts.prefix_bytes) != replaced
    queue.stop(60)


@pytest.mark.slow
def test_usage_tells_what_was_computed_before(listening):
    """In each API; Anthropic's input_tokens are those behind it."""
    text = "sort:" + "4821" * 18
    bodies = {
        "chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
        "responses": {"input": text, "max_output_tokens": 2},
        "messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    }
    with httpx.Client(base_url=listening(prefixes=2**24).url, timeout=120) as web:
        first = web.post("/v1/chat/completions", json=bodies["chat/completions"]).json()["usage"]
        chat, response, message = (web.post(f"/v1/{path}", json=body).json()["usage"] for path, body in bodies.items())
    count = first["prompt_tokens"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0} and count > 64
    assert chat["prompt_tokens_details"] == {"cached_tokens": count - 1} and chat["prompt_tokens"] == count
    assert response["input_tokens_details"]["cached_tokens"] == count - 1 and response["input_tokens"] == count
    assert message["cache_read_input_tokens"] == count - 1 and message["input_tokens"] == 1


@pytest.mark.slow
def test_turns_and_siblings(model):
    """The second turn of a conversation, another request with its system prompt, several choices and a stopped row."""
    queue, plain = (started(model.net, model.params, size) for size in (2**24, 0))
    system, counts = texts(100), queue.counts
    first = [*system, *texts(30)]
    (answer,) = compare(queue, plain, [RowRequest(first, 20, SamplingParams(), (), 1)])
    assert counts.prefix_hits == 0 and counts.prefix_bytes > 0
    second = [*first, *answer, *texts(9)]
    (answer,) = compare(queue, plain, [RowRequest(second, 20, SamplingParams(0.7, top_k=40), (), 2, top_logprobs=2)])
    assert counts.prefix_hits == 1 and counts.prefix_tokens == len(first) + 19  # the last token was never read
    third = [*second, *answer[:7], *texts(70)]  # what came behind is not in the text: a client stopped it there
    compare(queue, plain, [RowRequest(third, 12, SamplingParams(), (), 3, number) for number in range(2)])
    assert counts.prefix_hits == 2 and counts.prefix_tokens == len(first) + 19 + len(second) + 7
    sibling = [*system, *texts(21)]
    compare(
        queue, plain, [RowRequest(sibling, 9, SamplingParams(), (), 4), RowRequest(third, 9, SamplingParams(), (), 5)]
    )
    assert counts.prefix_hits == 4 and counts.prefix_tokens == len(first) + 19 + len(second) + 7 + 100 + len(third) - 1
    assert plain.counts.prefix_hits == plain.counts.prefix_bytes == 0
    for each in (queue, plain):
        each.stop(60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(kind):
    config, options = KINDS[kind]
    net = Net(config)
    params = jax.jit(Net(CONFIG).init if config.quantize != "none" else net.init)(jax.random.key(0))
    if config.quantize != "none":
        params = quantized_as(params, net.base.shapes(), config.quantized_at)
    queue, plain = (started(net, params, size, **options) for size in (2**24, 0))
    # A kept text is read from a narrow cache, where a prefill reads what it makes: two tokens that are nearly as likely
    # may change places, behind which texts differ.
    narrow = "cache_dtype" in options
    text = texts(80)
    for turn in range(3):
        request = RowRequest(text, 12, SamplingParams(0.0), (), turn)
        if narrow:
            (row,), (other,) = ask(queue, request), ask(plain, request)
            row.wait(), other.wait()
            same = int(np.cumprod(np.equal(row.ids, other.ids)).sum())
            assert len(row.ids) == len(other.ids) == 12
            np.testing.assert_allclose(row.logps[: same + 1], other.logps[: same + 1], atol=0.3)
            answer = row.ids
        else:
            (answer,) = compare(queue, plain, [request], 2e-4)
        text = [*text, *answer, *texts(5 + 40 * turn)]
    assert queue.counts.prefix_hits == (2 if config.shares_prefixes else 0)
    for each in (queue, plain):
        each.stop(60)


def test_the_least_recently_used_goes_first():
    cache, size = PrefixCache(3000), 250  # numbers of 4 bytes: three texts

    def prefix(start: int, count: int = 100, adapter: str = "") -> Prefix:
        return Prefix(np.arange(start, start + count, dtype=np.int32), adapter, np.zeros(size, np.float32), 128)

    for start in (0, 1000, 2000):
        cache.add(prefix(start))
    assert cache.bytes == 3000
    found = cache.find([*range(80), 7], "")
    assert found is not None and found[1] == 80
    cache.add(prefix(3000))
    assert cache.bytes == 3000 and cache.find(range(1000, 1100), "") is None
    assert cache.find(range(100), "") is not None, "it was used"
    assert cache.find(range(100), "poet") is None, "an adapter has its own"
    assert cache.find([*range(70), *range(500, 600)], "") is None, "less than half"
    cache.add(prefix(0, 120))  # in the place of its beginning
    assert cache.bytes == 3000 and not cache.wants(range(110), "") and cache.wants(range(110), "poet")
    assert not cache.wants(range(63), "poet") and not PrefixCache(0).wants(range(100), "")
    cache.forget()
    assert cache.bytes == 0 and cache.find(range(100), "") is None


def test_any_number_of_texts():
    """The one with most of a prompt's beginning is found, as among few, and none is the beginning of another."""
    random, cache = np.random.default_rng(0), PrefixCache(2**20)
    given = [bytes(np.repeat(random.integers(0, 2, random.integers(16, 24)), 4).tolist()) for _ in range(800)]
    given += [text[: 4 * random.integers(16, 24)] for text in given[::20]]
    kept: set[bytes] = set()
    for text in given:
        wanted = not any(other.startswith(text) for other in kept)
        assert cache.wants(list(text), "") == wanted
        if wanted:
            cache.add(Prefix(np.frombuffer(text, np.uint8).astype(np.int32), "", np.zeros(1, np.float32), 128))
            kept = {other for other in kept if not text.startswith(other)} | {text}
    assert len(given) > len(kept) > 700 and cache.bytes == 4 * len(kept)
    for text in sorted(kept)[::10]:
        prompt = text[: random.integers(56, len(text) + 1)] + bytes([7] * 20)
        most = max(next(n for n, pair in enumerate(zip(prompt, other + b"*", strict=False)) if pair[0] != pair[1])
                   for other in kept)  # fmt: skip
        found = cache.find(list(prompt), "")
        assert (0 if found is None else found[1]) == (most if most >= 64 else 0)
