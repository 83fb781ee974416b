"""Agents: programs that talk to an endpoint of the run by any client, one session each, and end with a reward.

| form of `environment.agent` | is run |
|---|---|
| `path/to/file.py:run`, `my_module:run` | as a function, in a thread or, where it is `async`, on an event loop |
| `verifiers(taskset='my-taskset')` | as a function too: it plays the tasks of that package |
| anything else | as a command line, in a process of its own |

A function is given what it names of `Connection` and `task`, and returns a reward, named rewards, or None where it has
posted one. A command finds the same in its environment variables, and the task as JSON on its standard input.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.copying import copied
from jaxrl_llm.config.resolve import ConfigError, naming, resolve_with_options
from jaxrl_llm.config.user_code import error_text
from jaxrl_llm.environments.call_pool import CallPool
from jaxrl_llm.environments.protocol import EpisodeError, encodable, finite
from jaxrl_llm.environments.verifiers_agent import VerifiersAgent

FUNCTION = re.compile(r"[^\s:()]+:[A-Za-z_][\w.]*(\(.*\))?", re.DOTALL)
SUPERVISOR = Path(__file__).with_name("supervisor.py")
BUILT_IN = {"verifiers": VerifiersAgent}
LAST = 2000  # bytes of a failed command's output in its message

Reward = float | dict[str, float]
Start = Callable[["Connection", Mapping[str, Any]], Any]  # returns a reward, or an awaitable of it


@dataclasses.dataclass(frozen=True)
class AgentSpec:
    """The settings of `environment.*` that agents need.

    agent: a function or its name, or a command line; `close` of a function that has it is called at the end, and
    `open_environments` of one that plays them at the start. workers: agents that run at once. timeout: seconds of each.
    calls: of a session; tokens: that it samples, None without a limit. on_error: stop (the run) when one fails, or end.
    others: further agents by the values of the column `agent`. branches: of a session that are learned from, at most.
    """

    agent: str | Callable[..., Any]
    workers: int = 16
    timeout: float = 600.0
    calls: int = 10
    tokens: int | None = None
    on_error: str = "end"
    others: Mapping[str, str | Callable[..., Any]] = dataclasses.field(default_factory=dict)
    branches: int = 8


@dataclasses.dataclass(frozen=True)
class Connection:
    """The addresses, key and names by which an agent talks to its session."""

    base_url: str  # for clients of OpenAI's API
    api_key: str
    model: str
    reward_url: str  # takes {"reward": 1.0} by POST, with the key
    session: str
    timeout: float  # seconds of the agent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of an agent: the reward that it returned, or why it failed."""

    reward: Reward | None = None
    failure: str | None = None


