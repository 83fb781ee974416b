"""What a run leaves: a line for each measurement, and whether the level has been reached."""

import os
import statistics
import time

import numpy as np

from benchmarks.race.contests import Contest, Row

WINDOW = 5  # steps whose mean reward has to reach the level


class Record:
    """Lines with the seconds and the processor's seconds since the process began, and a mean reward or a loss.

    It is the reward function itself, whenever it is called with all completions of a step, and what evaluations report
    their loss to.
    """

    def __init__(self, contest: Contest):
        self.reward, self.level = contest.reward, contest.settings.level
        self.lines, self.tokens = [], 0
        self.__name__ = "reward"  # by which TRL calls it

    def done(self) -> bool:
        """Whether the level has been reached."""
        return reached(self.lines, self.level) is not None

    def __call__(self, completions, answer, completion_ids, **_) -> list[float | None]:
        assert self.reward is not None
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        found: list[float | None] = [self.reward(*pair) for pair in zip(texts, answer, strict=True)]
        self.tokens += sum(map(len, completion_ids))
        self._write(tokens=self.tokens, reward=float(np.mean(np.asarray(found, float))))
        return found

    def loss(self, step: int, loss: float) -> None:
        """Keeps the loss on held-out rows after some steps."""
        self._write(step=step, loss=float(loss))

    def _write(self, **numbers: float) -> None:
        line = {"seconds": time.time() - float(os.environ["RACE_BEGAN"]), "cpu": sum(os.times()[:4]), **numbers}
        self.lines.append({name: round(value, 4) for name, value in line.items()})


def measured(lines: list[Row]) -> str:
    """What the lines hold: a loss or a reward."""
    return "loss" if lines and "loss" in lines[0] else "reward"


def courses(lines: list[Row]) -> list[float]:
    """What is compared with the level, at each line: the loss, or the mean reward of the last steps up to there."""
    if measured(lines) == "loss":
        return [line["loss"] for line in lines]
    rewards = [line["reward"] for line in lines]
    return [statistics.mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]


def reached(lines: list[Row], level: float) -> Row | None:
    """The first line at which the loss, or the mean reward of the last steps, has reached the level; None: no line."""
    falls = measured(lines) == "loss"
    for number, (line, value) in enumerate(zip(lines, courses(lines), strict=True), 1):
        if value <= level if falls else number >= WINDOW and value >= level:
            return {"step": number} | line
    return None
