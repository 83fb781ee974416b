"""Anthropic's Messages API over chats: a body becomes one of a chat, and the answer to that the blocks of a message."""

import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError, with_failure
from jaxrl_llm.serving.translated import (
    check_fields,
    frame,
    function,
    settled_texts,
    text_before_calls,
    text_or_parts,
)

OWN = {"system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences"}
AS_CHAT = {"model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "seed"}
NO_EFFECT = {"metadata", "service_tier", "cache_control"}  # who asks, and how the answer is billed
THOUGHTLESS = {"type": "disabled"}
NAMES = {"stop": "stop_sequences"}  # the field that a client sent, in place of the chat's that was made of it
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest:
    """A request, `chat` as the body of one that asks the same; once its `answer` is set, the message that it is."""

    names = NAMES

    def __init__(self, body: Mapping[str, Any], conversations: Any = None):
        """Raises BadRequestError, which names the field. There are no kept conversations in this API."""
        body = {name: value for name, value in body.items() if value is not None}
        self.id = f"msg_{uuid.uuid4().hex}"
        self.answer: Any = None  # an `Answer`
        check_fields(body, OWN | AS_CHAT, NO_EFFECT | {"thinking"})
        if (thinking := body.get("thinking", THOUGHTLESS)) != THOUGHTLESS:
            raise BadRequestError(
                f"thinking is {thinking!r:.100}, but this server has no budget of thoughts: leave it out",
                code="unsupported",
                param="thinking",
            )
        if "max_tokens" not in body:
            raise BadRequestError("max_tokens is missing: it is the most tokens of the answer", param="max_tokens")
        messages: list[dict[str, Any]] = []
        if body.get("system"):
            messages.append({"role": "system", "content": _content(body["system"], "system")})
        given = body.get("messages")
        if not isinstance(given, list) or not given or not all(isinstance(message, Mapping) for message in given):
            raise BadRequestError("messages takes a list of messages, each with role and content", param="messages")
        for message in given:
            messages += _chat_messages(message)
        self.chat = {name: value for name, value in body.items() if name in AS_CHAT} | {"messages": messages}
        self.chat |= {"max_tokens": body["max_tokens"], "stop": body.get("stop_sequences"), "tools": _tools(body)}
        choice = body.get("tool_choice", {"type": "auto"})
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if kind == "tool":
            self.chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind in CHOICES:
            self.chat["tool_choice"] = CHOICES[kind]
        else:
            raise BadRequestError(
                f"tool_choice is {choice!r:.100}; its type is auto, any, none, or tool with a name", param="tool_choice"
            )
        if (alone := choice.get("disable_parallel_tool_use")) is not None:
            self.chat["parallel_tool_calls"] = not alone

    async def whole(self) -> Response:
        """The message, when it has ended."""
        await self.answer.finished()
        choice = self.answer.choices[0]
        return JSONResponse(self._message(_blocks(choice), *self._end(choice)))

    def close(self) -> None:
        """Cancels what has not ended."""
        self.answer.close()

    async def frames(self) -> AsyncGenerator[str, None]:
        """The message as server-sent events, as it comes. One that fails ends with `error`."""
        async for event in with_failure(self._events()):
            kind, fields = ("error", event.body()) if isinstance(event, BadRequestError) else event
            yield frame({"type": kind, **fields})

    async def _events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        yield "message_start", {"message": self._message([], None, None)}
        opened = False
        async for text, _ in settled_texts(self.answer):
            if text and not opened:
                opened = True
                yield "content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}
            if text:
                yield "content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}
        choice = self.answer.choices[0]
        for index, block in enumerate(_blocks(choice)):
            if block["type"] == "tool_use":
                written = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
                yield "content_block_start", {"index": index, "content_block": {**block, "input": {}}}
                yield "content_block_delta", {"index": index, "delta": written}
            yield "content_block_stop", {"index": index}
        reason, sequence = self._end(choice)
        usage = {"output_tokens": self.answer.usage()["completion_tokens"]}
        yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage}
        yield "message_stop", {}

    def _end(self, choice: Choice) -> tuple[str, str | None]:
        """Why a choice has ended, and its stop string."""
        if choice.finish_reason != "stop":
            return {"length": "max_tokens", "tool_calls": "tool_use"}[str(choice.finish_reason)], None
        stops = [stop for stop in self.answer.asked.stop if choice.left_out.startswith(stop)]
        return ("stop_sequence", max(stops, key=len)) if stops else ("end_turn", None)

    def _message(self, content: list[Any], reason: str | None, sequence: str | None) -> dict[str, Any]:
        counted = self.answer.usage()
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {"input_tokens": counted["prompt_tokens"], "output_tokens": counted["completion_tokens"],
                      "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
            **self.answer.versions(),
        }  # fmt: skip


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """The blocks of a choice that has ended: its text, if it has some, and its calls."""
    text = text_before_calls(choice)
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
         "input": json.loads(call["function"]["arguments"])}
        for call in choice.shown_calls
    ]  # fmt: skip
    return [*([{"type": "text", "text": text}] if text else []), *calls]


def _chat_messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat that one here is: results of tools are messages of their own. Raises BadRequestError."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequestError(f"messages has the role {role!r:.100}; it takes user and assistant", param="messages")
    if not isinstance(content, list):
        return [{"role": role, "content": _content(content)}]
    found: list[dict[str, Any]] = []
    said, calls, thoughts = [], [], ""
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            if said:
                found.append({"role": role, "content": _content(said)})
                said = []
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            found.append({**result, "content": _content(block.get("content") or "")})
        elif kind == "tool_use" and role == "assistant":
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, Mapping):
                raise BadRequestError("messages has a tool_use without name and input", param="messages")
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts += block["thinking"]
        else:
            said.append(block)
    if said or calls or not found:
        own: dict[str, Any] = {"role": role, "content": _content(said)}
        own |= {"tool_calls": calls} if calls else {}
        found.append(own | ({"reasoning_content": thoughts} if thoughts else {}))
    return found


def _content(given: Any, param: str = "messages") -> str | list[dict[str, Any]]:
    """A content of texts and images as a chat has it: a text, or parts where there are images."""
    if isinstance(given, str):
        return given
    parts = []
    for block in given if isinstance(given, list) else [given]:
        kind = block.get("type") if isinstance(block, Mapping) else block
        source = block.get("source") if kind == "image" else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif isinstance(source, Mapping) and source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            raise BadRequestError(
                f"{param} has a block {kind!r:.100}; this server takes text, image with a base64 source, tool_use, "
                "tool_result and thinking",
                code="unsupported",
                param=param,
            )
    return text_or_parts(parts)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools, found = body.get("tools") or [], []
    for tool in tools if isinstance(tools, list) else [tools]:
        kind = tool.get("type", "custom") if isinstance(tool, Mapping) else tool
        if kind != "custom" or not isinstance(tool.get("name"), str):
            raise BadRequestError(
                f'tools has one of type {kind!r:.100}; this server hosts none and takes {{"name": ..., "input_schema": '
                "...}",
                code="unsupported",
                param="tools",
            )
        found.append(function(tool["name"], tool.get("description"), tool.get("input_schema")))
    return found or None
