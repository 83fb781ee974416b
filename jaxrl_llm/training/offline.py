"""Batches of given rows, for supervised fine-tuning, preferences and reward models; and the loss on held-out rows.

A data row is an example: a list of one token row (sft, labelled completions) or of two (a pair, chosen first). The rows
of a batch are those of its examples, in order.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.algorithms.sequence_logps import RunningMean
from jaxrl_llm.config import batch_rows, rows_together
from jaxrl_llm.data import loading
from jaxrl_llm.data.collate import pad_rows
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.streaming import Stream
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.sharding import on_device, row_shards, rows_to_global
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.objective_specs import preference_spec
from jaxrl_llm.training.objectives.preference import row_sums
from jaxrl_llm.training.online import Experience, Row, scored_logps
from jaxrl_llm.training.packing.documents import pad_groups
from jaxrl_llm.training.packing.planner import Packer, Sample
from jaxrl_llm.training.update import State

log = logging.getLogger(__name__)

Example = list[Row]  # {"ids", "mask"} and, where known, "label", "margin" and "ref" (the reference's log-probs)


@dataclasses.dataclass
class Offline:
    """Batches of given examples. `ref_params` is None unless each step needs the reference's log-probs."""

    config: Any
    net: Net
    pipeline: Pipeline | Stream  # of whole batches, on every process
    mesh: Mesh
    width: int
    ref_params: Params | None
    watch: Stopwatch
    seen: RunningMean = dataclasses.field(default_factory=RunningMean)  # rewards so far, for bco_running_mean
    pack: Packer | None = None

    def next(self, state: State, key) -> Experience:
        """The batch of one step; the key gives its seeds, where the objective draws random numbers."""
        config, mesh = self.config, self.mesh
        with self.watch("data"):
            with all_or_none():
                examples = next(self.pipeline)
            if config.data.packing:
                tokens, segments, positions, mask = pad_groups(examples, self.width)
                batch = Batch(Inputs(tokens, segments, positions), mask)
            else:
                batch = pad_examples(arrange(config, examples, self.width), self.width)
            if config.algorithm.name == "sft" and config.algorithm.neftune_alpha:
                batch = batch.replace(seeds=np.asarray(jax.random.bits(key, (batch.rows,), np.uint32)))
            batch = _to_devices(batch, mesh)
        with self.watch("logps"):
            rows = part_rows(config)
            if self.ref_params is not None:
                batch = batch.replace(
                    ref_logps=_logps(self.net, on_device(self.ref_params), batch, rows, mesh, self.pack)
                )
            if _running_mean(config):
                logps = _logps(self.net, state.params, batch, rows, mesh, self.pack)
                self.seen = self.seen.update(_rewards(config, logps, batch))
                batch = self.with_baseline(batch)
        segments = batch.inputs.segments
        counted = segments[::2] if _has_mismatches(config) else segments  # mismatches repeat them
        return Experience(batch, {"num_tokens": (counted != 0).sum()}, [])

    def with_baseline(self, batch: Batch) -> Batch:
        """The batch with the mean of all rewards so far, where `bco_running_mean` asks for it."""
        if not _running_mean(self.config):
            return batch
        return batch.replace(scalars=Scalars(reward_shift=jnp.float32(self.seen.mean)))

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs besides the training state."""
        seen = {"mean": float(self.seen.mean), "count": float(self.seen.count)}
        return {"pipeline": self.pipeline.get_state(), "seen": seen}

    def get_arrays(self) -> dict[str, Any]:
        """No arrays are needed besides."""
        return {}

    def set_state(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Goes on where `get_state` was called."""
        del arrays
        self.pipeline.set_state(state["pipeline"])
        self.seen = RunningMean(**state["seen"])

    def learn(self, metrics: dict[str, float]) -> None:
        """Nothing here follows the metrics of updates."""


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The objective's loss and metrics on held-out rows, as one batch: `eval/loss`, `eval/rewards/margins`, ...

    Those of a named set are `eval/<name>/loss` and so on.
    """

    measure: Callable[[Params, Batch], dict[str, jax.Array]]
    batch: Batch
    source: Offline | None  # whose running mean a loss may read
    name: str = ""

    def __call__(self, params: Params, key) -> dict[str, float]:
        """The metrics, named `eval/...`; nothing is random."""
        del key
        batch = self.batch if self.source is None else self.source.with_baseline(self.batch)
        start = f"eval/{self.name}/" if self.name else "eval/"
        return {f"{start}{name}": float(x) for name, x in jax.device_get(self.measure(params, batch)).items()}


def tokenized(config, dataset, tokenizer) -> list[Example]:
    """The examples of a data set, as the algorithm reads it; raises ConfigError for rows it cannot read."""
    parts = loading.open_parts(config, tokenizer, dataset)
    return as_examples(loading.tokenized(config, parts, loading.kind_of(config), tokenizer).rows)


def as_examples(rows: list[Row]) -> list[Example]:
    """The examples of token rows; pairs without a margin have 0 where others have one."""
    margins = any("margin" in row for row in rows)
    return [as_example(row, margins) for row in rows]


def as_example(row: Row, margins: bool) -> Example:
    """The example of one token row."""
    if "chosen_ids" not in row:
        return [row]
    more = {"margin": row.get("margin", 0.0)} if margins else {}
    return [{"ids": row[f"{name}_ids"], "mask": row[f"{name}_mask"], **more} for name in ("chosen", "rejected")]


def is_labelled(config) -> bool:
    """True when the rows are labelled completions, not pairs."""
    return loading.kind_of(config) == "labels"


def _has_mismatches(config) -> bool:
    return is_labelled(config) and rows_together(config) == 2


def check_balance(config, examples: list[Example]) -> None:
    """Warns when desirable and undesirable rows miss the balance that KTO's paper found best (eq. 8) by over 5%."""
    desirable = sum(row["label"] for (row,) in examples)
    options = preference_spec(config).losses[0].options
    heavy = options.get("desirable_weight", 1.0) * desirable
    light = options.get("undesirable_weight", 1.0) * (len(examples) - desirable)
    if not light * 0.95 <= heavy <= light * 1.05 * 4 / 3:
        log.warning(
            "%d desirable and %d undesirable rows: the loss's option desirable_weight x desirable should be 1 to 4/3 "
            "times undesirable_weight x undesirable, and is %.3g to %.3g",
            desirable, len(examples) - desirable, heavy, light,
        )  # fmt: skip


