"""Linear maps with bounds of their inputs and outputs, those of the encoder of Gemma 4's smaller models."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.layers import Linear

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(Linear):
    """A linear map whose inputs and outputs, adapter included, are clipped to bounds, which training keeps."""

    def __init__(self, d_in: int, d_out: int, config, rngs: nnx.Rngs, bias: bool = False, name: str = ""):
        super().__init__(d_in, d_out, config, rngs, bias, name)
        self.input_min, self.input_max, self.output_min, self.output_max = (
            nnx.Param(jnp.full((), bound, config.param_dtype)) for bound in (-jnp.inf, jnp.inf) * 2
        )

    def __call__(self, x):
        low, high, low_out, high_out = (
            jax.lax.stop_gradient(bound[...]).astype(x.dtype)
            for bound in (self.input_min, self.input_max, self.output_min, self.output_max)
        )
        return jnp.clip(super().__call__(jnp.clip(x, low, high)), low_out, high_out)
