"""What tests of processes and faults share."""

import pytest

from tests.system.processes.conftest import STARTED


@pytest.fixture(autouse=True)
def none_left():
    """Kills what a test has started and, where it failed, not waited for: a run may be of 100,000 steps."""
    yield
    while STARTED:
        STARTED.pop().kill()
