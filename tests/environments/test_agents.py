"""Agents as programs: how they are named, started and ended, and what they may return."""

import dataclasses
import re
import sys

import pytest

from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.schema import KEYS
from jaxrl_llm.environments.agents import Agents, AgentSpec, Connection, Outcome
from tests.conftest import ROOT

CONNECTION = Connection("http://127.0.0.1:1/session/1-0/v1", "key", "policy", "http://127.0.0.1:1/r", "1-0", 5.0)


def run(agent, tasks=({"prompt": "a"},), **settings) -> list[Outcome]:
    agents = Agents(AgentSpec(agent, **settings))
    outcomes = [Outcome()] * len(tasks)
    agents.run([CONNECTION] * len(tasks), tasks, outcomes.__setitem__)
    agents.close()
    return outcomes


def test_functions_get_what_they_name():
    def sync(task, *, base_url, other=3):
        return {"url": base_url == CONNECTION.base_url, "other": other, "a": task["prompt"] == "a"}

    async def concurrent(**everything):
        return len(everything)

    assert run(sync) == [Outcome({"url": 1.0, "other": 3.0, "a": 1.0})]
    assert run(concurrent) == [Outcome(7.0)]
    assert run(lambda: None) == [Outcome(None)]


def test_failures_are_told_and_end_nothing_else():
    def agent(task):
        if task["n"] == 0:
            raise ValueError("no luck")
        if task["n"] == 1:
            sys.exit(3)
        return {2: "1.0", 3: float("nan"), 4: [1], 5: 0.5}[task["n"]]

    said = [outcome.failure or "" for outcome in run(agent, [{"n": n} for n in range(6)])]
    assert said[0] == "ValueError: no luck" and "sys.exit(3)" in said[1] and said[5] == ""
    assert all("return a finite number" in failure for failure in said[2:5])


def test_late_agents_fail():
    import time

    outcomes = run(lambda task: time.sleep(task["n"]), [{"n": 30}, {"n": 0}], timeout=0.5)
    assert outcomes[0].failure == "it took more than environment.agent_timeout = 0.5 s" and not outcomes[1].failure


def test_commands(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys\n"
        "task = json.load(sys.stdin)\n"
        "names = 'OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL', 'AGENT_REWARD_URL'\n"
        "print(task, *(os.environ[name] for name in names))\n"
        "sys.exit(task['n'])\n"
    )
    outcomes = run(f"{sys.executable} {script}", [{"n": 0}, {"n": 4}])
    assert outcomes[0] == Outcome()
    assert outcomes[1].failure.endswith(
        f"ended with 4: {{'n': 4}} {CONNECTION.base_url} key policy http://127.0.0.1:1/r"
    )


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("no-such-command --x", "is no command that is found and may be run; a function is written"),
        ("'open", "cannot be read as a command line"),
        ("missing.py:run", "missing.py"),
        (lambda url: 0, "asks for url; an agent is given api_key, base_url, model, reward_url, session, task, timeout"),
    ],
)
def test_agents_that_cannot_be_started(agent, message):
    with pytest.raises(ConfigError, match=message):
        Agents(AgentSpec(agent))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment.name": "sort_then_smallest"}, "environment.agent and environment.name are both set"),
        ({"environment.rollout_func": "a.py:f"}, "environment.agent and environment.rollout_func are both set"),
        ({"algorithm.name": "sft"}, "samples nothing"),
        ({"rollout.stop": ("x",)}, "rollout.stop is .*let the agent ask for it"),
        ({"rollout.bad_words": ("x",)}, "rollout.bad_words"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    config = default()
    config.environment.agent = "a.py:run"
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_keys_that_the_page_names_exist():
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:--config\.)?((?:environment|rewards|rollout)\.[a-z_]+)", page))
    assert {"environment.agent_timeout", "environment.agent_tokens"} <= named <= {key.name for key in KEYS}
    for field in dataclasses.fields(Connection):
        assert f"| `{field.name}` | `" in page
