"""Formats of data used as it is (TRL's types), of verl's rows, Harmony's threads, ShareGPT's conversations and OpenAI's
preferences.

The readers of columns at the end serve axolotl's formats too: their errors say what was looked for and what there is.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import Row
from jaxrl_llm.data.pairs import has_prompt, split_pair
from jaxrl_llm.data.templates import (
    ROLES,
    SYSTEM_ROLES,
    is_conversational,
    render_chat,
    template_options,
    tool_calls,
)
from jaxrl_llm.data.tokenize import TEXTS

log = logging.getLogger(__name__)

# Those of the collections that are called ShareGPT. The last two are LLaMA-Factory's: a turn that calls tools, and what
# answers it.
SHAREGPT_ROLES = {
    "human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    "function_call": "assistant", "observation": "tool",
}  # fmt: skip


def auto(row: Mapping[str, Any], data_kind: str | None = None) -> Mapping[str, Any]:
    """The row itself when it is of one of TRL's types; verl's, Harmony's, ShareGPT's and OpenAI's rows are recognised,
    and stepwise ones where completions are learned. Conversations may be JSON text."""
    present = {name for name, value in row.items() if value is not None}
    for name in ("messages", "conversations") if data_kind == "completions" or "prompt" not in present else ():
        if isinstance(text := row.get(name), str):
            with contextlib.suppress(ValueError):
                row = {**row, name: turns if isinstance(turns := json.loads(text), list) else text}
    if isinstance(row.get("reward_model"), Mapping) and "data_source" in present:
        return verl(row)
    if present & {"thread", "preferred", "dispreferred"} and not present & set(TEXTS):
        return harmony(row)
    answers = {"chosen", "rejected"} if isinstance(row.get("chosen"), Mapping) else set()  # those of ShareGPT's turns
    if "conversations" in present and not present & set(TEXTS) - answers:
        return sharegpt(row, data_kind=data_kind)
    if present & {"preferred_output", "non_preferred_output"} and not present & set(TEXTS):
        return openai_preference(row)
    if {"completions", "labels"} <= present and "completion" not in present and data_kind != "prompts":
        return stepwise(row, data_kind=data_kind)
    if isinstance(row.get("system"), str) and row["system"].strip() and present & set(TEXTS):
        _tell_of_system()
    return row


@functools.lru_cache(1)
def _tell_of_system() -> None:
    """Log a warning about system texts that nothing reads, once."""
    log.warning(
        "the rows have a column 'system', which is no part of the prompts: make it their first message (data.format "
        "takes a function of a row), or name a format that reads it"
    )


def passthrough(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row itself, whatever it holds."""
    return row


def verl(
    row: Mapping[str, Any],
    tokenizer: Any = None,
    return_raw_chat: bool = False,
    return_full_prompt: bool = False,
    return_raw_input_ids: bool = False,
) -> Row:
    """verl's row: `data_source`, `prompt` (messages), `reward_model.ground_truth`, `extra_info`.

    Rewards find `ground_truth`, also as `answer`, beside all other columns; and, where asked for, `raw_prompt` (the
    messages), `full_prompts` (the text the chat template makes of them) and `raw_prompt_ids` (the token ids of the
    messages' contents, without the template).
    """
    _, reward_model = first_column(row, ("reward_model",), "verl")
    _, prompt = first_column(row, ("prompt",), "verl")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ConfigError("column 'reward_model' of the format verl is a dictionary with ground_truth")
    truth = reward_model["ground_truth"]
    made = {"prompt": prompt, "ground_truth": truth, "answer": row.get("answer") if "answer" in row else truth}
    if return_raw_chat:
        made["raw_prompt"] = prompt
    if return_full_prompt or return_raw_input_ids:
        if tokenizer is None:
            raise ConfigError("the options return_full_prompt and return_raw_input_ids of verl need a tokenizer")
        messages = is_conversational(prompt)
        if return_full_prompt:
            made["full_prompts"] = render_chat(tokenizer, prompt, True, **template_options(row)) if messages else prompt
        if return_raw_input_ids:
            plain = "\n".join(message["content"] for message in prompt) if messages else prompt
            made["raw_prompt_ids"] = list(tokenizer(plain, add_special_tokens=False)["input_ids"])
    return made


