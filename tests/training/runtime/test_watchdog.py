"""What the watchdog takes for a hang; that it ends a run with its stacks is in tests/system/faults."""

import time

from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.runtime.watchdog import UPLOAD, Watchdog


def test_an_upload_may_take_longer_than_other_phases(tmp_path, monkeypatch):
    ended, watch = [], Stopwatch()
    monkeypatch.setattr(Watchdog, "_end", lambda self: ended.append(self._watch.phases[-1]))
    with Watchdog(0.1, watch, tmp_path), watch("checkpoint"):
        with watch(UPLOAD):
            time.sleep(0.3)
        assert not ended
        time.sleep(0.3)
    assert set(ended) == {"checkpoint"}
