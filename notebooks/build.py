"""Writes the notebooks from their texts: each `NAME.py` (cells in the percent format) becomes `NAME.ipynb`.

    python notebooks/build.py            # keeps the outputs of the cells that have not changed
    python notebooks/build.py --execute  # runs all of them from a clean kernel and stores what they print
    python notebooks/build.py --execute inside_grpo  # this one alone

Edit the .py files; tests/docs/test_notebooks.py checks that the notebooks agree with them.
"""

import hashlib
import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
MARKER = re.compile(r"^# %%(?P<markdown> \[markdown\])?$", re.MULTILINE)


def texts() -> list[Path]:
    """The texts that become notebooks."""
    return sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def cells_of(text: str) -> list[dict[str, Any]]:
    """The cells of a text in the percent format, without outputs; what comes before the first marker is no cell."""
    marks = [*MARKER.finditer(text)]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        _cell(bool(mark["markdown"]), text[mark.end() : end].strip("\n")) for mark, end in zip(marks, ends, strict=True)
    ]


def _cell(markdown: bool, source: str) -> dict[str, Any]:
    if markdown:
        source = "\n".join(line.removeprefix("#").removeprefix(" ") for line in source.splitlines())
    lines = source.splitlines(keepends=True)
    cell = {"id": hashlib.sha256(source.encode()).hexdigest()[:12], "metadata": {}, "source": lines}
    if markdown:
        return {"cell_type": "markdown", **cell}
    return {"cell_type": "code", "execution_count": None, **cell, "outputs": []}


def badge(name: str) -> str:
    """The Markdown that opens the notebook `name` of the repository's main branch in Colab."""
    colab, repository = "https://colab.research.google.com", REPOSITORY.removeprefix("https://github.com/")
    opened = f"{colab}/github/{repository}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({opened})"


def notebook(text: str, old: dict[str, Any] | None = None, name: str = "") -> dict[str, Any]:
    """The notebook (nbformat 4.5) of a text; code cells that `old` has too keep their outputs.

    With a name its first cell ends in the badge that opens it in Colab, with a GPU.
    """
    cells = cells_of(text)
    if name:
        cells[0]["source"] = f"{''.join(cells[0]['source'])}\n\n{badge(name)}".splitlines(keepends=True)
    known = {cell["id"]: cell for cell in (old or {}).get("cells", ())}
    for cell in cells:
        if cell["cell_type"] == "code" and cell["id"] in known:
            cell["outputs"] = known[cell["id"]]["outputs"]
            cell["execution_count"] = known[cell["id"]]["execution_count"]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata: dict[str, Any] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    metadata |= {"accelerator": "GPU", "colab": {"gpuType": "T4", "provenance": []}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def execute(made: dict[str, Any], folder: Path, seconds: int = 600) -> dict[str, Any]:
    """The notebook with its outputs, after it has run from a clean kernel in `folder`; raises when a cell does.

    Standard error, where progress bars are, is left out, and what a cell prints line by line is one output.
    """
    import nbformat
    from nbclient import NotebookClient

    opened = nbformat.reads(json.dumps(made), as_version=4)
    NotebookClient(opened, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in opened.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            outputs, cell.outputs = cell.outputs, []
            for output in (output for output in outputs if output.get("name") != "stderr"):
                if cell.outputs and output.output_type == cell.outputs[-1].output_type == "stream":
                    cell.outputs[-1].text += output.text
                else:
                    cell.outputs.append(output)
    return {**json.loads(nbformat.writes(opened)), "metadata": made["metadata"]}  # without the version of Python


def written(made: dict[str, Any]) -> str:
    """The text of the file of a notebook, as Jupyter writes it: a reader who saves it unchanged changes nothing."""
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """The command line."""
    names = {argument for argument in sys.argv[1:] if argument != "--execute"}
    known = {path.stem for path in texts()}
    if names - known:
        sys.exit(f"error: there is no notebook {', '.join(names - known)}; there are {', '.join(sorted(known))}")
    for path in [path for path in texts() if path.stem in names or not names]:
        target = path.with_suffix(".ipynb")
        old = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else None
        made = notebook(path.read_text(encoding="utf-8"), old, path.stem)
        if "--execute" in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                made = execute(made, Path(folder))
        target.write_text(written(made), encoding="utf-8")
        print(target)


if __name__ == "__main__":
    main()
