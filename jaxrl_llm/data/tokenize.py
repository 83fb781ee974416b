"""Examples to token rows of any length: token ids, and a loss mask that is 1 where a token is learned.

A loss mask speaks of its own token; the first token of a row has nothing before it to be predicted from, so its mask is
always 0.
"""

import functools
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import Row
from jaxrl_llm.data.conversations import Ids, conversation, ended, prompt_and_completion, with_steps
from jaxrl_llm.data.image_rows import ImageReader, ImageText
from jaxrl_llm.data.pairs import ANSWERS, prompt_and_answers
from jaxrl_llm.data.templates import (
    TEMPLATE_COLUMNS,
    checked,
    is_conversational,
    plain_ids,
    render_prompt,
    template_options,
)

log = logging.getLogger(__name__)

PIXELS = "pixels"  # the tiles [tiles,H,W,C] of an example, fp32, as the image processor makes them; or `Tiles` of them
TEXTS = ("prompt", "completion", "messages", "text", "chosen", "rejected")  # columns that a row is made of
LOSS_ON = ("completion", "last_turn", "as_shown", "all", "last_step")
# The columns of token ids that the rows of each kind have, and those of their masks.
COLUMNS = {
    "prompts": (("prompt_ids",), ()),
    "completions": (("ids",), ("mask",)),
    "pairs": (("chosen_ids", "rejected_ids"), ("chosen_mask", "rejected_mask")),
    "triples": (("chosen_ids", "rejected_ids", "reference_ids"), ("chosen_mask", "rejected_mask", "reference_mask")),
    "labels": (("ids",), ("mask",)),
    "steps": (("ids",), ("mask",)),
}
# The beginning of a list of messages that was written into a text, as JSON or as Python shows it (pandas' to_csv does).
WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content)\1\s*:""")
STEP_LABELS = "step_labels"  # of rows of steps: a number for each token, beside its mask
TOKENS = "input_ids"  # the column of rows that are token ids already
# Those beside it that say which tokens are learned, as TRL's and axolotl's rows have them, with the value of others.
NOT_LEARNED = {"labels": -100, "completion_mask": 0, "assistant_masks": 0}


@dataclass(frozen=True)
class RowTokenizer:
    """Makes token rows of the examples of one kind; threads may share it.

    | kind | columns of an example | token row |
    |---|---|---|
    | prompts | prompt | the example with `prompt_ids` |
    | completions | prompt and completion, or messages, or text, or input_ids | `ids`, `mask` |
    | pairs | chosen, rejected, and maybe prompt, margin | `chosen_ids`, `chosen_mask`, `rejected_*`, maybe `margin` |
    | triples | chosen, rejected, reference, and maybe prompt | as pairs, and `reference_ids`, `reference_mask` |
    | labels | prompt, completion, label | `ids`, `mask`, `label` |
    | steps | prompt, completions, labels | `ids`, `mask`, `step_labels` |

    With `loss_on="completion"` the tokens of completions, of all turns of the assistant or of plain text are learned;
    with "last_turn" the last of those turns; with "all" every token. What a message says of itself counts more, see
    `conversation`. Of steps the last token of the `step_separator` behind each is learned, or with "last_step" behind
    the last one. The columns `tools` and `chat_template_kwargs` of an example go to the chat template. With `images`
    the text has the tokens of an example's images, which are in no mask, and the row has their tiles.

    Raises ConfigError: an unknown `loss_on`.
    """

    kind: str
    tokenizer: Any
    loss_on: str = "completion"
    template_kwargs: Mapping[str, Any] | None = None
    images: ImageReader | None = None
    step_separator: str = "\n"
    keep_prompt: bool = False  # rows of completions have their prompt too, and the columns for its chat template

    def __post_init__(self):
        if self.loss_on not in LOSS_ON:
            raise ConfigError(f"data.loss_on is {self.loss_on!r}; here it is one of {', '.join(LOSS_ON)}")

    def __call__(self, example: Mapping[str, Any]) -> Row:
        """The token row of an example, with the example's `pixels`, or the tiles of its images, if that has any.

        Raises ConfigError: a column is missing or of another type, its text is no Unicode, the chat template refuses
        the messages, or an image cannot be read.
        """
        for name in ("prompt", "chosen"):
            if isinstance(text := example.get(name), str) and WRITTEN_MESSAGES.match(text):
                _tell_of_messages(name)
        try:
            row = self._with_images(example)
        except (TypeError, UnicodeError) as error:  # what tokenizers raise for text that is no Unicode
            text = json.dumps(example, ensure_ascii=False, default=str)
            torn = next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
            if torn is None:
                raise
            near = text[max(torn - 20, 0) : torn + 20]
            raise ConfigError(f"half of a surrogate pair, which is no Unicode, in {near!r}") from error
        return row | {name: without_first(row[name]) for name in COLUMNS[self.kind][1]}

    def _with_images(self, example: Mapping[str, Any]) -> Row:
        if (tiles := example.get(PIXELS)) is not None:
            if isinstance(tiles, str) or not hasattr(tiles, "__len__"):
                raise ConfigError(
                    f"column {PIXELS!r} is {tiles!r:.80}, but it takes the tiles [tiles,H,W,C] of images: rename it"
                )
            return {**self._of_kind(example, None), PIXELS: tiles}
        if self.images is None:
            return self._of_kind(example, None)
        rendered, images = self.images.read(*self._rendered(example))
        row = self._of_kind(rendered, images)
        ids, masks = COLUMNS[self.kind]
        if images is None:
            for name in ids:
                self.images.check_none(row[name])
            return row
        for name in ids:
            images.check(row[name])
        for name, mask in zip(ids, masks, strict=False):  # prompts have no mask
            special = images.tiles.processor.special_ids
            row[mask] = [0 if token in special else on for token, on in zip(row[name], row[mask], strict=True)]
        # The prompt of a conversation holds its images as parts; that which is text stays as the data has it.
        prompt = example["prompt"] if self.kind == "prompts" else None
        return {**row, **({"prompt": prompt} if isinstance(prompt, str) else {}), PIXELS: images.tiles}

    def _rendered(self, example: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The example, and those of its columns that a row is made of, as far as they may have images."""
        if self.kind in ("prompts", "steps"):
            return example, ("prompt",)
        answers = ANSWERS.get(self.kind)
        if answers is not None and all(example.get(name) is not None for name in answers):
            prompt, completions = prompt_and_answers(example, self.kind)
            return {**example, "prompt": prompt, **completions}, ("prompt",)
        if example.get("messages") is not None and self.kind == "completions":
            return example, ("messages",)
        return example, ("text",) if example.get("prompt") is None else ("prompt", "completion")

    def _of_kind(self, example: Mapping[str, Any], images: ImageText | None) -> Row:
        """The token row of an example in whose text the tokens of the images are."""
        tokenizer, options = self.tokenizer, template_options(example, self.template_kwargs)
        if images is not None:
            options["expand"] = images.expand
        if self.kind == "prompts":
            return prompt_row(example, tokenizer, options)
        if self.kind == "completions":
            kept: Row = {}
            if self.keep_prompt:
                example = {**example, **exchange(example), "messages": None}
                kept = prompt_columns(example)
            return completion_row(example, tokenizer, options, self.loss_on) | kept
        if self.kind in ANSWERS:
            return answers_row(example, tokenizer, options, self.kind)
        if self.kind == "steps":
            return steps_row(example, tokenizer, options, self.step_separator, self.loss_on == "last_step")
        return labelled_row(example, tokenizer, options)


