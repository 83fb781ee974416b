"""The building blocks of layers: linear maps, norms, the gated feed-forward.

Matmuls run in the compute dtype, norms in fp32.
"""

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.distributed.sharding import columns_are_whole, constrain, context_shards
from jaxrl_llm.models import quantize
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.kernels import stored_matmul
from jaxrl_llm.models.kernels.eight_bit_matmul import dtype_of, eight_bit_matmul

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
XIELU_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")  # in the files
ALPHAS = (math.log(math.expm1(0.8)), math.log(math.expm1(0.3)))  # where those of xIELU start: a = c = 0.8
LARGE = 2**20  # numbers whose bytes take longer than the start of a kernel


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, kernel `[in, out]`.

    A map with a `name`, one of `lora.TARGETS`, may have an adapter, and a kernel that is quantised.
    """

    def __init__(self, d_in: int, d_out: int, config, rngs: nnx.Rngs, bias: bool = False, name: str = ""):
        kernel = jax.random.normal(rngs.params(), (d_in, d_out), config.param_dtype) * config.init_scale
        self.d_in, self.name = d_in, name
        self.quantize, self.qat = (config.quantize, config.qat) if name else ("none", "none")
        self.matmul_dtype = dtype_of(name, d_in, d_out, config.matmul_dtype)
        quantize.check_inputs(d_in, self.qat, "model.qat")
        stored = kernel if self.quantize == "none" else quantize.quantize(kernel, self.quantize)
        self.kernel = nnx.Dict(jax.tree.map(nnx.Param, stored)) if isinstance(stored, dict) else nnx.Param(stored)
        self.bias = nnx.Param(jnp.zeros((d_out,), config.param_dtype)) if bias else None
        target = dict(config.lora_names).get(name, name)
        self.lora = adapter = None if config.lora is None else config.lora.of(target)
        self.lora_a = nnx.Param(lora.init_a(rngs.lora(), d_in, adapter.rank)) if adapter else None
        self.lora_b = nnx.Param(jnp.zeros((adapter.rank, d_out), jnp.float32)) if adapter else None
        start = adapter if adapter and adapter.subtracts else None
        self.start_a = nnx.Param(jnp.zeros((d_in, start.rank), jnp.float32)) if start else None
        self.start_b = nnx.Param(jnp.zeros((start.rank, d_out), jnp.float32)) if start else None
        self.lora_m = nnx.Param(lora.column_norms(kernel)) if adapter and adapter.dora else None
        self.lora_key = nnx.Param(jnp.zeros((2,), jnp.uint32)) if adapter and adapter.dropout else None

    def __call__(self, x):
        # Rows and positions as one dimension: with two, XLA's CPU backend computes the weight gradient 4 times slower.
        # Where both are sharded, one dimension could not be, and devices would compute each other's share.
        rows = x.reshape(-1, x.shape[-1]) if context_shards() == 1 else x
        is_array = isinstance(self.kernel, nnx.Param)
        kernel = self.kernel[...] if is_array else {name: array[...] for name, array in self.kernel.items()}
        if self.matmul_dtype != "auto":
            matmul = functools.partial(eight_bit_matmul, kind=self.matmul_dtype)
        elif self.qat == "none":
            matmul = stored_matmul.frozen_matmul if self.lora is not None or not is_array else stored_matmul.matmul
            matmul = functools.partial(matmul, kind=self.quantize, name=self.name)
        else:
            matmul = functools.partial(stored_matmul.simulated_matmul, kind=self.qat)
        y: jax.Array = matmul(rows, kernel)
        if self.lora is not None and self.lora_a is not None and self.lora_b is not None:
            a, b = self.lora_a[...], self.lora_b[...]
            key_data = None if self.lora_key is None else self.lora_key[...]
            if self.lora_m is None:
                start = [x[...] for x in (self.start_a, self.start_b) if x is not None]
                y += lora.delta(rows, a, b, self.lora, key_data, start)
            else:
                inputs = lora.dropped(rows, self.lora, key_data)
                # Less 1 before they are rounded: near 1 a factor of 16 bits has no more than three digits.
                change = (lora.rescaling(kernel, a, b, self.lora_m[...], self.lora) - 1).astype(y.dtype)
                base: jax.Array = y if key_data is None else matmul(inputs, kernel)
                added = lora.delta(inputs, a, b, self.lora)
                y += added + change * (base + added)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def matrix(self, dtype):
        """The matrix `[in, out]` that inputs are multiplied with, of a map without bias, its adapter in it."""
        if isinstance(self.kernel, nnx.Param) and self.lora_a is None and self.qat == "none":
            return self.kernel[...].astype(dtype)
        return self(jnp.eye(self.d_in, dtype=dtype))


def side_by_side(x, *maps: Linear) -> jax.Array | None:
    """The outputs `[..., out + out + ...]` of maps of the same x by one product, where GPUs gain by it, or None.

    The product reads x once, and that of its backward pass writes the gradient of x once. It wants the matrices in one
    array, which costs nothing where they are converted anyway.
    """
    plain = all(isinstance(each.kernel, nnx.Param) and each.lora is None and each.bias is None for each in maps)
    plain = plain and maps[0].qat == "none" and maps[0].matmul_dtype == "auto" and type(maps[0]) is Linear
    if jax.default_backend() != "gpu" or not plain or x.size < LARGE or not columns_are_whole():
        return None
    kernels = [each.kernel[...] for each in maps]
    if kernels[0].dtype == x.dtype:
        return None
    # Behind a barrier: otherwise XLA converts each matrix apart, and the product's own kernel puts them together.
    joined = jax.lax.optimization_barrier(jnp.concatenate(kernels, axis=1).astype(x.dtype))
    return jnp.matmul(x.reshape(-1, x.shape[-1]), joined).reshape(*x.shape[:-1], -1)


def as_blocks(x, heads: int, size: int, *maps: Linear) -> jax.Array | None:
    """The outputs `[..., blocks, heads, size]` of maps of the same few x, where GPUs gain by it, or None.

    `heads * size` divides the outputs of each map, which follow one another as blocks. XLA makes one product of theirs,
    and one kernel of what is computed of all of them next. It is for decoding: the backward pass would keep matrices of
    8 bits as numbers of x.
    """
    kind, rows = maps[0].quantize, x.reshape(-1, x.shape[-1])
    plain = all(each.lora is None and each.bias is None for each in maps) and kind in ("none", *quantize.BYTES)
    if jax.default_backend() != "gpu" or not plain or x.size >= LARGE or not columns_are_whole():
        return None
    shape = (*x.shape[:-1], -1, heads, size)
    if kind == "none":
        return jnp.concatenate([each(rows) for each in maps], axis=-1).reshape(shape)
    sums = jnp.concatenate([stored_matmul.sums(rows, each.kernel["codes"][...]) for each in maps], axis=-1)
    # Each block's scales are selected: put together they would be an array, written by a kernel of its own.
    scales = [block for each in maps for block in each.kernel["absmax"][...].reshape(-1, heads, size)]
    scales = jnp.select([np.arange(len(scales))[:, None, None] == i for i in range(len(scales))], scales)
    return stored_matmul.scaled(sums.reshape(shape), scales, kind).astype(x.dtype)


def stacked(make: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs) -> Any:
    """The module that `make` returns with parameters `[count, ...]`, each of the `count` drawn from its own stream."""
    return nnx.split_rngs(splits=count)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


class Embed(nnx.Module):
    """Embeddings `[N,T,D]`, in the given dtype, of tokens `[N,T]`: rows of a table `[V,D]`."""

    def __init__(self, config, rngs: nnx.Rngs):
        shape = (config.vocab_size + config.unpredicted, config.outer_width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale)

    def __call__(self, tokens, dtype):
        if context_shards() > 1:  # XLA cannot exchange parts of the width for rows and positions at once
            return constrain(self.weight[...], "vocab", None)[tokens].astype(dtype)
        # Each device looks up its part of the width for the tokens of all devices that share the table: these are
        # fewer bytes than the table, whose gradient then needs no sum over them.
        return constrain(self.weight[tokens].astype(dtype), "copies", None, "width")


class PositionEmbed(nnx.Module):
    """Learned embeddings `[P,D]` of positions. A position behind the last row has that one's: callers refuse it."""

    def __init__(self, config, rngs: nnx.Rngs):
        shape = (config.learned_positions, config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale)
        self.first = config.first_position

    def __call__(self, positions, dtype):
        # A small table, which each device has whole: from parts of its width XLA would gather all rows everywhere.
        return constrain(self.weight[...], None, None)[positions + self.first].astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_halves(activation: Callable[[jax.Array], jax.Array], both) -> jax.Array:
    """`activation(gate) * up` of gate and up in one array `[..., 2C]`; its gradient is one kernel and one array."""
    gate, up = jnp.split(both, 2, axis=-1)
    return activation(gate) * up


