"""Train a language model: `python -m jaxrl_llm.train --config=configs/grpo.py`. Start reading here.

Every algorithm is `experience -> Batch -> update -> State`. One step:

1. `source.next` makes a batch of token rows: given ones (offline) or sampled and scored ones (online);
2. the jitted, donated `update` improves the state, once per minibatch;
3. the policy is evaluated when due, metrics are logged, the state is saved when due.
"""

import contextlib
import functools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms.batch import Batch, minibatch_indices
from jaxrl_llm.command_line import load_flags, run
from jaxrl_llm.config import ConfigError, rows_together, to_json, validate
from jaxrl_llm.models.lora import has_adapters
from jaxrl_llm.models.model import Model, has_peft_adapter, save_adapter, save_hf
from jaxrl_llm.sharding import row_sharding
from jaxrl_llm.training.build import Run, build, build_mesh
from jaxrl_llm.training.checkpoint import Checkpoints, find
from jaxrl_llm.training.critic import critic_params
from jaxrl_llm.training.metrics import Logger
from jaxrl_llm.training.objectives import merged_by
from jaxrl_llm.training.update import State, whole

Metrics = dict[str, float]


class Result(NamedTuple):
    """What `train` returns: the trained model, the metrics of each logged step, and the folder with the files."""

    model: Model
    metrics: list[Metrics]
    output_dir: Path


def train(config, train_dataset=None, eval_dataset=None, rewards=None, environment=None, tools=()) -> Result:
    """The trained model, after `config.total_steps` steps; files are left in `config.output_dir`.

    train_dataset and eval_dataset (a `datasets.Dataset` or a list of dicts) take the place of `data.path` and
    `data.eval_path`, and rewards (a function or a list of them) that of `rewards.functions`; with a train_dataset alone
    nothing is evaluated. environment (what makes one, or a dictionary of such) takes the place of `environment.name`;
    tools (functions) come after those of `environment.tools`. A run in output_dir goes on where its newest checkpoint
    left it (`checkpoint.resume`). Raises ConfigError for anything the user can mend.
    """
    validate(config)
    folder, mesh = Path(config.output_dir), build_mesh(config)
    with (
        jax.set_mesh(mesh),
        Checkpoints(folder / "checkpoints", config.checkpoint.keep) as checkpoints,
        contextlib.ExitStack() as stack,
    ):
        parts = build(config, mesh, train_dataset, eval_dataset, rewards, environment, tools)
        stack.callback(parts.rewards.close)
        if parts.environments is not None:
            stack.callback(parts.environments.close)
        state, counts, goes_on = _resume(config, parts, checkpoints)
        start = int(state.step)
        with Logger(config, folder, resume_step=start if goes_on else None) as logger:
            if jax.process_index() == 0:
                (folder / "config.json").write_text(to_json(config))
            logger.start(_describe(parts, start))
            state, history = _loop(config, parts, state, counts, checkpoints, logger)
            with parts.watch("export"):
                state = whole(state, parts.frozen)
                model = replace(parts.model, params=state.params)
                save_hf(model, folder / "hf")
                if has_peft_adapter(model):
                    save_adapter(model, folder / "adapter")
                elif has_adapters(model.params):
                    logger.note("hf/ has the adapters merged; this family's fused tensors leave no PEFT folder")
                if parts.critic is not None and state.critic is not None:
                    save_hf(replace(parts.critic, params=critic_params(config, state)), folder / "critic")
            logger.finish(seconds=parts.watch.totals)
    return Result(model, history, folder)


def _loop(config, parts: Run, state: State, counts: dict[str, int], checkpoints: Checkpoints, logger: Logger):
    """The state after the last step, and every step's metrics."""
    root, watch, history = jax.random.key(config.seed), parts.watch, []

    def log(step: int, metrics: Metrics, evaluate: bool) -> None:
        if evaluate and parts.evaluation is not None:
            with watch("evaluation"):
                metrics = metrics | parts.evaluation(whole(state, parts.frozen).params, root)
            metrics |= watch.take()
        logger.log(step, metrics)
        history.append({"step": step, **metrics})

    if int(state.step) == 0 and parts.evaluation is not None:
        log(0, {}, evaluate=True)
    for step in range(int(state.step) + 1, config.total_steps + 1):
        last, began = step == config.total_steps, time.perf_counter()
        experience = parts.source.next(whole(state, parts.frozen), jax.random.fold_in(root, step))
        with watch("update"):
            state, update_metrics = _improve(config, parts, state, experience.batch)
            metrics = {
                name: float(value) for name, value in jax.device_get(experience.metrics).items()
            } | update_metrics
        trained = metrics["num_tokens"]
        counts = {
            "num_tokens": counts["num_tokens"] + int(trained),
            "skipped": _skipped(config, metrics, step, counts["skipped"]),
        }
        if counts["skipped"]:
            logger.warn(f"step {step} changed nothing: its gradient is not finite (loss {metrics['loss']:g})")
        else:
            parts.source.learn(update_metrics)
        seconds = time.perf_counter() - began
        metrics |= {
            "num_tokens": counts["num_tokens"],
            "step_time": seconds,
            "tokens_per_second": trained / seconds,
        } | watch.take()
        if experience.table:
            logger.completions(step, experience.table)
        log(step, metrics, evaluate=last or _due(step, config.eval.every))
        if last or _due(step, config.checkpoint.every):
            with watch("checkpoint"):
                checkpoints.save(step, state, {**parts.source.get_state(), **counts}, parts.source.get_arrays())
    return state, history


