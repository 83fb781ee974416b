"""The protocol of an environment: `reset` with a row of the data, then `step` with each turn of the policy."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

from jaxrl_llm.config.resolve import ConfigError

Messages = Sequence[Mapping[str, Any]]
HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs


class EpisodeError(ConfigError):
    """An environment or tool that cannot be used, or that failed while `environment.on_error` is stop."""


class Step(NamedTuple):
    """The step result of a turn: an observation (text or messages), a reward, and whether the episode is done.

    The content of a message is text, or a list of text and images: see `content_parts`.
    state: what tells the state of the environment that the next turn answers, for advantages that compare turns in the
    same state (`gigpo`); None: the observation does.
    """

    observation: Messages | str | None
    reward: float = 0.0
    done: bool = False
    state: Any = None


class Environment(Protocol):
    """Plays one episode at a time; `reset` starts the next. Methods may be async.

    Two more methods are optional: `get_reward() -> float | None`, the reward of the episode in place of the sum of its
    steps' rewards (None: not rewarded), and `close()`, called at the end of the run. One with `takes_raw = True` has
    `step(text, raw)`, and is given the turn with its special tokens too.
    """

    def reset(self, row: dict[str, Any]) -> Messages | str | None:
        """Start an episode with the columns of a row; returns the prompt, or None for the row's own."""
        ...

    def step(self, text: str) -> Step:
        """Answer a turn. Without an observation the episode is over, as with `done`."""
        ...


def checked_step(returned: Any, name: str) -> Step:
    """The Step that the environment `name` returned, from itself or a tuple of up to four values.

    Raises EpisodeError for anything else, for a reward that is no finite number, and for an observation that is neither
    text nor messages.
    """
    if not isinstance(returned, tuple) or not 1 <= len(returned) <= 4:
        gymnasium = isinstance(returned, tuple) and len(returned) == 5
        raise EpisodeError(
            f"{name}.step returned {returned!r:.200}; return Step(observation, reward, done)"
            + (", of Gymnasium's five values Step(observation, reward, terminated or truncated)" if gymnasium else "")
        )
    step = Step(*returned)
    if (reward := finite(step.reward)) is None:
        raise EpisodeError(f"{name}.step returned the reward {step.reward!r:.200}; give a finite number")
    if not (step.observation is None or isinstance(step.observation, str) or is_messages(step.observation)):
        raise EpisodeError(
            f"{name}.step returned the observation {step.observation!r:.200}; give text, messages with role and "
            "content, or None"
        )
    observation = with_parts(step.observation) if is_messages(step.observation) else step.observation
    return Step(observation, reward, bool(step.done), step.state)


def finite(reward: Any) -> float | None:
    """A reward as a float; None for what is no finite number, such as a text, NaN or several numbers."""
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except Exception:  # also of a user's own __float__
        return None
    return number if math.isfinite(number) else None


def is_messages(value: Any) -> TypeGuard[Messages]:
    """True for a list of one or more messages, each with a role."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def content_parts(content: Sequence[Any]) -> list[Any]:
    """The parts of a content: text, and images (of PIL, the bytes of a file, a Path) as parts of these types.

    Parts that are dictionaries stay as they are.
    """
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        if isinstance(part, bytes | bytearray | Path) or is_picture(part)
        else part
        for part in content
    ]


def with_parts(
    messages: Messages, parts_of: Callable[[Sequence[Any]], list[Any]] = content_parts
) -> list[dict[str, Any]]:
    """The messages, with `parts_of` of contents that are lists."""
    return [
        {**message, "content": parts_of(message["content"])}
        if isinstance(message.get("content"), list | tuple)
        else dict(message)
        for message in messages
    ]


def encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair.

    JSON, and names of files that are no UTF-8, give such halves; no tokenizer, table or answer can hold them.
    """
    return HALVES.sub("\ufffd", text)


def is_picture(value: Any) -> bool:
    """True for an image of PIL."""
    return type(value).__module__.startswith("PIL.")


def is_image_part(part: Any) -> bool:
    """True for a part of a content that is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
