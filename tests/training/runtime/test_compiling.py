"""The lines about compilation."""

import jax
import jax.numpy as jnp

from jaxrl_llm.training.runtime import compiling
from jaxrl_llm.training.runtime.compiling import CompileStatus


def test_what_is_compiled_is_shown(monkeypatch):
    shown, notes = [], []
    monkeypatch.setattr(compiling, "LONG", 0.0)

    def slowly(x):
        return jnp.sort(jnp.cos(x)) @ x

    with CompileStatus(shown.append, notes.append):
        jax.jit(slowly)(jnp.ones(7))
    jax.jit(lambda x: x + 1)(jnp.ones(9))
    assert "compiling slowly" in shown and shown[-1] == ""
    assert "compiling slowly ..." in notes
    assert [note.rpartition(" in ")[0] for note in notes if note.startswith("compiled")][-1] == "compiled slowly"