def _improve(config, parts: Run, state: State, batch: Batch) -> tuple[State, Metrics]:
    """The state after every minibatch of every iteration, one step further, and the metrics averaged over them."""
    group = rows_together(config)
    seed = (config.seed, int(state.step)) if config.batch.shuffle else None
    collected = []
    for index in minibatch_indices(batch.rows, group, config.batch.minibatches, config.algorithm.num_iterations, seed):
        minibatch = batch if config.batch.minibatches == 1 else _take(batch, index, parts.mesh)
        state, metrics = parts.update(state, minibatch, parts.frozen)
        collected.append(metrics)
    values = [{name: float(value) for name, value in metrics.items()} for metrics in jax.device_get(collected)]
    merge = {"max": max, "min": min, "sum": np.mean}
    merged = {name: float(merge[merged_by(name)]([metrics[name] for metrics in values])) for name in values[0]}
    return replace(state, step=state.step + 1), merged


@functools.partial(jax.jit, static_argnames="mesh")
def _take(batch: Batch, index, mesh) -> Batch:
    return jax.lax.with_sharding_constraint(batch.take(index), row_sharding(mesh))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _skipped(config, metrics: Metrics, step: int, skipped: int) -> int:
    """Steps in a row, this one included, that changed nothing; raises ConfigError when they are too many."""
    skipped = skipped + 1 if metrics["nonfinite_gradient"] == 1 else 0
    if skipped > config.optimizer.max_skipped_steps:
        raise ConfigError(
            f"step {step}: the gradient is not finite (loss {metrics['loss']:g}, norm {metrics['grad_norm']:g}), "
            f"{skipped} step{'s' if skipped > 1 else ''} in a row (optimizer.max_skipped_steps = "
            f"{config.optimizer.max_skipped_steps}); the last checkpoint is intact. Lower optimizer.learning_rate, or "
            "check the data and rewards of that step."
        )
    return skipped


def _resume(config, parts: Run, checkpoints: Checkpoints) -> tuple[State, dict[str, int], bool]:
    """The state that `checkpoint.resume` says, the counts of `_loop`, and whether output_dir's own run goes on.

    Checkpoints in output_dir that come after the start, or belong to another run, are deleted.
    """
    source, step = checkpoints, checkpoints.latest()
    if config.checkpoint.resume == "never":
        step = None
    elif config.checkpoint.resume != "auto":
        source, step = find(config.checkpoint.resume)
    goes_on = step is not None and source.folder == checkpoints.folder
    checkpoints.discard_after(step if goes_on else None)
    if step is None:
        return parts.state, {"num_tokens": 0, "skipped": 0}, False
    state, host = source.restore(step, parts.state, parts.mesh)
    parts.source.set_state(host, source.restore_arrays(step, parts.source.get_arrays(), parts.mesh))
    return state, {name: host[name] for name in ("num_tokens", "skipped")}, goes_on


def _describe(parts: Run, start: int) -> dict[str, Any]:
    """What the console shows of a run besides its settings."""
    count = sum(x.size for x in jax.tree.leaves(parts.model.net.plain.shapes()))
    trained = sum(x.size for x in jax.tree.leaves(parts.state.params))
    of_these = f", {trained / 1e6:.2f} M trained beside them" if trained != count else ""
    devices = jax.devices()
    return {
        "model": f"{parts.model.path}, {count / 1e6:.2f} M parameters{of_these}, {parts.model.net.config.dtype}",
        "devices": f"{len(devices)} {devices[0].platform}, mesh {dict(parts.mesh.shape)}",
        "starts at step": start,
    }


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    train(load_flags(argv, __doc__ or "").config)


if __name__ == "__main__":
    run(main)
