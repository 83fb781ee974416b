"""Formats of data used as it is (TRL's types), of verl's rows, Harmony's threads and ShareGPT's conversations."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.chat import is_conversational, render_chat, template_options
from jaxrl_llm.data.formats import columns
from jaxrl_llm.data.prompt_completion import split_pair

Row = Mapping[str, Any]
CONTENT = ("prompt", "completion", "messages", "text", "chosen", "rejected")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def auto(row: Row, kind: str = "pairs") -> Mapping[str, Any]:
    """The row itself when it is of one of TRL's types; verl's, Harmony's and ShareGPT's rows are recognised.

    Prompts are taken from `messages` (without the assistant's last turns, which become `completion`) or from the common
    beginning of `chosen` and `rejected` where there is no `prompt`.
    """
    given = {name for name, value in row.items() if value is not None}
    if isinstance(row.get("reward_model"), Mapping) and "data_source" in given:
        row = verl(row)
    elif given & {"thread", "preferred", "dispreferred"} and not given & set(CONTENT):
        row = harmony(row)
    elif "conversations" in given and not given & set(CONTENT):
        row = sharegpt(row)
    elif {"completions", "labels"} <= given and "completion" not in given:
        row = stepwise(row)
    return _prompt_only(row) if kind == "prompts" else row


def passthrough(row: Row) -> Row:
    """The row itself, whatever it holds."""
    return row


def verl(
    row: Row,
    tokenizer: Any = None,
    return_raw_chat: bool = False,
    return_full_prompt: bool = False,
    return_raw_input_ids: bool = False,
) -> dict[str, Any]:
    """verl's row: `data_source`, `prompt` (messages), `reward_model.ground_truth`, `extra_info`.

    Rewards find `ground_truth`, also as `answer`, beside all other columns; and, where asked for, `raw_prompt` (the
    messages), `full_prompts` (the text the chat template makes of them) and `raw_prompt_ids` (the token ids of the
    messages' contents, without the template).
    """
    _, reward_model = columns.first(row, ("reward_model",), "verl")
    _, prompt = columns.first(row, ("prompt",), "verl")
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


def harmony(row: Row, field: str = "thread") -> dict[str, Any]:
    """Harmony's threads: `thread` holds the turns; or `preferred` and `dispreferred` do, one thread each.

    A turn is (role, text) or a dictionary with role and content; a thread is a list of turns, or a dictionary with
    `turns` and perhaps `metadata`, whose entries become columns. An answer alone (text) may stand for a thread.
    """
    if row.get("preferred") is not None or row.get("dispreferred") is not None:
        wanted = {name: columns.first(row, (name,), "harmony")[1] for name in ("preferred", "dispreferred")}
        chosen, rejected = (one if isinstance(one, str) else thread_messages(one) for one in wanted.values())
        return {"chosen": chosen, "rejected": rejected, **({"prompt": row["prompt"]} if row.get("prompt") else {})}
    _, thread = columns.first(row, (field,), "harmony")
    metadata = thread.get("metadata") if isinstance(thread, Mapping) else None
    return {"messages": thread_messages(thread), **(metadata or {})}


def thread_messages(thread: Any) -> list[dict[str, Any]]:
    """The turns of a thread as messages; raises ConfigError for what is no thread."""
    turns = thread["turns"] if isinstance(thread, Mapping) and "turns" in thread else getattr(thread, "turns", thread)
    if isinstance(turns, str | Mapping) or not isinstance(turns, Sequence) or not turns:
        raise ConfigError(f"a thread is a list of turns, each (role, text) or with role and content; not {turns!r:.80}")
    return [turn_message(turn) for turn in turns]


def turn_message(turn: Any) -> dict[str, Any]:
    """One turn as a message."""
    if isinstance(turn, Mapping) and {"role", "content"} <= set(turn):
        return dict(turn)
    if isinstance(turn, Sequence) and not isinstance(turn, str) and len(turn) == 2 and isinstance(turn[0], str):
        return {"role": turn[0], "content": turn[1]}
    raise ConfigError(f"a turn is (role, text), or a dictionary with role and content; not {turn!r:.80}")


def sharegpt(row: Row, field: str = "conversations") -> dict[str, Any]:
    """ShareGPT's `conversations`, lists of {from, value}, as messages; human is the user and gpt the assistant."""
    _, given = columns.first(row, (field,), "sharegpt")
    messages = []
    for turn in given if isinstance(given, list) else [given]:
        if not isinstance(turn, Mapping):
            raise ConfigError(
                f"column {field!r} holds {turn!r:.80}, but the format sharegpt takes from and value there"
            )
        role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        others = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
        messages.append({"role": SHAREGPT_ROLES.get(str(role), role), "content": content, **others})
    columns.check_messages(messages, field, "sharegpt")
    return {"messages": messages}


def stepwise(row: Row, separator: str = "\n") -> dict[str, Any]:
    """TRL's stepwise rows (`completions` and `labels` of the steps): the steps joined, desirable when all are right."""
    _, steps = columns.first(row, ("completions",), "stepwise")
    _, labels = columns.first(row, ("labels",), "stepwise")
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels) or not steps:
        raise ConfigError("the format stepwise takes as many labels as completions, at least one, in lists")
    prompt = columns.first(row, ("prompt",), "stepwise")[1]
    return {"prompt": prompt, "completion": separator.join(steps), "label": all(labels)}


def _prompt_only(row: Row) -> Mapping[str, Any]:
    given = {name for name, value in row.items() if value is not None}
    if "prompt" in given:
        return row
    if "messages" in given and is_conversational(row["messages"]):
        messages, end = row["messages"], len(row["messages"])
        while end and messages[end - 1]["role"] == "assistant":
            end -= 1
        made: dict[str, Any] = {"prompt": list(messages[:end])}
        return {**row, **made, **({"completion": list(messages[end:])} if messages[end:] else {})}
    if {"chosen", "rejected"} <= given:
        prompt, chosen, rejected = split_pair(row)
        return {**row, "prompt": prompt, "chosen": chosen, "rejected": rejected}
    return row


def as_rows(items: Sequence[Any]) -> list[dict[str, Any]]:
    """In-memory data as rows: dictionaries stay, a thread becomes `messages`, a tuple of two threads or texts a pair.

    Raises ConfigError for anything else.
    """
    return [_as_row(index, item) for index, item in enumerate(items)]


def _as_row(index: int, item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping) and "turns" not in item:
        return dict(item)
    try:
        if isinstance(item, Mapping) or hasattr(item, "turns"):
            metadata = item.get("metadata") if isinstance(item, Mapping) else getattr(item, "metadata", None)
            return {"messages": thread_messages(item), **(metadata or {})}
        if isinstance(item, tuple | list) and len(item) == 2 and not _is_turn(item[0]):
            chosen, rejected = (one if isinstance(one, str) else thread_messages(one) for one in item)
            return {"chosen": chosen, "rejected": rejected}
        if isinstance(item, tuple | list):
            return {"messages": thread_messages(item)}
    except ConfigError as error:
        raise ConfigError(f"item {index} of the list: {error}") from error
    raise ConfigError(
        "data given as a Python object is a list of dictionaries, one for each row, or of threads (lists of turns), or "
        f"of tuples (preferred, dispreferred); item {index} is {json.dumps(item, default=str)[:80]}"
    )


def _is_turn(item: Any) -> bool:
    if isinstance(item, Mapping):
        return "role" in item
    return isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(part, str) for part in item)
