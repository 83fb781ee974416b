"""What moves while a run trains: the controllers of its coefficients, and the running mean of its rewards."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float
from jaxrl_llm.algorithms.kl import AdaptiveKL, FixedKL

Array = jax.Array


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


@dataclass(frozen=True)
class RunningMean:
    """The mean of everything seen so far, as the reward shift of `preference_losses.bco_pair` needs it.

    The state is two scalars, so a checkpoint of this pytree restores it.
    """

    mean: float | Array = 0.0
    count: float | Array = 0.0

    def update(self, values) -> "RunningMean":
        """Returns the running mean after also seeing `values` (any shape).

        Those that are not finite are left out, as an update that they spoil is: a mean with one of them stays one.
        """
        values = as_float(jax.lax.stop_gradient(values))
        finite = jnp.isfinite(values)
        count = as_float(self.count + finite.sum())
        change = jnp.where(finite, values - self.mean, 0.0).sum() / jnp.maximum(count, 1.0)
        return RunningMean(self.mean + change, count)


jax.tree_util.register_dataclass(RunningMean, data_fields=["mean", "count"], meta_fields=[])


@dataclass(frozen=True)
class Controllers:
    """The coefficients of the KL term and of the entropy bonus between the steps of a run.

    Each method returns new controllers, whose state is plain numbers on the host.
    """

    kl: FixedKL | AdaptiveKL
    entropy: AdaptiveEntropy | None = None  # None: the coefficient stays as it is set

    def after_rollouts(self, kl, rows: int) -> "Controllers":
        """The controllers after a batch of `rows` completions of mean KL `kl`, which only an adaptive one reads.

        A KL of NaN, that of rows without a token in the mask, moves nothing.
        """
        if not isinstance(self.kl, AdaptiveKL) or math.isnan(kl):
            return self
        return replace(self, kl=_as_numbers(self.kl.update(float(kl), rows)))

    def after_updates(self, entropy: float) -> "Controllers":
        """The controllers after a step's updates, whose policy has this mean entropy (nats per token)."""
        return self if self.entropy is None else replace(self, entropy=_as_numbers(self.entropy.update(entropy)))

    @property
    def is_kl_adaptive(self) -> bool:
        """True where the KL coefficient moves."""
        return isinstance(self.kl, AdaptiveKL)

    def metrics(self) -> dict[str, float]:
        """The coefficients that move, by the names of their metrics."""
        kl = {"kl_coef": float(self.kl.coef)} if self.is_kl_adaptive else {}
        return kl | ({} if self.entropy is None else {"entropy_coef": float(self.entropy.applied)})

    def get_state(self) -> dict[str, float]:
        """The coefficients, and the entropy that was measured last, as numbers that a checkpoint holds; see
        `with_state`."""
        entropy = {} if self.entropy is None else {"entropy_coef": self.entropy.coef, "entropy_last": self.entropy.last}
        return {name: float(value) for name, value in {"kl_coef": self.kl.coef, **entropy}.items()}

    def with_state(self, state: dict[str, float]) -> "Controllers":
        """The controllers with the state of `get_state`; one that it lacks, or that is fixed, stays as it is."""
        kl, entropy = self.kl, self.entropy
        if isinstance(kl, AdaptiveKL):
            kl = replace(kl, coef=state["kl_coef"])
        if entropy is not None and "entropy_coef" in state:
            entropy = replace(entropy, coef=state["entropy_coef"], last=state["entropy_last"])
        return Controllers(kl, entropy)


def _as_numbers(controller):
    return jax.tree.map(float, controller)
