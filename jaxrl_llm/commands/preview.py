"""Show the data of a run as the model will see it; only the model's tokenizer is loaded.

    python -m jaxrl_llm preview --config=configs/dpo.py --rows=3

Prints the first examples, with the tokens in the loss in colour (in ⟦brackets⟧ where the output is no terminal), then
the lengths of the rows, and the numbers over the limit and dropped; for the training rows and for the evaluation rows.
"""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.config.schema import Setting
from jaxrl_llm.data import loading
from jaxrl_llm.data.loading import Part
from jaxrl_llm.data.preview import joined_otherwise, shown, statistics
from jaxrl_llm.models import hf
from jaxrl_llm.training.evaluation.run import named_sets
from jaxrl_llm.training.evaluation_setup import eval_measure, eval_parts, eval_spec

FLAGS = (
    Setting("rows", 3, "Examples to print.", int, minimum=0),
    Setting("measure", 10_000, "Examples to measure, of each source.", int, minimum=1),
    Setting("held_out", True, "Show the evaluation rows too.", bool),
)
JOINED = 200  # rows that are tokenised a second time, prompt and completion as one text


def preview(config, rows: int = 3, measure: int = 10_000, held_out: bool = True, colour: bool = False) -> str:
    """The report on the data of `config`; raises ConfigError for data that training could not read."""
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    kind = loading.kind_of(config)
    sources = loading.open_parts(config, tokenizer)
    lines = report(config, "trained on", kind, sources, tokenizer, rows, measure, colour)
    if held_out and config.eval.every >= 0:
        for eval_set in named_sets(eval_spec(config)):
            sources = eval_parts(config, tokenizer, eval_set)
            use = f"evaluated on{f' as {eval_set.name}' if eval_set.name else ''}"
            # Evaluation rows without completions serve as prompts.
            if kind == "prompts" or eval_measure(config, sources) == "samples":
                sources = eval_parts(config, tokenizer, eval_set, prompts=True)
                lines += report(config, use, "prompts", sources, tokenizer, min(rows, 1), measure, colour)
            else:
                lines += report(config, use, kind, sources, tokenizer, min(rows, 1), measure, colour)
    return "\n".join(lines) + "\n"


def report(
    config, use: str, kind: str, sources: Sequence[Part], tokenizer: Any, rows: int, measure: int, colour: bool
) -> list[str]:
    """The lines on some sources: of each its first examples, then its statistics."""
    lines: list[str] = []
    for source in sources:
        how = loading.tokenizing(config, kind, tokenizer)
        # The report shows how many rows are too long, where training would stop at the first of them.
        stops, how.overlong = how.overlong == "error", "filter" if how.overlong == "error" else how.overlong
        token_rows = [row for row in islice(loading.token_rows(source, kind, how), measure) if row is not None]
        name = source.name or "the data"
        for index, row in enumerate(token_rows[:rows]):
            lines.append(f"--- {use}: {name}, example {index}")
            for heading, text in shown(kind, row, tokenizer, colour):
                lines += [f"[{heading}]", text]
        lines.append(f"=== {use}: {name}")
        numbers = statistics(how, token_rows)
        if how.long:
            over = f"over {how.limit} tokens"
            handling = (
                "training stops at the first" if stops else "dropped" if how.overlong == "filter" else "truncated"
            )
            numbers[over] += f": {handling} (data.overlong={'error' if stops else how.overlong})"
        joined = joined_otherwise(kind, token_rows[:JOINED], tokenizer)
        numbers["other tokens if joined"] = f"{joined} of the first {len(token_rows[:JOINED])}"
        if source.weight is not None:
            numbers["weight"] = f"{source.weight:g}"
        width = max(map(len, numbers))
        lines += [f"{heading.ljust(width)}  {value}" for heading, value in numbers.items()]
    return lines


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, without its weights; raises ConfigError when there is none."""
    if path.startswith("embedded:") or Path(path).expanduser().is_dir():
        folder = hf.locate(path)
        if not hf.has_tokenizer(folder):
            raise ConfigError(f"model.path = {path!r} has no tokenizer files; add them to the folder")
        return hf.load_tokenizer(folder, trust_remote_code)
    from transformers import AutoTokenizer  # slow to import, and not needed for local folders

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load the tokenizer of model.path = {path!r}: {reason}") from error


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    sys.stdout.write(preview(config, colour=sys.stdout.isatty(), **options))
