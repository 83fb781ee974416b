"""Rows of text to token ids and loss masks.

Boundaries are drawn by parts: a row is the ids of its prompt followed by the ids of its completion, tokenised apart,
so the first completion token never merges into the prompt. A loss mask speaks of its own token: 1 where the token is
learned. A row's first token has nothing before it to be predicted from, so its mask is always 0.

Every function takes a list of dictionaries or a `datasets.Dataset` and returns a list of dictionaries. Overlong rows
are an error, are dropped ("filter"), or are cut; the counts are logged. Errors are ConfigErrors that name the row.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.data.chat import chat_ids, is_conversational, plain_ids, render_chat, render_prompt
from jaxrl_llm.names import ConfigError

log = logging.getLogger(__name__)

CUTS: dict[str, Callable[[list[int], int], list[int]]] = {
    "truncate_left": lambda ids, length: ids[len(ids) - length :],
    "truncate_right": lambda ids, length: ids[:length],
    "truncate_middle": lambda ids, length: ids[: length // 2] + ids[len(ids) - (length - length // 2) :],
}


def tokenize_prompts(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_prompt_length: int,
    overlong: str = "error",
    prompt_key: str = "prompt",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The rows with `prompt_ids` (token ids) and `prompt` (from `prompt_key`) added; all other columns are kept.

    `overlong` says what happens to a prompt of more than `max_prompt_length` tokens: "error"; "filter" drops the row;
    "truncate_left" keeps the end, "truncate_right" the start, "truncate_middle" both halves. The columns `tools` and
    `chat_template_kwargs`, where a row has them, go to the chat template.

    Raises ConfigError: a missing column, an empty or overlong prompt, or no row left.
    """
    _check_choice("data.overlong", overlong, ("error", "filter", *CUTS))
    rows, long = [], 0
    for index, example in enumerate(examples):
        _check_columns(example, (prompt_key,), "data.prompt_key")
        prompt = example[prompt_key]
        options = _at_row(index, _template_options, example, template_kwargs)
        ids = _at_row(index, render_prompt, tokenizer, prompt, **options)
        if not ids:
            raise ConfigError(f"row {index}: the prompt {prompt!r} has no tokens; remove the row or fill its prompt")
        if len(ids) > max_prompt_length:
            if overlong == "error":
                raise ConfigError(
                    f"row {index}: the prompt has {len(ids)} tokens, more than rollout.max_prompt_length="
                    f"{max_prompt_length}; raise that or set data.overlong to filter, {', '.join(CUTS)}"
                )
            long += 1
            if overlong == "filter":
                continue
            ids = CUTS[overlong](ids, max_prompt_length)
        rows.append({**example, "prompt": prompt, "prompt_ids": ids})
    _report(rows, long, overlong, f"a prompt of more than {max_prompt_length} tokens")
    return rows


