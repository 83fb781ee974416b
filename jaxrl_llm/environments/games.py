"""Built-in environments: short games whose every move can be checked."""

from typing import Any

from jaxrl_llm.environments.protocol import EpisodeError, Step


class SortThenSmallest:
    """Sort digits, then name the smallest, on rows of `task:sort` (prompt `sort:4821=`).

    A right first answer (`1248`) earns `first`, and the environment asks `sort:=`, which means: the first of them? A
    right second answer (`1`) earns the rest of 1.0. A wrong answer ends the episode.
    """

    def __init__(self, first: float = 0.0):
        self.first = first
        self.answer, self.turn = "", 0

    def reset(self, row: dict[str, Any]) -> None:
        """Start a game; the row's own prompt is the first question.

        Raises EpisodeError for a prompt that asks for another game.
        """
        prompt = row["prompt"]
        if not (isinstance(prompt, str) and prompt.startswith("sort:") and prompt.endswith("=")):
            raise EpisodeError(
                f"sort_then_smallest plays on prompts such as 'sort:4821=', not {prompt!r}: set data.path to task:sort"
            )
        self.answer, self.turn = "".join(sorted(prompt.removeprefix("sort:").removesuffix("="))), 0

    def step(self, text: str) -> Step:
        """Judge an answer, and ask the second question after a right first one."""
        self.turn += 1
        if text != (self.answer if self.turn == 1 else self.answer[0]):
            return Step(None, 0.0, done=True)
        return Step("sort:=", self.first) if self.turn == 1 else Step(None, 1.0 - self.first, done=True)


class SmallestOfEach:
    """Name the smallest digit of one question after the other, on rows of `task:smallest`.

    The row's column `questions` holds them; the first is the prompt (`4821=`). A right answer (`1`) earns its share of
    1.0. A wrong one earns nothing and changes nothing: all episodes of a prompt meet the same questions, and what an
    answer was worth shows in the reward of its own turn.
    """

    def __init__(self):
        self.questions, self.turn = [], 0

    def reset(self, row: dict[str, Any]) -> None:
        """Start a game; the row's own prompt is the first question.

        Raises EpisodeError for a row without its questions.
        """
        questions = row.get("questions")
        if not questions or row["prompt"] != questions[0]:
            raise EpisodeError(
                f"smallest_of_each plays on rows whose column questions begins with the prompt {row['prompt']!r}, not "
                f"with {questions!r} there: set data.path to task:smallest"
            )
        self.questions, self.turn = list(questions), 0

    def step(self, text: str) -> Step:
        """Judge an answer, and ask the next question."""
        reward = (text == min(self.questions[self.turn].removesuffix("="))) / len(self.questions)
        self.turn += 1
        if self.turn == len(self.questions):
            return Step(None, reward, done=True)
        return Step(self.questions[self.turn], reward)
