"""Answers to requests: from the queue's tokens to OpenAI's objects, whole or as server-sent events.

The rows of a request are handed to the queue's thread, and their tokens collected on the event loop. A client that
leaves, a stop string and the time limit cancel the rows, which frees their slots.
"""

import asyncio
import contextlib
import functools
import json
import secrets
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.app import Server, client_left
from jaxrl_llm.serving.bodies import Asked
from jaxrl_llm.serving.choice import Choice, Piece
from jaxrl_llm.serving.errors import BadRequestError, lacks_memory, with_failure
from jaxrl_llm.serving.grid import RowRequest
from jaxrl_llm.serving.handles import Handle, Tokens
from jaxrl_llm.serving.messages import MessagesRequest
from jaxrl_llm.serving.responses import ResponsesRequest

Translated = ResponsesRequest | MessagesRequest


async def answered(server: Server, request: Request, answer: "Answer", other: Translated | None) -> Response:
    """The response of an answer, or of a request of another API which it answers."""
    shown = answer
    if other is not None:
        other.answer, shown = answer, other
    if answer.asked.stream:
        return EventStream(answer, shown.frames())
    try:
        return await server.unless_left(request, shown.whole())
    finally:
        answer.close()


class EventStream(Response):
    """An answer as server-sent events, until its end, or until the client leaves or reads too slowly."""

    def __init__(self, answer: "Answer", frames: AsyncIterator[str]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.answer, self.frames = answer, frames

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self.frames:
                await send({"type": "http.response.body", "body": frame.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        server = self.answer.server
        server.active += 1
        tasks = [asyncio.ensure_future(sent()), asyncio.ensure_future(client_left(receive))]
        try:
            # The answer has a time limit of its own; behind it a client is not reading.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=server.limits.seconds + 1)
        finally:
            for task in tasks:
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(error, Exception):  # the answer tells its own; another would just break off
                    traceback.print_exception(error)
            self.answer.close()
            server.active -= 1


class Answer:
    """The choices of a request, from the queue's tokens to OpenAI's objects. Its rows are asked for when it is made.

    Raises BadRequestError when too many rows wait already. It takes up to the server's `limits.seconds`, unless it is
    `patient`.
    """

    def __init__(self, server: Server, asked: Asked, patient: bool = False):
        self.server, self.asked, self.started = server, asked, time.monotonic()
        self.seconds = None if patient else server.limits.seconds
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        rows = len(asked.prompts) * asked.n
        if rows > server.limits.rows:
            raise BadRequestError(f"a request has up to {server.limits.rows} completions, not {rows}", param="n")
        if server.queue.counts.waiting + rows > server.limits.rows:
            raise BadRequestError(f"{server.queue.counts.waiting} completions wait already; ask again later", 429)
        grammar = None if asked.guide is None else server.guides.grammar(*asked.guide)
        self.inbox: asyncio.Queue[tuple[Choice, Tokens | BaseException]] = asyncio.Queue()
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        loop = asyncio.get_running_loop()

        def deliver(choice: Choice, tokens: Tokens | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self.inbox.put_nowait, (choice, tokens))

        scored = asked.prompt_logprobs
        if asked.echo and asked.logprobs is not None:
            scored = max(scored or 0, asked.logprobs)
        self.choices = [
            Choice(index * asked.n + number, asked, server.tokenizer, prompt)
            for index, prompt in enumerate(asked.prompts)
            for number in range(asked.n)
        ]
        for choice in self.choices:
            prompt = choice.index // asked.n
            request = RowRequest(
                choice.prompt, asked.limits[prompt] or 1, asked.sampling, asked.ends, seed, choice.index,
                asked.logprobs or 0, scored, grammar, "" if asked.model == server.names[0] else asked.model,
                asked.tiles if asked.pixels is None else asked.pixels,  # those of a session are read with its prompt
            )  # fmt: skip
            choice.handle = Handle(request, functools.partial(deliver, choice))
        self.going = set(self.choices)
        server.queue.submit(self.under_way())
        server.answers.add(self)

    def under_way(self) -> list[Handle]:
        """The handles of the rows that have not ended, by which the queue cancels them."""
        return [choice.handle for choice in self.choices if choice in self.going and choice.handle is not None]

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """New parts of the choices until all have ended. Raises BadRequestError when time is over or decoding fails."""
        end, first = None if self.seconds is None else self.started + self.seconds, True
        while self.going:
            try:
                left = None if end is None else end - time.monotonic()
                waits = self.inbox.empty() or (left is not None and left <= 0)
                choice, tokens = await asyncio.wait_for(self.inbox.get(), left) if waits else self.inbox.get_nowait()
            except TimeoutError:
                raise BadRequestError(f"the answer took more than {self.seconds:g} seconds", 408) from None
            if isinstance(tokens, ConfigError) and self.asked.guide is not None:
                raise BadRequestError(f"{self.asked.guide[1]}: {tokens}", param=self.asked.guide[1])
            if isinstance(tokens, BadRequestError):
                raise tokens
            if isinstance(tokens, BaseException) and lacks_memory(tokens):
                raise BadRequestError(
                    "there is no memory for this beside what else is decoded: ask for fewer tokens, or again later", 503
                )
            if isinstance(tokens, BaseException):
                raise BadRequestError(f"decoding failed: {type(tokens).__name__}", 500)
            if choice not in self.going:
                continue
            if first:
                self.server.metrics.first_token.add(time.monotonic() - self.started)
                first = False
            piece = choice.add(tokens)
            if choice.finish_reason is not None:
                self.going.remove(choice)
                if tokens.finish_reason is None and choice.handle is not None:  # at a stop string
                    self.server.queue.cancel([choice.handle])
            yield choice, piece

    def close(self) -> None:
        """Ends the answer: cancels the rows that have not ended, and counts how long it took."""
        self.server.metrics.latency.add(time.monotonic() - self.started)
        self.server.queue.cancel(self.under_way())
        self.server.answers.discard(self)
        self.going.clear()
        for choice in self.choices:
            choice.handle = None  # which delivers to the choice: in a circle both, and its images, stay for a while

    def versions(self) -> dict[str, int]:
        """The versions of the weights that the answer's tokens are of, from the oldest to the newest."""
        handles = [choice.handle for choice in self.choices]
        begun = [handle for handle in handles if handle is not None and handle.slot is not None]
        current = self.server.queue.counts.weight_version
        oldest = min((handle.version for handle in begun), default=current)
        newest = max((handle.newest for handle in begun), default=current)
        return {"weight_version": oldest, "newest_weight_version": newest}

    def _object(self, choices: list[dict[str, Any]], streamed: bool, **others: Any) -> dict[str, Any]:
        kind = "text_completion" if not self.asked.chat else "chat.completion" + (".chunk" if streamed else "")
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model, "choices": choices,
                **self.versions(), **others}  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, those among them that were computed before, and tokens of all completions."""
        prompts, completions = sum(map(len, self.asked.prompts)), sum(len(choice.ids) for choice in self.choices)
        handles = [choice.handle for choice in self.choices[:: self.asked.n]]
        cached = sum(handle.cached for handle in handles if handle is not None)
        return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions,
                "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip

    async def finished(self) -> None:
        """Returns when all choices have ended."""
        async for _ in self.pieces():
            pass

    async def whole(self) -> Response:
        """The answer in one piece, an object of OpenAI's, when all choices have ended."""
        await self.finished()
        if self.asked.logprobs is None and self.asked.prompt_logprobs is None:
            return self._response()
        return await asyncio.to_thread(self._response)  # it may have millions of numbers

    def _response(self) -> Response:
        choices = []
        for choice in self.choices:
            shown: dict[str, Any] = {"index": choice.index}
            if self.asked.chat:
                text = choice.text[: choice.given]
                message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
                if self.asked.apart:
                    message["reasoning_content"] = choice.thought or None
                if choice.calls:
                    message |= {"content": text.strip() or None, "tool_calls": choice.shown_calls}
                shown["message"] = message
            else:
                shown["text"] = choice.text
            shown |= {"logprobs": choice.logprobs(choice.whole_piece()), "finish_reason": choice.finish_reason}
            if self.asked.echo:
                text, before = choice.echoed()
                shown["text"] = text + choice.text
                if before is not None:
                    after = {**shown["logprobs"], "text_offset": [len(text) + at for at in choice.starts]}
                    shown["logprobs"] = {name: before[name] + after[name] for name in before}
            if self.asked.prompt_logprobs is not None:
                shown["prompt_logprobs"] = choice.prompt_logprobs()
            if self.asked.return_token_ids:
                shown["token_ids"] = choice.ids
                if not self.asked.chat:
                    shown["prompt_token_ids"] = choice.prompt
            choices.append(shown)
        others: dict[str, Any] = {"usage": self.usage()}
        if self.asked.return_token_ids and self.asked.chat:
            others["prompt_token_ids"] = self.asked.prompts[0]
        return JSONResponse(self._object(choices, False, **others))

    async def frames(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events, as it comes. One that fails says so in the last but one."""
        async for event in with_failure(self.events()):
            shown = event.body() if isinstance(event, BadRequestError) else event
            yield f"data: {json.dumps(shown, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in pieces, each a chunk of OpenAI's, as tokens come and their text is certain."""
        seen: set[Choice] = set()
        async for choice, piece in self.pieces():
            first, last = choice not in seen, choice.finish_reason is not None
            logprobs = choice.logprobs(piece)
            if not (first or last or piece.text or piece.thought or logprobs or self.asked.return_token_ids):
                continue  # its text is not certain yet
            seen.add(choice)
            shown: dict[str, Any] = {"index": choice.index}
            if self.asked.chat:
                delta: dict[str, Any] = {"role": "assistant"} if first else {}
                if piece.text or first:
                    delta["content"] = piece.text
                if piece.thought:
                    delta["reasoning_content"] = piece.thought
                if last and choice.calls:
                    delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(choice.shown_calls)]
                shown["delta"] = delta
            else:
                shown["text"] = piece.text
            shown |= {"logprobs": logprobs, "finish_reason": choice.finish_reason}
            others: dict[str, Any] = {}
            if self.asked.return_token_ids:
                shown["token_ids"] = piece.ids
                if first and not self.asked.chat:
                    shown["prompt_token_ids"] = choice.prompt
                if first and self.asked.chat:
                    others["prompt_token_ids"] = choice.prompt
            if self.asked.include_usage:
                others["usage"] = None
            yield self._object([shown], True, **others)
        if self.asked.include_usage:
            yield self._object([], True, usage=self.usage())
