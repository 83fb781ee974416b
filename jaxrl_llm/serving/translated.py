"""What the APIs have in common that are read as chats: fields, tools, contents, and the text of their answers."""

import json
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

from jaxrl_llm.config.resolve import closest
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError


def check_fields(body: Mapping[str, Any], read: Collection[str], others: Collection[str]) -> None:
    """Raises BadRequestError for a field of neither kind, with the closest of those that are read."""
    for name in body:
        if name not in read and name not in others:
            raise BadRequestError(
                f"there is no field {name!r:.100}; the closest is {closest(name[:100], read)}", param=name[:100]
            )


def tools_of(body: Mapping[str, Any], kind: str, parameters: str, example: str, usual: str | None = None) -> Any:
    """The tools of a request as a chat has them, None without any. They are of the type `kind`, `usual` where they say
    none, and have `parameters` in the entry of that name; raises BadRequestError for another one than the `example`."""
    tools, found = body.get("tools") or [], []
    for tool in tools if isinstance(tools, list) else [tools]:
        tool = tool if isinstance(tool, Mapping) else {"type": tool}
        if (given := tool.get("type", usual)) != kind or not isinstance(tool.get("name"), str):
            raise BadRequestError(
                f"tools has one of type {given!r:.100}; this server hosts none and takes {example}",
                code="unsupported",
                param="tools",
            )
        shown = {name: tool.get(entry) for name, entry in (("description", "description"), ("parameters", parameters))}
        shown = {"name": tool["name"], **{name: value for name, value in shown.items() if value is not None}}
        found.append({"type": "function", "function": shown})
    return found or None


def text_or_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message of a chat: its text, or the parts where there are images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def frame(event: Mapping[str, Any]) -> str:
    """The event as the text of a server-sent event, which is named by its type."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def text_before_calls(choice: Choice) -> str:
    """The text of a choice that has ended, up to its calls and the space before them."""
    return choice.text[: choice.given].rstrip() if choice.calls else choice.text


async def settled_texts(answer: Any) -> AsyncGenerator[tuple[str, Any], None]:
    """With each piece of an `Answer` the text that is settled: in all that of `text_before_calls`."""
    choice, held = answer.choices[0], ""
    async for _, piece in answer.pieces():
        text, held = held + piece.text, ""
        if answer.asked.tools and (choice.finish_reason is None or choice.calls):  # it may be space before a call
            text, held = text.rstrip(), text[len(text.rstrip()) :]
        yield text, piece
