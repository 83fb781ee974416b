"""Sessions: who asks, and since when they are silent."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError


class Sessions:
    """The sessions of clients, by their ids."""

    def __init__(self):
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The session that a body names. Raises BadRequestError where there is none."""
        if (session := self.found.get(str(body.get("session_id")))) is None:
            raise BadRequestError(f"there is no session {body.get('session_id')!r:.100}: it ended, or this server "
                                  "started anew. Create a client, and load the newest weights", 404)  # fmt: skip
        return session

    def silent(self, session: str, seconds: float) -> bool:
        """True where a session has ended, or its client has said nothing for so long."""
        return self.found.get(session, {"seen": 0.0})["seen"] < time.time() - seconds

    def abandoned(self, seconds: float) -> "list[str]":
        """The sessions whose clients have said nothing for so long."""
        return [session for session in self.found if self.silent(session, seconds)]

    async def create(self, server: Server, request: Request) -> Response:
        """A new session."""
        body = await server.body(request)
        session = uuid.uuid4().hex
        self.found[session] = {"seen": time.time(), "user_metadata": body.get("user_metadata") or {},
                               "display_name": body.get("display_name")}  # fmt: skip
        return JSONResponse({"type": "create_session", "session_id": session})

    async def heartbeat(self, server: Server, request: Request) -> Response:
        """Takes note that the session's client lives."""
        self.of(await server.body(request))["seen"] = time.time()
        return JSONResponse({"type": "session_heartbeat"})

    async def list(self, server: Server, request: Request) -> Response:
        """The ids of all sessions."""
        return JSONResponse({"sessions": list(self.found)})
