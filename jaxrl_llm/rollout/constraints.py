"""What completions may and may not contain, from texts of the configuration to token ids; host side."""

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config import ConfigError


def bad_word_ids(name: str, words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token ids of each of the `words` of the setting `name`: at the start of a text, and behind a space.

    The second only where the space changes the first token and adds none, as in vLLM. Another tokenization of the same
    text is not forbidden. Raises ConfigError for a word without tokens, and without a tokenizer.
    """
    if words and tokenizer is None:
        raise ConfigError(f"{name} is {tuple(words)}, but the model has no tokenizer to read it with")
    sequences: list[tuple[int, ...]] = []
    for word in words:
        alone, behind = (tuple(tokenizer.encode(lead + word.lstrip(), add_special_tokens=False)) for lead in ("", " "))
        if not word.strip() or not alone:
            raise ConfigError(f"{name} has {word!r}, which has no tokens of its own: give words")
        sequences.append(alone)
        if behind[0] != alone[0] and len(behind) == len(alone):
            sequences.append(behind)
    return tuple(dict.fromkeys(sequences))


def check_biased_tokens(name: str, logit_bias: Sequence[tuple[int, float]], vocab: int) -> None:
    """Raises ConfigError where the setting `name` has a token that is not among the model's `vocab`."""
    for token, bias in logit_bias:
        if token >= vocab:
            raise ConfigError(f"{name} has {token}={bias:g}, but the model's tokens are 0 to {vocab - 1}")
