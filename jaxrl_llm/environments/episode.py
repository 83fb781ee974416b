"""One row's conversation with its environment and tools."""

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_llm.environments.protocol import EpisodeError, Step, checked_step, is_messages
from jaxrl_llm.environments.tool_calls import ToolCall, parse_tool_calls
from jaxrl_llm.environments.tools import Answer, Tool, call_tool

Row = Mapping[str, Any]


class Heard(NamedTuple):
    """What comes of a turn: the environment's step, why the row is over if it is, and the tool calls it made."""

    step: Step
    over: str | None = None
    calls: int = 0
    failed_calls: int = 0


@dataclass
class Episode:
    """An environment (None: tools alone) with one row, and what has happened so far."""

    environment: Any
    tools: Mapping[str, Tool]
    name: str
    max_turns: int
    max_tool_calls: int | None = None
    reward: float = 0.0
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    ended: str | None = None  # why the row is over
    failed: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list)  # of given tokens in the completion
    said: list[Any] = field(default_factory=list)  # what they say

    @property
    def steps(self) -> bool:
        """True when the environment answers turns itself; otherwise its methods are tools."""
        return hasattr(self.environment, "step")

    def reset(self, row: Row) -> Any:
        """What the environment opens the row with (or an awaitable of it): see `opened`."""
        if self.environment is None:
            return None
        columns = {key: value for key, value in row.items() if key != "prompt_ids"}
        return self.environment.reset(columns) if self.steps else self.environment.reset(**columns)

    def opened(self, prompt: Any, said: Any) -> Any:
        """The row's prompt: its own, or the one `reset` returned.

        Of an environment whose methods are tools, `reset` returns text that is added to the last message.
        Raises EpisodeError for anything else.
        """
        if said is None:
            return prompt
        if not self.steps and isinstance(said, str):
            if isinstance(prompt, str):
                return prompt + said
            last = {**prompt[-1], "content": (prompt[-1].get("content") or "") + said}
            return [*prompt[:-1], last]
        if (isinstance(said, str) and said) or is_messages(said):
            return said
        raise EpisodeError(f"{self.name}.reset returned {said!r}; return a prompt (text or messages) or None")

    def hear(self, text: str, raw: str) -> Heard | Awaitable[Heard]:
        """What comes of a turn; `raw` is its text with special tokens. Changes nothing here: see `note`."""
        calls = parse_tool_calls(raw) if self.tools else []
        if calls:
            return self._call(calls)
        if not self.steps:
            return Heard(Step(None), "answered")
        said = self.environment.step(text)
        return self._later(said) if inspect.isawaitable(said) else self._stepped(said)

    def note(self, heard: Heard) -> None:
        """Counts a turn, and notes the end of the row."""
        self.reward += heard.step.reward
        self.calls += heard.calls
        self.failed_calls += heard.failed_calls
        self.ended = heard.over
        if self.ended is None and self.turns >= self.max_turns:
            self.ended = "max_turns"

    def fail(self, why: str) -> None:
        """Ends the row because of the environment."""
        self.ended, self.failed = why, True

    def _stepped(self, said: Any) -> Heard:
        step = checked_step(said, self.name)
        return Heard(step, "done" if step.done or step.observation in (None, "") else None)

    async def _later(self, said: Awaitable[Any]) -> Heard:
        return self._stepped(await said)

    def _call(self, calls: list[ToolCall]) -> Heard | Awaitable[Heard]:
        if self.max_tool_calls is not None and self.calls + len(calls) > self.max_tool_calls:
            return Heard(Step(None), "max_tool_calls")
        answers = [call_tool(call, self.tools) for call in calls]
        if any(inspect.isawaitable(answer) for answer in answers):
            return self._gathered(answers)
        return _answered([answer for answer in answers if isinstance(answer, Answer)])

    async def _gathered(self, answers: list[Any]) -> Heard:
        async def one(answer: Any) -> Answer:
            return await answer if inspect.isawaitable(answer) else answer

        return _answered(await asyncio.gather(*map(one, answers)))


def _answered(answers: list[Answer]) -> Heard:
    failed = sum(answer.failed for answer in answers)
    return Heard(Step([answer.message for answer in answers]), None, len(answers), failed)
