"""The HTTP interface over a `RequestQueue`, as an ASGI application: who may ask, for how much, and how it is refused.

What is answered at which path is in `endpoints.py`, and how in `answers.py`.
"""

import asyncio
import dataclasses
import functools
import hmac
import time
import traceback
import urllib.parse
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files.weight_versions import PatchError
from jaxrl_llm.serving.bodies import Asked, parse, parse_json
from jaxrl_llm.serving.conversations import Conversations
from jaxrl_llm.serving.errors import FAILED, BadRequestError
from jaxrl_llm.serving.guides import Guides
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.queue import RequestQueue, StoppedError
from jaxrl_llm.serving.thoughts import template_of
from jaxrl_llm.serving.weights import Adapter

AT_ONCE = 2**16  # bytes of a body that is read as JSON without a thread
SPILLED = 2**26  # bytes of a body that is too large which are read and dropped
LEFT = 499  # the status that is counted for a client which left


class Decoded(list[Any]):
    """The tiles of a request, and the bytes that they take, which count from before they are made."""

    nbytes: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a server takes: of a request, of all that it answers at once, and of the time for it."""

    tokens: int  # of a prompt and its completion
    body: int = 4 * 2**20  # bytes
    requests: int = 256  # that are answered at once
    rows: int = 1024  # that are asked for in one request, or wait for a slot
    seconds: float = 600.0  # for a whole answer
    body_seconds: float = 30.0  # for a request's body to come
    images: int = 2**30  # bytes of the tiles of all images that wait or are answered
    likeliest: int = 2**22  # log-probs of likeliest tokens in an answer, each of which takes 700 bytes while it is made


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
        load_adapter: Callable[[str], Adapter] | None = None,
    ):
        """The model is the first of `names`, the others are the queue's adapters. `routes` are those beside /health and
        /metrics: path, method, and a function of server and request. `load` gives the parameters of a path, where
        weights may be replaced, and `load_adapter` an adapter, where these may come and go.
        """
        self.queue, self.tokenizer, self.names, self.eos = queue, tokenizer, tuple(names), eos
        self.vocabulary, self.limits, self.api_key = vocabulary, limits, api_key
        self.load, self.load_adapter, self.loading = load, load_adapter, asyncio.Lock()
        self.template = template_of(tokenizer)
        self.guides = Guides(tokenizer, vocabulary, eos)
        self.metrics, self.created, self.active, self.draining = Metrics(), int(time.time()), 0, False
        self._tiles: list[weakref.ref[Decoded]] = []  # of requests, as long as these are held
        self.answers: weakref.WeakSet[Any] = weakref.WeakSet()  # each an `Answer` that is under way
        self.conversations = Conversations()
        guarded = (
            Route(path, self._guarded(path, functools.partial(handler, self)), methods=[method])
            for path, method, handler in routes
        )
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
        """The bytes that a request brings, up to `most`; raises BadRequestError where they are more, or too slow.

        What is not much too large is read to its end: clients that still send see a lost connection, not the answer.
        """
        data, size = bytearray(), 0
        self.active -= 1  # who sends slowly takes no other's place
        try:
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > most + SPILLED:
                raise _too_large(most)
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        data += chunk
                    elif size > most + SPILLED:
                        break
        except TimeoutError:
            if size <= most:
                raise BadRequestError(
                    f"the body did not come within {self.limits.body_seconds:g} seconds", 408
                ) from None
        finally:
            self.active += 1
        if size > most:
            raise _too_large(most)
        self._check_room()
        return bytes(data)

    def parse(self, body: Mapping[str, Any], chat: bool, longest: int | None = None, **options: Any) -> Asked:
        """The checked request of a body, by `bodies.parse` with its `options`: of this model, and within the limits, or
        `longest` tokens. Raises BadRequestError."""
        limits = self.limits
        return parse(
            body, chat, self.tokenizer, self.names, self.eos, longest or limits.tokens, self.vocabulary, limits.rows,
            **options,
        )  # fmt: skip

    async def asked(self, body: Mapping[str, Any], chat: bool) -> Asked:
        """The checked request of a body, by a thread: long texts and images take seconds. Raises BadRequestError."""
        asked = await asyncio.to_thread(self.parse, body, chat)
        top = asked.logprobs or 0
        of_prompt = max(asked.prompt_logprobs or 0, top if asked.echo else 0)
        tokens = zip(map(len, asked.prompts), asked.limits, strict=True)
        likeliest = asked.n * sum(prompt * of_prompt + limit * top for prompt, limit in tokens)
        if likeliest > self.limits.likeliest:
            raise BadRequestError(
                f"the answer may have {likeliest:,} log-probs of likeliest tokens; up to {self.limits.likeliest:,} are "
                "given: ask for fewer of each token, or for fewer tokens or prompts",
                param="prompt_logprobs" if asked.prompt_logprobs else "top_logprobs" if chat else "logprobs",
            )
        if asked.guide is not None:  # compiled the first time
            await asyncio.to_thread(self.guides.grammar, *asked.guide)
        if asked.tiles is not None:
            self._tiles = [ref for ref in self._tiles if ref() is not None]
            held = sum(tiles.nbytes for ref in self._tiles if (tiles := ref()) is not None)
            if held + asked.tiles.nbytes > (most := self.limits.images):
                raise BadRequestError(
                    f"the images have {asked.tiles.nbytes} bytes as tiles, and those of others {held}, of {most} in "
                    "all; send fewer or smaller ones, or ask again later",
                    429 if asked.tiles.nbytes <= most else 400,
                    param="messages",
                )
            tiles = Decoded()
            tiles.nbytes = asked.tiles.nbytes  # counted from now on, while a thread makes them
            self._tiles.append(weakref.ref(tiles))
            await asyncio.to_thread(tiles.extend, asked.tiles)
            asked = dataclasses.replace(asked, tiles=None, pixels=tiles)
        return asked

    async def loaded(self, load: Callable[[str], Any], path: Any, field: str) -> Any:
        """The result of `load`, called by a thread with the folder that a request's `field` gives. Raises
        BadRequestError."""
        if not isinstance(path, str) or not path:
            raise BadRequestError(f"{field} is {path!r:.100}; it takes the path of a folder", param=field)
        try:
            return await asyncio.to_thread(load, path)
        except PatchError as error:
            raise BadRequestError(str(error), 409, "wrong_base", field) from None
        except ConfigError as error:
            raise BadRequestError(str(error), param=field) from None
        except Exception as error:  # files that are half written or broken
            raise BadRequestError(
                f"{field} is {path!r:.200}, which cannot be read ({type(error).__name__}: {error!s:.200}); write it "
                "anew, and ask again",
                param=field,
            ) from error

    async def health(self, request: Request) -> Response:
        """Answers with status 200 while requests are taken, else with 503 and why not."""
        if self.queue.failure is not None:
            return PlainTextResponse(f"failed: {type(self.queue.failure).__name__}", 503)
        return PlainTextResponse("draining", 503) if self.draining else PlainTextResponse("ok")

    async def prometheus(self, request: Request) -> Response:
        """Answers with the page of counts and durations that `metrics.py` keeps, as Prometheus reads it."""
        text = self.metrics.text(self.queue.counts, self.queue.size)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def unless_left(self, request: Request, work: Any) -> Any:
        """The result of a coroutine, which is cancelled when the client leaves. Raises ClientDisconnect then."""
        task, left = asyncio.ensure_future(work), asyncio.ensure_future(client_left(request.receive))
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


async def client_left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has closed the connection of the request, for what is then cancelled."""
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
