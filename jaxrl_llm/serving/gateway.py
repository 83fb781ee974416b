"""The endpoint of agents that are trained: a base URL for each session, whose calls are sampled and kept.

| path | |
|---|---|
| `/session/ID/v1/{chat/completions,responses,messages,completions}` | as in `endpoints.py`, sampled as the run is |
| `/session/ID/v1/messages/count_tokens` | the tokens of such a call |
| `/session/ID/v1/models` | the model's name |
| `/session/v1/chat/completions`, ... | the same for one client of many sessions: `model` names the session |
| `/session/ID/reward`, `/session/ID/v1/reward` | `{"reward": 1.0}`: see `Session.set_reward` |
| `/session/ID/v1/sub_agents` | `{"name": "searcher"}`: see `Session.open_sub_agent`; answers with its addresses |
"""

import asyncio
import dataclasses
import functools
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.data.images import ImageLimits
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.serving.answers import Answer, Translated, answered
from jaxrl_llm.serving.app import AT_ONCE, Limits, Server
from jaxrl_llm.serving.bodies import Asked
from jaxrl_llm.serving.choice import Choice, Piece
from jaxrl_llm.serving.connections import KEPT_ALIVE
from jaxrl_llm.serving.endpoints import models
from jaxrl_llm.serving.errors import BadRequestError, renamed
from jaxrl_llm.serving.messages import MessagesRequest, counted
from jaxrl_llm.serving.queue import RequestQueue
from jaxrl_llm.serving.responses import ResponsesRequest
from jaxrl_llm.serving.sessions import MODEL, OVER, Call, Session, SessionSpec

MANY = 2**20  # requests at once and rows that wait: as many as agents ask for
ANY_LENGTH = 2**31  # sessions bound their rows themselves
LARGEST = 2**28  # bytes of a request, which may have images


