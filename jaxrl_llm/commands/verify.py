"""Verify that the numbers of a run do not depend on how they are computed: the exactness report.

    python -m jaxrl_llm verify --config=configs/grpo.py

Makes the first step of the configuration, on this machine and with its own model, data and rewards, several times: as
it is, and with another number of decode slots, other micro-batches, packed or not, on every other mesh of the devices
at hand; and two steps of it, with and without a checkpoint between them. Prints how far the sampler's log-probs are
from the trainer's, whether the samples are the same tokens, and whether the parameters after the step are the same
bits, or else how far apart the updates are, relative to the length of the update. The learning rate is that after the
warm-up. The router's loss of a mixture of experts is of each micro-batch by itself: by its definition, which is said,
updates differ with them. Writes nothing.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.config import ConfigError, batch_rows, rows_together, validate
from jaxrl_llm.config.flags import file_to_write, load_flags
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.shapes import free
from jaxrl_llm.training.logging.console import show, stderr_console, waiting
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.reference_scores import assume_scores
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import Run, build
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import State, merge_frozen

FLAGS = (Setting("output", "", "JSON file for the report, which is also printed."),)
AXES = ("data", "fsdp", "tensor", "context")
EQUAL = "bit for bit"


class Made(NamedTuple):
    """The result of steps: the tokens `[N,T]` of the last one's rows (None where rows are read from data), its metrics,
    and the trained parameters."""

    tokens: np.ndarray | None
    metrics: dict[str, float]
    params: Any


class Check(NamedTuple):
    """One way to compute the step, compared with the run's own."""

    name: str
    samples: str  # "equal", how many rows differ, or "" where nothing is sampled
    update: str  # EQUAL, a relative difference in words, or the reason why it cannot be computed so
    difference: float | None  # 0 is bit for bit; None where nothing was compared


class Report(NamedTuple):
    """The largest and mean absolute difference of the sampler's and the trainer's log-probs, in nats, and the checks.

    The differences are None for algorithms that sample nothing.
    """

    logp_difference_max: float | None
    logp_difference_mean: float | None
    checks: list[Check]


def verify(config) -> Report:
    """The exactness report of a configuration. Raises ConfigError as training does, and for several processes."""
    validate(config)
    if jax.process_count() > 1:
        raise ConfigError("verify compares whole arrays, so it runs in one process: leave processes.* out")
    for name in ("staleness", "processes", "partial_prompts"):
        if value := config.rollout[name]:
            raise ConfigError(
                f"rollout.{name} is {value}, but verify makes batches that are sampled whole, in turn with updates: "
                f"verify the run of --config.rollout.{name}=0"
            )
    config = config.copy_and_resolve_references()
    c = config.optimizer
    c.schedule, c.schedule_steps, c.power, c.stable_steps, c.decay_steps = "constant", 0, 1.0, 0, 0
    c.warmup_steps, c.warmup_ratio, c.warmup_init = 0, 0.0, 0.0
    config.critic.schedule, config.critic.lr_warmup_steps = "constant", 0
    with _run(config) as run:
        net = run.model.net.config
        start = jax.device_get(run.state.params)
        variants = list(_variants(config, run))
        with tempfile.TemporaryDirectory() as folder:
            state = run.state
            own, state = _step(config, run, state)
            with Checkpoints(Path(folder)) as checkpoints:
                checkpoints.save(1, state, run.source.get_state(), run.get_arrays(), final=True)
                second, _ = _step(config, run, state)
                free(state)
                with _run(config) as again:
                    resumed, host = checkpoints.restore(1, again.state, again.mesh)
                    again.set_state(resumed, host, checkpoints.restore_arrays(1, again.restorable(), again.mesh))
                    went_on, _ = _step(config, again, resumed)
    checks = []
    for name, changes in [("the same again", {}), *variants]:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(changes)
        try:
            with _run(changed) as other:
                made = _step(changed, other, other.state)[0]
            checks.append(_compared(name, start, own, made, _of_router(net, changes)))
        except ConfigError as error:
            checks.append(Check(name, "", f"cannot be: {error}", None))
    checks.insert(1, _compared("step 2, resumed after step 1", own.params, second, went_on))
    mean, largest = (own.metrics.get(f"sampling/sampling_logp_difference/{kind}") for kind in ("mean", "max"))
    return Report(largest, mean, checks)


@contextlib.contextmanager
def _run(config) -> Iterator[Run]:
    mesh = build_mesh(config)
    with jax.set_mesh(mesh), contextlib.closing(build(config, mesh)) as run, contextlib.ExitStack() as stack:
        assume_scores(run.source)
        if isinstance(run.source, OnlineSource):
            stack.enter_context(run.source.queue)
        yield run


