"""One episode: a row's turns with its environment and tools, and the spans of its completion that are observations."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.algorithms.turn_advantages import Turn
from jaxrl_llm.config.background import in_thread
from jaxrl_llm.config.copying import copied
from jaxrl_llm.environments.protocol import (
    EpisodeError,
    Step,
    checked_step,
    content_parts,
    encodable,
    finite,
    is_messages,
    with_parts,
)
from jaxrl_llm.environments.tool_calls import ToolCall, parse_tool_calls
from jaxrl_llm.environments.tools import Tool, ToolResult, call_tool, turn_message

MOST_TOGETHER = 7  # calls of a turn in threads of their own, beside the one that its calls run in
Row = Mapping[str, Any]  # the columns of a row of the data
Decode = Callable[[Sequence[int], bool], str]  # ids, and whether special tokens are left out -> text


class TurnResult(NamedTuple):
    """The result of a turn: the step, the reason to stop (None: the episode goes on), and the tool calls in it."""

    step: Step
    stop_reason: str | None = None
    calls: int = 0
    failed_calls: int = 0


@dataclass
class Episode:
    """An environment (None: tools alone) with one row, and what has happened so far.

    Rewards add up over the steps; `stop_reason` is done, answered (no tool call), max_turns, max_tool_calls, length,
    timeout, or the error of an environment that failed. `observation_spans` are (start, end) in the completion: the
    loss mask is 0 there. `turn_ends` and `turn_rewards` are of each turn, `states` of what each answered. schemas: of
    the tools.
    """

    environment: Any
    tools: Mapping[str, Tool]
    name: str
    max_turns: int
    max_tool_calls: int | None = None
    schemas: Sequence[Mapping[str, Any]] = ()
    reward: float | None = 0.0  # None: not rewarded
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    stop_reason: str | None = None
    failed: bool = False
    observations: list[Any] = field(default_factory=list)
    observation_spans: list[tuple[int, int]] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)  # in tokens of the completion
    turn_rewards: list[float] = field(default_factory=list)
    states: list[Any] = field(default_factory=lambda: [None])  # None is the prompt

    @property
    def has_step(self) -> bool:
        """True when the environment answers turns itself; otherwise its methods are tools."""
        return hasattr(self.environment, "step")

    def reset(self, row: Row) -> Any:
        """Start the environment; returns its opening, or an awaitable of it: see `opening_prompt`.

        It gets copies: the rows of a prompt, and the prompt's later turns in an epoch, share theirs.
        """
        if self.environment is None:
            return None
        columns = {key: copied(value) for key, value in row.items() if key != "prompt_ids"}
        return self.environment.reset(columns) if self.has_step else self.environment.reset(**columns)

    def opening_prompt(self, prompt: Any, opening: Any) -> Any:
        """The prompt of the episode: the row's own, or the opening that `reset` returned.

        From an environment whose methods are tools, an opening that is text, or a list of text and images, is added to
        the last message. Raises EpisodeError for an opening that is neither of these nor messages.
        """
        if opening is None:
            return prompt
        if not self.has_step and isinstance(opening, str) and isinstance(prompt, str):
            return prompt + opening
        if not self.has_step and not isinstance(prompt, str) and (isinstance(opening, str) or _is_content(opening)):
            content = prompt[-1].get("content") or ""
            if isinstance(content, str) and isinstance(opening, str):
                joined: Any = content + opening
            else:
                lists = ([text] if isinstance(text, str) else text for text in (content, opening) if text)
                joined = [part for parts in lists for part in parts]
            return [*prompt[:-1], *with_parts([{**prompt[-1], "content": joined}])]
        if isinstance(opening, str) and opening:
            return opening
        if is_messages(opening):
            return with_parts(opening)
        raise EpisodeError(
            f"{self.name}.reset returned {opening!r:.200}; return a prompt (text or messages) or None"
            + (", of Gymnasium's observation and info the observation alone" if isinstance(opening, tuple) else "")
        )

    def respond(self, text: str, raw: str) -> TurnResult | Awaitable[TurnResult]:
        """Answer a turn from tools or environment; `raw` is its text with special tokens.

        Runs in a thread that may be abandoned, so it changes nothing here: `record` does, in the caller's thread.
        """
        calls = parse_tool_calls(raw, self.schemas) if self.tools else []
        if calls and self.max_tool_calls is not None and self.calls + len(calls) > self.max_tool_calls:
            return TurnResult(Step(None), "max_tool_calls")
        if calls:
            results = self._called(calls)
            if any(map(inspect.isawaitable, results)):
                return _gathered(results)
            return _tool_turn([result for result in results if isinstance(result, ToolResult)])
        if not self.has_step:
            return TurnResult(Step(None), "answered")
        # An environment that looks for calls itself takes the special tokens too, which may be their marks.
        turn = (text, raw) if getattr(self.environment, "takes_raw", False) else (text,)
        returned = self.environment.step(*turn)
        return self._awaited(returned) if inspect.isawaitable(returned) else self._stepped(returned)

    def _called(self, calls: Sequence[ToolCall]) -> list[ToolResult | Awaitable[ToolResult]]:
        """The results of a turn's calls, in their order.

        Functions run at the same time, as they do for the rows of a batch. Methods of the environment share its state:
        they run one after the other.
        """
        results: dict[int, ToolResult | Awaitable[ToolResult]] = {}

        def run(numbers: Iterator[int]) -> None:
            for number in numbers:
                results[number] = call_tool(calls[number], self.tools)

        owners = [getattr(self.tools.get(call.name), "__self__", None) for call in calls]
        methods = [n for n, owner in enumerate(owners) if owner is not None and owner is self.environment]
        others = [n for n in range(len(calls)) if n not in methods]
        waiting = iter(others)  # a thread takes the next one that waits
        threads = [in_thread(partial(run, waiting), "tool") for _ in others[:MOST_TOGETHER] if len(calls) > 1]
        run(iter(methods))
        run(waiting)
        for thread in threads:
            thread.result()
        return [results[number] for number in range(len(calls))]

    def record(self, result: TurnResult) -> None:
        """Add up the rewards and calls of a turn, and note the end of the episode."""
        self.reward = (self.reward or 0.0) + result.step.reward
        self.turn_rewards.append(result.step.reward)
        self.calls += result.calls
        self.failed_calls += result.failed_calls
        self.stop_reason = result.stop_reason
        if self.stop_reason is None and self.turns >= self.max_turns:
            self.stop_reason = "max_turns"

    def set_reward(self, returned: Any) -> None:
        """Take what `get_reward` returned. Raises EpisodeError for anything but a finite number or None."""
        self.reward = finite(returned)
        if self.reward is None and returned is not None:
            raise EpisodeError(f"{self.name}.get_reward returned {returned!r:.200}, not a finite number or None")

    def fail(self, reason: str) -> None:
        """End the episode because of its environment: it is not rewarded."""
        self.stop_reason, self.failed, self.reward = encodable(reason), True, None

    def end_at(self, length: int) -> None:
        """End the episode with its row, whose completion has `length` tokens."""
        # The engine leaves out an observation that leaves no room for a turn behind it.
        while self.observation_spans and self.observation_spans[-1][1] > length:
            self.observation_spans.pop()
            self.observations.pop()
        self.stop_reason = self.stop_reason or "length"

    def turn_records(self, length: int) -> list[Turn]:
        """The turns of a row whose completion has `length` tokens, once the episode is over."""
        ends = [end for end in self.turn_ends if end <= length]
        if length > max([0, *ends, *(end for _, end in self.observation_spans)]):
            ends.append(length)  # a turn that reached the limit and got no answer
        rewards = [*self.turn_rewards, *[0.0] * len(ends)]
        return [Turn(*turn) for turn in zip(ends, rewards, self.states, strict=False)]

    def messages(self, ids: Sequence[int], decode: Decode) -> list[dict[str, Any]]:
        """The completion as messages: the assistant's turns, and the observations between them.

        Where there are tools, calls are `tool_calls` of a turn's message, as TRL's users read them.
        """

        def said(turn: Sequence[int]) -> dict[str, Any]:
            text = decode(turn, True)
            if not self.tools:
                return {"role": "assistant", "content": text}
            return turn_message(text, decode(turn, False), self.schemas)

        messages, start = [], 0
        for (begin, end), observation in zip(self.observation_spans, self.observations, strict=True):
            messages.append(said(ids[start:begin]))
            if isinstance(observation, str):
                messages.append({"role": "user", "content": observation})
            else:
                messages += [dict(message) for message in observation]
            start = end
        if start < len(ids) or not messages:
            messages.append(said(ids[start:]))
        return messages

    def _stepped(self, returned: Any) -> TurnResult:
        step = checked_step(returned, self.name)
        return TurnResult(step, "done" if step.done or step.observation in (None, "") else None)

    async def _awaited(self, returned: Awaitable[Any]) -> TurnResult:
        return self._stepped(await returned)


def _is_content(opening: Any) -> bool:
    """True for a list of text and images, which are no messages."""
    parts = content_parts(opening) if isinstance(opening, list) and not is_messages(opening) else ()
    return bool(parts) and all(isinstance(part, Mapping) and "type" in part for part in parts)


async def _gathered(results: Sequence[ToolResult | Awaitable[ToolResult]]) -> TurnResult:
    """The turn of calls of which some are async; these run concurrently."""
    awaited = iter(await asyncio.gather(*(result for result in results if not isinstance(result, ToolResult))))
    return _tool_turn([result if isinstance(result, ToolResult) else next(awaited) for result in results])


def _tool_turn(results: Sequence[ToolResult]) -> TurnResult:
    failed = sum(result.failed for result in results)
    return TurnResult(Step([result.message for result in results]), None, len(results), failed)
