"""What the machine could do: matrix products of a case's own shapes, timed alone, and the rates behind them.

The limit of a case is the time of its products and nothing else: no attention, norms, sampling, optimizer or copies.
Tokens that must be computed count once: a prompt is shared by its completions, and logits are of completion tokens.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import task
from benchmarks.cases import Shape, head_size, is_geometric, lengths, useful_tokens
from benchmarks.meter import report
from benchmarks.task import Task, dtype

MOST_ROWS = {"cpu": 1024, "gpu": 8192}  # of a product that is timed; larger ones take as much longer
REPEATS = 5
Product = tuple[int, int]  # [in, out] of a matrix


def product(dims: str, x, y) -> jax.Array:
    """The einsum; on CPUs with its sums in fp32, which of 16-bit numbers are computed faster than rounded ones."""
    sums = jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)
    return sums if jax.default_backend() == "cpu" else sums.astype(x.dtype)


def fastest(function: Callable, *arguments) -> float:
    """Seconds of a jitted call: the fastest of some, after a first that compiles."""
    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        found.append(time.perf_counter() - began)
    return min(found)


def matrices(shape: Shape) -> tuple[list[Product], Product]:
    """The matrices of one layer, and the head's."""
    c = shape.config
    width, ffn = c["hidden_size"], c["intermediate_size"]
    queries, keys = (head_size(c) * c[f"num_{name}_heads"] for name in ("attention", "key_value"))
    layer = [(width, queries), (width, keys), (width, keys), (queries, width), (width, ffn), (width, ffn), (ffn, width)]
    return layer, (width, c["vocab_size"])


def drawn(size: tuple[int, ...]) -> jax.Array:
    """Random numbers of the type that is computed in: with equal ones a GPU takes less power, and runs faster."""
    return 0.01 * jax.random.normal(jax.random.key(0), size, dtype())


def matrix_rate() -> float:
    """Floating point operations per second of the best square product."""
    rates = []
    for n in (1024, 2048) if jax.default_backend() == "cpu" else (4096, 8192):
        x = drawn((n, n))
        rates.append(2 * n**3 / fastest(jax.jit(functools.partial(product, "ab,bc->ac")), x, x))
    return max(rates)


def bandwidth() -> float:
    """Bytes per second that a sum reads from memory."""
    x = jnp.ones(2 ** (27 if jax.default_backend() == "cpu" else 30), jnp.float32)
    return x.nbytes / fastest(jax.jit(jnp.sum), x)


def decode_seconds(shape: Shape, rows: list[int]) -> dict[int, float]:
    """Seconds of the products of one decode step, for each number of rows: every matrix is its own, as in a model."""
    layer, head = matrices(shape)
    sizes = [*layer * shape.config["num_hidden_layers"]]
    weights = [drawn(size) for size in sizes]
    found = {}
    for count in rows:
        inputs = {size: drawn((count, size)) for size in {a for a, _ in [*layer, head]}}
        seconds = fastest(_all_products, inputs, weights)
        kernel = drawn(head)
        x = inputs[head[0]]
        found[count] = seconds + min(fastest(_logits, x, kernel), fastest(_transposed, x, kernel.T.copy()))
    return found


@jax.jit
def _all_products(inputs, weights):
    """One product after the other, as layers are."""
    total = jnp.zeros((), jnp.float32)
    for weight in weights:
        x, total = jax.lax.optimization_barrier((inputs[weight.shape[0]], total))
        y = jax.lax.optimization_barrier(product("ni,io->no", x, weight))
        total += y[0, 0].astype(jnp.float32)
    return total


@jax.jit
def _logits(x, kernel):
    return product("nd,dv->nv", x, kernel)


@jax.jit
def _transposed(x, kernel):
    return product("nd,vd->nv", x, kernel)


def decode_bytes(case: str, shape: Shape) -> float:
    """Bytes that a rollout's decode steps must read: matrices, the head's too, and keys and values, once a step.

    A prompt's are read once for all of its rows, a row's own as far as they are there.
    """
    layer, head = matrices(shape)
    numbers = sum(a * b for a, b in layer) * shape.config["num_hidden_layers"] + head[0] * head[1]
    token = 2 * head_size(shape.config) * shape.config["num_key_value_heads"] * shape.config["num_hidden_layers"]
    ends, read = row_ends(case, shape), 0
    for step in range(1, ends.max()):  # the prefill gives the first token
        rows = ends > step
        prompts = rows.reshape(shape.prompts, shape.group).any(axis=1).sum()
        read += numbers + token * (prompts * shape.prompt + rows.sum() * step)
    return float(read * jnp.dtype(dtype()).itemsize)


