"""axolotl's formats that write with the tokenizer's own chat template: `chat_template.*`.

A prompt is the conversation with the opening of the answer. A completion is what the template adds to that text when
the answer follows: a part of the rendered text, never found by searching for the content.

Source: axolotl's RLHF documentation (docs/rlhf.qmd), prompt_strategies/dpo/chat_template.py and orpo/chat_template.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.chat import render_chat, template_options
from jaxrl_llm.data.formats import columns

Row = Mapping[str, Any]
ROLES = {"user": ["user"], "assistant": ["assistant"], "system": ["system"], "tool": ["tool"]}


def default(
    row: Row,
    tokenizer: Any = None,
    field_messages: str = "messages",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """A conversation (or a text: one user message) and two answers: texts, messages, or the last of several.

    `message_property_mappings` says what role and content are called in the messages; `roles` lists, for each role of
    the chat template, what it is called there. Both completions end without trailing white space.
    """
    name = "chat_template.default"
    keys = {"role": "role", "content": "content", **(message_property_mappings or {})}
    targets = {source: target for target, sources in (roles or ROLES).items() for source in sources}

    def message(given: Any, column: str) -> dict[str, Any]:
        if not isinstance(given, Mapping) or not {keys["role"], keys["content"]} <= set(given):
            raise ConfigError(
                f"column {column!r} holds {given!r:.80}, but the format {name} takes messages with "
                f"{keys['role']!r} and {keys['content']!r} there; set message_property_mappings"
            )
        role = given[keys["role"]]
        if role not in targets:
            raise ConfigError(
                f"column {column!r} has the role {role!r}; the format {name} knows {', '.join(targets)}; set roles, "
                "such as {'user': ['human']}"
            )
        others = {key: value for key, value in given.items() if key not in keys.values()}
        return {"role": targets[role], "content": given[keys["content"]], **others}

    def answer(column: str) -> dict[str, Any]:
        _, given = columns.first(row, (column,), name)
        if isinstance(given, str):
            return {"role": "assistant", "content": given}
        return message(given[-1] if isinstance(given, list) and given else given, column)

    _, given = columns.first(row, (field_messages,), name)
    if isinstance(given, str):
        prompt = [{"role": "user", "content": given}]
    elif isinstance(given, list) and given:
        prompt = [message(one, field_messages) for one in given]
    else:
        raise ConfigError(f"column {field_messages!r} is {given!r:.80}, but the format {name} takes messages there")
    made = rendered(row, tokenizer, prompt, {"chosen": answer(field_chosen), "rejected": answer(field_rejected)}, name)
    return {key: value.rstrip() if key != "prompt" else value for key, value in made.items()}


def argilla_chat(row: Row, tokenizer: Any = None) -> dict[str, Any]:
    """Two whole conversations: the prompt is all of `chosen` but its last message."""
    name = "chat_template.argilla_chat"
    chosen, rejected = _conversations(row, name)
    made = rendered(row, tokenizer, chosen[:-1], {"chosen": chosen[-1], "rejected": rejected[-1]}, name)
    return {key: value.rstrip() if key != "prompt" else value for key, value in made.items()}


def argilla(row: Row, tokenizer: Any = None) -> dict[str, Any]:
    """Two whole conversations of turn and answer, with `system` before them where the row has it (ORPO).

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
    if row.get("system"):
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    return rendered(row, tokenizer, prompt, {"chosen": chosen[-1], "rejected": rejected[-1]}, name)


def rendered(
    row: Row, tokenizer: Any, prompt: list[Any], answers: Mapping[str, Any], format_name: str
) -> dict[str, Any]:
    """The texts of a prompt and of each answer to it; raises ConfigError for a template that rewrites the prompt."""
    if tokenizer is None:
        raise ConfigError(f"the format {format_name} writes with the tokenizer's chat template, and there is none here")
    options = template_options(row)
    before = render_chat(tokenizer, prompt, True, **options)
    texts = {"prompt": before}
    for column, answer in answers.items():
        whole = render_chat(tokenizer, [*prompt, answer], False, **options)
        if not whole.startswith(before):
            raise ConfigError(
                f"the chat template writes the prompt differently once the answer of {column!r} follows, so the format "
                f"{format_name} cannot tell them apart; give a template that only appends"
            )
        texts[column] = whole[len(before) :]
    return texts


def _conversations(row: Row, name: str) -> tuple[list[Any], list[Any]]:
    chosen, rejected = (columns.messages(row, (column,), name) for column in ("chosen", "rejected"))
    if len(chosen) < 2:
        raise ConfigError(f"column 'chosen' has {len(chosen)} message, but the format {name} takes prompt and answer")
    return chosen, rejected


FORMATS: dict[str, Callable[..., dict[str, Any]]] = {
    "chat_template.default": default,
    "chat_template": default,
    "chat_template.argilla_chat": argilla_chat,
    "chat_template.argilla": argilla,
}
