"""Rendezvous of a run's processes at the coordinator's address, before JAX takes it over.

JAX ends a process that waits in vain without naming the missing ones. Here process 0 listens until all have connected,
and sends each of them the verdict.
"""

import contextlib
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, TransientError

RETRY = 0.2  # seconds between two tries to reach process 0
LINE = 1 << 16  # bytes of a message, at most


@dataclass(frozen=True)
class ProcessSpec:
    """Process `index` of `count`, which meet at `coordinator` (`host:port`, on process 0)."""

    coordinator: str
    count: int
    index: int

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the coordinator; an IPv6 address without its brackets."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def checked(self) -> "ProcessSpec":
        """The spec itself; raises ConfigError for an address or an index that is not valid."""
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"processes.coordinator is {self.coordinator!r}, but it takes HOST:PORT of process 0")
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"processes.index is {self.index}, but the {self.count} processes of processes.count are numbered from "
                f"0 to {self.count - 1}"
            )
        return self


def rendezvous(spec: ProcessSpec, seconds: float) -> None:
    """Returns when all processes have connected, in all of them.

    Raises ConfigError, the same in every process that connected: some are missing after `seconds` (TransientError), two
    have the same index, or their counts differ.
    """
    deadline = time.monotonic() + seconds
    if spec.index == 0:
        _listen(spec, seconds, deadline)
    else:
        _connect(spec, seconds, deadline)


def _listen(spec: ProcessSpec, seconds: float, deadline: float) -> None:
    here, verdict, kind = {0: _greeting(spec)}, "", ConfigError
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server(spec))
        connections: dict[int, socket.socket] = {}  # by index; -1 is of one that contradicts

        def forget_ended() -> None:
            for index in [index for index, connection in connections.items() if _is_closed(connection)]:
                del connections[index], here[index]  # it may be started again

        while not verdict:
            forget_ended()
            if len(here) == spec.count:
                break
            if (left := deadline - time.monotonic()) <= 0:
                verdict, kind = _missing(spec, here, seconds), TransientError
                break
            server.settimeout(left)
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                continue
            other = _read_line(connection, min(deadline, time.monotonic() + 5))
            if not isinstance(other, dict) or not isinstance(other.get("index"), int):
                continue  # something else that tried the port
            forget_ended()  # while this one was waited for
            verdict = _contradiction(spec, here, other)
            connections[-1 if verdict else other["index"]] = connection
            here.setdefault(other["index"], other)
        server.close()
        for connection in connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"verdict": verdict, "code": kind.code}).encode() + b"\n")
    if verdict:
        raise kind(verdict)


def _greeting(spec: ProcessSpec) -> dict[str, Any]:
    return {"index": spec.index, "count": spec.count, "host": socket.gethostname()}


def _server(spec: ProcessSpec) -> socket.socket:
    port = spec.address[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen on port {port} of processes.coordinator = {spec.coordinator}: {error}; choose "
            "another port, the same for all processes"
        ) from error


def _missing(spec: ProcessSpec, here: dict[int, dict[str, Any]], seconds: float) -> str:
    missing = [index for index in range(spec.count) if index not in here]
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    present = ", ".join(f"{index} on {here[index]['host']}" for index in sorted(here)[:16])
    return (
        f"after {seconds:g} s (processes.rendezvous_seconds) {len(here)} of {spec.count} processes have met at "
        f"{spec.coordinator}; missing: {shown}; there: {present}. Look at the logs of those that are missing, and "
        "whether their machines reach that address"
    )


def _contradiction(spec: ProcessSpec, here: dict[int, dict[str, Any]], other: dict[str, Any]) -> str:
    index, count, host = other["index"], other.get("count"), other.get("host")
    if count != spec.count:
        return (
            f"processes.count is {count} for process {index} ({host}) and {spec.count} for process 0 "
            f"({here[0]['host']}); give all the same"
        )
    if index in here:
        return f"two processes have processes.index {index}, on {here[index]['host']} and {host}; number them from 0"
    return ""


def _connect(spec: ProcessSpec, seconds: float, deadline: float) -> None:
    reason: Any = "no time was left"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(spec.address, timeout=5) as host:
                host.sendall(json.dumps(_greeting(spec)).encode() + b"\n")
                answer = _read_line(host, deadline + 5)  # process 0 may have started to wait later
        except OSError as error:
            reason = error
            time.sleep(RETRY)
            continue
        if not isinstance(answer, dict):
            reason = "it ended the connection"
            time.sleep(RETRY)
            continue
        if answer["verdict"]:
            raise (ConfigError if answer["code"] == ConfigError.code else TransientError)(answer["verdict"])
        return
    raise TransientError(
        f"process {spec.index} of {spec.count} ({socket.gethostname()}) did not meet the others at "
        f"{spec.coordinator} within {seconds:g} s (processes.rendezvous_seconds): {reason}. Is process 0 running, "
        "on that host, and does the network let this port through?"
    )


def _is_closed(connection: socket.socket) -> bool:
    """True once the other side has ended a connection, on which it sends nothing more before the verdict."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _read_line(connection: socket.socket, deadline: float) -> Any:
    """The next JSON line, or None when none comes in time or the text is no JSON."""
    text = b""
    while not text.endswith(b"\n") and len(text) < LINE:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            received = connection.recv(4096)
        except OSError:
            return None
        if not received:
            return None
        text += received
    try:
        return json.loads(text)
    except ValueError:
        return None
