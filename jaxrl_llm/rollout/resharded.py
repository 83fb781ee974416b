"""Sampling on another mesh of the same devices than training: `ReshardedEngine`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import on_device, row_sharding, row_shards, shardings
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.models.net import Params
from jaxrl_llm.rollout.borders import Border, OnBorder
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.multi_turn import TurnServer
from jaxrl_llm.rollout.slots import Begun, Rollout
from jaxrl_llm.rollout.streaming import OnFinished


@dataclasses.dataclass(frozen=True)
class ReshardedEngine(Engine):
    """An engine that samples on `mesh`; parameters and prompts come from `train_mesh`, and the rollout goes back there.

    Both meshes have the same devices in the same order, so that one compiled program moves the parameters, in the type
    they are computed in: no array passes through the host. `watch("reshard")` times it.
    """

    mesh: Mesh = dataclasses.field(kw_only=True)
    train_mesh: Mesh = dataclasses.field(kw_only=True)
    watch: Callable[[str], Any] = dataclasses.field(default=contextlib.nullcontext, kw_only=True, compare=False)

    def decoding_params(self, params: Params) -> Params:
        """The parameters that the decoder computes with, sharded over `mesh`."""
        with jax.set_mesh(self.train_mesh), self.watch("reshard"):
            params = on_device(params)
            shapes = jax.eval_shape(functools.partial(decoding_params, decoder=self.decoder), params)
            targets = shardings(shapes, self.mesh)
            return jax.block_until_ready(_resharding(decoding_params, targets, decoder=self.decoder)(params))

    def generate(
        self,
        params: Params,
        prompts,
        segments,
        key,
        first_row: int = 0,
        turn_server: TurnServer | None = None,
        limits=None,
        on_finished: OnFinished | None = None,
        images: Images | None = None,
        begun: Begun | None = None,
        on_border: OnBorder | None = None,
    ) -> Rollout:
        """As `Engine.generate`; arguments and the rollout are sharded over `train_mesh`.

        Prompts that do not divide into the row shards of `mesh` are filled up. A turn server answers rows of its own
        process: with one, raises ConfigError where they are others on `mesh`. Where they are, `on_finished` is not
        called.
        """
        count, rows = len(prompts), len(prompts) * self.group_size
        missing = -count % row_shards(self.mesh)
        same_rows = not missing and _rows_of_processes(self.mesh, count) == _rows_of_processes(self.train_mesh, count)
        if turn_server is not None and not same_rows:
            raise ConfigError(
                f"{count} prompts lie otherwise on the mesh that samples ({row_shards(self.mesh)} row shards, "
                f"{missing} prompts short) than on that of training ({row_shards(self.train_mesh)}), and environments "
                "are those of its rows; change batch.prompts, mesh or rollout.mesh"
            )
        if missing:
            limits = np.full(rows, self.max_completion_length) if limits is None else limits
            limits = np.pad(np.asarray(limits), (0, missing * self.group_size), constant_values=1)
            begun = None if begun is None else begun.padded(missing * self.group_size)
        filled = _resharding(_filled, row_sharding(self.mesh), missing=missing)
        prompts, segments = filled((prompts, segments))
        images = None if images is None else filled(images)
        key = _resharding(_filled, NamedSharding(self.mesh, PartitionSpec()), missing=0)(key)
        calls_back = on_finished is not None and (same_rows or jax.process_count() == 1)

        def on_wanted(row: int, tokens: list[int]) -> None:
            if on_finished is not None and row < rows:  # not the rows that fill up
                on_finished(row, tokens)

        def without_filled(lengths: np.ndarray, finished: np.ndarray) -> Border:
            assert on_border is not None
            return on_border(lengths[:rows], finished[:rows])

        with jax.set_mesh(self.mesh):
            rollout = super().generate(
                params, prompts, segments, key, first_row, turn_server, limits, on_wanted if calls_back else None,
                images, begun, None if on_border is None else without_filled,
            )  # fmt: skip
        return _resharding(_first_rows, row_sharding(self.train_mesh), rows=rows)(rollout)


def _rows_of_processes(mesh: Mesh, rows: int) -> dict[int, set[int]]:
    """The rows of each process on the mesh."""
    found: dict[int, set[int]] = {}
    for device, (rows_slice, *_) in row_sharding(mesh).devices_indices_map((rows,)).items():
        found.setdefault(device.process_index, set()).update(range(*rows_slice.indices(rows)))
    return found


def _resharding(function, targets, **options):
    """The compiled `function(arrays, **options)` whose results have the shardings `targets`."""
    leaves, structure = jax.tree.flatten(targets)
    return _compiled(function, structure, tuple(leaves), tuple(options.items()))


@functools.lru_cache(maxsize=32)
def _compiled(function, structure, targets: tuple, options: tuple):
    # Kept here: a new jit object for each step, of a new partial, would compile each step.
    return jax.jit(functools.partial(function, **dict(options)), out_shardings=jax.tree.unflatten(structure, targets))


def _filled(arrays, missing: int):
    """The arrays `[B,P]` with their last row repeated `missing` times."""
    if not missing:
        return arrays
    # Replicated first: the partitioner has no better way to a row more or less, and warns about it.
    arrays = jax.lax.with_sharding_constraint(arrays, PartitionSpec())
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)]), arrays)


def _first_rows(rollout: Rollout, rows: int) -> Rollout:
    """The first rows, which share the steps of all."""
    steps = rollout.steps * (len(rollout.steps) / rows)
    return jax.tree.map(lambda x: x[:rows], rollout._replace(steps=steps))
