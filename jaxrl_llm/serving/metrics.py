"""The numbers of `/metrics`, in the text format of Prometheus."""

import bisect
import dataclasses
from collections import Counter
from typing import Any

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PREFIX = "jaxrl_llm_"


def _number(kind: str, text: str) -> Any:
    """A number of `Counts`: a `counter`, which only grows, or a `gauge`; and what it says."""
    return dataclasses.field(default=0, metadata={"kind": kind, "text": text})


@dataclasses.dataclass
class Counts:
    """The numbers of a queue: totals since the start, and what is so at the moment."""

    prompt_tokens: int = _number("counter", "Tokens of prompts that were prefilled.")
    prefix_hits: int = _number("counter", "Prompts that began with a text that was kept.")
    prefix_tokens: int = _number("counter", "Their tokens that were not computed again.")
    prefix_bytes: int = _number("gauge", "Bytes of the texts that are kept.")
    generated_tokens: int = _number("counter", "Tokens that were sampled.")
    finished_rows: int = _number("counter", "Completions that have ended.")
    cancelled_rows: int = _number("counter", "Completions whose client left, or whose stop string came.")
    refused_rows: int = _number("counter", "Completions for which there was no memory, or that failed.")
    decode_steps: int = _number("counter", "Decode steps of the slot grid.")
    weight_version: int = _number("gauge", "Updates of the weights since the start.")
    running: int = _number("gauge", "Rows in slots.")
    waiting: int = _number("gauge", "Rows that wait for a slot.")


class Histogram:
    """A histogram of durations for Prometheus: counts in the buckets whose ends are `SECONDS`, and the sum."""

    def __init__(self, name: str, text: str):
        self.name, self.text, self.counts, self.sum = f"{PREFIX}{name}", text, [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Counts so many seconds in their bucket."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self) -> list[str]:
        """The lines of the histogram in the text format of Prometheus."""
        lines, total = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} histogram"], 0
        for edge, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{self.name}_bucket{{le="{edge}"}} {total}')
        return [*lines, f"{self.name}_sum {self.sum}", f"{self.name}_count {total}"]


class Metrics:
    """The counters of the HTTP side; `text` adds the numbers of the queue."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and HTTP status; 499: the client left
        self.first_token = Histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.latency = Histogram("request_seconds", "From a request to the end of its answer.")

    def text(self, counts: Counts, slots: int) -> str:
        """The page of all numbers, as Prometheus reads it."""
        lines = [
            f"# HELP {PREFIX}requests_total Requests by path and status.",
            f"# TYPE {PREFIX}requests_total counter",
        ]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'{PREFIX}requests_total{{path="{path}",status="{status}"}} {count}')
        for number in dataclasses.fields(counts):
            kind, text = number.metadata["kind"], number.metadata["text"]
            name = f"{PREFIX}{number.name}{'_total' if kind == 'counter' else ''}"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {getattr(counts, number.name)}"]
        lines += [f"# HELP {PREFIX}slots Slots.", f"# TYPE {PREFIX}slots gauge", f"{PREFIX}slots {slots}"]
        return "\n".join([*lines, *self.first_token.lines(), *self.latency.lines(), ""])