class Agents:
    """The agents of a spec. Raises ConfigError for a name, an option, an argument or a command that is wrong."""

    def __init__(self, spec: AgentSpec):
        self.spec, self.pool = spec, CallPool(spec.workers, spec.timeout)
        self.commands = Commands()
        self.closing: list[Callable[[], Any]] = []  # functions that `close` calls
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)  # what is open, where another agent is refused
            self.starts: dict[str | None, Start] = {None: self._start("environment.agent", spec.agent)}
            self.starts |= {value: self._start("environment.agents", agent) for value, agent in spec.others.items()}
            stack.pop_all()

    def run(
        self,
        connections: Sequence[Connection],
        tasks: Sequence[Mapping[str, Any]],
        ended: Callable[[int, Outcome], None],
    ) -> None:
        """Run an agent for every task; `ended(number, outcome)` is called at the end of each, in this thread.

        Raises EpisodeError for a task that names an unknown agent.
        """
        for number, (connection, task) in enumerate(zip(connections, tasks, strict=True)):
            self.pool.submit(number, functools.partial(self._checked, self._start_of(task), connection, task))
        left = len(tasks)
        while left:
            for result in self.pool.poll(wait=True):
                left -= 1
                outcome = result.result
                if result.timed_out:
                    outcome = Outcome(failure=f"it took more than environment.agent_timeout = {self.spec.timeout:g} s")
                elif result.error is not None:
                    outcome = Outcome(failure=encodable(error_text(result.error)))
                ended(result.key, outcome)

    def close(self) -> None:
        """End what belongs to the agents, commands that still run among it: all of it, also where a `close` raises."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.pool.close)
            while self.closing:
                stack.callback(self.closing.pop())
            self.commands.close()

    def _start(self, key: str, agent: str | Callable[..., Any]) -> Start:
        """The function that starts the agent of a key, which is a Python function or a command line."""
        function, options = agent, {}
        if isinstance(agent, str) and agent.partition("(")[0] in BUILT_IN:
            make, of_agent = resolve_with_options(agent, BUILT_IN, reserved=("key",))
            function = make(**of_agent, key=key)
        elif isinstance(agent, str) and FUNCTION.fullmatch(agent):
            with naming(key):
                function, options = resolve_with_options(agent, {})
        if not isinstance(function, str):
            if (opens := getattr(function, "open_environments", None)) is not None:
                opens()
            close = getattr(function, "close", None)
            if close is not None and close not in self.closing:  # one function may stand under several values
                self.closing.append(close)
            return _function(f"{key} = {agent!r}", function, options)
        try:
            words = shlex.split(function)
        except ValueError as error:
            raise ConfigError(f"{key} = {agent!r} cannot be read as a command line: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"{key} = {agent!r} is no command that is found and may be run; a function is written "
                "path/to/file.py:function or my_module:function"
            )
        return functools.partial(self.commands.run, words)

    def _start_of(self, task: Mapping[str, Any]) -> Start:
        value = task.get("agent") if self.spec.others else None
        value = None if value != value else value  # NaN, an empty field of a table
        if value not in self.starts:
            known = ", ".join(map(repr, self.spec.others))
            raise EpisodeError(
                f"the row's column agent is {value!r}; environment.agents has {known}, and a row without a value is of "
                "environment.agent"
            )
        return self.starts[value]

    @staticmethod
    def _checked(start: Start, connection: Connection, task: Mapping[str, Any]) -> Outcome | Awaitable[Outcome]:
        returned = start(connection, task)
        if not inspect.isawaitable(returned):
            return Outcome(read_reward(returned))

        async def awaited() -> Outcome:
            return Outcome(read_reward(await returned))

        return awaited()


class Commands:
    """Agents that are commands. Each has a process group, which ends with it, with `close`, or with this process."""

    def __init__(self):
        self._running: set[subprocess.Popen] = set()
        self._lock, self._closed = threading.Lock(), False

    def run(self, words: Sequence[str], connection: Connection, task: Mapping[str, Any]) -> None:
        """Run a command to its end, for `connection.timeout` seconds at most; raises EpisodeError when it fails."""
        text = json.dumps(dict(task), default=str)
        variables = {
            "OPENAI_BASE_URL": connection.base_url,
            "OPENAI_API_KEY": connection.api_key,
            "OPENAI_MODEL": connection.model,
            "AGENT_REWARD_URL": connection.reward_url,
            "AGENT_SESSION": connection.session,
            "AGENT_TIMEOUT": f"{connection.timeout:g}",
        }
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._closed:
                    raise EpisodeError("the run has ended")
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", SUPERVISOR, str(os.getpid()), *words],
                    stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env=os.environ | variables,
                )  # fmt: skip
                self._running.add(process)
            try:
                process.communicate(text.encode(), timeout=connection.timeout)
            finally:
                with self._lock:
                    self._running.remove(process)
                _kill(process)  # what it has started too
                process.wait()
            if process.returncode:
                output.seek(0, os.SEEK_END)
                output.seek(max(output.tell() - LAST, 0))
                said = output.read().decode(errors="replace").strip()
                raise EpisodeError(f"{words[0]} ended with {process.returncode}: {said}")

    def close(self) -> None:
        """Kill the commands that run; later ones do not start."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _function(setting: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Start:
    """The Start of an agent's function, which gets the arguments that it names, beside its options."""
    given = {field.name for field in dataclasses.fields(Connection)} | {"task"}
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters)
    named = {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
    required = {x.name for x in parameters if x.name in named and x.default is x.empty}
    if unknown := sorted(required - given - options.keys()):
        raise ConfigError(f"{setting} asks for {unknown[0]}; an agent is given {', '.join(sorted(given))}")
    wanted = given if takes_all else given & named

    def start(connection: Connection, task: Mapping[str, Any]) -> Any:
        everything = dataclasses.asdict(connection) | {"task": copied(dict(task))}  # rows of a prompt share one
        return function(**{name: everything[name] for name in wanted - options.keys()}, **options)

    return start


def read_reward(returned: Any) -> Reward | None:
    """The reward that an agent returned. Raises EpisodeError for anything but finite numbers."""

    def number(value: Any) -> float:
        if (found := finite(value)) is None:
            raise EpisodeError(
                f"the agent returned {returned!r:.200}; return a finite number, a dictionary of such, or None where "
                "it has posted its reward"
            )
        return found

    if returned is None:
        return None
    if isinstance(returned, Mapping) and returned:
        return {str(name): number(value) for name, value in returned.items()}
    return number(returned)
