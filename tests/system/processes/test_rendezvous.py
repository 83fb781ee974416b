"""Processes meet at the coordinator's address, or each gets the reason for a failure. Threads stand for processes."""

import socket
import threading
import time

import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.distributed.rendezvous import ProcessSpec, rendezvous
from tests.system.processes.conftest import free_port


def outcomes(specs, seconds=5.0, before=lambda port: None):
    """Code and error of `rendezvous` in each process, None where it returns; `before` runs once process 0 listens."""
    found = [None] * len(specs)

    def run(number, spec):
        try:
            rendezvous(spec, seconds)
        except ConfigError as error:
            found[number] = f"{error.code} {error}"

    threads = [threading.Thread(target=run, args=item) for item in enumerate(specs)]
    for thread in threads:
        thread.start()
        if thread is threads[0]:
            before(specs[0].address[1])
    for thread in threads:
        thread.join()
    return found


def specs(count, indices=None, counts=None):
    coordinator = f"localhost:{free_port()}"
    indices = range(count) if indices is None else indices
    counts = [count] * len(list(indices)) if counts is None else counts
    return [ProcessSpec(coordinator, each, index) for each, index in zip(counts, indices, strict=True)]


@pytest.mark.parametrize("count", [2, 5])
def test_all_meet(count):
    here = specs(count)
    assert outcomes(here) == [None] * count
    with socket.create_server(here[0].address):  # JAX takes the port next
        pass


def test_order_does_not_matter():
    here = specs(3)
    assert outcomes(here[::-1]) == [None] * 3


def test_missing_processes_are_named_to_all():
    found = outcomes(specs(4, indices=[0, 2]), seconds=0.5)
    assert found[0] == found[1] and found[0].startswith("1 ")  # a job manager starts all again
    assert "2 of 4 processes have met" in found[0] and "missing: 1, 3; there: 0 on " in found[0]
    assert "processes.rendezvous_seconds" in found[0]


def test_process_0_is_missing():
    (found,) = outcomes(specs(2, indices=[1]), seconds=0.5)
    assert found.startswith("1 process 1 of 2") and "Is process 0" in found
    assert "did not meet the others at localhost:" in found


def test_an_unknown_host():
    spec = ProcessSpec("no-such-host.invalid:1234", 2, 1)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid:1234 within 0\.3 s"):
        rendezvous(spec, 0.3)
    assert time.monotonic() - began < 20


def test_counts_that_differ():
    found = outcomes(specs(2, indices=[0, 1], counts=[2, 3]))
    assert found[0] == found[1] and found[0].startswith("2 ")
    assert "processes.count is 3 for process 1" in found[0] and "and 2 for process 0" in found[0]


def test_an_index_twice():
    found = outcomes(specs(3, indices=[0, 1, 1]))
    assert "two processes have processes.index 1" in found[0] and found[0] in (found[1], found[2])


def knock(port, *texts, seconds=0.0):
    """Connect once for each text, send it and end the connection after some time."""
    for text in texts:
        for _ in range(50):
            try:
                with socket.create_connection(("localhost", port), timeout=1) as stranger:
                    stranger.sendall(text)
                    time.sleep(seconds)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)


def test_strangers_on_the_port_are_ignored():
    texts = (b"GET / HTTP/1.1\r\n\r\n\n", b"[1]\n", b"")
    assert outcomes(specs(2), before=lambda port: knock(port, *texts)) == [None, None]


def test_a_process_that_ends_while_it_waits():
    """It may be started again; where it is not, it is missing."""
    greeting = b'{"index": 1, "count": 3, "host": "gone"}\n'
    assert outcomes(specs(3), before=lambda port: knock(port, greeting)) == [None] * 3
    assert outcomes(specs(3), before=lambda port: knock(port, greeting, seconds=0.2)) == [None] * 3
    found = outcomes(specs(3, indices=[0, 2]), seconds=0.5, before=lambda port: knock(port, greeting))
    assert found[0] == found[1] and "2 of 3 processes have met" in found[0] and "missing: 1;" in found[0]


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        spec = ProcessSpec(f"localhost:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(ConfigError, match="choose another port"):
            rendezvous(spec, 1)


@pytest.mark.parametrize("coordinator", ["localhost", ":80", "localhost:x", "localhost:0", "localhost:70000"])
def test_a_coordinator_that_is_no_address(coordinator):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        ProcessSpec(coordinator, 2, 0).checked()


def test_an_index_out_of_range():
    with pytest.raises(ConfigError, match=r"processes\.index is 2, but the 2 processes .* from 0 to 1"):
        ProcessSpec("localhost:80", 2, 2).checked()
    assert ProcessSpec("[::1]:80", 2, 1).checked().address == ("::1", 80)
