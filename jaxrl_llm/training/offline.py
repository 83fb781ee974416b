"""Batches of data rows, for supervised fine-tuning, preferences and reward models; and the loss on held-out rows.

A data row is an example: a list of one token row (sft, labelled completions, steps), of two (a pair, chosen first) or
of three (a pair and its gold completion). The rows of a batch are those of its examples, in order.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.algorithms.controllers import RunningMean
from jaxrl_llm.algorithms.sequence_logps import sequence_logps, split_pairs
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import pad_rows
from jaxrl_llm.data.pairs import ANSWERS
from jaxrl_llm.data.pipeline import Pipeline, Stream
from jaxrl_llm.data.tokenize import PIXELS, STEP_LABELS
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import on_device, row_shards, rows_to_global
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.vision.row_images import count_tiles, image_tokens, row_images
from jaxrl_llm.rewards.runner import NO_STEP, TrainerState
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.microbatch import BatchSpec
from jaxrl_llm.training.packing.documents import pad_groups
from jaxrl_llm.training.packing.planner import Packer, TypicalRows
from jaxrl_llm.training.passes import scored_logps
from jaxrl_llm.training.reference import Reference
from jaxrl_llm.training.rollouts.experience import Experience
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer
from jaxrl_llm.training.teachers.served_teacher import ServedTeacher
from jaxrl_llm.training.teachers.teacher import Teacher
from jaxrl_llm.training.update import State

log = logging.getLogger(__name__)

# {"ids", "mask"} and, where known, "label", "margin", "step_labels" and "ref" (the reference's log-probs)
Example = list[Row]


@dataclasses.dataclass(frozen=True)
class OfflineSpec:
    """The settings of batches of given rows."""

    mismatched: bool  # kto: each row is followed by its prompt with another row's completion
    packed: bool  # data.packing: examples are groups of documents
    width: int  # T, of the longest row
    widths: tuple[int, ...]  # that batches may have, from the least; the last is `width`
    draws_seeds: bool  # the objective draws random numbers
    running_mean: bool  # a loss subtracts the mean of all rewards so far
    beta: float
    ld_alpha: float | None


@dataclasses.dataclass
class OfflineSource:
    """Batches of given examples. `reference` is None unless each step needs its log-probs."""

    spec: OfflineSpec
    batch: BatchSpec
    net: Net
    pipeline: Pipeline | Stream  # of whole batches, on every process
    mesh: Mesh
    pack: Packer
    stopwatch: Stopwatch
    reference: Reference | None = None
    mean_reward: RunningMean = dataclasses.field(default_factory=RunningMean)  # so far, for running_mean
    teacher: Teacher | ServedTeacher | None = None
    cross_tokenizer: CrossTokenizer | None = None  # which makes the teacher's rows; None: it reads these

    def next(self, state: State, key) -> Experience:
        """The batch of one step; the key gives its seeds, where the objective draws random numbers."""
        spec, mesh, rows = self.spec, self.mesh, self.batch.forward_rows
        with self.stopwatch("data"):
            # Of rows in memory nothing fails; to agree on that would be to wait for the update before.
            with all_or_none() if isinstance(self.pipeline, Stream) else contextlib.nullcontext():
                examples = next(self.pipeline)
            if spec.packed:
                documents = [[(row["ids"], row["mask"]) for row in group] for group in examples]
                tokens, segments, positions, mask = pad_groups(documents, spec.width)
                batch, pictured = Batch(Inputs(tokens, segments, positions), mask), [[_joined(x)] for x in examples]
            else:
                examples = with_mismatches(spec, examples)
                own = max(len(row["ids"]) for example in examples for row in example)
                width = next(width for width in spec.widths if own <= width)
                batch, pictured = pad_examples(examples, width), examples
            if spec.draws_seeds:
                batch = batch.replace(seeds=np.asarray(jax.random.bits(key, (batch.rows,), np.uint32)))
            batch = _to_devices(batch, pictured, self.net, mesh)
        with self.stopwatch("logps"):
            if self.reference is not None:
                self.reference.sync(state)
                batch = reference_logps(self.net, self.reference.params, batch, rows, mesh, self.pack)
            measured: dict[str, jax.Array] = {}
            if self.teacher is not None:
                batch, measured = self.with_teacher(batch, examples, rows, self.pack)
            if spec.running_mean:
                logps = _logps(self.net, state.params, batch, rows, mesh, self.pack)
                self.mean_reward = self.mean_reward.update(_rewards(spec, self.batch.group_size, logps, batch))
                batch = self.with_baseline(batch)
        segments = batch.inputs.segments
        # Mismatches hold the prompts and completions of the rows before them a second time.
        seen = segments[::2] if spec.mismatched else segments
        metrics = {"num_tokens": (seen != 0).sum(), **measured}
        return Experience(batch, metrics | ({} if (epochs := self.pipeline.epochs) is None else {"epoch": epochs}), [])

    def with_teacher(
        self, batch: Batch, examples: list[Example], rows: int, pack: Packer | None = None
    ) -> tuple[Batch, dict[str, jax.Array]]:
        """The batch of examples with the teacher's distributions of the tokens, and the metrics of its own rows.

        The teacher computes `rows` rows at a time, or those of the batch as they are packed.
        """
        assert self.teacher is not None
        if self.cross_tokenizer is None:
            return self.teacher.with_distributions(batch, _inputs(batch, pack), rows), {}
        group = RowGroup.of(self.mesh)
        size = batch.rows // group.count
        own = [row for example in examples for row in example][group.index * size : (group.index + 1) * size]
        shown = self.cross_tokenizer.rows(own, batch.inputs.tokens, batch.mask)
        return shown.aligned(self.teacher.with_distributions(batch, shown.inputs, rows)), shown.metrics

    def as_of_now(self, batch: Batch, rows: int) -> Batch:
        """The held-out batch with what has changed since it was made. Log-probs are computed `rows` rows at a time."""
        if self.reference is not None and self.reference.moves:
            batch = reference_logps(self.net, self.reference.params, batch, rows, self.mesh)
        return self.with_baseline(batch)

    def with_baseline(self, batch: Batch) -> Batch:
        """The batch with the mean of all rewards so far, where a loss subtracts it."""
        if not self.spec.running_mean:
            return batch
        return batch.replace(scalars=Scalars(reward_shift=jnp.float32(self.mean_reward.mean)))

    def learn(self, metrics: dict[str, float]) -> None:
        """Nothing: no setting here follows the metrics of updates."""

    def rest(self) -> None:
        """Nothing: no batch is made in the background."""

    def get_state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs besides the training state."""
        seen = {"mean": float(self.mean_reward.mean), "count": float(self.mean_reward.count)}
        return {"pipeline": self.pipeline.get_state(), "seen": seen}

    def get_arrays(self) -> dict[str, Any]:
        """The arrays that a resumed run needs besides: those of a reference that follows the policy."""
        return {} if self.reference is None else self.reference.arrays()

    def restorable(self) -> dict[str, Any]:
        """The trees of arrays, by name, that `set_state` restores."""
        return {} if self.reference is None else self.reference.tree()

    def set_state(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore what `get_state` and `get_arrays` returned."""
        self.pipeline.set_state(state["pipeline"])
        if self.reference is not None:
            self.reference.restore(arrays)
        self.mean_reward = RunningMean(**state["seen"])


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The objective's loss and metrics on held-out rows, as one batch: `eval/loss`, `eval/rewards/margins`, ...

    Those of a named set are `eval/<name>/loss` and so on.
    """

    measure: Callable[[Params, Batch], dict[str, jax.Array]]
    batch: Batch
    rows: int  # of its micro-batches
    source: OfflineSource  # whose reference may move, and whose running mean a loss may read
    name: str = ""

    def __call__(
        self,
        params: Params,
        key,
        table: list[Row] | None = None,
        state: TrainerState = NO_STEP,
        between: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """The metrics, named `eval/...`; nothing is random, there are no completions for `table`, and no rewards."""
        del key, table, state, between
        batch = self.source.as_of_now(self.batch, self.rows)
        prefix = f"eval/{self.name}/" if self.name else "eval/"
        measured = jax.device_get(self.measure(on_device(params), batch))
        return {f"{prefix}{name}": float(x) for name, x in measured.items()}


def as_examples(rows: list[Row]) -> list[Example]:
    """The examples of token rows; pairs without a margin have 0 where others have one."""
    margins = any("margin" in row for row in rows)
    return [as_example(row, margins) for row in rows]


def as_example(row: Row, margins: bool) -> Example:
    """The rows that are learned from together, of a token row: itself, or the sides of a pair or a triple."""
    if "chosen_ids" not in row:
        return [row]
    more: Row = {"margin": row.get("margin", 0.0)} if margins else {}
    more |= {PIXELS: row[PIXELS]} if PIXELS in row else {}  # those of the prompt that all have
    answers = [name for name in ANSWERS["triples"] if f"{name}_ids" in row]
    return [{"ids": row[f"{name}_ids"], "mask": row[f"{name}_mask"], **more} for name in answers]


def check_balance(examples: list[Example], desirable_weight: float, undesirable_weight: float) -> None:
    """Warns when desirable and undesirable rows miss the balance that KTO's paper found best (eq. 8) by over 5%."""
    desirable = sum(row["label"] for (row,) in examples)
    undesirable = len(examples) - desirable
    heavy, light = desirable_weight * desirable, undesirable_weight * undesirable
    if not light * 0.95 <= heavy <= light * 1.05 * 4 / 3:
        log.warning(
            "%d desirable and %d undesirable rows: the loss's option desirable_weight x desirable should be 1 to 4/3 "
            "times undesirable_weight x undesirable, and is %.3g to %.3g",
            desirable,
            undesirable,
            heavy,
            light,
        )


def longest(examples: list[Example], mismatched: bool) -> int:
    """Tokens of the longest row that a batch of the examples can have."""
    rows = [row for example in examples for row in example]
    if mismatched:
        starts = [_completion_start(row) for row in rows]
        lengths = (len(row["ids"]) + len(row.get("rest_ids", ())) for row in rows)
        return max(starts) + max(length - start for length, start in zip(lengths, starts, strict=True))
    return max(len(row["ids"]) for row in rows)


def longest_parts(examples: list[Example]) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest completion, of examples of one row each."""
    starts = [_completion_start(row) for (row,) in examples]
    return max(starts), max(len(row["ids"]) - start for (row,), start in zip(examples, starts, strict=True))


def with_mismatches(spec: OfflineSpec, examples: list[Example]) -> list[Example]:
    """The examples of a batch as its rows: in kto each is followed by its mismatch, of at most `width` tokens.

    A mismatch is a prompt with the completion of the example before it in the batch (the last one, for the first): with
    all of it, also what was truncated behind its own prompt, as in TRL.
    """
    if not spec.mismatched:
        return examples
    rows = [row for (row,) in examples]
    pairs = []
    for row, other in zip(rows, rows[-1:] + rows[:-1], strict=True):
        prompt, completion = slice(_completion_start(row)), slice(_completion_start(other), None)
        joined = {
            name: (row[name][prompt] + other[name][completion] + other.get(f"rest_{name}", []))[: spec.width]
            for name in ("ids", "mask")
        }
        images = {PIXELS: row[PIXELS]} if PIXELS in row else {}
        pairs.append([row, {**joined, **images, "label": row["label"]}])
    return pairs


def _completion_start(row: Row) -> int:
    return row["mask"].index(1)


def pad_examples(examples: list[Example], width: int) -> Batch:
    """The rows of the examples, padded on the right, with what else they hold."""
    rows = [row for example in examples for row in example]
    tokens, segments, mask = pad_rows([(row["ids"], row["mask"]) for row in rows], width)
    mask[:, 0] = 0.0  # where a row is the rest of another one it is not known what comes before
    batch = Batch(Inputs(tokens, segments), mask)
    for name, field in (("label", "labels"), ("margin", "margins")):
        if name in rows[0]:
            batch = batch.replace(**{field: np.array([row[name] for row in rows], np.float32)})
    for name, field in (("ref", "ref_logps"), (STEP_LABELS, STEP_LABELS)):
        if name in rows[0]:
            padded = [np.pad(row[name], (0, width - len(row[name]))) for row in rows]
            batch = batch.replace(**{field: np.stack(padded).astype(np.float32)})
    return batch


def with_images(batch: Batch, examples: list[Example], net: Net, own: slice = slice(None)) -> Batch:
    """The batch with the images of the examples' rows, and where their prompts are if the network reads that.

    Only the images of its `own` rows are read, with room for those of all.
    """
    rows, vision = [row for example in examples for row in example], net.config.vision
    ids, tiles = [row["ids"] for row in rows], [row.get(PIXELS) for row in rows]
    most = (0, 0) if vision is None else (max(count_tiles(tiles)), max(image_tokens(ids, vision)))
    inputs, prompts = batch.inputs.replace(images=row_images(ids[own], tiles[own], vision, most)), None
    if net.config.sees_prompts:  # up to the first token of a document that is learned
        learned = np.maximum.accumulate(np.where(batch.mask > 0, inputs.segments, 0), axis=1)
        prompts = (inputs.segments > 0) & (learned != inputs.segments)
    return batch.replace(inputs=inputs.replace(in_prompt=prompts))


def _joined(rows: list[Row]) -> Row:
    """The token ids and the tiles of rows that are packed into one."""
    tiles = [tiles for row in rows if (tiles := row.get(PIXELS)) is not None]
    joined = [tile for own in tiles for tile in own] or None
    return {"ids": [token for row in rows for token in row["ids"]], PIXELS: joined}


def typical_rows(spec: OfflineSpec, examples: list[Example], rows: int, group_size: int) -> TypicalRows:
    """So many rows of examples that are drawn at random, always the same."""
    drawn = np.random.default_rng(0).integers(len(examples), size=max(rows // group_size, 1))
    batch = pad_examples(with_mismatches(spec, [examples[number] for number in drawn]), spec.width)
    return TypicalRows(batch.inputs.tokens, batch.inputs.segments, batch.mask)


def held_out_batch(
    spec: OfflineSpec, rows: BatchSpec, examples: list[Example], net: Net, mesh: Mesh, tokens: int
) -> tuple[Batch, int]:
    """All examples as one batch, filled up with rows that do not count, and the rows of its micro-batches.

    These have up to so many `tokens`, padding included, or as few rows as can be: one long row makes all of them long.
    """
    examples = with_mismatches(spec, examples)
    unit = row_shards(mesh) * rows.group_size
    most = max(tokens // (spec.width * unit), 1) * unit
    size = min(rows.forward_rows, most, -(-len(examples) * rows.group_size // unit) * unit)
    blank = [{**row, "mask": [0] * len(row["ids"])} for row in examples[-1]]
    missing = (-len(examples) * rows.group_size % size) // rows.group_size
    examples = examples + [blank] * missing
    return _to_devices(pad_examples(examples, spec.width), examples, net, mesh), size


def with_reference(
    rows: BatchSpec, net: Net, params: Params, examples: list[Example], width: int, mesh: Mesh
) -> list[Example]:
    """The examples with "ref" in every row: the log-probs of its tokens under `params`."""
    size = max(rows.forward_rows, row_shards(mesh))
    result: list[Example] = []
    for start in range(0, len(examples), size):
        chunk = examples[start : start + size]
        filled = chunk + chunk[-1:] * (size - len(chunk))  # one program for all chunks
        batch = _to_devices(pad_examples(filled, width), filled, net, mesh)
        logps = iter(multihost_utils.process_allgather(_logps(net, params, batch, size, mesh), tiled=True))
        result += [[{**row, "ref": np.array(next(logps)[: len(row["ids"])])} for row in example] for example in chunk]
    return result


def reference_logps(net: Net, params: Params, batch: Batch, rows: int, mesh: Mesh, pack: Packer | None = None) -> Batch:
    """The batch with the log-probs of its tokens under `params`, computed `rows` rows at a time."""
    return batch.replace(ref_logps=_logps(net, params, batch, rows, mesh, pack))


def _logps(net: Net, params: Params, batch: Batch, rows: int, mesh: Mesh, pack: Packer | None = None) -> jax.Array:
    return scored_logps(net, on_device(params), _inputs(batch, pack), 1.0, rows, row_shards(mesh))


def _inputs(batch: Batch, pack: Packer | None) -> Inputs:
    """The rows as a network reads them to score the tokens in the mask."""
    held = batch.inputs
    inputs = Inputs(held.tokens, held.segments, images=held.images, in_prompt=held.in_prompt)
    if pack is not None:
        inputs = inputs.replace(layout=pack.passing(inputs.tokens, inputs.segments, batch.mask))
    return inputs


def _rewards(spec: OfflineSpec, together: int, logps, batch: Batch) -> jax.Array:
    """Rewards `[2 pairs]`: beta times the log-ratio of each chosen and rejected row, of `together` rows of a pair."""
    rewards, _ = sequence_logps(logps, batch.mask, spec.ld_alpha, together)
    if batch.ref_logps is not None:
        rewards -= sequence_logps(batch.ref_logps, batch.mask, spec.ld_alpha, together)[0]
    return spec.beta * jnp.concatenate(split_pairs(rewards, together))


def _to_devices(batch: Batch, examples: list[Example], net: Net, mesh: Mesh) -> Batch:
    """The batch of the examples with their images, sharded over the mesh; every process has all rows and gives its own,
    whose images alone it reads.

    Raises ConfigError where processes of a row group have made other tokens of the same data.
    """
    group = RowGroup.of(mesh)
    size = batch.rows // group.count
    with contextlib.nullcontext() if net.config.vision is None else all_or_none():
        batch = with_images(batch, examples, net, slice(group.index * size, (group.index + 1) * size))
    images = batch.inputs.images
    own = batch.replace(inputs=batch.inputs.replace(images=None))
    own = jax.tree.map(lambda x: np.split(x, group.count)[group.index] if group.count > 1 else x, own)
    group.check_same(own.inputs.tokens, own.mask)
    return rows_to_global(own.replace(inputs=own.inputs.replace(images=images)), mesh)