def tokenize_completions(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    overlong: str = "error",
    loss_on: str = "completion",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows for supervised fine-tuning: {"ids": token ids, "mask": loss mask}, of equal length.

    A row has `prompt` and `completion` (both text, or messages), or `messages`, or `text`. Text ends with one
    end-of-sequence token; a chat template writes its own ends. With `loss_on="completion"` the mask is 1 on the
    completion's text, or on the assistant's turns with what ends them; `text` rows are learned whole. With
    `loss_on="all"` every token but the first is learned.

    `overlong` is "error", "filter" or "truncate_right" (keep the start) for rows of more than `max_length` tokens. A
    row whose learned tokens are all cut off is dropped.
    """
    _check_choice("data.loss_on", loss_on, ("completion", "all"))

    def parts(example: Mapping[str, Any]) -> dict[str, Any]:
        options = _template_options(example, template_kwargs)
        ids, mask = _completion_row(example, tokenizer, options)
        return {"ids": ids, "mask": _learnable([1] * len(ids) if loss_on == "all" else mask)}

    return _tokenize(examples, parts, ("",), max_length, overlong)


def tokenize_pairs(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    overlong: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Preference rows: `chosen_ids, chosen_mask, rejected_ids, rejected_mask`, and `margin` where the data has one.

    A row has `chosen` and `rejected`, text or messages, and may have `prompt`. Without a prompt of the same kind (both
    text, or both messages) it is the longest common beginning of the two: whole messages, or characters up to but not
    including a last space. That may fall inside a word, so text data is best given an explicit prompt. Both rows of a
    pair begin with the same prompt ids.

    `overlong` as in `tokenize_completions`; a pair is dropped when either of its rows is.
    """

    def parts(example: Mapping[str, Any]) -> dict[str, Any]:
        _check_columns(example, ("chosen", "rejected"), "the data set")
        options = _template_options(example, template_kwargs)
        prompt, chosen, rejected = split_pair(example)
        row = {}
        for name, completion in (("chosen", chosen), ("rejected", rejected)):
            ids, mask = _prompt_and_completion(tokenizer, prompt, completion, options)
            row |= {f"{name}_ids": ids, f"{name}_mask": _learnable(mask)}
        if example.get("margin") is not None:
            row["margin"] = float(example["margin"])
        return row

    return _tokenize(examples, parts, ("chosen_", "rejected_"), max_length, overlong)


def tokenize_labels(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    overlong: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows for unpaired preferences: {"ids", "mask", "label"}; the label is True for a desirable completion.

    A row has `prompt`, `completion` and `label` (true, false, 1 or 0). `overlong` as in `tokenize_completions`.
    """

    def parts(example: Mapping[str, Any]) -> dict[str, Any]:
        _check_columns(example, ("prompt", "completion", "label"), "the data set")
        label = example["label"]
        if label not in (0, 1):
            raise ConfigError(f"label is {label!r}; it is true (desirable) or false")
        options = _template_options(example, template_kwargs)
        ids, mask = _prompt_and_completion(tokenizer, example["prompt"], example["completion"], options)
        return {"ids": ids, "mask": _learnable(mask), "label": bool(label)}

    return _tokenize(examples, parts, ("",), max_length, overlong)


def split_pair(example: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a preference row; see `tokenize_pairs` for a prompt that is not given."""
    chosen, rejected = example["chosen"], example["rejected"]
    prompt = example.get("prompt")
    if prompt is not None and isinstance(prompt, str) == isinstance(chosen, str) == isinstance(rejected, str):
        return prompt, chosen, rejected
    if prompt is not None and is_conversational(prompt) and isinstance(chosen, str) and isinstance(rejected, str):
        return prompt, _as_messages(chosen), _as_messages(rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    if shared == 0:
        raise ConfigError("chosen and rejected share no beginning to be the prompt; add a prompt column")
    if chosen == rejected or not (isinstance(chosen, str) or (chosen[shared:] and rejected[shared:])):
        raise ConfigError(
            "chosen and rejected are the same, or one only begins the other; drop the row or add a prompt"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _completion_row(
    example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    given = {name for name, value in example.items() if value is not None}
    if "messages" in given:
        return _conversation(tokenizer, example["messages"], 0, [], options)
    if {"prompt", "completion"} <= given:
        return _prompt_and_completion(tokenizer, example["prompt"], example["completion"], options)
    if "text" in given:
        ids = _ended(tokenizer, plain_ids(tokenizer, example["text"]))
        return ids, [1] * len(ids)
    raise ConfigError(
        f"the row has the columns {', '.join(example)}; supervised fine-tuning reads prompt and completion, "
        "or messages, or text; rename them"
    )


def _prompt_and_completion(
    tokenizer: Any, prompt: Any, completion: Any, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """(ids, mask) of a prompt and its completion, the mask 1 on what the completion adds."""
    if is_conversational(prompt):
        completion = _as_messages(completion)
        if not is_conversational(completion):
            raise ConfigError(f"the prompt has messages but the completion is {completion!r}; give text or messages")
        first = len(prompt)
        messages = [*prompt, *completion]
        if prompt[-1]["role"] == completion[0]["role"] == "assistant":
            first -= 1
            joined = prompt[-1]["content"] + completion[0]["content"]
            messages = [*prompt[:-1], {**completion[0], "content": joined}, *completion[1:]]
        return _conversation(tokenizer, messages, first, prompt, options)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ConfigError(
            f"the prompt is {type(prompt).__name__} and the completion {type(completion).__name__}; "
            "give both as text or both as messages"
        )
    before = plain_ids(tokenizer, prompt)
    after = _ended(tokenizer, chat_ids(tokenizer, completion))
    return before + after, [0] * len(before) + [1] * len(after)


def _conversation(
    tokenizer: Any, messages: Any, first: int, prompt: Any, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """(ids, mask) of a conversation, the mask 1 on the assistant's turns from message `first` on.

    A turn's part is what the template adds after the text the model is given to answer: for message `first` that is
    `prompt` (which may end inside it), for later ones the messages before.
    """
    whole = render_chat(tokenizer, messages, False, **options)
    ids: list[int] = []
    mask: list[int] = []
    done = ""
    for index, message in enumerate(messages):
        if index < first or message["role"] != "assistant":
            continue
        before = prompt if index == first else messages[:index]
        asked = render_chat(tokenizer, before, True, **options) if before else done
        answered = render_chat(tokenizer, messages[: index + 1], False, **options)
        if not (asked.startswith(done) and answered.startswith(asked) and whole.startswith(answered)):
            raise ConfigError(
                f"the chat template writes the beginning of the conversation differently once message {index} follows, "
                "so the answer cannot be told from its prompt; set the template's options (chat_template_kwargs) or "
                "give a template that only appends"
            )
        for part, learned in ((asked[len(done) :], 0), (answered[len(asked) :], 1)):
            part_ids = chat_ids(tokenizer, part)
            ids += part_ids
            mask += [learned] * len(part_ids)
        done = answered
    rest = chat_ids(tokenizer, whole[len(done) :])
    return ids + rest, mask + [0] * len(rest)


def _tokenize(
    examples: Iterable[Mapping[str, Any]],
    parts: Callable[[Mapping[str, Any]], dict[str, Any]],
    prefixes: tuple[str, ...],
    max_length: int | None,
    overlong: str,
) -> list[dict[str, Any]]:
    """`parts` of every example, with the length rule applied to each `<prefix>ids` and `<prefix>mask`."""
    _check_choice("data.overlong", overlong, ("error", "filter", "truncate_right"))
    rows, long, unlearnable = [], 0, 0
    for index, example in enumerate(examples):
        row = _at_row(index, parts, example)
        longest = max(len(row[f"{prefix}ids"]) for prefix in prefixes)
        if max_length is not None and longest > max_length:
            if overlong == "error":
                raise ConfigError(
                    f"row {index} has {longest} tokens, more than data.max_length={max_length}; raise that or set "
                    "data.overlong to filter or truncate_right"
                )
            long += 1
            if overlong == "filter":
                continue
            for key in [f"{prefix}{kind}" for prefix in prefixes for kind in ("ids", "mask")]:
                row[key] = row[key][:max_length]
        if not all(any(row[f"{prefix}mask"]) for prefix in prefixes):
            unlearnable += 1
            continue
        rows.append(row)
    if unlearnable:
        log.warning("dropped %d rows in which no token is learned", unlearnable)
    _report(rows, long, overlong, f"more than {max_length} tokens")
    return rows


def _learnable(mask: list[int]) -> list[int]:
    return [0, *mask[1:]] if mask else mask


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so a completion cannot end; set its eos_token")
    return ids if ids and ids[-1] == end else [*ids, end]


def _as_messages(completion: Any) -> Any:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def _template_options(example: Mapping[str, Any], template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    tools = example.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the tools column is not JSON: {error}") from error
    own = {key: value for key, value in (example.get("chat_template_kwargs") or {}).items() if value is not None}
    return {"tools": tools or None, "template_kwargs": {**(template_kwargs or {}), **own}}


def _at_row(index: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except ConfigError as error:
        raise ConfigError(f"row {index}: {error}") from error


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


def _report(rows: list[dict[str, Any]], long: int, overlong: str, why: str) -> None:
    if not rows:
        raise ConfigError(f"no row is left to train on ({long} had {why}); check the data and the length limit")
    if long:
        log.warning("%s %d rows with %s", "dropped" if overlong == "filter" else "cut", long, why)
