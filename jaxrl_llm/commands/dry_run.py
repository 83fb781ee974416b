"""`train --dry_run`: the data, the plan for the devices at hand and the time of a step, and nothing is written."""

import time
from typing import Any

import jax

from jaxrl_llm.commands.preview import preview
from jaxrl_llm.config import validate
from jaxrl_llm.tools.plan.advice import advice
from jaxrl_llm.tools.plan.planned import make_plan
from jaxrl_llm.tools.plan.text import lines, seconds
from jaxrl_llm.tools.plan.topology import at_hand_target
from jaxrl_llm.training.online import Online
from jaxrl_llm.training.setup import Run, build
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import whole

ROWS, MEASURED = 1, 1000  # of the data that are shown and measured


def dry_run(config, colour: bool = False) -> str:
    """Return the report of a dry run: examples of the data, the plan, and how long a step and the run take.

    Two steps are really made, the first to compile; their state is thrown away. Raises ConfigError as training does.
    """
    validate(config)
    report = [preview(config, ROWS, MEASURED, colour=colour).rstrip(), ""]
    target = at_hand_target(config)
    with jax.set_mesh(target.mesh):
        run = build(config, target.mesh)
        try:
            plan = make_plan(config, target, widths(run), packer=run.pack)
            tight = bool(target.device.memory) and plan.peak.peak > plan.capacity
            report += [*lines(plan, advice(plan, compiled=False) if tight else ())]
            report += ["", *_timed(config, run)]
        finally:
            run.rewards.close()
            if run.environments is not None:
                run.environments.close()
    return "\n".join([*report, f"nothing was written to {config.output_dir}", ""])


def widths(run: Run) -> tuple[int, int]:
    """Return the tokens of the prompts and rows that the run's data need."""
    source = run.source
    if isinstance(source, Online):
        width = source.sampler.prompt_width
        return width, width + source.config.rollout.max_completion_length
    return 0, source.width


def _timed(config, run: Run) -> list[str]:
    """Return the times of two steps, and an estimate for the run."""
    state: Any = run.state
    times, root = [], jax.random.key(config.seed)
    for step in (1, 2):
        began = time.perf_counter()
        experience = run.source.next(whole(state, run.frozen), jax.random.fold_in(root, step))
        state, updates = improve(config, run, state, experience.batch)
        jax.block_until_ready((state, updates))
        times.append(time.perf_counter() - began)
    first, second = times
    total = first + second * max(config.total_steps - 1, 0)
    phases = ", ".join(f"{name} {seconds(spent)}" for name, spent in run.watch.totals.items())
    return [
        f"first step {seconds(first)}, compilation included; second step {seconds(second)}",
        f"both steps by phase: {phases}",
        f"{config.total_steps} steps would take about {seconds(total)}, evaluations and checkpoints not counted",
    ]
