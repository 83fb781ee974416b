"""Train a language model: `python -m jaxrl_llm.train --config=configs/grpo.py`. Start reading here.

Every algorithm is `experience -> Batch -> update -> State`. One step:

1. `source.next` makes a batch of token rows: given ones (offline) or sampled and scored ones (online);
2. the jitted, donated `update` improves the state, once per minibatch;
3. the policy is evaluated when due, metrics are logged, the state is saved when due, or when the run is told to leave.
"""

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.commands.welcome import welcome
from jaxrl_llm.config import to_json, validate
from jaxrl_llm.config.flags import load_flags, run
from jaxrl_llm.config.schema import OFFLINE, Key
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.models.model import Model
from jaxrl_llm.tools.cards.card import write_cards
from jaxrl_llm.tools.cards.hub import check_push, push_run
from jaxrl_llm.training.checkpoint.manager import Checkpoints, find, free
from jaxrl_llm.training.checkpoint.outputs import check_outputs, check_writable, export_run, write_given
from jaxrl_llm.training.evaluation.run import check_best
from jaxrl_llm.training.logging.backends import check_installed
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.step_log import Metrics, Step, StepLog
from jaxrl_llm.training.run_specs import checkpoint_spec, health_spec, logging_spec
from jaxrl_llm.training.runtime.callbacks import Callbacks, load_callbacks
from jaxrl_llm.training.runtime.preemption import Notices, Preempted
from jaxrl_llm.training.runtime.profiler import Profiler
from jaxrl_llm.training.runtime.watchdog import Watchdog
from jaxrl_llm.training.setup import Run, build, build_mesh, finished_models
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import State, merge_frozen

DRY_RUN = Key("dry_run", False, "Show the data, the plan and the time of a step, write nothing, and end.", bool)


class Result(NamedTuple):
    """What `train` returns: the trained model, the metrics of each logged step, and the folder with the files."""

    model: Model
    metrics: list[Metrics]
    output_dir: Path


def train(
    config, train_dataset=None, eval_dataset=None, rewards=None, environment=None, tools=(), callbacks=()
) -> Result:
    """The trained model, after `config.total_steps` steps; files are left in `config.output_dir`.

    train_dataset and eval_dataset (a `datasets.Dataset` or a list of dicts; eval_dataset also a dictionary of such by
    the names of sets) take the place of `data.path` and `data.eval_path`, and rewards (a function or a list of them)
    that of `rewards.functions`; with a train_dataset alone, and no `eval.sets`, nothing is evaluated. environment (what
    makes one, or a dictionary of such) takes the place of `environment.name`; tools (functions) come after those of
    `environment.tools`, and callbacks (objects, see docs/callbacks.md) after those of `callbacks`. A run in output_dir
    goes on where its newest checkpoint left it (`checkpoint.resume`). Raises ConfigError for anything the user can
    mend.
    """
    validate(config)
    given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "rewards": rewards,
             "environment": environment, "tools": tools}  # fmt: skip
    folder, mesh = Path(config.output_dir), build_mesh(config)
    check_writable(folder)
    kept = checkpoint_spec(config)
    with (
        jax.set_mesh(mesh),
        Checkpoints(kept.folder, kept.keep) as checkpoints,
        contextlib.ExitStack() as stack,
        processes.reporting(),
    ):
        if jax.process_index() == 0:
            check_installed(config.logging.backends)
        check_push(config)
        called = Callbacks(load_callbacks((*config.callbacks, *callbacks)), to_json(config), folder)
        run = build(config, mesh, train_dataset, eval_dataset, rewards, environment, tools)
        stack.callback(run.rewards.close)
        if run.environments is not None:
            stack.callback(run.environments.close)
        state, counts, resumed, problems = _resume(config, run, checkpoints, called)
        with Logger(logging_spec(config), folder, resumed) as logger:
            if jax.process_index() == 0:
                (folder / "config.json").write_text(to_json(config))
                write_given(folder, given)
            logger.start(_describe(run, int(state.step)))
            records = StepLog(health_spec(config), run.source.learn, run.stopwatch, logger, counts)
            records.warn(problems)
            called.note = logger.note
            with Watchdog(config.watch.hang_seconds, run.stopwatch, folder):
                steps = config.logging.profile_steps
                with Notices() as notices, Profiler(steps, folder, run.stopwatch, logger.note) as profiler:
                    state = _loop(config, run, state, records, checkpoints, notices, profiler, called)
                with run.stopwatch("export"):
                    model, critic = finished_models(config, run, state)
                    export_run(folder, checkpoints.folder, model, critic, logger.note)
                    with processes.all_or_none():
                        if jax.process_index() == 0:
                            write_cards(folder, int(state.step), config.export.push_to_hub)
                called("on_end", int(state.step), records.newest, lambda: model)
            logger.finish(seconds=run.stopwatch.totals)
        push_run(config)
    return Result(model, records.history, folder)


