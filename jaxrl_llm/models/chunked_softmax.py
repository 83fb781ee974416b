"""From hidden states to log-probs: chunked over positions, so that logits `[N,T,V]` never exist, with their gradients.

The head's matrix is used as `[V,D]`, as embeddings are stored: where the two are one, nothing is transposed.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.distillation import (
    generalized_jsd,
    hybrid_distances,
    sorted_distance,
    with_tail,
    without_tail,
)
from jaxrl_llm.algorithms.kl import full_kl, kl_estimate
from jaxrl_llm.distributed.sharding import constrain, context_shards, is_sharded, row_shards
from jaxrl_llm.models.kernels import cpu_matmul
from jaxrl_llm.models.layers import soft_cap

REMAINDER = 4  # parts of a chunk that would not be full, of which only those that are needed are computed
# About how many logits each device computes at once, at least one column of the rows: 64 MB in fp32 stay near a CPU's
# caches; accelerators take 1 GB, as each chunk reads the table and adds to its gradient.
LOGITS_IN_FLIGHT = 2**24
LOGITS_ON_ACCELERATORS = 2**28
KEPT = 4  # logits of at most this many chunks are kept for the backward pass, which forms others again


def log_sum_squares(hidden, kernel, softcap: float | None = None, count=None, temperature: float = 1.0):
    """`log sum_v p_v^2` `[N,S]` of softmax(logits / temperature), in columns; logits as in `chunked_logps`."""

    table = _table(hidden, kernel)

    def chunk(columns):
        logps = jax.nn.log_softmax(_logits(columns(hidden), table, temperature, softcap), axis=-1)
        return (jax.nn.logsumexp(2.0 * logps, axis=-1),)

    return _over_chunks(chunk, hidden, table, count)[0][0]


class Slopes(NamedTuple):
    """The derivative of a loss by each log-prob: `constant + kl_weights * d kl_estimate(logp, ref_logp, kl)`."""

    constant: jax.Array
    kl_weights: jax.Array | None = None
    ref_logps: jax.Array | None = None
    kl: str = ""


def chunked_logps(
    hidden,
    kernel,
    targets,
    temperature: float,
    *,
    slopes: Slopes | None = None,
    mean_logit: bool = False,
    softcap: float | None = None,
    smoothing: float = 0.0,
    count=None,
) -> tuple[jax.Array, ...]:
    """Log-probs and entropies `[N,X]` of softmax(logits / temperature) at the targets `[N,X]`, and where a target is
    the likeliest token (1 or 0); with `mean_logit` also the mean logit over the vocabulary. The last two have no
    gradient.

    hidden `[N,X,D]` in the compute dtype, kernel `[D,V]`; logits are hidden @ kernel, capped softly. With `smoothing` e
    the log-prob is `(1 - e) log p(target) + e mean_v log p(v)`: label smoothing (arXiv 1512.00567). Columns from
    `count` on (rounded up to a chunk) are 0 and not computed.

    Logits are formed for a chunk of columns at a time, in fp32. The backward pass finds only the log-sum-exp and the
    entropy of each token and forms the logits again, unless they are few enough to be kept (`KEPT`). With `slopes`
    `[N,X]`, the derivatives of the caller's loss by the log-probs, it is not waited for: gradients by hidden states and
    kernel are formed along with the log-probs, three matmuls in place of four, and the backward pass returns them
    whatever gradients it receives.
    """
    constant, kl_weights, ref_logps, kl = (None, None, None, "") if slopes is None else slopes
    options = _Options(float(temperature), mean_logit, softcap, smoothing, kl)
    return _chunked_logps(options, hidden, kernel, targets, (constant, kl_weights, ref_logps), count)


class _Options(NamedTuple):
    """The arguments of `chunked_logps` that are no arrays; `kl` is that of the slopes."""

    temperature: float
    mean_logit: bool
    softcap: float | None
    smoothing: float
    kl: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_logps(options: _Options, hidden, kernel, targets, slopes, count):
    del slopes  # nothing is differentiated here
    return _forward(options, hidden, kernel, targets, count, keep=False)[0]


class _Table(NamedTuple):
    """The head's matrix `[V,D]`, and the names in ACTIVATIONS of the logits' rows and vocabulary."""

    matrix: jax.Array
    rows: str
    vocab: str

    def first(self, words: int) -> "_Table":
        """The table of the first words."""
        return self._replace(matrix=self.matrix[:words])


def _logits(hidden, table: _Table, temperature: float, softcap):
    return soft_cap(_products(hidden, table), softcap) / temperature


def _products(hidden, table: _Table):
    """The matmul `[N,s,V]` of the columns and the table: the logits, unless these are capped."""
    matrix = table.matrix.astype(hidden.dtype)
    products = jnp.einsum("...d,vd->...v", _flat(hidden), matrix, preferred_element_type=jnp.float32)
    return constrain(products.reshape(*hidden.shape[:-1], -1), table.rows, "positions", table.vocab)


def _flat(x):
    """`[N,s,...]` as `[N*s,...]`, with which matmuls are faster, unless positions are sharded over devices."""
    return x.reshape(-1, x.shape[-1]) if context_shards() == 1 else x


def _table(hidden, kernel) -> _Table:
    """The head's matrix for these hidden states, converted here once, not for every chunk.

    Where the mesh shards its width, either each device gathers it for its own rows, or it takes a part of the
    vocabulary for the rows of all devices that share the parameters: whichever has fewer numbers moves. CPUs convert
    it as they read it: their matmuls have copies of their own.
    """
    rows, vocab = "rows", "vocab"
    if not is_sharded():
        return _Table(kernel.T if jax.default_backend() == "cpu" else kernel.T.astype(hidden.dtype), rows, vocab)
    shape = jax.sharding.get_abstract_mesh().shape
    if shape["context"] == 1 and hidden.shape[0] * hidden.shape[1] < kernel.shape[1] * shape["data"]:
        rows, vocab = "copies", "spread_vocab"
    return _Table(constrain(kernel.T.astype(hidden.dtype), vocab, None), rows, vocab)


def columns_at_once(rows: int, vocabulary: int) -> int:
    """The columns of rows whose logits all devices of the mesh that is set compute at once.

    A power of two, which divides the numbers of tokens that are most common.
    """
    mesh = jax.sharding.get_abstract_mesh()
    logits = LOGITS_IN_FLIGHT if jax.default_backend() == "cpu" else LOGITS_ON_ACCELERATORS
    columns = logits * (1 if mesh.empty else mesh.size) / (rows * vocabulary)
    return 2 ** max(round(math.log2(columns)), 0)


def _over_chunks(function, hidden, table, count, total=None, filled: bool = False):
    """Scan of `function(columns, total)` over a few columns at a time: its arrays `[N,S,...]`, and the last total.

    `columns(x)` are those columns of an array `[N,S,...]`; without a total the function has one argument. `filled`
    leaves the arrays with the columns that fill up the last chunk.
    """
    rows, length = hidden.shape[:2]
    shards = context_shards()  # which share the columns of a chunk
    width = min(-(-columns_at_once(rows, len(table.matrix)) // shards), -(-length // shards)) * shards
    chunks = -(-length // width)
    if count is None:  # equal chunks, so that little is computed for nothing
        width = -(-length // (chunks * shards)) * shards
    part = max(width // (REMAINDER * shards), 1) * shards  # the columns of a smaller chunk
    padded = (chunks - 1) * width + -(-width // part) * part  # a slice that ended behind it would be moved back

    def columns_at(start, size, x):
        x = jnp.pad(x, ((0, 0), (0, padded - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

    def call(columns, total):
        return (function(columns), None) if total is None else function(columns, total)

    def step(first, size, number, carry):
        start = first + number * size
        found, total = call(functools.partial(columns_at, start, size), carry[1])
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return tuple(write(old, new) for old, new in zip(carry[0], found, strict=True)), total

    shapes, _ = jax.eval_shape(functools.partial(call, functools.partial(columns_at, 0, width)), total)
    empty = tuple(jnp.zeros((x.shape[0], padded, *x.shape[2:]), x.dtype) for x in shapes)
    full = chunks if count is None else jnp.minimum(count, length) // width
    carry = jax.lax.fori_loop(0, full, functools.partial(step, 0, width), (empty, total))
    if count is not None:  # what remains, in smaller chunks
        left = -(-(jnp.minimum(count, length) - full * width) // part)
        carry = jax.lax.fori_loop(0, left, functools.partial(step, full * width, part), carry)
    found, total = carry
    return (found if filled else tuple(x[:, :length] for x in found)), total


def _numbers(logits, targets, mean_logit: bool, smoothing: float):
    """Of logits `[N,s,V]`: log-probs, entropies, is_top, mean logits if asked for, and log-sum-exps, all `[N,s]`; and
    the softmax as (shares `[N,s,V]`, total `[N,s]`), of which it is the quotient."""
    top = logits.max(axis=-1)
    shares = _once(jnp.exp(logits - top[..., None]))
    total, weighted = _two_sums(shares, logits)
    normalizer = top + jnp.log(total)
    target = _at_target(logits, targets)
    entropy = normalizer - weighted / total
    smoothed = (1 - smoothing) * target + smoothing * logits.mean(axis=-1) if smoothing else target
    found = smoothed - normalizer, entropy, (target >= top).astype(jnp.float32)
    mean = (logits.mean(axis=-1),) if mean_logit else ()
    return (*found, *mean, normalizer), (shares, total)


def _two_sums(x, y):
    """The sums over the last axis of x and of x * y: on CPUs by a matmul, as XLA's own loop is slow.

    Not on meshes: XLA's partitioner adds it up wrongly where experts and tensor both shard the last axis.
    """
    if jax.default_backend() == "cpu" and not is_sharded():
        return x.sum(-1), jnp.einsum("...v,...v->...", x, y)
    zero = jnp.zeros((), x.dtype)
    return jax.lax.reduce((x, x * y), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (x.ndim - 1,))


def _once(x):
    """x, computed once for all its uses: on CPUs exponentials cost more than reading them again."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def _at_target(x, targets):
    """x `[N,s,V]` at the targets `[N,s]`."""
    if is_sharded():  # a gather would collect all of x then
        return jnp.where(jnp.arange(x.shape[-1]) == targets[..., None], x, 0.0).sum(-1)
    return jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]