def _halves_backward(activation, both, gradient):
    def twice(x):
        return jnp.concatenate([x, x], axis=-1)

    # Both gradients at every place, of which one is taken: XLA would write two arrays, and then put them together.
    gate, up = map(twice, jnp.split(both, 2, axis=-1))
    of_gate, of_up = jax.vjp(lambda gate, up: activation(gate) * up, gate, up)[1](twice(gradient))
    return (jnp.where(np.arange(both.shape[-1]) < both.shape[-1] // 2, of_gate, of_up),)


gated_halves.defvjp(lambda activation, both: (gated_halves(activation, both), both), _halves_backward)


def over_rms(x, eps: float) -> jax.Array:
    """`x / rms(x)` over the last dimension, in fp32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if x.ndim > 3 and x.size > LARGE and jax.default_backend() == "gpu":
        # Norms of heads, which are rotated next. XLA's kernel of a whole norm would write them in fp32, to be read
        # again; of the factors alone it makes a small one, and rotates what the matmul wrote.
        inverse = jax.lax.optimization_barrier(inverse)
    return x32 * inverse


class RMSNorm(nnx.Module):
    """`x / rms(x) * (scale + norm_offset)` over the last dimension, in fp32; `x / rms(x)` unless it is `scaled`.

    With `norm_centred` x is `x - mean(x)`, and it is a layer norm, which may add a bias, `shift` (`norm_bias`). The
    dimensions before the last of a `size` are those of heads with a scale each, and no bias.
    """

    def __init__(self, size: int | tuple[int, ...], config, rngs: nnx.Rngs, scaled: bool = True):
        ones = jnp.full(size, 1.0 - config.norm_offset, config.param_dtype)
        scaled = scaled and config.norm_scale
        self.scale = nnx.Param(ones) if scaled else None
        self.shift = nnx.Param(jnp.zeros_like(ones)) if scaled and config.norm_bias and ones.ndim == 1 else None
        self.eps, self.offset, self.centred = config.norm_eps, config.norm_offset, config.norm_centred

    def __call__(self, x):
        found = over_rms(x - x.astype(jnp.float32).mean(-1, keepdims=True) if self.centred else x, self.eps)
        found = found if self.scale is None else found * self.factors()
        return (found if self.shift is None else found + self.shift[...].astype(jnp.float32)).astype(x.dtype)

    def factors(self) -> jax.Array:
        """The factors of `x / rms(x)`, in fp32: the scale, with the offset that the family adds to it."""
        assert self.scale is not None
        scale = self.scale[...].astype(jnp.float32)
        return scale + self.offset if self.offset else scale


class LayerNorm(nnx.Module):
    """`(x - mean) / std * scale + shift` over the last dimension, in fp32 (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.scale, self.shift = nnx.Param(jnp.ones((size,), dtype)), nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        x32 -= x32.mean(axis=-1, keepdims=True)
        x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32) + self.shift[...].astype(jnp.float32)).astype(x.dtype)


def gated(config, gate, up):
    """The input of a feed-forward's last map: `activation(gate) * up` (arXiv 2002.05202), or without a gate
    `activation(up)`.

    With a `swiglu_limit` both are clipped, and it is `gate * sigmoid(swiglu_alpha * gate) * (up + swiglu_offset)`,
    gpt-oss's; with an alpha of 1 and no offset that is `silu(gate) * up` of the clipped ones. With an `expert_clip` it
    is `clipped` to that.
    """
    if gate is None:
        return ACTIVATIONS[config.activation](up)
    if config.swiglu_limit is None:
        return clipped(ACTIVATIONS[config.activation](gate), up, config.expert_clip)
    gate = jnp.minimum(gate, config.swiglu_limit)
    up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
    return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (up + config.swiglu_offset)


def clipped(gate, up, clip: float):
    """`gate * up` of gates behind their activation, which are at most `clip`, and ups within +- that; of all where it
    is 0."""
    return jnp.minimum(gate, clip) * jnp.clip(up, -clip, clip) if clip else gate * up


class XIELU(nnx.Module):
    """xIELU (arXiv 2411.13010) in fp32: `a x^2 + b x` of x above 0, and `c (expm1(min(x, e)) - x) + b x` of others.

    a is the softplus of a trained number, and c - b that of another. b and e are as in the files: training keeps them.
    """

    def __init__(self, config):
        self.alpha_p, self.alpha_n = (nnx.Param(jnp.full((1,), x, config.param_dtype)) for x in ALPHAS)
        self.beta, self.eps = (nnx.Param(jnp.full((), x, config.param_dtype)) for x in (0.5, -1e-6))

    def __call__(self, x):
        rise, fall = (jax.nn.softplus(a[...].astype(jnp.float32)) for a in (self.alpha_p, self.alpha_n))
        beta, eps = (jax.lax.stop_gradient(a[...]).astype(jnp.float32) for a in (self.beta, self.eps))
        x32 = x.astype(jnp.float32)
        below = (beta + fall) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
        return (jnp.where(x32 > 0, rise * x32 * x32, below) + beta * x32).astype(x.dtype)


def soft_cap(x, cap: float | None):
    """`cap * tanh(x / cap)`, within +-cap; x itself without a cap (arXiv 2408.00118, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (arXiv 2002.05202); `down(activation(up(x)))` without `ffn_gate`."""

    def __init__(self, config, rngs: nnx.Rngs, channels: int | None = None, linear: type[Linear] = Linear):
        channels = config.ffn if channels is None else channels
        self.gate = linear(config.width, channels, config, rngs, config.mlp_bias, "gate") if config.ffn_gate else None
        self.up = linear(config.width, channels, config, rngs, config.mlp_bias, "up")
        self.down = linear(channels, config.width, config, rngs, config.mlp_bias, "down")
        self.activation = XIELU(config) if config.activation == "xielu" else ACTIVATIONS[config.activation]
        self.gate_scale, self.out_scale = config.ffn_scales
        # Standard deviations from the mean behind which that share of a normal distribution is.
        self.cutoff = statistics.NormalDist().inv_cdf(config.ffn_sparsity) if config.ffn_sparsity else None
        self.clipped = config if config.swiglu_everywhere else None
        self.clip = config.ffn_clip

    def __call__(self, x):
        if self.gate is None:
            hidden = self.activation(self.up(x))
        elif self.clip:
            hidden = clipped(self.activation(self.gate(x)), self.up(x), self.clip)
        elif self.clipped is not None:
            hidden = gated(self.clipped, self.gate(x), self.up(x))
        elif self.cutoff is not None:  # of Gemma 3n
            gate = self.gate(x)
            # Of rows that are padding alone gates may be all 0, where the root has no gradient.
            deviation = jnp.sqrt(jnp.maximum(gate.var(-1, keepdims=True), 1e-30))
            least = gate.mean(-1, keepdims=True) + self.cutoff * deviation
            hidden = self.activation(jax.nn.relu(gate - least)) * self.up(x)
        elif self.gate_scale != 1.0:
            hidden = self.activation(self.gate(x) * self.gate_scale) * self.up(x)
        elif (both := side_by_side(x, self.gate, self.up)) is None:
            hidden = self.activation(self.gate(x)) * self.up(x)
        else:
            hidden = gated_halves(self.activation, both)
        out = self.down(constrain(hidden, "rows", "positions", "ffn"))
        return out if self.out_scale == 1.0 else out * self.out_scale
