"""Steps of completions as turns, for advantages that credit each step with its own part of the reward."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.turn_advantages import Turn, Turns, turn_table
from jaxrl_llm.data.token_spans import token_places
from jaxrl_llm.rewards.runner import Graded
from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of

MOST_STEPS = 256  # of a row, as tables of turns have a column for each


@dataclass(frozen=True)
class StepCredit:
    """The steps that a reward function finds in completions.

    The function, which says so by an attribute `gives_steps`, logs them in the column `<its name>/steps` (`log_extra`):
    for each completion a list of (letters, reward), how many letters of the completion a step ends behind and its part
    of the reward. Of several messages the letters are those of the last.
    """

    reward: str  # the name of the function
    texts: Sequence[bytes | None]  # of the policy's tokens
    most: int  # steps of a row; those behind are part of the last

    def table(
        self,
        graded: Graded,
        completions: Sequence[Any],
        ids: Sequence[Sequence[int]],
        group_size: int,
        first_column: int,
    ) -> Turns:
        """The steps of rows as turns, which answer the text before them.

        A token that two steps share is the first one's, the last step has what is behind it, the end of the text too,
        and a row without steps is one turn: all rows are where the function was late or failed. Raises RewardError
        where it logged no steps, or what are none.
        """
        logged, column = graded.logged, f"{self.reward}/steps"
        broke_off = any(f"rewards/{self.reward}/{why}" in logged.totals for why in ("timeouts", "errors"))
        if column not in logged.columns and not broke_off and np.isfinite(graded.rewards).any():
            raise RewardError(
                f"reward {self.reward!r} says that it gives steps (gives_steps), but logs none: it calls "
                f"log_extra({column!r}, values) with a list of (letters, reward) for each completion"
            )
        found = logged.columns.get(column, [None] * len(ids))
        rows = [self._turns(*row) for row in zip(found, completions, ids, strict=True)]
        return turn_table(rows, self.most, group_size, first_column)

    def _turns(self, found: Any, completion: Any, ids: Sequence[int]) -> list[Turn]:
        try:
            steps = [(int(letters), float(reward)) for letters, reward in found or ()]
            wrong = any(before >= end for (before, _), (end, _) in itertools.pairwise(((0, 0.0), *steps)))
        except (TypeError, ValueError):
            steps, wrong = [], True
        if wrong or not all(math.isfinite(reward) for _, reward in steps):
            raise RewardError(
                f"reward {self.reward!r} logs the steps {shorten(found)}, but a completion's are a list of (letters, "
                "reward): how many letters of the completion each ends behind, more from step to step, and a number"
            )
        if not steps:
            return [Turn(len(ids), 0.0)]
        text = text_of(completion)
        places = token_places(text.encode(), [self.texts[token] for token in ids])
        for number in range(1, len(places)):  # special tokens write nothing
            places[number] = max(places[number], places[number - 1])
        turns, begin = list[Turn](), 0
        for letters, reward in steps:
            end = bisect_left(places, len(text[:letters].encode())) + 1
            turns.append(Turn(min(end, len(ids)), reward, text[:begin]))
            begin = letters
        rest = turns[self.most - 1 :] or turns[-1:]
        return [*turns[: -len(rest)], rest[0]._replace(end=len(ids), reward=sum(turn.reward for turn in rest))]