def _plus_at_target(x, targets, numbers):
    """x `[N,s,V]` with numbers `[N,s]` added at the targets."""
    # A scatter would not be fused with what makes and converts x.
    if is_sharded() or jax.default_backend() != "cpu":
        return x + jnp.where(jnp.arange(x.shape[-1]) == targets[..., None], numbers[..., None], 0.0)
    n, column = jnp.indices(targets.shape, sparse=True)
    return x.at[n, column, targets].add(numbers, mode="promise_in_bounds", unique_indices=True)


class _Residuals(NamedTuple):
    """Residuals from which the backward pass forms the logits again."""

    hidden: jax.Array
    kernel: jax.Array
    targets: jax.Array
    entropy: jax.Array
    normalizer: jax.Array
    count: jax.Array | None
    logits: jax.Array | None  # where they are few: kept


class _Gradients(NamedTuple):
    """The gradients themselves, where slopes were known."""

    hidden: jax.Array
    kernel: jax.Array


def _forward(options: _Options, hidden, kernel, targets, count, keep: bool):
    table = _table(hidden, kernel)

    def chunk(columns):
        logits = _logits(columns(hidden), table, options.temperature, options.softcap)
        numbers, _ = _numbers(logits, columns(targets), options.mean_logit, options.smoothing)
        return (*numbers, logits) if keep else numbers

    outputs, _ = _over_chunks(chunk, hidden, table, count, filled=keep)
    kept = outputs[-1] if keep else None
    *numbers, normalizer = (x[:, : hidden.shape[1]] for x in (outputs[:-1] if keep else outputs))
    return tuple(numbers), _Residuals(hidden, kernel, targets, numbers[1], normalizer, count, kept)


