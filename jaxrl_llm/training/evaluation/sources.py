"""What a policy is measured on: the held-out rows of the configuration, or several named sets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import datasets

from jaxrl_llm.config import ConfigError, eval_set
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.data import loading
from jaxrl_llm.data.loading import DataSource, DataSpec


class NamedSet(NamedTuple):
    """What the metrics of a set are named after (nothing: the only one), its rows, and how it is sampled."""

    name: str
    given: Any  # rows in memory that take the place of sources
    sources: list[dict[str, Any]] | None  # None: data.eval_path, or the sources that are trained on
    prompts: int
    samples: int


def named_sets(config, eval_dataset: Any = None) -> list[NamedSet]:
    """The sets to evaluate on: those of `eval.sets`, else the one of `data.eval_path`.

    `eval_dataset` takes their place: rows, or a dictionary of rows by the names of sets.
    """
    prompts, samples = config.eval.prompts, config.eval.samples
    splits = isinstance(eval_dataset, datasets.DatasetDict | datasets.IterableDatasetDict)
    if isinstance(eval_dataset, Mapping) and not splits:
        return [NamedSet(str(name), rows, None, prompts, samples) for name, rows in eval_dataset.items()]
    if eval_dataset is not None or not config.eval.sets:
        return [NamedSet("", eval_dataset, None, prompts, samples)]
    found: dict[str, NamedSet] = {}
    for entry in config.eval.sets:
        name, own, source = eval_set(entry)
        one = found.setdefault(name, NamedSet(name, None, [], prompts, samples))
        found[name] = one._replace(sources=[*(one.sources or []), source], **own)
    return list(found.values())


def set_parts(spec: DataSpec, tokenizer: Any, one: NamedSet, prompts: bool = False) -> list[DataSource]:
    """The first rows of a set, by source; with `prompts` they serve as prompts whatever the algorithm learns from."""
    try:
        parts = loading.open_sources(spec, tokenizer, one.given, held_out=True, prompts=prompts, named=one.sources)
    except ConfigError as error:
        where = f"eval.sets, {one.name}" if one.sources is not None else "data.eval_split, data.eval_path"
        raise ConfigError(f"for the evaluation: {error} ({where}; eval.every=-1 is no evaluation)") from error
    return loading.first_rows(parts, one.prompts)


def measure_of(config, kind: str, parts: list[DataSource]) -> str:
    """What `eval.measure` comes to for a set of these parts: loss, samples or both."""
    if config.eval.measure != "auto":
        return config.eval.measure
    learns = config.algorithm.name in OFFLINE and loading.is_learnable(kind, parts)
    return "loss" if learns or config.algorithm.name == "reward_model" else "samples"
