"""Attention and Mamba-2 side by side as one mixer (Falcon-H1, arXiv 2507.22448): both read the layer's input, and their
outputs are added. What each reads and gives is multiplied by a number (`ModelConfig.parallel_scales`).
"""

import jax
from flax import nnx

from jaxrl_llm.models.mixers.attention import Attention, AttentionArrays
from jaxrl_llm.models.mixers.mamba2 import UnadaptedOutMamba2
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs


class AttentionAndMamba(nnx.Module):
    """Attention and Mamba-2 of the same input. A `Mixer`, whose caches are a pair of theirs."""

    path = "parallel"
    shares_prefixes = False
    layer_arrays = staticmethod(Attention.layer_arrays)

    def __init__(self, config, rngs: nnx.Rngs):
        self.scales = config.parallel_scales
        self.attention = Attention(config, rngs)
        self.mamba = UnadaptedOutMamba2(config, rngs)

    @staticmethod
    def flops(config, tokens, pairs):
        """The operations of attention and of Mamba-2."""
        return Attention.flops(config, tokens, pairs) + UnadaptedOutMamba2.flops(config, tokens, pairs)

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, tuple]:
        """Output `[N,T,D]`, and the caches of rows that are padded on the left."""
        into, out, state_into, state_out = self.scales
        attended, keys_values = self.attention.prefill(x * into, inputs, arrays)
        mixed, state = self.mamba.prefill(x * state_into, inputs, ())
        return attended * out + mixed * state_out, (keys_values, state)

    def decode(self, x, inputs: DecodeInputs, prompt, cache, arrays: AttentionArrays) -> tuple[jax.Array, tuple]:
        """The next W tokens of each row: output `[G,R*W,D]`, and the row caches with them."""
        into, out, state_into, state_out = self.scales
        attended, keys_values = self.attention.decode(x * into, inputs, prompt[0], cache[0], arrays)
        mixed, state = self.mamba.decode(x * state_into, inputs, prompt[1], cache[1], ())
        return attended * out + mixed * state_out, (keys_values, state)

    @staticmethod
    def empty_cache(prompt, rows: int, size: int) -> tuple:
        """Row caches of attention and of Mamba-2, with room for `size` tokens."""
        return Attention.empty_cache(prompt[0], rows, size), UnadaptedOutMamba2.empty_cache(prompt[1], rows, size)

    @staticmethod
    def grow_cache(cache, size: int) -> tuple:
        """The row caches of attention and of Mamba-2 with room for `size` tokens."""
        return Attention.grow_cache(cache[0], size), UnadaptedOutMamba2.grow_cache(cache[1], size)
