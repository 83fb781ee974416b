"""What the watchdog takes for a hang; that it ends a run with its stacks is in tests/system/faults."""

import time

import pytest

from jaxrl_llm.models.files.hf import replacing
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


@pytest.mark.parametrize("folder", ["hf", "hf_steps/00010"])
def test_a_model_whose_files_grow_may_take_longer(tmp_path, monkeypatch, folder):
    ended, watch, written = [], Stopwatch(), tmp_path / folder
    written.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(Watchdog, "_end", lambda self: ended.append(self._watch.phases[-1]))
    with Watchdog(0.2, watch, tmp_path), watch("export"):
        with replacing(written) as partial:
            for number in range(8):
                (partial / f"{number}.safetensors").write_bytes(bytes(10))
                time.sleep(0.05)
            assert not ended
            time.sleep(0.4)
        assert set(ended) == {"export"}
