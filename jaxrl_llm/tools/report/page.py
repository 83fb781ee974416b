"""The HTML page of a report: one file with its style, scripts and data; it asks the network for nothing."""

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.resources import files
from string import Template
from typing import IO, Any

from jaxrl_llm.config import default
from jaxrl_llm.tools.report.groups import grouped, unit_of
from jaxrl_llm.tools.report.runs import ReportedRun, differences

# Curves at the top of the page: a title, and the metrics that may stand under it, of which a report shows those it has.
HEADLINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward",)),
    ("Held-out", ("eval/accuracy", "eval/reward", "eval/loss")),
    ("KL", ("kl", "objective/kl")),
    ("Entropy", ("entropy",)),
    ("Length", ("completions/mean_length",)),
    ("Truncated", ("completions/clipped_ratio",)),
    ("Clip", ("clip_ratio/region_mean", "cispo_clip_ratio")),
    ("Mismatch", ("sampling/sampling_logp_difference/mean", "rollout_corr/kl")),
    ("Loss", ("loss",)),
    ("Margin", ("rewards/margins", "margin")),
    ("Accuracy", ("rewards/accuracies", "accuracy", "mean_token_accuracy")),
    ("Gradient", ("grad_norm",)),
    ("Speed", ("tokens_per_second",)),
    ("Memory", ("machine/device_memory_peak_gib", "machine/host_memory_peak_gib")),
)
# The explanations of the curves at the top, by title.
EXPLAINED = {
    "Reward": "mean score of the completions of a step",
    "Held-out": "on prompts or rows that are not trained on",
    "KL": "distance from the reference policy",
    "Entropy": "how undecided the policy is; near 0 all samples are alike",
    "Length": "tokens of a completion",
    "Truncated": "share of completions that were cut off",
    "Clip": "share of tokens whose ratio was clipped; 0 is usual with one update a step",
    "Mismatch": "log-probs of sampler and trainer; near 0 is right",
    "Loss": "what is minimised",
    "Margin": "reward of what was chosen above that of what was rejected",
    "Accuracy": "share of right choices, or of right tokens",
    "Gradient": "norm before clipping",
    "Speed": "trained tokens a second, without compiling",
    "Memory": "peak since the start, of the fullest device or of the process",
}
MOST_SETS = 6  # named sets with a curve at the top


def headlines(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """(title, metric) of the curves at the top: under each title the metric that most runs have, of several the first.

    Of held-out prompts every named set has a curve of its own, under the same title.
    """
    found = []
    for title, names in HEADLINES:
        counts = [(sum(name in run.metrics for run in runs), name) for name in names]
        count, name = max(counts, key=lambda pair: pair[0])
        if count:
            found.append((title, name))
        if title == "Held-out":
            found += [(title, metric) for metric in _of_sets(runs, names)]
    return found


def _of_sets(runs: Sequence[ReportedRun], names: Sequence[str]) -> list[str]:
    """`eval/<set>/accuracy` of each named set, or the next of `names` that it has; not those of its data sources."""
    found: dict[str, str] = {}
    for name in names:
        pattern = re.compile(rf"eval/([^/]+)/{re.escape(name.removeprefix('eval/'))}")
        for match in (pattern.fullmatch(metric) for run in runs for metric in run.metrics):
            if match:
                found.setdefault(match[1], match[0])
    return list(found.values())[:MOST_SETS]


def algorithm_of(run: ReportedRun) -> str | None:
    """The algorithm of a run in a few words: its name, and its advantages and loss where they are not the default."""
    usual = default().algorithm
    found = {part: run.settings.get(f"algorithm.{part}") for part in ("name", "advantage", "loss")}
    words = [word for part, word in found.items() if word is not None and (part == "name" or word != usual[part])]
    return " · ".join(dict.fromkeys(map(str, words))) or None  # rloo is the name of both


def write_page(
    file: IO[str],
    runs: Sequence[ReportedRun],
    chunks: Iterable[dict[str, Any]],
    smoothing: float,
    note: str,
    reload_seconds: int = 0,
) -> None:
    """Writes the page. Data stands in it as Base64 of gzipped JSON, so that no text in it can be read as HTML.

    The page reloads itself every `reload_seconds`; 0 is never.
    """
    title = "jaxrl_llm: " + ", ".join(run.name for run in runs)
    template = Template(_part("page.html"))
    curves = {
        "headlines": headlines(runs),
        "explained": EXPLAINED,
        "groups": [
            {"title": group.title, "explanation": group.explanation, "metrics": names}
            for group, names in grouped({name for run in runs for name in run.metrics})
        ],
        "units": {name: unit for run in runs for name in run.metrics if (unit := unit_of(name))},
        "written": datetime.now().astimezone().isoformat(" ", "seconds"),
        "reload": reload_seconds,
        "smoothing": smoothing,
        "note": note,
        "differences": differences(runs),
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "steps": run.steps,
                "times": run.times,
                "metrics": run.metrics,
                "algorithm": algorithm_of(run),
                "model": run.settings.get("model.path"),
                "total": run.settings.get("total_steps"),
                "starts": run.starts,
            }
            for run in runs
        ],
    }
    scripts = "".join(_part(name) for name in ("charts.js", "table.js", "main.js"))
    page = template.substitute(title=html.escape(title), style=_part("style.css"), data="\0", scripts=scripts)
    head, tail = page.split("\0")
    file.write(head)
    file.write(_script("curves", curves))
    for chunk in chunks:
        file.write(_script("completions", chunk))
    file.write(tail)


def _part(name: str) -> str:
    return files("jaxrl_llm.tools.report").joinpath(name).read_text(encoding="utf-8")


def _script(kind: str, content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    packed = base64.b64encode(gzip.compress(text, 6)).decode()
    return f'<script type="text/plain" class="{kind}">{packed}</script>\n'
