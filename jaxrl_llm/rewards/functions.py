r"""Built-in reward functions.

Each takes keyword arguments (`prompts`, `completions`, `completion_ids` and the data set's columns, whichever it asks
for) and returns one number for each completion, or None where it does not apply. A completion is text, or a list of
messages of which the last one's content is read. Options are keyword-only: name them in a reward's specification, as in
`"soft_overlong(max_length=256, cache=64)"`.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, text_of
from jaxrl_llm.rewards.similarity import ngrams
from jaxrl_llm.rewards.values import after_hashes, boxed_content, leading_quantity, same

Completion = str | Sequence[Mapping[str, Any]]


def exact_match(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1.0 where the completion is `answer`, white space around both aside, else 0.0; None where answer is None.

    An empty completion is no answer: 0.0. An answer that is a whole number as a float, as a column with a fraction or
    an empty field makes of them, is that number without a point too: 12.0 is 12.
    """
    texts = [text_of(completion).strip() for completion in completions]
    wholes = [str(wanted).removesuffix(".0") if isinstance(wanted, float) else wanted for wanted in answer]
    return [
        None if wanted is None else float(bool(text) and text in (str(wanted).strip(), str(whole).strip()))
        for text, wanted, whole in zip(texts, answer, wholes, strict=True)
    ]


def environment(
    environment_reward: Sequence[float | None],
    environment_rewards: Sequence[Mapping[str, float]] | None = None,
    *,
    name: str | None = None,
    **columns: Any,
) -> list[float | None]:
    """The environment's or the agent's reward: the sum of its steps' rewards, or its `get_reward()`; None where it
    failed. With `name`, the one that an agent gave this name, None where it gave none.

    Raises RewardError: a name where no agents run.
    """
    if name is None:
        return list(environment_reward)
    if environment_rewards is None:
        raise RewardError(f"environment(name={name!r}): agents name rewards, and environments give one; leave name out")
    given = sorted({key for rewards in environment_rewards for key in rewards})
    if given and name not in given:
        warnings.warn(
            f"environment(name={name!r}): no agent of a batch gave this reward; they gave {', '.join(given)}",
            stacklevel=2,
        )
    return [rewards.get(name) for rewards in environment_rewards]


def target_length(completions: Sequence[Completion], *, target: int = 20, **columns: Any) -> list[float]:
    """-|target - number of characters|: best at `target` characters."""
    return [-float(abs(target - len(text_of(completion)))) for completion in completions]


def think_format(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """1.0 where the completion opens with its one `<think>` and has its one `</think>` behind some text, else 0.0."""
    rewards = []
    for text in map(text_of, completions):
        thought, _, _ = text.removeprefix("<think>").partition("</think>")
        once = text.startswith("<think>") and text.count("<think>") == 1 and text.count("</think>") == 1
        rewards.append(float(once and bool(thought.strip())))
    return rewards


def boxed_accuracy(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""1.0 where the last `\boxed{...}` of the completion holds `answer`, else 0.0; None where answer is None.

    `\fbox{5}` and `\boxed 5` are boxes too, and an answer may itself be written in one. Numbers are compared by their
    exact values: `1,000` is `1000.0`, `\dfrac12` is `0.5`, and a percent sign, a currency or a unit may be left out
    (`5\%` and `5 cm` are 5, but not `5 m`) or have its name (`60 degrees` is `60^\circ`). Other answers are compared as
    texts, without white space, dollar signs, a final full stop, and the LaTeX of text and spaces (`\text{A}` and `(A)`
    are A); `x = 5` is 5.
    """
    return [
        None
        if wanted is None
        else float(same(boxed_content(text_of(completion)), boxed_content(str(wanted)) or str(wanted)))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def gsm8k_accuracy(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1.0 where the number after the completion's last `####` is that of `answer`, else 0.0; None where answer is None.

    `answer` is the number itself or a GSM8K solution that ends in `#### number`. Numbers are compared by their exact
    values, without thousands separators, currency, percent sign, bold type and the words that follow; several numbers,
    as in `5 or 6`, are none.
    """
    rewards: list[float | None] = []
    for completion, wanted in zip(completions, answer, strict=True):
        if wanted is None:
            rewards.append(None)
            continue
        line, right = after_hashes(text_of(completion)), after_hashes(str(wanted)) or str(wanted)
        number, expected = leading_quantity(line), leading_quantity(right)
        if number is not None and expected is not None:
            rewards.append(float(number.matches(expected)))
        else:
            rewards.append(float(expected is None and same(line, right)))
    return rewards


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

    Raises RewardError: a `max_length` that is not above 0.
    """
    if max_length <= 0:
        raise RewardError(f"cosine_scaled: max_length is {max_length}; it is a number of tokens above 0")
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

    0.0 for a completion of fewer than `ngram_size` tokens. Raises RewardError: a positive `max_penalty`, or an
    `ngram_size` below 1.
    """
    if max_penalty > 0:
        raise RewardError(f"repetition_penalty: max_penalty is {max_penalty}; a penalty is 0 or negative")
    if ngram_size < 1:
        raise RewardError(f"repetition_penalty: ngram_size is {ngram_size}; n-grams have one token or more")
    rewards = []
    for ids in completion_ids:
        grams = ngrams(ids, ngram_size)
        rewards.append(max_penalty * (1 - len(grams) / grams.total()) if grams else 0.0)
    return rewards


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: int, cache: int, **columns: Any
) -> list[float]:
    """DAPO's length punishment in tokens n (arXiv 2503.14476, equation 13).

    0 up to max_length - cache, then falling linearly to -1 at max_length, and -1 beyond. Raises RewardError: a `cache`
    that is not from 0 to `max_length`, with which every completion would be punished.
    """
    if not 0 <= cache <= max_length:
        raise RewardError(f"soft_overlong: cache is {cache}; it is from 0 to max_length, which is {max_length}")
    free = max_length - cache
    return [
        0.0 if len(ids) <= free else (free - len(ids)) / cache if len(ids) <= max_length else -1.0
        for ids in completion_ids
    ]