def longest(config, examples: list[Example]) -> int:
    """Tokens of the longest row that a batch of the examples can have."""
    rows = [row for example in examples for row in example]
    if _has_mismatches(config):
        starts = [_start(row) for row in rows]
        return max(starts) + max(len(row["ids"]) - start for row, start in zip(rows, starts, strict=True))
    return max(len(row["ids"]) for row in rows)


def arrange(config, examples: list[Example], limit: int) -> list[Example]:
    """The examples of a whole batch as its rows: in kto each is followed by its mismatch, of at most `limit` tokens.

    A mismatch is a prompt with the completion of the example before it in the batch (the last one, for the first).
    """
    if not _has_mismatches(config):
        return examples
    rows = [row for (row,) in examples]
    return [[row, _mismatch(row, other, limit)] for row, other in zip(rows, rows[-1:] + rows[:-1], strict=True)]


def _start(row: Row) -> int:
    return row["mask"].index(1)


def _mismatch(row: Row, other: Row, limit: int) -> Row:
    parts = {name: (row[name][: _start(row)] + other[name][_start(other) :])[:limit] for name in ("ids", "mask")}
    return {**parts, "label": row["label"]}


def pad_examples(examples: list[Example], width: int) -> Batch:
    """The rows of the examples, padded on the right, with what else they hold."""
    rows = [row for example in examples for row in example]
    tokens, segments, mask = pad_rows([(row["ids"], row["mask"]) for row in rows], width)
    batch = Batch(Inputs(tokens, segments), mask)
    for name, field in (("label", "labels"), ("margin", "margins")):
        if name in rows[0]:
            batch = batch.replace(**{field: np.array([row[name] for row in rows], np.float32)})
    if "ref" in rows[0]:
        padded = [np.pad(row["ref"], (0, width - len(row["ref"]))) for row in rows]
        batch = batch.replace(ref_logps=np.stack(padded).astype(np.float32))
    return batch


