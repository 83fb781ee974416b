"""Dynamic sampling (DAPO, arXiv 2503.14476): other groups in the place of those whose completions all score alike."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import constrain_rows, rows_to_global
from jaxrl_llm.training.logging.reward_metrics import join
from jaxrl_llm.training.rollouts.experience import ON_HOST, Partial, Rollouts, of_rows


def fill(
    held: Rollouts, flat: np.ndarray, fresh: Rollouts, fresh_flat: np.ndarray, mesh: Mesh
) -> tuple[Rollouts, np.ndarray]:
    """Replace the flat groups of `held` by groups of `fresh` that are not flat, as far as there are enough of them;
    returns the rollouts, and which groups are still flat.

    `flat` and `fresh_flat` `[B]` are of this process, which fills its own groups only: texts never travel.
    """
    slots, usable = np.flatnonzero(flat), np.flatnonzero(~fresh_flat)
    slots, usable = slots[: len(usable)], usable[: len(slots)]
    groups, size = len(flat), len(held.prompts) // len(flat)
    source = np.arange(groups)
    source[slots] = groups + usable
    index = (source[:, None] * size + np.arange(size)).reshape(-1)  # into the local rows of held, then of fresh
    rows, own_rows = groups * size, RowGroup.of(mesh)

    def pick(old: Any, new: Any, where: np.ndarray = index) -> Any:
        both = [*old, *new] if isinstance(old, list) else np.concatenate([old, new])
        return [both[i] for i in where] if isinstance(both, list) else both[where]

    def in_global(local: np.ndarray, own: int) -> np.ndarray:
        """The same in global rows, where all of held comes before all of fresh."""
        before = np.where(local < own, own_rows.index, own_rows.index + own_rows.count - 1)  # shares of other groups
        return (local + before * own).astype(np.int32)

    images, others, partial = held.images, fresh.images, held.partial
    if partial is not None and fresh.partial is not None:
        versions, rounds = pick(partial.versions, fresh.partial.versions), partial.rounds + fresh.partial.rounds
        partial = Partial(versions, fresh.partial.waiting, rounds)
    if images is not None or others is not None:  # of prompts without images in one of the two
        images = jax.tree.map(jnp.zeros_like, others) if images is None else images
        others = jax.tree.map(jnp.zeros_like, images) if others is None else others
        per_row = len(images.count) == len(held.rollout.tokens)
        chosen = in_global(index, rows) if per_row else in_global(source, groups)
        images = _pick_rows(*_as_wide(images, others), rows_to_global(chosen, mesh))
    filled = held._replace(
        rollout=_pick_rows(held.rollout, fresh.rollout, rows_to_global(in_global(index, rows), mesh)),
        images=images,
        partial=partial,
        examples=pick(held.examples, fresh.examples, source),
        logged=join(held.logged, fresh.logged, index, rows),
        **of_rows(pick, (held, fresh), ON_HOST),
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
    return jax.tree.map(lambda a, b: constrain_rows(jnp.concatenate([a, b])[index]), held, fresh)
