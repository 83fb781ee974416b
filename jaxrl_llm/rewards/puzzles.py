"""The verifier of reasoning-gym tasks (`data.path="task:reasoning_gym(leg_counting)"`)."""

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of
from jaxrl_llm.rewards.workers.bounded import scores_in_time

ROW_SECONDS = 12.0  # to verify an answer; the first of a process imports the package
EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")  # in the source of a verifier
# All that an evaluated answer may call. sympy's parser offers it every function of Python and of sympy.
FUNCTIONS = {
    "sqrt", "cbrt", "root", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan",
    "acot", "asec", "acsc", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "erf", "erfi", "Ei", "Si", "Ci",
    "li", "gamma", "factorial", "binomial", "abs", "Abs", "sign", "floor", "ceiling", "pow", "Pow", "int", "Integer",
    "float", "Float", "Rational", "Integral",
}  # fmt: skip


def reasoning_gym_score(completions: Sequence[Any], reasoning_gym: Sequence[str], **columns: Any) -> list[float]:
    """The score, 0 to 1, that the task's own verifier gives the answer.

    The answer is the content of the last `<answer>...</answer>`, or the whole completion. The column `reasoning_gym`
    names the entry that it answers. It needs the package reasoning-gym, whose verifiers run in processes of their own:
    an answer that takes more than 12 seconds scores 0.0, with a warning, and so does one on which the verifier raises,
    without. Some verifiers evaluate the answer as Python (countdown, integration, ...): there one that is neither
    literals nor arithmetic (`is_harmless`) scores like none. So does one that a verifier would take for right though it
    solves nothing, such as `nan`, the integral itself, or numbers made of `pi`.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RewardError("reasoning_gym_score needs the package reasoning-gym: pip install reasoning-gym")
    if not completions:
        return []
    answers = []
    for completion in completions:
        text = text_of(completion)
        end = text.rfind("</answer>")
        start = text.rfind("<answer>", 0, max(end, 0))
        answers.append((text[start + len("<answer>") : end] if start >= 0 else text).strip())
    configs, entries = zip(*map(_entry, reasoning_gym), strict=True)
    arguments = {"answers": answers, "configs": list(configs), "entries": list(entries)}
    return scores_in_time(
        "reasoning_gym_score", f"{__name__}:verified", arguments, ROW_SECONDS,
        lambda row, took: f"{shorten(answers[row], 100)} {took}",
    )  # fmt: skip


def verified(answers: Sequence[str], configs: Sequence[str], entries: Sequence[Any]) -> list[float]:
    """The scores of `reasoning_gym_score` without its time limit, for entries of the data sets of `configs` (JSON)."""
    scores = []
    for answer, config, entry in zip(answers, configs, entries, strict=True):
        dataset = _dataset(config)
        refused = _evaluates(type(dataset)) and not is_harmless(answer)
        cheats = _cheats(type(dataset))
        if refused or (cheats.search(answer) and not cheats.search(str(entry["answer"]))):
            answer = ""
        try:
            score = dataset.score_answer(answer, entry)
        except Exception:
            dataset.score_answer(entry["answer"], entry)  # raises too where the answer is not the cause
            score = 0.0
        scores.append(float(score))
    return scores


def is_harmless(answer: str) -> bool:
    """True for an answer that does nothing but compute when it is evaluated: Python literals, or arithmetic.

    Arithmetic has numbers, names, operators, brackets and calls of FUNCTIONS; it has no attributes, texts or other
    calls.
    """
    try:
        ast.literal_eval(answer)
        return True
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if re.search(r"[^\w\s+*/%^!<>=,.()\[\]{}|&~-]|\.\s*[^\W\d]|[)\]}!]\s*\(", answer, re.ASCII):
        return False
    return FUNCTIONS.issuperset(re.findall(r"([^\W\d]\w*)\s*\(", answer, re.ASCII))


@functools.lru_cache(maxsize=1024)  # completions of one prompt share theirs
def _entry(reference: str) -> tuple[str, Any]:
    """The data set's configuration as JSON, and the entry, that a value of the column names.

    Made in the process that made the prompt: entries of some tasks depend on the order of sets, which others change.
    """
    place = json.loads(reference)
    config = json.dumps(place["config"], sort_keys=True)
    return config, _dataset(config)[place["index"]]


@functools.lru_cache(maxsize=64)
def _dataset(config: str) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(**json.loads(config))


@functools.cache
def _evaluates(kind: type) -> bool:
    """True for data sets whose verifier evaluates answers."""
    return EVALUATES.search(inspect.getsource(kind.score_answer)) is not None


@functools.cache
def _cheats(kind: type) -> re.Pattern[str]:
    """The pattern of answers that a verifier takes for right although they do not hold the right one."""
    source = inspect.getsource(kind.score_answer)
    cheats = [r"(?<![^\W\d_])(?i:nan[ij]?)(?![^\W\d_])"]  # to which no distance is long
    if re.search(r"\beval\(", source):  # where the right answer has a name
        cheats.append(rf"\b(?:{'|'.join(kind.score_answer.__code__.co_varnames)})\b")
    if re.search(r"\b(?:int|float)\(parse_expr\(", source):  # a number of given ones: names are further ones
        cheats.append(r"[^\W\d]")
    elif EVALUATES.search(source):
        cheats.append(r"\bIntegral\b")  # whose derivative is the question
    return re.compile("|".join(cheats))
