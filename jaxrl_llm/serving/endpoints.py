"""The endpoints of a server: OpenAI's chats, responses, completions and models, and Anthropic's messages."""

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.answers import Answer, Translated, answered
from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError, renamed
from jaxrl_llm.serving.messages import MessagesRequest, counted
from jaxrl_llm.serving.responses import ResponsesRequest


async def complete(
    server: Server, request: Request, chat: bool, of: Callable[..., Translated] | None = None
) -> Response:
    """The completions of a request, at once or as a stream of events; `of` reads those of another API as chats."""
    body = await server.body(request)
    other = None if of is None else of(body, server.conversations, server.template)
    with renamed({} if other is None else other.names):
        asked = await server.asked(body if other is None else other.chat, chat)
        answer = Answer(server, asked)
    return await answered(server, request, answer, other)


async def count_tokens(server: Server, request: Request) -> Response:
    """The tokens of a request of Anthropic's Messages API, also of one too long for the model's rows."""
    body = await server.body(request)
    read = functools.partial(server.parse, longest=server.limits.body)
    return JSONResponse({"input_tokens": await asyncio.to_thread(counted, body, server.template, read)})


def _described(server: Server, name: str) -> dict[str, Any]:
    """A model as OpenAI's servers describe it, vLLM's, and Anthropic's."""
    return {
        "id": name, "object": "model", "created": server.created, "owned_by": "jaxrl_llm",
        "root": name, "parent": server.names[0] if name in server.queue.adapters else None,
        "max_model_len": server.limits.tokens,
        "type": "model", "display_name": name, "max_input_tokens": server.limits.tokens,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(server.created)),
    }  # fmt: skip


async def models(server: Server, request: Request) -> Response:
    """GET /v1/models: the model, and each adapter by its name."""
    return JSONResponse({"object": "list", "data": [_described(server, name) for name in server.names]})


async def model(server: Server, request: Request) -> Response:
    """GET /v1/models/NAME: the model, or the adapter, of that name; 404 where there is none."""
    name = request.path_params["name"]
    if name not in server.names:
        raise BadRequestError(f"there is no model {name!r:.100}", 404, "model_not_found", "model")
    return JSONResponse(_described(server, name))


ENDPOINTS = (
    ("/v1/chat/completions", "POST", functools.partial(complete, chat=True)),
    ("/v1/completions", "POST", functools.partial(complete, chat=False)),
    ("/v1/responses", "POST", functools.partial(complete, chat=True, of=ResponsesRequest)),
    ("/v1/messages", "POST", functools.partial(complete, chat=True, of=MessagesRequest)),
    ("/v1/messages/count_tokens", "POST", count_tokens),
    ("/v1/models", "GET", models),
    ("/v1/models/{name:path}", "GET", model),
)
