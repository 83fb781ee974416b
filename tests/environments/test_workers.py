"""Calls beside each other: how many, how long, and what becomes of the late ones."""

import asyncio
import threading
import time

from jaxrl_llm.environments.workers import Workers


def test_results_errors_and_the_number_at_once():
    workers, running, most, lock = Workers(3, 10.0), 0, 0, threading.Lock()

    def call(i):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.01)
        with lock:
            running -= 1
        if i == 5:
            raise KeyError("five")
        return i * i

    ended = workers.all({i: lambda i=i: call(i) for i in range(12)})
    assert most == 3 and [ended[i].result for i in range(12) if i != 5] == [i * i for i in range(12) if i != 5]
    assert isinstance(ended[5].error, KeyError) and not ended[5].late


def test_a_late_call_makes_room_and_is_not_heard_later():
    workers, release = Workers(1, 0.15), threading.Event()
    workers.start(0, release.wait)
    workers.start(1, lambda: "next")
    began = time.monotonic()
    first = workers.done(wait=True)
    assert [(end.key, end.late) for end in first] == [(0, True)] and time.monotonic() - began < 2
    assert workers.done(wait=True)[0].result == "next"
    workers.start(0, lambda: "again")
    release.set()
    assert [end.result for end in workers.done(wait=True)] == ["again"]
    time.sleep(0.02)
    assert workers.done(wait=False) == [] and workers.done(wait=True) == []


def test_async_calls_share_a_loop_and_have_the_same_limit():
    workers, loops = Workers(8, 0.3), set()

    async def call(seconds):
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(seconds)
        return seconds

    ended = workers.all({i: lambda i=i: call(0.01 if i else 30) for i in range(5)})
    assert len(loops) == 1 and [ended[i].result for i in range(1, 5)] == [0.01] * 4
    assert ended[0].late or isinstance(ended[0].error, TimeoutError)
    workers.close()
