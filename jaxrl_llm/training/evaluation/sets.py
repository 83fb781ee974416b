"""The sets that a policy is evaluated on: the held-out rows of the configuration, or several named sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets

from jaxrl_llm.rollout.sampling import Sampling


class NamedSet(NamedTuple):
    """One set: its name in metrics (empty for the only one), its rows or their sources, and its numbers."""

    name: str
    rows: Any  # in memory, in place of sources
    sources: list[dict[str, Any]] | None  # None: data.eval_path, or the sources that are trained on
    prompts: int  # the first rows that are evaluated on
    samples: int  # completions of each prompt


@dataclass(frozen=True)
class EvalSpec:
    """The sets of a configuration, and how completions of their prompts are sampled."""

    sets: tuple[NamedSet, ...]  # those of eval.sets, or the one of data.eval_path
    prompts: int  # of sets that are given in memory
    samples: int
    greedy: bool  # a greedy completion of each prompt beside the samples
    sampling: Sampling
    completions_at_once: int


def named_sets(spec: EvalSpec, eval_dataset: Any = None) -> list[NamedSet]:
    """The sets to evaluate on: `eval_dataset` (rows, or a dictionary of rows by set), else those of `spec`."""
    splits = isinstance(eval_dataset, datasets.DatasetDict | datasets.IterableDatasetDict)
    if isinstance(eval_dataset, Mapping) and not splits:
        return [NamedSet(str(name), rows, None, spec.prompts, spec.samples) for name, rows in eval_dataset.items()]
    if eval_dataset is not None:
        return [NamedSet("", eval_dataset, None, spec.prompts, spec.samples)]
    return list(spec.sets)
