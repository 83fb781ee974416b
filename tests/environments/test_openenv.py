"""The OpenEnv adapter against a real server, where the package is installed."""

import socket
import threading
import time

import pytest

from jaxrl_llm.environments.openenv import OpenEnv
from jaxrl_llm.environments.protocol import EpisodeError, Step


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str

    class Doubling(Environment):
        def reset(self, seed=None, episode_id=None, **given):
            self.said = []
            return Heard(text=f" seed {seed}", done=False, reward=None)

        def step(self, action, timeout_s=None, **given):
            self.said.append(action.message)
            return Heard(text=action.message * 2, done=len(self.said) == 2, reward=0.5)

        @property
        def state(self):
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Doubling, Say, Heard)
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(5)


def test_an_episode_on_a_server(url, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    environment = OpenEnv(url)
    assert environment.reset({"prompt": "Begin:", "seed": 7}) == "Begin: seed 7"
    assert environment.step("ab") == Step("abab", 0.5, False)
    assert environment.step("c") == Step("cc", 0.5, True)
    question = {"role": "user", "content": "Begin"}
    said = environment.reset({"prompt": [question]})
    assert said == [question, {"role": "user", "content": " seed None"}]
    environment.close()
    environment = OpenEnv(url, observation="txt")
    with pytest.raises(EpisodeError, match=r"have no field 'txt'; they have .*text"):
        environment.reset({"prompt": "x"})
    environment.close()


def test_without_the_package(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EpisodeError, match="pip install openenv-core"):
        OpenEnv("http://localhost:1")
