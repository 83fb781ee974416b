"""Messages over the pipe between a run and its worker processes, which a function in a worker can spoil, but not block.

A message is the pipe's mark, its length in 8 bytes, and its bytes. What a function writes to the pipe itself lacks the
mark, and what it writes of a message is never waited for.
"""

import socket

MARK_BYTES = 16
LENGTH_BYTES = 8
LONGEST = 2**33  # bytes of a message


def is_ours(module_name: str) -> bool:
    """True for a module of Python's builtins or of this package, whose errors cross the pipe of a walled worker."""
    return module_name.partition(".")[0] in ("builtins", "jaxrl_llm")


class SpoiledError(Exception):
    """Bytes came through a pipe that are no message with its mark: something else writes to it."""


class Frames:
    """One end of a pipe of messages, each of which begins with `mark` and its length."""

    def __init__(self, pipe: socket.socket, mark: bytes):
        self.socket, self.mark = pipe, mark
        self.received = bytearray()

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError when nobody reads any more."""
        self.socket.sendall(self.mark + len(message).to_bytes(LENGTH_BYTES, "big"))
        self.socket.sendall(message)

    def receive(self) -> bytes:
        """Wait for a message; raises EOFError when the pipe is closed."""
        while True:
            if messages := self.read(1):
                return messages[0]

    def read(self, most: int | None = None) -> list[bytes]:
        """Wait for some bytes, and return the messages that are complete, at most `most`.

        Raises EOFError when the pipe is closed, SpoiledError for bytes that are no message.
        """
        messages = self._complete(most)
        if messages:
            return messages
        data = self.socket.recv(2**20)
        if not data:
            raise EOFError
        self.received += data
        return self._complete(most)

    def _complete(self, most: int | None) -> list[bytes]:
        messages, head = [], MARK_BYTES + LENGTH_BYTES
        while most is None or len(messages) < most:
            if self.received[:MARK_BYTES] != self.mark[: len(self.received)]:
                raise SpoiledError("something else than messages came through the pipe")
            length = int.from_bytes(self.received[MARK_BYTES:head], "big")
            if length > LONGEST:
                raise SpoiledError(f"a message of {length} bytes came through the pipe")
            if len(self.received) < head + length or len(self.received) < head:
                break
            messages.append(bytes(self.received[head : head + length]))
            del self.received[: head + length]
        return messages
