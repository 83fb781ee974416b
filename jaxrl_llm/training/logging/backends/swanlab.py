"""SwanLab: SWANLAB_MODE=local or offline writes to output_dir/swanlab; online is its default."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.training.logging.backends import Identity, keep_id, kept_id


class SwanLab:
    """Logs to one SwanLab experiment, which a resumed run continues where SwanLab can (online)."""

    def __init__(self, run: Identity):
        self._swanlab = importlib.import_module("swanlab")
        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        kept = kept_id(run, "swanlab")
        self._run = self._swanlab.init(
            project=run.project,
            name=run.name,
            config=dict(run.settings),
            log_dir=str(folder),
            id=kept,
            resume="allow" if kept else None,
        )
        keep_id(run, "swanlab", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics."""
        self._run.log(dict(metrics), step=step)

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs the table under its name."""
        table = self._swanlab.echarts.Table()
        table.add(
            list(columns),
            [["" if cell is None else cell for cell in row] for row in zip(*columns.values(), strict=True)],
        )
        self._run.log({name: table}, step=step)

    def close(self, failed: bool) -> None:
        """Ends the experiment."""
        self._run.finish("crashed" if failed else "success")
