"""The error that a request is answered with, and what is known of others."""

import contextlib
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, TypeVar

import jax

Piece = TypeVar("Piece")
# The types of errors that Anthropic's servers name otherwise than OpenAI's, by status.
OF_ANTHROPIC = {
    403: "permission_error", 408: "timeout_error", 413: "request_too_large", 500: "api_error", 501: "api_error",
    503: "overloaded_error",
}  # fmt: skip


class BadRequestError(Exception):
    """A request that is refused, with the HTTP status, and OpenAI's code and parameter."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self, path: str = "") -> dict[str, Any]:
        """The error as OpenAI's servers write it, or at a `path` of Anthropic's Messages API with what theirs write."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        told: dict[str, Any] = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        if "/v1/messages" not in path:
            return {"error": told}
        return {"type": "error", "error": told | {"type": OF_ANTHROPIC.get(self.status, told["type"])}}


FAILED = BadRequestError("the server failed on this request", 500)


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Make refusals name the fields that a client sent, where others were made of them: `names` are theirs by these."""
    try:
        yield
    except BadRequestError as error:
        param, told = error.param or "", str(error)
        if param not in names:
            raise
        own = names[param]
        told = own + told.removeprefix(param) if told.startswith(param) else told
        raise BadRequestError(told, error.status, error.code, own) from None


async def with_failure(pieces: AsyncIterator[Piece]) -> AsyncGenerator[Piece | BadRequestError, None]:
    """The pieces of a stream as they come, and last the refusal of one that fails: FAILED, with a traceback here, where
    it is no other."""
    try:
        async for piece in pieces:
            yield piece
    except BadRequestError as error:
        yield error
    except Exception:
        traceback.print_exc()
        yield FAILED


def lacks_memory(error: BaseException) -> bool:
    """True for the error of a device, or of this machine, that has no memory left."""
    out = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return out or isinstance(error, MemoryError)
