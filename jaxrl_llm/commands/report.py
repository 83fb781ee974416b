"""Write an HTML page of one or several runs.

    python -m jaxrl_llm report RUN [RUN ...]

RUN is the output_dir of a run, finished or not. The page needs no network: the curves of all runs in the same plots,
time by phase, warnings, settings that differ, and a table of completions to sort, search and filter. With --watch=30 it
is written anew every 30 seconds, and an open page follows, until the runs are finished or Ctrl-C is pressed.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.files import replaced
from jaxrl_llm.config.flags import load_options, positional
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.tools.report.page import write_page
from jaxrl_llm.tools.report.pictures import check_pictures, write_pictures
from jaxrl_llm.tools.report.runs import read_runs
from jaxrl_llm.tools.report.samples import chunks_of, count_rows
from jaxrl_llm.training.logging.records import COMPLETIONS

FLAGS = (
    Setting(
        "output", None, "HTML file; none is report.html, in the folder of a single run, else in the current folder."
    ),
    Setting("png", None, "Folder for PNGs of the main curves, drawn by matplotlib; none draws nothing."),
    Setting(
        "smoothing",
        0.6,
        "Initial smoothing of the curves, 0 is none; a slider on the page changes it.",
        float,
        minimum=0,
        below=1,
    ),
    Setting("completions", 100_000, "Most completions in the page, of evenly spaced steps.", int, minimum=0),
    Setting(
        "characters",
        4000,
        "Most characters of a prompt or completion in the page; longer ones lose their middle.",
        int,
        minimum=100,
    ),
    Setting("watch", 0, "Seconds between updates of the page while the runs go on; 0 writes it once.", int, minimum=0),
)


def report(
    folders: Sequence[str | Path],
    output: str | Path | None = None,
    png: str | Path | None = None,
    smoothing: float = 0.6,
    completions: int = 100_000,
    characters: int = 4000,
    reload_seconds: int = 0,
) -> list[Path]:
    """Writes the page, and PNGs when `png` is a folder for them, and returns the paths of all files.

    With `reload_seconds` the page loads itself again after that many seconds, while one of the runs is not finished.

    Raises ConfigError for a folder without a run, a file that cannot be read or written, and PNGs without matplotlib.
    """
    if not folders:
        raise ConfigError("name a run: python -m jaxrl_llm report RUN [RUN ...]")
    if png is not None:
        check_pictures()
    runs = read_runs(folders)
    path = Path(output).expanduser() if output else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    files = (file for run in runs for file in (run.folder / COMPLETIONS).glob("*_*.parquet"))
    total = sum(count_rows(file) for file in files if file.name.startswith(("completions_", "evaluation_")))
    reload_seconds = 0 if all(run.is_finished for run in runs) else reload_seconds
    note = f"A part of {total:,} completions: --completions takes more." if total > completions else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            write_page(file, runs, chunks_of(runs, completions, characters), smoothing, note, reload_seconds)
        return [path, *(write_pictures(runs, Path(png).expanduser(), smoothing) if png is not None else ())]
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}; set another --output") from error


def watch(folders: Sequence[str | Path], seconds: int, **options: Any) -> None:
    """Writes the page anew every `seconds`, until all runs are finished or KeyboardInterrupt; prints its path once.

    The last page no longer loads itself again. `options` are those of `report`.
    """
    shown = False
    try:
        while True:
            finished = all(run.is_finished for run in read_runs(folders))
            paths = report(folders, **options, reload_seconds=0 if finished else seconds)
            if not shown:
                print(f"{paths[0]}  (updated every {seconds} s; Ctrl-C ends that)", flush=True)
                shown = True
            if finished:
                return
            time.sleep(seconds)
    except KeyboardInterrupt:
        report(folders, **options)


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    runs, flags = positional(argv, FLAGS)
    options = load_options(flags, __doc__ or "", FLAGS)
    if seconds := options.pop("watch"):
        watch(runs, seconds, **options)
        return
    sys.stdout.write("".join(f"{path}\n" for path in report(runs, **options)))
