"""Parsers of a judge's reply: a number, a rubric's numbers, or the better of two answers."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, shorten

OBJECT = re.compile(r'\{\s*["}]')
NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)"
RATED = rf"({NUMBER})(?:[\s*_(]*(?:/|(?:out\s+)?of\s)[\s*_]*{NUMBER})?"  # "8/10" and "8 (out of 10)" are 8
# "Score: 8" and "the score is **8**", whatever numbers follow.
NAMED = rf"(?i)\b(?:score|rating|grade)\b[\s*_\"']*(?:[:=]|is\b)[\s*_\"'\[]*{RATED}"
WINNER = r"(?<![A-Za-z])(A(?!\s+[Tt]ie)|B|[Tt]ie|TIE)(?![A-Za-z'])"


WON = {"a": 1.0, "b": 0.0}  # what A gets; all else is a tie
# The verdicts of MT-Bench, [[A]], [[B]] and [[C]] for a tie, and of Arena-Hard, [[A>>B]] to [[B>>A]].
VERDICT = re.compile(r"(?i)\[\[\s*(?:(A|B|C|tie)|(A|B)\s*(>{1,2}|=|<{1,2})\s*[AB])\s*\]\]")


class ReplyError(RewardError):
    """A reply without the score or the winner that was asked for."""


def read_score(text: str, pattern: str | None, field: str, scale: tuple[float, float] | None) -> float:
    """The score of a reply: 0 to 1 when it was asked for on `scale` (lowest, highest), else as it is.

    It is the first group of the last match of the regular expression `pattern`; without one, the number at `field` of
    the last JSON object that has it, or else the last one that is called so ("Score: 8"), or the last number of the
    text. Raises ReplyError: there is none, or it lies outside the scale.
    """
    if pattern is not None:
        matches = list(re.finditer(pattern, text))
        if not matches:
            raise ReplyError(f"the reply does not match {pattern!r}: {shorten(text)}")
        value: Any = matches[-1].group(1 if matches[-1].re.groups else 0)
    else:
        objects = [tree for tree in json_objects(text) if field in tree]
        plain = re.findall(NAMED, text) or re.findall(RATED, text)
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
    """1.0 when the reply prefers A, 0.0 for B, 0.5 for a tie: the last one in double brackets ("[[A]]", "[[A>B]]"), the
    only one that it names, or else the one that stands alone at its end ("A is longer. Verdict: B") or at its beginning
    ("A. It is clearer than B").

    Raises ReplyError when there is none: "A is better than B" might as well be "A is worse than B".
    """
    if verdicts := VERDICT.findall(text):
        winner, first, sign = (part.lower() for part in verdicts[-1])
        if sign:
            winner = "tie" if sign == "=" else first if ">" in sign else "b" if first == "a" else "a"
        return WON.get(winner, 0.5)
    named = [name.lower() for name in re.findall(WINNER, text)]
    if not named:
        raise ReplyError(f"the reply names neither A nor B nor tie: {shorten(text)}")
    if len(set(named)) > 1:
        alone = re.search(rf"(?:^|[.!?:;,\n])[^\w\n]{{0,9}}{WINNER}\W*$", text)
        alone = alone or re.match(rf"\W{{0,9}}{WINNER}[^\w.!;,\n:]{{0,9}}[.!;,\n]", text)
        if alone is None:
            raise ReplyError(f"the reply names {' and '.join(sorted(set(named)))}, and no one alone: {shorten(text)}")
        named = [alone[1].lower()]
    return WON.get(named[0], 0.5)


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object in a text, without those inside another one; those that are nested too deep are passed over.

    The search ends where a text of many beginnings without an end would take time that is quadratic in its length.
    """
    decoder, position, work = json.JSONDecoder(), 0, 10**6 + 20 * len(text)
    while work > 0 and (start := OBJECT.search(text, position)) is not None:
        try:
            tree, position = decoder.raw_decode(text, start.start())
        except json.JSONDecodeError as error:
            position = start.start() + 1
            work -= error.pos - position + error.pos // 64  # the error counts the lines before it
        except (ValueError, RecursionError):  # an integer of too many digits, or too deep
            position = start.start() + 1
            work -= 50_000
        else:
            if isinstance(tree, dict):
                yield tree


def _scaled(value: Any, scale: tuple[float, float] | None, text: str) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        rated = re.fullmatch(RATED, value.strip()) if isinstance(value, str) else None
        number = float(value if rated is None else rated[1])
    except (TypeError, ValueError, OverflowError):
        raise ReplyError(f"the score {value!r} is no number: {shorten(text)}") from None
    if not math.isfinite(number):
        raise ReplyError(f"the score {number} is not finite: {shorten(text)}")
    if scale is None:
        return number
    low, high = scale
    if not low <= number <= high:
        raise ReplyError(f"the score {number:g} is not between {low:g} and {high:g}: {shorten(text)}")
    return (number - low) / (high - low)
