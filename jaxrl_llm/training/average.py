"""A bias-corrected moving average of the policy (BEMA), which the reference may follow; at the end a model of its own.

A moving average is smoother than the policy but lags behind it; adding the policy's distance from its start, with a
falling weight, removes most of the lag.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float
from jaxrl_llm.distributed.sharding import on_device, on_host
from jaxrl_llm.models.adapters.lora import LoraConfig, combine, has_adapters, merge, split
from jaxrl_llm.models.net import Params


@dataclasses.dataclass(frozen=True)
class AverageSpec:
    """Settings of `average`, under the same names."""

    every: int  # steps between updates
    start: int  # the step whose policy the average begins with
    ema_power: float
    bias_power: float
    lag: float
    multiplier: float
    min_ema_multiplier: float
    offload: bool  # in the host's memory between updates

    def weights(self, step: int) -> tuple[float, float]:
        """The weights (beta, alpha) of the update after a step: that of the policy in the moving average, and that of
        the policy's distance from its start."""
        age = self.lag + self.multiplier * step
        return max(age**-self.ema_power, self.min_ema_multiplier), age**-self.bias_power


@dataclasses.dataclass
class Average:
    """The average of a run. `params` are the averaged trained parameters; with adapters the whole merged model, as the
    mean of adapters is not the mean of what they compute.

    Every `every` steps from step `start` on, with t the step, theta the policy and theta_0 that of step `start`:

        ema    = (1 - beta) ema + beta theta            beta = max((lag + multiplier t)^-ema_power, min_ema_multiplier)
        params = ema + alpha (theta - theta_0)          alpha = (lag + multiplier t)^-bias_power

    Before the first update `params` are those that the run began with. `ema` is float32, whatever the policy is.
    Source: arXiv 2508.00180.
    """

    spec: AverageSpec
    lora: LoraConfig | None
    frozen: tuple[str, ...]  # parts of the model that are not trained
    ema: Params = dataclasses.field(default_factory=dict)
    start: Params = dataclasses.field(default_factory=dict)  # theta_0
    params: Params = dataclasses.field(default_factory=dict)

    def begin(self, params: Params) -> None:
        """Begin with the policy of parameters `params`, those of a whole model, which stay as they are."""
        self._restart(params)
        self.params = self.start

    def update(self, step: int, params: Params) -> None:
        """Add the policy after a step, if an update is due."""
        ahead = step - self.spec.start
        if ahead == 0:
            self._restart(params)
        elif ahead > 0 and ahead % self.spec.every == 0:
            ema, start = on_device(self.ema), on_device(self.start)
            self._put(*_updated(ema, start, self._averaged(params), *self.spec.weights(step)))

    def of_model(self, params: Params) -> Params:
        """The parameters of a whole model: the average, on the device, in place of those that are trained."""
        own = on_device(self.params)
        return own if has_adapters(params) else combine(split(params, self.frozen)[0], own)

    def arrays(self) -> dict[str, Any]:
        """The tree of arrays that a checkpoint holds, by name."""
        return {"average": {"ema": self.ema, "start": self.start, "params": self.params}}

    def restore(self, arrays: dict[str, Any], params: Params) -> None:
        """Restore the tree of `arrays`; without it (nothing was averaged then) begin with the policy `params`."""
        if "average" not in arrays:
            return self.begin(params)
        self.start = self._kept(arrays["average"]["start"])
        self._put(arrays["average"]["ema"], arrays["average"]["params"])

    def _averaged(self, params: Params) -> Params:
        params = on_device(params)
        return merge(params, self.lora) if has_adapters(params) else split(params, self.frozen)[1]

    def _restart(self, params: Params) -> None:
        ema, start = _copies(self._averaged(params))
        self.ema, self.start = self._kept(ema), self._kept(start)

    def _put(self, ema: Params, params: Params) -> None:
        self.ema, self.params = self._kept(ema), self._kept(params)

    def _kept(self, tree: Params) -> Params:
        return on_host(tree) if self.spec.offload else tree


@jax.jit
def _copies(params: Params) -> tuple[Params, Params]:
    return jax.tree.map(lambda p: jnp.copy(as_float(p)), params), jax.tree.map(jnp.copy, params)


@functools.partial(jax.jit, donate_argnums=0)
def _updated(ema: Params, start: Params, policy: Params, beta, alpha) -> tuple[Params, Params]:
    ema = jax.tree.map(lambda e, p: (1.0 - beta) * e + beta * as_float(p), ema, policy)

    def corrected(e, p, s):  # rounded to the policy's type, to the nearest: nothing adds up in it
        return (e + alpha * (as_float(p) - as_float(s))).astype(p.dtype)

    return ema, jax.tree.map(corrected, ema, policy, start)
