"""Built-in rewards for mathematical answers that need more than comparing texts: equal values, equal expressions."""

import importlib.util
import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, text_of

PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
SECONDS = 5  # for parsing or comparing one expression


def numeric_answer(
    completions: Sequence[Any], answer: Sequence[Any], *, tolerance: float = 1e-6, **columns: Any
) -> list[float | None]:
    """1.0 where the completion's last number is `answer`'s last number, else 0.0; None where answer is None.

    They may differ by `tolerance` times the larger of 1 and |answer|. Raises RewardError: an answer without a number.
    """
    rewards: list[float | None] = []
    for row, (completion, wanted) in enumerate(zip(completions, answer, strict=True)):
        if wanted is None:
            rewards.append(None)
            continue
        right, number = _last_number(str(wanted)), _last_number(text_of(completion))
        if right is None:
            raise RewardError(f"numeric_answer: the answer of row {row}, {wanted!r}, holds no number")
        rewards.append(float(number is not None and abs(number - right) <= tolerance * max(1.0, abs(right))))
    return rewards


def math_accuracy(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""1.0 where the completion's LaTeX answer, `\boxed{}` first, equals `answer` as mathematics, else 0.0.

    None where answer is None or cannot be parsed. It needs the package math-verify (`pip install jaxrl_llm[math]`); an
    expression gets 5 seconds in the main thread or a worker process, and no limit of its own in another thread.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise RewardError("math_accuracy needs the package math-verify: pip install math-verify")
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify keeps time with signals, which only the main thread gets; it warns of every call without.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    if seconds is None:
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
    # Without these, any number or letter of the text would count as the completion's answer.
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    rewards: list[float | None] = []
    for completion, wanted in zip(completions, answer, strict=True):
        gold = [] if wanted is None else parse(_delimited(str(wanted)), parsing_timeout=seconds)  # type: ignore[arg-type]
        if not gold:
            rewards.append(None)
            continue
        text = text_of(completion)
        parsed = parse(text, targets, extraction_mode="first_match", parsing_timeout=seconds)  # type: ignore[arg-type]
        rewards.append(float(verify(gold, parsed, timeout_seconds=seconds)))
    return rewards


def _delimited(answer: str) -> str:
    r"""An answer with LaTeX delimiters, without which the parser takes `\frac{1}{2}` for text."""
    return answer if re.search(r"\$|\\boxed|\\\(|\\\[", answer) else f"${answer}$"


def _last_number(text: str) -> float | None:
    numbers = PLAIN_NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
