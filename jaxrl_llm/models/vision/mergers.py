"""Mergers, from squares of patches of images of any size to embeddings of the decoder."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.layers import FeedForward, LayerNorm, Linear, RMSNorm
from jaxrl_llm.models.vision.layers import norm_of


class Merger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches: two linear maps behind a norm, that of each patch or, with
    `whole`, of the square. That of Qwen's models."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs, whole: bool = False):
        """`config` is that of the encoder, a PatchRowsConfig."""
        self.whole, square = whole, config.width * config.merge**2
        names = ("fc1", "fc2") if config.merger_adapters else ("", "")
        self.norm = norm_of(config.norm, square if whole else config.width, config.norm_eps, net, rngs)
        self.fc1 = Linear(square, square, net, rngs, True, names[0])
        self.fc2 = Linear(square, size, net, rngs, True, names[1])
        self.square = square

    def __call__(self, x):
        x = x if self.whole else self.norm(x)
        x = x.reshape(len(x), -1, self.square)
        x = self.norm(x) if self.whole else x
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class ConvolvedMerger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches, those of GLM-4.1V: a convolution of each square behind a norm
    of its patches, a linear map with a norm and GELU, and a gated feed-forward."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs):
        self.norm = norm_of(config.norm, config.width, config.norm_eps, net, rngs)
        # Columns before rows of patches: a convolution's weights in files, transposed.
        shape = (config.merge, config.merge, config.width, size)
        kernel = jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale
        self.downsample = nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(jnp.zeros((size,), net.param_dtype)))
        self.proj = Linear(size, size, net, rngs)
        self.proj_norm = LayerNorm(size, 1e-5, net.param_dtype)
        own = dataclasses.replace(net, width=size, ffn=config.merger_ffn, mlp_bias=False)
        self.mlp = FeedForward(own, rngs)

    def __call__(self, x):
        columns, rows, width, size = self.downsample["kernel"].shape
        kernel = self.downsample["kernel"][...].swapaxes(0, 1).reshape(-1, size).astype(x.dtype)
        x = self.norm(x).reshape(len(x), -1, rows * columns * width) @ kernel
        x = self.proj(x + self.downsample["bias"][...].astype(x.dtype))
        return self.mlp(jax.nn.gelu(self.proj_norm(x), approximate=False))


class ReducedMerger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches, those of Mistral Small 3.1: a linear map of each square to
    the width of a patch behind a norm of its patches, and two more to the decoder's."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs):
        self.patches = config.merge**2
        self.norm = RMSNorm(config.width, net, rngs)  # with the decoder's epsilon
        self.proj = Linear(config.width * self.patches, config.width, net, rngs)
        self.fc1 = Linear(config.width, size, net, rngs, config.merger_bias)
        self.fc2 = Linear(size, size, net, rngs, config.merger_bias)

    def __call__(self, x):
        rows, patches, width = x.shape
        squares = self.norm(x).reshape(rows, -1, self.patches, width)
        squares = squares.swapaxes(2, 3).reshape(rows, patches // self.patches, -1)  # a number of all patches, the next
        return self.fc2(jax.nn.gelu(self.fc1(self.proj(squares)), approximate=False))


class TwoMapsMerger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches, those of LFM2-VL: two linear maps with GELU between them, of
    each square, mostly behind a norm of it, or in LFM3-VL of its patches."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs):
        self.square = config.width * config.merge**2
        self.each = config.merger_norm == "patch"
        normed, eps = (config.width, 1e-6) if self.each else (self.square, 1e-5)
        self.norm = LayerNorm(normed, eps, net.param_dtype) if config.merger_norm else None
        self.fc1 = Linear(self.square, config.merger_ffn, net, rngs, config.merger_bias)
        self.fc2 = Linear(config.merger_ffn, size, net, rngs, config.merger_bias)

    def __call__(self, x):
        x = self.norm(x) if self.norm is not None and self.each else x
        x = x.reshape(len(x), -1, self.square)
        x = self.norm(x) if self.norm is not None and not self.each else x
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class FourMapsMerger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches, those of MiniMax-M3: two linear maps with GELU between them,
    of each patch to `size` numbers, and two more of the square of these."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs):
        self.square = size * config.merge**2
        self.fc1 = Linear(config.width, config.merger_ffn, net, rngs, True)
        self.fc2 = Linear(config.merger_ffn, size, net, rngs, True)
        self.fc3 = Linear(self.square, config.merger_ffn, net, rngs, True)
        self.fc4 = Linear(config.merger_ffn, size, net, rngs, True)

    def __call__(self, x):
        x = self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))
        x = x.reshape(len(x), -1, self.square)
        return self.fc4(jax.nn.gelu(self.fc3(x), approximate=False))


class WordMerger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches, those of Ovis2 (arXiv 2405.20797): the mean embedding of
    visual words under a distribution that a linear map and a norm make of each square. The last words mark images."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs, marks: int = 5):
        self.square, self.known = config.width * config.merge**2, config.merger_ffn - marks
        self.proj = Linear(self.square, self.known, net, rngs)
        self.norm = LayerNorm(self.known, 1e-5, net.param_dtype)
        words = jax.random.normal(rngs.params(), (config.merger_ffn, size), net.param_dtype)
        self.words = nnx.Param(words * net.init_scale)

    def __call__(self, x):
        shares = jax.nn.softmax(self.norm(self.proj(x.reshape(len(x), -1, self.square))).astype(jnp.float32))
        return shares.astype(x.dtype) @ jax.lax.slice_in_dim(self.words[...], 0, self.known).astype(x.dtype)

    @property
    def marks(self) -> jax.Array:
        """The embeddings `[marks,D]` of the words that mark images."""
        return jax.lax.slice_in_dim(self.words[...], self.known, None)


class PooledMerger(nnx.Module):
    """Embeddings of `size` numbers of squares of patches, those of Gemma 4: a linear map of each square's mean times
    `sqrt(D)`, which may be standardised, behind a norm without a scale. Training keeps the numbers that standardise."""

    def __init__(self, config: Any, size: int, net: Any, rngs: nnx.Rngs):
        self.patches, width = config.merge**2, config.width
        self.std_bias = nnx.Param(jnp.zeros((width,), net.param_dtype)) if config.standardized else None
        self.std_scale = nnx.Param(jnp.ones((width,), net.param_dtype)) if config.standardized else None
        self.norm = RMSNorm(width, dataclasses.replace(net, norm_eps=config.norm_eps), rngs, scaled=False)
        self.proj = Linear(width, size, net, rngs)

    def __call__(self, x):
        rows, patches, width = x.shape
        squares = x.astype(jnp.float32).reshape(rows, patches // self.patches, self.patches, width)
        means = squares.mean(axis=2) * width**0.5
        if self.std_bias is not None and self.std_scale is not None:
            bias, scale = (jax.lax.stop_gradient(a[...]).astype(jnp.float32) for a in (self.std_bias, self.std_scale))
            means = (means - bias) * scale
        return self.proj(self.norm(means.astype(x.dtype)))


MERGERS = {
    "stacked": Merger,
    "convolved": ConvolvedMerger,
    "reduced": ReducedMerger,
    "two_maps": TwoMapsMerger,
    "four_maps": FourMapsMerger,
    "words": WordMerger,
    "pooled": PooledMerger,
}
