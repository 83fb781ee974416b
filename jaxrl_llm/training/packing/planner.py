"""`Packer`: gives batches the layout in which the net computes them; and `make_packer`, which decides its sizes.

See algorithms/layout.py for what a layout is. Packed rows compute a prompt once for its completions, no padding, and
logits of scored tokens alone; but attention is of all tokens of a packed row with each other, so longer is not always
better. Sizes are chosen once, for completions of which some are short or for the rows of the data; every batch is
planned on the host.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, PackedLayout
from jaxrl_llm.config import ConfigError, rows_together
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.distributed.sharding import local_rows, row_shards, rows_to_global
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.training.objectives.objective import Objective, Positions
from jaxrl_llm.training.packing.layout import Sizes, longest_bundle, needs, plan

# Packed tokens of a micro-batch in a shard, where nothing says how many: enough for matrix products at full speed.
FEWEST = {"cpu": 1024}
FEWEST_ELSEWHERE = 8192
PARTS = 8  # micro-batches that a batch is cut into where they stay larger than that; the last one is not full
ATTENTION = 4.0  # what a product in attention costs, with its softmax, compared with one of the same size elsewhere
SAVES = 0.85  # "auto" packs where it takes less than this share of the arithmetic: gathering tokens takes time too


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, segments, mask [R,T]


class Sample(NamedTuple):
    """Rows `[R,T]` of one shard, by which sizes are chosen."""

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray
    prompt_width: int = 0


@dataclasses.dataclass(frozen=True)
class Packer:
    """Lays out batches; `sizes` None leaves them as they are."""

    sizes: Sizes | None
    reads: Positions
    mesh: Mesh
    rows: int = 0  # of the batches, in a shard

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its layouts, of all the tokens that the objective reads."""
        if self.sizes is None:
            return batch
        tokens, segments, mask = local_rows((batch.inputs.tokens, batch.inputs.segments, batch.mask))
        mask = segments != 0 if self.reads.unmasked else mask
        if not self.reads.alternate:
            return batch.with_layout(self._planned(tokens, segments, mask, self.sizes))
        first = np.arange(len(mask))[:, None] % 2 == 0
        own, other = (self._planned(tokens, segments, mask * rows, self.sizes) for rows in (first, ~first))
        return batch.with_layout(own, other)

    def passing(self, tokens, segments, mask) -> PackedLayout | None:
        """The layout of rows `[N,T]` for a pass that reads the log-probs or values of the tokens in the mask."""
        if self.sizes is None:
            return None
        sizes = self.passing_sizes(len(tokens) // row_shards(self.mesh))
        tokens, segments, mask = local_rows((tokens, segments, mask))
        return self._planned(tokens, segments, mask, sizes)

    def passing_sizes(self, rows: int) -> Sizes:
        """The sizes of a pass over so many rows in a shard."""
        assert self.sizes is not None
        return self.sizes._replace(together=False, last=False, parts=self.sizes.parts * max(rows // self.rows, 1))

    def _planned(self, tokens, segments, mask, sizes: Sizes) -> PackedLayout:
        shards = row_shards(self.mesh) // jax.process_count()
        layout = plan(tokens, segments, mask, sizes, shards)
        if jax.process_count() > 1:  # all of them make the same number of steps
            used = max(gather(int(layout.num_microbatches[0])))
            if used > layout.row_idx.shape[1]:
                layout = plan(tokens, segments, mask, sizes._replace(parts=used), shards)
            layout = dataclasses.replace(layout, num_microbatches=np.full(shards, used, np.int32))
        return rows_to_global(layout, self.mesh)


def make_packer(config, net: ModelConfig, mesh: Mesh, objective: Objective, sample: Sample | None,
                backend: str | None = None) -> Packer:  # fmt: skip
    """The packer of a run of `config`; without a sample, on several devices, or where nothing is saved, "auto" packs
    nothing. `backend` is what the run computes on, this process's own unless given.

    Raises ConfigError where `batch.packing` is true and cannot be, and for sizes that hold no row.
    """
    batch, reads = config.batch, objective.positions
    nothing = Packer(None, reads, mesh)
    if batch.packing == "false":
        return nothing
    reason = _why_not(config, net, mesh, sample)
    if reason is not None:
        if batch.packing == "true" or batch.microbatch_tokens:
            wanted = "packing is true" if batch.packing == "true" else f"microbatch_tokens is {batch.microbatch_tokens}"
            raise ConfigError(f"batch.{wanted}, but {reason}")
        return nothing
    assert sample is not None
    fewest = FEWEST.get(backend or jax.default_backend(), FEWEST_ELSEWHERE)
    sizes, cost = packed_sizes(config, net, mesh, reads, sample, fewest)
    forced = batch.packing == "true" or batch.microbatch_tokens
    balances = net.experts and net.router_aux_loss_coef  # their evenness is asked of each micro-batch by itself
    gains = mesh.size == 1 and cost <= SAVES * _unpacked_cost(net, reads, sample)
    if not forced and (balances or not gains):
        return nothing
    return Packer(sizes, reads, mesh, len(sample.tokens))


def _why_not(config, net: ModelConfig, mesh: Mesh, sample: Sample | None) -> str | None:
    """What keeps rows from being packed, in words; None for nothing."""
    if config.data.packing:
        return "data.packing packs the rows already: set one of them to false"
    if config.algorithm.neftune_alpha:
        return "algorithm.neftune_alpha draws the noise of each row apart: set it to 0, or batch.packing to false"
    if net.lora is not None and net.lora.dropout:
        return "lora.dropout drops the tokens of each row apart: set it to 0, or batch.packing to false"
    if mesh.shape["context"] > 1:
        return "mesh.context cuts rows over devices: set it to 1, or batch.packing to false"
    if sample is None:
        return "with data.streaming the rows are not known before: set batch.packing to false"
    if net.rope.kind == "dynamic" and sample.tokens.shape[1] > net.rope.original_max_positions:
        return "rope_type dynamic rotates a prompt by the length of its row: set batch.packing to false"
    return None


def packed_sizes(config, net: ModelConfig, mesh: Mesh, reads: Positions, sample: Sample,
                 fewest: int) -> tuple[Sizes, float]:  # fmt: skip
    """The sizes with which the rows of the sample take the least time, and that time in floating-point operations.

    `fewest` are the packed tokens of a micro-batch where the configuration does not say how many.
    """
    rows, width = sample.tokens.shape
    group = math.gcd(rows_together(config), rows)
    mask = sample.segments != 0 if reads.unmasked else sample.mask
    if reads.alternate:
        mask = mask * (np.arange(rows)[:, None] % 2 == 0)
    arrays = (sample.tokens, sample.segments, mask)
    budget = _token_budget(config, mesh, width)
    together = config.algorithm.name in OFFLINE and group > 1
    start = Sizes(0, 1, rows, 1, group, together, last=reads.last, whole=net.experts > 0)
    found: list[tuple[float, Sizes]] = []
    for length in _lengths(config, arrays, group, budget):
        sizes, packed_rows, logits = _fitted(arrays, start._replace(length=length), budget, fewest)
        found.append((packed_rows * length * _per_token(net, length) + logits * _per_logit(net, reads), sizes))
    cost, sizes = min(found)
    return sizes, cost


def _fitted(arrays: Arrays, sizes: Sizes, budget: int | None, fewest: int) -> tuple[Sizes, int, int]:
    """The sizes for packed rows of that length, how many of those the arrays need, and their scored tokens."""
    rows, width = arrays[0].shape
    packed, most, read = needs(*arrays, sizes._replace(together=False))
    tokens = budget or max(fewest, packed * sizes.length // PARTS)
    count = max(1, round(packed / max(tokens // sizes.length, 1)))
    count = min(count, count + 1, key=lambda parts: parts * -(-packed // parts))  # the last one may be half empty
    held = max(-(-packed // count), 2 if sizes.together else 1)
    room = max(4 * held * sizes.length // width, held * most, 2 * sizes.group if sizes.together else 1)
    sizes = sizes._replace(packed_rows=held, rows=min(_multiple(room, sizes.group), rows))
    used = needs(*arrays, sizes).parts * held
    return sizes._replace(parts=_most_parts(sizes, rows, width)), used, read


def _lengths(config, arrays: Arrays, group: int, budget: int | None) -> list[int]:
    """The lengths of packed rows to choose from; raises ConfigError where the configuration allows none."""
    width, batch = arrays[0].shape[1], config.batch
    if batch.microbatch_tokens and (budget or 0) < width:
        raise ConfigError(
            f"batch.microbatch_tokens is {batch.microbatch_tokens}, but the micro-batch of each row shard of the mesh "
            f"holds at least one row of {width} tokens: set it to {width} x mesh.data x mesh.fsdp x mesh.expert or "
            "more, or to 0"
        )
    if batch.pack_length and batch.pack_length < width:
        raise ConfigError(
            f"batch.pack_length is {batch.pack_length}, but rows have up to {width} tokens: set it to 0 or to {width} "
            "or more"
        )
    if batch.pack_length:
        return [batch.pack_length]
    rounded = sorted({_multiple(max(size, width), 8) for size in {width, *_group_sizes(arrays, group)}})
    return [length for length in rounded if budget is None or length <= max(budget, rounded[0])]


def _token_budget(config, mesh: Mesh, width: int) -> int | None:
    """Packed tokens of a micro-batch in a shard, where the configuration says how many."""
    batch = config.batch
    tokens = batch.microbatch_tokens or batch.microbatch_rows * width
    return tokens // row_shards(mesh) or None


def _group_sizes(arrays: Arrays, group: int) -> set[int]:
    """How long packed rows are that hold 1, 2, 4, ... rows of the longest group behind their common prefix."""
    width = arrays[0].shape[1]
    counts = {min(2**power, group) for power in range(1, 1 + math.ceil(math.log2(max(group, 2))))}
    return {longest_bundle(*arrays, Sizes(width, 1, 1, 1, group), count) for count in counts} - {0}


def _most_parts(sizes: Sizes, rows: int, width: int) -> int:
    """Micro-batches that rows of full length which share nothing need, which is more than others do."""
    fit = max(sizes.length // width, 1) * sizes.packed_rows
    return -(-rows // min(fit, sizes.rows))


def _multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _unpacked_cost(net: ModelConfig, reads: Positions, sample: Sample) -> float:
    rows, width = sample.tokens.shape
    logits = rows * (width - max(sample.prompt_width, 1))
    computed = rows // 2 if reads.alternate else rows
    return computed * width * _per_token(net, width) + logits * computed / rows * _per_logit(net, reads)


def _per_token(net: ModelConfig, length: int) -> float:
    """Floating-point operations of the layers for a token of a row of `length`, forward and backward."""
    attention = net.width * net.head_dim * 2 * (net.heads + net.kv_heads)
    dense = 3 * net.width * net.ffn
    experts = 3 * net.width * net.expert_ffn * net.experts_per_token
    sparse = sum(kind.experts for kind in net.layer_configs)
    products = net.layers * attention + sparse * experts + (net.layers - sparse) * dense
    return 6.0 * products + ATTENTION * 12.0 * net.layers * length * net.heads * net.head_dim


def _per_logit(net: ModelConfig, reads: Positions) -> float:
    return 0.0 if reads.last else 8.0 * net.width * net.vocab_size


def sampled_rows(rows: int, group: int, prompt_width: int, completion: int, full: bool = False) -> Sample:
    """Rows with full prompts; completions are full in every other group (in all with `full`), and have 1/8, 2/8, ... of
    that length in the rest."""
    width, number = prompt_width + completion, np.arange(rows)
    eighths = np.where(full | (number // group % 2 == 0), 8, number % 8 + 1)
    column = np.arange(width)
    tokens = np.where(column < prompt_width, number[:, None] // group, number[:, None]).astype(np.int32)
    segments = (column < (prompt_width + -(-completion * eighths // 8))[:, None]).astype(np.int32)
    return Sample(tokens, segments, (segments * (column >= prompt_width)).astype(np.float32), prompt_width)
