"""The learner's half of a step: every minibatch of a batch, through the update, as often as the algorithm says."""

import functools
from dataclasses import replace
from typing import Any

import jax

from jaxrl_llm.algorithms.batch import Batch, minibatch_indices
from jaxrl_llm.config import rows_together
from jaxrl_llm.distributed.sharding import row_sharding
from jaxrl_llm.training.setup import Run
from jaxrl_llm.training.update import State


def improve(config, parts: Run, state: State, batch: Batch) -> tuple[State, list[Any]]:
    """The state after every minibatch of every iteration, one step further, and the metrics of each."""
    group = rows_together(config)
    seed = (config.seed, int(state.step)) if config.batch.shuffle else None
    updates, count = [], config.batch.minibatches
    indices = minibatch_indices(batch.rows, group, count, config.algorithm.num_iterations, seed)
    # All are laid out before the first update: the host does not wait for one to lay out the next.
    minibatches = [parts.pack(batch if count == 1 else _take(batch, index, parts.mesh)) for index in indices]
    for minibatch in minibatches:
        state, metrics = parts.update(state, minibatch, parts.frozen)
        updates.append(metrics)
    return replace(state, step=state.step + 1), updates


@functools.partial(jax.jit, static_argnames="mesh")
def _take(batch: Batch, index, mesh) -> Batch:
    sharding = row_sharding(mesh)
    return batch.map_rows(lambda x: jax.lax.with_sharding_constraint(x[index], sharding))
