r"""Built-in reward functions.

Each takes keyword arguments (`prompts`, `completions`, `completion_ids` and the data set's columns, whichever it asks
for) and returns one number for each completion, or None where it does not apply. A completion is text, or a list of
messages of which the last one's content is read. Options are keyword-only: name them in a reward's specification, as in
`"soft_overlong(max_length=256, cache=64)"`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.signatures import text_of

Completion = str | Sequence[Mapping[str, Any]]

# A comma counts as a thousands separator only: 1,2 is a pair and not the number 12.
NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(?<=\d)")


def exact_match(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1.0 where the completion is `answer`, white space around both aside, else 0.0; None where answer is None."""
    return [
        None if wanted is None else float(text_of(completion).strip() == str(wanted).strip())
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def environment(environment_reward: Sequence[float | None], **columns: Any) -> list[float | None]:
    """The environment's reward: the sum of its steps' rewards, or its `get_reward()`; None where it failed."""
    return list(environment_reward)


def target_length(completions: Sequence[Completion], *, target: int = 20, **columns: Any) -> list[float]:
    """-|target - number of characters|: best at `target` characters."""
    return [-float(abs(target - len(text_of(completion)))) for completion in completions]


def think_format(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """1.0 where the completion opens with one `<think>` and closes it with `</think>`, else 0.0."""
    pattern = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
    return [float(pattern.match(text_of(completion)) is not None) for completion in completions]


def boxed_accuracy(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""1.0 where the last `\boxed{...}` of the completion holds `answer`, else 0.0; None where answer is None.

    Both are compared without white space, dollar signs and a final full stop, numbers by value (`1,000` is `1000.0`).
    An answer may itself be written in `\boxed{}`.
    """
    return [
        None
        if wanted is None
        else float(_same(boxed_content(text_of(completion)), boxed_content(str(wanted)) or str(wanted)))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def gsm8k_accuracy(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1.0 where the number after the completion's last `####` is that of `answer`, else 0.0; None where answer is None.

    `answer` is the number itself or a GSM8K solution that ends in `#### number`. Numbers are compared by value, without
    thousands separators and dollar signs.
    """
    return [
        None
        if wanted is None
        else float(_same(after_hashes(text_of(completion)), after_hashes(str(wanted)) or str(wanted)))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def cosine_scaled(
    completions: Sequence[Completion],
    answer: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    **columns: Any,
) -> list[float | None]:
    r"""`boxed_accuracy` scaled by the number of tokens n along a cosine (arXiv 2502.03373, appendix C.1).

    low + (high - low)/2 * (1 + cos(pi * min(n / max_length, 1))), with (low, high) = (min_value_correct,
    max_value_correct) for a right completion: short ones earn more; and (max_value_wrong, min_value_wrong) for a
    wrong one: short ones lose more.
    """
    rewards: list[float | None] = []
    for right, ids in zip(boxed_accuracy(completions, answer), completion_ids, strict=True):
        if right is None:
            rewards.append(None)
            continue
        low, high = (min_value_correct, max_value_correct) if right else (max_value_wrong, min_value_wrong)
        cosine = math.cos(math.pi * min(len(ids) / max_length, 1.0))
        rewards.append(low + 0.5 * (high - low) * (1.0 + cosine))
    return rewards


def repetition_penalty(
    completion_ids: Sequence[Sequence[int]], *, ngram_size: int = 3, max_penalty: float = -1.0, **columns: Any
) -> list[float]:
    """max_penalty * (1 - distinct n-grams / n-grams) over the token ids (arXiv 2502.03373, appendix C.2).

    0.0 for a completion of fewer than `ngram_size` tokens. Raises ValueError for a positive `max_penalty`.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty is {max_penalty}; a penalty is 0 or negative")
    rewards = []
    for ids in completion_ids:
        ngrams = [tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)]
        rewards.append(max_penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0)
    return rewards


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: int, cache: int, **columns: Any
) -> list[float]:
    """DAPO's length punishment in tokens n (arXiv 2503.14476, equation 13).

    0 up to max_length - cache, then falling linearly to -1 at max_length, and -1 beyond.
    """
    free = max_length - cache
    return [
        0.0 if len(ids) <= free else (free - len(ids)) / cache if len(ids) <= max_length else -1.0
        for ids in completion_ids
    ]


def boxed_content(text: str) -> str:
    r"""The content of the last complete `\boxed{...}`, its braces balanced; empty when there is none."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for index in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : index]
        start = text.rfind(r"\boxed{", 0, start)
    return ""


def after_hashes(text: str) -> str:
    """The number after the last `####`; empty when there is none."""
    numbers = re.findall(r"####\s*(-?\$?[\d.,]*\d)", text)
    return numbers[-1] if numbers else ""


def _same(answer: str, wanted: str) -> bool:
    answer, wanted = re.sub(r"[\s$]", "", answer).removesuffix("."), re.sub(r"[\s$]", "", wanted).removesuffix(".")
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(wanted):
        return float(answer.replace(",", "")) == float(wanted.replace(",", ""))
    return bool(answer) and answer == wanted
