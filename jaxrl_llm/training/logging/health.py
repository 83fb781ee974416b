"""Named warnings about the health of a run: `warning/<name>` is 1 in the metrics of a step where it holds.

Each depends on the metrics of its step alone, so that a run that was interrupted warns of the same steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl_llm.config.wording import amount

REPEAT_EVERY = 50  # steps between repetitions of one warning on the console, while it goes on holding
ROUNDING = 1e-6  # the norm of a gradient below which it is one of rounding alone: a KL term of equal policies has 1e-7


@dataclass(frozen=True)
class HealthSpec:
    """The limits beyond which a run is warned of, or ended; None is no limit."""

    policy: bool  # the policy is sampled, so the three limits below apply
    kl: float | None  # per token
    entropy: float | None  # per token, a lower limit
    mismatch: float | None  # mean absolute difference of the log-probs of sampler and trainer
    max_skipped_steps: int  # steps in a row without a finite gradient
    older: tuple[str, ...]  # the settings by which older policies sample


def health_warnings(spec: HealthSpec, metrics: Mapping[str, float]) -> dict[str, str]:
    """The warnings that hold for the metrics of a step: explanations by name; see docs/reliability.md."""

    def above(name: str, limit: float | None) -> bool:
        return spec.policy and name in metrics and limit is not None and metrics[name] > limit

    warnings: dict[str, str] = {}
    # Without a reference there is no KL to it; the distance from the sampler's policy stands in.
    kl = "kl" if "kl" in metrics else "ratio/kl"
    if above(kl, spec.kl):
        warnings["kl_explosion"] = (
            f"{kl} is {metrics[kl]:.3g} per token (watch.kl = {spec.kl:g}): the policy has moved far; "
            "lower optimizer.learning_rate or raise algorithm.beta"
        )
    if spec.policy and spec.entropy is not None and metrics.get("entropy", math.inf) < spec.entropy:
        warnings["entropy_collapse"] = (
            f"the entropy is {metrics['entropy']:.3g} per token (watch.entropy = {spec.entropy:g}): all samples are "
            "alike, and unless the task is solved nothing more is learned; raise epsilon_high, entropy_coef or the "
            "temperature"
        )
    difference = "sampling/sampling_logp_difference/mean"
    if above(difference, spec.mismatch):
        advice = "use model.dtype=float32, or set algorithm.importance_correction"
        if spec.older:
            advice = (
                "the policy moved that far between sampling and training: lower optimizer.learning_rate or "
                f"{' or '.join(spec.older)}"
            )
        warnings["sampler_mismatch"] = (
            f"log-probs of sampler and trainer differ by {metrics[difference]:.3g} on average (watch.mismatch = "
            f"{spec.mismatch:g}): {advice}"
        )
    if not math.isfinite(metrics.get("loss", 0.0)):
        cause = "look for a rate that is too high, or bad rows"
        if not math.isfinite(metrics.get("advantages/mean", 0.0)):
            cause = "so are advantages: look at algorithm.advantage, of scores that are NaN for rows without a reward"
        warnings["nonfinite_loss"] = f"the loss is {metrics['loss']:g}: {cause}"
    if rows := metrics.get("unscorable_rows", 0):
        warnings["unscorable_rows"] = f"no reward for {amount(f'{rows:g}', 'completion')}: they teach nothing"
    elif not math.isfinite(metrics.get("reward", 0.0)):
        warnings["nonfinite_reward"] = f"the mean reward is {metrics['reward']:g}: no completion could be graded"
    elif metrics.get("reward") == metrics.get("reward_std") == 0 and metrics.get("grad_norm", 1.0) < ROUNDING:
        warnings["zero_reward"] = (
            "every completion scored 0, and so is the gradient: nothing is learned unless some score more; read "
            "completions/, and call the reward on a right answer"
        )
    return warnings


class HealthWarnings:
    """The console's share of health warnings: the first step of each, then every REPEAT_EVERY steps while it holds."""

    def __init__(self) -> None:
        self._last_shown: dict[str, int] = {}

    def due(self, step: int, warnings: Mapping[str, str]) -> list[str]:
        """The lines to show for the warnings of a step."""
        # A warning that has gone is forgotten: when it comes back it is shown at once.
        self._last_shown = {name: shown for name, shown in self._last_shown.items() if name in warnings}
        lines = []
        for name, explanation in warnings.items():
            if step - self._last_shown.get(name, -REPEAT_EVERY) >= REPEAT_EVERY:
                self._last_shown[name] = step
                lines.append(f"step {step}: warning/{name}: {explanation}")
        return lines
