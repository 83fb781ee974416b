"""The results of requests, which clients fetch when they are there."""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.messages import PROTOBUF

WAIT = 25.0  # seconds that a client waits for a result until it must ask again; its own limit is 45
KEPT = 600.0  # seconds that a result is kept when it was fetched, in case the answer was lost on the way
FORGOTTEN = 3600.0  # seconds after which nobody comes for a result


class Failure(NamedTuple):
    """Why a request failed: by the client's own doing, "user", or not, "server"."""

    message: str
    category: str


async def settled(work: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a function, or the Failure that it ends in: an error would keep the arrays of all its frames."""
    try:
        return await work()
    except (BadRequestError, ConfigError) as error:
        return Failure(str(error), "user" if getattr(error, "status", 400) < 500 else "server")
    except ArithmeticError as error:
        return Failure(str(error), "server")
    except Exception as error:
        traceback.print_exc()
        return Failure(f"{type(error).__name__}: {error!s:.1000}", "server")


class Pending:
    """A result that is there or will be, and since when it waits to be fetched."""

    def __init__(self, future: "asyncio.Future[Any]"):
        self.future = future
        self.since: float | None = None  # it was there, and then since it was fetched
        self.fetched = False
        future.add_done_callback(self._is_there)

    def _is_there(self, future: "asyncio.Future[Any]") -> None:
        self.since = time.monotonic()


class Results:
    """Results by the ids of their requests: dictionaries, or answers in two forms (`messages.py`), or what failed."""

    def __init__(self):
        self._pending: dict[str, Pending] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def start(self, request_id: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Does what a request asks for, unless it came before."""
        if request_id not in self:
            self.add(request_id, asyncio.ensure_future(settled(work)))

    def add(self, request_id: str, future: "asyncio.Future[Any]") -> None:
        """Keeps what will be the result of a request, or its Failure."""
        self._pending[request_id] = Pending(future)

    async def retrieve(self, server: Server, request: Request) -> Response:
        """The result of a request or, when it is not there after a while, that the client is to ask again."""
        body = await server.body(request)
        self._forget()
        pending = self._pending.get(str(body.get("request_id")))
        if pending is None:
            return JSONResponse({"detail": f"there is no request {body.get('request_id')!r:.200}"}, 410)
        server.active -= 1  # who waits takes no other's place
        try:
            await asyncio.wait({pending.future}, timeout=WAIT)
        finally:
            server.active += 1
        if not pending.future.done():
            return JSONResponse({"type": "try_again", "request_id": body["request_id"], "queue_state": "active"}, 408)
        pending.since, pending.fetched = time.monotonic(), True
        result = Failure("the request was cancelled", "user") if pending.future.cancelled() else pending.future.result()
        if isinstance(result, Failure):
            return JSONResponse({"error": result.message, "category": result.category})
        if isinstance(result, dict):
            return JSONResponse(result)
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(result.protobuf), media_type=PROTOBUF)
        return JSONResponse(await asyncio.to_thread(result.json))

    def _forget(self) -> None:
        """Lets results go that were fetched, and those that nobody came for."""
        now = time.monotonic()
        for name, pending in list(self._pending.items()):
            if pending.since is not None and now - pending.since > (KEPT if pending.fetched else FORGOTTEN):
                del self._pending[name]

    async def cancel(self, server: Server, request: Request) -> Response:
        """Cancels the request whose id is in the body, for a client that waits no more; one that is done stays."""
        body = await server.body(request)
        pending = self._pending.get(str(body.get("request_id")))
        if pending is not None and isinstance(pending.future, asyncio.Task):
            pending.future.cancel()
        return JSONResponse({"status": "ok"})
