"""Mamba-2 as a mixer (arXiv 2405.21060): a state a head that each token decays, adds to and reads.

With x the token's own values, b and c what it writes and reads along, and dt a step that depends on the token:
`S <- exp(a dt) S + dt b x`, and the output is `c S + skip x`. It is a gated delta net whose tokens correct nothing: b
is the key, c the query, x the value, dt the beta. The letters are those of delta_net.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.mixers.delta_net import Chunk, GatedDeltaNet, decays
from jaxrl_llm.models.mixers.short_conv import convolved


def within_chunks(q, k, v, g, beta, segments, before) -> Chunk:
    """The chunks of `delta_net.within_chunks`, whose tokens correct nothing."""
    q, k = (jnp.moveaxis(a, -3, -2) for a in (q, k))  # [...,h,t,d]
    v, g, beta = jnp.moveaxis(v, -4, -2), jnp.moveaxis(g, -3, -1), jnp.moveaxis(beta, -3, -1)  # [...,h,r,t,...]
    decay, from_state = decays(g, segments, before)
    among = jnp.einsum("...td,...sd->...ts", q, k)[..., None, :, :] * decay
    reads, left = (a[..., None] * b[..., None, :, :] for a, b in ((from_state, q), (decay[..., -1, :], k)))
    return Chunk(v * beta[..., None], reads, among, from_state[..., -1:], left)


class Mamba2(GatedDeltaNet):
    """Mamba-2 with a short convolution before it and a gated norm of each group behind. A `Mixer`."""

    path = "mamba"
    within = staticmethod(within_chunks)
    products = 2  # nothing is corrected

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        c, heads = config, config.delta_value_heads
        self.skip = nnx.Param(jnp.ones((heads,), c.param_dtype))
        self.log_decay = nnx.Param(jnp.log(jnp.arange(1, heads + 1)).astype(c.param_dtype))
        self.norm_scale = nnx.Param(jnp.ones((heads * c.delta_value_dim,), c.param_dtype)) if c.mamba_norm else None
        self.conv_bias = nnx.Param(jnp.zeros((self.mixed,), c.param_dtype)) if c.conv_bias else None
        self.out = Linear(heads * c.delta_value_dim, c.width, c, rngs, c.state_bias, self.output_name)

    @staticmethod
    def inputs(heads: int, values: int, size: int) -> int:
        """The numbers of a token that dt is made of."""
        return heads * values

    def _with_skip(self, out, v):
        skip = self.skip[...].astype(jnp.float32).reshape(v.shape[-3], v.shape[-2])
        return out + v * skip[..., None]

    def _add_projections(self, values: int, rngs: nnx.Rngs) -> None:
        c = self.config
        self.into = Linear(c.width, self.mixed + values + c.delta_value_heads, c, rngs, c.state_bias, "into")

    def _project(self, x):
        """Of x `[...,D]`: what is convolved `[...,m]`, the gates z `[...,h,r,v]`, the inputs of dt `[...,h,r]`."""
        c = self.config
        h, r = c.delta_key_heads, c.delta_value_heads // c.delta_key_heads
        values = c.delta_value_heads * c.delta_value_dim
        into = self.into(x)
        if c.mamba_scales:
            sizes = (values, values, h * c.delta_key_dim, h * c.delta_key_dim, c.delta_value_heads)
            into *= np.repeat(np.array(c.mamba_scales, into.dtype), sizes)
        z, mixed, dt = jnp.split(into, [values, values + self.mixed], axis=-1)
        return mixed, z.reshape(*x.shape[:-1], h, r, -1), dt

    def _heads(self, latest, ba):
        """c and b `[...,h,d]`, x `[...,h,r,v]`, log decays and dt `[...,h,r]`, in fp32."""
        c = self.config
        h, r, d = c.delta_key_heads, c.delta_value_heads // c.delta_key_heads, c.delta_key_dim
        mixed = convolved(latest, self._filters())
        mixed = mixed if self.conv_bias is None else mixed + self.conv_bias[...].astype(jnp.float32)
        mixed = jax.nn.silu(mixed.astype(latest[0].dtype)).astype(jnp.float32)
        values = c.delta_value_heads * c.delta_value_dim
        x, b, of_c = jnp.split(mixed, [values, values + h * d], axis=-1)
        step_bias, log_decay = (p[...].astype(jnp.float32).reshape(h, r) for p in (self.step_bias, self.log_decay))
        dt = jax.nn.softplus(ba.astype(jnp.float32).reshape(*ba.shape[:-1], h, r) + step_bias)
        dt = jnp.clip(dt, *c.time_step_limit)
        b, of_c = (a.reshape(*a.shape[:-1], h, d) for a in (b, of_c))
        return of_c, b, x.reshape(*x.shape[:-1], h, r, -1), -jnp.exp(log_decay) * dt, dt

    def _output(self, out, z):
        """The layer's output of the heads' `[...,h,r,v]`: times silu(z), normed by group, and mapped to `[...,D]`."""
        gated = (out * jax.nn.silu(z.astype(jnp.float32))).reshape(*out.shape[:-2], -1)  # [...,h,r*v]
        if self.norm_scale is None:
            return self.out(gated.reshape(*z.shape[:-3], -1).astype(z.dtype))
        normed = gated * jax.lax.rsqrt((gated * gated).mean(-1, keepdims=True) + self.config.norm_eps)
        normed = normed.reshape(*z.shape[:-3], -1) * self.norm_scale[...].astype(jnp.float32)
        return self.out(normed.astype(z.dtype))


class UnadaptedOutMamba2(Mamba2):
    """Mamba-2 whose output map never has an adapter, in families where PEFT refuses one."""

    output_name = "unadapted"  # none of `lora.TARGETS`