def _step(config, run: Run, state: State) -> tuple[Made, State]:
    """One step of a run from `state`, which it donates."""
    key = jax.random.fold_in(jax.random.key(config.seed), int(state.step) + 1)
    batch = run.source.next(merge_frozen(state, run.frozen), key).batch
    tokens = np.asarray(batch.inputs.tokens) if config.algorithm.name not in OFFLINE else None
    state, updates = improve(run, state, batch)
    if run.average is not None:
        run.average.update(int(state.step), merge_frozen(state, run.frozen).params)
    # Those of the first update that has them: a critic that is trained apart makes its own before the policy's.
    metrics = {name: float(value) for update in reversed(updates) for name, value in update.items()}
    return Made(tokens, metrics, jax.device_get(state.params)), state


def _variants(config, run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other ways to compute the same step: a name, and the settings by which it differs."""
    if config.algorithm.name not in OFFLINE:
        slots = config.rollout.slots or batch_rows(config)
        if slots > 1:
            yield f"{amount(slots // 2, 'decode slot')} for {slots}", {"rollout.slots": slots // 2}
    rows = config.batch.microbatch_rows or batch_rows(config) // config.batch.minibatches
    unit = rows_together(config) if config.algorithm.name in OFFLINE else 1
    if part := next((size for size in range(rows // 2, 0, -1) if rows % size == 0 and size % unit == 0), 0):
        smaller = {"batch.microbatch_rows": part}
        if config.batch.microbatch_tokens:
            smaller["batch.microbatch_tokens"] = config.batch.microbatch_tokens // 2
        yield f"micro-batches of {amount(part, 'row')} for {rows}", smaller
    packed = run.pack.sizes is not None
    yield ("rows not packed" if packed else "packed rows"), {"batch.packing": "false" if packed else "true"}
    devices, own = run.mesh.size, dict(run.mesh.shape)  # of those that train
    for axis in (*AXES, *(("expert",) if run.model.net.config.experts else ())):  # without experts it is more fsdp
        if devices > 1 and own[axis] != devices:
            sizes = {f"mesh.{name}": 1 for name in own} | {f"mesh.{axis}": devices}
            yield f"mesh of {axis} {devices}", sizes


def _of_router(net: ModelConfig, changes: Mapping[str, Any]) -> str:
    """The words on a difference that settings of micro-batches make by what a router's loss is; none for others."""
    if not (net.experts and net.router_aux_loss_coef and any(key.startswith("batch.") for key in changes)):
        return ""
    return ", by definition: the router's loss is of each micro-batch by itself"


def _compared(name: str, start: Any, own: Made, other: Made, reason: str = "") -> Check:
    """The Check of `other` against `own`, with the reason of a difference; both began with the parameters `start`."""
    samples = ""
    if own.tokens is not None and other.tokens is not None:
        same = own.tokens.shape == other.tokens.shape
        rows = int(np.any(own.tokens != other.tokens, axis=1).sum()) if same else len(own.tokens)
        samples = f"{rows} of {len(own.tokens)} rows differ" if rows else "equal"
    apart = length = 0.0
    for before, a, b in zip(*map(jax.tree.leaves, (start, own.params, other.params)), strict=True):
        before, a, b = (np.asarray(x, np.float64) for x in (before, a, b))
        apart, length = apart + np.square(a - b).sum(), length + np.square(a - before).sum()
    if not length:
        return Check(name, samples, "no parameter moves in this step: take another seed or more rows", None)
    difference = float(np.sqrt(apart / length))
    norms = [made.metrics["grad_norm"] for made in (own, other)]
    of_norm = abs(norms[1] - norms[0]) / (norms[0] or 1.0)  # weight decay moves parameters without a gradient
    words = f"differs by {difference:.1e} of its length, the gradient's norm by {of_norm:.1e}{reason}"
    return Check(name, samples, words if difference else EQUAL, difference)


def lines(report: Report) -> list[str]:
    """The report as lines of text: how far the sampler's log-probs are from the trainer's, and a table with a row for
    each way to compute the step."""
    text = []
    if report.logp_difference_max is not None:
        text = [
            "log-probs of the sampler against the trainer's: at most "
            f"{show(report.logp_difference_max)} nats apart, {show(report.logp_difference_mean)} in the mean",
            "",
        ]
    heads = ("the step computed with", "samples", "update")
    rows = [heads, *((check.name, check.samples, check.update) for check in report.checks)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    text += [f"{row[0]:<{first}}  {row[1]:<{second}}  {row[2]}" if second else f"{row[0]:<{first}}  {row[2]}"
             for row in rows]  # fmt: skip
    if jax.device_count() == 1:
        text += ["", "One device is here: XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of a CPU."]
    return text


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    processes.join(config)
    keep_compiled(config.compilation_cache)
    output = file_to_write("output", options["output"])
    with waiting("making the first step in several ways", stderr_console(), lines=False):
        report = verify(config)
    sys.stdout.write("\n".join(lines(report)) + "\n")
    if output is not None:
        checks = [check._asdict() for check in report.checks]
        output.write_text(json.dumps({**report._asdict(), "checks": checks}, indent=2) + "\n", encoding="utf-8")