class Gateway:
    """Sessions over a queue of the process, on a free port of this machine."""

    def __init__(self, queue: RequestQueue, turns: TurnTokenizer, vocabulary: int, seconds: float, images: ImageLimits):
        """vocabulary: token ids are below it; seconds: for a whole answer; images: bounds of those of a call."""
        self.queue, self.turns, self.key = queue, turns, secrets.token_hex(16)
        self.images = dataclasses.replace(images, bytes=LARGEST)  # who sends them may have made other files of them
        self.sessions: dict[str, Session] = {}
        self.opened = 0
        self.lock = threading.Lock()  # between the agents' requests and the end of their sessions
        paths = (
            ("chat/completions", "POST", functools.partial(self.complete, chat=True)),
            ("responses", "POST", functools.partial(self.complete, chat=True, of=ResponsesRequest)),
            ("messages", "POST", functools.partial(self.complete, chat=True, of=MessagesRequest)),
            ("completions", "POST", functools.partial(self.complete, chat=False)),
            ("messages/count_tokens", "POST", self.count_tokens),
            ("models", "GET", models),
            ("reward", "POST", self.reward),
            ("sub_agents", "POST", self.open_sub_agent),
        )
        routes = [("/session/{id}/reward", "POST", self.reward)]
        routes += [(f"/session/{{id}}/v1/{path}", method, handler) for path, method, handler in paths]
        routes += [(f"/session/v1/{path}", method, handler) for path, method, handler in paths[:6]]
        limits = Limits(ANY_LENGTH, body=LARGEST, requests=MANY, rows=MANY, seconds=seconds)
        self.server = Server(queue, turns.tokenizer, [MODEL], turns.eos, vocabulary, limits, self.key, routes)
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = "http://{}:{}".format(*listener.getsockname())
        config = uvicorn.Config(
            self.server.app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=KEPT_ALIVE
        )
        self.web = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.web.run, kwargs={"sockets": [listener]}, daemon=True, name="agents' endpoint"
        )
        self.thread.start()
        while not self.web.started:
            if not self.thread.is_alive():
                raise RuntimeError(f"the endpoint of agents at {self.url} did not start; see the log above")
            time.sleep(0.005)

    def open(self, keys: Sequence[bytes], spec: SessionSpec) -> list[Session]:
        """Opens a session for each key, of which the random numbers of its rows are made."""
        self.opened += 1
        sessions = [Session(f"{self.opened}-{number}", key, spec, self.turns) for number, key in enumerate(keys)]
        self.sessions |= {session.name: session for session in sessions}
        return sessions

    def base_url(self, session: Session) -> str:
        """The address that clients of a session are given."""
        return f"{self.url}/session/{session.name}/v1"

    def end(self, session: Session, reason: str) -> None:
        """Take no more calls of a session and its sub-agents; those under way are cancelled."""
        with self.lock:
            handles = []
            for one in session.family():
                one.over = one.over or reason
                handles += one.handles
                self.sessions.pop(one.name, None)
            self.queue.cancel(handles)
        for handle in handles:
            handle.deliver(BadRequestError(f"the session is over: {reason}", 403, OVER))

    def close(self) -> None:
        """Ends the endpoint: connections are closed, and its thread is waited for, 10 s at most."""
        self.web.should_exit = self.web.force_exit = True
        self.thread.join(10)

    def _session(self, name: str) -> Session:
        if name not in self.sessions:
            raise BadRequestError(f"there is no session {name!r:.100}: it is over", 403, "session_over")
        return self.sessions[name]

    async def complete(
        self, server: Server, request: Request, chat: bool, of: Callable[..., Translated] | None = None
    ) -> Response:
        """The completions of a request, which its session keeps; `of` as in `endpoints.complete`."""
        body = await server.body(request)
        session = self._session(request.path_params.get("id", str(body.get("model"))))
        try:
            answer, other = await self._asked(server, request, session, body, chat, of)
        except BadRequestError as error:
            session.refused = str(error)
            raise
        return await answered(server, request, answer, other)

    async def _asked(
        self,
        server: Server,
        request: Request,
        session: Session,
        body: dict[str, Any],
        chat: bool,
        of: Callable[..., Translated] | None,
    ) -> "tuple[KeptAnswer, Translated | None]":
        """The answer that a call of a session begins, and the call in another API's form. Raises BadRequestError."""
        call, other = Call(session), None
        if of is not None:
            other = of(body, session.conversations, server.template)
            body = other.chat
        read = functools.partial(server.parse, body | {"model": MODEL}, chat, render=call.render, images=self.images)
        # Short ones in the order in which they came; a long text would have all other agents wait for its tokens.
        is_short = int(request.headers.get("content-length", LARGEST)) <= AT_ONCE
        with renamed({} if other is None else other.names):
            asked = read() if is_short else await asyncio.to_thread(read)
            if asked.guide is not None:  # compiled the first time, and one that cannot be is no call of the session
                await asyncio.to_thread(server.guides.grammar, *asked.guide)
            with self.lock:
                return KeptAnswer(server, call.bounded(asked), call, self.lock), other

    async def count_tokens(self, server: Server, request: Request) -> Response:
        """The tokens that the prompt of a call of Anthropic's Messages API would have; it is none of the session."""
        body = await server.body(request)
        session = self._session(request.path_params.get("id", str(body.get("model"))))
        read = functools.partial(server.parse, render=Call(session).render, images=self.images)
        found = await asyncio.to_thread(counted, body | {"model": MODEL}, server.template, read)
        return JSONResponse({"input_tokens": found})

    async def reward(self, server: Server, request: Request) -> Response:
        """Sets the reward of a session, or of one of its turns."""
        session, body = self._session(request.path_params["id"]), await server.body(request)
        with self.lock:
            session.set_reward(body)
        return JSONResponse({"success": True})

    async def open_sub_agent(self, server: Server, request: Request) -> Response:
        """Opens a sub-agent of a session: its name, and the addresses for its calls and its reward."""
        session, body = self._session(request.path_params["id"]), await server.body(request)
        with self.lock:
            sub_agent = session.open_sub_agent(body)
            self.sessions[sub_agent.name] = sub_agent
        url = self.base_url(sub_agent)
        return JSONResponse({"session": sub_agent.name, "base_url": url, "reward_url": f"{url}/reward"})


class KeptAnswer(Answer):
    """An answer that its session keeps when all of its choices have ended, before the client sees the end."""

    def __init__(self, server: Server, asked: Asked, call: Call, lock: threading.Lock):
        """`lock` is the gateway's, which is held where sessions end."""
        super().__init__(server, asked)
        self.call, self.lock = call, lock
        for choice in self.choices:  # the same in a run that is resumed, as some templates show them
            choice.call_ids = f"{asked.seed or 0:08x}{choice.index:08x}"
        self.handles = {choice.handle for choice in self.choices if choice.handle is not None}
        call.session.handles |= self.handles

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """The pieces of the answer; with the last one its session has it."""
        async for piece in super().pieces():
            with self.lock:
                if not self.going and self.call.session.over is None:
                    self.call.record(self.choices)
                    self._let_go()  # now, as a stream is closed after its client has seen the end and may ask again
            yield piece

    def close(self) -> None:
        """Cancels the rows that have not ended, and takes them from those of the session."""
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        """Takes no tokens of the session's any more, beside those that are recorded."""
        self.call.session.handles -= self.handles
