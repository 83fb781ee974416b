"""From hidden states to log-probs: chunked over positions, so that logits `[N,T,V]` never exist, with their gradients.

The head's matrix is used as `[V,D]`, as embeddings are stored: where the two are one, nothing is transposed.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.distributed.sharding import constrain, context_shards, is_sharded, row_shards
from jaxrl_llm.models.kernels import cpu_matmul
from jaxrl_llm.models.layers import soft_cap

REMAINDER = 4  # parts of a chunk that would not be full, of which only those that are needed are computed
# About how many logits each device computes at once, at least one column of the rows: 64 MB in fp32 stay near a CPU's
# caches; accelerators take 1 GB, as each chunk reads the table and adds to its gradient.
LOGITS_IN_FLIGHT = 2**24
LOGITS_ON_ACCELERATORS = 2**28
TOKENS_PER_WORD = 2  # up to which tokens are exchanged rather than a sharded table gathered, see `table_of`
KEPT = 4  # logits of at most this many chunks are kept for the backward pass, which forms others again


def log_sum_squares(hidden, kernel, softcap: float | None = None, count=None, temperature: float = 1.0):
    """`log sum_v p_v^2` `[N,S]` of softmax(logits / temperature), in columns; logits as in `chunked_logps`."""

    table = table_of(hidden, kernel)

    def chunk(columns):
        logps = jax.nn.log_softmax(logits_of(columns(hidden), table, temperature, softcap), axis=-1)
        return (jax.nn.logsumexp(2.0 * logps, axis=-1),)

    return over_chunks(chunk, hidden, table, count)[0][0]


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


class Table(NamedTuple):
    """The head's matrix `[V,D]`, and the names in ACTIVATIONS of the logits' rows and vocabulary."""

    matrix: jax.Array
    rows: str
    vocab: str

    def first(self, words: int) -> "Table":
        """The table of the first words."""
        return self._replace(matrix=self.matrix[:words])


def logits_of(hidden, table: Table, temperature: float, softcap):
    """The logits `[N,s,V]` of the columns, capped softly and divided by the temperature."""
    return soft_cap(products_of(hidden, table), softcap) / temperature


def products_of(hidden, table: Table):
    """The matmul `[N,s,V]` of the columns and the table: the logits, unless these are capped."""
    matrix = table.matrix.astype(hidden.dtype)
    products = jnp.einsum("...d,vd->...v", _flat(hidden), matrix, preferred_element_type=jnp.float32)
    return constrain(products.reshape(*hidden.shape[:-1], -1), table.rows, "positions", table.vocab)


def _flat(x):
    """`[N,s,...]` as `[N*s,...]`, with which matmuls are faster, unless positions are sharded over devices."""
    return x.reshape(-1, x.shape[-1]) if context_shards() == 1 else x


def table_of(hidden, kernel) -> Table:
    """The head's matrix for these hidden states, converted here once, not for every chunk.

    Where the mesh shards its width, either each device gathers it for its own rows, or it takes a part of the
    vocabulary for the rows of all devices that share the parameters. The second way is taken up to twice as many tokens
    as words: it then sends more, but a device holds no whole table, nor its gradient in fp32, which each chunk reads
    and writes. CPUs convert the matrix as they read it: their matmuls have copies of their own.
    """
    rows, vocab = "rows", "vocab"
    if not is_sharded():
        return Table(kernel.T if jax.default_backend() == "cpu" else kernel.T.astype(hidden.dtype), rows, vocab)
    shape = jax.sharding.get_abstract_mesh().shape
    if shape["context"] == 1 and hidden.shape[0] * hidden.shape[1] < TOKENS_PER_WORD * kernel.shape[1] * shape["data"]:
        rows, vocab = "copies", "spread_vocab"
    return Table(constrain(kernel.T.astype(hidden.dtype), vocab, None), rows, vocab)


def columns_at_once(rows: int, vocabulary: int) -> int:
    """The columns of rows whose logits all devices of the mesh that is set compute at once.

    A power of two, which divides the numbers of tokens that are most common.
    """
    mesh = jax.sharding.get_abstract_mesh()
    logits = LOGITS_IN_FLIGHT if jax.default_backend() == "cpu" else LOGITS_ON_ACCELERATORS
    columns = logits * (1 if mesh.empty else mesh.size) / (rows * vocabulary)
    return 2 ** max(round(math.log2(columns)), 0)


def over_chunks(function, hidden, table, count, total=None, filled: bool = False):
    """Scan of `function(columns, total)` over a few columns at a time: its arrays `[N,S,...]`, and the last total.

    `columns(x)` are those columns of an array `[N,S,...]`; without a total the function has one argument. `filled`
    leaves the arrays with the columns that fill up the last chunk.
    """
    rows, length = hidden.shape[0], max(hidden.shape[1], 1)  # one that is padding where rows are one token long
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
    return (found if filled else tuple(x[:, : hidden.shape[1]] for x in found)), total


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
    table = table_of(hidden, kernel)

    def chunk(columns):
        logits = logits_of(columns(hidden), table, options.temperature, options.softcap)
        numbers, _ = _numbers(logits, columns(targets), options.mean_logit, options.smoothing)
        return (*numbers, logits) if keep else numbers

    outputs, _ = over_chunks(chunk, hidden, table, count, filled=keep)
    kept = outputs[-1] if keep else None
    *numbers, normalizer = (x[:, : hidden.shape[1]] for x in (outputs[:-1] if keep else outputs))
    return tuple(numbers), _Residuals(hidden, kernel, targets, numbers[1], normalizer, count, kept)


def _forward_with_gradients(options: _Options, hidden, kernel, targets, slopes, count):
    constant, kl_weights, ref_logps = slopes
    if constant is None:
        few = hidden.shape[1] <= KEPT * columns_at_once(hidden.shape[0], kernel.shape[1])
        return _forward(options, hidden, kernel, targets, count, keep=few)
    table = table_of(hidden, kernel)

    def chunk(columns, d_table):
        h, t = columns(hidden), columns(targets)
        logits = logits_of(h, table, options.temperature, options.softcap)
        (*numbers, _), (shares, total) = _numbers(logits, t, options.mean_logit, options.smoothing)
        slope = columns(constant)
        if kl_weights is not None:
            weights, ref = columns(kl_weights), columns(ref_logps)
            by_logp = jax.grad(lambda logps: kl_estimate(logps, ref, options.kl).sum())(numbers[0])
            slope += jnp.where(weights == 0, 0.0, weights * by_logp)  # which overflows on tokens that count for nothing
        d = _by_logits(options, logits, shares, total, t, slope)
        d_hidden, d_table = by_hidden_and_table(d, h, table, d_table)
        return (*numbers, d_hidden), d_table

    (*numbers, d_hidden), d_table = over_chunks(chunk, hidden, table, count, zero_totals(hidden, table))
    gradients = _Gradients(d_hidden.astype(hidden.dtype), by_kernel(d_table, kernel))
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


def by_hidden_and_table(d, h, table: Table, d_table):
    """The gradient by hidden states, and that by the table added to what it was: see `zero_totals`."""
    parts, d = d_table.shape[:2], d.astype(h.dtype)
    d_hidden = cpu_matmul.matmul(_flat(d), table.matrix).reshape(h.shape)
    if parts == (1, 1):
        return d_hidden, d_table + cpu_matmul.over_rows(_flat(d), _flat(h))
    d, own = (x.reshape(parts[0], -1, parts[1], x.shape[1] // parts[1], x.shape[-1]) for x in (d, h))
    product = jnp.einsum("rncsv,rncsd->rcvd", d, own, preferred_element_type=jnp.float32)
    return d_hidden, constrain(d_table + product, table.rows, "positions", table.vocab, None)


def zero_totals(hidden, table: Table):
    """Zeros `[R,S,V,D]` for the gradient by the table `[V,D]`, one for each shard of rows R and positions S.

    Each device adds up that of its own tokens, and they are summed once, behind the loop over chunks, not in each.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    rows = 1 if mesh.empty else mesh.shape["data"] if table.rows == "copies" else row_shards(mesh)
    rows = 1 if hidden.shape[0] % rows else rows
    zeros = jnp.zeros((rows, context_shards(), *table.matrix.shape), jnp.float32)
    return constrain(zeros, table.rows, "positions", table.vocab, None)


