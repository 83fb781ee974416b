"""One HTML page of one or several runs: python -m jaxrl_llm report RUN [RUN ...]

RUN is the output_dir of a run, which may still be going on. The page needs no network: curves of all runs over each
other, time by phase, warnings, settings that differ, and a table of completions to sort, search and filter.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.schema import Key
from jaxrl_llm.tools.report.page import write_page
from jaxrl_llm.tools.report.pictures import check_pictures, write_pictures
from jaxrl_llm.tools.report.runs import read_runs
from jaxrl_llm.tools.report.samples import chunks_of, count_rows
from jaxrl_llm.training.logging.logger import COMPLETIONS

OPTIONS = (
    Key("output", None, "The page; none is report.html, of one run in its folder, of several in the current one."),
    Key("png", None, "A folder for PNGs of the main curves, which matplotlib draws; none draws nothing."),
    Key(
        "smoothing",
        0.6,
        "How much of what was the curves keep, from 0 (nothing); a slider of the page.",
        float,
        minimum=0,
        below=1,
    ),
    Key("completions", 100_000, "Completions in the page at most, of evenly spaced steps.", int, minimum=0),
    Key(
        "characters",
        4000,
        "Characters of a prompt or completion in the page; the middle of longer ones is left out.",
        int,
        minimum=100,
    ),
)


def report(
    folders: Sequence[str | Path],
    output: str | Path | None = None,
    png: str | Path | None = None,
    smoothing: float = 0.6,
    completions: int = 100_000,
    characters: int = 4000,
) -> list[Path]:
    """The paths of what was written: the page, and the PNGs when `png` is a folder for them; see `--help`.

    Raises ConfigError for a folder without a run, a file that cannot be read or written, and PNGs without matplotlib.
    """
    if not folders:
        raise ConfigError("name a run: python -m jaxrl_llm report RUN [RUN ...]")
    if png is not None:
        check_pictures()
    runs = read_runs(folders)
    path = Path(output) if output else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    held = sum(count_rows(file) for one in runs for file in (one.folder / COMPLETIONS).glob("completions_*.parquet"))
    note = f"A part of {held:,} completions: --completions takes more." if held > completions else ""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            write_page(file, runs, chunks_of(runs, completions, characters), smoothing, note)
        part.replace(path)
        return [path, *(write_pictures(runs, Path(png), smoothing) if png is not None else ())]
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}; set another --output") from error
    finally:
        if part.exists():
            part.unlink()


def split_runs(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The runs and the flags of a command line; what follows a flag without `=` is its value."""
    runs, flags, value = [], [], False
    for argument in argv:
        is_flag = argument.startswith("-")
        (flags if is_flag or value else runs).append(argument)
        value = is_flag and "=" not in argument
    return runs, flags


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    runs, flags = split_runs(argv)
    options = load_options(flags, __doc__ or "", OPTIONS)
    sys.stdout.write("".join(f"{path}\n" for path in report(runs, **options)))
