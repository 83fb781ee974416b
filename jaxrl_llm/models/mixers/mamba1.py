"""Mamba-1 as a mixer (arXiv 2312.00752): a state a channel, whose numbers decay at rates of their own.

With x the value of a channel, b and c what its token writes and reads along, and dt a step of the channel:
`S <- exp(a dt) S + dt b x`, and the output is `c S + skip x`. b, c and dt are maps of what the convolution gives. In
the letters of delta_net.py b is the key and c the query of one key head, and a channel is a value head of one number.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import Linear, RMSNorm, over_rms
from jaxrl_llm.models.mixers.delta_net import CHUNK, Chunk
from jaxrl_llm.models.mixers.kimi_delta import behind, decayed
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.mixers.short_conv import NO_SEGMENT, convolved

UNROLLED = 4  # tokens in a turn of the loop over a chunk


def within_segment(q, k, v, g, beta, segments, before) -> Chunk:
    """The chunks of `kimi_delta.within_chunks` whose tokens correct nothing, and are of the segment of their state."""
    q, k = (jnp.moveaxis(a, -3, -2)[..., None, :, :] for a in (q, k))  # [...,h,1,t,d]
    v, g, beta = jnp.moveaxis(v, -4, -2), jnp.moveaxis(g, -4, -2), jnp.moveaxis(beta, -3, -1)  # [...,h,r,t,...]
    (among,) = decayed((q,), k, g)
    from_state = jnp.exp(jnp.cumsum(g, axis=-2))
    return Chunk(v * beta[..., None], from_state * q, jnp.tril(among), from_state[..., -1, :], jnp.exp(behind(g)) * k)


def scanned(c, b, x, dt, rates, segments, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """The outputs `[N,T,r]` that tokens read of their states, and the states `[N,r,d]` of the last segments.

    c, b `[N,T,d]`, x, dt `[N,T,r]`, rates `[r,d]`, which are negative, segments `[N,T]`. Tokens go one after another: a
    number of a state decays like no other, so that no product of matrices stands for many of them. The backward pass
    has the states of one chunk at a time, and computes them again from the one before it.
    """
    rows, length = segments.shape
    chunk = min(chunk, length)
    extra = -length % chunk  # before the row, so that the last state is that of its last token

    def by_token(a):  # [chunks,tokens,N,...]
        a = jnp.pad(a, ((0, 0), (extra, 0), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a, 1, 0).reshape(-1, chunk, rows, *a.shape[2:])

    def step(state, token):
        c, b, added, dt, begins = token
        kept = jnp.where(begins[:, None, None], 0, jnp.exp(dt[..., None] * rates))
        state = state * kept + added[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    def through(state, tokens):
        return jax.lax.scan(step, state, tokens, unroll=min(chunk, UNROLLED))

    begins = jnp.diff(segments, axis=1, prepend=NO_SEGMENT) != 0
    first = constrain(jnp.zeros((rows, *rates.shape), jnp.float32), "rows", "heads", None)
    tokens = tuple(by_token(a) for a in (c, b, dt * x, dt, begins))
    last, out = jax.lax.scan(jax.checkpoint(through, prevent_cse=False), first, tokens)
    return jnp.moveaxis(out.reshape(-1, *out.shape[2:])[extra:], 0, 1), last


class Mamba1(Mamba2):
    """Mamba-1 with a short convolution before it and a gate behind. A `Mixer`.

    Its last map never has an adapter, which PEFT refuses, nor has the one of the steps, whose matrix transformers
    multiplies with past any adapter.
    """

    within = staticmethod(within_segment)
    output_name = "unadapted"  # none of `lora.TARGETS`

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        self.mixed = channels = c.delta_value_heads
        self.into = Linear(c.width, 2 * channels, c, rngs, c.state_bias, "into")
        self._add_filters(rngs)
        self.conv_bias = nnx.Param(jnp.zeros((channels,), c.param_dtype)) if c.conv_bias else None
        self.x = Linear(channels, c.step_rank + 2 * c.delta_key_dim, c, rngs, name="x")
        self.dt = Linear(c.step_rank, channels, c, rngs)
        self.step_bias = nnx.Param(jnp.ones((channels,), c.param_dtype))
        rates = jnp.tile(jnp.arange(1, c.delta_key_dim + 1), (channels, 1))
        self.log_rates = nnx.Param(jnp.log(rates).astype(c.param_dtype))
        self.skip = nnx.Param(jnp.ones((channels,), c.param_dtype))
        self.norm_scale = None
        self.out = Linear(channels, c.width, c, rngs, c.state_bias, self.output_name)

    @staticmethod
    def inputs(heads: int, values: int, size: int) -> int:
        """No numbers of a token: dt is made of what is convolved."""
        return 0

    @staticmethod
    def kept_size(size: int) -> int:
        """The decays of a channel: one for each number of its state."""
        return size

    def _project(self, x):
        """Of x `[...,D]`: what is convolved `[...,r]`, the gates z `[...,1,r,1]`, and no inputs of dt `[...,0]`."""
        mixed, z = jnp.split(self.into(x), 2, axis=-1)
        return mixed, z[..., None, :, None], mixed[..., :0]

    def _heads(self, latest, ba):
        """c and b `[...,1,d]`, x `[...,1,r,1]`, log decays `[...,1,r,d]` and dt `[...,1,r]`, in fp32."""
        config = self.config
        mixed = convolved(latest, self._filters())
        mixed = mixed if self.conv_bias is None else mixed + self.conv_bias[...].astype(jnp.float32)
        x = jax.nn.silu(mixed.astype(latest[0].dtype))
        rank, size = config.step_rank, config.delta_key_dim
        steps, b, c = self._normed(*jnp.split(self.x(x), [rank, rank + size], axis=-1))
        dt = jax.nn.softplus(self.dt(steps).astype(jnp.float32) + self.step_bias[...].astype(jnp.float32))
        b, c, x = (a.astype(jnp.float32) for a in (b, c, x))
        g = dt[..., None] * self._rates()
        return c[..., None, :], b[..., None, :], x[..., None, :, None], g[..., None, :, :], dt[..., None, :]

    def _normed(self, steps, b, c):
        eps = self.config.state_norm_eps
        return (steps, b, c) if eps is None else (over_rms(a, eps).astype(a.dtype) for a in (steps, b, c))

    def _rates(self):
        return -jnp.exp(self.log_rates[...].astype(jnp.float32))

    def _through_rows(self, heads, segments):
        c, b, x, _, dt = heads  # decays are formed token by token: those of whole rows are d times as large as x
        out, state = scanned(c[..., 0, :], b[..., 0, :], x[..., 0, :, 0], dt[..., 0, :], self._rates(), segments)
        return out[..., None, :, None], state[:, None, :, :, None]


class NormedMamba1(Mamba1):
    """Mamba-1 with a norm of b, of c and of what dt is made of (Jamba). PEFT has adapters of its last map."""

    output_name = "out"

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        sizes = (config.step_rank, config.delta_key_dim, config.delta_key_dim)
        self.dt_norm, self.b_norm, self.c_norm = (RMSNorm(size, config, rngs) for size in sizes)

    def _normed(self, steps, b, c):
        return self.dt_norm(steps), self.b_norm(b), self.c_norm(c)
