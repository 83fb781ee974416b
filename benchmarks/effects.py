"""What each technique gains: the same work with it switched off and on, in turns, in one process.

    python -m benchmarks.effects                       # all, to benchmarks/results/effects.md
    python -m benchmarks.effects packing unrolled      # some
    python -m benchmarks.effects --small               # a test of the measurements themselves

The model is the 5 M-parameter qwen2 of benchmarks/cases.py. Seconds are medians of three; memory is what the compiled
program needs besides its arguments.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ours
from benchmarks.cases import SHAPES, Shape, lengths, prompts, texts, words
from benchmarks.folders import folder_of
from benchmarks.page import table
from benchmarks.run import CACHE, STORE
from benchmarks.task import Task
from jaxrl_llm.models import chunked_softmax
from jaxrl_llm.models.kernels import cpu_matmul
from jaxrl_llm.models.logprobs import chunked_logps
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout import multi_turn
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import Run
from jaxrl_llm.training.update import merge_frozen

TURNS = 3


class Side(NamedTuple):
    """One side of a comparison: `work` is timed; `memory` is in bytes, 0 where it is not measured."""

    work: Callable[[], Any]
    memory: int = 0


class Measured(NamedTuple):
    """A line of the table."""

    seconds: tuple[float, float]  # off, on
    memory: tuple[int, int]


def measured(off: Side, on: Side) -> Measured:
    """Both sides, in turns, after one call each that compiles."""
    seconds: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for side, found in zip((off, on), seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(side.work())
            if turn:
                found.append(time.perf_counter() - began)
    first, second = (statistics.median(found) for found in seconds)
    return Measured((first, second), (off.memory, on.memory))


def _config(task: Task, **changes):
    config = ours.config_of(task)
    for name, value in changes.items():
        section, _, leaf = name.partition("__")
        config[section][leaf] = value
    return config


def _parts(config, data) -> Run:
    return ours.parts_of(config, build_mesh(config), data)


def _rollout(engine: Engine, parts: Run, tokens: np.ndarray, stops: np.ndarray) -> Side:
    params, key = merge_frozen(parts.state, parts.frozen).params, jax.random.key(1)
    tokens = np.asarray(tokens, np.int32)
    return Side(lambda: engine.generate(params, tokens, np.ones_like(tokens), key, limits=stops).tokens)


def _update(task: Task, data, **changes) -> Side:
    """The update of one batch, again and again."""
    config = _config(task, **changes)
    parts = _parts(config, data)
    batch = parts.pack(parts.source.next(merge_frozen(parts.state, parts.frozen), jax.random.key(0)).batch)
    held, update = [parts.state], parts.update

    def work():
        held[0], metrics = update(held[0], batch, parts.frozen)
        return metrics

    return Side(work, _temporary(update, parts.state, batch, parts.frozen))


def _temporary(function: Any, *arguments) -> int:
    return function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Scanned(Engine):
    """An engine that decodes with one compiled layer, scanned."""

    @property
    def decoder(self) -> Net:
        """The net as it is trained on accelerators."""
        return dataclasses.replace(self.net, config=dataclasses.replace(self.net.config, scan_layers=True))


def _engine(parts: Run, kind: type[Engine] = Engine, **changes) -> Engine:
    source: Any = parts.source
    fields = {f.name: getattr(source.producer.worker.engine, f.name) for f in dataclasses.fields(Engine)}
    return kind(**fields | changes)


def rows_leave(task: Task) -> Measured:
    """Rows that end leave the batch: against a batch that decodes until its longest row ends."""
    shape, ends = task.shape, lengths(task.shape)
    parts = _parts(_config(task, rollout__max_completion_length=int(ends.max())), ours.data_of(task))
    engine, tokens = _engine(parts), prompts(shape)
    return measured(
        _rollout(engine, parts, tokens, np.full_like(ends, ends.max())), _rollout(engine, parts, tokens, ends)
    )


def slots(task: Task) -> Measured:
    """Half as many slots as rows, refilled as rows end: against all rows at once, which leave as they end."""
    return _scheduled(task, slots=task.shape.completions // 2)


def finer_grids(task: Task) -> Measured:
    """Rows that are left go on in smaller grids once they fit into 0.85 of the slots: against half of them."""
    return _scheduled(task, shrink=0.85)


def _scheduled(task: Task, **changes) -> Measured:
    """Rows that stop at geometric lengths, by an engine with these changes: against the engine without."""
    ends = lengths(task.shape)
    parts = _parts(_config(task, rollout__max_completion_length=int(ends.max())), ours.data_of(task))
    return measured(*(_rollout(_engine(parts, **own), parts, prompts(task.shape), ends) for own in ({}, changes)))


class Tool:
    """A turn server that answers each row once, with 128 tokens."""

    def __init__(self):
        self.answered, self.open = set(), {}

    def submit(self, row: int, tokens: list[int]) -> None:
        """Takes the row's turn."""
        self.open[row] = None if row in self.answered else [1] * 128
        self.answered.add(row)

    def poll(self, wait: bool) -> dict[int, list[int] | None]:
        """The answers to all turns so far."""
        ready, self.open = self.open, {}
        return ready


