"""What a request queue decodes with: the parameters of the net, or of one of its adapters when its turn comes."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.models.adapters.lora import LoraConfig, combine
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.rollout.engine import Engine

Adapter = tuple[LoraConfig | None, Any]  # without a LoraConfig all weights of the net


class Weights:
    """Parameters in the form that decodes, of which there is room for one copy: those of `adapter`, "" for the net."""

    def __init__(self, engine: Engine, params: Any, mesh: Any, adapters: Mapping[str, Adapter] | None, adapts: bool):
        """`adapters` by the names that requests call them; with `adapts` there may be others later."""
        self.engine, self.mesh = engine, mesh
        self.adapters, self._adapts = dict(adapters or {}), adapts or bool(adapters)
        self.adapter = ""
        self.stale = False  # there is another adapter by its name: rows of that one wait until the grid is empty
        self.set(params)

    def on_mesh(self) -> Any:
        """The context in which arrays are on the mesh of the devices; none where there is no mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def set(self, params: Any) -> None:
        """Takes other parameters of the net, or none of them where it raises."""
        self.params: Any = self._merged(params)
        self._base = params if self._adapts else None  # adapters are merged into it when their turn comes
        self.released = False

    def release(self) -> None:
        """Lets the parameters go, so that their memory is free, until the next `set`."""
        self.released, self.params, self._base = True, None, None

    def turn_to(self, adapter: str) -> None:
        """Makes the parameters those of an adapter, merged into the net's, or of the net alone for the name ""."""
        self.adapter, self.params, self.stale = adapter, None, False
        self.params = self._merged(self._base)

    def add(self, name: str, adapter: Adapter) -> None:
        """Takes an adapter, or another one by the same name from its next turn on.

        Of all weights of the net a copy is kept, in the form that decodes.
        """
        config, params = adapter
        if config is None:
            with self.on_mesh():
                adapter = None, self.engine.decoding_params(self.engine.policy_copy(params))
        self.stale |= name in self.adapters and name == self.adapter
        self.adapters[name] = adapter

    def forget(self, name: str) -> None:
        """Lets an adapter go, and what decodes where that is of it, until somebody comes."""
        self.adapters.pop(name, None)
        if name == self.adapter:
            self.adapter, self.params = "", None

    def _merged(self, params: Any) -> Any:
        """The parameters that decode, made of those of the net."""
        with self.on_mesh():
            if not self.adapter:
                return self.engine.decoding_params(params)
            config, adapter = self.adapters[self.adapter]
            if config is None:
                return adapter
            return decoding_params(combine(params, adapter), self.engine.decoder.with_lora(config))
