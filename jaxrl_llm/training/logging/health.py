"""Named warnings about the health of a run: `warning/<name>` is 1 in the metrics of a step where it holds.

Each depends on the metrics of its step alone, so that a run that was interrupted warns of the same steps.
"""

import math
from collections.abc import Mapping

from jaxrl_llm.config.schema import OFFLINE

EVERY = 50  # steps between repetitions of one warning on the console, while it goes on holding


def warnings_of(config, metrics: Mapping[str, float]) -> dict[str, str]:
    """The warnings that hold for the metrics of a step, in words by name; see docs/reliability.md."""
    found: dict[str, str] = {} if config.algorithm.name in OFFLINE else _of_the_policy(config, metrics)
    if not math.isfinite(metrics.get("loss", 0.0)):
        found["nonfinite_loss"] = f"the loss is {metrics['loss']:g}: look for a rate that is too high, or bad rows"
    if not math.isfinite(metrics.get("reward", 0.0)):
        found["nonfinite_reward"] = f"the mean reward is {metrics['reward']:g}: no completion could be scored"
    elif metrics.get("unscorable_rows", 0):
        found["unscorable_rows"] = f"{metrics['unscorable_rows']:g} completions have no reward, and teach nothing"
    return found


def _of_the_policy(config, metrics: Mapping[str, float]) -> dict[str, str]:
    watch, found = config.watch, {}
    measured = "kl" if "kl" in metrics else "ratio/kl"
    if _above(metrics.get(measured), watch.kl):
        found["kl_explosion"] = (
            f"{measured} is {metrics[measured]:.3g} per token (watch.kl = {watch.kl:g}): the policy has moved far; "
            "lower optimizer.learning_rate or raise algorithm.beta"
        )
    entropy = metrics.get("entropy")
    if watch.entropy is not None and entropy is not None and entropy < watch.entropy:
        found["entropy_collapse"] = (
            f"the entropy is {entropy:.3g} per token (watch.entropy = {watch.entropy:g}): all samples are alike, and "
            "unless the task is solved nothing more is learned; raise epsilon_high, entropy_coef or the temperature"
        )
    mismatch = metrics.get("sampling/sampling_logp_difference/mean")
    if _above(mismatch, watch.mismatch):
        found["sampler_mismatch"] = (
            f"log-probs of sampler and trainer differ by {mismatch:.3g} on average (watch.mismatch = "
            f"{watch.mismatch:g}): use model.dtype=float32, or set algorithm.importance_correction"
        )
    return found


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


class HealthWarnings:
    """Tells of a warning at the first step it holds, and then every EVERY steps while it goes on."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def due(self, step: int, found: Mapping[str, str]) -> list[str]:
        """The lines to show for this step's warnings."""
        self._told = {name: told for name, told in self._told.items() if name in found}
        lines = []
        for name, text in found.items():
            if step - self._told.get(name, -EVERY) >= EVERY:
                self._told[name] = step
                lines.append(f"step {step}: warning/{name}: {text}")
        return lines
