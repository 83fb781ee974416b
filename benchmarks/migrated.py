"""Migrates public configurations of other libraries, and writes benchmarks/results/migrated.md: what came of each.

    git clone --depth=1 https://github.com/axolotl-ai-cloud/axolotl public/axolotl      # and so on, see REPOSITORIES
    python -m benchmarks.migrated public

Nothing is downloaded or run: a verdict says what `python -m jaxrl_llm migrate` says of the file. "as it is": a valid
configuration, and the notes at its top are about differences alone. "to complete": it names a model, data, format,
reward or variable that only its user knows. "not here": it needs what this library does not do, which its notes name.
"refused": nothing is written, for the reason that is shown. The files are those of migrated.txt.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import table
from jaxrl_llm.config import ConfigError
from jaxrl_llm.tools.migrate import migrate

PAGE = Path(__file__).parent / "results" / "migrated.md"
REPOSITORIES = {
    "axolotl": "axolotl-ai-cloud/axolotl",
    "verl": "volcengine/verl",
    "trl": "huggingface/trl",
    "open-r1": "huggingface/open-r1",
    "alignment-handbook": "huggingface/alignment-handbook",
    "llamafactory": "hiyouga/LLaMA-Factory",
    "ms-swift": "modelscope/ms-swift",
    "openrlhf": "OpenRLHF/OpenRLHF",
    "nemo-rl": "NVIDIA-NeMo/RL",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "skyrl": "NovaSky-AI/SkyRL",
    "tunix": "google/tunix",
}
FILES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split()
ABSENT = re.compile(
    r"text only|no diffusion training|no quantisation-aware training|rows are as their source has|"
    r"has no equivalent; (there are|\w+ is written)"
)
OPEN = re.compile(
    r"the file names no|does not say what|set model\.path|set data\.path|there is no reward|see that docs/models|"
    r"has no format here|has no format for|chat_template = .* own template|is left out:|is of a plugin|"
    r"write its reward|is an entry of"
)


class Verdict(NamedTuple):
    """What came of a file."""

    file: str
    algorithm: str
    verdict: str
    notes: list[str]


def judge(folder: Path, file: str, scratch: Path) -> Verdict:
    """The verdict on a file of the folder of checkouts, as it is for 8 devices and 10,000 rows."""
    try:
        config, text = migrate(folder / file, devices=8, rows=10_000, output=scratch / "config.py")
    except ConfigError as error:
        return Verdict(file, "", "refused", [_plain(str(error), folder, scratch)])
    c = config.algorithm
    algorithm = c.name if c.loss == "auto" else f"{c.name}, {c.loss}"
    head = text.partition('"""')[2].partition('"""')[0].partition("Look at this first:")[2]
    notes = [_plain(note, folder, scratch) for note in re.split(r"^- ", head, flags=re.MULTILINE)[1:]]
    kinds = [(ABSENT, "not here"), (OPEN, "to complete")]
    verdict = next((kind for pattern, kind in kinds if any(pattern.search(note) for note in notes)), "as it is")
    return Verdict(file, algorithm, verdict, notes)


def _plain(note: str, folder: Path, scratch: Path) -> str:
    """A note on one line, without the paths of this machine."""
    return " ".join(note.split()).replace(f"{folder}/", "").replace(f"{scratch}/", "")


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    folder = Path(argv[0])
    os.environ["HOME"] = "/home/you"  # which notes name
    with tempfile.TemporaryDirectory() as scratch:
        verdicts = [judge(folder, file, Path(scratch)) for file in FILES]
    counts = {kind: sum(x.verdict == kind for x in verdicts) for kind in dict.fromkeys(x.verdict for x in verdicts)}
    lines = ["# Public configurations, migrated", "", "Written by `python -m benchmarks.migrated`:", ""]
    lines += [f"{len(verdicts)} files: {', '.join(f'{count} {kind}' for kind, count in counts.items())}.", ""]
    for name, repository in REPOSITORIES.items():
        own = [x for x in verdicts if x.file.startswith(f"{name}/")]
        command = ["git", "-C", str(folder / name), "log", "-1", "--format=%h of %cs"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        lines += [f"## {repository} {commit}".rstrip(), ""]
        rows = [["file", "algorithm", "verdict", "to look at"]]
        for x in own:
            shown = "; ".join(note if len(note) < 160 else f"{note[:157]}..." for note in x.notes).replace("|", "\\|")
            rows.append([f"`{x.file.partition('/')[2]}`", x.algorithm, x.verdict, shown])
        lines += [table(rows)]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
