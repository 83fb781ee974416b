"""Agents as programs: how they are named, started and ended, and what they may return."""

import dataclasses
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.resolve import import_file
from jaxrl_llm.environments.agents import Agents, AgentSpec, Connection, Outcome
from jaxrl_llm.environments.protocol import EpisodeError
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
        if task["n"] == 6:
            raise ValueError("\udce9")
        return {2: "1.0", 3: float("nan"), 4: [1], 5: 0.5}[task["n"]]

    line = agent.__code__.co_firstlineno + 2
    said = [outcome.failure or "" for outcome in run(agent, [{"n": n} for n in range(7)])]
    assert said[0] == f"ValueError: no luck ({__file__}:{line})" and "sys.exit(3)" in said[1] and said[5] == ""
    assert said[6].startswith("ValueError: \ufffd ("), "the table of completions can hold it"
    assert all("return a finite number" in failure for failure in said[2:5])


def test_rows_name_their_agent():
    """Each row's agent is the one of its column, and failures stay with it; a row without a value has the first."""

    def broken():
        raise ValueError("no luck")

    others = {"two": lambda task: task["n"] * 2, "broken": broken}
    tasks = [{"n": 1}, {"n": 2, "agent": "two"}, {"n": 3, "agent": float("nan")}, {"n": 4, "agent": "broken"}]
    outcomes = run(lambda task: task["n"], tasks, others=others)
    assert [outcome.reward for outcome in outcomes] == [1.0, 4.0, 3.0, None]
    assert outcomes[3].failure == f"ValueError: no luck ({__file__}:{broken.__code__.co_firstlineno + 1})"
    with pytest.raises(EpisodeError, match=r"the row's column agent is 'tow'; environment.agents has 'two', 'broken'"):
        run(lambda: 0, [{"agent": "tow"}], others=others)
    assert run(lambda task: len(task), [{"agent": "tow"}]) == [Outcome(1.0)]  # a column like any other


def test_an_agent_may_change_its_task():
    def agent(task):
        task["seen"].append(1)
        return len(task["seen"])

    task = {"seen": []}
    assert run(agent, [task] * 3) == [Outcome(1.0)] * 3 and task == {"seen": []}
    with pytest.raises(ConfigError, match=r"environment.agents = 'no-such-command' is no command"):
        run(lambda: 0, others={"x": "no-such-command"})


def test_late_agents_fail():
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


def is_alive(number):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True).stdout
    return not state.startswith("Z") and bool(state)


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


LONG_AGENT = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(sys.argv[1] + ".part").write_text(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


def test_commands_end_with_the_run(tmp_path):
    """Those that still run when the agents are closed, as after an error or Ctrl-C, and what they have started."""
    script, noted = tmp_path / "agent.py", tmp_path / "processes"
    script.write_text(LONG_AGENT)
    agents, outcomes = Agents(AgentSpec(f"{sys.executable} {script} {noted}")), []
    late = dataclasses.replace(CONNECTION, timeout=60.0)
    run = threading.Thread(target=agents.run, args=([late], [{}], lambda number, outcome: outcomes.append(outcome)))
    run.start()
    wait_until(noted.exists)
    agents.close()
    run.join(20)
    processes = [int(number) for number in noted.read_text().split()]
    wait_until(lambda: not any(map(is_alive, processes)))
    assert "ended with" in outcomes[0].failure
    noted.unlink()
    agents.run([late], [{}], lambda number, outcome: outcomes.append(outcome))
    assert outcomes[1].failure == "EpisodeError: the run has ended" and not noted.exists()


def test_commands_end_with_a_run_that_is_killed(tmp_path):
    """By a signal that no process can answer."""
    script, noted = tmp_path / "agent.py", tmp_path / "processes"
    script.write_text(LONG_AGENT)
    program = (
        "from jaxrl_llm.environments.agents import Agents, AgentSpec, Connection\n"
        f"agents = Agents(AgentSpec({f'{sys.executable} {script} {noted}'!r}))\n"
        "agents.run([Connection('', '', '', '', '', 60.0)], [{}], print)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        wait_until(noted.exists)
        processes = [int(number) for number in noted.read_text().split()]
        assert all(map(is_alive, processes))
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(map(is_alive, processes)))


def test_close_of_a_function_is_called_once_at_the_end(tmp_path):
    """Of one that is given and of one that is named, which may stand under several values."""
    file = tmp_path / "closing.py"
    file.write_text("closed = []\ndef run(tries=1): closed.append(tries)\nrun.close = lambda: closed.append('end')\n")
    function = import_file(file).run
    for agent in (f"{file}:run", function):
        others = {"a": f"{file}:run(tries=2)", "b": f"{file}:run(tries=3)"}
        run(agent, [{"prompt": "p"}, {"prompt": "p", "agent": "b"}], others=others, workers=1)
    assert import_file(file).closed == [1, 3, "end", 1, 3, "end"]


def test_a_close_that_raises_keeps_no_other_agent_open():
    closed = []

    def first(**_): ...

    def second(**_): ...

    first.close, second.close = lambda: closed.append(1 / 0), lambda: closed.append("second")
    agents = Agents(AgentSpec(first, others={"b": second}))
    with pytest.raises(ZeroDivisionError):
        agents.close()
    assert closed == ["second"]
    agents.close()  # nothing is left
    assert closed == ["second"]


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
        ({"rollout.bad_words": ("x",)}, "rollout.bad_words is .*: leave it out$"),
        ({"environment.agents": ("b.py:run",)}, "environment.agents has 'b.py:run', but it takes VALUE=AGENT"),
        ({"environment.agents": ("x=a", "x=b")}, "environment.agents has 'x' twice"),
        ({"environment.agents": ("x=a",), "environment.agent": None}, "environment.agent, of the other rows, is none"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    config = default()
    config.environment.agent = "a.py:run"
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_the_page_has_the_arguments_of_an_agent():
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    assert all(f"| `{field.name}` | `" in page for field in dataclasses.fields(Connection))
