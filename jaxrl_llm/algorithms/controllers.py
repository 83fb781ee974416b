"""Which tokens carry high entropy, and the controller of an adaptive entropy bonus."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, as_mask

Array = jax.Array


def top_entropy_mask(entropy, mask, quantile) -> Array:
    """Returns booleans `[N, T]`, true on the masked tokens in the top `quantile` share of entropies.

    Shapes: `entropy, mask [N, T]`. Keeps `entropy >= q` with q the (1 - quantile) quantile, linearly interpolated, over
    all masked tokens of the batch; `quantile=0.2` keeps the top fifth, 1.0 keeps all. Multiply the policy loss by it;
    the loss weights keep counting every token, and the KL term is not masked. Source: arXiv 2506.01939.
    """
    entropy = jax.lax.stop_gradient(as_float(entropy))
    mask = as_mask(mask, entropy.shape)
    ordered = jnp.sort(jnp.where(mask, entropy, jnp.inf).reshape(-1))
    position = jnp.maximum(mask.sum() - 1, 0) * as_float(1.0 - quantile)
    below = jnp.floor(position).astype(jnp.int32)
    above = jnp.ceil(position).astype(jnp.int32)
    low, high = ordered[below], ordered[above]
    threshold = jnp.where(low == high, low, low + (position - below) * (high - low))
    return mask & (entropy >= threshold)


@dataclass(frozen=True)
class AdaptiveEntropy:
    """An entropy coefficient that rises by `delta` while the entropy is at or below `target` and falls otherwise.

    The state is `coef` and `last`, the entropy (nats per token) measured at the previous update; both are scalars, so a
    checkpoint of this pytree restores the controller. `last` starts at infinity: no bonus before the first measurement.
    Source: Skywork-OR1, arXiv 2505.22312.
    """

    coef: float | Array = 0.0
    last: float | Array = float("inf")
    target: float = 0.2
    delta: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0

    @property
    def applied(self) -> Array:
        """Returns the coefficient of this step's bonus: `coef` when the last entropy was at or below target, else 0."""
        return jnp.where(as_float(self.last) <= self.target, as_float(self.coef), 0.0)

    def update(self, entropy) -> "AdaptiveEntropy":
        """Returns the controller after an optimizer step whose mean entropy per token was `entropy`."""
        entropy = as_float(entropy)
        step = jnp.where(entropy <= self.target, self.delta, -self.delta)
        return replace(self, coef=jnp.clip(self.coef + step, self.minimum, self.maximum), last=entropy)


jax.tree_util.register_dataclass(
    AdaptiveEntropy, data_fields=["coef", "last"], meta_fields=["target", "delta", "minimum", "maximum"]
)
