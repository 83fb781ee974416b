"""The losses that clients of Tinker name: each a number per token, added up over all tokens of a request.

    loss = f(logps, inputs, options)      # [N,T] each

`inputs` are the arrays that came with the rows, `options` the numbers of `loss_fn_config`. Thresholds bound the ratio
itself; an input of their name has one for each token. Formulas: tinker-docs.thinkingmachines.ai/losses.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.aggregation import masked_mean

Arrays = Mapping[str, jax.Array]
Options = Mapping[str, Any]
POLICY = ("target_tokens", "logprobs", "advantages")
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


def cross_entropy(logps: jax.Array, inputs: Arrays, options: Options) -> jax.Array:
    """`-weights logps`, of targets `[N,T]` or, for distributions, `[N,T,K]`."""
    return -inputs["weights"] * logps


def importance_sampling(logps: jax.Array, inputs: Arrays, options: Options) -> jax.Array:
    """`-r A`, r = exp(logps - logprobs)."""
    return -jnp.exp(logps - inputs["logprobs"]) * inputs["advantages"]


def ppo(logps: jax.Array, inputs: Arrays, options: Options) -> jax.Array:
    """`-min(r A, clip(r, low, high) A)` (arXiv 1707.06347)."""
    low, high = (inputs.get(name, options[name]) for name in THRESHOLDS)
    return policy_losses.ppo_clip(logps, inputs["logprobs"], inputs["advantages"], 1.0 - low, high - 1.0)[0]


def cispo(logps: jax.Array, inputs: Arrays, options: Options) -> jax.Array:
    """`-stop(clip(r, low, high)) A logps` (arXiv 2506.13585)."""
    low, high = (inputs.get(name, options[name]) for name in THRESHOLDS)
    return policy_losses.cispo(logps, inputs["logprobs"], inputs["advantages"], None, high, minimum=low)[0]


def dro(logps: jax.Array, inputs: Arrays, options: Options) -> jax.Array:
    """`-(A logps - beta/2 (logps - logprobs)^2)` (arXiv 2405.19107)."""
    return policy_losses.dro(logps, inputs["logprobs"], inputs["advantages"], beta=options["beta"])


def gspo(logps: jax.Array, inputs: Arrays, options: Options) -> jax.Array:
    """`-min(s A, clip(s, low, high) A)`: s is the geometric mean of r over the tokens of `sequence_ratio_mask`, with
    the gradient of each token's own log-prob (GSPO-token, arXiv 2507.18071)."""
    low, high = (inputs.get(name, options[name]) for name in THRESHOLDS)
    held = jax.lax.stop_gradient(logps)
    mean = masked_mean(held - inputs["logprobs"], inputs["sequence_ratio_mask"] != 0, axis=-1, keepdims=True)
    ratio, advantages = jnp.exp(mean + logps - held), inputs["advantages"]
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)


class Loss(NamedTuple):
    """A loss, the inputs that it needs and those that it may have, and its options with their defaults."""

    of: Callable[[jax.Array, Arrays, Options], jax.Array]
    needs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: Mapping[str, float] = {}


LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("target_tokens",), ("weights",)),
    "importance_sampling": Loss(importance_sampling, POLICY),
    "ppo": Loss(ppo, POLICY, THRESHOLDS, dict(zip(THRESHOLDS, (0.8, 1.2), strict=True))),
    "cispo": Loss(cispo, POLICY, THRESHOLDS, dict(zip(THRESHOLDS, (0.0, 4.0), strict=True))),
    "dro": Loss(dro, POLICY, (), {"beta": 0.1}),
    "gspo": Loss(gspo, (*POLICY, "sequence_ratio_mask"), THRESHOLDS, dict(zip(THRESHOLDS, (0.8, 1.2), strict=True))),
}
