"""Train a language model: `python -m jaxrl_llm.train --config=configs/grpo.py`. Start reading here.

Every algorithm is `experience -> Batch -> update -> State`. One step:

1. `source.next` makes a batch of token rows: read from a dataset (offline), or sampled and rewarded (online);
2. `improve` updates the state, once per minibatch: by `run.update`, which is jitted and takes the state's memory;
3. the policy is evaluated when due, metrics are logged, and the state is saved when due or on preemption.
"""

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.commands.welcome import welcome
from jaxrl_llm.config import ConfigError, resuming, to_json, validate, with_correction
from jaxrl_llm.config.flags import load_flags, run, set_run_folder
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.config.user_code import contained, without_locals
from jaxrl_llm.data import Row
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.host_memory import return_memory
from jaxrl_llm.distributed.overlap import order_collectives, overlap_collectives, overlaps
from jaxrl_llm.distributed.turns import yielded
from jaxrl_llm.models.files.hf import step_folders
from jaxrl_llm.models.kernels.fused_attention import described
from jaxrl_llm.models.model import Model
from jaxrl_llm.rewards.runner import TrainerState
from jaxrl_llm.tools.cards.bucket import check_copy, copy_run
from jaxrl_llm.tools.cards.card import write_cards
from jaxrl_llm.tools.cards.hub import check_push, push_run, push_step
from jaxrl_llm.training.ahead import CompiledAhead, compilations
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.object_store import is_remote
from jaxrl_llm.training.checkpoint.outputs import (
    check_shared,
    check_writable,
    discard_exports,
    export_run,
    export_step,
    given_in_words,
    numbered,
    write_given,
    writing,
)
from jaxrl_llm.training.checkpoint.settings import CONFIG, start_record
from jaxrl_llm.training.evaluation.run import check_best
from jaxrl_llm.training.logging.backends import check_installed
from jaxrl_llm.training.logging.console import outlive_streams, stderr_console, stdout_console, waiting
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.origin import write_start
from jaxrl_llm.training.logging.step_log import Metrics, Step, StepLog
from jaxrl_llm.training.offline import OfflineSource
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.rollouts.rollout_files import start_learners
from jaxrl_llm.training.rollouts.sampler import sample
from jaxrl_llm.training.runtime.callbacks import Callbacks, load_callbacks
from jaxrl_llm.training.runtime.compiling import CompileStatus
from jaxrl_llm.training.runtime.lock import RunLock
from jaxrl_llm.training.runtime.moment import EVALUATE, SAVE
from jaxrl_llm.training.runtime.preemption import Notices, Preempted
from jaxrl_llm.training.runtime.profiler import Profiler, steps_here
from jaxrl_llm.training.runtime.watchdog import UPLOAD, Watchdog
from jaxrl_llm.training.setup.given import Given, listed, take
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.records import checkpoint_folder, health_spec, keep_of, logging_spec, peak_of
from jaxrl_llm.training.setup.resume import changes_to, loaded_once, parts_loaded, resume
from jaxrl_llm.training.setup.run import Run, build, finished_models
from jaxrl_llm.training.setup.sources import rendezvous_of
from jaxrl_llm.training.step import improve, update_flops
from jaxrl_llm.training.update import State, merge_frozen

EVALUATING = "in an evaluation"  # where a signal may end a run
DRY_RUN = Setting("dry_run", False, "Show the data, the plan and the time of a step, write nothing, and end.", bool)


class Result(NamedTuple):
    """Result of `train`: the trained model, the metrics of each logged step, of earlier starts too, and the folder with
    the files."""

    model: Model
    metrics: list[Metrics]
    output_dir: Path

    def __repr__(self) -> str:
        """A line: a notebook shows what a cell ends with."""
        return f"Result(model={self.model!r}, metrics=[... of {len(self.metrics)} steps], output_dir={self.output_dir})"


