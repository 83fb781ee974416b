"""Tasksets of the package verifiers, its `verifiers.v1`, as an agent: `environment.agent="verifiers(taskset='mine')"`.

Its harness, a program that plays a task, asks the session of the row, and its rewards are those of the session.
"""

import asyncio
import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.background import EventLoop
from jaxrl_llm.config.resolve import import_optional
from jaxrl_llm.environments.protocol import EpisodeError

KEY = "JAXRL_LLM_SESSION_API_KEY"  # verifiers takes keys from the environment, and hides from programs what has API_KEY
# In the answer of a session that has used up its calls or its tokens, or whose row has no room.
FULL = re.compile('"code":"(budget_exceeded|context_length_exceeded)"')
CLOSE_SECONDS = 30.0  # for sandboxes, tunnels and servers of tools to end


class VerifiersAgent:
    """A function that plays the task of a row, for many rows at once, on an event loop of its own.

    taskset: the id of an installed taskset, or a dictionary of its settings with `id` among them. env: further settings
    of its environment, those of an `[env]` block of verifiers: `{"agent": {"harness": {"id": "null"}}}`. key: the
    setting that names the agent, for messages.

    Raises ConfigError: the package is missing or too old, or refuses these; an environment of which not one agent alone
    is the policy, or that has retries.
    """

    def __init__(
        self,
        taskset: str | Mapping[str, Any] = "",
        env: Mapping[str, Any] | None = None,
        key: str = "environment.agent",
    ):
        if not taskset:
            raise EpisodeError(f"{key} = verifiers lacks its taskset: write verifiers(taskset='my-taskset')")
        self.package: Any = import_optional("verifiers.v1", "0.4", f"{key} = verifiers")
        settings = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        try:
            config = self.package.resolve_env_config({**(env or {}), "taskset": settings})
            self.env = self.package.load_environment(config)
        except Exception as error:
            said = " ".join(str(error).split())
            raise EpisodeError(f"{key}: verifiers cannot load {taskset!r}: {type(error).__name__}: {said}") from error
        agents = {name: value for name, value in config if isinstance(value, self.package.AgentConfig)}
        of_policy = [name for name, agent in agents.items() if agent.client is None]
        if len(of_policy) != 1 or agents[of_policy[0]].model is not None:
            raise EpisodeError(
                f"{key}: the environment of {taskset!r} has the agents {', '.join(agents)}; one is trained, without "
                "model and client: give all others both in env, "
                "{'judge': {'model': '...', 'client': {'base_url': '...'}}}"
            )
        self.trained = of_policy[0]
        if any(one.retries != self.package.RetryConfig() for one in (config, agents[self.trained])):
            raise EpisodeError(
                f"{key}: env has retries, but attempts that failed would be learned from too: leave them out"
            )
        self.loop = EventLoop("verifiers")
        self.ready: asyncio.Future[None] | None = None  # when what all episodes share is served

    async def __call__(self, base_url: str, api_key: str, session: str, task: dict[str, Any]) -> dict[str, float]:
        """The weighted rewards of the task by their names, the mean where the agent has played it several times.

        A session that has used up its calls or tokens, or whose row is full, ends the episode, which is scored as it
        is. Raises EpisodeError where the episode has failed, or has no rewards.
        """
        return await asyncio.wrap_future(self.loop.start(self._play(base_url, api_key, session, task)))

    def close(self) -> None:
        """End the episodes that are played, and what the taskset serves."""
        if self.ready is not None:
            ended = threading.Event()

            async def last() -> None:
                ended.set()

            self.loop.close(last)
            ended.wait(CLOSE_SECONDS)

    async def _play(self, base_url: str, api_key: str, session: str, task: dict[str, Any]) -> dict[str, float]:
        if self.ready is None:
            self.ready = asyncio.get_running_loop().create_future()
            self.serving = asyncio.create_task(self._serve(self.ready))
        await asyncio.shield(self.ready)
        if "verifiers" not in task:
            raise EpisodeError("the row has no column verifiers: set data.path to task:verifiers(taskset='my-taskset')")
        of_task = type(self.env.taskset).task_type()
        data = of_task.data_type().model_validate_json(task["verifiers"])
        # One client for all sessions, which their names tell apart: verifiers keeps each to the end.
        os.environ[KEY] = api_key
        client = self.package.EvalClientConfig(
            base_url=base_url.replace(f"/session/{session}/", "/session/"), api_key_var=KEY
        )
        episode = await self.env.run_episode(
            of_task(data, self.env.config.taskset.task),
            self.package.ModelContext(session, client),
            on_trace=lambda trace: trace.watch(_stop_when_full),
        )
        if not episode.ok:
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            raise EpisodeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        traces = [trace for trace in episode.traces if trace.agent.name == self.trained]
        rewards: dict[str, float] = {}
        for trace in traces:
            for name, reward in trace.rewards.items():
                if reward is None:
                    raise EpisodeError(f"the reward {name} was not scored: the episode ended by {trace.stop_condition}")
                rewards[name] = rewards.get(name, 0.0) + reward.value / len(traces)
        if not rewards:
            raise EpisodeError(f"{of_task.__name__} gives no reward to the agent {self.trained}")
        return rewards

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold open what all episodes share, to `close`."""
        try:
            async with self.env.serving():
                ready.set_result(None)
                await asyncio.get_running_loop().create_future()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


def _stop_when_full(trace: Any) -> None:
    """End a trace whose session takes no further call, so that its task is scored."""
    error = trace.calls[-1].error if trace.calls else None
    if error is not None and trace.num_turns and (found := FULL.search(error.message)):
        trace.stop(found[1])
