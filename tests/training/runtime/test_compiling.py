"""The lines about compilation."""

import threading
import time

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.host_memory import return_memory
from jaxrl_llm.serving.queue import THREAD
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.runtime import compiling
from jaxrl_llm.training.runtime.compiling import CompileStatus


def test_what_is_compiled_is_shown(monkeypatch):
    shown, notes, returned = [], [], []
    monkeypatch.setattr(compiling, "LONG", 0.0)
    monkeypatch.setattr(compiling, "HEAVY", 0.0)
    monkeypatch.setattr(compiling, "return_memory", lambda: returned.append(return_memory()))

    def slowly(x):
        return jnp.sort(jnp.cos(x)) @ x

    watch = Stopwatch()
    with CompileStatus(lambda text, began: shown.append((text, began)), notes.append, watch), watch("update"):
        jax.jit(slowly)(jnp.ones(7))
    assert returned  # what the compiler needed
    jax.jit(lambda x: x + 1)(jnp.ones(9))
    texts, began = zip(*shown, strict=True)
    assert "compiling slowly" in texts and texts[-1] == ""
    assert all(0 < time.monotonic() - moment < 60 for moment in began)
    assert "compiling slowly ..." in notes
    assert [note.rpartition(" in ")[0] for note in notes if note.startswith("compiled")][-1] == "compiled slowly"


def test_the_time_to_compile_is_a_phase_of_its_own():
    """Functions that are traced within another one count once, and what another thread compiles does not."""

    @jax.jit
    def inner(x):
        time.sleep(0.05)  # while it is traced
        return jnp.cumsum(jnp.tanh(x))

    def outer(x):
        return inner(x) @ inner(2 * x)

    watch = Stopwatch()
    with CompileStatus(lambda text, began: None, lambda text: None, watch):
        began = time.perf_counter()
        with watch("update"):
            jax.jit(outer)(jnp.ones(11)).block_until_ready()
        took = time.perf_counter() - began
        before = watch.totals["compile"]
        assert 0.05 <= before <= took
        assert watch.totals["update"] + before <= took * 1.001
        with watch("update"):
            jax.jit(outer)(jnp.ones(11)).block_until_ready()  # compiled already
        thread = threading.Thread(target=lambda: jax.jit(lambda x: jnp.sort(x))(jnp.ones(13)))
        thread.start()
        thread.join()
        assert watch.totals["compile"] == before


def test_a_rollout_that_agents_wait_for_is_not_charged_for_what_is_compiled():
    """A first step with agents said that it had sampled for minutes, which its endpoint had spent compiling."""

    def compile_on(name: str) -> None:
        thread = threading.Thread(target=lambda: jax.jit(lambda x: jnp.sort(jnp.sin(x)))(jnp.ones(17)), name=name)
        thread.start()
        thread.join()

    watch = Stopwatch()
    with CompileStatus(lambda text, began: None, lambda text: None, watch):
        began = time.perf_counter()
        with watch("update"):
            compile_on(THREAD)
        assert watch.totals["compile"] == 0
        with watch("rollout"):
            compile_on(THREAD)
        assert watch.totals["compile"] > 0
        assert watch.totals["compile"] + watch.totals["rollout"] <= time.perf_counter() - began
