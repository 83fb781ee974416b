"""MLflow, at MLFLOW_TRACKING_URI or MLflow's own default; the experiment is `logging.project`."""

import importlib
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from jaxrl_llm.training.logging.backends import Identity, keep_id, kept_id

PARAMETERS, METRICS = 100, 1000  # in one request, at most
LONGEST = 500  # characters of a parameter


class MLflow:
    """Logs to one MLflow run, which a resumed run continues; completions are artifacts, one table a step."""

    def __init__(self, run: Identity):
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        kept = kept_id(run, "mlflow")
        if kept is None:
            experiment = self._client.get_experiment_by_name(run.project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
            settings = iter([self._entities.Param(key, str(value)[:LONGEST]) for key, value in run.settings.items()])
            while batch := list(islice(settings, PARAMETERS)):
                self._client.log_batch(self._id, params=batch)
        else:
            self._client.set_terminated(kept, "RUNNING")
            self._id = kept
        keep_id(run, "mlflow", self._id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics."""
        now = int(time.time() * 1000)
        values = iter([self._entities.Metric(allowed(name), value, now, step) for name, value in metrics.items()])
        while batch := list(islice(values, METRICS)):
            self._client.log_batch(self._id, metrics=batch)

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs the artifact <name>/step_<step>.json, which MLflow shows as a table."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        table = {"columns": list(columns), "data": rows}
        self._client.log_dict(self._id, table, f"{name}/step_{step:05d}.json")

    def close(self, failed: bool) -> None:
        """Ends the MLflow run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def allowed(name: str) -> str:
    """The name as MLflow takes it, `eval/pass_at_1` for `eval/pass@1`."""
    return posixpath.normpath(re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"))).lstrip("/")
