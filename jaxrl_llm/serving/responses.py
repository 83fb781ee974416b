"""OpenAI's Responses API over chats: a body becomes one of a chat, and the answer to that the items of a response.

The conversations of responses are kept, within bounds, for requests that go on with one by `previous_response_id`.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.bodies import CHAT, COMMON, SETTINGS, WITHOUT_EFFECT
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.conversations import Conversations
from jaxrl_llm.serving.errors import BadRequestError, with_failure
from jaxrl_llm.serving.items import add_items
from jaxrl_llm.serving.thoughts import can_think, tell_effort
from jaxrl_llm.serving.translated import (
    check_fields,
    frame,
    settled_texts,
    text_before_calls,
    tools_of,
)

OWN = {  # fields with a meaning of their own; the others of a chat, vLLM's among them, go on to it
    "input", "instructions", "tools", "tool_choice", "text", "include", "top_logprobs", "max_output_tokens", "store",
    "previous_response_id", "metadata", "reasoning",
}  # fmt: skip
AS_CHAT = (CHAT | COMMON) - {
    "messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "response_format", "return_token_ids",
    "separate_reasoning", "reasoning_effort", *OWN
}  # fmt: skip
# As in bodies.py; max_tool_calls counts the calls of tools that a server hosts.
NO_EFFECT = WITHOUT_EFFECT | {"client_metadata", "max_tool_calls"}
NEUTRAL = {"background": False, "truncation": "disabled"}
NO_WORD = {"background", "truncation", "conversation", "prompt", "context_management", "moderation"}
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second asks for what items here have as text
# The field that a client sent, in place of the chat's that was made of it.
NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}


class ResponsesRequest:
    """A request, `chat` as the body of one that asks the same; once its `answer` is set, the response to it."""

    names = NAMES

    def __init__(self, body: Mapping[str, Any], conversations: Conversations, template: str = ""):
        """Raises BadRequestError, which names the field. `template` is the model's chat template."""
        self.body = body = {name: value for name, value in body.items() if value is not None}
        self.conversations = conversations
        self.answer: Any = None  # an `Answer`
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        check_fields(body, OWN | AS_CHAT, NO_EFFECT | NO_WORD)
        for name, value in body.items():
            if name in NO_WORD and value != NEUTRAL.get(name):
                raise BadRequestError(
                    f"{name} is {value!r:.100}, but this server has no {name}: leave it out", code="unsupported",
                    param=name,
                )  # fmt: skip
        for name, kind in (("store", bool), ("metadata", Mapping), ("instructions", str)):
            if name in body and not isinstance(body[name], kind):
                raise BadRequestError(
                    f"{name} is {body[name]!r:.100}; it takes {'an object' if kind is Mapping else kind.__name__}",
                    param=name,
                )
        tokens = SETTINGS["max_completion_tokens"]
        if "max_output_tokens" in body and not tokens.accepts(body["max_output_tokens"]):
            raise BadRequestError(
                f"max_output_tokens is {body['max_output_tokens']!r:.100}, but it takes {tokens.allowed}",
                param="max_output_tokens",
            )
        previous = body.get("previous_response_id")
        self.messages = [] if previous is None else list(conversations.of(previous))  # without instructions
        add_items(self.messages, body.get("input"))
        messages = self.messages
        if "instructions" in body:
            first, *others = messages
            said = {"role": "system", "content": body["instructions"]}
            if first["role"] == "system" and isinstance(first["content"], str):  # templates take one
                messages = [{**said, "content": f"{said['content']}\n\n{first['content']}"}, *others]
            else:
                messages = [said, *messages]
        include, top = body.get("include") or [], body.get("top_logprobs")
        if not isinstance(include, list) or (unknown := [each for each in include if each not in INCLUDED]):
            wrong = unknown[0] if isinstance(include, list) else include
            raise BadRequestError(f"include has {wrong!r:.100}; it takes a list of {', '.join(INCLUDED)}",
                                  param="include")  # fmt: skip
        self.chat = {name: value for name, value in body.items() if name in AS_CHAT} | {"messages": messages}
        self.chat |= {"max_completion_tokens": body.get("max_output_tokens"), "top_logprobs": top}
        self.chat |= {"logprobs": LOGPROBS in include or bool(top), "response_format": _response_format(body)}
        # `strict` is what a forced call is, and no part of what the model is shown.
        example = 'functions: {"type": "function", "name": ..., "parameters": ...}'
        self.chat |= {"tools": tools_of(body, "function", "parameters", example), "tool_choice": _tool_choice(body)}
        self.chat["separate_reasoning"] = can_think(template)
        # A summary of thoughts is asked for by clients that know no others: here they are whole.
        reasoning = body.get("reasoning", {})
        known = isinstance(reasoning, Mapping) and reasoning.keys() <= {"effort", "summary"}
        effort = reasoning.get("effort") if known else "of another form"
        tell_effort(self.chat, effort, template, "reasoning", reasoning, "a summary, and as effort ")

    async def whole(self) -> Response:
        """The response, when it has ended."""
        await self.answer.finished()
        choice = self.answer.choices[0]
        self._keep(choice)
        if self.answer.asked.logprobs is None:
            return JSONResponse(self._ended(choice))
        return JSONResponse(await asyncio.to_thread(self._ended, choice))  # it may have millions of numbers

    async def frames(self) -> AsyncGenerator[str, None]:
        """The response as server-sent events, as it comes."""
        async for event in self.events():
            yield frame(event)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream, in the order of OpenAI's. One that fails ends with `response.failed`."""
        numbers = itertools.count()

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

        choice = self.answer.choices[0]
        begun: list[dict[str, Any]] = []  # items of texts, of which the last goes on

        def place() -> dict[str, Any]:
            return {"item_id": begun[-1]["id"], "output_index": len(begun) - 1, "content_index": 0}

        def begin(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield from end(begun)
            begun.append(item)
            yield event("output_item.added", output_index=len(begun) - 1, item={**item, "content": []})
            yield event("content_part.added", **place(), part=item["content"][0])

        def end(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            """Ends the item that goes on, as the last of `items` has it."""
            for item in items[-1:]:
                (content,) = item["content"]
                more = {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
                yield event(f"{content['type']}.done", **place(), text=content["text"], **more)
                yield event("content_part.done", **place(), part=content)
                yield event("output_item.done", output_index=len(begun) - 1, item=item)

        async def told() -> AsyncGenerator[dict[str, Any], None]:
            yield event("created", response=self._response("in_progress"))
            yield event("in_progress", response=self._response("in_progress"))
            logprobs: list[dict[str, Any]] = []
            async for text, piece in settled_texts(self.answer):
                logprobs += self._logprobs(choice, piece)
                if piece.thought:
                    if not begun:
                        for each in begin(self._thoughts("in_progress", "")):
                            yield each
                    yield event("reasoning_text.delta", **place(), delta=piece.thought)
                ends = choice.finish_reason is not None and self._has_message(choice)
                if (text or ends) and not (begun and begun[-1]["type"] == "message"):
                    begun[-1:] = [self._thoughts("completed", choice.thought)] if begun else []
                    for each in begin(self._message("in_progress", "")):
                        yield each
                if text:
                    yield event("output_text.delta", **place(), delta=text, logprobs=logprobs)
                    logprobs = []
            self._keep(choice)
            ended = self._ended(choice)
            for each in end(ended["output"][: len(begun)]):
                yield each
            for index, item in enumerate(ended["output"][len(begun) :], len(begun)):  # calls
                of = {"item_id": item["id"], "output_index": index}
                opened = {**item, "arguments": "", "status": "in_progress"}
                yield event("output_item.added", output_index=index, item=opened)
                yield event("function_call_arguments.delta", **of, delta=item["arguments"])
                yield event("function_call_arguments.done", **of, name=item["name"], arguments=item["arguments"])
                yield event("output_item.done", output_index=index, item=item)
            yield event(ended["status"], response=ended)

        async for each in with_failure(told()):
            failed = isinstance(each, BadRequestError)
            yield event("failed", response=self._response("failed", error=each)) if failed else each

    def _message(self, status: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """The item of the text."""
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
        return {"id": self.id.replace("resp_", "msg_"), "type": "message", "role": "assistant", "status": status,
                "content": [content]}  # fmt: skip

    def _thoughts(self, status: str, text: str) -> dict[str, Any]:
        """The item of the thoughts."""
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": self.id.replace("resp_", "rs_"), "type": "reasoning", "status": status, "summary": [],
                "content": content}  # fmt: skip

    def _has_message(self, choice: Choice) -> bool:
        """True where a choice that has ended has a text, be it empty: not with calls, or thoughts that were cut off."""
        cut_off = choice.finish_reason == "length" and choice.thought
        return bool(text_before_calls(choice)) or not (choice.calls or cut_off)

    def _logprobs(self, choice: Choice, piece: Any) -> list[dict[str, Any]]:
        def entry(of_chat: dict[str, Any]) -> dict[str, Any]:  # a part of a character has bytes that nobody knows
            return {**of_chat, "bytes": of_chat["bytes"] or []}

        told = choice.logprobs(piece)
        places = [] if told is None else told["content"]
        return [{**entry(place), "top_logprobs": list(map(entry, place["top_logprobs"]))} for place in places]

    def _keep(self, choice: Choice) -> None:
        """Keeps the conversation up to the end of a choice, unless the request says otherwise."""
        if self.body.get("store") is not False:
            calls = {"tool_calls": choice.shown_calls} if choice.calls else {}
            thoughts = {"reasoning_content": choice.thought} if choice.thought else {}
            said = {"role": "assistant", "content": text_before_calls(choice), **thoughts, **calls}
            self.conversations.add(self.id, [*self.messages, said])

    def _ended(self, choice: Choice) -> dict[str, Any]:
        """The response to a choice that has ended."""
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        output = []
        if choice.thought:
            goes_on = not (self._has_message(choice) or choice.calls)
            output.append(self._thoughts(status if goes_on else "completed", choice.thought))
        if self._has_message(choice):
            logprobs = self._logprobs(choice, choice.whole_piece())
            output.append(self._message(status, text_before_calls(choice), logprobs))
        output += [
            {"id": call["id"].replace("call_", "fc_"), "type": "function_call", "status": "completed",
             "call_id": call["id"], **call["function"]}
            for call in choice.shown_calls
        ]  # fmt: skip
        return self._response(status, output)

    def _response(
        self, status: str, output: Sequence[Any] = (), error: BadRequestError | None = None
    ) -> dict[str, Any]:
        body, asked, usage = self.body, self.answer.asked, None
        if status in ("completed", "incomplete"):
            counted = self.answer.usage()
            usage = {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.answer.choices[0].thought_tokens},
                "total_tokens": counted["total_tokens"],
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else {"code": error.code or "server_error", "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": asked.model,
            "output": list(output),
            "usage": usage,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": asked.parallel_calls,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None} | (body.get("reasoning") or {}),
            "store": body.get("store") is not False,
            "temperature": asked.sampling.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": asked.logprobs or 0,
            "top_p": asked.sampling.top_p,
            "truncation": "disabled",
            "background": False,
            **self.answer.versions(),
        }


def _tool_choice(body: Mapping[str, Any]) -> Any:
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        raise BadRequestError(
            f"tool_choice is {choice!r:.100}; it takes auto, none, required, or "
            '{"type": "function", "name": ...}',
            code="unsupported",
            param="tool_choice",
        )  # fmt: skip
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(body: Mapping[str, Any]) -> Any:
    """`text.format` as the response_format of a chat, whose schema lies one level deeper."""
    text = body.get("text", {})
    fields: Iterator[tuple[str, Any]] = iter(text.items()) if isinstance(text, Mapping) else iter([("", text)])
    for name, value in fields:
        if name not in ("format", "verbosity") or (name == "verbosity" and value not in (None, "medium")):
            raise BadRequestError(
                f"text is {text!r:.100}; it takes format, and no verbosity but medium", code="unsupported", param="text"
            )
    given = text.get("format")
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}
    return given
