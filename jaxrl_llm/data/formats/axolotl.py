"""axolotl's preference formats, and those of supervised fine-tuning: instructions, conversations, segments of texts.

Those of preferences write with fixed texts (`chatml.*`, `llama3.*`, `zephyr.nectar`), with the user's
(`user_defined.default`), or with the tokenizer's chat template (`chat_template.*`).

Source: axolotl's documentation (docs/rlhf.qmd, docs/dataset-formats), prompt_strategies/dpo, /kto and /orpo,
chat_template.py and user_defined.py there, and its prompters.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.formats.native import (
    check_messages,
    first_column,
    messages_column,
    optional_text,
    text_column,
)
from jaxrl_llm.data.templates import continued_ids, render_chat, template_options
from jaxrl_llm.data.tokenize import NOT_LEARNED, TOKENS


class Template(NamedTuple):
    """The fixed texts around a system text, a user's turn (with the opening of the answer), and an answer.

    They hold no beginning-of-sequence token: the tokenizer writes it, once.
    """

    system: str
    user: str
    answer: str

    def prompt(self, user: str, system: str = "") -> str:
        """The text that an answer follows; the system part only where there is a system text."""
        return (self.system.format(system) if system else "") + self.user.format(user)


class Fields(NamedTuple):
    """The columns of pairs that a strategy reads; with `chat` the answers are the second of two messages."""

    prompt: tuple[str, ...]
    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected",)
    chat: bool = False


CHATML = Template(
    system="<|im_start|>system\n{}<|im_end|>\n",
    user="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    answer="{}<|im_end|>",
)
LLAMA3 = Template(
    system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    answer="{}<|eot_id|>",
)
ZEPHYR = Template(system="", user="<|system|>\n</s>\n<|user|>\n{}</s>\n<|assistant|>\n", answer="{}")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}
ANY_PROMPT = ("prompt", "input", "question", "instruction")
PAIR_FIELDS = {
    "default": Fields(ANY_PROMPT, ("chosen", "chosen_response"), ("rejected", "rejected_response")),
    "argilla": Fields(("instruction",), ("chosen_response",), ("rejected_response",)),
    "argilla_chat": Fields((), chat=True),
    "icr": Fields(("input",)),
    "intel": Fields(("question",)),
    "prompt_pairs": Fields(("prompt",)),
    "ultra": Fields(("prompt",), chat=True),
}
LABEL_PROMPTS = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
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
ROLES = {"user": ["user"], "assistant": ["assistant"], "system": ["system"], "tool": ["tool"]}
CHAT_ROLES = ROLES | {"user": ["human", "user"], "assistant": ["gpt", "assistant"]}


def alpaca(row: Mapping[str, Any]) -> Row:
    """`instruction`, `output` and perhaps `input`, in Alpaca's texts."""
    instruction, output = (text_column(row, (name,), "alpaca") for name in ("instruction", "output"))
    given = optional_text(row, "input", "alpaca")
    template = ALPACA if given else ALPACA_WITHOUT_INPUT
    return {"prompt": template.format(instruction=instruction, input=given), "completion": output}


def completion(row: Mapping[str, Any], field: str = "text") -> Row:
    """A text in the column `field`, all of which is learned."""
    return {"text": text_column(row, (field,), "completion")}


