"""PNGs of a report's curves, for a paper or a README."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.report.page import headlines
from jaxrl_llm.tools.report.runs import ReportedRun

# The colours of the page, which stay apart for colour-blind readers.
COLOURS = ("#2563eb", "#ea580c", "#059669", "#c026d3", "#ca8a04", "#0891b2", "#dc2626", "#6d28d9")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "figure.dpi": 160,
    "savefig.bbox": "tight",
}


def check_pictures() -> None:
    """Raises ConfigError, with the pip line, when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs the package matplotlib: pip install matplotlib")


def write_pictures(runs: Sequence[ReportedRun], folder: Path, smoothing: float) -> list[Path]:
    """The paths of a PNG for each curve at the top of the page, and of curves.png with all of them; none before the
    first step.

    Raises ConfigError when matplotlib is not installed.
    """
    check_pictures()
    matplotlib = importlib.import_module("matplotlib")
    Figure = importlib.import_module("matplotlib.figure").Figure
    folder.mkdir(parents=True, exist_ok=True)
    shown, paths = headlines(runs), []
    if not shown:
        return paths
    with matplotlib.rc_context(STYLE):
        for title, metric in shown:
            figure = Figure(figsize=(4.2, 2.8))
            _draw(figure.subplots(), runs, title, metric, smoothing, legend=len(runs) > 1)
            part = f"_{metric.split('/')[1]}" if metric.count("/") == 2 and title == "Held-out" else ""  # a named set
            paths.append(folder / f"{title.lower()}{part}.png")
            figure.savefig(paths[-1])
        rows = -(-len(shown) // 3)
        figure = Figure(figsize=(11, 2.7 * rows), layout="constrained")
        axes = figure.subplots(rows, 3, squeeze=False).flatten()
        for axis, (title, metric) in zip(axes, shown, strict=False):
            _draw(axis, runs, title, metric, smoothing, legend=False)
        for axis in axes[len(shown) :]:
            axis.axis("off")
        if len(runs) > 1:
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)
        paths.append(folder / "curves.png")
        figure.savefig(paths[-1])
    return paths


def _draw(axis: Any, runs: Sequence[ReportedRun], title: str, metric: str, smoothing: float, legend: bool) -> None:
    for number, run in enumerate(runs):
        points = [(x, y) for x, y in zip(run.steps, run.metrics.get(metric, ()), strict=False) if y is not None]
        if not points:
            axis.plot([], [], color=COLOURS[number % len(COLOURS)], label=run.name)
            continue
        xs, ys = zip(*points, strict=True)
        colour, sparse = COLOURS[number % len(COLOURS)], metric.startswith("eval/")
        if not sparse and smoothing:
            axis.plot(xs, ys, color=colour, alpha=0.22, linewidth=0.8)
        smooth = ys if sparse else smoothed(ys, smoothing)
        axis.plot(xs, smooth, color=colour, linewidth=1.6, marker="o" if sparse else None, markersize=3, label=run.name)
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel(metric)
    axis.set_xlabel("step")
    if legend:
        axis.legend(frameon=False)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average of `values` that keeps `weight` of the average before, without bias towards
    zero."""
    total = norm = 0.0
    found = []
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        found.append(total / norm)
    return found
