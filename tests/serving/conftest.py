"""A server of the embedded model on loopback, in a thread of this process, for clients of any kind."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import jaxrl_llm
from jaxrl_llm.rollout.engine import COMPILE_WORK, Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.queue import RequestQueue
from jaxrl_llm.training.setup.worker import eos_ids

SLOTS, LONGEST, CHUNK = 4, 128, 4


class Running(NamedTuple):
    """A server that listens."""

    server: object
    address: str  # host:port

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@pytest.fixture(scope="session")
def sorter():
    """The embedded model."""
    return jaxrl_llm.load_model("embedded:sort")


@pytest.fixture(scope="session")
def listening(sorter):
    """Starts a server: `listening(limits=..., api_key=..., training=folder of its runs, full=(runs, samplers))`."""
    uvicorn = pytest.importorskip("uvicorn")
    from jaxrl_llm.serving.adapters import ADAPTER_ROUTES
    from jaxrl_llm.serving.app import Limits, Server
    from jaxrl_llm.serving.connections import Connection
    from jaxrl_llm.serving.endpoints import ENDPOINTS
    from jaxrl_llm.serving.trainers import ROUTES
    from jaxrl_llm.tools.tinker.service import TrainingService

    started = []

    def start(
        limits=None,
        api_key: str = "",
        size: int = SLOTS,
        load=None,
        load_adapter=None,
        adapters=None,
        prefixes=0,
        model=None,
        connection=None,
        training=None,
        full=(1, 2),
    ) -> Running:
        model = model or sorter
        engine = Engine(SamplingParams(), 1, LONGEST, CHUNK, net=model.net, eos=(), compile_work=COMPILE_WORK)
        adapts = training is not None or load_adapter is not None
        queue = RequestQueue(engine, model.params, size, None, adapters, prefixes, adapts)
        routes = [*ENDPOINTS, *ROUTES, *ADAPTER_ROUTES]
        if training is not None:
            routes += TrainingService(model, queue, training, ("embedded:sort", "sorter"), 256, *full).routes
        limits = limits or Limits(LONGEST, body=100_000)
        server = Server(
            queue,
            model.tokenizer,
            ["sorter", *(adapters or {})],
            eos_ids(model),
            320,
            limits,
            api_key,
            routes,
            load,
            load_adapter,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        web = uvicorn.Server(
            uvicorn.Config(server.app, http=connection or Connection, log_level="warning", lifespan="off")
        )
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
        queue.start()
        thread.start()
        while not web.started:
            time.sleep(0.01)
        started.append((queue, web, thread))
        return Running(server, "{}:{}".format(*listener.getsockname()))

    yield start
    for queue, web, thread in started:
        web.should_exit = True
        thread.join(30)
        queue.stop(30)


@pytest.fixture(scope="session")
def running(listening) -> Running:
    """The server that most tests ask."""
    return listening()


@pytest.fixture
def client(running) -> Iterator:
    """OpenAI's own client of that server."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
