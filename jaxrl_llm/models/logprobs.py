"""From a network to numbers per token: log-probs, entropies, values; chunked so that `[N,T,V]` never exists.

This is the only module that shifts: the hidden state at t-1 predicts token t, and every array that leaves here speaks
at index t of token t. All arrays are fp32, and 0 where nothing is predicted: on padding, on the first token of a
segment, in the first `inputs.prompt_width` columns (which the head never computes), and, with a layout, on tokens that
it does not read.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import ImageEmbeddings, Images, Inputs, PackedLayout
from jaxrl_llm.algorithms.distillation import prefix_logps
from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.chunked_divergences import (
    AlignedDistributions,
    Distributions,
    TopTokens,
    UldOptions,
    chunked_divergence,
    chunked_kl,
    chunked_top,
    chunked_uld,
)
from jaxrl_llm.models.chunked_softmax import Slopes, chunked_logps, log_sum_squares
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.transformer import Transformer

LIKELIEST_BLOCK = 64  # positions whose logits are formed at once


class TokenStatistics(NamedTuple):
    """Numbers `[N,T]` about each token, given the tokens before it in its segment; None: not asked for."""

    logps: jax.Array
    entropy: jax.Array  # of the distribution that the token was drawn from
    is_top: jax.Array  # 1 where the token was the likeliest; no gradient
    mean_logit: jax.Array | None = None  # over the vocabulary; no gradient
    log_sum_squares: jax.Array | None = None  # log sum_v p_v^2; no gradient
    values: jax.Array | None = None  # of a value head on the same hidden states
    kl: jax.Array | None = None  # KL(policy || reference) over the vocabulary
    divergence: jax.Array | None = None  # from the teacher


class TeacherRows(NamedTuple):
    """A teacher's distributions of each token, and the divergence from them (see `chunked_divergence`)."""

    rows: Distributions | TopTokens  # [N,T,...]
    temperature: float
    beta: float
    top_k: int = 0  # of the policy's likeliest tokens, for whole distributions
    tail: bool = True
    least: float | None = None


class AlignedTeacher(NamedTuple):
    """The distributions of a teacher with another tokenizer where spans of text end, and the distance from them."""

    rows: AlignedDistributions  # [N,T,...]
    ends: jax.Array  # [N,T] the column of the last token of a token's span; -1: in none
    options: UldOptions


PER_TOKEN = ("hidden", "ids", "logps", "prefix_logps")  # fields of a teacher's rows


class Likeliest(NamedTuple):
    """Each token `[N,T]` among those that could have been there, and the A likeliest `[N,T,A]`, the first one first."""

    logps: jax.Array
    rank: jax.Array  # 1 is the likeliest
    top_ids: jax.Array
    top_logps: jax.Array


def likeliest(model: Transformer, tokens, segments, temperature, count: int) -> Likeliest:
    """`Likeliest` of tokens `[N,T]` at `temperature` `[N]`, with `count` likeliest; no meaning on the first of a row.

    No token sees those behind it, also where those of prompts do. Positions are read in blocks, so that `[N,T,V]` never
    exists.
    """
    hidden = model.hidden(Inputs(tokens, segments))
    targets = jnp.roll(tokens, -1, axis=1)
    size = min(LIKELIEST_BLOCK, tokens.shape[1])
    blocks = -(-tokens.shape[1] // size)

    def split(x):  # [N,T,...] -> [blocks,N,size,...]
        x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(len(x), blocks, size, *x.shape[2:]).swapaxes(0, 1)

    def of_block(block) -> Likeliest:
        logits = model.logits(block[0]) / temperature[:, None, None]
        logps = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logps, block[1][..., None], axis=-1)
        return Likeliest(own[..., 0], 1 + (logps > own).sum(-1), *jax.lax.top_k(logps, count)[::-1])

    found = jax.lax.map(of_block, (split(hidden), split(targets)))
    joined = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(len(tokens), blocks * size, *x.shape[3:]), found)
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1)[:, : tokens.shape[1]], joined)


