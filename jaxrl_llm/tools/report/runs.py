"""`ReportedRun`: the records of one run, with the names that metrics have within it."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config import default, flat
from jaxrl_llm.config.files import read_json
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.training.logging.metric_names import MetricNames
from jaxrl_llm.training.logging.origin import read_starts
from jaxrl_llm.training.logging.records import METRICS, read_metrics


class ReportedRun(NamedTuple):
    """One run: its name in the report, its folder, its settings by full key, and its metrics as columns.

    Columns have one length, that of `steps` and `times` (seconds since 1970); None where a step has no such metric.
    `starts` say when, where and by which command it was started (`read_starts`), empty where it did not record that.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    steps: list[int]
    times: list[float]
    metrics: dict[str, list[float | None]]
    starts: Sequence[Mapping[str, Any]] = ()

    @property
    def is_finished(self) -> bool:
        """True once the last step is recorded or, where a callback ended the run, its model is written behind it."""
        total, model = self.settings.get("total_steps"), self.folder / "hf" / "config.json"
        if not self.steps or total is None:
            return False
        ended = model.is_file() and model.stat().st_mtime > (self.folder / METRICS).stat().st_mtime
        return self.steps[-1] >= total or ended


def read_runs(folders: Sequence[str | Path]) -> list[ReportedRun]:
    """The runs in the folders, named by the shortest ends of their paths that differ.

    Raises ConfigError for a folder that is named twice or holds no run.
    """
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"the run {twice} is named twice: name each once")
    for path in paths:
        if not (path / METRICS).is_file():
            raise ConfigError(
                f"{path} holds no run: it has no {METRICS}. "
                "Name the output_dir of a run whose logging.backends have jsonl"
            )
    return [run_of(path, name) for path, name in zip(paths, short_names(paths), strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths, of as few parts as make them all different, as names of runs."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def run_of(folder: Path, name: str | None = None) -> ReportedRun:
    """The run in the folder, named as the folder is or `name`; without steps where it kept no metrics.jsonl.

    Raises ConfigError for a file that cannot be read.
    """
    path, settings = folder / METRICS, flat(read_json(folder / "config.json") or {})
    names = _names(settings)
    records = list(read_metrics(path)) if path.is_file() else []
    metrics: dict[str, list[float | None]] = {}
    for number, record in enumerate(records):
        for shown, value in record.items():
            if shown not in ("step", "time") and not names.is_more(shown):
                known = isinstance(value, int | float) and math.isfinite(value)  # others write NaN, or texts
                metrics.setdefault(names.internal(shown), [None] * len(records))[number] = value if known else None
    steps, times = [record["step"] for record in records], [record.get("time", 0.0) for record in records]
    return ReportedRun(name or folder.resolve().name, folder, settings, steps, times, metrics, read_starts(folder))


def _names(settings: dict[str, Any]) -> MetricNames:
    config = default()
    known = flat(config.to_dict())
    for name, value in settings.items():
        if name in known and name.startswith(("logging.names", "algorithm.name", "algorithm.kl_in", "data.", "eval.")):
            section, leaf = name.split(".")
            config[section][leaf] = tuple(value) if isinstance(value, list) else value
    from jaxrl_llm.training.setup.records import metric_names  # here, as it takes seconds to import

    return metric_names(config)


def differences(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """The settings that differ between the runs or from their default, as `{key, default, values, differs}`.

    Those in which runs differ come first. `values` are texts in the order of the runs, None where a run has no such
    setting; output_dir is left out, as it always differs.
    """
    standard = flat(default().to_dict())
    rows = []
    for key in dict.fromkeys((*standard, *(key for run in runs for key in run.settings))):
        values = [_text(run.settings[key]) if key in run.settings else None for run in runs]
        usual = _text(standard[key]) if key in standard else None
        differs = len(set(values)) > 1
        if key != "output_dir" and (differs or any(value not in (usual, None) for value in values)):
            rows.append({"key": key, "default": usual, "values": values, "differs": differs})
    return sorted(rows, key=lambda row: not row["differs"])


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(str(item) for item in value)
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)
