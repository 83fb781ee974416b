"""The text of docs/migrating.md: an introduction, and a table of keys for each library."""

import textwrap

from jaxrl_llm.tools.markdown import table
from jaxrl_llm.tools.migrate.table import table as keys_of

OPENING = """\
# Moving in from TRL, verl, axolotl or Harmony

One command reads what you have and writes a config file of this library:

```sh
python -m jaxrl_llm migrate FILE --output=my_config.py
python -m jaxrl_llm.train --config=my_config.py
```

| you have | FILE |
|---|---|
| TRL | the training script (`.py`), its arguments as `.json` or `.yaml`, or a shell script with the command |
| verl | a `.yaml`, or the shell script with `key=value` overrides |
| axolotl | the `.yaml` |
| Harmony | the recipe (`.py`) |

Nothing of FILE is run: scripts are read from their syntax tree, YAML with the safe loader, shell scripts word by word.

- **What it leaves out is as it was there.** A key that FILE does not set has its default there; where ours is another,
  the value is written, with `by default` beside it. `--version` chooses whose defaults: `1.16` (newest) or `0.16`
  (GRPO) of TRL, `0.8` (newest) or `0.3` of verl.
- **Every key of FILE is in the result**: as a setting with its old name beside it, or in a comment that says why there
  is nothing like it. A key that nobody knows is named with the closest one.
- **The docstring says what to look at first**: what the file leaves open, or differs.
- TRL and axolotl count batches per device: `--devices=N` says on how many it ran. Epochs become steps: `--rows=N` is
  the number of rows, unless the data is a file that is here. `--trainer=dpo` says which trainer, where FILE does not.

From Python: `from jaxrl_llm.tools.migrate import migrate`, `config, text = migrate("run.sh", devices=8, rows=7473)`.

Your data, rewards and environments need no change: [data.md](data.md) (TRL's types, verl's parquet, axolotl's
`datasets`, Harmony's threads), [rewards.md](rewards.md) (TRL's functions, verl's `compute_score`, axolotl's
`file.function`, Harmony's graders), [environments.md](environments.md). What an algorithm computes differently from
others is in [algorithms.md](algorithms.md), the names of metrics in [metrics.md](metrics.md).

Two things are counted differently everywhere. A **step** here is one batch of prompts with all its updates
(`batch.minibatches` x `algorithm.num_iterations`); TRL counts updates. `batch.prompts` counts prompts over all devices,
`batch.microbatch_rows` completions over all devices.
"""
SECTIONS = {
    "TRL": "Arguments of the trainers and their configurations, of TRL's scripts, and of `accelerate launch` and `trl "
    "vllm-serve` as TRL's pages show them.",
    "verl": "`ppo_trainer.yaml` (FSDP and Megatron; `optim.*` stands for the optimizer's section), `sft_trainer.yaml` "
    "and `evaluation.yaml`. A name that ends in `*` is every key below it.",
    "axolotl": "Its RLHF keys and the usual ones beside them; `trl.*` and `vllm.*` are the keys of those sections. It "
    "trains with TRL, so what is said there holds too.",
    "Harmony": "The arguments of its training classes, and what recipes call besides.",
}


def page() -> str:
    """Return the page: the introduction, and for each library the keys that have one of ours, then the others."""
    sections = [OPENING]
    for title, text in SECTIONS.items():
        rows = []
        for entry in sorted(keys_of(title.lower()), key=lambda entry: not entry.ours):
            theirs, ours = (", ".join(f"`{key}`" for key in keys) for keys in (entry.keys, entry.ours.split()))
            rows.append((theirs, ours or "none", entry.note))
        sections.append(f"## {title}\n\n{textwrap.fill(text, 120)}\n\n{table(('there', 'here', 'what differs'), rows)}")
    return "\n".join([*sections, "This page is written by `python -m jaxrl_llm migrate --tables`.", ""])
