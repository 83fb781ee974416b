"""The results of requests, which clients fetch when they are there."""

import asyncio
import dataclasses
import time
import traceback
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.messages import PROTOBUF

WAIT = 25.0  # seconds that a client waits for a result until it must ask again; its own limit is 45
KEPT = 600.0  # seconds that a result is kept when it was fetched, in case the answer was lost on the way
FORGOTTEN = 3600.0  # seconds after which nobody comes for a result


@dataclasses.dataclass(eq=False)
class Pending:
    """A result, or what will be one."""

    future: "asyncio.Future[Any]"
    made: float = dataclasses.field(default_factory=time.monotonic)
    fetched: float | None = None


class Results:
    """Results by the ids of their requests: dictionaries, or answers in two forms (`messages.py`), or what failed."""

    def __init__(self):
        self._pending: dict[str, Pending] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def add(self, request_id: str, future: "asyncio.Future[Any]") -> None:
        """Keeps what will be the result of a request."""
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
        pending.fetched = time.monotonic()
        if pending.future.cancelled():
            return failure("the request was cancelled", "user")
        error = pending.future.exception()
        if isinstance(error, BadRequestError | ConfigError):
            return failure(str(error), "user" if getattr(error, "status", 400) < 500 else "server")
        if error is not None:
            if not isinstance(error, ArithmeticError):
                traceback.print_exception(error)
            return failure(f"{type(error).__name__}: {error!s:.1000}", "server")
        result = pending.future.result()
        if isinstance(result, dict):
            return JSONResponse(result)
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(result.protobuf), media_type=PROTOBUF)
        return JSONResponse(await asyncio.to_thread(result.json))

    def _forget(self) -> None:
        """Lets results go that were fetched, and those that nobody came for."""
        now = time.monotonic()
        for name, pending in list(self._pending.items()):
            over = now - pending.fetched > KEPT if pending.fetched is not None else now - pending.made > FORGOTTEN
            if over and pending.future.done():
                del self._pending[name]

    async def cancel(self, server: Server, request: Request) -> Response:
        """Ends a sample that nobody waits for."""
        body = await server.body(request)
        pending = self._pending.get(str(body.get("request_id")))
        if pending is not None and isinstance(pending.future, asyncio.Task):
            pending.future.cancel()
        return JSONResponse({"status": "ok"})


def failure(message: str, category: str) -> Response:
    """The result of a request that failed."""
    return JSONResponse({"error": message, "category": category})