def observation_tokens(task: Task) -> Measured:
    """Of what a tool answers, 128 tokens between turns of about 16, 64 are read at a time: against one."""
    eos = tuple(range(task.shape.config["vocab_size"] // 16))
    parts = _parts(_config(task, rollout__max_completion_length=192), ours.data_of(task))
    engine, params = _engine(parts, eos=eos), merge_frozen(parts.state, parts.frozen).params
    tokens, key, usual = np.asarray(prompts(task.shape), np.int32), jax.random.key(1), multi_turn.MIN_TOKENS

    def work(many: int):
        multi_turn.MIN_TOKENS = many
        try:
            return engine.generate(params, tokens, np.ones_like(tokens), key, turn_server=Tool()).tokens
        finally:
            multi_turn.MIN_TOKENS = usual

    return measured(*(Side(functools.partial(work, many)) for many in (sys.maxsize, usual)))


def shared_prompts(task: Task) -> Measured:
    """A prompt is computed, and its keys and values stored and read, once: against once for each completion."""
    shape = task.shape
    parts, full = _parts(_config(task), ours.data_of(task)), np.full(shape.completions, shape.new)
    alone = np.repeat(prompts(shape), shape.group, axis=0)
    off = _rollout(_engine(parts, group_size=1), parts, alone, full)
    return measured(off, _rollout(_engine(parts), parts, prompts(shape), full))


def unrolled(task: Task) -> Measured:
    """Decoding has a program for each layer: against one that is scanned."""
    full = np.full(task.shape.completions, task.shape.new)
    parts = _parts(_config(task), ours.data_of(task))
    return measured(*(_rollout(_engine(parts, kind), parts, prompts(task.shape), full) for kind in (Scanned, Engine)))


def chunked_head(task: Task) -> Measured:
    """Logits are formed in chunks, again in the backward pass: against all at once, by automatic differentiation."""
    rows, width, vocabulary = task.shape.rows, task.shape.config["hidden_size"], task.shape.config["vocab_size"]
    hidden = jnp.full((rows, 64, width), 0.1)
    kernel = jax.random.normal(jax.random.key(0), (width, vocabulary)) * 0.02
    targets = jnp.asarray(texts(rows, 64))

    def naive(hidden, kernel):
        logps = jax.nn.log_softmax(hidden @ kernel)
        entropy = -(jnp.exp(logps) * logps).sum(-1)
        return (jnp.take_along_axis(logps, targets[..., None], -1)[..., 0] + 0.01 * entropy).sum()

    def chunked(hidden, kernel):
        logps, entropy = chunked_logps(hidden, kernel, targets, 1.0)  # type: ignore[misc]
        return (logps + 0.01 * entropy).sum()

    def side(function) -> Side:
        gradient = jax.jit(jax.grad(function, argnums=(0, 1)))
        return Side(lambda: gradient(hidden, kernel), _temporary(gradient, hidden, kernel))

    return measured(side(naive), side(chunked))


def packing(task: Task) -> Measured:
    """A group's prompt is computed once in the update, and logits of completions alone: against rows as they are."""
    data = ours.data_of(task)
    return measured(*(_update(task, data, batch__packing=x) for x in ("false", "true")))


def packing_sft(task: Task) -> Measured:
    """Short rows of fine-tuning lie one behind the other: against padding to the longest."""
    task = task._replace(case="sft")
    shape = task.shape
    ends = np.minimum(np.random.default_rng(1).geometric(4 / shape.row, shape.rows) + 4, shape.row - 1)
    ends[0] = shape.row - 1
    rows = zip(texts(shape.rows, shape.row), ends, strict=True)
    data = [{"text": words(row[:end])} for row, end in rows]
    return measured(*(_update(task, data, batch__packing=x) for x in ("false", "true")))


def micro_batches(task: Task) -> Measured:
    """The update in micro-batches of a prompt's rows: against all rows at once."""
    data, one = ours.data_of(task), task.shape.prompt + task.shape.group * task.shape.new
    sizes = (one * task.shape.prompts, one)
    return measured(*(_update(task, data, batch__packing="true", batch__microbatch_tokens=size) for size in sizes))


def remat(task: Task) -> Measured:
    """Layers are computed again in the backward pass (`model.remat=block`): against keeping what it reads."""
    data = ours.data_of(task)
    return measured(*(_update(task, data, model__remat=x) for x in ("none", "block")))


def donation(task: Task) -> Measured:
    """The update writes the new state over the old one: against a copy (memory is what new arrays take)."""
    parts = _parts(_config(task), ours.data_of(task))
    batch = parts.pack(parts.source.next(merge_frozen(parts.state, parts.frozen), jax.random.key(0)).batch)
    donating: Any = parts.update
    copying = jax.jit(donating.__wrapped__)
    held = [parts.state]

    def fresh(function) -> int:
        analysis = function.lower(parts.state, batch, parts.frozen).compile().memory_analysis()
        return analysis.output_size_in_bytes - analysis.alias_size_in_bytes

    memory = fresh(copying), fresh(donating)

    def off():
        held[0], metrics = copying(held[0], batch, parts.frozen)
        return metrics

    def on():
        held[0], metrics = donating(held[0], batch, parts.frozen)
        return metrics

    return measured(Side(off, memory[0]), Side(on, memory[1]))


def one_pass(task: Task) -> Measured:
    """The sum of a softmax and that of its entropy as XLA is quickest at them: against two plain sums."""

    def apart(x, y):
        return x.sum(-1), (x * y).sum(-1)

    return _replaced(task, chunked_softmax, "_two_sums", apart)


def products_of_16_bits(task: Task) -> Measured:
    """On CPUs, products in bfloat16 in the forms that matrix units compute (cpu_matmul.py): against plain ones."""
    return _replaced(task, cpu_matmul, "_is_special", lambda x: False, model__dtype="bfloat16")


def _replaced(task: Task, module: Any, name: str, other: Callable, **changes) -> Measured:
    """An update compiled with `other` in the place of a function of ours: against ours."""
    ours_, data = getattr(module, name), ours.data_of(task)
    setattr(module, name, other)
    try:
        off = _update(task, data, **changes)
        jax.block_until_ready(off.work())  # which compiles
    finally:
        setattr(module, name, ours_)
    return measured(off, _update(task, data, **changes))


EFFECTS = {
    x.__name__: x
    for x in (rows_leave, slots, finer_grids, observation_tokens, shared_prompts, unrolled, packing, packing_sft,
              micro_batches, chunked_head, one_pass, products_of_16_bits, remat, donation)
}  # fmt: skip
SMALL = Shape(4, 4, 32, 24, 96, pairs=4, rows=16, config=SHAPES["qwen2"].config)


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EFFECTS)}")
    parser.add_argument("--environments", type=Path, default=CACHE, help="folder of the models")
    parser.add_argument("--results", type=Path, default=STORE / "effects.json")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(EFFECTS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(EFFECTS)}")
    model = "toy" if options.small else "qwen2"
    SHAPES["qwen2"] = SMALL
    folder = folder_of(model, options.environments)
    found = json.loads(options.results.read_text()) if options.results.exists() else {}
    found["machine"] = f"{len(os.sched_getaffinity(0))} CPU cores, jax {jax.__version__}"
    task = Task(model, "grpo", folder, None)
    for name in options.names or EFFECTS:
        with jax.set_mesh(build_mesh(ours.config_of(task))):
            found[name] = EFFECTS[name](task)._asdict()
        seconds = found[name]["seconds"]
        print(f"{name}: {seconds[0]:.3f} s -> {seconds[1]:.3f} s", flush=True)
        options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    options.results.with_suffix(".md").write_text(text_of(found), encoding="utf-8")


def text_of(found: dict[str, Any]) -> str:
    """The table, of what is stored."""
    rows = [["technique", "seconds off", "seconds on", "gain", "MB off", "MB on"]]
    for name, function in EFFECTS.items():
        if name in found:
            (off, on), memory = found[name]["seconds"], found[name]["memory"]
            sizes = [f"{size / 2**20:.0f}" if any(memory) else "" for size in memory]
            what = " ".join((function.__doc__ or "").split())
            rows.append([f"`{name}`: {what}", f"{off:.3f}", f"{on:.3f}", f"{off / on:.2f}x", *sizes])
    return f"Written by `python -m benchmarks.effects` on {found['machine']}.\n\n{table(rows)}"


if __name__ == "__main__":
    main(sys.argv[1:])