@without_locals
def train(
    config,
    train_dataset=None,
    eval_dataset=None,
    rewards=None,
    environment=None,
    tools=(),
    callbacks=(),
    model=None,
    tokenizer=None,
    peft_config=None,
    optimizers=None,
    compute_metrics=None,
    quantization_config=None,
    **others,
) -> Result:
    """Trains a model for `config.total_steps` steps and returns the Result; files are left in `config.output_dir`.

    The other arguments are objects that stand in the place of names in `config`; docs/python.md has all of them.
    train_dataset and eval_dataset are rows: a `datasets.Dataset`, an `IterableDataset` or a list of dicts, and for
    evaluation also a dictionary of such by the names of sets. With a train_dataset alone, and no `eval.sets`, nothing
    is evaluated. rewards is a function or a list of them. environment is a function that makes one, or a dictionary of
    such; tools are functions, which are added to those of `environment.tools`, as callbacks are to `callbacks`.

    model is a path or a model in memory, of `load_model` or of an earlier Result, which stays as it is; tokenizer is
    one of transformers. peft_config (PEFT's LoraConfig) sets the keys of `lora`, and quantization_config (transformers'
    BitsAndBytesConfig) `model.quantize`. optimizers is an optimizer of optax, a schedule, or a pair of both.
    compute_metrics is called with the completions of each evaluation (`training.evaluation.run.Predictions`), and
    returns numbers by name. TRL's names reward_funcs, processing_class and environment_factory are taken too.

    Where output_dir holds a run already, that run goes on from its newest checkpoint (`checkpoint.resume`). Raises
    ConfigError, with a message that says what to do, for anything that the user can put right.
    """
    config, given = take(
        config,
        others,
        peft_config,
        optimizers,
        quantization_config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        rewards=rewards,
        environment=environment,
        tools=listed(tools),
        model=model,
        tokenizer=tokenizer,
        compute_metrics=compute_metrics,
    )
    validate(config)
    config = with_correction(config)  # as a run that is gone on with was written down
    overlap_collectives(config.overlap_collectives)
    order_collectives()  # of processes that a program of the user's has joined
    keep_compiled(config.compilation_cache)
    profiled = steps_here(config.logging.profile_steps, config.logging.profile_process)
    # Once, for all that is kept in it, and absolute, as a user's function may change the working directory; after the
    # flags above, as it asks for devices.
    asked = str(Path(config.output_dir).expanduser().absolute())
    config.output_dir = numbered(asked)
    set_run_folder(config.output_dir)
    resuming.begin(config.checkpoint.resume, asked, config.output_dir)
    loaded = parts_loaded(config)
    with contained(), contextlib.ExitStack() as stack:
        notices = stack.enter_context(Notices())
        with notices.ending("before the first step"):
            run, log, checkpoints, hooks, locks, unevaluated = _start(config, given, callbacks, stack)
        config, folder, stopwatch, logger = run.config, Path(config.output_dir), run.stopwatch, log.logger
        root, state, step = jax.random.key(config.seed), run.state, int(run.state.step)
        earlier = processes.gather(logger.earlier() or None)[0] or []  # before what may fail in one process alone
        hooks.recall(earlier if unevaluated is None else [*earlier, {"step": step, **unevaluated}])
        # Where nobody looks at each step, its metrics are read while the next one is computed.
        deferred = isinstance(run.source, OfflineSource) and not hooks.every_step

        def current() -> Model:
            return replace(run.model, params=merge_frozen(state, run.frozen).params)

        # Who is to leave saves first, and the next start evaluates, unless checkpoints are ranked by evaluations.
        postponable = not (config.checkpoint.best or "").startswith("eval/")

        def leave() -> None:
            """Breaks an evaluation off in all processes, as a signal to one of them asks for."""
            if postponable and notices.reached(step):
                raise Preempted(None, EVALUATING)

        def evaluate() -> Metrics:
            run.source.rest()  # rewards and environments are called by one thread at a time
            table, params = list[Row](), current().params
            if run.average is not None and config.average.evaluate:
                params = run.average.of_model(params)
            assert run.evaluation is not None
            with notices.ending(EVALUATING) if postponable else contextlib.nullcontext():
                metrics = run.evaluation(params, root, table, TrainerState(step, config.total_steps), leave)
            if table:
                logger.completions(step, table, held_out=True)
            check_best(config.checkpoint.best, metrics)
            return metrics

        def write_model() -> None:
            try:
                written = export_step(folder, step, *finished_models(run, state), config.checkpoint.keep)
            except ConfigError as error:
                if jax.process_count() > 1 and not isinstance(error, processes.AgreedError):  # the others wait for it
                    raise
                log.warn([f"{error}. The run goes on without it"])
                return
            if config.export.strategy == "every_save":
                with stopwatch(UPLOAD), processes.all_or_none():
                    problem = push_step(config, written, step)
                log.warn([problem] if problem else [])

        def save(last: bool, leaves: bool, unevaluated: Metrics | None) -> None:
            _check_locks(locks)
            host = {
                **run.source.get_state(),
                **log.counts,
                "callbacks": hooks.get_state(step),
                "load": loaded,
                "unevaluated": unevaluated,
                "updates_per_step": dict(run.updates_per_step),
                "data_files": dict(run.data_files),
            }
            if "state" in config.checkpoint.contents or leaves:
                checkpoints.save(step, state, host, run.get_arrays(), log.newest, final=last or leaves)
            if "hf" in config.checkpoint.contents and not (last or leaves):  # the next start writes it for who leaves
                write_model()

        def let_go(failed: object, *_: object) -> None:
            nonlocal run, state
            if failed:
                del run, state  # which the frame of a callback that raised has by `current`

        stack.push(let_go)

        if isinstance(run.source, OnlineSource) and run.source.first_stage is not None and step < config.total_steps:
            with notices.ending("in the first stage, of which nothing is saved before step 1"):
                run.source.first_stage(current().params, logger.note)

        with Profiler(profiled, folder, stopwatch, logger.note) as profiler:
            hooks("on_begin", step, log.newest, current)
            if step == 0 and run.evaluation is not None and config.eval.at_start and not config.eval.start:
                with notices.ending("in the evaluation before the first step"):
                    log.log(0, {}, evaluate)
                hooks("on_evaluate", 0, log.newest, current)
            if unevaluated is not None:  # the step that a preempted start has saved before its evaluation
                log.log(step, unevaluated, None if run.evaluation is None else evaluate)
                if run.evaluation is not None:
                    hooks("on_evaluate", step, log.newest, current)
            # The last step of the start before has no model of its own, nor has one behind whose save it was killed.
            goes_on = step in checkpoints.steps() and step < min(config.total_steps, hooks.end)
            with_model = goes_on and "hf" in config.checkpoint.contents
            if with_model and not processes.gather(step in step_folders(folder))[0]:
                write_model()
            first = step + 1
            while step < min(config.total_steps, hooks.end):
                hooks("on_step_begin", step, log.newest, current)
                step += 1
                profiler.begin(step)
                began, compiled = time.perf_counter(), stopwatch.totals["compile"]
                # 1 a batch of token rows
                experience = run.source.next(merge_frozen(state, run.frozen), jax.random.fold_in(root, step))
                flops = update_flops(run, step - 1, experience.batch) if log.peak else None
                if flops is not None and not deferred:
                    with stopwatch("logps"), yielded():  # so that the time of the update is all its own
                        jax.block_until_ready(experience.batch)
                return_memory()  # of the rollout, before the update needs the most
                # 2 the update
                with stopwatch("update"):
                    state, updates = improve(run, state, experience.batch)
                    if run.average is not None:
                        run.average.update(step, current().params)
                log.add(Step(step, began, experience.metrics, updates, experience.table, compiled, flops, deferred))

                # 3 what is due: the evaluation, the log, the checkpoint
                asked = hooks("on_step", step, log.read(), current) if hooks.every_step else set()
                last, leaves = step == min(config.total_steps, hooks.end), notices.reached(step, deferred)
                evaluates = run.evaluation is not None and (
                    (last and config.eval.at_end)
                    or (step >= config.eval.start and _due(step, config.eval.every))
                    or EVALUATE in asked
                )
                saves = last or leaves or checkpoints.retry_due or _due(step, config.checkpoint.every) or SAVE in asked
                postponed = evaluates and leaves and postponable
                if saves or evaluates or not deferred:
                    try:
                        log.settle(evaluate if evaluates and not postponed else None)
                    except Preempted:  # in the evaluation
                        log.settle()
                        leaves = saves = postponed = True
                if log.newest.get("step") == first:  # before many steps are made that cannot be saved
                    checkpoints.check_best(first, log.newest)
                if evaluates and not postponed:
                    answers = hooks("on_evaluate", step, log.newest, current)
                    last = last or step == hooks.end  # a hook may have ended the run
                    leaves = leaves or notices.reached(step, deferred)  # an evaluation may take long
                    saves = saves or last or leaves or SAVE in answers
                if saves:
                    hooks("on_checkpoint", step, log.newest, current)
                    with stopwatch("checkpoint"):
                        save(last, leaves, log.newest if postponed else None)
                    hooks("on_save", step, log.newest, current)
                log.warn(checkpoints.warnings())
                profiler.end(step, state)
                if leaves and (postponed or not last):
                    raise Preempted(step, f"after step {step} of {config.total_steps}")

        with notices.ending("after the last step, while the model was written"), stopwatch("export"):
            try:
                trained = _exported(run, state, checkpoints, log, locks)
            except ConfigError as error:
                alone = jax.process_count() > 1 and not isinstance(error, processes.AgreedError)  # others wait for it
                if "state" in config.checkpoint.contents or alone:
                    raise
                log.warn([f"{error.__cause__ or error}: no checkpoint holds the model yet, so its state is saved"])
                save(last=True, leaves=True, unevaluated=None)
                trained = _exported(run, state, checkpoints, log, locks)  # or there is room by now
                checkpoints.abandon()
        hooks("on_end", step, log.newest, lambda: trained)
        logger.finish(stopwatch.totals, checkpoints.outcome())
        with stopwatch(UPLOAD):
            try:
                copy_run(config)
            finally:  # the one may fail, and the other not
                push_run(config)
    return Result(trained, [*earlier, *log.history], folder)


