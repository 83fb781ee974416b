"""Built-in rewards for mathematical answers that need more than comparing texts: equal values, equal expressions."""

import importlib.util
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of
from jaxrl_llm.rewards.values import SHORT_UNITS, boxed_content, last_number, plain, quantity
from jaxrl_llm.rewards.workers.bounded import scores_in_time

SECONDS = 5  # for parsing or comparing one expression, by math-verify's own clock
ROW_SECONDS = 12.0  # for all of a completion, by ours
LONGEST = 1000  # characters of an expression
# A few letters may be variables: what is `6 abc` to a box is a product here.
SURE_UNIT = re.compile(rf"\W|(?:{SHORT_UNITS})(?![a-z])|.*[a-z]{{4}}|\w+/", re.IGNORECASE)
# Patterns of what math-verify does not read, or misreads, and what means the same.
SYNONYMS = {
    r"\\\$": "", "~": " ", r"\\lbrace": r"\\{", r"\\rbrace": r"\\}", r"\\varnothing": r"\\emptyset",
    r"(?<![.,;\s])\s*[.,;]\s*$": "",
}  # fmt: skip
ROOT = re.compile(r"√\s?(?:[({]([^(){}]*)[)}]|(\d+(?:\.\d+)?|[A-Za-z]))")
# Arguments of commands without braces, one letter or digit each: `\frac\pi2`, `\frac{1}x`, `\sqrt[3]2`.
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_LETTERS = "alpha|beta|gamma|delta|theta|lambda|mu|phi|pi|rho|sigma|tau|omega|ell|infty"
_BARE = rf"(?:[A-Za-z0-9]|\\(?:{_LETTERS})(?![A-Za-z]))"
UNBRACED = re.compile(
    rf"(?P<command>\\[dtc]?frac(?![A-Za-z])|\\sqrt(?:\[\w+\])?)\s*(?P<first>{_BARE})"
    rf"|(?P<above>\\[dtc]?frac\s*{_BRACED})\s*(?P<second>{_BARE})"
)


def numeric_answer(
    completions: Sequence[Any], answer: Sequence[Any], *, tolerance: float = 1e-6, **columns: Any
) -> list[float | None]:
    r"""1.0 where the completion's last number is `answer`'s last number, else 0.0; None where answer is None.

    They may differ by `tolerance` times the larger of 1 and |answer|; with 0 they are compared exactly. `1/2`,
    `\frac{1}{2}`, `1 1/2`, `1,234.5`, `2 million` and `3 \times 10^8` are one number each, `50%` is 50 or 0.5; the
    minus of `10-5` is no sign. A last number that is a part of a version, a date, a root, of `5 or 6` or of ±5 is none.
    Raises RewardError: an answer without a number, or a tolerance that is negative or not finite.
    """
    if not 0 <= tolerance < float("inf"):
        raise RewardError(f"numeric_answer: tolerance is {tolerance}; it is a number of at least 0")
    rewards: list[float | None] = []
    for row, (completion, wanted) in enumerate(zip(completions, answer, strict=True)):
        if wanted is None:
            rewards.append(None)
            continue
        right, number = last_number(str(wanted)), last_number(text_of(completion))
        if right is None:
            raise RewardError(f"numeric_answer: the answer of row {row}, {wanted!r}, holds no number")
        allowed = Fraction(tolerance) * max(Fraction(1), abs(right.value))
        rewards.append(float(number is not None and number.matches(right, allowed)))
    return rewards