@functools.lru_cache(8)
def _tell_of_messages(column: str) -> None:
    """Log a warning about a column of messages that are text, once."""
    log.warning(
        "column %r is text that reads like a list of messages, and is taken as plain text, brackets and all: give the "
        "list itself, or a function of a row that reads the text (data.format)", column,
    )  # fmt: skip


def without_first(mask: Ids) -> Ids:
    """The mask of a row whose first token is not learned: nothing predicts it."""
    return [0, *mask[1:]][: len(mask)]


def prompt_row(example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]) -> Row:
    """An example with the ids of its prompt, `prompt_ids`; `options` here and below are those of `template_options`.

    Raises ConfigError for a prompt without tokens.
    """
    _check_columns(example, ("prompt",), "data.prompt_key")
    ids = render_prompt(tokenizer, example["prompt"], **options)
    if not ids:
        raise ConfigError(f"the prompt {example['prompt']!r} has no tokens; remove the row or fill its prompt")
    return {**example, "prompt_ids": ids}


def completion_row(
    example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], loss_on: str = "completion"
) -> Row:
    """`ids` and `mask` of a row of supervised fine-tuning: prompt and completion, messages, text, or token ids.

    Raises ConfigError for other columns.
    """
    present = {name for name, value in example.items() if value is not None}
    if "messages" in present:
        ids, mask = conversation(tokenizer, example["messages"], 0, [], options, loss_on)
        return {"ids": ids, "mask": mask}
    if {"prompt", "completion"} <= present:
        ids, mask = prompt_and_completion(tokenizer, example["prompt"], example["completion"], options, loss_on)
        return {"ids": ids, "mask": mask}
    if "text" in present:
        if not isinstance(example["text"], str):
            raise ConfigError(f"column 'text' is {type(example['text']).__name__}, but it takes text")
        ids = ended(tokenizer, plain_ids(tokenizer, example["text"]), example["text"])
        return {"ids": ids, "mask": [1] * len(ids)}
    if TOKENS in present:
        return token_row(example, tokenizer, loss_on)
    if empty := [name for name in ("prompt", "completion", "messages", "text") if name in example.keys() - present]:
        raise ConfigError(
            f"column {' and column '.join(map(repr, empty))} is None in this row; supervised fine-tuning reads prompt "
            "and completion, or messages, or text: fill it, or drop the row"
        )
    raise ConfigError(
        f"the row has the columns {', '.join(example)}; supervised fine-tuning reads prompt and completion, "
        f"or messages, or text; {_naming(example)}"
    )


