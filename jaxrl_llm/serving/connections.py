"""Connections of strangers: how many there may be, and for how long one may send no request and read no answer."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Seconds of a connection between two requests. Clients keep theirs for 5 to 90: one that the server ends first, as a
# request is sent on it, fails that request.
KEPT_ALIVE = 120
OTHER_FILES = 128  # that the process may have open beside its connections


class Connection(H11Protocol):
    """A connection that ends when it is in no request for `seconds`, or twice that, and its client reads nothing.

    So it goes with half a request's head, with a body that has no end behind its answer, and with an answer that nobody
    reads. While a request is answered its own limits hold (`app.Limits`), and behind an answer that was read uvicorn's
    `timeout_keep_alive`. Beyond `most` connections a new one is refused with status 503.
    """

    seconds = 10.0
    most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES, 16)

    def connection_made(self, transport: Any) -> None:
        """Watch a new connection, or refuse it where there are `most` already."""
        super().connection_made(transport)
        self._watch: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            transport.write(REFUSED)
            transport.close()
        else:
            self._look(None, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching a connection that has ended."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def _look(self, before: Any, unread: int | None) -> None:
        """Looks again in `seconds`; `before` is the cycle that had ended at the last look, `unread` its bytes."""
        left = self.transport.get_write_buffer_size()
        kept_alive = self.timeout_keep_alive_task is not None and not left
        waits = self.cycle is None or (self.cycle.response_complete and not kept_alive)
        if waits and unread is not None and self.cycle is before and left >= unread:
            self.transport.abort()
            return
        self._watch = self.loop.call_later(self.seconds, self._look, self.cycle, left if waits else None)