def _exported(run: Run, state: State, checkpoints: Checkpoints, log: StepLog, locks: list[RunLock]) -> Model:
    """The trained model, of the last step or of the best checkpoint, once its files and cards are written."""
    config, folder, last = run.config, Path(run.config.output_dir), int(state.step)
    if config.export.best:
        state = checkpoints.restore_best(state, run.mesh, log.logger.note)
        if run.average is not None and (best := int(state.step)) != last:
            arrays = checkpoints.restore_arrays(best, run.average.arrays(), run.mesh)
            run.average.restore(arrays, merge_frozen(state, run.frozen).params)
        log.warn(checkpoints.warnings())
    trained, critic = finished_models(run, state)
    averaged = None if run.average is None else replace(trained, params=run.average.of_model(trained.params))
    _check_locks(locks)
    export_run(folder, checkpoints.outcome, trained, critic, log.logger.note, averaged)
    checkpoints.exported = folder / "hf"
    with processes.all_or_none(), writing(folder):
        if jax.process_index() == 0:
            if not (folder / CONFIG).is_file():  # someone has deleted it, or all of the folder, which is made again
                start_record(folder, config, {}, None)
            write_cards(folder, int(state.step), config.export)
            (folder / "error.txt").unlink(missing_ok=True)  # of a start that failed
    return trained


