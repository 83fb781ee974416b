"""The HTTP interface: OpenAI's endpoints over a `RequestQueue`, as an ASGI application.

A handler parses a body, hands rows to the queue's thread, and collects their tokens on the event loop. A client that
leaves, a stop string and the time limit cancel the rows, which frees their slots.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import secrets
import time
import traceback
import urllib.parse
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.bodies import Asked, parse, parse_json
from jaxrl_llm.serving.choice import Choice, Piece
from jaxrl_llm.serving.conversations import Conversations
from jaxrl_llm.serving.errors import FAILED, BadRequestError, lacks_memory, renamed, with_failure
from jaxrl_llm.serving.grid import RowRequest
from jaxrl_llm.serving.guides import Guides
from jaxrl_llm.serving.messages import MessagesRequest, counted
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.queue import Handle, RequestQueue, StoppedError, Tokens
from jaxrl_llm.serving.responses import ResponsesRequest

AT_ONCE = 2**16  # bytes of a body that is read as JSON without a thread
LEFT = 499  # the status that is counted for a client which left

Translated = ResponsesRequest | MessagesRequest


class Decoded(list[Any]):
    """The tiles of a request, and the bytes that they take, which count from before they are made."""

    nbytes: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a server."""

    tokens: int  # of a prompt and its completion
    body: int = 4 * 2**20  # bytes
    requests: int = 256  # that are answered at once
    rows: int = 1024  # that are asked for in one request, or wait for a slot
    seconds: float = 600.0  # for a whole answer
    body_seconds: float = 30.0  # for a request's body to come
    images: int = 2**30  # bytes of the tiles of all images that wait or are answered


