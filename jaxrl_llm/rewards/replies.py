"""Parsers of a judge's reply: a number, a rubric's numbers, or the better of two answers."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, shorten

NUMBER = r"[-+]?\d+(?:\.\d+)?"


class ReplyError(RewardError):
    """A reply without the score or the winner that was asked for."""


def read_score(text: str, pattern: str | None, field: str, scale: tuple[float, float] | None) -> float:
    """The score of a reply: 0 to 1 when it was asked for on `scale` (lowest, highest), else as it is.

    It is the first group of the last match of the regular expression `pattern`; without one, the number at `field` of
    the last JSON object that has it, or else the last number of the text. Raises ReplyError: there is none, or it lies
    outside the scale.
    """
    if pattern is not None:
        matches = list(re.finditer(pattern, text))
        if not matches:
            raise ReplyError(f"the reply does not match {pattern!r}: {shorten(text)}")
        value: Any = matches[-1].group(1 if matches[-1].re.groups else 0)
    else:
        objects = [tree for tree in json_objects(text) if field in tree]
        # "8/10" is 8 of 10.
        plain = re.findall(rf"({NUMBER})(?:\s*/\s*{NUMBER})?", text)
        if not objects and not plain:
            raise ReplyError(f"the reply holds no number: {shorten(text)}")
        value = objects[-1][field] if objects else plain[-1]
    return _scaled(value, scale, text)


def read_rubric(
    text: str, criteria: Mapping[str, float], scale: tuple[float, float] | None
) -> tuple[float, dict[str, float]]:
    """The weighted mean of a rubric's scores, and each of them, from the last JSON object that has them all.

    `criteria` are names and weights. Raises ReplyError: there is no such object, or a score lies outside the scale.
    """
    objects = [tree for tree in json_objects(text) if all(name in tree for name in criteria)]
    if not objects:
        raise ReplyError(f"the reply holds no JSON object with {', '.join(criteria)}: {shorten(text)}")
    scores = {name: _scaled(objects[-1][name], scale, text) for name in criteria}
    total = sum(criteria.values())
    return sum(weight * scores[name] for name, weight in criteria.items()) / total, scores


def read_winner(text: str) -> float:
    """1.0 when the reply prefers A, 0.0 for B, 0.5 for a tie: the last of them that stands alone.

    Raises ReplyError when none does.
    """
    winners = re.findall(r"(?<![A-Za-z])(A|B|[Tt]ie|TIE)(?![A-Za-z'])", text)
    if not winners:
        raise ReplyError(f"the reply names neither A nor B nor tie: {shorten(text)}")
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[winners[-1].lower()]


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object in a text, without those inside another one."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            tree, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        except RecursionError:  # thousands of brackets, which no reply means
            return
        else:
            if isinstance(tree, dict):
                yield tree
        start = text.find("{", end)


def _scaled(value: Any, scale: tuple[float, float] | None, text: str) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise ReplyError(f"the score {value!r} is no number: {shorten(text)}") from None
    if scale is None:
        return number
    low, high = scale
    if not low <= number <= high:
        raise ReplyError(f"the score {number:g} is not between {low:g} and {high:g}: {shorten(text)}")
    return (number - low) / (high - low)