def row_ends(case: str, shape: Shape) -> np.ndarray:
    """Tokens of each completion of a case, `[N]`."""
    return lengths(shape) if is_geometric(case) else np.full(shape.completions, shape.new)


def product_seconds(size: Product, rows: int, products: int) -> float:
    """Seconds of `rows` rows through a matrix; of 2 `products`, of the rows' gradients too; of 3, of the matrix's."""
    count = min(rows, MOST_ROWS[jax.default_backend()])
    x, w, y = (drawn((count, size[0])), drawn(size), drawn((count, size[1])))
    seconds = fastest(_logits, x, w)
    if products > 1:
        seconds += fastest(_transposed, y, w)
    if products > 2:
        seconds += fastest(jax.jit(functools.partial(product, "dn,nv->dv")), x.T.copy(), y)
    return seconds * rows / count


def pass_seconds(shape: Shape, tokens: int, predicted: int, products: int) -> float:
    """Seconds of the products of a pass over `tokens`, `predicted` of which have logits."""
    layer, head = matrices(shape)
    each = {size: product_seconds(size, tokens, products) for size in set(layer)}
    seconds = shape.config["num_hidden_layers"] * sum(each[size] for size in layer)
    return seconds + product_seconds(head, predicted, products)


def pass_flops(shape: Shape, tokens: int, predicted: int) -> float:
    """Floating point operations of the products of a forward pass; with gradients two or three times as many."""
    layer, head = matrices(shape)
    each = sum(a * b for a, b in layer) * shape.config["num_hidden_layers"]
    return 2.0 * (each * tokens + head[0] * head[1] * predicted)


def update_tokens(case: str, shape: Shape) -> tuple[int, int]:
    """Tokens that an update computes at least, and those among them that it predicts."""
    if case == "sft":
        return shape.rows * shape.row, shape.rows * shape.row
    if case == "dpo":
        answers = 2 * shape.pairs * (shape.row - shape.prompt)
        return shape.pairs * shape.prompt + answers, answers
    useful = useful_tokens(case, shape)
    return shape.prompts * shape.prompt + useful, useful


def rollout_seconds(case: str, shape: Shape) -> float:
    """Seconds of the products of a rollout in which rows leave when they end."""
    ends = row_ends(case, shape)
    alive = [int((ends > step).sum()) for step in range(1, ends.max())]  # the prefill gives the first token
    # Powers of two from the last one below the fewest rows on: between two sizes a line is drawn.
    powers = {2**i for i in range(min(alive).bit_length() - 1, max(alive).bit_length())}
    sizes = sorted({size for size in powers if size <= max(alive)} | {max(alive)})
    measured = decode_seconds(shape, sizes)
    steps = np.interp(alive, list(measured), list(measured.values()))
    return float(steps.sum()) + pass_seconds(shape, shape.prompts * shape.prompt, shape.prompts, products=1)


def limit(job: Task) -> dict[str, Any]:
    """The limit of a case by phase, and the rates of the machine."""
    case, shape = job.case, job.shape
    found: dict[str, Any] = {"matrix_rate": matrix_rate(), "bandwidth": bandwidth()}
    found["device"] = jax.devices()[0].device_kind
    if not case.startswith("rollout"):
        tokens = update_tokens(case, shape)
        products = 2 if shape.lora else 3  # frozen matrices have no gradients; those of adapters are small
        found["time/update"] = pass_seconds(shape, *tokens, products)
        referred = case in ("dpo", "grpo_kl")
        found["update_flops"] = (products + referred) * pass_flops(shape, *tokens)  # the reference's pass included
        if referred:
            found["time/logps"] = pass_seconds(shape, *tokens, products=1)
    if case.startswith(("rollout", "grpo")):
        found["time/rollout"], found["decode_bytes"] = rollout_seconds(case, shape), decode_bytes(case, shape)
    return {"seconds": sum(x for name, x in found.items() if name.startswith("time/")), **found}


def main(argv: list[str]) -> None:
    """The command line: the limit of one task."""
    report(limit(task.read(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])
