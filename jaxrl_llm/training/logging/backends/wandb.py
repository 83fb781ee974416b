"""Weights & Biases: WANDB_MODE=offline writes to output_dir/wandb, for `wandb sync`."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.training.logging.backends import Identity, keep_id, kept_id


class WeightsAndBiases:
    """Logs to one W&B run, which a resumed run continues; the x axis of its charts is `step`."""

    def __init__(self, run: Identity):
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            config=dict(run.settings),
            dir=str(run.folder),
            id=kept_id(run, "wandb"),
            resume="allow",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        keep_id(run, "wandb", self._run.id)
        # W&B's own step cannot go back, as that of a run resumed from a checkpoint does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics."""
        self._run.log({"step": step, **metrics})

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs a `wandb.Table` under the name."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._run.log({"step": step, name: self._wandb.Table(columns=list(columns), data=rows)})

    def close(self, failed: bool) -> None:
        """Ends the W&B run and waits for its upload."""
        self._run.finish(exit_code=int(failed))
