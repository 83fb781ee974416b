"""Preference rows: the prompt, and the answers to it that are compared."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.conversations import as_messages
from jaxrl_llm.data.templates import is_conversational

GOLD = "reference"  # the column of the gold completion, as in TRL's data: nothing of the reference policy
ANSWERS = {"pairs": ("chosen", "rejected"), "triples": ("chosen", "rejected", GOLD)}  # to one prompt, by columns


def split_pair(example: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a preference row.

    Without a prompt of the same kind (both text, or both messages) it is the longest common beginning of the two: whole
    messages, or characters up to but not including a last space. That may fall inside a word, so text is best given an
    explicit prompt. So too where both answers are whole conversations that begin with the prompt.

    Raises ConfigError: nothing in common, or completions that do not differ.
    """
    chosen: Any = example.get("chosen")
    rejected: Any = example.get("rejected")
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str) and not is_conversational(value):
            raise ConfigError(
                f"column {name!r} is {value!r:.80}; it takes text or a list of messages with role and content"
            )
    if has_prompt(example):
        text = isinstance(prompt := example["prompt"], str)
        return prompt, chosen if text else as_messages(chosen), rejected if text else as_messages(rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    # Tokenizers put the space with the word after it, so it belongs to the completion.
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    if shared == 0:
        prompt = example.get("prompt")
        if isinstance(prompt, str) and not isinstance(chosen, str) and not isinstance(rejected, str):
            raise ConfigError(
                f"the prompt is the text {prompt!r:.80}, but chosen and rejected are messages that do not begin with "
                "it: give all as text, or all as messages"
            )
        raise ConfigError(
            "chosen and rejected share no beginning to be the prompt; add a prompt column, or name yours with "
            "data.prompt_key"
        )
    if chosen == rejected or not (isinstance(chosen, str) or (chosen[shared:] and rejected[shared:])):
        raise ConfigError(
            "chosen and rejected are the same, or one only begins the other; drop the row or add a prompt"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def prompt_and_answers(example: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, Any]]:
    """The prompt of a preference row of a kind, and the answers to it by their columns; raises ConfigError for others
    than `split_pair` and `gold_completion` take."""
    prompt, chosen, rejected = split_pair(example)
    answers = {"chosen": chosen, "rejected": rejected}
    return prompt, answers | ({GOLD: gold_completion(example, prompt)} if GOLD in ANSWERS[kind] else {})


def gold_completion(example: Mapping[str, Any], prompt: Any) -> Any:
    """The gold completion of a preference row: its column `reference`, without the prompt where `split_pair` found that
    in the two answers.

    Raises ConfigError for one that is neither text nor messages, or has another prompt.
    """
    gold = example[GOLD]
    if not isinstance(gold, str) and not is_conversational(gold):
        raise ConfigError(
            f"column {GOLD!r} is {gold!r:.80}; it is the gold completion, text or a list of messages with role and "
            "content"
        )
    if has_prompt(example):
        return gold if isinstance(prompt, str) else as_messages(gold)
    if gold[: len(prompt)] != prompt or not (isinstance(gold, str) or gold[len(prompt) :]):
        raise ConfigError(
            f"column {GOLD!r} does not go on from the prompt, {prompt!r:.80}, which chosen and rejected begin with: "
            "add a prompt column, or let it begin so too"
        )
    return gold[len(prompt) :]


def has_prompt(example: Mapping[str, Any]) -> bool:
    """True where the prompt of a preference row is read, False where it is the common beginning of the two answers."""
    prompt, answers = example.get("prompt"), (example["chosen"], example["rejected"])
    texts = {isinstance(answer, str) for answer in answers}
    if prompt is None or len(texts) > 1:
        return False
    if not is_conversational(prompt):
        return texts == {isinstance(prompt, str)}
    return not all(isinstance(answer, list) and answer[: len(prompt)] == list(prompt) for answer in answers)