class Server:
    """The application `app` that serves one model from a queue."""

    def __init__(
        self,
        queue: RequestQueue,
        tokenizer: Any,
        names: Sequence[str],
        eos: tuple[int, ...],
        vocabulary: int,
        limits: Limits,
        api_key: str = "",
        routes: Sequence[tuple[str, str, Callable[..., Awaitable[Response]]]] = (),
        load: Callable[[str], Any] | None = None,
    ):
        """The model is the first of `names`, the others are the queue's adapters. `routes` are further ones: path,
        method, and a function of server and request. `load` gives the parameters of a path, where weights may be
        replaced.
        """
        self.queue, self.tokenizer, self.names, self.eos = queue, tokenizer, tuple(names), eos
        self.vocabulary, self.limits, self.api_key = vocabulary, limits, api_key
        self.load, self.loading = load, asyncio.Lock()
        self.template = str(getattr(tokenizer, "chat_template", None) or "")
        self.guides = Guides(tokenizer, vocabulary, eos)
        self.metrics, self.created, self.active, self.draining = Metrics(), int(time.time()), 0, False
        self._tiles: list[weakref.ref[Decoded]] = []  # of requests, as long as these are held
        self.answers: weakref.WeakSet[Answer] = weakref.WeakSet()  # under way
        self.conversations = Conversations()
        own = (
            ("/v1/chat/completions", "POST", functools.partial(self.complete, chat=True)),
            ("/v1/completions", "POST", functools.partial(self.complete, chat=False)),
            ("/v1/responses", "POST", functools.partial(self.complete, chat=True, of=ResponsesRequest)),
            ("/v1/messages", "POST", functools.partial(self.complete, chat=True, of=MessagesRequest)),
            ("/v1/messages/count_tokens", "POST", self.count_tokens),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            *((path, method, functools.partial(handler, self)) for path, method, handler in routes),
        )
        guarded = (Route(path, self._guarded(path, handler), methods=[method]) for path, method, handler in own)
        self.app = Starlette(
            routes=[Route("/health", self.health), Route("/metrics", self.prometheus), *guarded],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(self, path: str, handler: Callable[..., Awaitable[Response]]) -> Callable[..., Any]:
        """The handler behind the key, the limits and the errors that every endpoint has."""

        async def endpoint(request: Request) -> Response:
            try:
                self._authorise(request)
                self.active += 1
                try:
                    self._check_room()
                    response = await handler(request)
                finally:
                    self.active -= 1
            except BadRequestError as error:
                response = refusal(error)
            except StoppedError as error:
                response = refusal(BadRequestError(str(error), 503))
            except RecursionError:
                response = refusal(BadRequestError("the body is nested too deeply; send it flatter"))
            except ClientDisconnect:
                response = Response(status_code=LEFT)
            except Exception:
                traceback.print_exc()
                response = refusal(FAILED)
            self.metrics.requests[path, response.status_code] += 1
            return response

        def refusal(error: BadRequestError) -> Response:
            headers = {"Retry-After": "1"} if error.status == 429 else {}
            if error.status == 408:  # clients ask again by themselves, and would wait as long
                headers["x-should-retry"] = "false"
            return JSONResponse(error.body(path), error.status, headers)

        return endpoint

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        if not self.api_key or hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            return
        ends, signature = (request.query_params.get(name, "") for name in ("ends", "signature"))
        path = request.scope["path"]
        signed = hmac.compare_digest(signature.encode(), self._signature(path, ends).encode())
        if not (request.method == "GET" and signed and int(ends) > time.time()):
            raise BadRequestError("the API key is missing or wrong: send it as Authorization: Bearer KEY", 401,
                                  "invalid_api_key")  # fmt: skip

    def signed(self, path: str, seconds: float) -> str:
        """The quoted path of an endpoint with a query that opens it, for so long, to who has no key."""
        ends = str(int(time.time() + seconds))
        return f"{urllib.parse.quote(path)}?ends={ends}&signature={self._signature(path, ends)}"

    def _signature(self, path: str, ends: str) -> str:
        return hmac.new(self.api_key.encode(), f"{ends} {path}".encode(), "sha256").hexdigest()

    def _check_room(self) -> None:
        if self.active > self.limits.requests:
            raise BadRequestError(f"{self.active - 1} requests are being answered; ask again later", 429)

    async def body(self, request: Request, most: int | None = None) -> dict[str, Any]:
        """The JSON object that a request brings; raises BadRequestError where it is too large, too slow or none."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Any page in a browser may post forms and plain text to this machine, but no JSON, and knows no key.
        if not self.api_key and kind != "application/json" and not kind.endswith("+json"):
            raise BadRequestError(
                f"the body's content type is {kind[:100] or 'missing'}; send Content-Type: application/json", 415
            )
        data = await self.read(request, most or self.limits.body)
        return await asyncio.to_thread(parse_json, data) if len(data) > AT_ONCE else parse_json(data)

    async def read(self, request: Request, most: int) -> bytes:
        """The bytes that a request brings, up to `most`; raises BadRequestError where they are more, or too slow."""
        data = bytearray()
        self.active -= 1  # who sends slowly takes no other's place
        try:
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > most:
                raise _too_large(most)
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise _too_large(most)
        except TimeoutError:
            raise BadRequestError(f"the body did not come within {self.limits.body_seconds:g} seconds", 408) from None
        finally:
            self.active += 1
        self._check_room()
        return bytes(data)

    async def asked(self, body: Mapping[str, Any], chat: bool) -> Asked:
        """The checked request of a body, by a thread: long texts and images take seconds. Raises BadRequestError."""
        limits = self.limits
        asked = await asyncio.to_thread(
            parse, body, chat, self.tokenizer, self.names, self.eos, limits.tokens, self.vocabulary, limits.rows
        )
        if asked.guide is not None:  # compiled the first time
            await asyncio.to_thread(self.guides.grammar, *asked.guide)
        if asked.tiles is not None:
            self._tiles = [ref for ref in self._tiles if ref() is not None]
            held = sum(tiles.nbytes for ref in self._tiles if (tiles := ref()) is not None)
            if held + asked.tiles.nbytes > limits.images:
                raise BadRequestError(
                    f"the images have {asked.tiles.nbytes} bytes as tiles, and those of others {held}, of "
                    f"{limits.images} in all; send fewer or smaller ones, or ask again later",
                    429 if asked.tiles.nbytes <= limits.images else 400,
                    param="messages",
                )
            tiles = Decoded()
            tiles.nbytes = asked.tiles.nbytes  # counted from now on, while a thread makes them
            self._tiles.append(weakref.ref(tiles))
            await asyncio.to_thread(tiles.extend, asked.tiles)
            asked = dataclasses.replace(asked, tiles=None, pixels=tiles)
        return asked

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        if self.queue.failure is not None:
            return PlainTextResponse(f"failed: {type(self.queue.failure).__name__}", 503)
        return PlainTextResponse("draining", 503) if self.draining else PlainTextResponse("ok")

    async def prometheus(self, request: Request) -> Response:
        """The numbers of `metrics.py`."""
        text = self.metrics.text(self.queue.counts, self.queue.size)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "jaxrl_llm", "root": name,
                "parent": self.names[0] if name in self.queue.adapters else None,
                "max_model_len": self.limits.tokens,
                # As Anthropic's servers describe it.
                "type": "model", "display_name": name, "max_input_tokens": self.limits.tokens,
                "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created))}  # fmt: skip

    async def models(self, request: Request) -> Response:
        """The model, and its adapters."""
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.names]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        if name not in self.names:
            raise BadRequestError(f"there is no model {name!r:.100}", 404, "model_not_found", "model")
        return JSONResponse(self._described(name))

    async def complete(self, request: Request, chat: bool, of: Callable[..., Translated] | None = None) -> Response:
        """The completions of a request, at once or as a stream of events; `of` reads those of another API as chats."""
        body = await self.body(request)
        other = None if of is None else of(body, self.conversations, self.template)
        with renamed({} if other is None else other.names):
            asked = await self.asked(body if other is None else other.chat, chat)
            answer = Answer(self, asked)
        return await self.answered(request, answer, other)

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of a request of Anthropic's Messages API, also of one too long for the model's rows."""
        body = await self.body(request)
        read = functools.partial(
            parse, tokenizer=self.tokenizer, models=self.names, eos=self.eos, longest=self.limits.body,
            vocabulary=self.vocabulary, most_rows=1,
        )  # fmt: skip
        return JSONResponse({"input_tokens": await asyncio.to_thread(counted, body, self.template, read)})

    async def answered(self, request: Request, answer: "Answer", other: Translated | None) -> Response:
        """The response of an answer, or of a request of another API which it answers."""
        shown = answer
        if other is not None:
            other.answer, shown = answer, other
        if answer.asked.stream:
            return EventStream(shown, self)
        try:
            return await self.unless_left(request, shown.whole())
        finally:
            shown.close()

    async def unless_left(self, request: Request, work: Any) -> Any:
        """The result of a coroutine, which is cancelled when the client leaves. Raises ClientDisconnect then."""
        task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            for each in (task, left):
                each.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    def end_answers(self) -> None:
        """Ends the answers under way with status 503, streams with an event that says so."""
        for handle in [handle for answer in self.answers for handle in answer.under_way()]:
            handle.deliver(BadRequestError("the server is stopping", 503))


def _too_large(most: int) -> BadRequestError:
    return BadRequestError(f"the body has more than {most} bytes; send less", 413, "request_too_large")


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # a wrong Host makes no URL
    message = f"{request.method} {path:.200}: {error.detail}"
    if error.status_code == 404:
        message += (
            "; this server has at /v1: chat/completions, responses, completions and models, and Anthropic's messages"
        )
    return JSONResponse(BadRequestError(message, error.status_code).body(path), error.status_code, error.headers)


class EventStream(Response):
    """An answer as server-sent events, until its end, or until the client leaves or reads too slowly."""

    def __init__(self, answer: "Answer | Translated", server: "Server"):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.answer, self.server = answer, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self.answer.frames():
                await send({"type": "http.response.body", "body": frame.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        self.server.active += 1
        tasks = [asyncio.ensure_future(sent()), asyncio.ensure_future(_left(receive))]
        try:
            # The answer has a time limit of its own; behind it a client is not reading.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=self.server.limits.seconds + 1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.answer.close()
            self.server.active -= 1


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
        """The rows that have not ended."""
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
        """Cancels the rows that have not ended."""
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

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, and of all completions."""
        prompts, completions = sum(map(len, self.asked.prompts)), sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}

    async def finished(self) -> None:
        """Returns when all choices have ended."""
        async for _ in self.pieces():
            pass

    async def whole(self) -> Response:
        """The answer, when all choices have ended."""
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
        """The answer in pieces, as they come."""
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
