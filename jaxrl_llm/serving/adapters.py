"""Endpoints by which adapters come and go, as vLLM has them: each is a model with a name of its own."""

import functools

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.translated import check_fields


async def _named(server: Server, request: Request, *others: str) -> tuple[str, dict]:
    """The `lora_name` of a request, and its body, whose fields may be `others` too; raises BadRequestError."""
    body = await server.body(request)
    check_fields(body, ("lora_name", *others), ())
    if server.load_adapter is None:
        raise BadRequestError("adapters stay as they are: start the server with --adapter_updates", 403, "unsupported")
    name = body.get("lora_name")
    if not isinstance(name, str) or not name or name == server.names[0]:
        raise BadRequestError(
            f"lora_name is {name!r:.100}; it takes a name for the adapter, not that of the model", param="lora_name"
        )
    return name, body


async def load(server: Server, request: Request) -> Response:
    """Reads the adapter of a PEFT folder; with `load_inplace` it takes the place of one by its name, whose rows under
    way end with the weights that they began with.

    Raises BadRequestError, which names the field.
    """
    name, body = await _named(server, request, "lora_path", "load_inplace")
    replaces = body.get("load_inplace") or False
    if not isinstance(replaces, bool):
        raise BadRequestError(f"load_inplace is {replaces!r:.100}; it takes true or false", param="load_inplace")
    async with server.loading:  # one at a time, in the order in which they were asked for
        if name in server.names and not replaces:
            raise BadRequestError(
                f"lora_name is {name!r:.100}, which is loaded; unload it, or send load_inplace=true", param="lora_name"
            )
        adapter = await server.loaded(server.load_adapter, body.get("lora_path"), "lora_path")  # type: ignore[arg-type]
        await server.queue.called(functools.partial(server.queue.set_adapter, name, adapter))
        server.names = tuple(dict.fromkeys((*server.names, name)))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(server: Server, request: Request) -> Response:
    """Forgets an adapter, unless rows of it wait or are under way, which is answered with status 409.

    Raises BadRequestError; 404 for a name that is no adapter's.
    """
    name, _ = await _named(server, request)
    async with server.loading:
        if name not in server.names:
            raise BadRequestError(f"there is no model {name!r:.100}", 404, "model_not_found", "lora_name")
        if not await server.queue.called(functools.partial(server.queue.forget_adapter, name)):
            raise BadRequestError(
                f"{name!r:.100} answers requests at the moment; ask again when they have ended", 409, param="lora_name"
            )
        server.names = tuple(other for other in server.names if other != name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


ADAPTER_ROUTES = (
    ("/v1/load_lora_adapter", "POST", load),
    ("/v1/unload_lora_adapter", "POST", unload),
)
