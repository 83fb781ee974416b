"""Rows of text to token ids and loss masks.

Boundaries are drawn by parts: a row is the ids of its prompt followed by the ids of its completion, tokenised apart,
so the first completion token never merges into the prompt. A loss mask speaks of its own token: 1 where the token is
learned. A row's first token has nothing before it to be predicted from, so its mask is always 0.

Every function takes a list of dictionaries or a `datasets.Dataset` and returns a list of dictionaries. Overlong rows
are an error, are dropped ("filter"), or are cut; the counts are logged. Errors are ConfigErrors that name the row.
`Tokenizing` does the same one row at a time.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.chat import render_prompt, template_options
from jaxrl_llm.data.prompt_completion import completion_row, learnable, prompt_and_completion, split_pair

log = logging.getLogger(__name__)

Row = dict[str, Any]
CUTS: dict[str, Callable[[list[int], int], list[int]]] = {
    "truncate_left": lambda ids, length: ids[len(ids) - length :],
    "truncate_right": lambda ids, length: ids[:length],
    "truncate_middle": lambda ids, length: ids[: length // 2] + ids[len(ids) - (length - length // 2) :],
}
OVERLONG = ("error", "filter", *CUTS)
LOSS_ON = ("completion", "last_turn", "all")
# The columns of token ids that the rows of each kind have, and those of their masks.
COLUMNS = {
    "prompts": (("prompt_ids",), ()),
    "completions": (("ids",), ("mask",)),
    "pairs": (("chosen_ids", "rejected_ids"), ("chosen_mask", "rejected_mask")),
    "labels": (("ids",), ("mask",)),
}


@dataclass
class Tokenizing:
    """Examples of one kind to token rows, one at a time, under the length rule; it counts what it cut and dropped.

    Calling it with an example gives its row, or None for one that is dropped.
    """

    kind: str
    tokenizer: Any
    limit: int | None = None
    overlong: str = "error"
    loss_on: str = "completion"
    prompt_key: str = "prompt"
    template_kwargs: Mapping[str, Any] | None = None
    measure: bool = True  # keep the lengths
    read: int = 0
    long: int = 0  # longer than the limit
    unlearnable: int = 0  # dropped, as no learned token is left
    lengths: list[int] = field(default_factory=list)  # of all examples, before cuts

    def __post_init__(self):
        _check_choice("data.overlong", self.overlong, OVERLONG)
        _check_choice("data.loss_on", self.loss_on, LOSS_ON)

    def __call__(self, example: Mapping[str, Any]) -> Row | None:
        """The token row of the next example."""
        return self.fit(self.parts(example))

    def all(self, examples: Iterable[Mapping[str, Any]]) -> list[Row]:
        """The rows of all examples that are not dropped; raises ConfigError when none is left."""
        rows = []
        for index, example in enumerate(examples):
            try:
                row = self(example)
            except ConfigError as error:
                raise ConfigError(f"row {index}: {error}") from error
            rows += [] if row is None else [row]
        self.report(len(rows))
        return rows

    def report(self, kept: int) -> None:
        """Logs what was cut and dropped; raises ConfigError when nothing was kept."""
        what = "a prompt of " if self.kind == "prompts" else ""
        why = f"{what}more than {self.limit} tokens"
        if not kept:
            raise ConfigError(
                f"no row is left to train on ({self.long} had {why}); check the data and the length limit"
            )
        if self.unlearnable:
            log.warning("dropped %d rows in which no token is learned", self.unlearnable)
        if self.long:
            log.warning("%s %d rows with %s", "dropped" if self.overlong == "filter" else "cut", self.long, why)

    def parts(self, example: Mapping[str, Any]) -> Row:
        """The token row of an example, of any length; it counts nothing, so threads may share this."""
        options = template_options(example, self.template_kwargs)
        return {"prompts": self._prompt, "completions": self._completion, "pairs": self._pair, "labels": self._label}[
            self.kind
        ](example, options)

    def _prompt(self, example: Mapping[str, Any], options: Mapping[str, Any]) -> Row:
        _check_columns(example, (self.prompt_key,), "data.prompt_key")
        prompt = example[self.prompt_key]
        ids = render_prompt(self.tokenizer, prompt, **options)
        if not ids:
            raise ConfigError(f"the prompt {prompt!r} has no tokens; remove the row or fill its prompt")
        return {**example, "prompt": prompt, "prompt_ids": ids}

    def _completion(self, example: Mapping[str, Any], options: Mapping[str, Any]) -> Row:
        ids, mask = completion_row(example, self.tokenizer, options, self.loss_on == "last_turn")
        return {"ids": ids, "mask": [1] * len(ids) if self.loss_on == "all" else mask}

    def _pair(self, example: Mapping[str, Any], options: Mapping[str, Any]) -> Row:
        _check_columns(example, ("chosen", "rejected"), "data.format")
        prompt, chosen, rejected = split_pair(example)
        row: Row = {}
        for name, completion in (("chosen", chosen), ("rejected", rejected)):
            row[f"{name}_ids"], row[f"{name}_mask"] = prompt_and_completion(self.tokenizer, prompt, completion, options)
        if example.get("margin") is not None:
            row["margin"] = float(example["margin"])
        return row

    def _label(self, example: Mapping[str, Any], options: Mapping[str, Any]) -> Row:
        _check_columns(example, ("prompt", "completion", "label"), "data.format")
        label = example["label"]
        if label not in (0, 1):
            raise ConfigError(f"label is {label!r}; it is true (desirable) or false")
        ids, mask = prompt_and_completion(self.tokenizer, example["prompt"], example["completion"], options)
        return {"ids": ids, "mask": mask, "label": bool(label)}

    def fit(self, row: Row) -> Row | None:
        """The row of the next example under the length rule, or None when that drops it."""
        self.read += 1
        ids, masks = COLUMNS[self.kind]
        longest = max(len(row[name]) for name in ids)
        if self.measure:
            self.lengths.append(longest)
        if self.limit is not None and longest > self.limit:
            if self.overlong == "error":
                raise ConfigError(self._too_long(longest))
            self.long += 1
            if self.overlong == "filter":
                return None
            cut = CUTS[self.overlong]
            for name in (*ids, *masks):
                row[name] = cut(row[name], self.limit) if len(row[name]) > self.limit else row[name]
        for name in masks:
            row[name] = learnable(row[name])
        if not all(any(row[name]) for name in masks):
            self.unlearnable += 1
            return None
        return row

    def _too_long(self, tokens: int) -> str:
        prompts = self.kind == "prompts"
        key = "rollout.max_prompt_length" if prompts else "data.max_length"
        return (
            f"the {'prompt' if prompts else 'row'} has {tokens} tokens, more than {key}={self.limit}; raise that or "
            f"set data.overlong to filter, {', '.join(CUTS)}"
        )


def tokenize_prompts(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_prompt_length: int,
    overlong: str = "error",
    prompt_key: str = "prompt",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The rows with `prompt_ids` (token ids) and `prompt` (from `prompt_key`) added; all other columns are kept.

    `overlong` says what happens to a prompt of more than `max_prompt_length` tokens: "error"; "filter" drops the row;
    "truncate_left" keeps the end, "truncate_right" the start, "truncate_middle" both halves. The columns `tools` and
    `chat_template_kwargs`, where a row has them, go to the chat template.

    Raises ConfigError: a missing column, an empty or overlong prompt, or no row left.
    """
    return Tokenizing(
        "prompts", tokenizer, max_prompt_length, overlong, prompt_key=prompt_key, template_kwargs=template_kwargs
    ).all(examples)


