"""Show the data of a run as the model will see it; only the model's tokenizer is loaded.

    python -m jaxrl_llm preview --config=configs/dpo.py --rows=3

Prints the first examples, with the tokens in the loss in colour (in ⟦brackets⟧ where the output is no terminal), then
the lengths of the rows, and the numbers over the limit and dropped; for the training rows and for the evaluation rows.
"""

import sys
from collections.abc import Sequence, Sized
from itertools import islice
from typing import Any

from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.config.schema import Setting
from jaxrl_llm.data import loading
from jaxrl_llm.data.loading import DataSource, DataSpec
from jaxrl_llm.data.preview import boundary_merges, sections, statistics
from jaxrl_llm.training.evaluation.run import named_sets
from jaxrl_llm.training.setup.data import tokenizer_of
from jaxrl_llm.training.setup.evaluation import eval_measure, eval_parts, eval_spec
from jaxrl_llm.training.setup.specs import data_spec

FLAGS = (
    Setting("rows", 3, "Examples to print.", int, minimum=0),
    Setting("measure", 10_000, "Examples to measure, of each source.", int, minimum=1),
    Setting("held_out", True, "Show the evaluation rows too.", bool),
)
JOINED = 200  # rows that are tokenised a second time, prompt and completion as one text


def preview(config, rows: int = 3, measure: int = 10_000, held_out: bool = True, colour: bool = False) -> str:
    """The report on the data of `config`; raises ConfigError for data that training could not read."""
    tokenizer = tokenizer_of(config)
    spec = data_spec(config)
    sources = loading.open_sources(spec, tokenizer)
    lines = report(spec, "trained on", spec.kind, sources, tokenizer, rows, measure, colour)
    if held_out and config.eval.every >= 0:
        for one in named_sets(eval_spec(config)):
            sources = eval_parts(config, tokenizer, one)
            if not sources:
                lines.append("=== nothing is evaluated on: the data has no split 'test', see data.eval_split")
                continue
            use = f"evaluated on{f' as {one.name}' if one.name else ''}"
            # Rows to evaluate on may lack what is learned: then they serve as prompts.
            if spec.kind == "prompts" or eval_measure(config, sources) == "samples":
                sources = eval_parts(config, tokenizer, one, prompts=True)
                lines += report(spec, use, "prompts", sources, tokenizer, min(rows, 1), measure, colour)
            else:
                lines += report(spec, use, spec.kind, sources, tokenizer, min(rows, 1), measure, colour)
    return "\n".join(lines) + "\n"


def report(
    spec: DataSpec,
    use: str,
    kind: str,
    sources: Sequence[DataSource],
    tokenizer: Any,
    rows: int,
    measure: int,
    colour: bool,
) -> list[str]:
    """The lines on some sources: the first examples of each, then its statistics."""
    lines: list[str] = []
    for source in sources:
        tokenize = loading.row_tokenizer(spec, kind, tokenizer, source.folder)
        stops = tokenize.overlong == "error"
        if stops:  # a preview counts rows at which training would stop
            tokenize.overlong = "filter"
        made = [row for row in islice(loading.token_rows(source, kind, tokenize), measure) if row is not None]
        name = source.name or "the data"
        for index, row in enumerate(made[:rows]):
            lines.append(f"--- {use}: {name}, example {index}")
            for heading, text in sections(kind, row, tokenizer, colour):
                lines += [f"[{heading}]", text]
        lines.append(f"=== {use}: {name}")
        values = statistics(tokenize, made)
        if tokenize.read == measure and isinstance(source.rows, Sized) and len(source.rows) > measure:
            values["rows"] = f"{len(source.rows)}; of the first {tokenize.read}, {len(made)} are used"
        if tokenize.long:
            verb = "dropped" if tokenize.overlong == "filter" else "truncated"
            fate = "training stops at the first" if stops else verb
            values[f"over {tokenize.limit} tokens"] += f": {fate} (data.overlong={spec.overlong})"
        joined = boundary_merges(kind, made[:JOINED], tokenizer)
        values["tokenised as one text"] = f"{joined} of the first {len(made[:JOINED])} rows have other tokens"
        if source.weight is not None:
            values["weight"] = f"{source.weight:g}"
        width = max(map(len, values))
        lines += [f"{heading.ljust(width)}  {value}" for heading, value in values.items()]
    return lines


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    sys.stdout.write(preview(config, colour=sys.stdout.isatty(), **options))
