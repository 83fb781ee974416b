"""Step 6, the learner's update: every minibatch of a batch, as often as the algorithm says."""

import functools
from dataclasses import replace

import jax

from jaxrl_llm.algorithms.batch import Batch, minibatch_indices
from jaxrl_llm.algorithms.losses import Metrics
from jaxrl_llm.distributed.sharding import row_sharding
from jaxrl_llm.training.setup.run import Run
from jaxrl_llm.training.update import State


def improve(run: Run, state: State, batch: Batch) -> tuple[State, list[Metrics]]:
    """The state after every minibatch of every iteration, one step further, and the metrics of each update."""
    seed = (run.batch.seed, int(state.step)) if run.batch.shuffle else None
    update, updates = run.update, []
    if run.warm_up is not None and int(state.step) < run.warmup_steps:
        update = run.warm_up
    if run.warm_up is not None and run.critic_passes:  # the metrics logged are those of the passes that both make
        own_seed = None if seed is None else (*seed, 1)
        for minibatch in minibatches_of(run, batch, own_seed, run.critic_passes):
            state, _ = run.warm_up(state, minibatch, run.frozen)
    # All are laid out before the first update: the host does not wait for one to lay out the next.
    for minibatch in minibatches_of(run, batch, seed):
        state, metrics = update(state, minibatch, run.frozen)
        updates.append(metrics)
    return replace(state, step=state.step + 1), updates


def minibatches_of(run: Run, batch: Batch, seed: tuple[int, ...] | None, passes: int = 0) -> list[Batch]:
    """The minibatches of a batch, packed, in the order of the updates, which is drawn from `seed` unless None.

    `passes` over the batch, 0 for those of the policy.
    """
    spec = run.batch
    indices = minibatch_indices(batch.rows, spec.group_size, spec.minibatches, passes or spec.num_iterations, seed)
    return [run.pack(batch if spec.minibatches == 1 else _take(batch, index, run.mesh)) for index in indices]


@functools.partial(jax.jit, static_argnames="mesh")
def _take(batch: Batch, index, mesh) -> Batch:
    sharding = row_sharding(mesh)
    return batch.map_rows(lambda x: jax.lax.with_sharding_constraint(x[index], sharding))
