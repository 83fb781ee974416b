"""Examples to token rows, under a limit of their length: token ids, and a loss mask that is 1 where a token is learned.

A loss mask speaks of its own token; the first token of a row has nothing before it to be predicted from, so its mask is
always 0.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.conversations import Ids, conversation, ended, prompt_and_completion, with_steps
from jaxrl_llm.data.image_rows import ImageReader, ImageText, Tiles
from jaxrl_llm.data.pairs import ANSWERS, GOLD, gold_completion, split_pair
from jaxrl_llm.data.templates import TEMPLATE_COLUMNS, plain_ids, render_prompt, template_options

log = logging.getLogger(__name__)

TRUNCATE: dict[str, Callable[[Ids, int], Ids]] = {
    "truncate_left": lambda ids, length: ids[len(ids) - length :],
    "truncate_right": lambda ids, length: ids[:length],
    "truncate_middle": lambda ids, length: ids[: length // 2] + ids[len(ids) - (length - length // 2) :],
}
PIXELS = "pixels"  # the tiles [tiles,H,W,C] of an example, fp32, as the image processor makes them; or `Tiles` of them
TEXTS = ("prompt", "completion", "messages", "text", "chosen", "rejected")  # columns that a row is made of
HOPELESS = 100_000  # letters from which on a text may be too long to be tokenised at all
SPLIT = "split"
OVERLONG = ("error", "filter", *TRUNCATE, SPLIT)
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
REST = ("rest_ids", "rest_mask")  # of labelled rows: what was truncated from the end of a completion
STEP_LABELS = "step_labels"  # of rows of steps: a number for each token, beside its mask


@dataclass
class RowTokenizer:
    """Makes token rows of the examples of one kind, one at a time, under the length rule, and counts what that does.

    | kind | columns of an example | token row |
    |---|---|---|
    | prompts | prompt | the example with `prompt_ids` |
    | completions | prompt and completion, or messages, or text | `ids`, `mask` |
    | pairs | chosen, rejected, and maybe prompt, margin | `chosen_ids`, `chosen_mask`, `rejected_*`, maybe `margin` |
    | triples | chosen, rejected, reference, and maybe prompt | as pairs, and `reference_ids`, `reference_mask` |
    | labels | prompt, completion, label | `ids`, `mask`, `label`; truncated on the right `rest_ids`, `rest_mask` |
    | steps | prompt, completions, labels | `ids`, `mask`, `step_labels` |

    A row of more than `limit` tokens is an error ("error"), dropped ("filter"), or keeps its end ("truncate_left"), its
    start ("truncate_right") or both halves ("truncate_middle"); a pair is dropped when one of its rows is. Completions
    may also be left as they are ("split"), for `pieces` to cut; of other kinds that is an error. A row without a
    learned token is dropped. With `loss_on="completion"` the tokens of completions, of all turns of the assistant or of
    plain text are learned; with "last_turn" the last of those turns; with "all" every token. What a message says of
    itself counts more, see `conversation`. Of steps the last token of the `step_separator` behind each is learned, or
    with "last_step" behind the last one. The columns `tools` and `chat_template_kwargs` of an example go to the chat
    template. With `images` the text has the tokens of an example's images, which are in no mask, and the row has their
    tiles; it is dropped where it would be truncated inside its images.

    Raises ConfigError: an unknown `overlong` or `loss_on`.
    """

    kind: str
    tokenizer: Any
    limit: int | None = None
    overlong: str = "error"
    loss_on: str = "completion"
    template_kwargs: Mapping[str, Any] | None = None
    images: ImageReader | None = None
    step_separator: str = "\n"
    keep_prompt: bool = False  # rows of completions have their prompt too, and the columns for its chat template
    read: int = 0
    long: int = 0  # longer than the limit
    unlearnable: int = 0  # dropped, as no learned token is left
    split_images: int = 0  # dropped, as images would have been truncated
    alike: int = 0  # pairs whose two rows are the same, truncated or not
    lengths: list[int] | None = None  # tokens of each example, before any is truncated, where they are kept
    _longest: int | None = None  # letters of the longest token

    def __post_init__(self):
        choices = (("data.overlong", self.overlong, OVERLONG), ("data.loss_on", self.loss_on, LOSS_ON))
        for key, value, known in choices:
            if value not in known:
                raise ConfigError(f"{key} is {value!r}; here it is one of {', '.join(known)}")

    def __call__(self, example: Mapping[str, Any]) -> Row | None:
        """The token row of the next example, or None when it is dropped."""
        return self.apply_limit(self.token_row(example))

    def token_row(self, example: Mapping[str, Any]) -> Row | None:
        """The token row of an example, of any length; it counts nothing, so threads may share this.

        It has the example's `pixels`, or the tiles of its images, if that has any. None for a text so long that
        tokenising it, which may take minutes, can give nothing but a row over the limit.
        Raises ConfigError: a column is missing or of another type, the chat template refuses the messages, or an image
        cannot be read.
        """
        if self.overlong in ("error", "filter") and self._is_hopeless(example):
            return None
        if (tiles := example.get(PIXELS)) is not None:
            if isinstance(tiles, str) or not hasattr(tiles, "__len__"):
                raise ConfigError(
                    f"column {PIXELS!r} is {tiles!r:.80}, but it takes the tiles [tiles,H,W,C] of images: rename it"
                )
            return {**self._token_row(example, None), PIXELS: tiles}
        if self.images is None:
            return self._token_row(example, None)
        rendered, images = self.images.read(*self._rendered(example))
        row = self._token_row(rendered, images)
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
            prompt, completions = self._split(example)
            return {**example, "prompt": prompt, **completions}, ("prompt",)
        if example.get("messages") is not None and self.kind == "completions":
            return example, ("messages",)
        return example, ("text",) if example.get("prompt") is None else ("prompt", "completion")

    def _token_row(self, example: Mapping[str, Any], images: ImageText | None) -> Row:
        tokenizer, options = self.tokenizer, template_options(example, self.template_kwargs)
        if images is not None:
            options["expand"] = images.expand
        if self.kind == "completions":
            kept: Row = {}
            if self.keep_prompt:
                example = {**example, **exchange(example), "messages": None}
                kept = prompt_columns(example)
            ids, mask = completion_row(example, tokenizer, options, self.loss_on)
            return {"ids": ids, "mask": mask, **kept}
        if self.kind == "prompts":
            _check_columns(example, ("prompt",), "data.prompt_key")
            ids = render_prompt(tokenizer, example["prompt"], **options)
            if not ids:
                raise ConfigError(f"the prompt {example['prompt']!r} has no tokens; remove the row or fill its prompt")
            return {**example, "prompt_ids": ids}
        if self.kind in ANSWERS:
            _check_columns(example, ANSWERS[self.kind], "data.format")
            prompt, completions = self._split(example)
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
                    f"margin is {margin!r:.80}; it is a number, by how much chosen is better: write one, or rename the "
                    "column"
                )
            return row
        if self.kind == "steps":
            return self._steps(example, options)
        _check_columns(example, ("prompt", "completion", "label"), "data.format")
        label = example["label"]
        if isinstance(label, str):
            label = {"true": True, "false": False, "1": True, "0": False}.get(label.strip().lower(), label)
        if label not in (0, 1):
            raise ConfigError(f"label is {label!r}; it is true or 1 (desirable), or false or 0, or these as text")
        ids, mask = prompt_and_completion(tokenizer, example["prompt"], example["completion"], options)
        return {"ids": ids, "mask": mask, "label": bool(label)}

    def _steps(self, example: Mapping[str, Any], options: Mapping[str, Any]) -> Row:
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
        ids, ends = with_steps(
            self.tokenizer, render_prompt(self.tokenizer, example["prompt"], **options), steps, self.step_separator
        )
        mask, of_tokens = [0] * len(ids), [0.0] * len(ids)
        for end, label in list(zip(ends, labels, strict=True))[-1 if self.loss_on == "last_step" else 0 :]:
            mask[end], of_tokens[end] = 1, float(label)
        return {"ids": ids, "mask": mask, STEP_LABELS: of_tokens}

    def _split(self, example: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The prompt of a preference row, and its completions by their columns."""
        prompt, chosen, rejected = split_pair(example)
        completions = {"chosen": chosen, "rejected": rejected}
        if GOLD in ANSWERS[self.kind]:
            completions[GOLD] = gold_completion(example, prompt)
        return prompt, completions

    def _is_hopeless(self, example: Mapping[str, Any]) -> bool:
        """True when the text of the example has more letters than `limit` tokens can hold, however it is read.

        White space is not counted, as some tokenizers join it, and the longest token is taken four times as long, as
        some normalise letters.
        """
        columns = {"prompts": ("prompt",), "steps": ("prompt", "completions")}.get(self.kind, TEXTS)
        if self.limit is None or (size := sum(_size(example.get(name)) for name in columns)) < HOPELESS:
            return False
        if self._longest is None:
            self._longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        return size > 4 * self._longest * self.limit

    def apply_limit(self, row: Row | None) -> Row | None:
        """The row of the next example (None: hopelessly long) under the length rule, or None when that drops it.

        Raises ConfigError for a row over the limit where `overlong` is "error".
        """
        self.read += 1
        prompts = self.kind == "prompts"
        noun, key = ("prompt", "rollout.max_prompt_length") if prompts else ("row", "data.max_length")
        if row is None:
            if self.overlong == "error":
                raise ConfigError(
                    f"the {noun} has many times more text than {key}={self.limit} tokens hold; drop it, or set "
                    "data.overlong to filter"
                )
            self.long += 1
            return None
        ids, masks = COLUMNS[self.kind]
        longest = max(len(row[name]) for name in ids)
        if self.lengths is not None:
            self.lengths.append(longest)
        if self.limit is not None and longest > self.limit:
            splits = self.overlong == SPLIT and self.kind == "completions"
            if splits and PIXELS in row:
                raise ConfigError(
                    f"the row has {longest} tokens, more than {key}={self.limit}, and images, which are in one piece: "
                    f"raise that or set data.overlong to filter, {', '.join(TRUNCATE)}"
                )
            if self.overlong in ("error", SPLIT) and not splits:
                raise ConfigError(
                    f"the {noun} has {longest} tokens, more than {key}={self.limit}; raise that or set data.overlong "
                    f"to filter, {', '.join(TRUNCATE)}"
                )
            self.long += 1
            if self.overlong == "filter":
                return None
            truncate = TRUNCATE.get(self.overlong)
            shorter = {
                name: truncate(row[name], self.limit) if truncate and len(row[name]) > self.limit else row[name]
                for name in (*ids, *masks, *({STEP_LABELS} & row.keys()))
            }
            if isinstance(tiles := row.get(PIXELS), Tiles):
                special = tiles.processor.special_ids
                if any(_count(special, shorter[name]) != _count(special, row[name]) for name in ids):
                    self.split_images += 1
                    return None
            if self.kind == "labels" and self.overlong == "truncate_right":
                kept = slice(self.limit, 2 * self.limit)  # more of it is in no row of `limit` tokens
                row |= {rest: row[name][kept] for rest, name in zip(REST, ("ids", "mask"), strict=True)}
            row |= shorter
        for name in masks:
            # Nothing predicts the first token, whatever is left of the row.
            row[name] = [0, *row[name][1:]] if row[name] else row[name]
        if not all(any(row[name]) for name in masks):
            self.unlearnable += 1
            return None
        self.alike += self.kind in ANSWERS and row["chosen_ids"] == row["rejected_ids"]
        return row

    def report(self, kept: int) -> None:
        """Logs what was truncated and dropped of the rows read; raises ConfigError when nothing was kept."""
        noun = "a prompt of " if self.kind == "prompts" else ""
        overlong = f"{noun}more than {self.limit} tokens"
        if not kept:
            reasons = [f"{self.long} had {overlong}"] if self.long else []
            if self.split_images:
                reasons.append(f"{self.split_images} of these would have been truncated inside their images")
            if self.unlearnable:
                reasons.append(
                    f"{self.unlearnable} have no token to learn, as no "
                    f"{'step ends' if self.kind == 'steps' else 'turn of the assistant is left'} in them"
                )
            words = "; ".join(reasons) or "there is none"
            raise ConfigError(f"no row is left to train on ({words}); check the data and the length limit")
        if self.unlearnable:
            log.warning("dropped %d rows in which no token is learned, of %d", self.unlearnable, self.read)
        if self.split_images:
            log.warning(
                "dropped %d rows with %s, as images are not truncated, of %d", self.split_images, overlong, self.read
            )
        if self.long > self.split_images:
            verb = {"filter": "dropped", SPLIT: "split"}.get(self.overlong, "truncated")
            log.warning("%s %d rows with %s, of %d", verb, self.long - self.split_images, overlong, self.read)
        if self.alike:
            log.warning(
                "%d pairs have the same tokens as chosen and as rejected, of %d: nothing is preferred in them",
                self.alike,
                self.read,
            )


