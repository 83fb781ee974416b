"""What is raced on: rows, what completions are worth, and settings that are the same for every library."""

import difflib
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]
HELD_OUT = 32  # rows whose loss is measured, in sft and dpo


class Settings(NamedTuple):
    """What all libraries are told."""

    steps: int  # at most
    prompts: int  # of a step; rows in sft, pairs in dpo
    group: int  # completions of a prompt
    prompt_tokens: int  # at most
    tokens: int  # of a completion, at most
    learning_rate: float
    level: float  # the mean reward, or the loss on held-out rows, to reach
    every: int = 1  # steps between two measurements


class Contest(NamedTuple):
    """A task: its rows by seed, the loss that is minimised, what a completion is worth, and the settings."""

    rows: Callable[[int], list[Row]]
    method: str  # grpo, sft or dpo
    reward: Callable[[str, str], float] | None  # of a completion and the answer; None where nothing is sampled
    settings: Settings


def sorting(seed: int) -> list[Row]:
    """The embedded model's own task."""
    from jaxrl_llm.data import tasks

    return tasks.generate("sort", size=4096, seed=seed)


def reversing(seed: int) -> list[Row]:
    """Words of four to six letters, to be written backwards."""
    draw, rows = random.Random(f"reverse/{seed}"), []
    for _ in range(4096):
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 6)))
        text = f"Write the letters of the word {word} in reverse order. Answer with the reversed word alone."
        rows.append(_asked(text) | {"answer": word[::-1]})
    return rows


def summing(seed: int) -> list[Row]:
    """Word problems of one or two steps, as GSM8K's (arXiv 2110.14168)."""
    return [
        _asked(f"{problem} Answer with a number.") | {"answer": str(answer)} for problem, _, answer in _sums(seed, 4096)
    ]


def adding(seed: int) -> list[Row]:
    """Sums and differences of two or three numbers below 100: reasoning-gym's chain_sum."""
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", size=4096, seed=seed, max_terms=3, min_digits=1, max_digits=2)
    return [_asked(row["question"]) | {"answer": row["answer"]} for row in made]


def working(seed: int) -> list[Row]:
    """The same word problems with their working, to be learned."""
    return [_asked(problem) | {"completion": _said(working)} for problem, working, _ in _sums(seed, 512)]


def preferring(seed: int) -> list[Row]:
    """The same word problems: the working is preferred to the number alone."""
    return [
        _asked(problem) | {"chosen": _said(working), "rejected": _said(f"The answer is {answer}.")}
        for problem, working, answer in _sums(seed, 512)
    ]


def _sums(seed: int, size: int) -> list[tuple[str, str, int]]:
    """Problems, their working, and their answers."""
    draw, rows = random.Random(f"sums/{seed}"), []
    for _ in range(size):
        name, thing = draw.choice(("Ana", "Ben", "Lea", "Tom")), draw.choice(("apples", "books", "coins", "pens"))
        first, second, third = (draw.randint(2, 12) for _ in range(3))
        text = f"{name} has {first} {thing} and gets {second} more."
        answer = first + second
        working = f"{first} + {second} = {answer}."
        if draw.random() < 0.5:
            text, working = (
                f"{text} Then {name} buys {third} more.",
                f"{working} {answer} + {third} = {answer + third}.",
            )
            answer += third
        rows.append((f"{text} How many {thing} does {name} have?", f"{working} The answer is {answer}.", answer))
    return rows


def _asked(text: str) -> Row:
    return {"prompt": [{"role": "user", "content": text}]}


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def exact(text: str, answer: str) -> float:
    """1 for the answer itself."""
    return float(text.strip() == answer)


def alike(text: str, answer: str) -> float:
    """The share of characters that the first word has in common with the answer, in their order."""
    words = text.split()
    return difflib.SequenceMatcher(None, words[0] if words else "", answer).ratio()


def last_number(text: str, answer: str) -> float:
    """1 where the last number of the text is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == answer)


CONTESTS = {
    "sort": Contest(sorting, "grpo", exact, Settings(250, 32, 8, 16, 10, 3e-4, 0.8)),
    "reverse": Contest(reversing, "grpo", alike, Settings(60, 8, 8, 64, 12, 3e-5, 0.3)),
    "sums": Contest(summing, "grpo", last_number, Settings(60, 8, 8, 80, 24, 2e-5, 0.3)),
    "chain_sum": Contest(adding, "grpo", last_number, Settings(60, 8, 8, 64, 16, 2e-5, 0.3)),
    "sft": Contest(working, "sft", None, Settings(60, 8, 1, 72, 48, 2e-5, 0.2, every=5)),
    "dpo": Contest(preferring, "dpo", None, Settings(60, 4, 1, 72, 48, 1e-5, 0.1, every=5)),
}
