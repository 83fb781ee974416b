"""axolotl's formats of supervised fine-tuning: instructions, texts whole and in segments, and conversations.

Source: axolotl's documentation (docs/dataset-formats), its prompters, and prompt_strategies/user_defined.py,
input_output.py and chat_template.py.
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.formats.axolotl import ROLES, filled, listed, renamed
from jaxrl_llm.data.formats.native import check_messages, first_column, optional_text, text_column
from jaxrl_llm.data.templates import continued_ids
from jaxrl_llm.data.tokenize import NOT_LEARNED, TOKENS

log = logging.getLogger(__name__)

# Stanford Alpaca's texts, with an input column and without one.
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
# Thoughts in a content, and what is behind them, which may have marks too.
THOUGHT = re.compile(
    r"(<think>|<reasoning>|<\|begin_of_thought\|>)(.*?)(?:</think>|</reasoning>|<\|end_of_thought\|>)\s*"
    r"(?:<\|begin_of_solution\|>\s*(.*?)\s*<\|end_of_solution\|>|(.*))",
    re.DOTALL,
)
CHAT_ROLES = ROLES | {"user": ["human", "user"], "assistant": ["gpt", "assistant"]}


def alpaca(row: Mapping[str, Any]) -> Row:
    """`instruction`, `output` and perhaps `input`, in Alpaca's texts; warns of columns that these have no place for."""
    instruction, output = (text_column(row, (name,), "alpaca") for name in ("instruction", "output"))
    for column in ("system", "history"):
        if row.get(column):
            _tell_of_unread(column)
    given = optional_text(row, "input", "alpaca")
    template = ALPACA if given else ALPACA_WITHOUT_INPUT
    return {"prompt": template.format(instruction=instruction, input=given), "completion": output}


@functools.lru_cache(8)
def _tell_of_unread(column: str) -> None:
    """Log a warning about a column that Alpaca's texts leave out, once."""
    log.warning(
        "the format alpaca does not read the column %r, as Stanford's and axolotl's do not: llamafactory reads these "
        "rows as conversations with it (data.format)", column,
    )  # fmt: skip


def user_defined_completions(
    row: Mapping[str, Any],
    system_prompt: str = "",
    field_system: str = "system",
    field_instruction: str = "instruction",
    field_input: str = "input",
    field_output: str = "output",
    format: str = "{instruction} {input} ",  # noqa: A002 (axolotl's name)
    no_input_format: str | None = None,
    system_format: str = "{system}",
) -> Row:
    """Columns and texts of your own choice, with `system_prompt` where the row has no system text; `no_input_format` is
    for rows without an input, else `format` with an empty one."""
    name = "user_defined.default"
    instruction = text_column(row, (field_instruction,), name)
    given, system = optional_text(row, field_input, name), optional_text(row, field_system, name) or system_prompt
    if given or no_input_format is None:
        prompt = filled(format, "format", instruction=instruction, input=given)
    else:
        prompt = filled(no_input_format, "no_input_format", instruction=instruction)
    opening = filled(system_format, "system_format", system=system) if system else ""
    return {"prompt": opening + prompt, "completion": text_column(row, (field_output,), name)}


def completion(row: Mapping[str, Any], field: str = "text") -> Row:
    """A text in the column `field`, all of which is learned."""
    return {"text": text_column(row, (field,), "completion")}


