"""The curves of a run as one SVG file that needs nothing else."""

import html
import math
from collections.abc import Sequence

from jaxrl_llm.tools.report.page import headlines
from jaxrl_llm.tools.report.pictures import COLOURS, smoothed
from jaxrl_llm.tools.report.runs import ReportedRun

COLUMNS, WIDTH, HEIGHT, MARGIN = 3, 300, 190, 16
LEFT, RIGHT, TOP, BOTTOM = 54, 8, 34, 22  # of a panel, around its plot
POINTS = 300  # of a curve at most
SMOOTHING = 0.6


def curves_svg(run: ReportedRun, last_step: int) -> str:
    """An SVG of the main metrics (`report.page.HEADLINES`) up to `last_step`, one panel each; "" without any.

    Faint lines are the values, strong ones their moving average; evaluations are points.
    """
    panels = []
    for title, metric in headlines([run]):
        values = zip(run.steps, run.metrics[metric], strict=True)
        points = [(x, y) for x, y in values if y is not None and math.isfinite(y) and x <= last_step]
        if points:
            panels.append((title, metric, points))
    if not panels:
        return ""
    columns = min(COLUMNS, len(panels))
    width = columns * WIDTH + 2 * MARGIN
    height = -(-len(panels) // columns) * HEIGHT + 2 * MARGIN
    drawn = "\n".join(
        _panel(title, metric, points, MARGIN + (i % columns) * WIDTH, MARGIN + (i // columns) * HEIGHT)
        for i, (title, metric, points) in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="10" fill="#333">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{drawn}\n</svg>\n'
    )


def _panel(title: str, metric: str, points: Sequence[tuple[int, float]], x: int, y: int) -> str:
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # the ends of the axis differ
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    span = max(steps[-1] - steps[0], 1)

    def line(heights: Sequence[float], style: str) -> str:
        every = max(1, math.ceil(len(points) / POINTS))
        kept = [i for i in range(len(points)) if i % every == 0 or i == len(points) - 1]
        places = " ".join(f"{place(i, heights[i])[0]:.1f},{place(i, heights[i])[1]:.1f}" for i in kept)
        return f'<polyline points="{places}" fill="none" stroke="{COLOURS[0]}" {style}/>'

    def place(i: int, value: float) -> tuple[float, float]:
        return LEFT + (steps[i] - steps[0]) / span * wide, TOP + (high - value) / (high - low) * tall

    parts = [f'<text y="12" font-size="12" font-weight="600">{html.escape(title)}</text>']
    parts.append(f'<text y="25" fill="#888">{html.escape(metric)}</text>')
    for share in (0.0, 0.5, 1.0):
        level = TOP + share * tall
        parts.append(f'<path d="M{LEFT} {level:.1f}h{wide}" stroke="#ddd"/>')
        number = f"{high - share * (high - low):.3g}"
        parts.append(f'<text x="{LEFT - 5}" y="{level + 3:.1f}" text-anchor="end" fill="#888">{number}</text>')
    for step, anchor, at in ((steps[0], "start", LEFT), (steps[-1], "end", LEFT + wide)):
        parts.append(f'<text x="{at}" y="{HEIGHT - 8}" text-anchor="{anchor}" fill="#888">step {step}</text>')
    if metric.startswith("eval/") or len(points) == 1:
        parts.append(line(values, 'stroke-width="1.6"'))
        dots = (place(i, value) for i, value in enumerate(values[-POINTS:], max(0, len(values) - POINTS)))
        parts += [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="2.4" fill="{COLOURS[0]}"/>' for cx, cy in dots]
    else:
        parts.append(line(values, 'stroke-width="0.8" stroke-opacity="0.25"'))
        parts.append(line(smoothed(values, SMOOTHING), 'stroke-width="1.6"'))
    return f'<g transform="translate({x},{y})">' + "".join(parts) + "</g>"
