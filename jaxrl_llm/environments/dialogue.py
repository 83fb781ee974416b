"""The conversations of a batch of rows with their environments: the `Partner` of the sampling engine."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.environments.episode import Episode
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.environments.workers import Ended, Workers

Say = Callable[[int, Any], list[int]]  # a row and an observation -> the tokens that follow
Decode = Callable[[Sequence[int], bool], str]  # ids, and whether special tokens are left out -> text


class Outcome(NamedTuple):
    """How a row ended."""

    reward: float | None  # None: not scored, as the environment failed or says so
    turns: int
    calls: int
    failed_calls: int
    ended: str  # done, answered, max_turns, max_tool_calls, length, timeout, or the error
    failed: bool


class Dialogue:
    """Answers rows with their episodes' steps, many at once. Rows count from 0.

    on_error "end" ends the row whose environment fails or is late; "stop" raises EpisodeError.
    """

    def __init__(self, episodes: Sequence[Episode], workers: Workers, decode: Decode, say: Say, on_error: str = "end"):
        self.episodes, self.workers, self.decode, self.say = list(episodes), workers, decode, say
        self.on_error = on_error
        self._heard: dict[int, int] = {}  # tokens of the row when it was heard
        self._over: list[int] = []  # rows that need no answer

    def hear(self, row: int, tokens: list[int]) -> None:
        """Gives a row's new turn to its environment, without waiting."""
        episode = self.episodes[row]
        if episode.ended is not None:
            self._over.append(row)
            return
        turn = tokens[episode.spans[-1][1] if episode.spans else 0 :]
        episode.turns += 1
        self._heard[row] = len(tokens)
        self.workers.start(row, functools.partial(episode.hear, self.decode(turn, True), self.decode(turn, False)))

    def replies(self, wait: bool) -> dict[int, list[int] | None]:
        """The tokens that follow in each row that is answered, None where the row is over."""
        answers: dict[int, list[int] | None] = dict.fromkeys(self._over)
        self._over = []
        return answers | {end.key: self._answer(end) for end in self.workers.done(wait and not answers)}

    def outcomes(self, lengths: Sequence[int]) -> list[Outcome]:
        """How the rows ended, when all have; `lengths` of their completions. Asks environments for their rewards."""
        for episode, length in zip(self.episodes, lengths, strict=True):
            while episode.spans and episode.spans[-1][1] > length:  # an answer that left no room is not in the row
                episode.spans.pop()
                episode.said.pop()
            episode.ended = episode.ended or "length"
        asks = {
            row: episode.environment.get_reward
            for row, episode in enumerate(self.episodes)
            if not episode.failed and hasattr(episode.environment, "get_reward")
        }
        rewards: dict[int, Any] = {}
        for row, end in self.workers.all(asks).items():
            rewards[row] = None if self._fails(end, "get_reward") else self._number(row, end.result)
        return [
            Outcome(
                None if e.failed else rewards.get(row, e.reward),
                e.turns,
                e.calls,
                e.failed_calls,
                e.ended or "",
                e.failed,
            )
            for row, e in enumerate(self.episodes)
        ]

    def completion(self, row: int, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The completion as messages: the turns of the assistant and what was said between them."""
        episode, messages, start = self.episodes[row], [], 0
        for (begin, end), said in zip(episode.spans, episode.said, strict=True):
            messages.append({"role": "assistant", "content": self.decode(ids[start:begin], True)})
            messages += [{"role": "user", "content": said}] if isinstance(said, str) else [dict(m) for m in said]
            start = end
        if start < len(ids) or not messages:
            messages.append({"role": "assistant", "content": self.decode(ids[start:], True)})
        return messages

    def _answer(self, end: Ended) -> list[int] | None:
        row, episode = end.key, self.episodes[end.key]
        if self._fails(end, "step"):
            return None
        episode.note(end.result)
        if episode.ended is not None:
            return None
        try:
            tokens = self.say(row, end.result.step.observation)
        except ConfigError as error:
            self._fails(end._replace(error=error), "step")
            return None
        if not tokens:
            episode.ended = "done"
            return None
        episode.spans.append((self._heard[row], self._heard[row] + len(tokens)))
        episode.said.append(end.result.step.observation)
        return tokens

    def _fails(self, end: Ended, method: str) -> bool:
        """Ends the row of a call that failed; raises EpisodeError where that stops the run."""
        if end.error is None and not end.late:
            return False
        episode = self.episodes[end.key]
        what = "took more than environment.timeout"
        if end.error is not None:
            what = f"raised {type(end.error).__name__}: {end.error}"
        if self.on_error == "stop":
            raise EpisodeError(
                f"{episode.name}.{method} {what}, in row {end.key}, turn {episode.turns}; mend it, or end such rows "
                "with environment.on_error=end"
            ) from end.error
        episode.fail("timeout" if end.late else f"{type(end.error).__name__}: {end.error}")
        return True

    def _number(self, row: int, value: Any) -> float | None:
        """A reward of an environment; the row fails when it is no finite number or None."""
        try:
            number = None if value is None else float(value)
            if number is None or abs(number) < float("inf"):
                return number
        except (TypeError, ValueError):
            pass
        error = EpisodeError(f"{self.episodes[row].name}.get_reward returned {value!r}, not a finite number or None")
        self._fails(Ended(row, error=error), "get_reward")
        return None