def sample_rows(config, examples: list[Example], rows: int, width: int) -> Sample:
    """So many rows of examples that are drawn at random, always the same."""
    drawn = np.random.default_rng(0).integers(len(examples), size=max(rows // rows_together(config), 1))
    batch = pad_examples(arrange(config, [examples[number] for number in drawn], width), width)
    return Sample(batch.inputs.tokens, batch.inputs.segments, batch.mask)


def part_rows(config) -> int:
    """Rows of one forward pass."""
    return config.batch.microbatch_rows or batch_rows(config) // config.batch.minibatches


def held_out_batch(config, examples: list[Example], width: int, mesh: Mesh) -> tuple[Batch, int]:
    """All examples as one batch, and the rows of its parts; the last part is filled up with rows that do not count."""
    examples = arrange(config, examples, width)
    together = rows_together(config)
    unit = row_shards(mesh) * together
    size = min(part_rows(config), -(-len(examples) * together // unit) * unit)
    blank = [{**row, "mask": [0] * len(row["ids"])} for row in examples[-1]]
    missing = (-len(examples) * together % size) // together
    return _to_devices(pad_examples(examples + [blank] * missing, width), mesh), size


def with_reference(config, net: Net, params: Params, examples: list[Example], width: int, mesh: Mesh) -> list[Example]:
    """The examples with "ref" in every row: the log-probs of its tokens under `params`."""
    size = max(part_rows(config), row_shards(mesh))
    found: list[Example] = []
    for part in _chunks(examples, size):
        filled = part + part[-1:] * (size - len(part))
        batch = _to_devices(pad_examples(filled, width), mesh)
        logps = iter(multihost_utils.process_allgather(_logps(net, params, batch, size, mesh), tiled=True))
        found += [[{**row, "ref": np.array(next(logps)[: len(row["ids"])])} for row in example] for example in part]
    return found


def reference_logps(net: Net, params: Params, batch: Batch, rows: int, mesh: Mesh) -> Batch:
    """The batch with the log-probs of its tokens under `params`, computed `rows` rows at a time."""
    return batch.replace(ref_logps=_logps(net, params, batch, rows, mesh))


def _chunks(examples: list[Example], size: int) -> Iterator[list[Example]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def _logps(net: Net, params: Params, batch: Batch, rows: int, mesh: Mesh, pack: Packer | None = None) -> jax.Array:
    inputs = Inputs(batch.inputs.tokens, batch.inputs.segments)
    if pack is not None:
        inputs = inputs.replace(layout=pack.passing(inputs.tokens, inputs.segments, batch.mask))
    return scored_logps(net, params, inputs, 1.0, rows, row_shards(mesh))


def _rewards(config, logps, batch: Batch) -> jax.Array:
    """Rewards `[N]`: beta times each row's log-ratio."""
    spec = preference_spec(config)
    rewards = row_sums(spec, logps, batch.mask)[0]
    if batch.ref_logps is not None:
        rewards -= row_sums(spec, batch.ref_logps, batch.mask)[0]
    return config.algorithm.beta * rewards


def _to_devices(batch: Batch, mesh: Mesh) -> Batch:
    """The batch cut over the mesh; every process has all of it and gives its own part."""
    processes, process = jax.process_count(), jax.process_index()
    own = jax.tree.map(lambda x: np.split(x, processes)[process] if processes > 1 else x, batch)
    return rows_to_global(own, mesh)


def _running_mean(config) -> bool:
    """True when a loss subtracts the mean of all rewards so far."""
    if config.algorithm.name != "preference":
        return False
    return any(loss.running_mean for loss in preference_spec(config).losses)
