"""Sampling on another arrangement of the devices than training: `EngineOnMesh`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import row_sharding, row_shards, shardings
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import Engine, Rollout
from jaxrl_llm.rollout.multi_turn import TurnServer
from jaxrl_llm.rollout.streaming import Listener


@dataclasses.dataclass(frozen=True)
class EngineOnMesh(Engine):
    """An engine that samples on `mesh`; parameters and prompts come from `home`, and the rollout goes back there.

    Both meshes have the same devices in the same order, so that one compiled program moves the parameters, in the type
    they are computed in: no array passes through the host. `watch("reshard")` times it.
    """

    mesh: Mesh = dataclasses.field(kw_only=True)
    home: Mesh = dataclasses.field(kw_only=True)
    watch: Callable[[str], Any] = dataclasses.field(default=contextlib.nullcontext, kw_only=True, compare=False)

    def decoding_params(self, params: Params) -> Params:
        """What the decoder computes with, cut over `mesh`."""
        with jax.set_mesh(self.home), self.watch("reshard"):
            places = shardings(jax.eval_shape(super().decoding_params, params), self.mesh)
            return jax.block_until_ready(_placing(_decoded, places, engine=self)(params))

    def generate(
        self, params: Params, prompts, segments, key, first_row: int = 0, turn_server: TurnServer | None = None,
        limits=None, listener: Listener | None = None,
    ) -> Rollout:  # fmt: skip
        """As `Engine.generate`; what comes in and goes out is cut over `home`.

        Prompts that do not divide into the row parts of `mesh` are filled up. A turn server answers rows of its
        own process: with one, raises ConfigError where they are others on `mesh`. Where they are, the listener is not
        called.
        """
        count, rows = len(prompts), len(prompts) * self.group_size
        missing = -count % row_shards(self.mesh)
        alike = not missing and _rows_of_processes(self.mesh, count) == _rows_of_processes(self.home, count)
        if turn_server is not None and not alike:
            raise ConfigError(
                f"{count} prompts lie otherwise on the mesh that samples ({row_shards(self.mesh)} row parts, "
                f"{missing} prompts short) than on that of training ({row_shards(self.home)}), and environments are "
                "those of its rows; change batch.prompts, mesh or rollout.mesh"
            )
        if missing:
            limits = np.full(rows, self.max_completion_length) if limits is None else limits
            limits = np.pad(np.asarray(limits), (0, missing * self.group_size), constant_values=1)
        prompts, segments = _placing(_filled, row_sharding(self.mesh), missing=missing)((prompts, segments))
        key = _placing(_same, NamedSharding(self.mesh, PartitionSpec()))(key)
        with jax.set_mesh(self.mesh):
            told = _first_rows(listener, rows) if alike or jax.process_count() == 1 else None
            rollout = super().generate(params, prompts, segments, key, first_row, turn_server, limits, told)
        return _placing(_cut, row_sharding(self.home), rows=rows)(rollout)


def _rows_of_processes(mesh: Mesh, rows: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for device, (part, *_) in row_sharding(mesh).devices_indices_map((rows,)).items():
        found.setdefault(device.process_index, set()).update(range(*part.indices(rows)))
    return found


def _first_rows(listener: Listener | None, rows: int) -> Listener | None:
    """The listener, told of the first rows only."""
    if listener is None:
        return None
    return lambda row, tokens: listener(row, tokens) if row < rows else None


def _placing(function, places, **options):
    """The compiled `function(arrays, **options)` whose results are at these places."""
    leaves, structure = jax.tree.flatten(places)
    return _compiled(function, structure, tuple(leaves), tuple(options.items()))


@functools.lru_cache(maxsize=32)
def _compiled(function, structure, places: tuple, options: tuple):
    return jax.jit(functools.partial(function, **dict(options)), out_shardings=jax.tree.unflatten(structure, places))


def _decoded(params: Params, engine: Engine) -> Params:
    return Engine.decoding_params(engine, params)


def _same(arrays):
    return arrays


def _filled(arrays, missing: int):
    """The arrays `[B,P]` with their last row repeated `missing` times."""
    if not missing:
        return arrays
    # Whole everywhere first: the partitioner has no better way to a row more or less, and warns about it.
    arrays = jax.lax.with_sharding_constraint(arrays, PartitionSpec())
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)]), arrays)


def _cut(rollout: Rollout, rows: int) -> Rollout:
    """The first rows, which share the steps of all."""
    steps = rollout.steps * (len(rollout.steps) / rows)
    return jax.tree.map(lambda x: x[:rows], rollout._replace(steps=steps))