def by_kernel(d_table, kernel):
    """The gradient by the kernel `[D,V]`, of parts `[R,S,V,D]`, sharded as it is."""
    return constrain(d_table.sum((0, 1)).T.astype(kernel.dtype), "width", "vocab")


def gradients_of(by_products, hidden, kernel, table: Table, count):
    """The gradients by hidden states and kernel, of a table with the first words of the kernel or all.

    `by_products(columns, h)` returns the gradient `[N,s,V]` by the matmul of the table with h, the hidden states there.
    """

    def chunk(columns, d_table):
        h = columns(hidden)
        d_hidden, d_table = by_hidden_and_table(by_products(columns, h), h, table, d_table)
        return (d_hidden,), d_table

    (d_hidden,), d_table = over_chunks(chunk, hidden, table, count, zero_totals(hidden, table))
    d_table = jnp.pad(d_table, ((0, 0), (0, 0), (0, kernel.shape[1] - len(table.matrix)), (0, 0)))
    return d_hidden.astype(hidden.dtype), by_kernel(d_table, kernel)


def _backward(options: _Options, residuals: _Residuals | _Gradients, gradients):
    if isinstance(residuals, _Gradients):
        return *residuals, None, None, None
    hidden, kernel, targets, entropy, normalizer, count, kept = residuals
    table = table_of(hidden, kernel)

    def by_products(columns, h):
        logits = logits_of(h, table, options.temperature, options.softcap) if kept is None else columns(kept)
        slope, ent, of_entropy, norm = (columns(x) for x in (gradients[0], entropy, gradients[1], normalizer))
        logp = logits - norm[..., None]
        p = _once(jnp.exp(logp))
        bonus = -of_entropy[..., None] * p * (logp + ent[..., None])  # d entropy = -p (log p + entropy)
        return _by_logits(options, logits, p, jnp.ones_like(norm), columns(targets), slope, bonus)

    return *gradients_of(by_products, hidden, kernel, table, count), None, None, None


_chunked_logps.defvjp(_forward_with_gradients, _backward)
