"""`Batch`: the N rows of T tokens an update learns from; index t of every [N,T] array speaks of token t."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

Array = Any  # numpy on the host, jax on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Index arrays, int32. That of one micro-batch lacks the dimension E."""

    rows: Array  # [Z,E,n] the rows of a micro-batch, numbered in their shard; R where there is none
    source: Array  # [Z,E,M,L] where in its rows `[n * T]` a packed token comes from
    segments: Array  # [Z,E,M,L] 0 is padding
    prefixes: Array  # [Z,E,M,L] the segment that is seen besides a token's own: its group's prefix (or its own)
    positions: Array  # [Z,E,M,L]
    uses: Array  # [Z,E,M,L] how many rows a packed token is part of
    places: Array  # [Z,E,S] the packed tokens `[M * L]` whose hidden states are read
    targets: Array  # [Z,E,S] where in the rows `[n * T]` the token comes from that is predicted there
    slots: Array  # [Z,E,n,T] which of the S speaks of a row's token; S where none does
    read: Array  # [Z,E] how many of the S are in use
    parts: Array  # [Z] how many micro-batches are in use, the same in every shard

    def part(self, number) -> "Layout":
        """The layout of one micro-batch."""
        parts = {name: x if x.ndim < 2 else x[:, number] for name, x in vars(self).items()}
        return Layout(**parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Token rows and what is known of them; a field no objective of the run reads is None.

    Rows of one prompt are adjacent, and a preference pair is two adjacent rows, the chosen one first.
    """

    tokens: Array  # [N,T] int32
    segments: Array  # [N,T] int32; 0 is padding
    mask: Array  # [N,T] float32; 1 on the tokens the loss reads
    positions: Array = None  # [N,T] int32; None: counted from 0 in each segment
    sample_logps: Array = None  # [N,T] of the sampler
    old_logps: Array = None  # [N,T] of the policy that starts this step
    ref_logps: Array = None  # [N,T] of the reference policy
    advantages: Array = None  # [N,T]
    values: Array = None  # [N,T] of the critic that starts this step
    returns: Array = None  # [N,T]
    labels: Array = None  # [N] 1 desirable, 0 undesirable
    margins: Array = None  # [N] by how much a pair's scores should differ, for a reward model
    baseline: Array = None  # [N] what a preference loss compares a row's reward with
    tangent: Array = None  # [N,2] slope and height, at this policy, of a loss that compares pairs with each other
    keep: Array = None  # [N,T] 1 on tokens whose policy term counts; None: all of the mask
    selected: Array = None  # [N,T] 1 on the few tokens of the whole batch that clip_cov or kl_cov treat otherwise
    kl_coef: Array = None  # [N] weight of the KL term, the same on every row; None: the configuration's
    entropy_share: Array = None  # [N,T] share of a token in the mean that the entropy bonus is; None: token_share
    token_count: Array = None  # [N] tokens that a mean over the tokens of such rows divides by
    entropy_coef: Array = None  # [N] weight of the entropy bonus, the same on every row; None: the configuration's
    seeds: Array = None  # [N] uint32, for losses that draw random numbers
    weights: Array = None  # [N,T] aggregation weights: the loss is sum(weights * loss)
    row_weights: Array = None  # [N] the same for losses with one number a row, or a pair
    row_share: Array = None  # [N] 1 / rows with the same label in the whole optimizer batch, for metrics
    token_share: Array = None  # [N,T] mask / tokens of the whole optimizer batch, for metrics
    real_share: Array = None  # [N] a row's part of the tokens in the optimizer batch that are no padding
    layout: Layout | None = None  # where the net finds the rows' tokens; None: row by row
    observed_layout: Layout | None = None  # the same of the rows an objective observes, where they are others
    prompt_width: int = dataclasses.field(default=0, metadata={"static": True})  # no column before this one is scored

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def replace(self, **changes) -> "Batch":
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    def take(self, index) -> "Batch":
        """The rows at `index`."""
        return jax.tree.map(lambda x: x[index], self)


def minibatch_indices(
    rows: int, group_size: int, minibatches: int, epochs: int, seed: tuple[int, ...] | None
) -> Iterator[np.ndarray]:
    """Row numbers of each minibatch of each epoch; groups stay whole, in an order drawn from `seed` unless it is None.

    Raises ValueError when the groups do not divide into the minibatches.
    """
    groups = rows // group_size
    if rows % group_size or groups % minibatches:
        raise ValueError(f"{rows} rows of groups of {group_size} do not divide into {minibatches} minibatches.")
    for epoch in range(epochs):
        order = np.arange(groups)
        if seed is not None:
            order = np.random.default_rng([*seed, epoch]).permutation(groups)
        for part in order.reshape(minibatches, -1):
            yield (part[:, None] * group_size + np.arange(group_size)).reshape(-1)
