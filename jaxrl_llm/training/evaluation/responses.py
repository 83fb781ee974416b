"""Grades stored responses in place of a model's: the offline evaluation of verl's `main_eval`."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest, naming
from jaxrl_llm.data import sources
from jaxrl_llm.data.collate import columns_of
from jaxrl_llm.data.formats.lookup import find
from jaxrl_llm.data.templates import is_conversational
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.models.files import hf
from jaxrl_llm.rewards.runner import NOTHING_LOGGED, Logged, Rewards, TrainerState
from jaxrl_llm.rewards.signatures import parameter_names, text_of
from jaxrl_llm.training.evaluation.metrics import (
    SOURCE,
    EvalMetrics,
    Numbers,
    by_row,
    prompt_results,
    prompts_by_source,
    summary,
    with_logged,
)
from jaxrl_llm.training.logging.reward_metrics import add_logs

ROWS_AT_ONCE = 1024  # responses in one call of a reward function, and those of its last prompt
# The names under which rewards read these columns, whatever the file calls them.
COLUMNS = {"prompt": "prompt", "responses": "responses", "data_source": SOURCE, "reward_model": "reward_model"}


class StoredResponses(NamedTuple):
    """One row of the file: the prompt, its responses as completions, and the other columns."""

    prompt: Any
    responses: list[Any]
    columns: dict[str, Any]


def read_responses(
    responses: Any, keys: Mapping[str, str], data_format: str = "auto", tokenizer: Any = None
) -> list[StoredResponses]:
    """The rows of a .parquet, .jsonl, .json or .csv file, or of a list of dictionaries.

    `keys` maps the names of `COLUMNS` to the file's. Of these only the responses must be there, and those that the file
    calls otherwise. A response is a text or a list of messages; a row has one or a list of them. `data_format`
    (data.format) reads the other columns, as for training. Raises ConfigError, naming columns or row.
    """
    try:
        rows = sources.load(responses)
    except ConfigError as error:
        raise ConfigError(f"--responses: {str(error).partition('; check data.path')[0]}") from error
    names = {column: keys.get(column, column) for column in COLUMNS}
    available = list(rows.column_names or [])
    for column, name in names.items():
        if name not in available and (column == "responses" or name != column):
            flag = "response_key" if column == "responses" else f"{column}_key"
            raise ConfigError(
                f"the responses have no column {name!r} (--{flag}); they have {', '.join(available)}, and the "
                f"closest is {closest(name, available)!r}"
            )
    form = find(data_format, "prompts", tokenizer)
    return [_read_row(index, dict(row), names, form) for index, row in enumerate(rows)]


def _read_row(index: int, row: dict[str, Any], names: Mapping[str, str], form: Any) -> StoredResponses:
    taken = {column: row.pop(name) for column, name in names.items() if name in row}
    responses = taken.pop("responses")
    with naming(f"row {index} of the responses"):
        example = dict(form({"prompt": "", **row, **{COLUMNS[column]: value for column, value in taken.items()}}))
    prompt = example.pop("prompt", "")

    def is_response(value: Any) -> bool:
        return isinstance(value, str) or is_conversational(value)

    listed = [responses] if is_response(responses) else responses
    if not isinstance(listed, list) or not listed or not all(map(is_response, listed)):
        raise ConfigError(
            f"row {index} of the responses has {responses!r:.80} in {names['responses']!r}; it takes a text, a list of "
            "messages with role and content, or a list of such"
        )
    if is_conversational(prompt):  # completions of a conversation are messages
        listed = [[{"role": "assistant", "content": r}] if isinstance(r, str) else r for r in listed]
    return StoredResponses(prompt, listed, example)


def grade(
    rewards: Rewards, stored: Sequence[StoredResponses], metrics: EvalMetrics, tokenizer: Any, state: TrainerState
) -> dict[str, float]:
    """`eval/*`: the summary of all rows and, where there are several data sources, `eval/<source>/*` of each; and what
    reward functions log besides. Processes share the rows and get the same metrics.

    `tokenizer` gives token ids to reward functions that ask for them; None where none does. `state` is theirs too.
    """
    indices = np.array_split(np.arange(len(stored)), jax.process_count())[jax.process_index()]
    with all_or_none():
        own = [stored[index] for index in indices]
        own_rewards, answers, numbers, logged = _graded(rewards, own, metrics, tokenizer, state)
    by_process = gather([own_rewards.tolist(), answers, numbers])
    all_rewards = np.array([row for rows, _, _ in by_process for row in rows], np.float32)
    all_answers = [batch for _, answers, _ in by_process for batch in answers]
    all_numbers = [row for _, _, rows in by_process for row in rows]
    counts, row_sources = [len(row.responses) for row in stored], [row.columns.get(SOURCE) for row in stored]
    results = prompt_results(
        all_rewards, rewards.weights, counts, metrics.correct_at, all_answers, row_sources, all_numbers
    )
    values: dict[str, float] = {}
    for source, rows in prompts_by_source(results).items():
        of_source = summary([results[row] for row in rows], metrics)
        values |= {f"{source}/{name}" if source else name: x for name, x in of_source.items()}
    return {f"eval/{name}": x for name, x in with_logged(values, logged).items()}


def _graded(
    rewards: Rewards, stored: Sequence[StoredResponses], metrics: EvalMetrics, tokenizer: Any, state: TrainerState
) -> tuple[np.ndarray, list[list[str | None] | None], list[Numbers], Logged]:
    """The rewards `[N, F]` of all responses, their answers by batch (None: not known), their numbers, and what is
    logged."""
    starts = np.cumsum([0, *(len(row.responses) for row in stored)])
    by_start = itertools.groupby(enumerate(stored), lambda numbered: starts[numbered[0]] // ROWS_AT_ONCE)
    by_batch: list[np.ndarray] = [np.zeros((0, len(rewards.names)), np.float32)]
    answers: list[list[str | None] | None] = []
    numbers: list[Numbers] = []
    logged = NOTHING_LOGGED
    for _, rows in by_start:
        batch = [(number, row, response) for number, row in rows for response in row.responses]
        texts = [text_of(response) for _, _, response in batch]
        ids = [[] if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        columns = columns_of([row.columns for _, row, _ in batch], ())
        prompts, completions = [row.prompt for _, row, _ in batch], [response for _, _, response in batch]
        prompt_numbers = [number for number, _, _ in batch]
        graded = rewards.submit(prompts, completions, ids, columns, state, prompt_numbers).result()
        by_batch.append(graded.rewards)
        own, rest = by_row(rewards.names, graded.rewards, graded.logged)
        numbers, logged = numbers + own, add_logs(logged, rest)
        answers.append(metrics.answers_of(completions, rewards.names[0], graded.logged))
    return np.concatenate(by_batch), answers, numbers, logged


def tokenizer_for(path: str, trust_remote_code: bool, rewards: Rewards) -> Any:
    """The tokenizer of the model at `path`, where a reward function asks for completion_ids; else None."""
    if not any("completion_ids" in parameter_names(function) for function in rewards.graders):
        return None
    return hf.load_tokenizer(hf.locate(path), trust_remote_code)
