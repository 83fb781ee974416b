"""Responses that were written before, read from a file and graded: the offline evaluation of verl's `main_eval`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.data import sources
from jaxrl_llm.data.chat import is_conversational
from jaxrl_llm.data.formats import find
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.models import hf
from jaxrl_llm.rewards.calls import parameter_names, text_of
from jaxrl_llm.rewards.grader import Rewards
from jaxrl_llm.training.evaluation.metrics import (
    PRED,
    SOURCE,
    EvalMetrics,
    PromptResult,
    by_source,
    outcomes_of,
    summary,
)

ROWS_AT_ONCE = 1024  # responses that a reward function is called with
# The columns that a reward reads under these names, whatever the file calls them.
COLUMNS = {"prompt": "prompt", "responses": "responses", "data_source": SOURCE, "reward_model": "reward_model"}


class Answered(NamedTuple):
    """One row of the file: the prompt, its responses as completions, and the other columns."""

    prompt: Any
    responses: list[Any]
    columns: dict[str, Any]


def read_responses(
    given: Any, keys: Mapping[str, str], data_format: str = "auto", tokenizer: Any = None
) -> list[Answered]:
    """The rows of a .parquet, .jsonl, .json or .csv file, or of a list of dictionaries.

    `keys` says what the file calls the columns `COLUMNS`; of these only the responses must be there, and what is named
    otherwise than here. A response is a text or a list of messages; a row has one or a list of them. `data_format`
    (data.format) reads the other columns, as for training. Raises ConfigError, naming columns or row.
    """
    rows = sources.load(given)
    names = {column: keys.get(column, column) for column in COLUMNS}
    there = list(rows.column_names or [])
    for column, name in names.items():
        if name not in there and (column == "responses" or name != column):
            raise ConfigError(
                f"the responses have no column {name!r} (--{_flag(column)}); they have {', '.join(there)}, and the "
                f"closest is {closest(name, there)!r}"
            )
    form = find(data_format, "prompts", tokenizer)
    return [_answered(index, dict(row), names, form) for index, row in enumerate(rows)]


def _flag(column: str) -> str:
    return "response_key" if column == "responses" else f"{column}_key"


def _answered(index: int, row: dict[str, Any], names: Mapping[str, str], form: Any) -> Answered:
    taken = {column: row.pop(name) for column, name in names.items() if name in row}
    responses = taken.pop("responses")
    try:
        example = dict(form({"prompt": "", **row, **{COLUMNS[column]: value for column, value in taken.items()}}))
    except ConfigError as error:
        raise ConfigError(f"row {index} of the responses: {error}") from error
    prompt = example.pop("prompt", "")
    many = [responses] if isinstance(responses, str) or is_conversational(responses) else responses
    if not isinstance(many, list) or not many or not all(isinstance(r, str) or is_conversational(r) for r in many):
        raise ConfigError(
            f"row {index} of the responses has {responses!r:.80} in {names['responses']!r}; it takes a text, a list of "
            "messages with role and content, or a list of such"
        )
    chat = is_conversational(prompt)
    done = [[{"role": "assistant", "content": r}] if chat and isinstance(r, str) else r for r in many]
    return Answered(prompt, done, example)


def grade(rewards: Rewards, answered: Sequence[Answered], measures: EvalMetrics, tokenizer: Any) -> list[PromptResult]:
    """The outcome of each row. Processes share the rows, and all get the same outcomes.

    `tokenizer` gives token ids to reward functions that ask for them; None where none does.
    """
    own = np.array_split(np.arange(len(answered)), jax.process_count())[jax.process_index()]
    with all_or_none():
        found = _graded(rewards, [answered[index] for index in own], measures, tokenizer)
    parts = gather([found[0].tolist(), found[1]])
    numbers = np.array([row for part, _ in parts for row in part], np.float32)
    known = all(answers is not None for _, answers in parts)
    answers = [answer for _, part in parts for answer in part] if known else None
    sources_ = [row.columns.get(SOURCE) for row in answered]
    return outcomes_of(numbers, rewards.weights, [len(row.responses) for row in answered], measures, answers, sources_)


def _graded(
    rewards: Rewards, answered: Sequence[Answered], measures: EvalMetrics, tokenizer: Any
) -> tuple[np.ndarray, list[str | None] | None]:
    """The rewards `[N, R]` of the responses of some rows, and the answer of each where one is known."""
    flat = [(row, response) for row in answered for response in row.responses]
    numbers, answers = [np.zeros((0, len(rewards.names)), np.float32)], []
    for start in range(0, len(flat), ROWS_AT_ONCE):
        part = flat[start : start + ROWS_AT_ONCE]
        texts = [text_of(response) for _, response in part]
        ids = [[] if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        columns = {name: [row.columns.get(name) for row, _ in part] for name in part[0][0].columns}
        graded = rewards.submit([row.prompt for row, _ in part], [r for _, r in part], ids, columns).result()
        numbers.append(graded.rewards)
        pred = graded.logged.columns.get(f"{rewards.names[0]}/{PRED}")
        given = measures.answers(texts) if measures.answer is not None else pred
        answers.append(None if given is None else [None if answer is None else str(answer) for answer in given])
    known = all(part is not None for part in answers)
    return np.concatenate(numbers), [answer for part in answers for answer in part] if known else None


def tokenizer_for(config, rewards: Rewards) -> Any:
    """The tokenizer of model.path, where a reward function asks for completion_ids; else None."""
    if not any("completion_ids" in parameter_names(function) for function in rewards.graders):
        return None
    return hf.load_tokenizer(hf.locate(config.model.path), config.model.trust_remote_code)


def metrics_of(outcomes: Sequence[PromptResult], measures: EvalMetrics) -> dict[str, float]:
    """`eval/*`: the summary of all rows and, where there are several data sources, `eval/<source>/*` of each."""
    metrics = {f"eval/{name}": value for name, value in summary(outcomes, measures).items()}
    for source, rows in by_source(outcomes).items():
        own = summary([outcomes[row] for row in rows], measures)
        metrics |= {f"eval/{source}/{name}": value for name, value in own.items()}
    return metrics
