"""The console of a run: settings, progress bar, evaluations, completions and summary; plain lines when not a terminal.

Texts come from models and data sets, so they are shown verbatim: no markup is read in them and control characters
are escaped. On a terminal, everything appears above a progress bar. Anywhere else (a file, a pipe, a notebook)
there are only lines, with one for a few steps.
"""

import contextlib
import io
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxrl_llm.training.logging.stopwatch import Stopwatch

LABELS = {"tokens_per_second": "tokens/s", "completions/mean_length": "length", "grad_norm": "grad norm"}
EARLY_STEPS = (1, 2, 5)
QUIET_SECONDS = 10.0
LONG_SECONDS = 5.0  # of a wait whose end is worth a line
STEPS_FOR_SPEED = 20
PROMPT_CHARACTERS = 400
COMPLETION_CHARACTERS = 1200

# C0 and C1 controls except tab and newline: an escape sequence in a completion must not reach the terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Screen:
    """Shows one run of `total` steps that starts after step `done`; `shown` names the metrics beside the bar.

    `console` is standard output unless given.
    """

    def __init__(self, shown: Sequence[str], total: int, done: int = 0, console: Console | None = None):
        self.console = console or stdout_console()
        self.fancy = self.console.is_interactive and not self.console.is_dumb_terminal
        self.total = total
        self._shown = shown
        self._began = time.monotonic()
        self._last_line = float("-inf")
        self._recent: deque[tuple[int, float]] = deque(maxlen=STEPS_FOR_SPEED + 1)  # (step, when it was over)
        self._metrics = ""
        self._status: tuple[str, float] | None = None  # what is waited for, and since when
        self.watch: Stopwatch | None = None
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total, completed=done, eta="-")
        # The display is drawn by its own thread, so a step costs only the update of its numbers.
        self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=2)

    def begin(self) -> None:
        """Starts the progress bar."""
        self._began = time.monotonic()
        if self.fancy:
            self._progress.reset(self._task, completed=int(self._progress.tasks[0].completed))
            self._live.start()

    def close(self) -> None:
        """Ends the progress bar, leaving its last state on the screen."""
        self._status = None
        self._live.stop()

    def _picture(self) -> Group:
        """The bar, and below it what is waited for and for how long, or the newest metrics.

        Until there are metrics it is the phase that is open in `watch`.
        """
        status, below, watch = self._status, self._metrics, self.watch
        if status is None and not below and watch is not None and (phases := watch.phases[-1:]):
            status = phases[0], watch.changed
        if status is not None:
            below = f"{status[0]}  {duration(time.monotonic() - status[1])}"
        return Group(self._progress, Text(below, no_wrap=True, overflow="ellipsis"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step: beside the bar, or in a line when one is due; an evaluation always."""
        evaluation = {name[5:]: value for name, value in metrics.items() if name.startswith("eval/")}
        if len(evaluation) < len(metrics):
            if step:  # an evaluation before the first step is none
                self._recent.append((step, time.monotonic()))
            words = [f"{LABELS.get(name, name)} {show(metrics[name])}" for name in self._shown if name in metrics]
            if self.fancy:
                self._metrics, self._status = "  ".join(words), None
                self._progress.update(self._task, completed=step, eta=self.remaining(step))
            elif self._due(step):
                self._last_line = time.monotonic()
                elapsed = duration(time.monotonic() - self._began)
                words += [f"elapsed {elapsed}", f"ETA {self.remaining(step)}"]
                self._plain("  ".join((f"step {step}/{self.total}", *words)))
        if evaluation:
            self._line(f"step {step}  held-out {evaluation_line(evaluation)}", "bold green")

    def remaining(self, step: int) -> str:
        """The time to the last step, at the speed of the last steps; the first step, which compiles, does not count."""
        if step >= self.total:
            return duration(0)
        if len(self._recent) < 2:
            return "-"
        (first, start), (last, end) = self._recent[0], self._recent[-1]
        return duration((end - start) / (last - first) * (self.total - step))

    def _due(self, step: int) -> bool:
        every = max(10, self.total // 100)
        quiet = time.monotonic() - self._last_line >= QUIET_SECONDS
        return step in EARLY_STEPS or step % every == 0 or step == self.total or quiet

    def status(self, text: str, began: float) -> None:
        """Shows a text and the seconds since `began` below the bar, until the next step or text; an empty one ends it.

        Without a terminal there is nothing to show it on.
        """
        self._status = (self._clean(text), began) if text else None

    def note(self, message: str) -> None:
        """Shows the message in a line, above the bar of a terminal."""
        self._line(message)

    def warn(self, message: str) -> None:
        """Shows the message as a line `warning: ...`, in yellow on a terminal."""
        self._line(f"warning: {message}", "bold yellow")

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]], held_out: bool = False) -> None:
        """Shows completions: the end of the prompt, the completion, and the other columns in one line."""
        for number, row in enumerate(rows, 1):
            scores = "  ".join(
                f"{name} {show(value)}"
                for name, value in row.items()
                if name not in ("prompt", "completion") and not is_pictures(value)
            )
            prompt, completion = as_text(row["prompt"]), shorten(as_text(row["completion"]))
            if (missing := len(prompt) - PROMPT_CHARACTERS) > 0:
                prompt = f"({missing:,} characters before) … {prompt[missing:]}"
            title = f"step {step}  {'held-out ' * held_out}completion {number} of {len(rows)}"
            if self.fancy:
                body = Text.assemble(
                    (self._clean(prompt), "dim"), "\n", self._clean(completion), "\n", (self._clean(scores), "cyan")
                )
                self.console.print(Panel(body, title=title, title_align="left"))
            else:
                self._plain(f"{title}\n  {scores}\n  prompt:\n{indent(prompt)}\n  completion:\n{indent(completion)}")

    def table(self, title: str, rows: Mapping[str, object], subtitle: str = "") -> None:
        """Shows names and values under a title."""
        self._columns(f"{title}  {subtitle}".rstrip(), [(name, str(value)) for name, value in rows.items()])

    def evaluations(self, evaluations: Sequence[tuple[int, Mapping[str, float | None]]]) -> None:
        """Shows the first and the last evaluation, `(step, metrics)`, beside each other; nothing when there is none."""
        if not evaluations:
            return
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        rows = [("", f"step {first}", f"step {last}", "change")]
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name), after.get(name)
            change = "" if old is None or new is None else f"{'+' if new >= old else '-'}{show(abs(new - old))}"
            rows.append((name, show(old), show(new), change))
        self._columns("held-out", rows)

    def phases(self, seconds: Mapping[str, float]) -> None:
        """Shows the seconds of each phase and their shares."""
        total = sum(seconds.values())
        rows = [(phase, duration(value), f"{value / total:.0%}") for phase, value in seconds.items() if total > 0]
        self._columns("time", [*rows, ("total", duration(total), "")])

    def _columns(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        if not self.fancy:
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
            lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
            self._plain("\n".join((title, *(f"  {line.rstrip()}" for line in lines))))
            return
        table = Table(title=Text(self._clean(title), "bold"), title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*(Text(self._clean(cell), "cyan" if i == 0 else "") for i, cell in enumerate(row)))
        self.console.print(table)

    def _line(self, text: str, style: str = "") -> None:
        if self.fancy:
            self.console.print(Text(self._clean(text), style), soft_wrap=True)  # a command is copied from one line
        else:
            self._plain(text)

    def _plain(self, text: str) -> None:
        # Not through rich, which breaks lines at 80 columns when it does not know the width.
        print(self._clean(text), file=self.console.file, flush=True)

    def _clean(self, text: str) -> str:
        """The text with escapes for control characters and for those that the console cannot encode."""
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        return text.translate(_CONTROLS).encode(encoding, "backslashreplace").decode(encoding)


def stdout_console() -> Console:
    """A console on standard output that is a terminal only where standard output is one, whatever FORCE_COLOR says."""
    return Console(file=sys.stdout, force_terminal=sys.stdout.isatty(), force_jupyter=False)


def stderr_console() -> Console:
    """A console on standard error, for what is not the result of a command; a terminal where that is one."""
    return Console(file=sys.stderr, force_terminal=sys.stderr.isatty(), force_jupyter=False)


class _Stream(io.FileIO):
    """A standard stream that drops what cannot be written, and says so once, on the other one."""

    warned = False  # of either

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not _Stream.warned:
                _Stream.warned = True
                name, other = ("error", sys.stdout) if self.fileno() == 2 else ("output", sys.stderr)
                print(
                    f"warning: standard {name} cannot be written ({error.strerror}): the run goes on, and lines are "
                    "missing there",
                    file=other,
                    flush=True,
                )
            return memoryview(data).nbytes


def outlive_streams() -> None:
    """Lets this process go on where its standard output or error cannot be written any more.

    The disk may be full that their file is on, or the reader of a pipe gone; metrics and checkpoints are elsewhere.
    """
    for name, old in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if old is None or getattr(sys, name) is not old or not isinstance(old, io.TextIOWrapper):
            continue  # a notebook's, or a test's
        raw = _Stream(old.fileno(), "w", closefd=False)
        buffer = raw if old.write_through else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            buffer, old.encoding, old.errors, line_buffering=old.line_buffering, write_through=old.write_through
        )
        setattr(sys, name, new)


@contextlib.contextmanager
def waiting(what: str, console: Console, lines: bool = True) -> Iterator[None]:
    """Shows what the block does: on a terminal with the seconds so far, in a line that goes when it is over.

    Elsewhere there is a line at its start and, when it took long, one at its end, or with `lines` off nothing.
    """
    began = time.monotonic()
    if console.is_interactive and not console.is_dumb_terminal:

        def picture() -> Text:
            return Text(f"{what}  {duration(time.monotonic() - began)}", no_wrap=True, overflow="ellipsis")

        own = console.file is sys.stdout
        # Progress bars of downloads write to standard error, results of commands to standard output: they stay there.
        with Live(
            get_renderable=picture, console=console, refresh_per_second=2, transient=True, redirect_stderr=False,
            redirect_stdout=own,
        ):  # fmt: skip
            yield
        return
    if lines:
        print(f"{what} ...", file=console.file, flush=True)
    yield
    if lines and time.monotonic() - began > LONG_SECONDS:
        print(f"{what}: done in {duration(time.monotonic() - began)}", file=console.file, flush=True)


def evaluation_line(evaluation: Mapping[str, float]) -> str:
    """`accuracy 0.620 (greedy 0.810)  reward 0.700 [0.650, 0.750]`: the metrics, accuracies first.

    Each has its greedy counterpart and its interval beside it.
    """
    words, beside = [], set[str]()
    for name in sorted(evaluation, key=lambda name: name.rpartition("/")[2] != "accuracy"):
        where, slash, last = name.rpartition("/")
        greedy, *ends = f"{where}{slash}greedy_{last}", f"{name}_low", f"{name}_high"
        text = f"{name} {show(evaluation[name])}"
        if set(ends) <= evaluation.keys():
            text += f" [{', '.join(show(evaluation[end]) for end in ends)}]"
            beside |= set(ends)
        if greedy in evaluation:
            text += f" (greedy {show(evaluation[greedy])})"
            beside |= {greedy, f"{greedy}_low", f"{greedy}_high"}
        words.append((name, text))
    return "  ".join(text for name, text in words if name not in beside)


def show(value: object) -> str:
    """A short text of a value: 0.512, 116.3, 1.25e-06, 12,345; texts in one short line, None as `-`."""
    if value is None:
        return "-"
    value = value.item() if getattr(value, "shape", None) == () else value  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if not isinstance(value, float):
        return shorten(repr(value) if isinstance(value, str) else str(value), 80)
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`0:01:23`, or `1 day, 0:00:00`; below ten seconds with a decimal, `1.5s`."""
    return f"{seconds:.1f}s" if 0 < seconds < 10 else str(timedelta(seconds=round(seconds)))


def as_text(value: object) -> str:
    """A text unchanged, a conversation as one `role: content` a line, with the calls of tools behind it."""
    if isinstance(value, list | tuple):
        return "\n".join(
            f"{turn['role']}: {_parts_text(turn['content'])}{_calls_text(turn)}" if "content" in turn else str(turn)
            for turn in value
        )
    return str(value)


def _calls_text(turn: Mapping[str, object]) -> str:
    """The tool calls of a message as JSON, each in tags as most models write them."""
    calls = turn.get("tool_calls")
    called = [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return "".join(f"<tool_call>{json.dumps(each, ensure_ascii=False, default=repr)}</tool_call>" for each in called)


def _parts_text(content: object) -> object:
    """The content of a message; of one in parts their texts, and the type of other parts in brackets."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return content
    return "".join(str(part["text"]) if "text" in part else f"[{part['type']}]" for part in content)


def is_pictures(value: object) -> bool:
    """True for the cell of a table of completions that is thumbnails: JSON of a list of data: URLs."""
    return isinstance(value, str) and value.startswith('["data:image/png;base64,')


def shorten(text: str, limit: int = COMPLETION_CHARACTERS) -> str:
    """The text, or its start and the number of missing characters."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def indent(text: str) -> str:
    """The lines of the text, each after four spaces."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
