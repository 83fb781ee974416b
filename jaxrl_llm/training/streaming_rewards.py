"""Completions that are graded while others are still sampled."""

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.data.templates import decode_completion, is_conversational
from jaxrl_llm.rewards.pending import Pending


class EarlyGrading:
    """Told of rows as they end (a `rollout.handout.Listener`), it gives their texts to the graders at once."""

    def __init__(self, pending: Pending, prompts: Sequence[Any], tokenizer: Any):
        self.pending, self.prompts, self.tokenizer = pending, prompts, tokenizer
        self.texts: dict[int, Any] = {}

    def __call__(self, row: int, tokens: list[int], text: Any = None) -> None:
        """Takes a row of this process and the tokens of its completion, whose text they are unless it is given."""
        if text is None:
            text = decode_completion(self.tokenizer, tokens, is_conversational(self.prompts[row]))
        self.texts[row] = text
        self.pending.give(row, text, tokens)

    def finish(self, ids: Sequence[list[int]], texts: Sequence[Any] | None = None) -> list[Any]:
        """The texts of every completion, from its token ids unless given; the graders start with those they lack."""
        for row, tokens in enumerate(ids):
            if row not in self.texts:
                self(row, tokens, None if texts is None else texts[row])
        self.pending.start()
        return [self.texts[row] for row in range(len(ids))]
