"""One task of this library, as a user runs it: the parts of `training.build`, stepped as train.py does.

Prints medians, and the phases of a step, for benchmarks/run.py.
"""

import dataclasses
import sys
import tempfile
from typing import Any

import jax
import numpy as np

from benchmarks import task
from benchmarks.cases import BETA, is_geometric, lengths, pairs, prompts, reward, texts, useful_tokens, words
from benchmarks.meter import Meter, report
from benchmarks.task import Task, dtype
from jaxrl_llm.config import ConfigDict, default
from jaxrl_llm.distributed.host_memory import return_memory
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.runtime.compiling import CompileStatus
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import Run, build
from jaxrl_llm.training.update import merge_frozen

SCALES = (1, 2, 4, 8, 16)
NEVER = (-1,)  # no token ends a row


@dataclasses.dataclass(frozen=True)
class Cut(Engine):
    """An engine whose rows stop at given lengths."""

    stops: tuple[int, ...] = ()

    def generate(self, *arguments, **options):
        """Completions, each as long as its stop."""
        return super().generate(*arguments, **options, limits=np.asarray(self.stops))


def config_of(task: Task) -> ConfigDict:
    """The configuration of a case, every other setting at its default."""
    config, shape = default(), task.shape
    config.output_dir = tempfile.mkdtemp()
    config.model.path, config.model.dtype = str(task.folder), dtype()
    config.eval.every = -1
    config.total_steps = 1000
    config.optimizer.learning_rate = 1e-6
    if shape.lora:
        config.lora.rank, config.lora.alpha = shape.lora, 2.0 * shape.lora
    if task.case in ("dpo", "sft"):
        config.data.max_length = shape.row
        config.data.overlong = "truncate_right"
        config.algorithm.name = {"dpo": "preference", "sft": "sft"}[task.case]
        config.batch.prompts = shape.pairs if task.case == "dpo" else shape.rows
        if task.case == "dpo":
            config.algorithm.loss, config.algorithm.beta = "dpo", 0.1
        return config
    config.batch.prompts, config.rollout.group_size = shape.prompts, shape.group
    config.rollout.max_prompt_length = shape.prompt
    config.rollout.max_completion_length = int(lengths(shape).max()) if is_geometric(task.case) else shape.new
    config.algorithm.aggregation = "token"
    config.algorithm.beta = BETA.get(task.case, 0.0)
    return config


def data_of(task: Task) -> list[dict[str, str]]:
    """The rows that are trained on: enough for one step."""
    shape = task.shape
    if task.case == "dpo":
        return [
            {"prompt": words(prompt), "chosen": words(chosen[:-1]), "rejected": words(rejected[:-1])}
            for prompt, chosen, rejected in zip(*pairs(shape), strict=True)
        ]
    if task.case == "sft":
        return [{"text": words(row)} for row in texts(shape.rows, shape.row - 1)]
    return [{"prompt": words(row)} for row in prompts(shape)]


def odd_share(completion_ids, **_) -> list[float]:
    """The reward of every library in these measurements."""
    return [reward(ids) for ids in completion_ids]


def parts_of(config, mesh, data: list[dict[str, str]], stops: tuple[int, ...] = ()) -> Run:
    """The parts of a run, whose rows end at `stops` or at full length, never at an end-of-text token."""
    parts = build(config, mesh, Given(data, rewards=[odd_share]))
    source: Any = parts.source
    if isinstance(source, OnlineSource):
        worker = source.producer.worker
        fields = {f.name: getattr(worker.engine, f.name) for f in dataclasses.fields(Engine)}
        engine = Cut(**fields | {"eos": NEVER}, stops=stops) if stops else Engine(**fields | {"eos": NEVER})
        producer = dataclasses.replace(source.producer, worker=dataclasses.replace(worker, engine=engine))
        source = dataclasses.replace(source, producer=producer)
    return parts._replace(source=source)


