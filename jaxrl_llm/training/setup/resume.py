"""Where a run starts: anew, at its own newest checkpoint, or at that of another run, and whether it may.

A start asks `loaded_once` and `changes_to` before anything is loaded, and `resume` when the run is built.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.schema import BY_NAME
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed import processes
from jaxrl_llm.training.checkpoint.data_files import edited
from jaxrl_llm.training.checkpoint.manager import Checkpoints, find, located
from jaxrl_llm.training.checkpoint.object_store import is_remote, path_of
from jaxrl_llm.training.checkpoint.outputs import check_outputs, given_to
from jaxrl_llm.training.checkpoint.settings import (
    OF_FROZEN,
    OF_FROZEN_CRITIC,
    OF_OPTIMIZER,
    Changes,
    changed_settings,
    check_changes,
    check_frozen,
)
from jaxrl_llm.training.checkpoint.shapes import free
from jaxrl_llm.training.logging.step_log import Metrics
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.runtime.callbacks import Callbacks
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import Run, rescheduled
from jaxrl_llm.training.update import State, merge_frozen


def parts_loaded(config) -> list[str]:
    """The parts that this start loads, and the checkpoint that they are of; none where they are all of the run's own
    newest one.

    Each checkpoint of the run keeps it, for `loaded_once`.
    """
    load, start = sorted(config.checkpoint.load), config.checkpoint.resume
    whole = len(load) == len(BY_NAME["checkpoint.load"].default)
    return [] if whole and start in ("auto", "never") else [*load, start]


def loaded_once(config, checkpoints: Checkpoints) -> tuple[ConfigDict, list[str]]:
    """The configuration of this start, and a line where it goes on from the run's newest checkpoint in full, as an
    earlier start has loaded what checkpoint.load asks for: a job manager starts the same command again.
    """
    if not (loaded := parts_loaded(config)):
        return config, []
    step, _ = checkpoints.newest_intact()
    if step is None or checkpoints.host(step).get("load") != loaded:
        return config, []
    on = config.copy_and_resolve_references()
    on.checkpoint.load, on.checkpoint.resume = BY_NAME["checkpoint.load"].default, "auto"
    return on, [
        f"checkpoint.load = {','.join(config.checkpoint.load)} of checkpoint.resume = {config.checkpoint.resume} was "
        f"done by an earlier start: the run goes on from the checkpoint of step {step} in {checkpoints.folder} in "
        "full; to load it again, delete what was saved since"
    ]


def changes_to(config, given: Given, checkpoints: Checkpoints) -> Changes:
    """The settings that differ from those of the run in output_dir, where this one goes on from its checkpoints.

    Raises ConfigError, before anything is loaded, for those that would make it another run, where its model was given
    in memory and is not given again, where there is no checkpoint that checkpoint.resume names, and where the trained
    model would take the place of another.
    """
    changes: Changes = {}
    own = _is_own(config.checkpoint.resume, checkpoints)
    if config.checkpoint.resume not in ("auto", "never"):
        located(config.checkpoint.resume)
    if own and "extra" not in config.checkpoint.load:
        raise ConfigError(
            f"checkpoint.load is model, which starts at step 0 and deletes what is in {checkpoints.folder}, but "
            f"checkpoint.resume = {config.checkpoint.resume!r} is there: set another output_dir"
        )
    with processes.all_or_none():
        goes_on = own and bool(checkpoints.steps())
        if jax.process_index() == 0:
            check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on)
        if jax.process_index() == 0 and goes_on:
            changes = changed_settings(Path(config.output_dir), config)
            former = given_to(Path(config.output_dir)).get("model")
            if former is not None and given.model is None and "model.path" not in changes:
                raise ConfigError(
                    f"the run in {config.output_dir} was given its model in memory ({former}), which model.path = "
                    f"{config.model.path!r} may differ from: give it again, train(config, model=...), or start anew "
                    "with another output_dir or checkpoint.resume=never"
                )
            begins = "optimizer" not in config.checkpoint.load  # a new one, which may be another
            compared = {name: change for name, change in changes.items() if not (begins and name in OF_OPTIMIZER)}
            check_changes(Path(config.output_dir), compared, tuple(config.checkpoint.accept_changes))
    return changes


class Beginning(NamedTuple):
    """The beginning of a start: the state, the counts of the log, and what is to be warned of."""

    state: State
    counts: dict[str, int]  # those of `StepLog`
    step: int | None  # after which the run in output_dir goes on; None: it starts
    warnings: list[str]
    unevaluated: Metrics | None = None  # of that step, where its evaluation is yet to be made


def resume(config, given: Given, run: Run, checkpoints: Checkpoints, hooks: Callbacks) -> Beginning:
    """The beginning that `checkpoint.resume` and `checkpoint.load` say; the source, the average and the callbacks of
    `run` are restored with it.

    Checkpoints of the run that come after it, or belong to another run, are deleted. Raises ConfigError for a
    checkpoint of a run that sampled its rows where this one is given them, or the other way round.
    """
    source, step, problems, load = checkpoints, None, [], config.checkpoint.load
    no_counts = {"num_tokens": 0, "skipped": 0}
    if config.checkpoint.resume == "auto":
        step, problems = checkpoints.newest_intact()
    elif config.checkpoint.resume != "never":
        source, step, problems = find(config.checkpoint.resume)
    own = step if _is_own(config.checkpoint.resume, checkpoints) else None
    if step is None:
        checkpoints.discard_after(None)
        return Beginning(run.state, no_counts, None, problems)
    if own is None:
        problems = [*problems, *_check_frozen(config, given, run, source.folder.parent)]
    free(run.state)
    if "extra" not in load:
        state = run.begin(*source.restore_models(step, run.state, run.mesh), 0)
        if run.average is not None:
            run.average.begin(merge_frozen(state, run.frozen).params)
        checkpoints.discard_after(None)
        return Beginning(state, no_counts, None, [*problems, *source.warnings()])
    if "optimizer" in load:
        state, host = source.restore(step, run.state, run.mesh)
        state = rescheduled(state, host.get("updates_per_step", {}), run.updates_per_step)
    else:
        state, host = run.begin(*source.restore_models(step, run.state, run.mesh), step), source.host(step)
        begun = "checkpoint.load is model,extra: a new optimizer begins, without moments"
        problems = [*problems, *source.warnings(), begun]
    samples = isinstance(run.source, OnlineSource)
    if samples == ("seen" in host):  # of runs that are given their rows
        former, own = ("learned from given rows", "samples them") if samples else ("sampled its rows", "is given them")
        raise ConfigError(
            f"checkpoint {source.folder / str(step)} is of a run that {former}, and algorithm.name = "
            f"{config.algorithm.name!r} {own}: begin with its model alone, checkpoint.load=model"
        )
    problems = [*problems, *edited(host.get("data_files", {}), run.data_files)]
    like = run.restorable()
    if left := source.trees(step) - like.keys():
        held = f"checkpoint {source.folder / str(step)} holds {', '.join(sorted(left))}"
        problems = [*problems, f"{held}, which is left, as this run has none"]
    run.set_state(state, host, source.restore_arrays(step, like, run.mesh))
    if "callbacks" in host:
        hooks.set_state(host["callbacks"], step, goes_on=own is not None)
    checkpoints.discard_after(own)
    unevaluated = None if own is None else host.get("unevaluated")
    folder, total, ended = config.output_dir, run.config.total_steps, []
    another = "set another output_dir or checkpoint.resume=never to train anew"
    if unevaluated is not None:
        unevaluated = {name: value for name, value in unevaluated.items() if name != "step"}
    elif own is not None and own >= total:
        ended = [
            f"the run in {folder} has made its {amount(total, 'step')}; nothing is trained: raise total_steps, or "
            f"{another}"
        ]
    elif own is not None and own >= hooks.end:
        ended = [
            f"the callback {hooks.stopped} ended the run in {folder} at step {own} of {total}; nothing is trained: "
            f"leave it out or give it other options to go on, or {another}"
        ]
    return Beginning(state, {name: host[name] for name in no_counts}, own, [*ended, *problems], unevaluated)


def _check_frozen(config, given: Given, run: Run, folder: Any) -> list[str]:
    """A line where it cannot be known that parameters of the checkpoints in `folder`, of another run, belong beside
    those that `run` does not train.

    Raises ConfigError where they do not.
    """
    names, lines = (*OF_FROZEN, *(OF_FROZEN_CRITIC if run.frozen.critic else ())), []
    with processes.all_or_none():
        if jax.process_index() == 0 and (run.frozen.params or run.frozen.critic):
            accepted = tuple(config.checkpoint.accept_changes)
            lines, former = check_frozen(folder, config, names, accepted), given_to(folder).get("model")
            if former is not None and given.model is None and "model.path" not in accepted:
                raise ConfigError(
                    f"the run in {folder} was given its model in memory ({former}), and what it trained beside that "
                    f"does not belong to model.path = {config.model.path!r}: give it again, train(config, model=...), "
                    "or write its model to a folder (python -m jaxrl_llm export) and train from that with model.path"
                )
    return lines


def _is_own(start: str, checkpoints: Checkpoints) -> bool:
    """True where `checkpoint.resume` names checkpoints of the run in output_dir, by links or without."""
    if start in ("auto", "never"):
        return start == "auto"
    path = path_of(start)
    named = {path, path.parent, path / "checkpoints"}
    if is_remote(path) or is_remote(checkpoints.folder):
        return checkpoints.folder in named
    return checkpoints.folder.resolve() in {path.resolve().parent, *(one.resolve() for one in named)}