def harmony(row: Mapping[str, Any], field: str = "thread") -> Row:
    """Harmony's threads: `thread` holds the turns; or `preferred` and `dispreferred` do, one thread each.

    A turn is (role, text) or a dictionary with role and content; a thread is a list of turns, or a dictionary with
    `turns` and perhaps `metadata`, whose entries become columns. An answer alone (text) may stand for a thread.
    """
    if row.get("preferred") is not None or row.get("dispreferred") is not None:
        threads = [first_column(row, (name,), "harmony")[1] for name in ("preferred", "dispreferred")]
        chosen, rejected = (thread if isinstance(thread, str) else thread_messages(thread) for thread in threads)
        return {"chosen": chosen, "rejected": rejected, **({"prompt": row["prompt"]} if row.get("prompt") else {})}
    _, thread = first_column(row, (field,), "harmony")
    metadata = thread.get("metadata") if isinstance(thread, Mapping) else None
    return {"messages": thread_messages(thread), **(metadata or {})}


def thread_messages(thread: Any) -> list[Row]:
    """The turns of a thread as messages; raises ConfigError for what is no thread."""
    turns = thread["turns"] if isinstance(thread, Mapping) and "turns" in thread else getattr(thread, "turns", thread)
    if isinstance(turns, str | Mapping) or not isinstance(turns, Sequence) or not turns:
        raise ConfigError(f"a thread is a list of turns, each (role, text) or with role and content; not {turns!r:.80}")
    return [turn_message(turn) for turn in turns]


def turn_message(turn: Any) -> Row:
    """A turn as a message, with role and content; raises ConfigError for what is none."""
    if isinstance(turn, Mapping) and {"role", "content"} <= set(turn):
        return dict(turn)
    if isinstance(turn, Sequence) and not isinstance(turn, str) and len(turn) == 2 and isinstance(turn[0], str):
        return {"role": turn[0], "content": turn[1]}
    raise ConfigError(f"a turn is (role, text), or a dictionary with role and content; not {turn!r:.80}")


def sharegpt(
    row: Mapping[str, Any], field: str = "conversations", field_label: str = "kto_tag", data_kind: str | None = None
) -> Row:
    """ShareGPT's `conversations`, lists of {from, value}, as messages, behind the text in the column `system`.

    human is the user; gpt, chatgpt, bing, bard, bot and model are the assistant. The value of a function_call is JSON
    of name and arguments, or a list of these, and that of an observation the result. With `chosen` and `rejected`, a
    turn each, the conversation is their prompt; of labels its last turn is the completion, and `field_label` says
    whether that is desirable, as in LLaMA-Factory. Raises ConfigError for turns of another form.
    """
    _, turns = first_column(row, (field,), "sharegpt")
    messages = [_sharegpt_message(turn, field) for turn in (turns if isinstance(turns, list) else [turns])]
    check_messages(messages, field, "sharegpt")
    if messages[0]["role"] not in SYSTEM_ROLES and (system := optional_text(row, "system", "sharegpt")):
        messages = [{"role": "system", "content": system}, *messages]
    if row.get("chosen") is not None and row.get("rejected") is not None:
        answers = {name: row[name] for name in ("chosen", "rejected")}
        return {"prompt": messages} | {name: [_sharegpt_message(turn, name)] for name, turn in answers.items()}
    if data_kind == "labels" and row.get(field_label) is not None:
        return {"prompt": messages[:-1], "completion": messages[-1:], "label": row[field_label]}
    return {"messages": messages}


def _sharegpt_message(turn: Any, column: str) -> Row:
    """A turn of ShareGPT as a message; raises ConfigError for what is none."""
    if not isinstance(turn, Mapping):
        raise ConfigError(f"column {column!r} holds {turn!r:.80}, but the format sharegpt takes from and value there")
    role, content = (
        next((turn[name] for name in names if turn.get(name) is not None), None)
        for names in (("from", "role"), ("value", "content"))
    )
    others = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
    if role == "function_call":
        content, others["tool_calls"] = "", _calls_of(content, column)
    lowered = str(role).lower()
    usual = SHAREGPT_ROLES.get(lowered, lowered if lowered in ROLES else role)
    return {"role": usual, "content": content, **others}