def _forward_with_gradients(options: _Options, hidden, kernel, targets, slopes, count):
    constant, kl_weights, ref_logps = slopes
    if constant is None:
        few = hidden.shape[1] <= KEPT * columns_at_once(hidden.shape[0], kernel.shape[1])
        return _forward(options, hidden, kernel, targets, count, keep=few)
    table = _table(hidden, kernel)

    def chunk(columns, d_table):
        h, t = columns(hidden), columns(targets)
        logits = _logits(h, table, options.temperature, options.softcap)
        (*numbers, _), (shares, total) = _numbers(logits, t, options.mean_logit, options.smoothing)
        slope = columns(constant)
        if kl_weights is not None:
            weights, ref = columns(kl_weights), columns(ref_logps)
            by_logp = jax.grad(lambda logps: kl_estimate(logps, ref, options.kl).sum())(numbers[0])
            slope += jnp.where(weights == 0, 0.0, weights * by_logp)  # which overflows on tokens that count for nothing
        d = _by_logits(options, logits, shares, total, t, slope)
        d_hidden, d_table = _by_hidden_and_table(d, h, table, d_table)
        return (*numbers, d_hidden), d_table

    (*numbers, d_hidden), d_table = _over_chunks(chunk, hidden, table, count, _totals(hidden, table))
    gradients = _Gradients(d_hidden.astype(hidden.dtype), _by_kernel(d_table, kernel))
    if jax.default_backend() == "gpu" and is_sharded():
        # The layers' backward pass waits for both: XLA would hold the table's in fp32, unsummed, until it is over.
        gradients = jax.lax.optimization_barrier(gradients)
    return tuple(numbers), gradients


