"""Replay of informative groups: they take the place of groups that teach nothing, as all have the same reward."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain, constrain_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """The newest groups that teach something, newest first; replicated over the devices."""

    rows: Batch  # [groups * K,...] rows of a group adjacent
    priority: jax.Array  # [groups] weight of a group when one is drawn, 0 where the buffer is still empty


def empty_replay(
    groups: int, group_size: int, width: int, prompt_width: int, mesh: Mesh, per_row: Sequence[str] = ()
) -> Replay:
    """A buffer for `groups` groups of rows of `width` tokens, with these fields `[N]` of a batch besides."""
    shape = (groups * group_size, width)
    integers, floats = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    fields: dict[str, Any] = dict.fromkeys(per_row, floats[:, 0])
    rows = Batch(
        Inputs(integers, integers, prompt_width=prompt_width),
        mask=floats,
        sample_logps=floats,
        old_logps=floats,
        advantages=floats,
        **fields,
    )
    return jax.device_put(Replay(rows, jnp.zeros(groups, jnp.float32)), NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnames="group_size")
def exchange(replay: Replay, batch: Batch, priority, key, group_size: int) -> tuple[Replay, Batch, jax.Array]:
    """The buffer with this batch's groups, the batch with stored groups for those of priority 0, and how many it took.

    Shapes: rows `[B * group_size,...]`, `priority [B]`, 0 for a group that teaches nothing. A stored group is drawn,
    with replacement, in proportion to its priority, and before this batch's own groups are stored; it keeps its
    advantages and the log-probs of the policies it came from, so that ratios stay right. With an empty buffer the batch
    stays as it is. Source: replay buffer of TRL's GRPO, which keeps the groups of highest priority; here a group leaves
    once as many newer ones came as the buffer holds, which bounds its age.
    """
    drawn = jax.random.categorical(key, jnp.log(replay.priority), shape=priority.shape)
    useless = (priority == 0) & (replay.priority.sum() > 0)
    rows = _rows(drawn, group_size)

    def mix(old, new):
        exchanged = jnp.repeat(useless, group_size).reshape(-1, *(1,) * (new.ndim - 1))
        return constrain_rows(jnp.where(exchanged, old[rows], new))

    all_priorities = jnp.concatenate([priority, replay.priority])
    newest = jnp.argsort(all_priorities == 0, stable=True)[: replay.priority.shape[0]]

    def store(old, new):
        return constrain(jnp.concatenate([new, old])[_rows(newest, group_size)], *(None,) * new.ndim)

    updated = Replay(jax.tree.map(store, replay.rows, batch), constrain(all_priorities[newest], None))
    return updated, jax.tree.map(mix, replay.rows, batch), useless.sum()


def _rows(groups, group_size: int):
    return (groups[:, None] * group_size + jnp.arange(group_size)).reshape(-1)


def get_arrays(replay: Replay) -> dict[str, Any]:
    """The tree of a buffer's arrays as a checkpoint holds it: rows by the name of their field, without nesting."""
    fields = {**vars(replay.rows), **vars(replay.rows.inputs)}
    rows = {name: x for name, x in fields.items() if isinstance(x, jax.Array)}
    return {"rows": rows, "priority": replay.priority}


def with_arrays(replay: Replay, arrays: dict[str, Any]) -> Replay:
    """The buffer with the arrays of `get_arrays`; raises ConfigError for rows with other fields than its own."""
    if other := get_arrays(replay)["rows"].keys() ^ arrays["rows"].keys():
        raise ConfigError(
            f"the rows of algorithm.replay_groups in the checkpoint differ by {', '.join(sorted(other))} from those of "
            "this run: leave environment.options and algorithm.positive_nll_coef as they were, or set replay_groups "
            "to 0"
        )
    of_inputs = {"tokens", "segments"}
    inputs = replay.rows.inputs.replace(**{name: x for name, x in arrays["rows"].items() if name in of_inputs})
    others = {name: x for name, x in arrays["rows"].items() if name not in of_inputs}
    return Replay(replay.rows.replace(inputs=inputs, **others), arrays["priority"])
