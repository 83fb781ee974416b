"""Attention of the tokens of a row to the images before them (Llama 3.2 Vision, arXiv 2407.21783, section 7.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.kernels.decode_attention import MASKED
from jaxrl_llm.models.kernels.fused_attention import cudnn_attention, implementation
from jaxrl_llm.models.layers import Linear, RMSNorm
from jaxrl_llm.models.mixers.attention import einsum, in_blocks
from jaxrl_llm.models.mixers.mixer import AttentionInputs, Cacheless, DecodeInputs, NoMixer, Passing


class ImageKeyValues(NamedTuple):
    """Keys and values of the M features of a prompt's images, both `[..., J, M, d]`, and which of them are seen by what
    comes behind the prompt. M is 0 of prompts that were computed where none had an image."""

    k: jax.Array
    v: jax.Array
    seen: jax.Array  # [..., M]


class CrossAttention(Cacheless, nnx.Module):
    """Grouped-query attention to the features of images, behind a gate. A `Mixer`.

    A token that sees no image goes through its layer unchanged, feed-forward included, whose outputs have a gate too.
    The rows of a prompt share its keys and values, and have none of their own.
    """

    path = "cross"
    shares_prefixes = False  # what is read is no token of a segment
    layer_arrays = staticmethod(NoMixer.layer_arrays)
    flops = staticmethod(NoMixer.flops)  # how many images rows have is not known

    def __init__(self, config, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.q = Linear(c.width, c.heads * c.head_dim, c, rngs, name="q")
        self.k = Linear(c.width, c.kv_heads * c.head_dim, c, rngs, name="k")
        self.v = Linear(c.width, c.kv_heads * c.head_dim, c, rngs, name="v")
        self.o = Linear(c.heads * c.head_dim, c.width, c, rngs, name="o")
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c, rngs), RMSNorm(c.head_dim, c, rngs)
        self.attention_gate, self.mlp_gate = (nnx.Param(jnp.zeros((1,), c.param_dtype)) for _ in range(2))

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, Passing]:
        """Output `[N,T,D]`, keys and values of what the last token of each row sees, and the feed-forward's gate."""
        assert inputs.shown is not None
        c, (states, seen) = self.config, inputs.shown
        if not states.shape[1]:
            none = jnp.zeros((len(x), c.kv_heads, 0, c.head_dim), x.dtype)
            cache = ImageKeyValues(none, none, seen[:, -1])
            return jnp.zeros_like(x), Passing(cache, cache, self._gate(seen))
        k, v = (a.reshape(*states.shape[:2], c.kv_heads, -1) for a in (self.k(states), self.v(states)))
        k, v = (constrain(a, "rows", None, "heads", None) for a in (self.k_norm(k), v))
        keys, values = (constrain(a.swapaxes(1, 2), "rows", "heads", None, None) for a in (k, v))
        cache, q = ImageKeyValues(keys, values, seen[:, -1]), self._queries(x)
        if implementation(c, x.shape[1], True) == "cudnn":
            # Where nothing is seen it would divide by zero; what it gives there is left out below.
            out = cudnn_attention(q, k, v, seen | ~seen.any(-1, keepdims=True))
        else:
            out = in_blocks(c, q, k, v, seen)
        return self._output(out, seen, x), Passing(cache, cache, self._gate(seen))

    def decode(self, x, inputs: DecodeInputs, prompt: ImageKeyValues, cache, arrays) -> tuple[jax.Array, Passing]:
        """The next W tokens of each row: output `[G,R*W,D]`, no row cache, and the feed-forward's gate."""
        seen = prompt.seen[:, None]
        if not prompt.k.shape[-2]:
            return jnp.zeros_like(x), Passing((), (), self._gate(seen))
        scores = einsum("gtjrd,gjmd->gjrtm", self._queries(x), prompt.k)
        weights = jax.nn.softmax(jnp.where(prompt.seen[:, None, None, None], scores, MASKED), axis=-1)
        out = einsum("gjrtm,gjmd->gtjrd", weights.astype(x.dtype), prompt.v).astype(x.dtype)
        return self._output(out, seen, x), Passing((), (), self._gate(seen))

    def _gate(self, seen) -> jax.Array:
        """The gate `[..., 1]` of tokens that see `[..., M]`; of no size where there is nothing that could be seen."""
        if not seen.shape[-1]:
            return jnp.zeros((0,))
        return seen.any(-1, keepdims=True) * jnp.tanh(self.mlp_gate[...].astype(jnp.float32))

    def _queries(self, x) -> jax.Array:
        """`[..., t, J, H/J, d]`, scaled."""
        c = self.config
        q = self.q_norm(self.q(x).reshape(*x.shape[:-1], c.heads, c.head_dim)) * c.head_dim**-0.5
        return q.reshape(*x.shape[:-1], c.kv_heads, -1, c.head_dim)

    def _output(self, out, seen, x):
        out = jnp.where(seen.any(-1, keepdims=True), out.reshape(*x.shape[:-1], -1), 0)
        return self.o(out) * jnp.tanh(self.attention_gate[...]).astype(x.dtype)

    @staticmethod
    def prompt_cache(prompt, row, end, size: int) -> ImageKeyValues:
        """The cache of the prompt, of which nothing is changed by what its rows have sampled."""
        return prompt