def input_output(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """`segments` of a text, each tokenised by itself, of which those with `label` are learned; no token is added."""
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


def fixed_pairs(name: str, template: Template, fields: Fields) -> Callable[[Mapping[str, Any]], Row]:
    """The format `name` of pairs, written with fixed texts."""

    def answer(row: Mapping[str, Any], columns: tuple[str, ...]) -> str:
        if fields.chat:
            return messages_column(row, columns, name, count=2)[1]["content"]
        return text_column(row, columns, name)

    def form(row: Mapping[str, Any]) -> Row:
        if fields.prompt:
            prompt = template.prompt(text_column(row, fields.prompt, name), optional_text(row, "system", name))
        else:
            prompt = template.prompt(messages_column(row, fields.chosen, name, count=2)[0]["content"])
        chosen, rejected = answer(row, fields.chosen), answer(row, fields.rejected)
        return {
            "prompt": prompt,
            "chosen": template.answer.format(chosen),
            "rejected": template.answer.format(rejected),
        }

    return form


def fixed_labels(name: str, template: Template, column: str) -> Callable[[Mapping[str, Any]], Row]:
    """The format `name` of labelled completions to the prompt in `column`, written with fixed texts."""

    def form(row: Mapping[str, Any]) -> Row:
        prompt = template.prompt(text_column(row, (column,), name), optional_text(row, "system", name))
        completion = text_column(row, ("completion",), name)
        return {"prompt": prompt, "completion": template.answer.format(completion)}

    return form


def labelled_chat(name: str, template: Template) -> Callable[[Mapping[str, Any]], Row]:
    """The format `name` of two messages in `completion` or, as documented, the user's in `chosen`."""

    def form(row: Mapping[str, Any]) -> Row:
        messages = messages_column(row, ("completion",), name)
        if len(messages) == 1:
            messages = [*messages_column(row, ("chosen",), name, count=1), *messages]
        else:
            messages = messages_column(row, ("completion",), name, count=2)
        prompt, completion = (message["content"] for message in messages)
        return {"prompt": template.prompt(prompt), "completion": template.answer.format(completion)}

    return form


def nectar(row: Mapping[str, Any], inverted: bool = False) -> Row:
    """`prompt` and ranked `answers`: rank 1, the best, is chosen and the next one rejected.

    `inverted` is axolotl's published reading: the worst answer is chosen and the one before it rejected.
    """
    name = "zephyr.nectar"
    prompt = ZEPHYR.prompt(text_column(row, ("prompt",), name))
    _, answers = first_column(row, ("answers",), name)
    good = isinstance(answers, list) and all(
        isinstance(x, Mapping) and "answer" in x and isinstance(x.get("rank"), int | float) for x in answers
    )
    if not good:
        raise ConfigError(
            f"column 'answers' of the format {name} is a list of dictionaries with answer and rank, a number"
        )
    ranked = sorted(answers, key=lambda answer: answer["rank"])[:: -1 if inverted else 1]
    if len(ranked) < 2:
        raise ConfigError(f"column 'answers' has {len(ranked)} answers, but the format {name} compares two")
    return {"prompt": prompt, "chosen": ranked[0]["answer"], "rejected": ranked[1]["answer"]}


def user_defined_pairs(
    row: Mapping[str, Any],
    field_prompt: str = "prompt",
    field_system: str = "system",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    prompt_format: str = "{prompt}",
    chosen_format: str = "{chosen}",
    rejected_format: str = "{rejected}",
) -> Row:
    """Columns and texts of your own choice; `{system}` is empty where the row has none."""
    name = "user_defined.default"
    prompt = text_column(row, (field_prompt,), name)
    return {
        "prompt": _fill(prompt_format, "prompt_format", prompt=prompt, system=optional_text(row, field_system, name)),
        "chosen": _fill(chosen_format, "chosen_format", chosen=text_column(row, (field_chosen,), name)),
        "rejected": _fill(rejected_format, "rejected_format", rejected=text_column(row, (field_rejected,), name)),
    }


def user_defined_labels(
    row: Mapping[str, Any],
    field_prompt: str = "prompt",
    field_system: str = "system",
    field_completion: str = "completion",
    field_label: str = "label",
    prompt_format: str = "{prompt}",
    completion_format: str = "{completion}",
) -> Row:
    """Columns and texts of your own choice; `{system}` is empty where the row has none."""
    name = "user_defined.default"
    prompt, completion = text_column(row, (field_prompt,), name), text_column(row, (field_completion,), name)
    return {
        "prompt": _fill(prompt_format, "prompt_format", prompt=prompt, system=optional_text(row, field_system, name)),
        "completion": _fill(completion_format, "completion_format", completion=completion),
        "label": first_column(row, (field_label,), name)[1],
    }


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
        prompt = _fill(format, "format", instruction=instruction, input=given)
    else:
        prompt = _fill(no_input_format, "no_input_format", instruction=instruction)
    opening = _fill(system_format, "system_format", system=system) if system else ""
    return {"prompt": opening + prompt, "completion": text_column(row, (field_output,), name)}


def _fill(pattern: str, option: str, **values: str) -> str:
    try:
        return pattern.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{option} is {pattern!r}, which cannot be filled ({error}); it may hold "
            f"{' and '.join('{' + name + '}' for name in values)}, and {{{{ }}}} for braces"
        ) from error