def _start(
    config, given: Given, callbacks: Any, stack: contextlib.ExitStack
) -> tuple[Run, StepLog, Checkpoints, Callbacks, list[RunLock], Metrics | None]:
    """The run, at the state with which it begins, what it reports to and saves with, and the metrics of its step if
    that is not evaluated yet; its mesh is set, and `stack` closes all of it."""
    folder, mesh, kept_in = Path(config.output_dir), build_mesh(config), checkpoint_folder(config)
    check_writable(folder)
    locks = _lock(folder, kept_in, stack)
    if not is_remote(kept_in):
        check_shared(kept_in)
    if config.rollout.processes and processes.is_split() and jax.process_index() == 0:
        stack.enter_context(start_learners(rendezvous_of(config)))
    stack.enter_context(jax.set_mesh(mesh))
    checkpoints = stack.enter_context(Checkpoints(kept_in, keep_of(config)))
    start, lines = loaded_once(config, checkpoints)
    changes = changes_to(start, given, checkpoints)
    closing = stack.enter_context(contextlib.ExitStack())
    stack.enter_context(processes.reporting())
    if jax.process_index() == 0:
        check_installed(config.logging.backends)
    check_push(config)
    check_copy(config)
    named = load_callbacks((*config.callbacks, *listed(callbacks)))
    shows = jax.process_index() == 0 and "console" in config.logging.backends
    loading = f"loading {masked(config.model.path)} and the data"
    with waiting(loading, stdout_console()) if shows else contextlib.nullcontext():
        run = build(config, mesh, given)
    config, words = run.config, given_in_words(given._asdict())
    hooks = Callbacks(named, to_json(config), folder, run.evaluation is not None)
    closing.callback(run.close)
    begun = resume(start, given, run, checkpoints, hooks)
    run = run._replace(state=begun.state)
    record: list[str] = []  # lines on the settings that it had before
    with processes.all_or_none(), writing(folder):
        logger = stack.enter_context(
            Logger(logging_spec(config, words), folder, begun.step, again=begun.unevaluated is not None)
        )
        if jax.process_index() == 0:
            discard_exports(folder, begun.step)
            record = start_record(folder, config, changes, begun.step)
            write_start(folder, begun.step)
            write_given(folder, words)
    logger.start(_describe(run), run.stopwatch)
    log = StepLog(health_spec(config), run.source.learn, run.stopwatch, logger, begun.counts, peak_of(config, mesh))
    log.warn([*lines, *record, *begun.warnings, *run.warnings])
    for note in run.notes:
        logger.note(note)
    hooks.note = logger.note
    stack.enter_context(Watchdog(config.watch.hang_seconds, run.stopwatch, folder))
    stack.enter_context(CompileStatus(logger.status, logger.note, run.stopwatch))
    if isinstance(run.source, OnlineSource) and (int(run.state.step) < config.total_steps or config.rollout.processes):
        stack.enter_context(run.source.queue)
        ahead = stack.enter_context(CompiledAhead(compilations(run), mesh, run.stopwatch))
        run = run._replace(source=replace(run.source, wait=ahead.wait))
    return run, log, checkpoints, hooks, locks, begun.unevaluated


