"""The end of a run that was built."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl_llm.training.setup.run import Run


@pytest.mark.parametrize("failing", ["rewards", "environments"])
def test_both_are_closed_also_where_one_fails(failing):
    closed = []

    def part(name: str) -> Any:
        def close():
            closed.append(name)
            if name == failing:
                raise OSError(name)

        return SimpleNamespace(close=close)

    empty: Any = dict.fromkeys(Run._fields)
    with pytest.raises(OSError, match=failing):
        Run(**empty | {"rewards": part("rewards"), "environments": part("environments")}).close()
    assert closed == ["environments", "rewards"]
