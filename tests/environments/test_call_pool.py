"""Concurrent calls: their number at once, their time limit, and late results."""

import asyncio
import sys
import threading
import time

from jaxrl_llm.config.user_code import LeftError
from jaxrl_llm.environments.call_pool import CallPool


def test_results_errors_and_calls_at_once():
    pool, running, most, lock = CallPool(3, 10.0), 0, 0, threading.Lock()

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

    results = pool.run({i: lambda i=i: call(i) for i in range(12)})
    assert most == 3 and [results[i].result for i in range(12) if i != 5] == [i * i for i in range(12) if i != 5]
    assert isinstance(results[5].error, KeyError) and not results[5].timed_out


def test_a_late_call_is_abandoned():
    pool, release = CallPool(1, 0.15), threading.Event()
    pool.submit(0, release.wait)
    pool.submit(1, lambda: "next")
    began = time.monotonic()
    first = pool.poll(wait=True)
    assert [(result.key, result.timed_out) for result in first] == [(0, True)] and time.monotonic() - began < 30
    assert pool.poll(wait=True)[0].result == "next"
    pool.submit(0, lambda: "again")
    release.set()
    assert [result.result for result in pool.poll(wait=True)] == ["again"]
    time.sleep(0.02)
    assert pool.poll(wait=False) == [] and pool.poll(wait=True) == []


def test_calls_that_leave_are_errors_and_the_pool_goes_on():
    def leave():
        sys.exit(0)

    def interrupt():
        raise KeyboardInterrupt

    async def leave_async():
        sys.exit(0)

    async def leave_in_a_task():
        await asyncio.gather(leave_async(), asyncio.sleep(5))

    async def cancel():
        raise asyncio.CancelledError

    async def fine():
        await asyncio.sleep(0.01)
        return 3

    pool = CallPool(8, 20.0)
    calls = dict(enumerate((leave, interrupt, leave_async, leave_in_a_task, cancel, fine)))
    results = pool.run(calls)
    assert [type(results[i].error) for i in range(5)] == [LeftError] * 5 and results[5].result == 3
    assert pool.run({0: fine})[0].result == 3
    pool.close()


def test_async_calls_share_a_loop():
    pool, loops = CallPool(8, 1.0), set()

    async def call(seconds):
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(seconds)
        return seconds

    results = pool.run({i: lambda i=i: call(0.01 if i else 30) for i in range(5)})
    assert len(loops) == 1 and [results[i].result for i in range(1, 5)] == [0.01] * 4
    assert results[0].timed_out
    pool.close()


def test_a_coroutine_that_was_cancelled_before_anybody_looks_is_late():
    pool = CallPool(1, 0.1)
    pool.submit(7, lambda: asyncio.sleep(30))
    time.sleep(0.4)
    assert [(result.key, result.timed_out) for result in pool.poll(wait=False)] == [(7, True)]
    pool.close()


def test_single_calls_from_several_threads():
    """Each gets its own result, beside calls that are queued, or its failure in words."""
    pool, results = CallPool(1, 0.3), {}
    pool.submit(7, lambda: "queued")

    async def later():
        await asyncio.sleep(0.01)
        return "later"

    def fail():
        raise KeyError("no")

    calls = {"now": lambda: "now", "later": later, "fail": fail, "late": lambda: time.sleep(5)}
    threads = [
        threading.Thread(target=lambda name=name, call=call: results.update({name: pool.call(call)}))
        for name, call in calls.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4)
    assert results["now"].result == "now" and results["later"].result == "later" and results["now"].failure is None
    assert results["fail"].failure == f"raised KeyError: 'no' ({__file__}:{fail.__code__.co_firstlineno + 1})"
    assert results["late"].timed_out and results["late"].failure == "took more than environment.timeout"
    assert [result.key for result in pool.poll(wait=True)] == [7]
    pool.close()
