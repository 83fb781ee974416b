"""`Memory`: what a run carries from step to step besides its `State`. Checkpoints hold it, so that a resumed run equals
an undisturbed one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import AdaptiveKL, FixedKL
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.training.replay import Replay, empty_replay, exchange
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

    def sync_reference(self, state: State) -> None:
        """After every `ref_sync_steps` steps: reference = alpha * policy + (1 - alpha) * reference (TR-DPO,
        arXiv 2404.09656)."""
        if self.reference is None or not self.ref_sync_steps:
            return
        step = int(state.step)
        if step and step % self.ref_sync_steps == 0:
            self.reference = _mix(self.reference, state.params, self.ref_mixup_alpha)

    def control_kl(self, kl: jax.Array | None, rows: int) -> None:
        """Moves the KL coefficient after a batch of `rows` completions with mean KL `kl`."""
        if isinstance(self.kl, AdaptiveKL):
            assert kl is not None  # an adaptive coefficient has a reference
            self.kl = _as_numbers(self.kl.update(float(kl), rows))

    def control_entropy(self, metrics: dict[str, float]) -> None:
        """Moves the entropy coefficient after a step's updates."""
        if self.entropy is not None:
            self.entropy = _as_numbers(self.entropy.update(metrics["entropy"]))

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
            trees["reference"] = self.reference
        if self.replay is not None:
            rows = {name: x for name, x in vars(self.replay.rows).items() if isinstance(x, jax.Array)}
            trees["replay"] = {"rows": rows, "priority": self.replay.priority}
        return trees

    def restore(self, numbers: dict[str, float], arrays: dict[str, Any]) -> None:
        """Takes up what `numbers` and `arrays` gave; what they lack (it was not used then) stays as it starts."""
        if isinstance(self.kl, AdaptiveKL):
            self.kl = dataclasses.replace(self.kl, coef=numbers["kl_coef"])
        if self.entropy is not None and "entropy_coef" in numbers:
            self.entropy = dataclasses.replace(self.entropy, coef=numbers["entropy_coef"], last=numbers["entropy_last"])
        if "reference" in arrays:
            self.reference = arrays["reference"]
        if self.replay is not None and "replay" in arrays:
            found = arrays["replay"]
            self.replay = Replay(self.replay.rows.replace(**found["rows"]), found["priority"])


def make_memory(config, params: Params, prompt_width: int, mesh: Mesh) -> Memory:
    """The memory of an online run that starts from `params`; updates donate those, so the reference is a copy."""
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
        reference=jax.tree.map(jnp.copy, params) if algorithm.beta > 0 else None,
        ref_sync_steps=algorithm.ref_sync_steps,
        ref_mixup_alpha=algorithm.ref_mixup_alpha,
        kl=kl,
        entropy=entropy,
        replay=replay,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _mix(reference: Params, params: Params, alpha) -> Params:
    return jax.tree.map(lambda r, p: alpha * p + (1.0 - alpha) * r, reference, params)


def _as_numbers(controller):
    return jax.tree.map(float, controller)
