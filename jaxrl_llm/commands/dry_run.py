"""`train --dry_run`: show the data, the plan for the local devices and the time of a step; write nothing."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl_llm.commands.preview import preview
from jaxrl_llm.config import validate
from jaxrl_llm.config.wording import amount
from jaxrl_llm.tools.plan.advice import advice
from jaxrl_llm.tools.plan.planned import is_split, make_plan
from jaxrl_llm.tools.plan.split import Split, split_lines
from jaxrl_llm.tools.plan.text import lines, seconds_text
from jaxrl_llm.tools.plan.topology import Target, at_hand_target
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.reference_scores import assume_scores
from jaxrl_llm.training.setup.run import Run, build
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import merge_frozen

ROWS, MEASURED = 1, 1000  # rows of the data to show and to measure


def dry_run(config, colour: bool = False) -> str:
    """The report of a dry run: examples of the data, the plan, and the durations of a step and of the run.

    It makes two steps, the first of which compiles, and discards their state. Raises ConfigError as training does.
    """
    validate(config)
    output_dir, config = config.output_dir, config.copy_and_resolve_references()
    report = [preview(config, ROWS, MEASURED, colour=colour).rstrip(), ""]
    target = at_hand_target(config)
    with jax.set_mesh(target.mesh), tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder  # where a queue writes what arrives
        with contextlib.closing(build(config, target.mesh)) as run:
            unscored = assume_scores(run.source)
            config = run.config
            config.num_epochs = None  # the data are here, and total_steps is counted
            report += _plan_lines(config, target, run)
            with run.source.queue if isinstance(run.source, OnlineSource) else contextlib.nullcontext():
                report += ["", *_timed(config, run)]
            if unscored:
                count = unscored * config.algorithm.reference_samples
                report.append(
                    f"before the first step the reference completes {amount(unscored, 'prompt')}, "
                    f"{amount(count, 'completion')}: the sampling of about "
                    f"{amount(-(-count // run.batch.rows), 'step')}, not counted"
                )
    return "\n".join([*report, f"nothing was written to {output_dir}", ""])


def widths(run: Run) -> tuple[int, int]:
    """Tokens of the prompts and rows that the run's data need."""
    if isinstance(run.source, OnlineSource):
        worker = run.source.producer.worker
        return worker.prompt_width, worker.prompt_width + worker.engine.max_completion_length
    return 0, run.source.spec.width


def _plan_lines(config, target: Target, run: Run) -> Iterator[str]:
    """Yield the lines on the plan of all devices or, where some only sample, on that of both halves."""
    if not is_split(config):
        plan = make_plan(config, target, widths(run), packer=run.pack)
        yield from lines(plan, advice(plan, compiled=False) if plan.is_tight else ())
        return
    assert isinstance(run.source, OnlineSource)
    halves = (("training", target), ("sampling", target._replace(mesh=run.source.producer.worker.mesh)))
    training, sampling = (make_plan(config, on, widths(run), only=half, packer=run.pack) for half, on in halves)
    yield from split_lines(Split(training, sampling, 1, in_files=False))


def _timed(config, run: Run) -> list[str]:
    """The lines on the durations of two steps and the expected one of the run."""
    state: Any = run.state
    took, root = [], jax.random.key(config.seed)
    for step in (1, 2):
        began = time.perf_counter()
        experience = run.source.next(merge_frozen(state, run.frozen), jax.random.fold_in(root, step))
        state, updates = improve(run, state, experience.batch)
        if run.average is not None:
            run.average.update(step, merge_frozen(state, run.frozen).params)
        jax.block_until_ready((state, updates, None if run.average is None else run.average.params))
        took.append(time.perf_counter() - began)
    first, second = took
    total = first + second * max(config.total_steps - 1, 0)
    phases = ", ".join(f"{name} {seconds_text(spent)}" for name, spent in run.stopwatch.totals.items())
    return [
        f"first step {seconds_text(first)}, compilation included; second step {seconds_text(second)}",
        f"both steps by phase: {phases}",
        f"{amount(config.total_steps, 'step')} would take about {seconds_text(total)}, evaluations and checkpoints not "
        "counted",
    ]