def chat_default(
    row: Mapping[str, Any],
    tokenizer: Any = None,
    field_messages: str = "messages",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
) -> Row:
    """A conversation (or a text: one user message) and two answers: texts, messages, or the last of several.

    `message_property_mappings` maps role, content and others to the names they have in the messages; `roles` lists, for
    each role of the chat template, its names there. Both completions end without trailing white space.
    """
    name = "chat_template.default"
    keys = {"role": "role", "content": "content", **(message_property_mappings or {})}
    targets = {source: target for target, sources in (roles or ROLES).items() for source in _listed(sources)}

    def message(value: Any, column: str) -> Row:
        if not isinstance(value, Mapping) or not {keys["role"], keys["content"]} <= set(value):
            raise ConfigError(
                f"column {column!r} holds {value!r:.80}, but the format {name} takes messages with "
                f"{keys['role']!r} and {keys['content']!r} there; set message_property_mappings"
            )
        role = value[keys["role"]]
        if not isinstance(role, str) or role not in targets:
            raise ConfigError(
                f"column {column!r} has the role {role!r}; the format {name} knows {', '.join(targets)}; set roles, "
                "such as {'user': ['human']}"
            )
        return {**_renamed(value, keys), "role": targets[role], "content": value[keys["content"]]}

    def answer(column: str) -> Row:
        _, value = first_column(row, (column,), name)
        if isinstance(value, str):
            return {"role": "assistant", "content": value}
        return message(value[-1] if isinstance(value, list) and value else value, column)

    _, value = first_column(row, (field_messages,), name)
    if isinstance(value, str):
        prompt = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        prompt = [message(turn, field_messages) for turn in value]
    else:
        raise ConfigError(f"column {field_messages!r} is {value!r:.80}, but the format {name} takes messages there")
    return _stripped(rendered(row, tokenizer, prompt, answer(field_chosen), answer(field_rejected), name))