def token_logps(net: Net, params: Params, inputs: Inputs, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies `[N,T]` of the tokens at `temperature`."""
    statistics = token_statistics(net, params, inputs, temperature)
    return statistics.logps, statistics.entropy


def token_statistics(
    net: Net,
    params: Params,
    inputs: Inputs,
    temperature: float = 1.0,
    *,
    smoothing: float = 0.0,
    slopes: Slopes | None = None,
    mean_logit: bool = False,
    squares: bool = False,
    value_head: Params | None = None,
    reference: Distributions | None = None,
    teacher: TeacherRows | AlignedTeacher | None = None,
    measured: bool = False,
) -> TokenStatistics:
    """`TokenStatistics` of the tokens at `temperature`.

    smoothing: of the log-probs, see `chunked_logps`. slopes: the derivative of the caller's loss by each log-prob,
    where it is known beforehand; the head's gradient is then formed along with the log-probs, from the same logits, and
    the gradient that arrives at them is not read, nor one at the entropies. value_head: `{"kernel": [D,1]}`.
    reference: `head_inputs` `[N,T,D]` of the reference, and its head, for `kl`. teacher: for `divergence`.
    measured: log-probs and entropies have no gradient, for a loss of the divergence alone.
    """
    model = net.bind(params)
    positions = _predicting(model, inputs)
    hidden, softcap = model.head_input(positions.hidden), net.config.logit_softcap
    if slopes is not None:
        slopes = Slopes(
            positions.sums(slopes.constant),
            None if slopes.kl_weights is None else positions.sums(slopes.kl_weights),
            None if slopes.ref_logps is None else positions.picks(slopes.ref_logps),
            slopes.kl,
        )
    read, kernel = jax.lax.stop_gradient((hidden, model.head_kernel())) if measured else (hidden, model.head_kernel())
    found = chunked_logps(
        read, kernel, positions.targets, temperature, slopes=slopes, mean_logit=mean_logit,
        softcap=softcap, smoothing=smoothing, count=positions.count,
    )  # fmt: skip
    statistics = TokenStatistics(*(positions.at_tokens(x) for x in found))
    if squares:
        fixed = jax.lax.stop_gradient((hidden, model.head_kernel()))
        sums = log_sum_squares(*fixed, softcap, positions.count, temperature)
        statistics = statistics._replace(log_sum_squares=positions.at_tokens(sums))
    if value_head is not None:
        values = jnp.matmul(positions.hidden.astype(jnp.float32), value_head["kernel"].astype(jnp.float32))[..., 0]
        statistics = statistics._replace(values=positions.at_tokens(values))
    if reference is not None:
        reference = Distributions(positions.picks(reference.hidden), reference.kernel)
        kl = chunked_kl(hidden, model.head_kernel(), reference, temperature, softcap, positions.count)
        statistics = statistics._replace(kl=positions.at_tokens(kl))
    if teacher is not None:
        rows = teacher.rows
        theirs: Any = rows._replace(
            **{name: positions.picks(x) for name, x in rows._asdict().items() if name in PER_TOKEN}
        )
        if isinstance(teacher, AlignedTeacher):
            own = statistics.logps
            # Where those are without a gradient, or at another temperature, they are formed once more.
            if measured or slopes is not None or teacher.options.temperature != temperature:
                own = positions.at_tokens(
                    chunked_logps(
                        hidden, model.head_kernel(), positions.targets, teacher.options.temperature, softcap=softcap,
                        count=positions.count,
                    )[0]
                )  # fmt: skip
            columns = jnp.arange(own.shape[1])
            prefix = prefix_logps(own, jnp.where(teacher.ends == columns, -1, teacher.ends), own.shape[1])
            divergence = chunked_uld(
                hidden, model.head_kernel(), positions.picks(prefix), theirs, teacher.options, softcap, positions.count
            )
        else:
            divergence = chunked_divergence(
                hidden, model.head_kernel(), theirs, teacher.temperature, teacher.beta, softcap, positions.count,
                teacher.top_k, teacher.tail, teacher.least,
            )  # fmt: skip
        statistics = statistics._replace(divergence=positions.at_tokens(divergence))
    return statistics


def head_inputs(net: Net, params: Params, inputs: Inputs) -> jax.Array:
    """The vectors `[N,T,D]` that predict each token: times `head_kernel` they are its logits."""
    model = net.bind(params)
    positions = _predicting(model, inputs)
    return positions.at_tokens(model.head_input(positions.hidden))


def top_tokens(net: Net, params: Params, inputs: Inputs, temperature: float, k: int, vocab: int) -> TopTokens:
    """The k likeliest `[N,T,k]` among the first `vocab` tokens where each token is, and their log-probs there."""
    model = net.bind(params)
    positions = _predicting(model, inputs)
    hidden, kernel = model.head_input(positions.hidden), model.head_kernel()[:, :vocab]
    found = chunked_top(hidden, kernel, temperature, k, net.config.logit_softcap, positions.count)
    return TopTokens(*(positions.at_tokens(x) for x in found))


def token_values(net: Net, params: Params, inputs: Inputs) -> jax.Array:
    """Values `[N,T]`, by the score head, of the state that each token was drawn in."""
    model = net.bind(params)
    positions = _predicting(model, inputs)
    return positions.at_tokens(model.scores(positions.hidden))


def step_logits(net: Net, params: Params, inputs: Inputs) -> jax.Array:
    """Logits `[N,T,2]`, by the step head, of wrong and right for a step that ends with a token, of the state after it.

    With a layout that reads states after tokens they are 0 at those that it does not read.
    """
    model = net.bind(params)
    if inputs.layout is not None:
        positions = _predicting(model, inputs)
        return positions.at_tokens(model.scores(positions.hidden))
    return model.scores(model.hidden(inputs))


def next_logits(net: Net, params: Params, inputs: Inputs, ids: Sequence[int]) -> jax.Array:
    """Logits `[N,T,len(ids)]` of the tokens `ids` to follow each token, of the state after it."""
    model = net.bind(params)
    return model.logits(model.hidden(inputs), ids)


def last_scores(net: Net, params: Params, inputs: Inputs) -> jax.Array:
    """Scores `[N]` in fp32, by the score head, of each row's last token that is no padding."""
    model = net.bind(params)
    if inputs.layout is not None:  # which reads the last token of each row and nothing else
        positions = _predicting(model, inputs)
        return positions.at_tokens(model.scores(positions.hidden)).sum(axis=1)
    hidden, segments = model.hidden(inputs), _segments(inputs)
    last = jnp.where(segments != 0, jnp.arange(segments.shape[1]), 0).max(axis=1)
    return model.scores(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0]


class _Positions(NamedTuple):
    """The hidden states `[Z,X,D]` that predict tokens `[Z,X]`, and the way back to rows `[N,T]`.

    Without a layout Z is N, and X are the columns from the first one on that is predicted.
    """

    hidden: jax.Array
    targets: jax.Array
    count: jax.Array | None  # [] how many of the X are in use, in the fullest shard
    at_tokens: Callable[[jax.Array], jax.Array]  # numbers [Z,X,...] as [N,T,...], 0 where nothing is read
    sums: Callable[[jax.Array], jax.Array]  # its transpose: [N,T] as [Z,X], summed where rows share a token
    picks: Callable[[jax.Array], jax.Array]  # [N,T,...], alike for all rows that share a token, as [Z,X,...]


def _predicting(model: Transformer, inputs: Inputs) -> _Positions:
    if inputs.layout is not None:
        return _predicting_packed(model, inputs, inputs.layout)
    tokens, segments = _predictable(inputs.tokens, model.config), _segments(inputs)
    first = max(inputs.prompt_width, 1)
    predicted = (segments[:, first:] == segments[:, first - 1 : -1]) & (segments[:, first:] != 0)

    def where_predicted(x):
        return jnp.where(predicted.reshape(*predicted.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    def at_tokens(x):
        return jnp.pad(where_predicted(x), ((0, 0), (first, 0), *((0, 0),) * (x.ndim - 2)))

    def columns(x):
        return where_predicted(x[:, first:])

    hidden = model.hidden(inputs)[:, first - 1 : -1]
    return _Positions(hidden, tokens[:, first:], None, at_tokens, columns, columns)


def _segments(inputs: Inputs):
    return jnp.ones_like(inputs.tokens) if inputs.segments is None else inputs.segments


def _predictable(tokens, config: ModelConfig):
    """The tokens, the vocabulary's last in place of those that are never predicted, whose log-probs nobody reads."""
    return jnp.minimum(tokens, config.vocab_size - 1) if config.unpredicted else tokens


def _predicting_packed(model: Transformer, inputs: Inputs, layout: PackedLayout) -> _Positions:
    tokens, (shards, width) = inputs.tokens, layout.hidden_idx.shape

    def take(x, index):  # of x [Z,M,...]; each shard from its own rows, so that no data moves between devices
        index = index.reshape(shards, -1, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    def rows(x):
        return constrain(x.reshape(-1, x.shape[-1]), "rows", None)

    def at_tokens(x):
        tail, free = x.shape[2:], (None,) * (x.ndim - 2)
        padded = jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * len(tail)))  # the last entry is that of tokens not read
        taken = take(constrain(padded, "rows", None, *free), layout.logp_idx)
        return constrain(taken.reshape(-1, layout.logp_idx.shape[-1], *tail), "rows", None, *free)

    def sums(x):
        # A token of a shared prefix is read by several rows: its slope is the sum of theirs, which is what the
        # transpose of the gather gives.
        empty = jnp.zeros((shards, width), jnp.float32)
        return jax.linear_transpose(at_tokens, empty)(x.astype(jnp.float32))[0]

    def picks(x):
        return take(x.reshape(shards, -1, *x.shape[2:]), layout.target_idx)

    def in_packed_rows(x):  # of x [N,T,...]
        tail = x.shape[2:]
        taken = take(x.reshape(shards, -1, *tail), layout.token_idx)
        return constrain(taken.reshape(-1, layout.token_idx.shape[-1], *tail), "rows", None, *(None,) * len(tail))

    images = inputs.images
    if isinstance(images, Images):  # encoded as the rows have them; packed tokens find theirs in those of their shard
        images = model.encode_images(tokens, _segments(inputs), images)
        values = images.values.reshape(shards, -1, images.values.shape[-1])
        # Where rows share features, index is among those of their shard already.
        first = jnp.arange(len(images.values) // shards) * images.values.shape[1]
        first = jnp.repeat(first, len(tokens) // len(images.values))
        index = images.index.reshape(shards, -1, tokens.shape[1])
        index = jnp.where(index < 0, index, index + first[:, None]).reshape(shards, -1)
        index = rows(take(index, layout.token_idx).reshape(layout.token_idx.shape))
        places = None if images.positions is None else in_packed_rows(images.positions)
        images = ImageEmbeddings(constrain(values, "rows", None, None), index, places)

    packed = Inputs(
        images=images,
        experts=None if inputs.experts is None else in_packed_rows(inputs.experts),
        tokens=in_packed_rows(tokens),
        segments=rows(layout.segments),
        positions=rows(layout.positions),
        prefix_segments=None if layout.prefix_segments is None else rows(layout.prefix_segments),
        multiplicity=rows(layout.multiplicity),
    )
    hidden = model.hidden(packed)
    hidden = constrain(hidden.reshape(shards, -1, hidden.shape[-1]), "rows", None, None)
    hidden = jnp.take_along_axis(hidden, layout.hidden_idx[..., None], axis=1)
    targets = picks(_predictable(tokens, model.config))
    return _Positions(hidden, targets, layout.num_read.max(), at_tokens, sums, picks)
