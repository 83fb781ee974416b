"""Steps of completions as turns: where a reward gives each step a part of its own, advantages can follow the steps."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.algorithms.turn_advantages import Turn, Turns, turn_table
from jaxrl_llm.data.token_spans import token_places
from jaxrl_llm.rewards.judge import text_of_content

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
        columns: Mapping[str, Sequence[Any]],
        completions: Sequence[Any],
        ids: Sequence[Sequence[int]],
        group_size: int,
        first_column: int,
    ) -> Turns:
        """The steps of rows as turns, which answer the text before them.

        A token that two steps share is the first one's, the last step has what is behind it, the end of the text too,
        and a row without steps is one turn.
        """
        found = columns.get(f"{self.reward}/steps", [None] * len(ids))
        rows = [self._turns(*row) for row in zip(found, completions, ids, strict=True)]
        return turn_table(rows, self.most, group_size, first_column)

    def _turns(self, steps: Sequence[tuple[int, float]] | None, completion: Any, ids: Sequence[int]) -> list[Turn]:
        if not steps:
            return [Turn(len(ids), 0.0)]
        text = completion if isinstance(completion, str) else text_of_content(completion[-1].get("content"))
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