def pieces(row: Row, limit: int) -> list[Row]:
    """A row of completions in rows of at most `limit` tokens, one after the other; nothing is lost.

    The first token of a piece keeps its mask: where the piece before it is not to be seen, it is not learned.
    """
    return [
        {name: row[name][start : start + limit] for name in ("ids", "mask")}
        for start in range(0, len(row["ids"]), limit)
    ]


def completion_row(
    example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], loss_on: str = "completion"
) -> tuple[Ids, Ids]:
    """(ids, mask) of a row of supervised fine-tuning: prompt and completion, messages, or text.

    `options` are those of `templates.template_options`. Raises ConfigError for other columns.
    """
    present = {name for name, value in example.items() if value is not None}
    if "messages" in present:
        return conversation(tokenizer, example["messages"], 0, [], options, loss_on)
    if {"prompt", "completion"} <= present:
        return prompt_and_completion(tokenizer, example["prompt"], example["completion"], options, loss_on)
    if "text" in present:
        if not isinstance(example["text"], str):
            raise ConfigError(f"column 'text' is {type(example['text']).__name__}, but it takes text")
        ids = ended(tokenizer, plain_ids(tokenizer, example["text"]), example["text"])
        return ids, [1] * len(ids)
    if empty := [name for name in ("prompt", "completion", "messages", "text") if name in example.keys() - present]:
        raise ConfigError(
            f"column {' and column '.join(map(repr, empty))} is None in this row; supervised fine-tuning reads prompt "
            "and completion, or messages, or text: fill it, or drop the row"
        )
    raise ConfigError(
        f"the row has the columns {', '.join(example)}; supervised fine-tuning reads prompt and completion, "
        "or messages, or text; rename them, or name their format with data.format"
    )


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


def _count(special: frozenset[int], ids: Ids) -> int:
    return sum(token in special for token in ids)


def _size(text: Any) -> int:
    """Letters of a text, or of the contents of messages, white space left out."""
    if isinstance(text, str):
        return len(text) if len(text) < HOPELESS else len("".join(text.split()))
    if isinstance(text, Mapping):
        return _size(text.get("content"))
    return sum(map(_size, text)) if isinstance(text, list | tuple) else 0


def _check_columns(example: Mapping[str, Any], columns: tuple[str, ...], setting: str) -> None:
    missing = [name for name in columns if name not in example]
    if missing:
        raise ConfigError(
            f"the data has no column {', '.join(repr(name) for name in missing)}; it has {', '.join(example)}; "
            f"rename a column or change {setting}"
        )
