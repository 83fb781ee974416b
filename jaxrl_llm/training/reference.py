"""The reference policy: a copy of the start, the model without its adapters, or a policy that follows the trained one.

Its log-probs are the anchor of KL terms and of preference losses.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float
from jaxrl_llm.algorithms.random_streams import REFERENCE_ROUNDING
from jaxrl_llm.algorithms.rounding import round_like
from jaxrl_llm.distributed.sharding import on_device, on_host
from jaxrl_llm.models.adapters.lora import LoraConfig, combine, copied, has_adapters, merge, split, without_adapters
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.average import Average
from jaxrl_llm.training.update import State


@dataclasses.dataclass(frozen=True)
class ReferenceSpec:
    """The settings of a reference policy."""

    adapters: str  # lora.reference: base (none), start (those of the start) or copy (merged)
    offload_reference: bool  # keep a copy in the host's memory
    ref_sync_steps: int  # steps between moves towards the policy; 0 is never
    ref_mixup_alpha: float  # share of the policy in the moved reference
    ref_sync_after: int  # steps before which it does not move, and from which moves are counted
    seed: int


@dataclasses.dataclass
class Reference:
    """The reference policy of a run. `lora` is the shape of the policy's adapters.

    It is part of a checkpoint where it follows the policy, or did; otherwise it is the model that the run started from.
    """

    params: Params
    spec: ReferenceSpec
    lora: LoraConfig | None = None
    average: Average | None = None  # of the policy, in whose place the reference follows it
    restored: bool = False  # from a checkpoint, in whose run it followed the policy
    name: str = "reference"  # of its tree in a checkpoint

    @property
    def moves(self) -> bool:
        """True where it may be another policy than the one that the run started from."""
        return self.restored or self.spec.ref_sync_steps > 0

    def sync(self, state: State) -> None:
        """After every `ref_sync_steps` steps: reference = alpha * policy + (1 - alpha) * reference (TR-DPO,
        arXiv 2404.09656), or of the policy's average in its place. A reference with adapters takes those of the policy.

        Storage types narrower than float32 are rounded stochastically, by draws from the seed and the step.
        """
        if not self.spec.ref_sync_steps:
            return
        step = int(state.step)
        ahead = step - self.spec.ref_sync_after
        if not step or ahead < 0 or ahead % self.spec.ref_sync_steps:
            return
        if has_adapters(self.params):
            self.params = copied(on_device(state.params))
        else:
            if self.average is None:
                policy = merge(on_device(state.params), self.lora)
            else:
                policy = on_device(self.average.of_model(state.params))
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.spec.seed), REFERENCE_ROUNDING), step)
            self._put(_mix(on_device(self.params), policy, self.spec.ref_mixup_alpha, key))

    def arrays(self) -> dict[str, Any]:
        """The trees of arrays that a checkpoint holds, by name."""
        return self.tree() if self.moves else {}

    def tree(self) -> dict[str, Any]:
        """The trees of arrays that `restore` takes, by name."""
        return {self.name: split(self.params)[1]}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Restore the trees of `arrays`; without them (it did not follow then) the reference stays as it started."""
        if self.name in arrays:
            self._put(combine(split(self.params)[0], arrays[self.name]))
            self.restored = True

    def _put(self, params: Params) -> None:
        """Replace the parameters, in the same memory."""
        offloaded = any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(self.params))
        self.params = on_host(params) if offloaded else params


def start_reference(spec: ReferenceSpec, params: Params, lora: LoraConfig | None = None, kept: bool = True) -> Params:
    """The parameters of the reference of a run that starts from `params`, in arrays that no update donates.

    They are a copy of these, in the host's memory with `offload_reference`; or, of a model with adapters of shape
    `lora`, what `adapters` says, which shares the frozen parameters. Nothing is copied for a reference that is not
    `kept` while updates are made.
    """
    if not kept:
        return without_adapters(params) if spec.adapters == "base" else params
    keep = on_host if spec.offload_reference else lambda params: params
    if not has_adapters(params):
        return keep(copied(on_device(params)))
    if spec.adapters == "copy":
        return keep(jax.jit(lambda params: jax.tree.map(jnp.copy, merge(params, lora)))(on_device(params)))
    frozen, trainable = split(params)
    own = combine(frozen, copied(on_device(trainable)))
    return own if spec.adapters == "start" else without_adapters(own)


@functools.partial(jax.jit, donate_argnums=0)
def _mix(reference: Params, params: Params, alpha, key) -> Params:
    # A small share of a small difference is below the spacing of 16-bit types: rounded to the nearest, a reference in
    # them would stay where it is however often it moves.
    mixed = jax.tree.map(lambda r, p: alpha * as_float(p) + (1.0 - alpha) * as_float(r), reference, params)
    return round_like(mixed, reference, key)