def math_accuracy(
    completions: Sequence[Any], answer: Sequence[Any], *, after: str = "", **columns: Any
) -> list[float | None]:
    r"""1.0 where the completion's LaTeX answer, its last `\boxed{}` first, equals `answer` as mathematics, else 0.0.

    None where answer is None or cannot be parsed. Numbers are read as `boxed_accuracy` reads them, and units are passed
    over. Of an equation the last side counts, unless two of its sides are different numbers (`41=42`); several answers
    (`42 or 43`) equal no single one. With `after`, `</think>` for example, only what follows the last such text is
    read, and a completion without it scores 0.0. It needs the package math-verify (`pip install "jaxrl_llm[math]"`),
    which runs in processes of its own: a completion that takes more than 12 seconds, or whose answer has more than 1000
    characters, scores 0.0, the former with a warning.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise RewardError("math_accuracy needs the package math-verify: pip install math-verify")
    texts = [text_of(completion) for completion in completions]
    if after:
        texts = [text.rpartition(after)[2] if after in text else "" for text in texts]
    rows = [row for row, wanted in enumerate(answer) if wanted is not None]
    arguments = {"texts": [texts[row] for row in rows], "answers": [str(answer[row]) for row in rows]}
    rewards: list[float | None] = [None] * len(texts)
    scores = scores_in_time(
        "math_accuracy", f"{__name__}:verified", arguments, ROW_SECONDS,
        lambda index, took: f"{shorten(boxed_content(text := arguments['texts'][index]) or text, 100)} {took}",
    )  # fmt: skip
    for row, score in zip(rows, scores, strict=True):
        rewards[row] = score
    return rewards


def verified(texts: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """The rewards of `math_accuracy` without its time limit: math-verify keeps time by signals, if code lets it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Without these, any number or letter of the text would count as the completion's answer.
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]

    def parsed(expression: str, **options: Any) -> list[Any]:
        return parse(expression, parsing_timeout=SECONDS, **options) if expression else []

    rewards: list[float | None] = []
    for text, wanted in zip(texts, answers, strict=True):
        box, right = readable(boxed_content(text)), readable(boxed_content(wanted) or wanted)
        # Without delimiters the parser takes `\frac{1}{2}` for text.
        gold = parsed(right if re.search(r"\$|\\\(|\\\[", right) else f"${right}$")
        if not gold:
            rewards.append(None)
            continue
        if len(box) > LONGEST or (several(box, gold[0]) and not several(right)):
            rewards.append(0.0)
            continue
        answer = parsed(f"\\boxed{{{box}}}" if box else text, extraction_config=targets, extraction_mode="first_match")
        chains = []
        if answer and "=" in answer[-1] and "=" not in right:
            # The parser gives up on `42=43=42` as a whole, and takes the last side; not all that an = parts are sides.
            sides = box.split("=")
            pairs = map("=".join, itertools.pairwise(sides) if len(sides) > 2 else ())
            whole = [pair for pair in pairs if all(pair.count(a) == pair.count(b) for a, b in ("{}", "()"))]
            equations = [answer, *(parsed(f"${pair}$") for pair in whole)]
            chains = [chain for equation in equations if equation for chain in equated_numbers(equation[0])]
        agree = all(verify(*pair, timeout_seconds=SECONDS) for chain in chains for pair in itertools.pairwise(chain))
        rewards.append(float(agree and verify(gold, answer, timeout_seconds=SECONDS)))
    return rewards


def readable(expression: str) -> str:
    r"""The expression as math-verify reads it: of a quantity its number, else without what it stumbles over.

    To it `1\,234` is 1 + 234, `2 3/4`, `5 000`, `1e5` and `5 km` are products, `0.\overline{3}` is 0, `\$5` nothing. A
    percent sign it knows itself. The sides of an equation are read one by one.
    """
    number = quantity(plain(expression.replace(r"\$", "$")).strip("$ "))
    if (
        number is not None
        and not number.percent
        and not re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", expression, re.ASCII)
        and (not number.unit or SURE_UNIT.match(number.unit))
    ):
        above, below = number.value.as_integer_ratio()
        return str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"
    if "=" in expression:
        return "=".join(map(readable, expression.split("=")))
    expression = ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", expression.replace("∞", r"\infty "))
    while len(expression) <= LONGEST and (bare := UNBRACED.search(expression)):
        before, argument = bare["command"] or bare["above"], bare["first"] or bare["second"]
        expression = f"{expression[: bare.start()]}{before}{{{argument}}}{expression[bare.end() :]}"
    for name, common in SYNONYMS.items():
        expression = re.sub(rf"{name}(?![A-Za-z])", common, expression)
    return expression.strip()


def several(expression: str, gold: Any = None) -> bool:
    """True for an expression that names several answers in words or by ±, which is wrong where `gold` is parsed as one.

    A set takes every form; a pair, which is parsed like an interval, takes `x = 1 and y = 2` but not `1 or 2`.
    """
    from sympy import Interval, Set, Tuple

    if isinstance(gold, Set) and not isinstance(gold, Interval):
        return False
    words = r"\bor\b" if isinstance(gold, (Interval, Tuple)) else r"\b(?:or|and)\b"
    return bool(re.search(rf"{words}|±|\\pm(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])", plain(expression)))


def equated_numbers(value: Any) -> list[list[Any]]:
    """The sides that are numbers of each chain of equations in a parsed answer: `x = 41 = 42` gives [[41, 42]].

    What has a letter or an unknown function in it is no number, nor is e alone, which is a name on such a side.
    """
    from sympy import Basic, E, Eq, Set, Tuple
    from sympy.core.function import AppliedUndef

    parts = value.args if isinstance(value, (Set, Tuple)) else [value]
    equations = [part.atoms(Eq) if isinstance(part, Basic) else () for part in parts]
    chains = [[side for equation in each for side in equation.args] for each in equations]
    return [[side for side in chain if side.is_number and side != E and not side.has(AppliedUndef)] for chain in chains]
