"""The model that training runs adapt."""

import pytest

import jaxrl_llm


@pytest.fixture(scope="session")
def sorter():
    """The embedded model."""
    return jaxrl_llm.load_model("embedded:sort")
