"""What is loaded to sample from is what the queue holds, whoever leaves in the middle."""

import asyncio
import threading
import types

import pytest

from jaxrl_llm.tools.tinker.results import Results
from jaxrl_llm.tools.tinker.samplers import Loaded, Samplers
from jaxrl_llm.tools.tinker.sessions import Sessions


class Queue:
    """Adapters that are set and forgotten by a thread, which waits for `go` and goes on for those that have left."""

    def __init__(self):
        self.adapters, self.go = {}, threading.Event()

    async def called(self, call):
        def waited():
            self.go.wait(10)
            return call()

        return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(waited)))

    def set_adapter(self, name, adapter):
        self.adapters[name] = adapter

    def forget_adapter(self, name):
        return self.adapters.pop(name, None) is not None


@pytest.mark.parametrize("full", [False, True])
def test_a_client_that_leaves_while_its_weights_are_loaded_leaves_none_unseen(full):
    """Neither as they are set, nor as others are let go for them: what nobody knows of would stay for ever."""
    queue, server = Queue(), types.SimpleNamespace(names=("sorter",))

    async def play():
        samplers = Samplers(None, queue, None, (), Results(), Sessions(), "", 1, ())

        async def make():
            return None, {}

        async def left(path):
            """Ask for weights, leave while the queue is at it, and let it go on."""
            queue.go.clear()
            asked = asyncio.ensure_future(samplers.serve(server, path, full, make))
            await asyncio.sleep(0.05)
            asked.cancel()
            asyncio.get_running_loop().call_later(0.05, queue.go.set)
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert set(samplers.loaded) == set(queue.adapters)

        queue.go.set()
        await samplers.serve(server, "run/0", full, make)
        await left("run/1")
        samplers._forget, forget = nothing, samplers._forget
        await left("run/2")  # as it is set, as there is nothing to forget
        samplers._forget = forget
        queue.go.set()
        await samplers.serve(server, "run/3", full, make)
        assert set(samplers.loaded) == set(queue.adapters)
        assert len(queue.adapters) == 1 or not full

    async def nothing(paths):
        pass

    asyncio.run(play())


def test_the_end_of_a_session_takes_its_own_snapshots_alone():
    """Not those of others that it sampled from, nor what has a name."""
    names = ["one:train:0/1", "two:train:0/1", "tinker://two:train:0/sampler_weights/a"]
    queue = Queue()
    queue.go.set()
    queue.adapters = dict.fromkeys(names, (None, {}))
    samplers = Samplers(None, queue, None, (), Results(), Sessions(), "", 1, ())
    samplers.loaded.update((name, Loaded("", False)) for name in names)
    samplers.paths = {"one:sample:0": names[0], "two:sample:0": names[1], "two:sample:1": names[0]}
    for session, left in (("two", [names[0], names[2]]), ("one", [names[2]])):
        asyncio.run(samplers.end(session))
        assert list(samplers.loaded) == list(queue.adapters) == left
    assert not samplers.paths
