"""The building blocks that encoders of images share."""

import dataclasses
from typing import Any, Literal

import jax
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm

CUDNN_HEAD = 128  # the largest heads that cuDNN takes on every GPU


def norm_of(kind: str, size: int, eps: float, net: Any, rngs: nnx.Rngs) -> Any:
    """A norm over `size` numbers, of the kind `layer` or `rms`."""
    if kind == "layer":
        return LayerNorm(size, eps, net.param_dtype)
    return RMSNorm(size, dataclasses.replace(net, norm_eps=eps, norm_offset=0.0), rngs)


def by_head(x, heads: int) -> jax.Array:
    """x `[N,P,D]` as `[N,P,heads,D/heads]`, sharded over heads where the mesh shards them."""
    return constrain(x.reshape(*x.shape[:2], heads, -1), "rows", None, "heads", None)


def attention_kernel(q, kind: str) -> Literal["cudnn", "xla"]:
    """The implementation of attention of queries `[...,d]`, where `kind` is that of the model (`ModelConfig`)."""
    size = q.shape[-1]
    fused = jax.default_backend() == "gpu" and q.dtype.itemsize == 2 and size % 8 == 0 and size <= CUDNN_HEAD
    return "cudnn" if fused and kind != "xla" else "xla"


class PatchFeedForward(nnx.Module):
    """The feed-forward of an encoder's layer, with biases and no gate: `fc2(activation(fc1(x)))`."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        """`config` is that of an encoder."""
        self.fc1 = Linear(config.width, config.ffn, net, rngs, True, "fc1")
        self.fc2 = Linear(config.ffn, config.width, net, rngs, True, "fc2")
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x):
        return self.fc2(constrain(self.activation(self.fc1(x)), "rows", None, "ffn"))
