"""The items that a request of OpenAI's Responses API begins with, as messages of a chat."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.translated import text_or_parts

OWN_CALL = re.compile("call_([0-9a-f]{16})[0-9a-f]{8}")  # the id of a call that an answer here gave, and its answer's
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text",
              "reasoning_text": "text", "refusal": "refusal"}  # fmt: skip


def add_items(messages: list[dict[str, Any]], given: Any) -> None:
    """Adds the input of a request to the messages of a chat. Raises BadRequestError.

    A turn of the model is one message: its text, and the calls behind it, also where their outputs stand between them.
    Thoughts stand with what follows them.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, Mapping) for item in given):
        raise BadRequestError(f"input is {given!r:.100}; it takes a text, or a list of items", param="input")
    thoughts = ""

    def add_turn(**fields: Any) -> None:
        nonlocal thoughts
        own, thoughts = thoughts, ""
        messages.append({"role": "assistant", **({"reasoning_content": own} if own else {}), **fields})

    # The places of turns: by their calls, and by how the ids of all calls of an answer here begin.
    called = {call["id"]: place for place, turn in enumerate(messages) for call in turn.get("tool_calls") or ()}
    of_answer = {call_id[:-8]: place for call_id, place in reversed(called.items())}
    copied = set[int]()  # places of turns whose calls are no part of a conversation that is kept
    for item in given:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            role, content = item.get("role"), _content(item.get("content"))
            if role == "assistant":
                add_turn(content=content)
            elif role in ("user", "system", "developer"):
                thoughts = ""
                messages.append({"role": "user" if role == "user" else "system", "content": content})
            else:
                raise BadRequestError(
                    f"input has the role {role!r:.100}; it takes user, assistant, system and developer", param="input"
                )
        elif kind == "function_call":
            call = _call(item)
            goes_on = bool(messages) and messages[-1]["role"] == "assistant" and not thoughts
            place = len(messages) - goes_on
            if OWN_CALL.fullmatch(call["id"]):  # one of ours names its turn, wherever outputs of other calls stand
                place = of_answer.get(call["id"][:-8], place)
            if place == len(messages):
                add_turn(content="")
            if place not in copied:
                copied.add(place)
                messages[place] = {**messages[place], "tool_calls": [*messages[place].get("tool_calls", ())]}
            messages[place]["tool_calls"].append(call)
            called[call["id"]] = place
            of_answer.setdefault(call["id"][:-8], place)
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str) or call_id not in called:
                raise BadRequestError(
                    f"input has the output of a call {call_id!r:.100}, and no such call before it", param="input"
                )
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"))})
        elif kind == "reasoning":
            thoughts += _reasoning(item)
        else:
            raise BadRequestError(
                f"input has an item of type {kind!r:.100}; this server takes message, function_call, "
                "function_call_output and reasoning",
                code="unsupported",
                param="input",
            )
    if not messages:
        raise BadRequestError("input has no message", param="input")


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    """The call of a chat that an item of type function_call is."""
    name, arguments, call_id = (item.get(field) for field in ("name", "arguments", "call_id"))
    if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str)):
        raise BadRequestError(
            "input has a function_call without name, arguments and call_id, each a text", param="input"
        )
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of an item of type reasoning."""
    parts = item.get("content") or item.get("summary") or []
    if not parts and item.get("encrypted_content"):
        raise BadRequestError(
            "input has a reasoning item with encrypted_content alone, which this server cannot read: leave it out",
            code="unsupported",
            param="input",
        )
    text = _content(parts)
    return text if isinstance(text, str) else ""


def _content(given: Any) -> str | list[dict[str, Any]]:
    """The content of a message: its text, or parts of a chat where there are images. Raises BadRequestError."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadRequestError(f"input has the content {given!r:.100}; it takes a text, or a list of parts",
                              param="input")  # fmt: skip
    parts = []
    for part in given:
        part = part if isinstance(part, Mapping) else {"type": part}
        kind = part.get("type")
        text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
        if isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif kind == "input_image" and part.get("file_id") is None:
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            raise BadRequestError(
                f"input has a part {kind!r:.100}; this server takes texts, and input_image with a data: URL as "
                "image_url",
                code="unsupported",
                param="input",
            )
    return text_or_parts(parts)
