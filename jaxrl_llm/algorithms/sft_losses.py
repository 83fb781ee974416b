"""Losses of supervised fine-tuning, one function each, from the log-probs of the tokens `[N, T]` to a loss `[N, T]`.

One that names an argument `entropy` gets the entropies `[N, T]` of the distributions that predict the tokens, in nats.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float

Array = jax.Array


def nll(logps) -> Array:
    """Returns the negative log-likelihood `[N, T]`: aggregated over tokens, the cross-entropy."""
    return -as_float(logps)


def dft(logps) -> Array:
    """Returns the negative log-likelihood times the token's probability, `-stop(exp(logps)) logps`, `[N, T]`.

    The weight cancels the inverse probability that the gradient of the likelihood has as a policy gradient, so that
    unlikely tokens do not dominate. Source: DFT, arXiv 2508.05629.
    """
    logps = as_float(logps)
    return -jax.lax.stop_gradient(jnp.exp(logps)) * logps


def eaft(logps, entropy, alpha: float = 1.0, scale: float = math.log(20)) -> Array:
    """Returns the negative log-likelihood times a power of the entropy, `-stop(entropy / scale)^alpha logps`, `[N, T]`.

    Shapes: `logps, entropy [N, T]`, in nats. Where the model is sure of another token than the one it is given, the
    token is learned little: such tokens move a model the most, and make it forget. Uncertain ones are learned as
    usual; `scale` is the entropy of weight 1. The paper and axolotl take the entropy of the 20 likeliest tokens, ln 20
    at most, here it is that of all; axolotl divides by nothing, which is `scale=1`.
    Raises ValueError unless `alpha` is 0 or more and `scale` above 0.
    Source: entropy-adaptive fine-tuning, arXiv 2601.02151.
    """
    for name, value, fits, takes in (
        ("alpha", alpha, 0 <= alpha < math.inf, "0 or more"),
        ("scale", scale, 0 < scale < math.inf, "above 0"),
    ):
        if not fits:
            raise ValueError(f"{name} is {value}, but it takes a number {takes}")
    weights = (jnp.maximum(as_float(entropy), 0.0) / scale) ** alpha
    return -jax.lax.stop_gradient(weights) * as_float(logps)