def input_output(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """`segments` of a text, each tokenised by itself, of which those with `label` are learned; no token is added.

    Raises ConfigError for segments of another form.
    """
    name = "input_output"
    _, segments = first_column(row, ("segments",), name)
    ids, labels = list[int](), list[int]()
    for segment in segments if isinstance(segments, list) else [segments]:
        text, label = (segment.get(key) if isinstance(segment, Mapping) else None for key in ("text", "label"))
        if not isinstance(text, str) or label not in (False, True):
            raise ConfigError(
                f"column 'segments' holds {segment!r:.80}, but the format {name} takes a list of dictionaries with "
                "text, and label, true or false, there"
            )
        own = continued_ids(tokenizer, ids, text)
        ids += own
        labels += own if label else [NOT_LEARNED["labels"]] * len(own)
    return {TOKENS: ids, "labels": labels}


def chat(
    row: Mapping[str, Any],
    field_messages: str = "messages",
    field_system: str = "system",
    message_property_mappings: Mapping[str, str] | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
    roles_to_train: Sequence[str] | None = ("assistant",),
    train_on_eos: str | None = "turn",
    message_field_training: str | None = None,
    message_field_training_detail: str | None = None,
    drop_system_message: bool = False,
    field_tools: str = "tools",
    field_thinking: str = "reasoning_content",
    template_thinking_key: str = "reasoning_content",
    split_thinking: bool = False,
) -> Row:
    """A conversation, of which the turns of `roles_to_train` are learned, and those whose message says so.

    `message_property_mappings` maps role, content and others to the names they have in the messages; `roles` lists, for
    each role of the chat template, its names there. A system text may be in the column `field_system`. A message's
    entry `message_field_training` says whether its turn is learned, `message_field_training_detail` (begin_offset,
    end_offset, train) which letters of it are; parts of a content may have `train`, or `weight` 0 or 1, each.
    `train_on_eos`: what ends a turn is learned with the turn (turn), of all turns (all), of the last one that is
    learned (last), or never (none). Without roles, ends and entries of messages the last message alone is learned.
    `field_tools` is a column of tools. The entry `field_thinking` of a message, with `split_thinking` also what stands
    within `<think>` or the like in a content of the assistant, becomes `template_thinking_key`.
    """
    name = "chat_template"
    if train_on_eos not in (None, "turn", "all", "last", "none"):
        raise ConfigError(f"train_on_eos is {train_on_eos!r}; the format {name} takes turn, all, last or none")
    _, turns = first_column(row, (field_messages,), name)
    thinking = {template_thinking_key: field_thinking} if template_thinking_key != field_thinking else {}
    keys = {"role": "role", "content": "content", **thinking, **(message_property_mappings or {})}
    targets = {source: target for target, sources in (roles or CHAT_ROLES).items() for source in listed(sources)}
    taught = {targets.get(role, role) for role in listed(roles_to_train or ())}
    fields = (message_field_training, message_field_training_detail)
    legacy = not (taught or train_on_eos or any(fields))
    messages: list[Row] = []
    for turn in turns if isinstance(turns, list | tuple) else [turns]:
        if not isinstance(turn, Mapping) or turn.get(keys["role"]) is None:
            raise ConfigError(
                f"column {field_messages!r} holds {turn!r:.80}, but the format {name} takes messages with "
                f"{keys['role']!r} there; set message_property_mappings"
            )
        message = {key: x for key, x in renamed(turn, keys).items() if key not in fields}
        message["role"] = targets.get(message["role"], message["role"])
        message["content"], detail = _text_of_parts(message.get("content"))
        training, own = (None if field is None else turn.get(field) for field in fields)
        detail = own or detail
        if split_thinking and message["role"] == "assistant" and (found := THOUGHT.search(str(message["content"]))):
            message |= {template_thinking_key: found[2].strip(), "content": found[3] or found[4] or ""}
        learned = bool(detail) or message["role"] in taught if training is None else bool(training)
        messages.append({**message, "train": learned, **({"train_detail": detail} if detail else {})})
    if messages and messages[0]["role"] != "system" and isinstance(row.get(field_system), str):
        messages = [{"role": "system", "content": row[field_system], "train": "system" in taught}, *messages]
    if drop_system_message and messages and messages[0]["role"] == "system":
        messages = messages[1:]
    check_messages(messages, field_messages, name)
    last = max((i for i, message in enumerate(messages) if message["train"]), default=len(messages) - 1)
    for index, message in enumerate(messages):
        if legacy:
            message["train"] = index == len(messages) - 1
        elif train_on_eos != "turn":
            message["train_end"] = train_on_eos == "all" or (train_on_eos == "last" and index == last)
    tools = {} if row.get(field_tools) is None else {"tools": row[field_tools]}
    return {"messages": messages, **tools}


def _text_of_parts(content: Any) -> tuple[Any, list[Row]]:
    """The text of a content of parts of which some say whether they are learned, and its letters that are; any other
    content as it is."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, Mapping) and {"train", "weight"} & set(part) for part in parts):
        return content, []
    text, detail = "", []
    for part in parts:
        own = next((part[key] for key in ("text", "content", "value") if isinstance(part.get(key), str)), None)
        flag = next((part[key] for key in ("train", "weight") if part.get(key) is not None), True)
        if own is None or flag not in (0, 1):
            raise ConfigError(
                f"a content has the part {part!r:.80}, but beside parts that say whether they are learned the format "
                "chat_template takes texts, with train true or false, or weight 0 or 1"
            )
        if own:
            detail.append({"begin_offset": len(text), "end_offset": len(text) + len(own) - 1, "train": bool(flag)})
        text += own
    return text, detail


COMPLETIONS: dict[str, Callable[..., Row]] = {
    "chat_template": chat,
    "completion": completion,
    "input_output": input_output,
    "user_defined.default": user_defined_completions,
    "user_defined": user_defined_completions,
}
