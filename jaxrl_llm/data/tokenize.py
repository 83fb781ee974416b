"""Examples to token rows: token ids, and a loss mask that is 1 where a token is learned.

Prompt and completion are tokenised apart, so that their boundary is where it is when the model samples, whatever the
tokenizer would merge across it, and no text is searched for. A loss mask speaks of its own token; the first token of a
row has nothing before it to be predicted from, so its mask is always 0.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.image_rows import ImageReader, ImageText, Tiles
from jaxrl_llm.data.templates import (
    TEMPLATE_COLUMNS,
    Message,
    continued_ends,
    continued_ids,
    is_conversational,
    plain_ids,
    render_chat,
    render_prompt,
    template_options,
)

log = logging.getLogger(__name__)

Ids = list[int]
TRUNCATE: dict[str, Callable[[Ids, int], Ids]] = {
    "truncate_left": lambda ids, length: ids[len(ids) - length :],
    "truncate_right": lambda ids, length: ids[:length],
    "truncate_middle": lambda ids, length: ids[: length // 2] + ids[len(ids) - (length - length // 2) :],
}
PIXELS = "pixels"  # the tiles [tiles,H,W,C] of an example, fp32, as the image processor makes them; or `Tiles` of them
TEXTS = ("prompt", "completion", "messages", "text", "chosen", "rejected")  # columns that a row is made of
HOPELESS = 100_000  # letters from which on a text may be too long to be tokenised at all
OVERLONG = ("error", "filter", *TRUNCATE)
LOSS_ON = ("completion", "last_turn", "all", "last_step")
GOLD = "reference"  # the column of the gold completion, as in TRL's data: nothing of the reference policy
ANSWERS = {"pairs": ("chosen", "rejected"), "triples": ("chosen", "rejected", GOLD)}  # to one prompt, by columns
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
    start ("truncate_right") or both halves ("truncate_middle"); a pair is dropped when one of its rows is. A row
    without a learned token is dropped. With `loss_on="completion"` the tokens of completions, of all turns of the
    assistant or of plain text are learned; with "last_turn" the last of those turns; with "all" every token. What a
    message says of itself counts more, see `conversation`. Of steps the last token of the `step_separator` behind each
    is learned, or with "last_step" behind the last one. The columns `tools` and `chat_template_kwargs` of an example go
    to the chat template. With `images` the text has the tokens of an example's images, which are in no mask, and the
    row has their tiles; it is dropped where it would be truncated inside its images.

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
    measure: bool = True  # keep the lengths
    read: int = 0
    long: int = 0  # longer than the limit
    unlearnable: int = 0  # dropped, as no learned token is left
    split_images: int = 0  # dropped, as images would have been truncated
    lengths: list[int] = field(default_factory=list)  # tokens of all examples, before any is truncated
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
        if self.measure:
            self.lengths.append(longest)
        if self.limit is not None and longest > self.limit:
            if self.overlong == "error":
                raise ConfigError(
                    f"the {noun} has {longest} tokens, more than {key}={self.limit}; raise that or set data.overlong "
                    f"to filter, {', '.join(TRUNCATE)}"
                )
            self.long += 1
            if self.overlong == "filter":
                return None
            truncate = TRUNCATE[self.overlong]
            shorter = {
                name: truncate(row[name], self.limit) if len(row[name]) > self.limit else row[name]
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
            verb = "dropped" if self.overlong == "filter" else "truncated"
            log.warning("%s %d rows with %s, of %d", verb, self.long - self.split_images, overlong, self.read)


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


def prompt_and_completion(
    tokenizer: Any, prompt: Any, completion: Any, options: Mapping[str, Any], loss_on: str | None = None
) -> tuple[Ids, Ids]:
    """(ids, mask) of a prompt and its completion, the mask 1 on what the completion adds, or as `loss_on` says.

    Raises ConfigError unless both are text, or the prompt is messages and the completion text or messages.
    """
    if is_conversational(prompt):
        completion = as_messages(completion)
        messages = joined(prompt, completion)
        return conversation(tokenizer, messages, len(messages) - len(completion), prompt, options, loss_on)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ConfigError(
            f"the prompt is {type(prompt).__name__} and the completion {type(completion).__name__}; "
            "give both as text or both as messages"
        )
    prompt_ids = plain_ids(tokenizer, prompt)
    # Behind no text an answer opens the row, whatever special token stands before it.
    completion_ids = continued_ids(tokenizer, prompt_ids if prompt else [], completion)
    completion_ids = ended(tokenizer, completion_ids, completion)
    return prompt_ids + completion_ids, [int(loss_on == "all")] * len(prompt_ids) + [1] * len(completion_ids)


def with_steps(
    tokenizer: Any, prompt_ids: Ids, steps: Sequence[str], separator: str, between: str = ""
) -> tuple[Ids, Ids]:
    """(ids, ends) of the ids of a prompt and the steps behind it, `separator` behind each, where it ends, and `between`
    before the next one.

    Steps and separators are tokenised apart, so that no token reaches over the end of a step, as in TRL.
    """
    ids, ends = list(prompt_ids), []
    for number, step in enumerate(steps):
        for text in (between if number else "", step, separator):
            ids += continued_ids(tokenizer, ids, text)
        ends.append(len(ids) - 1)
    return ids, ends


def joined(prompt: Sequence[Message], completion: Any) -> list[Message]:
    """The messages of a prompt and its completion; the first of this goes on with the last of the prompt where both are
    the assistant's: the template must see one message, not two.

    Raises ConfigError for a completion that is no list of messages, and for contents that cannot be joined.
    """
    if not is_conversational(completion):
        raise ConfigError(f"the prompt has messages but the completion is {completion!r}; give text or messages")
    if not prompt[-1]["role"] == completion[0]["role"] == "assistant":
        return [*prompt, *completion]
    parts: list[Any] = [message.get("content") for message in (prompt[-1], completion[0])]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError(
            "the completion goes on with the assistant's turn that ends the prompt, so the content of both is "
            f"text, not {' and '.join(type(part).__name__ for part in parts)}; end the prompt before that turn"
        )
    return [*prompt[:-1], {**completion[0], "content": "".join(parts)}, *completion[1:]]


def conversation(
    tokenizer: Any, messages: Any, first: int, prompt: Any, options: Mapping[str, Any], loss_on: str | None = None
) -> tuple[Ids, Ids]:
    """(ids, mask) of a conversation, the mask 1 on the turns from message `first` on that are learned.

    These are the assistant's, with `loss_on` "last_turn" the last of them only, with "all" everything. A message may
    say of its own turn, whoever's it is, whether it is learned (`train`; of the assistant also `weight`, 0 or 1, as in
    OpenAI's files), whether what ends it is (`train_end`), and which letters of its content are, counted from 0 and the
    last included (`train_detail`, axolotl's list of begin_offset, end_offset and train). A token is learned where all
    of its letters are.

    A turn is what the template adds after the text that the model is given to answer: for message `first` that is
    `prompt` (which may end inside it), for later ones the messages before; after none, or the assistant's own, or where
    another's turn is learned, it is what the template writes before any content. A turn that the template ends
    otherwise once messages follow has as much of its end as both have.

    Raises ConfigError for what a message cannot say of its turn, for a learned turn whose calls the template does not
    show, and where the template renders a turn that has to be found, or what comes before it, differently once others
    follow: with "all" none has to be.
    """
    # What is no list of messages is refused where it is rendered.
    own = [_turn_flags(index, message) for index, message in enumerate(messages if is_conversational(messages) else ())]
    rendered = render_chat(tokenizer, messages, False, **options)

    def is_learned(index: int) -> bool:
        usual = loss_on == "all" or messages[index]["role"] == "assistant"
        return usual if (said := own[index].train) is None else said

    counted = range(0 if loss_on == "all" else first, len(messages))
    turns = [index for index in counted if is_learned(index)]
    if loss_on == "last_turn":
        counted = turns = turns[-1:]
    for index in turns:
        # A template that knows of no calls writes an empty turn, which would be learned.
        if hidden := [name for name in _called(messages[index]) if name not in rendered]:
            raise ConfigError(
                f"message {index} calls {hidden[0]!r}, which the chat template does not show: name a template that "
                "shows tool_calls (data.chat_template), or drop the row"
            )
    in_part = {i for i in counted if own[i].end not in (None, i in turns) or (i in turns and own[i].detail)}
    # The turns to find in the text: these, and those that have this in the mask, all else the opposite.
    on = int(loss_on != "all")
    sought = sorted(in_part | (set(turns) if on else set(counted) - set(turns)))

    def with_other(index: int) -> list[str]:
        """The text up to message `index`, with two other contents of it."""
        message = messages[index]
        plain = {"role": "assistant"} if message["role"] == "assistant" else message
        stand_ins = ([*messages[:index], {**plain, "content": word}] for word in ("a", "b"))
        return [render_chat(tokenizer, stand_in, False, **options) for stand_in in stand_ins]

    def place(index: int) -> tuple[int, int] | None:
        """(start, end) of the turn of message `index` in the text, None where the template writes it differently."""
        before = prompt if index == first else messages[:index]
        answered = render_chat(tokenizer, messages[: index + 1], False, **options)
        others = functools.partial(with_other, index)
        answers = messages[index]["role"] == "assistant"
        if answers and before and (index == first or before[-1]["role"] != "assistant"):
            asked = render_chat(tokenizer, before, True, **options)
        else:
            # Templates cannot be asked for the opening of such a turn: it is what turns share.
            asked = _shared(answered, *others())
        if not rendered.startswith(asked):
            return None
        if rendered.startswith(answered):
            return (len(asked), len(answered)) if len(asked) <= len(answered) else None
        closing = _shared(*(text[::-1] for text in (answered, *others())))[::-1]
        end = len(answered) - len(closing)
        if end < len(asked) or not rendered.startswith(answered[:end]):
            return None
        # What both endings share, in whole special tokens: two may begin with the same letters.
        special = sorted(map(re.escape, tokenizer.get_added_vocab()), key=len, reverse=True)
        parts = re.compile("|".join([*special, "."]), re.DOTALL)
        endings = (closing, rendered[end : end + len(closing)])
        return len(asked), end + len("".join(_shared(*map(parts.findall, endings))))

    def letters(index: int, start: int, end: int) -> list[bool]:
        """Of each letter of the turn of message `index` whether it is learned."""
        flags, content = own[index], messages[index].get("content")
        answered = render_chat(tokenizer, messages[: index + 1], False, **options)
        closing = _shared(*(text[::-1] for text in (answered, *with_other(index))))
        behind = len(answered) - len(closing) - start  # the content
        found = [index in turns and not flags.detail] * behind
        for span in flags.detail if index in turns else ():
            shown = next((x for x in (content, content.strip()) if answered[: behind + start].endswith(x)), None)
            if shown is None:
                raise ConfigError(
                    f"message {index} says which letters are learned (train_detail), but the chat template writes its "
                    "content otherwise: learn the turn whole, or name a template that leaves it as it is"
                )
            # Its own letters are behind those that the prompt has begun the turn with.
            begun = len(prompt[index]["content"]) if index == first and len(prompt) > index else 0
            stripped = len(content) - len(content.lstrip()) if shown != content else 0
            for letter in range(max(span["begin_offset"], 0), span["end_offset"] + 1):
                at = behind - len(shown) - stripped + begun + letter
                if max(behind - len(shown), 0) <= at < behind:
                    found[at] = bool(span["train"])
        return [*found, *[index in turns if flags.end is None else flags.end] * (end - start - behind)]

    ids: Ids = []
    mask: Ids = []
    done = 0
    for index in (*sought, None):
        found = (len(rendered), len(rendered)) if index is None else place(index)
        # A turn's tokens must be those that sampling would make.
        if found is None or found[0] < done:
            ways = []
            if loss_on in ("completion", "last_turn"):
                last = loss_on == "completion" and index not in turns[-1:] and any(map(place, turns[-1:]))
                ways = ["learn the last turn alone (data.loss_on=last_turn)"] * last
                ways += ["learn every token (data.loss_on=all)"]
            ways += ["set the template's options (data.chat_template_kwargs)", "name a template that only appends"]
            raise ConfigError(
                f"the chat template writes the beginning of the conversation differently once message {index} follows, "
                f"or that message once others do, so the answer cannot be told from its prompt; {', '.join(ways[:-1])} "
                f"or {ways[-1]} (data.chat_template)"
            )
        ids += (text_ids := continued_ids(tokenizer, ids, rendered[done : found[0]]))
        mask += [1 - on] * len(text_ids)
        text, done = rendered[found[0] : found[1]], found[1]
        if index not in in_part:
            ids += (text_ids := continued_ids(tokenizer, ids, text))
            mask += [on] * len(text_ids)
            continue
        text_ids, ends = continued_ends(tokenizer, ids, text)
        ids += text_ids
        each = letters(index, *found)
        # The space before a word, which tokenizers may leave out of its letters, is the word's; of a letter of several
        # tokens the others are as the first.
        for start, end in zip([0, *ends], ends, strict=False):
            mask.append(int(all(each[start:end])) if end > start or not mask else mask[-1])
    return ids, mask


def _called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    calls = message.get("tool_calls")
    inner = [call.get("function", call) for call in calls or () if isinstance(call, Mapping)]
    return [call["name"] for call in inner if isinstance(call, Mapping) and isinstance(call.get("name"), str)]


class TurnFlags(NamedTuple):
    """What a message says of its own turn: whether it is learned, and its end; None where it says nothing."""

    train: bool | None
    end: bool | None
    detail: Sequence[Mapping[str, Any]]  # letters of the content, with whether they are; empty: as the turn is


def _turn_flags(index: int, message: Message) -> TurnFlags:
    """What message `index` says of its own turn; raises ConfigError for what it cannot say."""
    weight = message.get("weight") if message["role"] == "assistant" else None
    if weight not in (None, 0, 1):
        raise ConfigError(
            f"message {index} has the weight {weight!r:.80}; it is 0, where the turn is not learned, or 1"
        )
    for name in ("train", "train_end"):
        if message.get(name) not in (None, False, True):
            raise ConfigError(f"message {index} has {name} = {message[name]!r:.80}; it is true or false")
    detail = message.get("train_detail") or ()
    whole = isinstance(detail, list | tuple) and all(
        isinstance(span, Mapping)
        and all(isinstance(span.get(name), int) for name in ("begin_offset", "end_offset"))
        and span.get("train") in (False, True)
        for span in detail
    )
    if not whole or (detail and not isinstance(message.get("content"), str)):
        raise ConfigError(
            f"message {index} has train_detail = {detail!r:.80}; it is a list of objects with begin_offset, end_offset "
            "(numbers of letters of the content, which is text) and train (true or false)"
        )
    train, end = (None if message.get(name) is None else bool(message[name]) for name in ("train", "train_end"))
    if train is None:
        train = None if weight is None and not detail else bool(weight is None or weight)
    return TurnFlags(train, end, detail)


def _shared(*sequences: Any) -> Any:
    """What the texts, or the lists, all begin with."""
    return sequences[0][: sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))]


def _count(special: frozenset[int], ids: Ids) -> int:
    return sum(token in special for token in ids)


def _size(text: Any) -> int:
    """Letters of a text, or of the contents of messages, white space left out."""
    if isinstance(text, str):
        return len(text) if len(text) < HOPELESS else len("".join(text.split()))
    if isinstance(text, Mapping):
        return _size(text.get("content"))
    return sum(map(_size, text)) if isinstance(text, list | tuple) else 0


def split_pair(example: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a preference row.

    Without a prompt of the same kind (both text, or both messages) it is the longest common beginning of the two: whole
    messages, or characters up to but not including a last space. That may fall inside a word, so text is best given an
    explicit prompt.

    Raises ConfigError: nothing in common, or completions that do not differ.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str) and not is_conversational(value):
            raise ConfigError(
                f"column {name!r} is {value!r:.80}; it takes text or a list of messages with role and content"
            )
    if has_prompt(example):
        text = isinstance(prompt := example["prompt"], str)
        return prompt, chosen if text else as_messages(chosen), rejected if text else as_messages(rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    # Tokenizers put the space with the word after it, so it belongs to the completion.
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    if shared == 0:
        raise ConfigError("chosen and rejected share no beginning to be the prompt; add a prompt column")
    if chosen == rejected or not (isinstance(chosen, str) or (chosen[shared:] and rejected[shared:])):
        raise ConfigError(
            "chosen and rejected are the same, or one only begins the other; drop the row or add a prompt"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def gold_completion(example: Mapping[str, Any], prompt: Any) -> Any:
    """The gold completion of a preference row: its column `reference`, without the prompt where `split_pair` found that
    in the two answers.

    Raises ConfigError for one that is neither text nor messages, or has another prompt.
    """
    gold = example[GOLD]
    if not isinstance(gold, str) and not is_conversational(gold):
        raise ConfigError(
            f"column {GOLD!r} is {gold!r:.80}; it is the gold completion, text or a list of messages with role and "
            "content"
        )
    if has_prompt(example):
        return gold if isinstance(prompt, str) else as_messages(gold)
    if gold[: len(prompt)] != prompt or not (isinstance(gold, str) or gold[len(prompt) :]):
        raise ConfigError(
            f"column {GOLD!r} does not go on from the prompt, {prompt!r:.80}, which chosen and rejected begin with: "
            "add a prompt column, or let it begin so too"
        )
    return gold[len(prompt) :]


def has_prompt(example: Mapping[str, Any]) -> bool:
    """True where the prompt of a preference row is read, False where it is the common beginning of the two answers."""
    prompt, texts = example.get("prompt"), {isinstance(example[name], str) for name in ("chosen", "rejected")}
    if prompt is None or len(texts) > 1:
        return False
    return texts == {isinstance(prompt, str)} or is_conversational(prompt)


def ended(tokenizer: Any, ids: Ids, text: str) -> Ids:
    """The ids with an end-of-sequence token at the end, unless the text has its own (white space after it aside)."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so a completion cannot end; set its eos_token")
    closed = bool(ids) and (ids[-1] == end or text.rstrip().endswith(tokenizer.eos_token))
    return ids if closed else [*ids, end]


def as_messages(completion: Any) -> Any:
    """A completion that is text as one message of the assistant; anything else as it is."""
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def _check_columns(example: Mapping[str, Any], columns: tuple[str, ...], setting: str) -> None:
    missing = [name for name in columns if name not in example]
    if missing:
        raise ConfigError(
            f"the data has no column {', '.join(repr(name) for name in missing)}; it has {', '.join(example)}; "
            f"rename a column or change {setting}"
        )