def _naming(example: Mapping[str, Any]) -> str:
    """The settings, as the end of a message, that name the columns of an example of other names: of a conversation the
    one that reads it."""
    for name, value in example.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, Mapping) and {"from", "value"} <= first.keys():
            return f"set data.format=\"sharegpt(field='{name}')\", which reads {name}"
        if is_conversational(value):
            return f"set data.format=\"chat_template(field_messages='{name}')\", which reads {name}"
    return "rename them, or name them with data.prompt_key and data.completion_key, or their format with data.format"


def token_row(example: Mapping[str, Any], tokenizer: Any, loss_on: str) -> Row:
    """`ids` and `mask` of a row that has its token ids, `input_ids`; no end is added.

    A token is learned unless one of the columns NOT_LEARNED says otherwise. Padding, by `attention_mask`, is left out.
    Raises ConfigError: ids that the tokenizer does not have, columns of another length, labels of other tokens, rows
    that are packed already, or another `loss_on` than "completion", which these columns stand for.
    """
    if loss_on != "completion":
        raise ConfigError(f"data.loss_on is {loss_on}, but the row is token ids, whose labels say it: leave it out")
    if example.get("seq_lengths") is not None:
        raise ConfigError("the row has seq_lengths, so it is packed: give rows of one text each, and set data.packing")
    if example.get("loss_mask") is not None:
        raise ConfigError(
            "the row has token ids and a loss_mask, which speaks of its own token in some classes of verl and of the "
            "next one in others: give labels, -100 where a token is not learned"
        )
    columns = {name: example[name] for name in (*NOT_LEARNED, "attention_mask") if example.get(name) is not None}
    for name, values in {TOKENS: example[TOKENS], **columns}.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise ConfigError(f"{name} is {values!r:.80}; the row is token ids ({TOKENS}), and it is a list of numbers")
    ids = [token.item() if hasattr(token, "item") else token for token in example[TOKENS]]  # of an array too
    if unknown := [token for token in ids if not (isinstance(token, int) and 0 <= token < len(tokenizer))]:
        raise ConfigError(f"{TOKENS} has {unknown[0]!r:.40}; the tokens of the tokenizer are 0 to {len(tokenizer) - 1}")
    for name, values in columns.items():
        if len(values) != len(ids):
            raise ConfigError(f"{name} has {amount(len(values), 'value')} for {len(ids)} {TOKENS}; give one for each")
    present = columns.pop("attention_mask", [1] * len(ids))
    for token, label in zip(ids, columns.get("labels", ids), strict=True):
        if label not in (token, NOT_LEARNED["labels"]):
            raise ConfigError(f"labels has {label!r:.40} at the place of the token {token}; it is that, or -100")
    mask = [int(all(values[at] != NOT_LEARNED[name] for name, values in columns.items())) for at in range(len(ids))]
    return {
        "ids": checked(tokenizer, [token for token, here in zip(ids, present, strict=True) if here]),
        "mask": [on for on, here in zip(mask, present, strict=True) if here],
    }


