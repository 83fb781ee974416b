"""Anthropic's Messages API over chats: a body becomes one of a chat, and the answer to that the blocks of a message."""

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.bodies import Asked
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError, renamed, with_failure
from jaxrl_llm.serving.thoughts import EFFORTS, can_think, tell_template
from jaxrl_llm.serving.translated import (
    check_fields,
    frame,
    settled_texts,
    text_before_calls,
    text_or_parts,
    tools_of,
)

OWN = {"system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences", "thinking", "output_config"}
AS_CHAT = {"model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "seed"}
# Who asks, and where and how the answer is made, kept and billed.
NO_EFFECT = {"metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "user_profile_id",
             "workspace_id", "speed"}  # fmt: skip
# The field that a client sent, in place of the chat's that was made of it.
NAMES = {"stop": "stop_sequences", "response_format": "output_config",
         "parallel_tool_calls": "disable_parallel_tool_use"}  # fmt: skip
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKS = {"enabled": True, "adaptive": True, "disabled": False}
PATH = "/v1/messages"
BILLING = "x-anthropic-billing-header"  # in the system prompt of Claude Code, another one in each request


class MessagesRequest:
    """A request, `chat` as the body of one that asks the same; once its `answer` is set, the message that it is."""

    names = NAMES

    def __init__(self, body: Mapping[str, Any], conversations: Any = None, template: str = ""):
        """Raises BadRequestError, which names the field. There are no kept conversations in this API.

        `template` is the model's chat template, which may have thoughts.
        """
        body = {name: value for name, value in body.items() if value is not None}
        self.id = f"msg_{uuid.uuid4().hex}"
        self.answer: Any = None  # an `Answer`
        check_fields(body, OWN | AS_CHAT, NO_EFFECT | {"context_management"})
        _check_edits(body.get("context_management", {}))
        if "max_tokens" not in body:
            raise BadRequestError("max_tokens is missing: it is the most tokens of the answer", param="max_tokens")
        messages: list[dict[str, Any]] = []
        if body.get("system"):
            messages.append({"role": "system", "content": _content(body["system"], "system")})
        given = body.get("messages")
        if not isinstance(given, list) or not given or not all(isinstance(message, Mapping) for message in given):
            raise BadRequestError("messages takes a list of messages, each with role and content", param="messages")
        for message in _turns(given):
            messages += _chat_messages(message)
        self.chat = {name: value for name, value in body.items() if name in AS_CHAT} | {"messages": messages}
        self.chat |= {"max_tokens": body["max_tokens"], "stop": body.get("stop_sequences")}
        example = '{"name": ..., "input_schema": ...}'
        self.chat["tools"] = tools_of(body, "custom", "input_schema", example, usual="custom")
        choice = body.get("tool_choice", {"type": "auto"})
        kind = str(choice.get("type")) if isinstance(choice, Mapping) else ""
        if kind == "tool":
            self.chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind in CHOICES:
            self.chat["tool_choice"] = CHOICES[kind]
        else:
            raise BadRequestError(
                f"tool_choice is {choice!r:.100}; its type is auto, any, none, or tool with a name", param="tool_choice"
            )
        if (alone := choice.get("disable_parallel_tool_use")) is not None:
            self.chat["parallel_tool_calls"] = not alone if isinstance(alone, bool) else alone
        self.chat["separate_reasoning"] = can_think(template)
        thinks, self.shows_thoughts = _thinking(body.get("thinking", {}), can_think(template))
        config = body.get("output_config", {})
        effort = config.get("effort") if isinstance(config, Mapping) else None
        if not isinstance(config, Mapping) or config.keys() - {"effort", "format"} or effort not in (None, *EFFORTS):
            raise BadRequestError(
                f"output_config is {config!r:.100}; it takes format, and as effort {', '.join(EFFORTS)}",
                param="output_config",
            )
        tell_template(self.chat, thinks, effort and EFFORTS[effort])
        if (form := config.get("format")) is not None:  # as a chat has it, whose schema lies one level deeper
            own = isinstance(form, Mapping) and form.get("type") == "json_schema"
            self.chat["response_format"] = {"type": "json_schema", "json_schema": dict(form)} if own else form

    async def whole(self) -> Response:
        """The message, when it has ended."""
        await self.answer.finished()
        choice = self.answer.choices[0]
        blocks: list[dict[str, Any]] = []
        if choice.thought:  # with a signature: clients do not send back what has none
            shown = choice.thought if self.shows_thoughts else ""
            blocks.append({"type": "thinking", "thinking": shown, "signature": self.id})
        if text := text_before_calls(choice):
            blocks.append({"type": "text", "text": text})
        return JSONResponse(self._message([*blocks, *map(_call, choice.shown_calls)], *self._end(choice)))

    async def frames(self) -> AsyncGenerator[str, None]:
        """The message as server-sent events, as it comes. One that fails ends with `error`."""
        async for event in with_failure(self._events()):
            kind, fields = ("error", event.body(PATH)) if isinstance(event, BadRequestError) else event
            yield frame({"type": kind, **fields})

    async def _events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        yield "message_start", {"message": self._message([], None, None)}
        index, signed = 0, {"type": "signature_delta", "signature": self.id}
        opened = ""  # what the block at the index is of

        def delta(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            return "content_block_delta", {"index": index, "delta": fields}

        async for text, piece in settled_texts(self.answer):
            for kind, new in (("thinking", piece.thought), ("text", text)):  # no thoughts come behind text
                if new and opened != kind:
                    if opened:  # thoughts, behind which the text begins
                        yield delta(signed)
                        yield "content_block_stop", {"index": index}
                        index += 1
                    opened = kind
                    empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
                    yield "content_block_start", {"index": index, "content_block": empty}
                if new and (kind == "text" or self.shows_thoughts):
                    yield delta({"type": f"{kind}_delta", kind: new})
        if opened == "thinking":
            yield delta(signed)
        if opened:
            yield "content_block_stop", {"index": index}
            index += 1
        choice = self.answer.choices[0]
        for call in map(_call, choice.shown_calls):
            yield "content_block_start", {"index": index, "content_block": {**call, "input": {}}}
            written = json.dumps(call["input"], ensure_ascii=False)
            yield delta({"type": "input_json_delta", "partial_json": written})
            yield "content_block_stop", {"index": index}
            index += 1
        reason, sequence = self._end(choice)
        yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": self._usage()}
        yield "message_stop", {}

    def _end(self, choice: Choice) -> tuple[str, str | None]:
        """Why a choice has ended, and its stop string."""
        if choice.finish_reason != "stop":
            return {"length": "max_tokens", "tool_calls": "tool_use"}[str(choice.finish_reason)], None
        stops = [stop for stop in self.answer.asked.stop if choice.left_out.startswith(stop)]
        return ("stop_sequence", max(stops, key=len)) if stops else ("end_turn", None)

    def _message(self, content: list[Any], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
            **self.answer.versions(),
        }

    def _usage(self) -> dict[str, Any]:
        counted, thought = self.answer.usage(), self.answer.choices[0].thought_tokens
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,  # Anthropic's are those behind the others
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thought},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def counted(body: Mapping[str, Any], template: str, read: Callable[..., Asked]) -> int:
    """The tokens of the prompt that a body asks with, as `read` parses a chat. Raises BadRequestError."""
    request = MessagesRequest({**body, "max_tokens": 1}, None, template)
    with renamed(request.names):
        return len(read(request.chat, True).prompts[0])


def _thinking(given: Any, can: bool) -> tuple[bool | None, bool]:
    """Whether `thinking` has a model think whose chat template `can`, and whether the answer shows the thoughts.

    None for the first leaves it to the chat template. budget_tokens are no bound here: max_tokens is that of thoughts
    and text together. Raises BadRequestError.
    """
    kind = str(given.get("type")) if isinstance(given, Mapping) else ""
    if given == {} or (kind == "adaptive" and not can):  # the model may think as it sees fit
        return None, True
    if kind not in THINKS or given.get("display") not in (None, "summarized", "omitted"):
        raise BadRequestError(
            f"thinking is {given!r:.100}; its type is {', '.join(THINKS)}, and its display summarized or omitted",
            param="thinking",
        )
    if THINKS[kind] and not can:
        raise BadRequestError(
            "thinking is enabled, but the model's chat template has no thoughts: leave it out", code="unsupported",
            param="thinking",
        )  # fmt: skip
    return THINKS[kind], given.get("display") != "omitted"


def _check_edits(given: Any) -> None:
    """Raises BadRequestError for a `context_management` that is to change the conversation.

    Which thoughts of earlier turns the model sees is its chat template's matter, whatever an edit keeps of them.
    """
    edits = given.get("edits", []) if isinstance(given, Mapping) else [given]
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = edit.get("type") if isinstance(edit, Mapping) else edit
        if not str(kind).startswith("clear_thinking"):
            raise BadRequestError(
                f"context_management has an edit {kind!r:.100}, but this server edits nothing: leave it out",
                code="unsupported",
                param="context_management",
            )


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The block of a call of a chat."""
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, of which consecutive ones of the user or of the assistant are one, as in this API.

    It has the blocks of all, and an empty line between the texts of two.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        before, content, role = turns[-1] if turns else {}, message.get("content"), message.get("role")
        former, texts = before.get("content"), (str, list)
        same = role in ("user", "assistant") and role == before.get("role")
        if not same or not isinstance(content, texts) or not isinstance(former, texts):  # others are refused
            turns.append({**message, "content": [*content] if isinstance(content, list) else content})
            continue
        former, own = ([{"type": "text", "text": x}] if isinstance(x, str) else x for x in (former, content))
        both = all(isinstance(x, Mapping) and x.get("type") == "text" for x in [*former[-1:], *own[:1]])
        former += [*([{"type": "text", "text": "\n\n"}] if both else []), *own]  # in place: there may be many
        before["content"] = former
    return turns


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
        elif kind == "redacted_thinking" and role == "assistant":
            pass  # of another server, which alone can read it
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
        block = block if isinstance(block, Mapping) else {"type": block}
        kind = block.get("type")
        if kind == "text" and param == "system" and str(block.get("text")).startswith(BILLING):
            continue  # else no two prompts would have a beginning in common
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
