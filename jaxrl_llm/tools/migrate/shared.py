"""Rules that several libraries share: length of a run, schedules, epochs, reward names, what is evaluated and kept."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.sources import load
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options

LOCAL = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
HERE = ("none", "all", "console", "file")  # no tracker: a choice of others, or what every run writes
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "inverse_square_root": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
}


def known_rows(options: Options, path: Any, split: str) -> int:
    """The rows of the training data: as said, or counted where they are files here; 0 otherwise."""
    files = [str(file) for file in path] if isinstance(path, list | tuple) else [str(path)]
    if options.rows or not all(file.endswith(LOCAL) and Path(file).expanduser().is_file() for file in files):
        return options.rows
    return len(load(files, split))  # pyright: ignore[reportArgumentType]


def rows_missing(draft: Draft, path: Any, epochs: float, key: str) -> NoReturn:
    """Raises ConfigError: an epoch is no number of steps."""
    shown = path[0] if isinstance(path, list | tuple) else path
    raise ConfigError(
        f"{draft.source.path} trains for {epochs:g} epochs ({key}), and here a run has a number of steps: add "
        f"--rows=N, the number of rows of its training data ({shown})"
    )


def first_of(draft: Draft, other: Any, *keys: str) -> Any:
    """The value of the first of their keys that is not None, or `other`."""
    return next((value for key in keys if (value := draft.get(key)) is not None), other)


def divided(value: float, by: int) -> int:
    """Their updates as training steps, rounded up."""
    return max(1, math.ceil(value / by))


def schedule(draft: Draft, name: str, key: str) -> str:
    """Our schedule of that name; linear, with a note, where there is none."""
    found = SCHEDULES.get(str(name))
    if found is None:
        draft.check(f"{key} = {name!r} has no equivalent; linear is written. There are constant, linear, cosine, "
                    "inverse_sqrt and wsd")  # fmt: skip
    draft.set("optimizer.schedule", found or "linear", key)
    return found or "linear"


def optimizer(draft: Draft, name: str, key: str) -> None:
    """Writes our optimizer of that name."""
    plain = str(name).lower()
    found = next((ours for ours in ("adafactor", "lion", "muon", "sgd") if ours in plain), "adamw")
    if found == "adamw" and "adam" not in plain:
        draft.check(f"{key} = {name!r} has no equivalent; adamw is written")
    elif "8bit" in plain or "paged" in plain or "4bit" in plain:
        draft.check(f"{key} = {name!r}: the moments are not quantised here; optimizer.moment_dtype and "
                    "optimizer.offload save memory")  # fmt: skip
    draft.set("optimizer.name", found, key)
    if found == "sgd":
        draft.set("optimizer.b1", 0.0, key)


def backends(draft: Draft, wanted: Any, key: str) -> None:
    """Writes the logging backends that there are, and notes the others."""
    wanted = [wanted] if isinstance(wanted, str) else list(wanted or ())
    wanted = [str(name).lower() for name in wanted]
    if "all" in wanted:
        draft.check(f"{key} is all: name the trackers in logging.backends")
    wanted = [name for name in wanted if name not in HERE]
    known = OURS["logging.backends"].choices or ()
    kept = [name for name in wanted if name in known]
    for name in wanted:
        if name not in known:
            draft.check(f"{key}: there is no logging backend {name}; metrics are in metrics.jsonl")
    draft.set("logging.backends", ("console", "jsonl", *kept), key)


def tracked(draft: Draft, given: Mapping[str, Any], projects: Sequence[str], names: Sequence[str]) -> None:
    """Writes the project and the name of the run from the first of their keys in `given` that has a value."""
    for ours, keys in (("logging.project", projects), ("logging.run_name", names)):
        found = {key: str(given[key]) for key in keys if given.get(key)}
        draft.use(*(key for key in keys if key in given))
        if found:
            key, value = next(iter(found.items()))
            draft.set(ours, value, key)
            if len(set(found.values())) > 1:
                said = ", ".join(f"{key} = {one}" for key, one in found.items())
                draft.check(f"{said}: a run has one name, and its project too, in all trackers ({ours})")


def micro_rows(draft: Draft, rows: int, minibatch: int, *keys: str) -> None:
    """Writes rows per pass: at most as many as there, and a divisor of the minibatch; whole ones are 0."""
    if rows >= minibatch:
        draft.use(*keys)
        return
    fitting = max(size for size in range(1, rows + 1) if minibatch % size == 0)
    draft.set("batch.microbatch_rows", fitting, *keys)


def kl_name(draft: Draft, name: str, key: str) -> str:
    """Our estimator of verl's name."""
    known = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if name not in known:
        raise ConfigError(
            f"{draft.source.path}: {key} is {name!r}, which has no equivalent; there are {', '.join(known)}"
        )
    return known[name]