def answers_row(example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], kind: str) -> Row:
    """The ids and masks of the answers of a preference row, each behind its prompt, and its margin if it has one.

    Raises ConfigError for a margin that is no number.
    """
    _check_columns(example, ANSWERS[kind], "data.format")
    prompt, completions = prompt_and_answers(example, kind)
    row: Row = {}
    for name, completion in completions.items():
        ids, mask = prompt_and_completion(tokenizer, prompt, completion, options)
        row |= {f"{name}_ids": ids, f"{name}_mask": mask}
    if (margin := example.get("margin")) is None:
        return row
    try:
        row["margin"] = float(margin)
    except (TypeError, ValueError):
        row["margin"] = math.nan
    if not math.isfinite(row["margin"]):
        raise ConfigError(
            f"margin is {margin!r:.80}; it is a number, by how much chosen is better: write one, or rename the column"
        )
    return row


def labelled_row(example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]) -> Row:
    """`ids` and `mask` of a prompt with its completion, and `label`, whether this is desirable.

    Raises ConfigError for a label that is neither true nor false.
    """
    _check_columns(example, ("prompt", "completion", "label"), "data.format")
    label = example["label"]
    if isinstance(label, str):
        label = {"true": True, "false": False, "1": True, "0": False}.get(label.strip().lower(), label)
    if label not in (0, 1):
        raise ConfigError(f"label is {label!r}; it is true or 1 (desirable), or false or 0, or these as text")
    ids, mask = prompt_and_completion(tokenizer, example["prompt"], example["completion"], options)
    return {"ids": ids, "mask": mask, "label": bool(label)}


def steps_row(
    example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], separator: str, last_alone: bool
) -> Row:
    """`ids` of a prompt and the steps behind it, `mask` at the ends of all steps, or of the last alone, and
    `step_labels` there, 0 elsewhere.

    Raises ConfigError for steps that are no text, and for labels that are no numbers from 0 to 1 or not as many.
    """
    _check_columns(example, ("prompt", "completions", "labels"), "data.format")
    steps, labels = example["completions"], example["labels"]
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise ConfigError("steps are a list completions, with a list labels of as many")
    for step, label in zip(steps, labels, strict=True):
        if not isinstance(step, str) or not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise ConfigError(
                "a step is text with a label that is true or 1 (right), false or 0 (wrong), or a number between, "
                f"not {step!r:.80} with {label!r:.80}"
            )
    ids, ends = with_steps(tokenizer, render_prompt(tokenizer, example["prompt"], **options), steps, separator)
    mask, of_tokens = [0] * len(ids), [0.0] * len(ids)
    for end, label in list(zip(ends, labels, strict=True))[-1 if last_alone else 0 :]:
        mask[end], of_tokens[end] = 1, float(label)
    return {"ids": ids, "mask": mask, STEP_LABELS: of_tokens}


def exchange(example: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt and the completion of a row: of messages, the last one is the completion.

    Raises ConfigError for a row that is text, or that has one message.
    """
    messages = example.get("messages")
    if messages is not None and len(messages) > 1:
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    if messages is not None or example.get("prompt") is None or example.get("completion") is None:
        raise ConfigError(
            f"the row has the columns {', '.join(example)}; a teacher with another tokenizer (teacher.form = uld) "
            "reads prompt and completion, or messages of which the last is the completion"
        )
    return {"prompt": example["prompt"], "completion": example["completion"]}


def prompt_columns(example: Mapping[str, Any]) -> Row:
    """The prompt of a row, and those of its columns that a chat template reads."""
    return {"prompt": example["prompt"], **{name: example[name] for name in TEMPLATE_COLUMNS if name in example}}


def _check_columns(example: Mapping[str, Any], columns: tuple[str, ...], setting: str) -> None:
    missing = [name for name in columns if name not in example]
    if missing:
        way_out = (
            "which are read for sft alone: give texts" if TOKENS in example else "rename a column or change " + setting
        )
        raise ConfigError(
            f"the data has no column {', '.join(map(repr, missing))}; it has {', '.join(example)}; {way_out}"
        )