def _loop(config, run: Run, state: State, records: StepLog, checkpoints: Checkpoints, notices: Notices,
          profiler: Profiler, callbacks: Callbacks) -> State:  # fmt: skip
    """The state after the last step."""
    root, watch = jax.random.key(config.seed), run.stopwatch
    # Where nobody looks at each step, its metrics are read while the next one is computed.
    overlaps = config.algorithm.name in OFFLINE and not callbacks.every_step

    def evaluate() -> Metrics:
        found = run.evaluation(merge_frozen(state, run.frozen).params, root) if run.evaluation else {}
        check_best(config.checkpoint.best, found)
        return found

    def model() -> Model:
        return replace(run.model, params=merge_frozen(state, run.frozen).params)

    if int(state.step) == 0 and run.evaluation is not None and config.eval.at_start:
        records.log(0, {}, evaluate)
        callbacks("on_evaluate", 0, records.newest, model)
    step = int(state.step)
    while step < min(config.total_steps, callbacks.end):
        step += 1
        profiler.begin(step)
        began = time.perf_counter()
        experience = run.source.next(merge_frozen(state, run.frozen), jax.random.fold_in(root, step))
        with watch("update"):
            state, updates = improve(run, state, experience.batch)
        records.add(Step(step, began, experience.metrics, updates, experience.table))

        if callbacks.every_step:
            callbacks("on_step", step, records.read(), model)
        last, leaves = step == min(config.total_steps, callbacks.end), notices.reached(step)
        evaluates = run.evaluation is not None and ((last and config.eval.at_end) or _due(step, config.eval.every))
        saves = last or leaves or checkpoints.retry_due or _due(step, config.checkpoint.every)
        if saves or evaluates or not overlaps:
            records.settle(evaluate if evaluates else None)
        if evaluates:
            callbacks("on_evaluate", step, records.newest, model)
            last = last or step == callbacks.end
        if saves or last:
            callbacks("on_checkpoint", step, records.newest, model)
            with watch("checkpoint"):
                host = {**run.source.get_state(), **records.counts, "callbacks": callbacks.get_state(step)}
                arrays = run.source.get_arrays()
                checkpoints.save(step, state, host, arrays, records.newest, final=last or leaves)
        records.warn(checkpoints.warnings())
        profiler.end(step, state)
        if leaves and not last:
            raise Preempted(step)
    return state


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _resume(
    config, run: Run, checkpoints: Checkpoints, callbacks: Callbacks
) -> tuple[State, dict[str, int], int | None, list[str]]:
    """The state that `checkpoint.resume` says, the counts of `StepLog`, the step after which output_dir's own run goes
    on (None: it starts), and what is wrong with checkpoints that were passed over.

    Checkpoints of the run that come after the start, or belong to another run, are deleted.
    """
    source, step, problems = checkpoints, None, []
    if config.checkpoint.resume == "auto":
        step, problems = checkpoints.newest_intact()
    elif config.checkpoint.resume != "never":
        source, step, problems = find(config.checkpoint.resume)
    own = step if source.folder == checkpoints.folder else None
    check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on=own is not None)
    if step is None:
        checkpoints.discard_after(None)
        return run.state, {"num_tokens": 0, "skipped": 0}, None, problems
    free(run.state)
    state, host = source.restore(step, run.state, run.mesh)
    run.source.set_state(host, source.restore_arrays(step, run.source.get_arrays(), run.mesh))
    if "callbacks" in host:
        callbacks.set_state(host["callbacks"], step, goes_on=own is not None)
    checkpoints.discard_after(own)
    return state, {name: host[name] for name in ("num_tokens", "skipped")}, own, problems


def _describe(run: Run, start: int) -> dict[str, Any]:
    """What the console shows of a run besides its settings."""
    count = sum(x.size for x in jax.tree.leaves(run.model.net.plain.shapes()))
    trained = sum(x.size for x in jax.tree.leaves(run.state.params))
    of_these = f", {trained / 1e6:.2f} M trained beside them" if trained != count else ""
    devices = jax.devices()
    return {
        "model": f"{run.model.path}, {count / 1e6:.2f} M parameters{of_these}, {run.model.net.config.dtype}",
        "devices": f"{len(devices)} {devices[0].platform}, mesh {dict(run.mesh.shape)}",
        "starts at step": start,
    }


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    if not argv:
        print(welcome(), end="")
        return
    config, options = load_flags(argv, __doc__ or "", (DRY_RUN,))
    processes.join(config)
    if not options["dry_run"]:
        keep_compiled(config.compilation_cache)
        train(config)
        return
    from jaxrl_llm.commands.dry_run import dry_run  # here, as it imports what only plans need

    report = dry_run(config, colour=sys.stdout.isatty())
    print(report if jax.process_index() == 0 else "", end="")


if __name__ == "__main__":
    run(main)
