"""What `python -m jaxrl_llm.train` says to a person who gives it nothing: what there is, and what to type first."""

import ast
import re
import shutil
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def welcome(folder: Path | None = None) -> str:
    """The text: commands to start with, the configurations of `folder`, the other commands.

    `folder` None is `configs` in the current directory or, where that has none, beside the package. Configurations and
    modules are read, not run.
    """
    found = _configs(folder)
    lines = ["jaxrl_llm trains language models: reinforcement learning, preferences, supervised fine-tuning.", ""]
    lines += _first(found)
    if found:
        lines += ["Configurations, each for `--config=`:", *_entries([(str(path), _about(path)) for path in found]), ""]
    lines += ["Other commands, each with `--help`:"]
    lines += _entries([(f"python -m {name}", about) for name, about in _commands()])
    lines += ["", "Every key is listed by `python -m jaxrl_llm.train --help`. Where to read on: docs/index.md."]
    return "\n".join(lines) + "\n"


def _first(found: list[Path]) -> list[str]:
    """What to type first."""
    start = next((path for path in found if path.stem == "grpo"), None)
    if start is None:
        return [
            "There is no folder `configs` here. Start with the defaults, GRPO on a model that the package brings:", "",
            "  python -m jaxrl_llm.train --config.output_dir=runs/first", "",
        ]  # fmt: skip
    return [
        "Start here: GRPO on a small model that the package brings, without GPU or download, in a few minutes:", "",
        f"  python -m jaxrl_llm.train --config={start}", "",
        "The same with two steps, to see that everything works, and with a model and prompts of your own:", "",
        f"  python -m jaxrl_llm.train --config={start}:tiny --config.output_dir=runs/try",
        f"  python -m jaxrl_llm.train --config={start} --config.model.path=FOLDER --config.data.path=prompts.jsonl \\",
        "      --config.rewards.functions=my_rewards.py:score --config.output_dir=runs/mine", "",
    ]  # fmt: skip


def _configs(folder: Path | None) -> list[Path]:
    """The files of `folder` that define `get_config`, by name."""
    folders = [Path("configs"), PACKAGE.parent / "configs"] if folder is None else [folder]
    for candidate in folders:
        found = [p for p in sorted(candidate.glob("*.py")) if "\ndef get_config(" in p.read_text(encoding="utf-8")]
        if found:
            return found
    return []


def _commands() -> list[tuple[str, str]]:
    """The names of the modules of the package that are command lines, and what each does; not `train`."""
    modules = sorted((PACKAGE / "commands").glob("*.py"))
    return [(f"jaxrl_llm {p.stem}", _about(p)) for p in modules if "\ndef main(" in p.read_text(encoding="utf-8")]


def _about(path: Path) -> str:
    """The first sentence of a module's docstring, without the identifiers of papers and the model all have."""
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    text = re.sub(r" \([^()]*\d{4}\.\d{5}[^()]*\)", "", " ".join(text.split()))
    text = re.sub(r" (on|from) the embedded model( and task( of grpo\.py)?)?", "", text)
    return re.split(r"(?<=[a-z)`][a-z)`][.:]) (?=[A-Z`])|: python|:$", text)[0].rstrip(".:")


def _entries(described: list[tuple[str, str]]) -> list[str]:
    """One line each, as wide as the terminal, the texts in a column of their own."""
    column = max((len(name) for name, _ in described), default=0) + 2
    room = max(40, min(shutil.get_terminal_size((120, 24)).columns, 120) - column - 2)
    return [f"  {name:<{column}}{textwrap.shorten(about, room, placeholder=' ...')}" for name, about in described]
