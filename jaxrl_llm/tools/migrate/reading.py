"""Reading a file of another library into a `Source`: YAML, JSON, TOML, a shell or Python script, or a notebook.

Nothing is run."""

import ast
import json
import re
from pathlib import Path

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.commands import read_flags, read_python, read_shell
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.prime_rl import read_toml
from jaxrl_llm.tools.migrate.scripts import PARSERS, read_script
from jaxrl_llm.tools.migrate.shell import commands
from jaxrl_llm.tools.migrate.table import find, table
from jaxrl_llm.tools.migrate.trees import TREES, inherited, load, read_tree

SHELL = ("", ".sh", ".bash", ".slurm", ".sbatch", ".txt")
# Names of projects and runs are environment variables of the trackers, which scripts set in these ways:
# `export NAME=value`, `NAME=value command`, `os.environ["NAME"] = "value"`.
TRACKED = (
    "WANDB_PROJECT|WANDB_NAME|WANDB_ENTITY|WANDB_MODE|MLFLOW_EXPERIMENT_NAME|MLFLOW_TRACKING_URI|SWANLAB_PROJECT|"
    "TRACKIO_PROJECT"
)
VARIABLE = re.compile(rf"""\b({TRACKED})\b["'\]]*\s*[=,]\s*["']?([^\s"'$)]+)""")


def read(path: str, system: str = "auto", trainer: str = "", companion: str = "functions.py") -> Source:
    """Return the content of a file; `system` is a library, or auto, which looks at its keys.

    Functions that the file defines are named as those of the file `companion`. Raises ConfigError: a missing file, one
    of another kind, or one that cannot be read.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()})")
    kind = file.suffix.lower()
    text = "" if kind in TREES else file.read_text(encoding="utf-8")
    if kind in TREES:
        tree = load(file, path)
        parents = tree.get("defaults")  # of NeMo-RL a file, of Hydra a list of groups
        if system == "nemo-rl" or (system == "auto" and isinstance(parents, str)):
            settings, notes = inherited(file)
            source = Source("nemo-rl", trainer, settings, path, notes)
        else:
            source = read_tree(tree, path, system, trainer)
    elif kind == ".toml":
        source = read_toml(file, path, trainer)
    elif kind in (".py", ".ipynb"):
        text, notes = _code(text, path) if kind == ".ipynb" else (text, ())
        source = read_python(text, path, system, trainer, companion)
        told = source.library == "tunix" or source.settings.keys() & {"max_steps", "learning_rate", "dataset_name"}
        if not told and (command := _documented(text)):
            flags = read_flags(command, path, trainer)
            source = read_script(text, path, system, trainer or flags.trainer, companion, flags.settings)
            source = source._replace(
                checks=(*source.checks, "the arguments are those of the first command in its text")
            )
        source = source._replace(checks=(*notes, *source.checks))
    elif kind in SHELL:
        source = read_shell(text, path, system, trainer, companion)
    else:
        raise ConfigError(f"{path} is no .yaml, .json, .toml, .py, .ipynb or .sh file")
    if system == "auto" and kind not in (".py", ".ipynb"):
        _check_keys(source)
    if source.library != "trl" or kind in TREES:  # verl has keys for the names of projects and runs
        return source
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return source._replace(settings={**dict(VARIABLE.findall(lines)), **source.settings})


def _code(text: str, path: str) -> tuple[str, tuple[str, ...]]:
    """Return the Python of a notebook, without the lines and cells that are commands, and notes of cells left out."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no notebook: {error!r}") from error
    codes, notes = [], []
    for number, cell in enumerate(cells, 1):
        code = "".join(cell["source"])
        if re.match(r"\s*%%(?!capture|time)", code):  # of bash, or of a file
            continue
        code = re.sub(r"(?m)^([ \t]*)[!%](.*\\\n)*.*", r"\1pass", code)
        try:
            ast.parse(code)
            codes.append(code)
        except SyntaxError as error:
            notes.append(f"code cell {number} is not read, as it is no Python: {error.msg}")
    return "\n\n".join(codes), tuple(notes)


def _documented(text: str) -> list[str] | None:
    """Return the words of the command in the docstring of a script that reads its arguments from a command line."""
    if not any(parser in text for parser in PARSERS):
        return None
    launched = r"(?m)^[ \t#]*((?:[A-Z_]+=\S+ +)*(?:accelerate|python3?|torchrun|trl|uv)\b(?:.*\\\n)*.*)"
    found = next((match[1] for match in re.finditer(launched, text) if ".py" in match[1]), "")
    try:
        words = next(iter(commands(re.sub(r"(?m)^[ \t]*#", "", found), "its command")), [])
    except ConfigError:
        return None
    return words if any(word.startswith("--") for word in words) else None


def _check_keys(source: Source) -> None:
    """Raise ConfigError for a file of a library that is not known here, such as slime.

    Its keys look like those of one that is, but most are none of that one's: what would be written are defaults.
    """
    if source.library not in ("trl", "verl"):  # others are told by names of their own
        return
    unknown = [key for key in source.settings if find(table(source.library), key) is None]
    if 2 * len(unknown) > len(source.settings):
        raise ConfigError(
            f"{source.path} is of no library that is read: {len(unknown)} of its {len(source.settings)} "
            f"keys are none of {source.library}'s, such as {', '.join(unknown[:3])}. Set in a file of configs/ what it "
            f"says (docs/configuration.md has the keys), or say --system={source.library} if it is one"
        )
