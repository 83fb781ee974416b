"""Tasksets of verifiers, trained on and judged as they are, where the package is installed."""

import importlib.metadata
import importlib.util
import json
import sys

import pyarrow.parquet as parquet
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import sources, tasks
from jaxrl_llm.data.splits import SplitError
from jaxrl_llm.environments.agents import Agents, AgentSpec, Connection, Outcome
from jaxrl_llm.tools.migrate import migrate

MINE = '''
import asyncio

import verifiers.v1 as vf
from openai import AsyncOpenAI


ended = []


class Data(vf.TaskData):
    answer: str
    hint: str | None = "sorted"
    turns: int = 1
    fault: str = ""


class Task(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        if task.fault == "hint":
            return float(task.hint is None)
        if task.fault == "reward":
            raise RuntimeError("no score")
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def said(self, trace) -> float:
        return sum(len(message.content or "") for message in trace.assistant_messages) / 10


class Config(vf.TasksetConfig):
    size: int = 16
    turns: int = 1
    fault: str = ""


class Taskset(vf.Taskset[Task, Config]):
    def load(self):
        for number in range(self.config.size):
            digits, turns, fault = f"{number + 10}21", self.config.turns, self.config.fault
            data = Data(prompt=f"sort:{digits}=", answer="".join(sorted(digits)), hint=None, turns=turns, fault=fault)
            yield Task(data, self.config.task)


class Chats(vf.Harness[vf.HarnessConfig]):
    """A program of this process: asks `turns` times."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        if data.fault == "harness":
            raise RuntimeError("broken")
        if data.fault == "late":
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(data.prompt)
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(data.turns):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=4)
                messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Taskset", "Chats"]
'''
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}
CONNECTION = Connection("http://127.0.0.1:1/session/1-0/v1", "key", "policy", "http://127.0.0.1:1/r", "1-0", 60.0)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    pytest.importorskip("uvicorn")
    (tmp_path / "my_tasks.py").write_text(MINE)
    endless = "class Endless(Taskset):\n    INFINITE = True\n\n\n__all__ = ['Endless']\n"
    (tmp_path / "endless_tasks.py").write_text(f"from my_tasks import Taskset\n\n\n{endless}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_tasks", "endless_tasks"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "room"), [(3, 20), (1, 20), (3, 4)])
def test_rewards_are_those_of_the_taskset(root, tmp_path, mine, calls, room):
    """Two steps of two turns each, judged by hand; with a call or room too few the episode is scored as it is."""
    taskset = {"id": "my-tasks", "turns": 2}
    config = load_config_file(f"{root / 'configs/agent.py'}:tiny")
    config.output_dir, config.logging.backends, config.eval.every = str(tmp_path / "run"), ("jsonl",), -1
    config.data.path = f"task:verifiers(taskset={taskset})"
    config.environment.agent = f"verifiers(taskset={taskset}, env={LOCAL})"
    config.environment.max_turns, config.optimizer.learning_rate = calls, 1e-2
    config.rollout.max_completion_length = room
    result = jaxrl_llm.train(config)
    turns = 2 if calls > 1 and room > 4 else 1
    for line in result.metrics:
        rows = parquet.read_table(tmp_path / f"run/completions/completions_0000{line['step']}.parquet").to_pylist()
        named = {"right": [], "said": []}
        for row in rows:
            said = [x["content"] for x in json.loads(row["completion"]) if x["role"] == "assistant"]
            digits = json.loads(row["prompt"])[0]["content"].removeprefix("sort:").removesuffix("=")
            named["right"].append(2.0 * (said[-1].strip() == "".join(sorted(digits))))
            named["said"].append(sum(map(len, said)) / 10)
            assert row["environment"] == pytest.approx(named["right"][-1] + named["said"][-1])
            assert len(said) == row["environment/turns"] == turns and row["environment/ended"] == "done"
        assert len(rows) == 16 and len({row["environment"] for row in rows}) > 1
        for name, values in named.items():
            assert line[f"environment/rewards/{name}"] == pytest.approx(sum(values) / len(values))
        assert line["environment/failures"] == line["environment/retokenised_tokens"] == 0
        assert line["environment/calls"] == turns
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_a_file_of_prime_rl_with_two_tasksets_trains(root, tmp_path, mine):
    """Each taskset is played by its own agent, with its own turns, and its answers are as long as the file says."""
    (tmp_path / "rl.toml").write_text("""
max_steps = 2
seq_len = 40
[orchestrator]
batch_size = 16
group_size = 4
[orchestrator.train.sampling]
max_completion_tokens = 4
[[orchestrator.train.source]]
env = { taskset = { id = "my-tasks" }, agent = { runtime = { type = "subprocess" } } }
[[orchestrator.train.source]]
name = "longer"
env = { taskset = { id = "my-tasks", turns = 2 }, agent = { runtime = { type = "subprocess" } } }
[trainer.optim]
lr = 1e-5
[run]
name = "run"
""")
    text = migrate(tmp_path / "rl.toml", output=tmp_path / "config.py")[1]
    (tmp_path / "config.py").write_text(text)
    config = load_config_file(str(tmp_path / "config.py"))
    tiny = load_config_file(f"{root / 'configs/agent.py'}:tiny")
    config.model, config.mesh = tiny.model, tiny.mesh
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    result = jaxrl_llm.train(config)
    turns = set()
    for line in result.metrics:
        rows = parquet.read_table(tmp_path / f"run/completions/completions_0000{line['step']}.parquet").to_pylist()
        assert len(rows) == 16 and line["environment/failures"] == 0
        turns |= {row["environment/turns"] for row in rows}
    assert turns == {1, 2}