def llamafactory(
    row: Mapping[str, Any],
    prompt: str = "instruction",
    query: str = "input",
    response: str = "output",
    system: str = "system",
    history: str = "history",
    field_label: str = "kto_tag",
    data_kind: str | None = None,
) -> Row:
    """LLaMA-Factory's rows of the Alpaca form as conversations: the instruction and the input, on a line of their own,
    are the user's turn, behind the column `system` and the earlier turns in `history`, lists of two texts.

    The answer is `response`, learned like those of the history, or `chosen` and `rejected`; of labels `field_label`
    says whether it is desirable. Raises ConfigError for columns of other types.
    """
    name = "llamafactory"
    past = row.get(history) or []
    if not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in past):
        raise ConfigError(
            f"column {history!r} is {past!r:.80}, but the format {name} takes lists of two texts there, what the user "
            "said and the answer"
        )
    asked = [text_column(row, (prompt,), name), optional_text(row, query, name)]
    opening = optional_text(row, system, name)
    messages = [{"role": "system", "content": opening}] if opening else []
    for question, answer in past:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": "\n".join(filter(None, asked))})

    def answered(column: str) -> list[Row]:
        return [{"role": "assistant", "content": text_column(row, (column,), name)}]

    if row.get("chosen") is not None and row.get("rejected") is not None:
        return {"prompt": messages, "chosen": answered("chosen"), "rejected": answered("rejected")}
    if data_kind == "labels":
        label = first_column(row, (field_label,), name)[1]
        return {"prompt": messages, "completion": answered(response), "label": label}
    return {"prompt": messages} if data_kind == "prompts" else {"messages": [*messages, *answered(response)]}


def _calls_of(value: Any, field: str) -> list[Row]:
    """The calls of a turn of ShareGPT that is a function_call."""
    try:
        calls = json.loads(value)
        calls = calls if isinstance(calls, list) else [calls]
        if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(
            f"column {field!r} has the function_call {value!r:.80}, but the format sharegpt takes JSON with name and "
            "arguments there"
        ) from None
    return tool_calls(calls)


def openai_preference(row: Mapping[str, Any]) -> Row:
    """OpenAI's row of preference fine-tuning: `input` (messages, and perhaps tools) and the messages of two answers,
    `preferred_output` and `non_preferred_output`.

    Raises ConfigError for an input without messages.
    """
    _, asked = first_column(row, ("input",), "openai_preference")
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"column 'input' is {asked!r:.80}, but the format openai_preference takes a dictionary with messages there"
        )
    made = {"prompt": messages_column(asked, ("messages",), "openai_preference")}
    for column, answer in (("chosen", "preferred_output"), ("rejected", "non_preferred_output")):
        made[column] = messages_column(row, (answer,), "openai_preference")
    return {**made, "tools": asked["tools"]} if asked.get("tools") else made


def stepwise(row: Mapping[str, Any], separator: str = "\n", data_kind: str | None = None) -> Mapping[str, Any]:
    """TRL's stepwise rows: as they are for a process reward model, else the steps joined, desirable when all are right.

    A step is one of `completions`, with its label in `labels`. Raises ConfigError for steps that are no text, or not as
    many labels.
    """
    if data_kind == "steps":
        return row
    _, steps = first_column(row, ("completions",), "stepwise")
    _, labels = first_column(row, ("labels",), "stepwise")
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels) or not steps:
        raise ConfigError("the format stepwise takes as many labels as completions, at least one, in lists")
    for step, label in zip(steps, labels, strict=True):
        if not isinstance(step, str) or not isinstance(label, bool | int) or label not in (0, 1):
            raise ConfigError(
                f"the format stepwise takes steps of text, each with a label that is true or false, not {step!r:.80} "
                f"with {label!r:.80}"
            )
    prompt = first_column(row, ("prompt",), "stepwise")[1]
    return {"prompt": prompt, "completion": separator.join(steps), "label": all(labels)}


