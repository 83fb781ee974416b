"""`Batch`, the N rows of T tokens that an update learns from, and `Inputs`, the part of it that a network reads.

Index t of every `[N,T]` array speaks of token t. Padding is segment 0, whatever the token.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # numpy on the host, jax on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Token positions of a batch that the network computes in packed rows.

    Z shards of the mesh hold I micro-batches each, of Q packed rows of W tokens; a micro-batch has room for n rows of
    the batch and for X positions that predict a token. All arrays are int32 indices within their shard. The layout of
    one micro-batch lacks the dimension I.
    """

    row_idx: Array  # [Z,I,n] the rows of a micro-batch; N / Z where there is none
    token_idx: Array  # [Z,I,Q,W] the token of `rows [n * T]` that lies here
    segments: Array  # [Z,I,Q,W] 0 is padding
    prefix_segments: Array  # [Z,I,Q,W] a segment that a token sees besides its own, its group's prefix; None: none
    positions: Array  # [Z,I,Q,W]
    multiplicity: Array  # [Z,I,Q,W] how many rows a packed token is part of
    hidden_idx: Array  # [Z,I,X] the packed token `[Q * W]` whose hidden state predicts
    target_idx: Array  # [Z,I,X] the token of `rows [n * T]` that is predicted
    logp_idx: Array  # [Z,I,n,T] which of the X speaks of a row's token; X where none does
    num_read: Array  # [Z,I] how many of the X are in use
    num_microbatches: Array  # [Z] how many micro-batches are in use, the same in every shard

    def microbatch(self, number) -> "PackedLayout":
        """The layout of the micro-batch of that number, `[Z,...]` without the dimension I."""
        return jax.tree.map(lambda x: x if x.ndim < 2 else x[:, number], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Images:
    """The images of rows, in the order of the image tokens: tiles of one size or, with `grids`, patches of any images,
    or tiles that are put together.

    Where `features` are known, `pixels` are not read. With `source` rows share those of their prompts: both are
    `[Z,b,...]`, b in each of Z shards of the mesh, in place of `[N,...]`.
    """

    pixels: Array  # [N,K,H,W,C] as the model's image processor normalises them; K are the most tiles of a row
    count: Array  # [N] int32 tiles of each row; those behind are padding
    features: Array = None  # [N,M,(1+E)D] of the M tokens of K tiles, where what makes them is frozen
    # [N,K,2] int32 patches along height and width of each image, `pixels` are its patches [N,P,n]; or six numbers of
    # it, [N,K,6], see models/vision/any_resolution.py.
    grids: Array = None
    source: Array = None  # [N] int32 which of its shard's b a row reads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ImageEmbeddings:
    """The encoded images of rows: the embeddings that image tokens get in place of their own.

    Each of Z sources is for N / Z rows, one after another: a row by itself, or the packed rows of a shard.
    """

    values: Array  # [Z,M,(1+E)D] embeddings, and what is added behind each of the first E layers
    index: Array  # [N,T] int32 which of its source's M lies here; -1: none
    positions: Array = None  # [N,T,3] int32 in time, height and width, of models with positions of these axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything a network reads of rows of tokens; a new modality is a new field here and no new argument elsewhere.

    With a `layout` the network computes packed rows in place of these; the result speaks of these all the same.
    """

    tokens: Array  # [N,T] int32
    segments: Array = None  # [N,T] int32; 0 is padding, other numbers tell documents apart; None: all 1
    positions: Array = None  # [N,T] int32; None: counted from 0 in each segment
    noise: Array = None  # [N,T,D] added to the embeddings
    images: Images | ImageEmbeddings | None = None  # that image tokens stand for
    prefix_segments: Array = None  # [N,T] a segment that a token sees besides its own; None: none
    experts: Array = None  # [N,T,L,k] integers: experts of tokens in the L layers that have some; -1: the router's own
    multiplicity: Array = None  # [N,T] how often a token counts in the routing to experts; None: once, padding never
    in_prompt: Array = None  # [N,T] True on tokens of prompts, for models in which these see each other; None: those
    # of the first `prompt_width` columns
    layout: PackedLayout | None = None
    prompt_width: int = dataclasses.field(default=0, metadata={"static": True})  # no earlier column is predicted

    def replace(self, **changes) -> "Inputs":
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalars:
    """Numbers `[]` of a whole batch, which all its micro-batches share; None: the setting of that name.

    The heads of the reference and of the teacher go with them.
    """

    kl_coef: Array = None  # weight of the KL term
    entropy_coef: Array = None  # weight of the entropy bonus
    token_count: Array = None  # tokens of the rollout divided by its optimizer batches
    reward_shift: Array = None  # mean of all rewards so far, which bco_pair subtracts
    ref_head: Array = None  # [D,V] of the reference policy, where its whole distributions are read
    teacher_head: Array = None  # [D,V] of the teacher, where its whole distributions are read
    teacher_softcap: Array = None  # of the teacher's logits; None: they are not capped
    teacher_matches: Array = None  # [V] the id of each token in the vocabulary of a teacher of another one, -1: none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """Result of an objective's `prepare`: a whole optimizer batch, before it is split into micro-batches."""

    weights: Array = None  # [N,T] aggregation weights: the loss is sum(weights * loss)
    row_weights: Array = None  # [N] the same for losses with one number per row, or a pair
    token_share: Array = None  # [N,T] mask / tokens of the optimizer batch, for means over tokens
    entropy_share: Array = None  # [N,T] share of a token in the entropy bonus; None: token_share
    observed_share: Array = None  # [N,T] observed / observation tokens of the optimizer batch
    positive_share: Array = None  # [N,T] share of a token in those of correct completions of the optimizer batch
    taught_share: Array = None  # [N,T] the same of tokens on taught rows, NaN where there are none; None: token_share
    span_weights: Array = None  # [N,T] aggregation weights of spans of text, at the last token of each
    span_share: Array = None  # [N,T] share of a span in means over spans, there
    keep: Array = None  # [N,T] 1 on tokens whose policy term counts; None: all of the mask
    weight_scale: Array = None  # [N] 1 / the mean importance weight of the batch
    selected: Array = None  # [N,T] 1 on the few tokens that the loss treats differently
    side_share: Array = None  # [N,T,2] share of a token in means over either side, see `side_shares`
    row_side_share: Array = None  # [N,2] the same of a row
    real_share: Array = None  # [N] share of a row in the tokens that are no padding
    baseline: Array = None  # [N] the mean reward of mismatched rows, that KTO compares with
    tangent: Array = None  # [N,2] slope and height, at this policy, of a loss that compares pairs with each other


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Token rows and what is known of them; a field that no objective of the run reads is None.

    Rows of one prompt are adjacent; a preference pair is two adjacent rows, the chosen one first, and its gold
    completion, where there is one, the third. Arrays have the leading dimension N, and micro-batches are runs of their
    rows; `scalars` belong to all of them.
    """

    inputs: Inputs
    mask: Array  # [N,T] float32; 1 on the tokens that the loss reads
    observed: Array = None  # [N,T] float32; 1 on observation tokens, where the loss predicts them
    positive: Array = None  # [N] 1 on correct completions, where the loss learns them by their likelihood
    sample_logps: Array = None  # [N,T] of the sampler
    old_logps: Array = None  # [N,T] of the policy that the ratio compares with; None: the policy itself
    proximal_share: Array = None  # [N,T] in place of old_logps: they lie this share of the way from sampler to policy
    ref_logps: Array = None  # [N,T] of the reference policy
    ref_hidden: Array = None  # [N,T,D] what its head reads, where its whole distributions are read
    teacher_hidden: Array = None  # [N,T,D] what the teacher's head reads, where its whole distributions are read
    teacher_ids: Array = None  # [N,T,k] its likeliest tokens, where it is known by these
    teacher_top_logps: Array = None  # [N,T,k] and their log-probs
    teacher_ends: Array = None  # [N,T] int32 column of the last token of a span of text that it shares; -1: in none
    teacher_prefix_logps: Array = None  # [N,T] there: of its own tokens of the span before its last one, together
    taught: Array = None  # [N] 1 on rows that learn from the teacher; None: all do
    advantages: Array = None  # [N,T]
    values: Array = None  # [N,T] of the critic that starts this step
    returns: Array = None  # [N,T]
    labels: Array = None  # [N] 1 desirable, 0 undesirable
    step_labels: Array = None  # [N,T] from 0, wrong, to 1, right, of the step that ends at a token of the mask
    margins: Array = None  # [N] by how much a pair's rewards should differ, for a reward model
    kl_weight: Array = None  # [N] weight of the KL term on each row; None: the same on all
    loss_weight: Array = None  # [N] factor on each row's loss; None: 1
    seeds: Array = None  # [N] uint32, for objectives that draw random numbers
    scalars: Scalars = Scalars()
    prepared: Prepared = Prepared()
    observe_layout: PackedLayout | None = None  # of the rows that the objective's `observe` reads, where others

    @property
    def rows(self) -> int:
        """The number of rows N."""
        return self.inputs.tokens.shape[0]

    def replace(self, **changes) -> "Batch":
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    def prepare(self, **changes) -> "Batch":
        """A copy with these fields of `prepared`, the objective's own numbers, changed."""
        return self.replace(prepared=dataclasses.replace(self.prepared, **changes))

    def with_layout(self, layout: PackedLayout | None, observe_layout: PackedLayout | None = None) -> "Batch":
        """A copy whose rows the network finds by `layout`, and those that the objective's `observe` reads, where they
        are others, by `observe_layout`."""
        return self.replace(inputs=self.inputs.replace(layout=layout), observe_layout=observe_layout)

    def rows_alone(self) -> tuple["Batch", Callable[["Batch"], "Batch"]]:
        """The arrays with rows alone, without layouts, and what puts those back that rows share: scalars, and images of
        prompts."""
        bare, images = self.with_layout(None).replace(scalars=Scalars()), self.inputs.images
        if not isinstance(images, Images) or images.source is None:
            return bare, lambda rows: rows.replace(scalars=self.scalars)

        def with_images(rows: Batch, pixels, features) -> Batch:
            own = rows.inputs.images
            assert isinstance(own, Images)
            own = dataclasses.replace(own, pixels=pixels, features=features)
            return rows.replace(inputs=rows.inputs.replace(images=own))

        return with_images(bare, None, None), lambda rows: with_images(rows, images.pixels, images.features).replace(
            scalars=self.scalars
        )

    def map_rows(self, function) -> "Batch":
        """A copy with `function` of every array that has rows, which moves none to another shard; it has no layouts."""
        rows, with_shared = self.rows_alone()
        return with_shared(jax.tree.map(function, rows))

    def take(self, index) -> "Batch":
        """The batch of the rows at `index`, numbers `[n]` of its own."""
        return self.map_rows(lambda x: x[index])


def minibatch_indices(
    rows: int, group_size: int, minibatches: int, epochs: int, seed: tuple[int, ...] | None
) -> Iterator[np.ndarray]:
    """Row numbers of each minibatch of each epoch; groups stay together, in an order drawn from `seed` unless None.

    Raises ValueError when the groups do not divide into the minibatches.
    """
    groups = rows // group_size
    if rows % group_size or groups % minibatches:
        raise ValueError(f"{rows} rows of groups of {group_size} do not divide into {minibatches} minibatches.")
    for epoch in range(epochs):
        order = np.arange(groups)
        if seed is not None:
            order = np.random.default_rng([*seed, epoch]).permutation(groups)
        for minibatch in order.reshape(minibatches, -1):
            yield (minibatch[:, None] * group_size + np.arange(group_size)).reshape(-1)


def observation_mask(segments, mask, prompt_width: int) -> jax.Array:
    """1 on the tokens `[N,T]` of completions that were not sampled, behind one of their document that was.

    `mask [N,T]` is 1 on sampled tokens.
    """
    sampled = mask > 0
    completion = (jnp.arange(segments.shape[1]) >= prompt_width) & (segments > 0)
    # Segments count up along a row, so the latest sampled token's is a token's own where its document has one before.
    latest = jax.lax.cummax(jnp.where(sampled, segments, 0), axis=1)
    return (completion & (latest == segments) & ~sampled).astype(jnp.float32)