def play(taskset, column="verifiers", **settings):
    """The outcome of the first task."""
    row = tasks.generate(f"verifiers(taskset={taskset}, size=1)")[0]
    agents, outcomes = Agents(AgentSpec(f"verifiers(taskset={taskset}, env={LOCAL})", **settings)), {}
    agents.run([CONNECTION], [{"prompt": row["prompt"], column: row["verifiers"]}], outcomes.__setitem__)
    agents.close()
    return outcomes[0]


def test_failures_are_those_of_the_session(mine):
    assert play({"id": "my-tasks", "turns": 0}) == Outcome({"right": 0.0, "said": 0.0})
    nothing = play({"id": "my-tasks", "turns": 0, "fault": "hint"}).reward
    assert nothing == {"right": 2.0, "said": 0.0}, "a field without a value has none, whatever its default"
    broken = play({"id": "my-tasks", "fault": "harness"}).failure
    assert broken.startswith("EpisodeError: HarnessError: ") and "RuntimeError: broken" in broken
    assert "RuntimeError: no score" in play({"id": "my-tasks", "turns": 0, "fault": "reward"}).failure
    assert "ProviderError: " in play({"id": "my-tasks"}).failure, "nobody listens there"
    assert "no column verifiers: set data.path" in play({"id": "my-tasks"}, column="other").failure
    assert "environment.agent_timeout = 0.5 s" in play({"id": "my-tasks", "fault": "late"}, timeout=0.5).failure
    assert sys.modules["my_tasks"].ended == ["sort:1021="], "it is not left behind"


def test_rows_are_tasks(mine):
    rows = tasks.generate("verifiers(taskset={'id': 'my-tasks', 'size': 5}, size=2)")
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": f"sort:{n}21="}] for n in (10, 11)]
    task = json.loads(rows[1]["verifiers"])
    assert {name: task[name] for name in ("idx", "prompt", "answer")} == {
        "idx": 1, "prompt": "sort:1121=", "answer": "1112"
    }  # fmt: skip
    assert {row["agent"] for row in tasks.generate("verifiers(taskset='my-tasks', agent='second')")} == {"second"}
    path = "task:verifiers(taskset='my-tasks')"
    assert len(sources.load(path)) == 16
    with pytest.raises(SplitError, match="only the split 'train', not 'test'"):
        sources.load(path, "test")
    with pytest.raises(ConfigError, match=r"without end: give their number, size=1000"):
        tasks.generate("verifiers(taskset='endless-tasks')")
    assert len(tasks.generate("verifiers(taskset='endless-tasks', size=3)")) == 3
    with pytest.raises(ConfigError, match=r"cannot load it: .*no-such-tasks"):
        tasks.generate("verifiers(taskset='no-such-tasks')")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "lacks its taskset"),
        ("taskset='my-tasks', agent={}", "verifiers has no option 'agent'; it takes taskset, env"),
        ("taskset='no-such-tasks'", "cannot load 'no-such-tasks': ModuleNotFoundError: .*no_such_tasks"),
        ("taskset='my-tasks', env={'agents': {}}", "cannot load 'my-tasks': ValidationError: .* agents"),
        ("taskset='my-tasks', env={'id': 'user-sim'}", "has the agents assistant, user; one is trained"),
        ("taskset='my-tasks', env={'agent': {'model': 'gpt'}}", "has the agents agent; one is trained"),
        ("taskset='my-tasks', env={'agent': {'retries': {'max_retries': 1}}}", "env has retries"),
    ],
)
def test_what_cannot_be_trained_on(mine, options, said):
    with pytest.raises(ConfigError, match=said):
        Agents(AgentSpec(f"verifiers({options})"))
    named = "^environment.agents(:| = verifiers) " if "option" not in said else said
    with pytest.raises(ConfigError, match=named):
        Agents(AgentSpec(sys.executable, others={"a": f"verifiers({options})"}))


@pytest.mark.parametrize(
    "asked",
    [
        lambda: Agents(AgentSpec("verifiers(taskset='my-tasks')")),
        lambda: tasks.generate("verifiers(taskset='my-tasks')"),
    ],
)
def test_without_the_package_or_with_an_older_one(monkeypatch, asked):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package verifiers: pip install 'verifiers>=0.4'"):
        asked()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1")
    with pytest.raises(ConfigError, match=r"needs verifiers 0.4 or later, but this is 0.3.1: pip install 'verifiers>="):
        asked()