def with_prompt(row: Row, kind: str) -> Row:
    """A row that serves as a prompt: where it has none, that of `messages` (without the assistant's last turns, which
    become `completion`), or the common beginning of `chosen` and `rejected`.

    So too where training on data of that kind would not read the prompt that is there, a text beside whole
    conversations, as UltraChat and UltraFeedback have it.
    """
    present = {name for name, value in row.items() if value is not None}
    read = kind != "completions" or "messages" not in present
    if kind in ("pairs", "triples", "labels") and {"chosen", "rejected"} <= present:
        read = has_prompt(row)
    if "prompt" in present and read:
        return row
    if "messages" in present and is_conversational(row["messages"]):
        messages, end = row["messages"], len(row["messages"])
        while end and messages[end - 1]["role"] == "assistant":
            end -= 1
        made: dict[str, Any] = {"prompt": list(messages[:end])}
        return {**row, **made, **({"completion": list(messages[end:])} if messages[end:] else {})}
    if {"chosen", "rejected"} <= present:
        prompt, chosen, rejected = split_pair(row)
        return {**row, "prompt": prompt, "chosen": chosen, "rejected": rejected}
    return row


def as_rows(items: Sequence[Any]) -> list[Row]:
    """In-memory data as rows: dictionaries stay, a thread becomes `messages`, a tuple of two threads or texts a pair.

    Raises ConfigError for anything else.
    """
    rows: list[Row] = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping | tuple | list) and not hasattr(item, "turns"):
            raise ConfigError(
                "data given as a Python object is a list of dictionaries, one for each row, or of threads (lists of "
                f"turns), or of tuples (preferred, dispreferred); item {index} is {json.dumps(item, default=str)[:80]}"
            )
        try:
            if isinstance(item, Mapping) and "turns" not in item:
                rows.append(dict(item))
            # A turn is a tuple of two as well: what it begins with tells a thread of two turns from a pair.
            elif isinstance(item, tuple | list) and len(item) == 2 and not _is_turn(item[0]):
                chosen, rejected = (side if isinstance(side, str) else thread_messages(side) for side in item)
                rows.append({"chosen": chosen, "rejected": rejected})
            else:
                metadata = item.get("metadata") if isinstance(item, Mapping) else getattr(item, "metadata", None)
                rows.append({"messages": thread_messages(item), **(metadata or {})})
        except ConfigError as error:
            raise ConfigError(f"item {index} of the list: {error}") from error
    return rows


def _is_turn(item: Any) -> bool:
    if isinstance(item, Mapping):
        return "role" in item
    return isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(text, str) for text in item)


def first_column(row: Mapping[str, Any], names: Sequence[str], format_name: str) -> tuple[str, Any]:
    """(name, value) of the first of the columns `names` that the row has and that is not None.

    Raises ConfigError, listing the row's columns, when it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    columns = [name if value is not None else f"{name} (none)" for name, value in row.items()]
    raise ConfigError(
        f"the format {format_name} looks for {' or '.join(map(repr, names))}; the row has "
        f"{', '.join(columns) or 'nothing'}; name another format with data.format, or rename a column"
    )


def text_column(row: Mapping[str, Any], names: Sequence[str], format_name: str) -> str:
    """The text of the first of the columns `names` that the row has; raises ConfigError for anything else."""
    name, value = first_column(row, names, format_name)
    if not isinstance(value, str):
        raise ConfigError(
            f"column {name!r} is {type(value).__name__}, but the format {format_name} takes text there"
            + ("; formats ending in argilla_chat or ultra take messages" if isinstance(value, list) else "")
        )
    return value


def optional_text(row: Mapping[str, Any], name: str, format_name: str) -> str:
    """The text of a column, empty where the row has none; raises ConfigError for anything else."""
    return "" if row.get(name) is None else text_column(row, (name,), format_name)


def messages_column(
    row: Mapping[str, Any], names: Sequence[str], format_name: str, count: int | None = None
) -> list[Any]:
    """The messages, with role and content, of the first of the columns `names` that the row has.

    Raises ConfigError for anything else, and for another number of messages than `count`.
    """
    name, value = first_column(row, names, format_name)
    check_messages(value, name, format_name)
    if count is not None and len(value) != count:
        raise ConfigError(
            f"column {name!r} has {amount(len(value), 'message')}, but the format {format_name} reads exactly {count}; "
            "chat_template.argilla_chat reads longer conversations"
        )
    return list(value)


def check_messages(value: Any, name: str, format_name: str) -> None:
    """Raises ConfigError unless `value` is a non-empty list of messages with role and content."""
    good = isinstance(value, list | tuple) and value and all(isinstance(x, Mapping) and "content" in x for x in value)
    if not good:
        shape = f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__
        raise ConfigError(
            f"column {name!r} is {shape if value else 'empty'}, but the format {format_name} takes a list of messages "
            "with role and content there"
        )
