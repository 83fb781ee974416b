"""Losses of supervised fine-tuning, one function each, from the log-probs of the tokens `[N, T]` to a loss `[N, T]`."""

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
