"""`Memory`: what a run carries from step to step besides its `State`. Checkpoints hold it, so that a resumed run equals
an undisturbed one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.controllers import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import AdaptiveKL, FixedKL
from jaxrl_llm.distributed.sharding import on_device, on_host
from jaxrl_llm.models.lora import LoraConfig, combine, copied, has_adapters, merge, split, without_adapters
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.training.replay import Replay, empty_replay, exchange, stored_arrays, with_arrays
from jaxrl_llm.training.update import State


@dataclasses.dataclass
class Memory:
    """The reference policy, the controllers of the KL and entropy coefficients, and the replay buffer.

    What a run does not use is None (or, the KL controller, fixed at 0). The reference is part of a checkpoint when it
    follows the policy (`ref_sync_steps`); otherwise it is the model the run started from.
    """

    reference: Params | None = None
    ref_sync_steps: int = 0
    ref_mixup_alpha: float = 1.0
    kl: FixedKL | AdaptiveKL = dataclasses.field(default_factory=lambda: FixedKL(0.0))
    entropy: AdaptiveEntropy | None = None
    replay: Replay | None = None
    lora: LoraConfig | None = None  # of the policy's adapters

    def sync_reference(self, state: State) -> None:
        """After every `ref_sync_steps` steps: reference = alpha * policy + (1 - alpha) * reference (TR-DPO,
        arXiv 2404.09656). A reference with adapters takes those of the policy."""
        if self.reference is None or not self.ref_sync_steps:
            return
        step = int(state.step)
        if step and step % self.ref_sync_steps == 0:
            if has_adapters(self.reference):
                self.reference = copied(state.params)
            else:
                policy, offloaded = merge(state.params, self.lora), self._is_offloaded()
                mixed = _mix(on_device(self.reference), policy, self.ref_mixup_alpha)
                self.reference = on_host(mixed) if offloaded else mixed

    def _is_offloaded(self) -> bool:
        return any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(self.reference))

    def control_kl(self, kl: jax.Array | None, rows: int) -> None:
        """Moves the KL coefficient after a batch of `rows` completions with mean KL `kl`."""
        if isinstance(self.kl, AdaptiveKL):
            assert kl is not None  # an adaptive coefficient has a reference
            self.kl = _as_numbers(self.kl.update(float(kl), rows))

    def control_entropy(self, metrics: dict[str, float]) -> None:
        """Moves the entropy coefficient after a step's updates."""
        if self.entropy is not None:
            measured = metrics.get("entropy_kept", metrics["entropy"])
            self.entropy = _as_numbers(self.entropy.update(measured))

    def replay_groups(self, batch: Batch, priority, key, group_size: int) -> tuple[Batch, jax.Array]:
        """The batch with stored groups for its flat ones, and their number; its other groups are stored."""
        assert self.replay is not None
        self.replay, batch, count = exchange(self.replay, batch, priority, key, group_size=group_size)
        return batch, count

    def coefficients(self) -> dict[str, float]:
        """The metrics of the coefficients that move."""
        found = {"kl_coef": float(self.kl.coef)} if isinstance(self.kl, AdaptiveKL) else {}
        return found | ({} if self.entropy is None else {"entropy_coef": float(self.entropy.applied)})

    def numbers(self) -> dict[str, float]:
        """The state of the controllers."""
        entropy = {} if self.entropy is None else {"entropy_coef": self.entropy.coef, "entropy_last": self.entropy.last}
        return {name: float(value) for name, value in {"kl_coef": self.kl.coef, **entropy}.items()}

    def arrays(self) -> dict[str, Any]:
        """The trees of arrays that a checkpoint holds, by name."""
        trees: dict[str, Any] = {}
        if self.reference is not None and self.ref_sync_steps:
            trees["reference"] = split(self.reference)[1]
        if self.replay is not None:
            rows = stored_arrays(self.replay.rows)
            trees["replay"] = {"rows": rows, "priority": self.replay.priority}
        return trees

    def restore(self, numbers: dict[str, float], arrays: dict[str, Any]) -> None:
        """Takes up what `numbers` and `arrays` gave; what they lack (it was not used then) stays as it starts."""
        if isinstance(self.kl, AdaptiveKL):
            self.kl = dataclasses.replace(self.kl, coef=numbers["kl_coef"])
        if self.entropy is not None and "entropy_coef" in numbers:
            self.entropy = dataclasses.replace(self.entropy, coef=numbers["entropy_coef"], last=numbers["entropy_last"])
        if "reference" in arrays:
            assert self.reference is not None
            found = combine(split(self.reference)[0], arrays["reference"])
            self.reference = on_host(found) if self._is_offloaded() else found
        if self.replay is not None and "replay" in arrays:
            found = arrays["replay"]
            self.replay = Replay(with_arrays(self.replay.rows, found["rows"]), found["priority"])


def start_reference(config, params: Params, lora: LoraConfig | None = None, kept: bool = True) -> Params:
    """The reference policy of a run that starts from `params`, with arrays that no update donates.

    A copy of them, in the host's memory with `offload_reference`; or, of a model with adapters of shape `lora`, what
    `lora.reference` says, which shares the frozen parameters. Nothing is copied for a reference that is not `kept`
    while updates are made.
    """
    if not kept:
        return without_adapters(params) if config.lora.reference == "base" else params
    keep = on_host if config.algorithm.offload_reference else lambda params: params
    if not has_adapters(params):
        return keep(jax.tree.map(jnp.copy, params))
    if config.lora.reference == "copy":
        return keep(jax.jit(lambda params: jax.tree.map(jnp.copy, merge(params, lora)))(params))
    own = copied(params)
    return own if config.lora.reference == "start" else without_adapters(own)


def make_memory(config, params: Params, prompt_width: int, mesh: Mesh, lora: LoraConfig | None = None) -> Memory:
    """The memory of an online run that starts from `params`, with adapters of shape `lora`."""
    algorithm, rollout = config.algorithm, config.rollout
    kl = FixedKL(algorithm.beta)
    if algorithm.kl_controller == "adaptive":
        kl = AdaptiveKL(algorithm.beta, algorithm.kl_target, algorithm.kl_horizon)
    entropy = None
    if algorithm.entropy_controller == "adaptive":
        entropy = AdaptiveEntropy(
            algorithm.entropy_coef,
            target=algorithm.entropy_target,
            delta=algorithm.entropy_delta,
            minimum=algorithm.entropy_coef_min,
            maximum=algorithm.entropy_coef_max,
        )
    replay = None
    if algorithm.replay_groups:
        width = prompt_width + rollout.max_completion_length
        replay = empty_replay(algorithm.replay_groups, rollout.group_size, width, prompt_width, mesh)
    return Memory(
        reference=start_reference(config, params, lora) if algorithm.beta > 0 else None,
        ref_sync_steps=algorithm.ref_sync_steps,
        ref_mixup_alpha=algorithm.ref_mixup_alpha,
        kl=kl,
        entropy=entropy,
        replay=replay,
        lora=lora,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _mix(reference: Params, params: Params, alpha) -> Params:
    return jax.tree.map(lambda r, p: alpha * p + (1.0 - alpha) * r, reference, params)


def _as_numbers(controller):
    return jax.tree.map(float, controller)