def tokenize_completions(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    overlong: str = "error",
    loss_on: str = "completion",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Rows for supervised fine-tuning: {"ids": token ids, "mask": loss mask}, of equal length.

    A row has `prompt` and `completion` (both text, or messages), or `messages`, or `text`. Text ends with one
    end-of-sequence token; a chat template writes its own ends. With `loss_on="completion"` the mask is 1 on the
    completion's text, or on the assistant's turns with what ends them; `text` rows are learned whole. With
    `loss_on="last_turn"` it is 1 on the last of those turns only; with "all" every token but the first is learned.

    `overlong` is as in `tokenize_prompts`, for rows of more than `max_length` tokens. A row whose learned tokens are
    all cut off is dropped.
    """
    return Tokenizing(
        "completions", tokenizer, max_length, overlong, loss_on=loss_on, template_kwargs=template_kwargs
    ).all(examples)


def tokenize_pairs(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    overlong: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Preference rows: `chosen_ids, chosen_mask, rejected_ids, rejected_mask`, and `margin` where the data has one.

    A row has `chosen` and `rejected`, text or messages, and may have `prompt`. Without a prompt of the same kind (both
    text, or both messages) it is the longest common beginning of the two: whole messages, or characters up to but not
    including a last space. That may fall inside a word, so text data is best given an explicit prompt. Both rows of a
    pair begin with the same prompt ids.

    `overlong` as in `tokenize_completions`; a pair is dropped when either of its rows is.
    """
    return Tokenizing("pairs", tokenizer, max_length, overlong, template_kwargs=template_kwargs).all(examples)


def tokenize_labels(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    overlong: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Rows for unpaired preferences: {"ids", "mask", "label"}; the label is True for a desirable completion.

    A row has `prompt`, `completion` and `label` (true, false, 1 or 0). `overlong` as in `tokenize_completions`.
    """
    return Tokenizing("labels", tokenizer, max_length, overlong, template_kwargs=template_kwargs).all(examples)


def _check_columns(example: Mapping[str, Any], wanted: tuple[str, ...], where: str) -> None:
    missing = [name for name in wanted if name not in example]
    if missing:
        raise ConfigError(
            f"the data has no column {', '.join(repr(name) for name in missing)}; it has {', '.join(example)}; "
            f"rename a column or change {where}"
        )


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}; here it is one of {', '.join(choices)}")
