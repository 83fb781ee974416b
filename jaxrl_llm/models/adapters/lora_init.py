"""How adapters start: what PEFT's `init_lora_weights` names, from random numbers or from the matrices beside them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import LoraConfig, Params, Path, map_adapted
from jaxrl_llm.models.quantize import as_matrix


def started(params: Params, config: LoraConfig, key: jax.Array, quantized: str = "none") -> Params:
    """The parameters with adapters as `config.init`, one of PEFT's `init_lora_weights`, has them start.

    W `[in, out]` is the matrix of the map, `U S V'` its singular value decomposition, s the scale, r the rank:

        gaussian       A normal with deviation 1/r, B zero
        orthogonal     A = N1 Q1 / 10, B = Q2' N2 / 10 of normal N1 `[in, r/2]`, N2 `[r/2, out]`, and the odd and even
                       rows Q1, Q2 of an orthogonal matrix: A B = 0
        random         A as for kaiming, B uniform between +-1/sqrt(r): PEFT's False
        pissa          A = U_r sqrt(S_r / s), B = sqrt(S_r / s) V_r', the r largest (arXiv 2404.02948)
        pissa_niter_N  likewise, by a random projection and N power iterations (arXiv 0909.4061)
        olora          B = Q_r', A = W Q_r of W' = Q R (arXiv 2406.01775)

    The last three have `start_a` and `start_b` too. All are computed in fp32, of each layer by itself. `quantized` is
    the kind of the kernels in few bits. Raises ConfigError for a rank above the matrix' own.
    """
    count = itertools.count()

    def start(linear: Params, path: Path) -> Params:
        own, own_key = config.at(path), jax.random.fold_in(key, next(count))
        assert own is not None
        a, b = linear["lora_a"], linear["lora_b"]
        if not own.subtracts:
            a, b = _drawn(own, own_key, a, b)
            return {**linear, "lora_a": a, "lora_b": b}
        _check_rank(own, a, b, path)

        def of_layer(layer):
            return _leading(own, layer[0], as_matrix(layer[1], quantized, jnp.float32))

        layers = jax.random.split(own_key, a.shape[:-2]), linear["kernel"]
        # One layer at a time: a decomposition is as large as its matrix, twice.
        a, b = jax.lax.map(of_layer, layers) if a.ndim > 2 else of_layer(layers)
        return {**linear, "lora_a": a, "lora_b": b, "start_a": a, "start_b": b}

    return map_adapted(params, start)


def made_up(
    params: Params,
    config: LoraConfig,
    key: jax.Array,
    quantized: str,
    original: Callable[[str, int | None], np.ndarray],
) -> Params:
    """The parameters with adapters that make up for what the kernels lost in few bits (LoftQ, arXiv 2310.08659).

    Of W `[in, out]`, which `original` returns of a kernel by its path and its layer, and of Q, which is kept: s A B is
    the matrix of rank r that is nearest to W - Q. That is the first round of the paper's alternation, as PEFT's
    `replace_lora_weights_loftq` has it for s = 1: every reader of the quantised model has the same Q. `quantized` is
    the kind of Q. Raises ConfigError for a rank above the matrix' own.
    """
    count = itertools.count()

    @functools.partial(jax.jit, static_argnums=0)
    def of_layer(own: LoraConfig, key, kernel, layer, matrix):
        stored = kernel if layer is None else jax.tree.map(lambda x: x[layer], kernel)
        return _leading(own, key, matrix - as_matrix(stored, quantized, jnp.float32))

    def make_up(linear: Params, path: Path) -> Params:
        kernel = linear["kernel"]
        if not isinstance(kernel, dict):
            return linear
        own, own_key = config.at(path), jax.random.fold_in(key, next(count))
        assert own is not None
        _check_rank(own, linear["lora_a"], linear["lora_b"], path)
        shape = dataclasses.replace(own, init=own.init.replace("loftq", "pissa"))
        name, stacked = "/".join((*path, "kernel")), linear["lora_a"].ndim > 2
        factors = [
            of_layer(shape, jax.random.fold_in(own_key, i or 0), kernel, i, original(name, i))
            for i in (range(len(linear["lora_a"])) if stacked else (None,))
        ]
        a, b = map(jnp.stack, zip(*factors, strict=True)) if stacked else factors[0]
        return {**linear, "lora_a": a, "lora_b": b}

    return map_adapted(params, make_up)


def _check_rank(config: LoraConfig, a, b, path: Sequence[str]) -> None:
    """Raises ConfigError for an adapter of a higher rank than the matrix that it starts from."""
    if config.rank > (most := min(a.shape[-2], b.shape[-1])):
        raise ConfigError(
            f"lora.init is {config.init} and the rank {config.rank}, but {'/'.join(path)} has a matrix of "
            f"{a.shape[-2]} x {b.shape[-1]}, of no higher rank than {most}: set a smaller rank, or leave it out of "
            "lora.targets"
        )


def _drawn(config: LoraConfig, key, a, b) -> tuple[jax.Array, jax.Array]:
    """The factors that `started` draws in place of A and B, of their shapes."""
    rank, keys = config.rank, jax.random.split(key, 3)
    if config.init == "gaussian":
        return jax.random.normal(key, a.shape) / rank, jnp.zeros_like(b)
    if config.init == "random":
        return a, jax.random.uniform(key, b.shape, minval=-1.0, maxval=1.0) / math.sqrt(rank)
    q = jnp.linalg.qr(jax.random.normal(keys[0], (*a.shape[:-2], rank, rank)))[0]
    left = jax.random.normal(keys[1], (*a.shape[:-1], rank // 2))
    right = jax.random.normal(keys[2], (*b.shape[:-2], rank // 2, b.shape[-1]))
    return left @ q[..., 0::2, :] / 10, jnp.swapaxes(q[..., 1::2, :], -1, -2) @ right / 10


@jax.default_matmul_precision("highest")
def _leading(config: LoraConfig, key, matrix) -> tuple[jax.Array, jax.Array]:
    """The factors `[in, r]` and `[r, out]` with which `started` has pissa and olora start, of a matrix `[in, out]`."""
    rank = config.rank
    if config.init == "olora":  # of Q the first columns follow from those of W' alone
        q = jnp.linalg.qr(matrix[:rank].T)[0]
        return matrix @ q, q.T
    basis, iterations = None, config.init.removeprefix("pissa_niter_")
    if iterations != config.init:
        basis = jnp.linalg.qr(matrix @ jax.random.normal(key, (matrix.shape[1], rank)))[0]
        for _ in range(int(iterations)):
            basis = jnp.linalg.qr(matrix @ jnp.linalg.qr(matrix.T @ basis)[0])[0]
    u, s, v = jnp.linalg.svd(matrix if basis is None else basis.T @ matrix, full_matrices=False)
    root = jnp.sqrt(s[:rank] / config.scale)
    return (u if basis is None else basis @ u)[:, :rank] * root, root[:, None] * v[:rank]