def _by_logits(options: _Options, logits, shares, total, targets, slope, bonus=None):
    """The gradient of `slope * logp` by hidden @ kernel: `slope * (onehot - p)`, through temperature and cap.

    p is shares / total. `bonus`, a gradient by the logits, is added before that.
    """
    _, _, softcap, smoothing, _ = options
    temperature = options.temperature
    d = (-slope / total)[..., None] * shares
    if bonus is not None:
        d += bonus
    if smoothing:
        d += (smoothing / logits.shape[-1]) * slope[..., None]
    at_target = (1 - smoothing) * slope
    if softcap is not None:
        d *= 1.0 - (logits * (temperature / softcap)) ** 2
        at_target *= 1.0 - (_at_target(logits, targets) * (temperature / softcap)) ** 2
    d = _plus_at_target(d, targets, at_target)
    return d if temperature == 1.0 else d / temperature


def _by_hidden_and_table(d, h, table: _Table, d_table):
    """The gradient by hidden states, and that by the table added to what it was: see `_totals`."""
    parts, d = d_table.shape[:2], d.astype(h.dtype)
    d_hidden = cpu_matmul.matmul(_flat(d), table.matrix).reshape(h.shape)
    if parts == (1, 1):
        return d_hidden, d_table + cpu_matmul.over_rows(_flat(d), _flat(h))
    d, own = (x.reshape(parts[0], -1, parts[1], x.shape[1] // parts[1], x.shape[-1]) for x in (d, h))
    product = jnp.einsum("rncsv,rncsd->rcvd", d, own, preferred_element_type=jnp.float32)
    return d_hidden, constrain(d_table + product, table.rows, "positions", table.vocab, None)


def _totals(hidden, table: _Table):
    """Zeros `[R,S,V,D]` for the gradient by the table `[V,D]`, one for each shard of rows R and positions S.

    Each device adds up that of its own tokens, and they are summed once, behind the loop over chunks, not in each.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    rows = 1 if mesh.empty else mesh.shape["data"] if table.rows == "copies" else row_shards(mesh)
    rows = 1 if hidden.shape[0] % rows else rows
    zeros = jnp.zeros((rows, context_shards(), *table.matrix.shape), jnp.float32)
    return constrain(zeros, table.rows, "positions", table.vocab, None)


def _by_kernel(d_table, kernel):
    """The gradient by the kernel `[D,V]`, of parts `[R,S,V,D]`, sharded as it is."""
    return constrain(d_table.sum((0, 1)).T.astype(kernel.dtype), "width", "vocab")


def _gradients(by_products, hidden, kernel, table: _Table, count):
    """The gradients by hidden states and kernel, of a table with the first words of the kernel or all.

    `by_products(columns, h)` returns the gradient `[N,s,V]` by the matmul of the table with h, the hidden states there.
    """

    def chunk(columns, d_table):
        h = columns(hidden)
        d_hidden, d_table = _by_hidden_and_table(by_products(columns, h), h, table, d_table)
        return (d_hidden,), d_table

    (d_hidden,), d_table = _over_chunks(chunk, hidden, table, count, _totals(hidden, table))
    d_table = jnp.pad(d_table, ((0, 0), (0, 0), (0, kernel.shape[1] - len(table.matrix)), (0, 0)))
    return d_hidden.astype(hidden.dtype), _by_kernel(d_table, kernel)


def _backward(options: _Options, residuals: _Residuals | _Gradients, gradients):
    if isinstance(residuals, _Gradients):
        return *residuals, None, None, None
    hidden, kernel, targets, entropy, normalizer, count, kept = residuals
    table = _table(hidden, kernel)

    def by_products(columns, h):
        logits = _logits(h, table, options.temperature, options.softcap) if kept is None else columns(kept)
        slope, ent, of_entropy, norm = (columns(x) for x in (gradients[0], entropy, gradients[1], normalizer))
        logp = logits - norm[..., None]
        p = _once(jnp.exp(logp))
        bonus = -of_entropy[..., None] * p * (logp + ent[..., None])  # d entropy = -p (log p + entropy)
        return _by_logits(options, logits, p, jnp.ones_like(norm), columns(targets), slope, bonus)

    return *_gradients(by_products, hidden, kernel, table, count), None, None, None


_chunked_logps.defvjp(_forward_with_gradients, _backward)


class Distributions(NamedTuple):
    """Distributions over the vocabulary as a network's head forms them, of a policy that is not trained."""

    hidden: jax.Array  # [N,X,D] what the head reads
    kernel: jax.Array  # [D,V]
    softcap: jax.Array | None = None  # [] of its logits, where it is another network


class TopTokens(NamedTuple):
    """The k likeliest tokens of distributions over the vocabulary."""

    ids: jax.Array  # [N,X,k] int32
    logps: jax.Array  # [N,X,k]


def chunked_kl(
    hidden, kernel, reference: Distributions, temperature: float, softcap: float | None = None, count=None
) -> jax.Array:
    """`full_kl` `[N,X]` of softmax(logits / temperature) and that of the reference; arguments as in `chunked_logps`.

    Both logits are formed for a chunk of columns at a time, in fp32, and again in the backward pass.
    """
    kl: Any = _chunked_kl((float(temperature), softcap), hidden, kernel, reference, count)
    return kl


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_kl(options: tuple[float, float | None], hidden, kernel, reference: Distributions, count):
    return _kl_forward(options, hidden, kernel, reference, count)[0]


def _kl_forward(options, hidden, kernel, reference: Distributions, count):
    tables = _table(hidden, kernel), _table(reference.hidden, reference.kernel)

    def chunk(columns):
        policy, other = _pair_of_log_probs(options, columns, hidden, reference, tables)
        return (full_kl(policy, other),)

    (kl,), _ = _over_chunks(chunk, hidden, tables[0], count)
    return kl, (hidden, kernel, reference, count)


def _pair_of_log_probs(options, columns, hidden, reference: Distributions, tables):
    """The log-probs `[N,s,V]` of the policy and of the reference in some columns."""
    pairs = zip((hidden, reference.hidden), tables, strict=True)
    return (jax.nn.log_softmax(_logits(columns(h), table, *options), axis=-1) for h, table in pairs)


# Why not `chunked_divergence` with beta 1: this gradient by hand is exactly 0 where policy and reference agree, while
# autodiff through `generalized_jsd` leaves noise near 1e-7.
def _kl_backward(options, residuals, gradient):
    hidden, kernel, reference, count = residuals
    (temperature, softcap), tables = options, (_table(hidden, kernel), _table(reference.hidden, reference.kernel))

    def by_products(columns, h):
        policy, other = _pair_of_log_probs(options, columns, hidden, reference, tables)
        kl = full_kl(policy, other)
        d = columns(gradient)[..., None] * jnp.exp(policy) * (policy - other - kl[..., None]) / temperature
        if softcap is None:
            return d
        return d * (1.0 - (_logits(h, tables[0], *options) * (temperature / softcap)) ** 2)

    return *_gradients(by_products, hidden, kernel, tables[0], count), None, None


_chunked_kl.defvjp(_kl_forward, _kl_backward)


def chunked_divergence(
    hidden,
    kernel,
    teacher: Distributions | TopTokens,
    temperature: float,
    beta: float,
    softcap: float | None = None,
    count=None,
    top_k: int = 0,
    tail: bool = True,
    least: float | None = None,
) -> jax.Array:
    """`generalized_jsd` `[N,X]` of softmax(logits / temperature) and a teacher; other arguments as in `chunked_logps`.

    Of a teacher's whole distributions both logits are formed for a chunk of columns at a time, in fp32, and again in
    the backward pass; tokens that one of the two heads lacks are in neither distribution. Of a teacher's likeliest
    tokens, the divergence is over these and one entry for all others (`with_tail`), or, with `tail` False, of the two
    distributions given that it is one of these; theirs are log-probs at this temperature already. With `top_k` the same
    is done with that many likeliest tokens of the policy and a teacher's whole distributions. The log-probs of such
    tokens count as `least` at least, in both, and the policy's have no gradient below it.
    """
    options = _Divergence(float(temperature), softcap, float(beta), top_k, tail, least)
    divergence: Any = _chunked_divergence(options, hidden, kernel, teacher, count)
    return divergence


class _Divergence(NamedTuple):
    """The arguments of `chunked_divergence` that are no arrays."""

    temperature: float
    softcap: float | None
    beta: float
    top_k: int
    tail: bool
    least: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_divergence(options: _Divergence, hidden, kernel, teacher, count):
    return _divergence_forward(options, hidden, kernel, teacher, count)[0]


def _divergence_forward(options, hidden, kernel, teacher: Distributions | TopTokens, count):
    table = _shared_table(hidden, kernel, teacher)
    divergence_of = _divergence_by_products(options, teacher)

    def chunk(columns):
        return (divergence_of(columns)(_products(columns(hidden), table)),)

    (divergence,), _ = _over_chunks(chunk, hidden, table, count)
    return divergence, (hidden, kernel, teacher, count)


def _shared_table(hidden, kernel, teacher: Distributions | TopTokens) -> _Table:
    """The head's matrix `[V,D]`, of the tokens that the teacher has too."""
    table = _table(hidden, kernel)
    return table.first(teacher.kernel.shape[1]) if isinstance(teacher, Distributions) else table


def _divergence_by_products(options, teacher: Distributions | TopTokens):
    """A function of columns that returns the divergence `[N,s]` as a function of the policy's matmul there."""
    temperature, softcap, beta, top_k, tail, least = options

    def restricted(log_probs):
        log_probs = log_probs if least is None else jnp.maximum(log_probs, least)
        return with_tail(log_probs) if tail else without_tail(log_probs)

    def policy(products):
        return jax.nn.log_softmax(soft_cap(products, softcap) / temperature, axis=-1)

    if isinstance(teacher, TopTokens):

        def of_top(columns, products):
            own = jnp.take_along_axis(policy(products), columns(teacher.ids), axis=-1)
            return generalized_jsd(restricted(own), restricted(columns(teacher.logps)), beta)

        return lambda columns: functools.partial(of_top, columns)
    table = _table(teacher.hidden, teacher.kernel)

    def of_all(columns, products):
        logits = _logits(columns(teacher.hidden), table.first(products.shape[-1]), temperature, teacher.softcap)
        own, theirs = policy(products), jax.nn.log_softmax(logits, axis=-1)
        if top_k:
            ids = jax.lax.top_k(jax.lax.stop_gradient(own), top_k)[1]
            own, theirs = (restricted(jnp.take_along_axis(x, ids, axis=-1)) for x in (own, theirs))
        return generalized_jsd(own, theirs, beta)

    return lambda columns: functools.partial(of_all, columns)


def _divergence_backward(options, residuals, gradient):
    hidden, kernel, teacher, count = residuals
    table = _shared_table(hidden, kernel, teacher)
    divergence_of = _divergence_by_products(options, teacher)

    def by_products(columns, h):
        return jax.vjp(divergence_of(columns), _products(h, table))[1](columns(gradient))[0]

    return *_gradients(by_products, hidden, kernel, table, count), None, None


_chunked_divergence.defvjp(_divergence_forward, _divergence_backward)


class AlignedDistributions(NamedTuple):
    """A teacher's distributions over a vocabulary of its own, at the last token of each span of text."""

    hidden: jax.Array  # [N,X,D] what the head reads
    kernel: jax.Array  # [D,W]
    prefix_logps: jax.Array  # [N,X] of the teacher's tokens of the span before its last one, together
    softcap: jax.Array | None = None  # [] of its logits
    matches: jax.Array | None = None  # [V] the teacher's id of each token, -1: none; None: nothing is known of them


class UldOptions(NamedTuple):
    """The settings of a distance between distributions over two vocabularies."""

    temperature: float
    teacher_temperature: float
    beta: float = 1.0  # of matched tokens
    weights: tuple[float, float] | None = None  # of matched and other tokens; None: the share of the matched, the rest


def chunked_uld(
    hidden,
    kernel,
    prefix_logps,
    teacher: AlignedDistributions,
    options: UldOptions,
    softcap: float | None = None,
    count=None,
) -> jax.Array:
    """The distance `[N,X]` of a policy from a teacher with another vocabulary, where both end a span of text.

    The distribution of a span is that of its last token times the probability of the tokens before it in the span,
    `exp(prefix_logps)` `[N,X]`, to which gradients flow as well. The distance is `sorted_distance` or, with
    `teacher.matches`, the weighted sum of `hybrid_distances`. Logits of both are formed for a chunk of columns at a
    time, in fp32, and again in the backward pass; other arguments as in `chunked_logps`.
    """
    distance: Any = _chunked_uld((options, softcap), hidden, kernel, prefix_logps, teacher, count)
    return distance


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_uld(options, hidden, kernel, prefix, teacher, count):
    return _uld_forward(options, hidden, kernel, prefix, teacher, count)[0]


def _uld_forward(options, hidden, kernel, prefix, teacher, count):
    table = _table(hidden, kernel)
    distance_of = _uld_by_products(options, teacher)

    def chunk(columns):
        return (distance_of(columns)(_products(columns(hidden), table), columns(prefix)),)

    (distance,), _ = _over_chunks(chunk, hidden, table, count)
    return distance, (hidden, kernel, prefix, teacher, count)


def _uld_by_products(options: tuple[UldOptions, float | None], teacher: AlignedDistributions):
    """A function of columns that returns the distance `[N,s]` by the policy's matmul there and its prefixes."""
    settings, softcap = options
    table = _table(teacher.hidden, teacher.kernel)

    def distance(columns, products, prefix):
        own = jax.nn.log_softmax(soft_cap(products, softcap) / settings.temperature, axis=-1)
        logits = _logits(columns(teacher.hidden), table, settings.teacher_temperature, teacher.softcap)
        p = jnp.exp(own + prefix[..., None])
        q = jnp.exp(jax.nn.log_softmax(logits, axis=-1) + columns(teacher.prefix_logps)[..., None])
        if teacher.matches is None:
            return sorted_distance(p, q)
        matched, unmatched = hybrid_distances(p, q, teacher.matches, settings.beta)
        share = (teacher.matches >= 0).sum() / len(table.matrix)  # of the teacher's tokens
        weights = (share, 1.0 - share) if settings.weights is None else settings.weights
        return weights[0] * matched + weights[1] * unmatched

    return lambda columns: functools.partial(distance, columns)


def _uld_backward(options, residuals, gradient):
    hidden, kernel, prefix, teacher, count = residuals
    table = _table(hidden, kernel)
    distance_of = _uld_by_products(options, teacher)

    def chunk(columns, d_table):
        h = columns(hidden)
        d, d_prefix = jax.vjp(distance_of(columns), _products(h, table), columns(prefix))[1](columns(gradient))
        d_hidden, d_table = _by_hidden_and_table(d, h, table, d_table)
        return (d_hidden, d_prefix), d_table

    (d_hidden, d_prefix), d_table = _over_chunks(chunk, hidden, table, count, _totals(hidden, table))
    return d_hidden.astype(hidden.dtype), _by_kernel(d_table, kernel), d_prefix, None, None


_chunked_uld.defvjp(_uld_forward, _uld_backward)


def chunked_top(hidden, kernel, temperature: float, k: int, softcap: float | None = None, count=None) -> TopTokens:
    """The k likeliest tokens of softmax(logits / temperature), the first one first; arguments as in `chunked_logps`."""
    table = _table(hidden, kernel)

    def chunk(columns):
        logps = jax.nn.log_softmax(_logits(columns(hidden), table, temperature, softcap), axis=-1)
        return jax.lax.top_k(logps, k)

    (logps, ids), _ = _over_chunks(chunk, hidden, table, count)
    return TopTokens(ids, logps)
