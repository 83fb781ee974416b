"""Overlap of rewards with decoding: finished rows are graded while others are still sampled."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rewards.runner import Pending


class StreamingRewards:
    """A callback for finished rows that hands their completions to the graders of a batch at once.

    `decode(row, tokens)` gives the completion of a row of this process, text or messages.
    """

    def __init__(self, pending: Pending, decode: Callable[[int, list[int]], Any]):
        self.pending, self.decode = pending, decode
        self.completions: dict[int, Any] = {}

    def __call__(self, row: int, tokens: list[int], completion: Any = None) -> None:
        """Take the tokens of a finished row, and its completion where that is not what the tokens decode to.

        A row behind those of the batch that is graded is decoded alone.
        """
        self.completions[row] = self.decode(row, tokens) if completion is None else completion
        if row < len(self.pending.inputs["prompts"]):
            self.pending.give(row, self.completions[row], tokens)

    def finish(self, ids: Sequence[list[int]], completions: Sequence[Any] | None = None) -> list[Any]:
        """Every row's completion, decoded from its token ids unless given; starts the graders of whole batches."""
        for row, tokens in enumerate(ids):
            if row not in self.completions:
                self(row, tokens, None if completions is None else completions[row])
        self.pending.start()
        return [self.completions[row] for row in range(len(ids))]