class Stepper:
    """Training steps of a run: call it for the seconds of one step's phases."""

    def __init__(self, config, parts: Run):
        self.parts, self.state, self.number = parts, parts.state, 0
        self.key = jax.random.key(config.seed)

    def __call__(self) -> dict[str, float]:
        """One step: experience, update, and metrics on the host."""
        parts, self.number = self.parts, self.number + 1
        key = jax.random.fold_in(self.key, self.number)
        experience = parts.source.next(merge_frozen(self.state, parts.frozen), key)
        return_memory()
        with parts.stopwatch("update"):
            self.state, metrics = parts.update(self.state, parts.pack(experience.batch), parts.frozen)
            metrics = {name: float(x) for name, x in jax.device_get(experience.metrics | metrics).items()}
            jax.block_until_ready(self.state)
        useful = "rollout/useful_token_fraction"
        return {**parts.stopwatch.take(), **({"useful": metrics[useful]} if useful in metrics else {})}


def rollout(task: Task, config, parts: Run, meter: Meter) -> dict[str, Any]:
    """Completions of one batch of prompts, by the engine alone."""
    del config
    engine: Engine = parts.source.producer.worker.engine  # type: ignore[union-attr]
    tokens = np.asarray(prompts(task.shape), np.int32)
    params, keys = merge_frozen(parts.state, parts.frozen).params, iter(jax.random.split(jax.random.key(1), 1000))

    def sample() -> dict[str, float]:
        found = engine.generate(params, tokens, np.ones_like(tokens), next(keys))
        generated, steps = jax.device_get((found.lengths, found.steps))
        assert generated.sum() == useful_tokens(task.case, task.shape), "a row did not stop where it should"
        return {"useful": float((generated - 1).sum() / steps.sum())}

    meter.measure(sample)
    return meter.summary()


def scaling(task: Task, meter: Meter) -> dict[str, Any]:
    """Seconds of a GRPO step of 1 to 16 times the tokens, in micro-batches of one size."""
    points = []
    for scale in SCALES:
        small = dataclasses.replace(task.shape, prompts=scale, new=task.shape.prompt // 2)
        shape = dataclasses.replace(small, group=min(8, small.group))
        config = config_of(task)
        config.batch.prompts, config.rollout.group_size = shape.prompts, shape.group
        config.rollout.max_completion_length = shape.new
        config.batch.microbatch_tokens = shape.prompt + shape.group * shape.new
        with jax.set_mesh(mesh := build_mesh(config)):
            stepper = Stepper(config, parts_of(config, mesh, [{"prompt": words(row)} for row in prompts(shape)]))
            own = Meter(least=meter.least, peak=meter.peak)
            own.measure(stepper)
        points.append((shape.completions * (shape.prompt + shape.new), own.summary()["seconds"]))
    return {"points": points, **fit(points), "peak_gb": own.summary()["peak_gb"]}


def fit(points: list[tuple[int, float]]) -> dict[str, float]:
    """How seconds grow with tokens: the line's fit (R²), and the power between the first and the last point."""
    tokens, seconds = np.array(points).T
    slope, start = np.polyfit(tokens, seconds, 1)
    rest = seconds - (slope * tokens + start)
    power = np.log(seconds[-1] / seconds[0]) / np.log(tokens[-1] / tokens[0])
    return {
        "seconds": float(slope * 1000),  # of a thousand tokens
        "fixed": float(start),
        "r2": float(1 - (rest**2).sum() / ((seconds - seconds.mean()) ** 2).sum()),
        "power": float(power),
    }


def main(argv: list[str]) -> None:
    """The command line: one task."""
    job = task.read(argv)
    meter = Meter(least=job.least, peak=task.jax_peak_gb)
    if job.case == "scaling":
        report(scaling(job, meter))
        return
    config = config_of(job)
    stops = tuple(map(int, lengths(job.shape))) if is_geometric(job.case) else ()
    with jax.set_mesh(mesh := build_mesh(config)):
        parts = parts_of(config, mesh, data_of(job), stops)
        with CompileStatus(lambda text, began: None, lambda text: None, parts.stopwatch):
            if job.case.startswith("rollout"):
                report(rollout(job, config, parts, meter))
            else:
                meter.measure(Stepper(config, parts))
                report(meter.summary())


if __name__ == "__main__":
    main(sys.argv[1:])
