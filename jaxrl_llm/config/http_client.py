"""HTTP requests with a limit on their whole time, and on the size of a reply."""

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from jaxrl_llm.config.background import EventLoop
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.secrets import masked


class Reply(NamedTuple):
    """A reply: its status and reason, its headers, and its bytes."""

    status: int
    reason: str
    headers: Mapping[str, str]
    data: bytes

    @property
    def ok(self) -> bool:
        """True for a status of success (2xx)."""
        return 200 <= self.status < 300


def json_headers(key: str | None) -> dict[str, str]:
    """The headers of a request with a JSON body, with the key where there is one."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def http_address(name: str, url: Any) -> SplitResult:
    """The parts of a url; raises ConfigError, with the `name` of the url, for one that requests cannot be sent to."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        address = urlsplit(url)
        # To read the port raises ValueError where it is no number up to 65535.
        has_host = re.fullmatch(r"\S+", address.hostname or "") and address.port != 0
        if has_host and address.scheme in ("http", "https"):
            return address
    raise ConfigError(
        f"{name} is {masked(url)!r}; it starts with http:// or https://, names a host and maybe a port, and ends in "
        "/v1: http://localhost:8000/v1"
    )


class RequestError(Exception):
    """A request without a reply: no connection, or no complete reply in time."""


class UnreachableError(RequestError):
    """No connection: nothing listens there, or the host is unknown."""


class LostError(RequestError):
    """A connection that broke before the reply was complete, as when the server ends."""


class TooLargeError(RequestError):
    """A reply that is larger than its reader takes."""


class HttpClient:
    """A client whose `get` and `post` may be called from any thread, `connections` at once.

    It does not follow redirects, for they would carry a key to another host. Requests run on an event loop, which can
    end them at any point: a socket's own timeout begins anew with each byte.
    """

    def __init__(self, connections: int):
        import httpx  # here, as it takes a quarter of the start of a worker that computes rewards and asks nobody

        self.loop, self.is_closed = EventLoop("requests"), False
        self.client = httpx.AsyncClient(
            timeout=None,
            # Idle connections are closed before common servers do it, after 5 seconds: no request meets a closed one.
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=3.0),
            verify=ssl.create_default_context(),  # the machine's certificates, a company's own among them
        )

    def get(self, url: str, headers: dict[str, str], seconds: float, largest: int) -> Reply:
        """The reply to a request without a body; limits and errors as those of `post`."""
        return self._reply("GET", url, None, headers, seconds, largest)

    def post(self, url: str, content: bytes, headers: dict[str, str], seconds: float, largest: int) -> Reply:
        """The reply to a request, in `seconds` from connecting to the last byte.

        Raises RequestError: UnreachableError without a connection, LostError for one that broke, TooLargeError for a
        reply of more than `largest` bytes.
        """
        return self._reply("POST", url, content, headers, seconds, largest)

    def _reply(
        self, method: str, url: str, content: bytes | None, headers: dict[str, str], seconds: float, largest: int
    ) -> Reply:
        import httpx

        if self.is_closed:
            raise RequestError("the client is closed")
        try:
            return self.loop.start(self._received(method, url, content, headers, seconds, largest)).result()
        except TimeoutError:
            raise RequestError(f"timed out: there was no complete reply within {seconds:g} seconds") from None
        except (httpx.RequestError, httpx.InvalidURL, OSError) as error:
            cause: BaseException = error
            while (earlier := cause.__cause__ or cause.__context__) is not None:
                cause = earlier
            number = getattr(cause, "errno", None)
            reason = os.strerror(number) if isinstance(number, int) else str(cause)
            broke = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
            kind = UnreachableError if isinstance(error, httpx.ConnectError) else LostError if broke else RequestError
            raise kind(f"{type(error).__name__}: {error}{'' if reason in str(error) else f' ({reason})'}") from error

    async def _received(
        self, method: str, url: str, content: bytes | None, headers: dict[str, str], seconds: float, largest: int
    ) -> Reply:
        async with (
            asyncio.timeout(seconds),
            self.client.stream(method, url, content=content, headers=headers) as response,
        ):
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > largest:
                    raise TooLargeError(f"the reply has more than {largest} bytes")
            return Reply(response.status_code, response.reason_phrase, response.headers, bytes(data))

    def close(self) -> None:
        """Cancel the requests that still run, close the connections, and end the thread."""
        self.is_closed = True
        self.loop.close(self.client.aclose)
