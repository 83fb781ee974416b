"""Orbax's manager of checkpoints as a run uses it: which checkpoints stay, and hashes of the files of each process."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.distributed.orbax import ocp, policies
from jaxrl_llm.training.checkpoint import checksums


class Keep(NamedTuple):
    """The checkpoints that are kept: the newest, of the others one every so often, and the best by a metric."""

    newest: int | None = None  # None is all
    steps: int = 0
    hours: float = 0.0
    best: str | None = None
    best_mode: str = "max"

    def rank(self, metrics: Mapping[str, float]) -> float:
        """The number that is greatest for the best checkpoint; minus infinity for a metric that is not a number."""
        value = float(metrics.get(self.best or "", math.nan))
        return -math.inf if math.isnan(value) else value if self.best_mode == "max" else -value


def preservation_policy(keep: Keep) -> policies.PreservationPolicy | None:
    """Orbax's form of `keep`: a checkpoint stays when any rule keeps it; None keeps all."""
    if keep.newest is None:
        return None
    rules: list[policies.PreservationPolicy] = [policies.LatestN(keep.newest)]
    if keep.steps:
        rules.append(policies.EveryNSteps(keep.steps))
    if keep.hours:
        rules.append(policies.EveryNSeconds(round(keep.hours * 3600)))
    if keep.best:
        rules.append(policies.BestN(get_metric_fn=keep.rank, n=1, keep_checkpoints_without_metrics=False))
    return policies.AnyPreservationPolicy(rules)


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which raised in its constructor where the metrics of any checkpoint are damaged: to this one
    that checkpoint has none. `newest_intact` names it, if it is among the last."""

    def _get_metrics(self, step: int) -> Any:
        try:
            metrics = super()._get_metrics(step)
        except ValueError:
            return None
        return metrics if isinstance(metrics, dict) else None

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except Exception:
            # The process whose share of a save failed would wait for the others here, and they for that share, until
            # both give up after twenty minutes: it ends the run, so that it need not tell them.
            progress: Any = getattr(self, "_save_progress_tracker", None)  # a name of Orbax's own, which may change
            if jax.process_count() > 1 and progress is not None:
                progress.set = lambda value: None
            raise


@dataclass(frozen=True)
class _Hashed:
    """The future of this process's part of a save to `folder`, which ends once its files are hashed."""

    written: list[Any]  # futures
    folder: Path

    def result(self, timeout: float | None = None) -> None:
        for future in self.written:
            future.result(timeout=timeout)
        checksums.write_own_hashes(self.folder, jax.process_index())

    def cancel(self) -> None:
        for future in self.written:
            future.cancel()


def hashing_handler() -> ocp.StandardCheckpointHandler:
    """A handler of trees, each process of which hashes its own files before the checkpoint becomes final."""
    handler = ocp.StandardCheckpointHandler()
    save = handler.async_save

    async def save_and_hash(directory: Any, *args: Any, **options: Any) -> list[Any]:
        return [_Hashed(await save(directory, *args, **options) or [], Path(directory))]

    handler.async_save = save_and_hash  # Orbax finds the arguments of a handler by its class, and not by a subclass
    return handler
