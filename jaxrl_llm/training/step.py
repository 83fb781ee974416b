"""Step 6, the learner's update: every minibatch of a batch, as often as the algorithm says."""

import functools
from dataclasses import replace

import jax

from jaxrl_llm.algorithms.batch import Batch, minibatch_indices
from jaxrl_llm.algorithms.losses import Metrics
from jaxrl_llm.models.flops import row_flops
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.microbatch import rows_at
from jaxrl_llm.training.setup.run import Run
from jaxrl_llm.training.update import State


def improve(run: Run, state: State, batch: Batch) -> tuple[State, list[Metrics]]:
    """The state after every minibatch of every iteration, one step further, and the metrics of each update."""
    spec, seed = run.batch, (run.batch.seed, int(state.step)) if run.batch.shuffle else None
    update, critic, of_critic, of_both = run.update, run.critic_alone, [], []
    if critic is not None:
        own_seed = None if seed is None else (*seed, 1)
        for minibatch in minibatches_of(run, batch, own_seed, critic.minibatches, critic.passes):
            state, metrics = critic.update(state, minibatch, run.frozen)
            of_critic.append(metrics)
        if int(state.step) < critic.warmup_steps:
            update = None if critic.apart else critic.update
    if update is not None:
        # All are laid out before the first update: the host does not wait for one to lay out the next.
        for minibatch in minibatches_of(run, batch, seed, spec.minibatches, spec.num_iterations):
            state, metrics = update(state, minibatch, run.frozen)
            of_both.append(metrics)
    # The metrics of a critic are those of the passes that both make, where they make some together.
    logged = of_critic + of_both if critic is not None and critic.apart else of_both
    return replace(state, step=state.step + 1), logged


def update_flops(run: Run, step: int, batch: Batch) -> jax.Array:
    """The model FLOPs `[]` of what `improve` makes of a batch after `step` steps, of policy and critic together."""
    alone, together = run.critic_alone, run.batch.num_iterations
    of_policy = together if alone is None or step >= alone.warmup_steps else 0
    total = of_policy * _pass_flops(run.model.net, batch.inputs.segments, run.pack.positions.alternate)
    if run.critic is not None and not run.config.critic.shared:
        passes = together if alone is None else alone.passes + (0 if alone.apart else together)
        total += passes * _pass_flops(run.critic.net, batch.inputs.segments, False)
    return total


@functools.partial(jax.jit, static_argnames=("net", "alternate"))
def _pass_flops(net: Net, segments, alternate: bool) -> jax.Array:
    """The FLOPs of a pass over rows, forward and backward; where they `alternate`, every other one is only read."""
    forward, backward = row_flops(net, segments)
    return forward.sum() + (backward[::2] if alternate else backward).sum()


def minibatches_of(run: Run, batch: Batch, seed: tuple[int, ...] | None, count: int, passes: int) -> list[Batch]:
    """The minibatches, `count` in each of so many passes over a batch, packed and in the order of their updates.

    The order is drawn from `seed` unless it is None.
    """
    indices = minibatch_indices(batch.rows, run.batch.group_size, count, passes, seed)
    pack = run.pack.of_rows(batch.rows // count)
    return [pack(batch if count == 1 else _take(batch, index, run.batch.group_size, run.mesh)) for index in indices]


_take = jax.jit(rows_at, static_argnames=("run", "mesh"))
