import jax
import pytest


@pytest.fixture
def x64():
    """Runs the test in double precision, so that values can be compared to the last digits of an independent one."""
    with jax.enable_x64(True):
        yield