def _lock(folder: Path, checkpoints: Any, stack: contextlib.ExitStack) -> list[RunLock]:
    """The locks on the folders that the run writes to, which process 0 holds for all."""
    locks = []
    with processes.all_or_none():
        if jax.process_index() == 0:
            locks.append(stack.enter_context(RunLock(folder)))
            if is_remote(checkpoints) or not checkpoints.is_relative_to(folder.absolute()):
                locks.append(stack.enter_context(RunLock(checkpoints, "checkpoint.folder")))
    return locks


def _check_locks(locks: list[RunLock]) -> None:
    for lock in locks:
        lock.check()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _describe(run: Run) -> dict[str, Any]:
    """Facts of a run for the console, beside its settings."""
    count = sum(x.size for x in jax.tree.leaves(run.model.net.plain.shapes()))
    trained = sum(x.size for x in jax.tree.leaves(run.state.params))
    of_these = f", {trained / 1e6:.2f} M trainable" if trained != count else ""
    devices = jax.devices()
    worker = run.source.producer.worker if isinstance(run.source, OnlineSource) else None
    own_mesh = None if worker is None else getattr(worker.engine, "mesh", worker.mesh)
    apart = worker is not None and worker.mesh != run.mesh
    sampling = f", sampling on {dict(own_mesh.shape)}" if own_mesh is not None and own_mesh != run.mesh else ""
    sampling += f" of {own_mesh.size} other devices" if own_mesh is not None and apart else ""
    overlapped = ", collectives overlap" if len(devices) > 1 and devices[0].platform == "tpu" and overlaps() else ""
    whole = (run.model.hf_config or {}).get("text_part_of")
    part = f", the text part of a {whole}" if whole else ""
    attention = {} if devices[0].platform == "cpu" else {"attention": described(run.model.net.config)}
    return {
        "model": f"{run.model.path}{part}, {count / 1e6:.2f} M parameters{of_these}, {run.model.net.config.dtype}",
        "devices": f"{len(devices)} {devices[0].platform}, mesh {dict(run.mesh.shape)}{sampling}{overlapped}",
        **attention,
        "starts at step": int(run.state.step),
    }


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    if not argv:
        print(welcome(), end="")
        return
    config, options = load_flags(argv, __doc__ or "", (DRY_RUN,))
    if not options["dry_run"]:
        outlive_streams()
    overlap_collectives(config.overlap_collectives)
    processes.join(config, config.rollout.processes if config.algorithm.name not in OFFLINE else 0)
    if processes.sampler() is not None and not options["dry_run"]:
        sample(config)
        return
    if not options["dry_run"]:
        train(config)
        return
    from jaxrl_llm.commands.dry_run import dry_run  # here, as it imports what only plans need

    with waiting("reading the data, then compiling and timing two steps", stderr_console(), lines=False):
        report = dry_run(config, colour=sys.stdout.isatty())
    print(report if jax.process_index() == 0 else "", end="")


if __name__ == "__main__":
    run(main)
