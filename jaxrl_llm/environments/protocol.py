"""What an environment is: `reset` with a row of the data, `step` with each turn of the policy."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.config.resolve import ConfigError

Messages = Sequence[Mapping[str, Any]]


class EpisodeError(ConfigError):
    """An environment or tool that cannot be used, or that failed where `environment.on_error` says to stop."""


class Step(NamedTuple):
    """What an environment says to a turn: text or messages for the policy, a reward, and whether the row is over."""

    observation: Messages | str | None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """What answers one row at a time; `reset` starts the next row. Methods may be async.

    It may have `get_reward() -> float | None`, which then is the row's reward in place of the sum of its steps' rewards
    (None: not scored), and `close()`, called at the end of the run.
    """

    def reset(self, row: dict[str, Any]) -> Messages | str | None:
        """Starts a row, `row` being its columns; returns the prompt, or None for the row's own."""
        ...

    def step(self, text: str) -> Step:
        """Answers a turn. Without an observation the row is over, as with `done`."""
        ...


def checked_step(said: Any, name: str) -> Step:
    """The Step an environment returned: itself, or a tuple of up to three values. Raises EpisodeError."""
    if not isinstance(said, tuple) or not 1 <= len(said) <= 3:
        raise EpisodeError(f"{name}.step returned {said!r}; return Step(observation, reward, done)")
    step = Step(*said)
    if not isinstance(step.reward, int | float) and not hasattr(step.reward, "item"):
        raise EpisodeError(f"{name}.step returned the reward {step.reward!r}; give a number")
    if step.reward != step.reward or abs(step.reward) == float("inf"):
        raise EpisodeError(f"{name}.step returned the reward {step.reward!r}; give a finite number")
    if not (step.observation is None or isinstance(step.observation, str) or is_messages(step.observation)):
        raise EpisodeError(
            f"{name}.step returned the observation {step.observation!r}; give text, messages with role and content, or "
            "None"
        )
    return Step(step.observation, float(step.reward), bool(step.done))


def is_messages(value: Any) -> bool:
    """True for a list of one or more messages, each with a role."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )
