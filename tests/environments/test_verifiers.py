"""The adapter of verifiers' environments, played as a row plays them, where the package is installed."""

import importlib.util
import json

import pytest

from jaxrl_llm.environments.factory import Environments, EnvironmentSpec
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.environments.verifiers import Verifiers, load

MINE = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "Add one to 1, then to that.", "answer": "3"}])


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


class Steps(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"and {messages[-1]['content']}?"}]


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def load_environment(kind="steps", limit=2):
    if kind == "single":
        return "nothing"
    rubric = vf.Rubric(funcs=[right])
    if kind == "tools":
        return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=rubric, max_turns=limit)
    return Steps(dataset=ROWS, rubric=rubric, max_turns=limit, system_prompt="Be brief.")
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    if not hasattr(pytest.importorskip("verifiers"), "MultiTurnEnv"):
        pytest.skip("this verifiers has no MultiTurnEnv")
    (tmp_path / "my_environment.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


def play(environments, row, turns, marks=""):
    """(observations, reward) of a row; `marks` are special tokens, which the text of a turn has not."""
    (episode,), pool = environments.acquire([row]), environments.pool
    opening = pool.run({0: lambda: episode.reset(row)})[0]
    assert opening.error is None and opening.result is None
    observations = []
    for text in turns:
        result = pool.run({0: lambda text=text: episode.respond(text.replace(marks, ""), text)})[0]
        assert result.error is None, result.error
        observations.append(result.result.step.observation)
        if result.result.stop_reason:
            break
    return observations, pool.run({0: episode.environment.get_reward})[0].result


def test_turns_and_the_rubric(mine):
    row = load("my-environment").get_dataset()[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    environments = Environments(EnvironmentSpec(lambda: Verifiers("my-environment")))
    assert play(environments, row, ["2", "3"]) == ([[{"role": "user", "content": "and 2?"}], None], 1.0)
    assert play(environments, row, ["2", "4", "5"]) == ([[{"role": "user", "content": "and 2?"}], None], 0.0)
    longer = Environments(EnvironmentSpec(lambda: Verifiers("my-environment", '{"limit": 3}')))
    assert len(play(longer, row, ["2", "4", "3"])[0]) == 3


def test_tools_of_an_environment(mine):
    environments = Environments(
        EnvironmentSpec(lambda: Verifiers("my-environment", json.dumps({"kind": "tools", "limit": 5})))
    )
    row = load("my-environment", '{"kind": "tools"}').get_dataset()[0]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    for called, marks in ((call, ""), ("[TOOL_CALLS]add[ARGS]" + '{"a": 1, "b": 2}', "[TOOL_CALLS]")):
        observations, reward = play(environments, row, [called, "3"], marks)
        assert [message["content"] for message in observations[0]] == ["3"] and observations[1] is None
        assert reward == 1.0


def test_what_cannot_be_loaded(mine):
    with pytest.raises(EpisodeError, match="cannot load 'no_such_environment'"):
        load("no_such_environment")
    with pytest.raises(EpisodeError, match="cannot load 'my-environment'"):
        load("my-environment", '{"kind": "single"}')


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EpisodeError, match=r"pip install 'verifiers<0\.2'"):
        load("absent")