def argilla_chat(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """Two conversations: the prompt is all of `chosen` but its last message."""
    name = "chat_template.argilla_chat"
    chosen, rejected = _conversations(row, name)
    return _stripped(rendered(row, tokenizer, chosen[:-1], chosen[-1], rejected[-1], name))


def argilla(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """Two conversations of turn and answer, with `system` before them where the row has it (ORPO).

    A `prompt` column takes the place of the user's message when there is only one.
    """
    name = "chat_template.argilla"
    chosen, rejected = _conversations(row, name)
    for column, conversation in (("chosen", chosen), ("rejected", rejected)):
        if len(conversation) % 2:
            raise ConfigError(
                f"column {column!r} has {len(conversation)} messages, but the format {name} takes an even number: "
                "user and assistant in turn"
            )
    prompt = chosen[:-1]
    if len(prompt) == 1 and isinstance(row.get("prompt"), str):
        prompt = [{"role": "user", "content": row["prompt"]}]
    return rendered(row, tokenizer, [*_system(row, name), *prompt], chosen[-1], rejected[-1], name)


def bradley_terry(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """`input`, with `system` before it where the row has it, and two answers, in the tokenizer's chat template."""
    name = "bradley_terry.chat_template"
    prompt = [*_system(row, name), {"role": "user", "content": text_column(row, ("input",), name)}]
    chosen, rejected = (
        {"role": "assistant", "content": text_column(row, (column,), name)} for column in ("chosen", "rejected")
    )
    return rendered(row, tokenizer, prompt, chosen, rejected, name)


def _system(row: Mapping[str, Any], name: str) -> list[Row]:
    """The system message of a row, where it has one."""
    system = optional_text(row, "system", name)
    return [{"role": "system", "content": system}] if system else []


def rendered(row: Mapping[str, Any], tokenizer: Any, prompt: list[Any], chosen: Any, rejected: Any, name: str) -> Row:
    """The texts of a prompt and of two answers to it, each a message, in the tokenizer's chat template.

    The prompt is the conversation with the opening of the answer. A completion is what the template adds to that text
    when the answer follows, never found by searching for its content.

    Raises ConfigError: no tokenizer, or a template that rewrites the prompt once an answer follows.
    """
    if tokenizer is None:
        raise ConfigError(f"the format {name} writes with the tokenizer's chat template, and there is none here")
    options = template_options(row)
    texts = {"prompt": render_chat(tokenizer, prompt, True, **options)}
    for column, answer in (("chosen", chosen), ("rejected", rejected)):
        text = render_chat(tokenizer, [*prompt, answer], False, **options)
        if not text.startswith(texts["prompt"]):
            raise ConfigError(
                f"the chat template writes the prompt differently once the answer of {column!r} follows, so the format "
                f"{name} cannot tell them apart; give a template that only appends"
            )
        texts[column] = text[len(texts["prompt"]) :]
    return texts


def _conversations(row: Mapping[str, Any], name: str) -> tuple[list[Any], list[Any]]:
    chosen, rejected = (messages_column(row, (column,), name) for column in ("chosen", "rejected"))
    if len(chosen) < 2:
        raise ConfigError(f"column 'chosen' has {len(chosen)} message, but the format {name} takes prompt and answer")
    return chosen, rejected


def _stripped(texts: Row) -> Row:
    return {**texts, "chosen": texts["chosen"].rstrip(), "rejected": texts["rejected"].rstrip()}


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
    targets = {source: target for target, sources in (roles or CHAT_ROLES).items() for source in _listed(sources)}
    taught = {targets.get(role, role) for role in _listed(roles_to_train or ())}
    fields = (message_field_training, message_field_training_detail)
    legacy = not (taught or train_on_eos or any(fields))
    messages: list[Row] = []
    for turn in turns if isinstance(turns, list | tuple) else [turns]:
        if not isinstance(turn, Mapping) or turn.get(keys["role"]) is None:
            raise ConfigError(
                f"column {field_messages!r} holds {turn!r:.80}, but the format {name} takes messages with "
                f"{keys['role']!r} there; set message_property_mappings"
            )
        message = {key: x for key, x in _renamed(turn, keys).items() if key not in fields}
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


def _renamed(turn: Mapping[str, Any], keys: Mapping[str, str]) -> Row:
    """The message of a turn, which has the names `keys` for the entries of messages."""
    others = {key: x for key, x in turn.items() if key not in keys.values()}
    return others | {key: turn[source] for key, source in keys.items() if turn.get(source) is not None}


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    """The names, of which one may stand alone."""
    return [names] if isinstance(names, str) else names


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


PAIRS: dict[str, Callable[..., Row]] = {
    **{
        f"{family}.{strategy}": fixed_pairs(f"{family}.{strategy}", template, fields)
        for family, template in TEMPLATES.items()
        for strategy, fields in PAIR_FIELDS.items()
    },
    **{family: fixed_pairs(family, template, PAIR_FIELDS["default"]) for family, template in TEMPLATES.items()},
    "zephyr.nectar": nectar,
    "user_defined.default": user_defined_pairs,
    "user_defined": user_defined_pairs,
    "chat_template.default": chat_default,
    "chat_template": chat_default,
    "chat_template.argilla_chat": argilla_chat,
    "chat_template.argilla": argilla,
    "bradley_terry.chat_template": bradley_terry,
}
COMPLETIONS: dict[str, Callable[..., Row]] = {
    "chat_template": chat,
    "completion": completion,
    "input_output": input_output,
    "user_defined.default": user_defined_completions,
    "user_defined": user_defined_completions,
}
LABELS: dict[str, Callable[..., Row]] = {
    **{
        f"{family}.{strategy}": fixed_labels(f"{family}.{strategy}", template, column)
        for family, template in TEMPLATES.items()
        for strategy, column in LABEL_PROMPTS.items()
    },
    **{
        f"{family}.argilla_chat": labelled_chat(f"{family}.argilla_chat", template)
        for family, template in TEMPLATES.items()
    },
    "user_defined.default": user_defined_labels,
    "user_defined": user_defined_labels,
}
