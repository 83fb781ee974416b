"""Dynamic sampling (DAPO, arXiv 2503.14476): other groups in the place of those whose completions all score alike."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.algorithms.turn_advantages import Turns
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import constrain, rows_to_global
from jaxrl_llm.training.logging.reward_metrics import join
from jaxrl_llm.training.rollouts.experience import Partial, Rollouts


def fill(
    held: Rollouts, flat: np.ndarray, fresh: Rollouts, fresh_flat: np.ndarray, mesh: Mesh
) -> tuple[Rollouts, np.ndarray]:
    """`held` with its flat groups replaced by groups of `fresh` that are not, as far as those go; which are flat then.

    `flat` and `fresh_flat` `[B]` are of this process, which fills its own groups only: texts never travel.
    """
    slots, usable = np.flatnonzero(flat), np.flatnonzero(~fresh_flat)
    slots, usable = slots[: len(usable)], usable[: len(slots)]
    groups, size = len(flat), len(held.prompts) // len(flat)
    source = np.arange(groups)
    source[slots] = groups + usable
    index = (source[:, None] * size + np.arange(size)).reshape(-1)  # into the local rows of held, then of fresh

    def pick(old: list, new: list, where: np.ndarray) -> list:
        both = [*old, *new]
        return [both[i] for i in where]

    def picked(old: Turns | None, new: Turns | None) -> Turns | None:
        if old is None or new is None:
            return None
        return Turns(*(np.concatenate(both)[index] for both in zip(old, new, strict=True)))

    def per_row(old: list | None, new: list | None) -> list | None:
        return None if old is None or new is None else pick(old, new, index)

    rows, own_rows = groups * size, RowGroup.of(mesh)

    def in_global(local: np.ndarray, own: int) -> np.ndarray:
        """The same in global rows, where all of held comes before all of fresh."""
        before = np.where(local < own, own_rows.index, own_rows.index + own_rows.count - 1)  # shares of other groups
        return (local + before * own).astype(np.int32)

    images, partial = held.images, held.partial
    if partial is not None and fresh.partial is not None:
        versions = np.concatenate([partial.versions, fresh.partial.versions])[index]
        partial = Partial(versions, fresh.partial.waiting, partial.rounds + fresh.partial.rounds)
    if fresh.images is not None:
        images = jax.tree.map(jnp.zeros_like, fresh.images) if images is None else images
        of_rows = len(images.count) == len(held.rollout.tokens)
        chosen = in_global(index, rows) if of_rows else in_global(source, groups)
        images = _pick_rows(*_as_wide(images, fresh.images), rows_to_global(chosen, mesh))
    filled = held._replace(
        rollout=_pick_rows(held.rollout, fresh.rollout, rows_to_global(in_global(index, rows), mesh)),
        images=images,
        partial=partial,
        examples=pick(held.examples, fresh.examples, source),
        prompts=pick(held.prompts, fresh.prompts, index),
        completions=pick(held.completions, fresh.completions, index),
        rewards=np.concatenate([held.rewards, fresh.rewards])[index],
        logged=join(held.logged, fresh.logged, index, rows),
        turns=picked(held.turns, fresh.turns),
        parts=picked(held.parts, fresh.parts),
        roles=per_row(held.roles, fresh.roles),
        environments=per_row(held.environments, fresh.environments),
        reference_scores=per_row(held.reference_scores, fresh.reference_scores),
    )
    still_flat = flat.copy()
    still_flat[slots] = False
    return filled, still_flat


@jax.jit
def _as_wide(held: Images, fresh: Images) -> tuple[Images, Images]:
    """The images of both with room for as many tiles."""

    def widened(own, other):
        missing = max(other.shape[1] - own.shape[1], 0)
        return jnp.pad(own, ((0, 0), (0, missing), *((0, 0),) * (own.ndim - 2)))

    def as_wide(own: Images, other: Images) -> Images:
        grids = None if own.grids is None else widened(own.grids, other.grids)
        return dataclasses.replace(own, pixels=widened(own.pixels, other.pixels), grids=grids)

    return as_wide(held, fresh), as_wide(fresh, held)


@jax.jit
def _pick_rows(held: Any, fresh: Any, index) -> Any:
    return jax.tree.map(
        lambda a, b: constrain(jnp.concatenate([a, b])[index], "rows", *(None,) * (a.ndim - 1)), held, fresh
    )
