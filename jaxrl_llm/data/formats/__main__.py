"""Prints the table of all data formats with what each makes of a row: `python -m jaxrl_llm.data.formats`.

Formats that write with a chat template use that of the embedded model: `<|role|>content<|end|>`.
"""

import json
import sys
import tempfile

from transformers import AutoTokenizer

from jaxrl_llm.data.formats import find
from jaxrl_llm.data.formats.native import CONTENT
from jaxrl_llm.data.formats.samples import SAMPLES
from jaxrl_llm.data.tokenizers import build_byte_tokenizer

SHOWN = (*CONTENT, "label", "margin", "ground_truth", "answer")


def table() -> str:
    """The table as Markdown: what the format is for, its name, a row, and the columns it becomes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(build_byte_tokenizer(folder))
    lines = ["| for | format | a row | becomes |", "|---|---|---|---|"]
    for kind, spec, row in SAMPLES:
        made = find(spec, kind, tokenizer)(row)
        kept = {name: made[name] for name in SHOWN if name in made}
        becomes = "<br>".join(f"{name}: {_code(_json(value))}" for name, value in kept.items())
        lines.append(f"| {kind} | {_code(spec)} | {_code(_json(row))} | {becomes} |")
    return "\n".join(lines) + "\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


if __name__ == "__main__":
    sys.stdout.write(table())
