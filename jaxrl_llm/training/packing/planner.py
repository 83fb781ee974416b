"""`Packer`, which lays batches out for the network, and `make_packer`, which chooses its sizes.

See layout.py for what a layout is. Packed rows compute a prompt once for its completions, no padding, and logits of
the tokens that are read alone; but attention is of all tokens of a packed row with each other, so longer is not always
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
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.processes import most
from jaxrl_llm.distributed.sharding import local_rows, row_groups, row_shards, rows_to_global
from jaxrl_llm.models.kernels.fused_attention import BY_SEGMENTS, MASKED_LENGTH, implementation
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.packing.layout import Sizes, longest_item, needs, plan

# Packed tokens of a micro-batch in a shard, where nothing says how many: enough for matmuls at full speed.
FEWEST_TOKENS = {"cpu": 512}
FEWEST_TOKENS_ACCELERATOR = 8192
MICROBATCHES = 8  # that a batch is split into where they stay larger than that; the last one is not full
MICROBATCHES_ACCELERATOR = 3  # there, where memory allows: each gathers the parameters and adds to all gradients
ROOM_SHARE = 0.5  # of the memory that is left which a micro-batch may take: what it takes is estimated
ATTENTION_COST = 4.0  # of an operation of attention, with its softmax, in operations of other matmuls
LAYER_RESULTS = 2.0  # bytes of all results of a layer, by those of its matmuls and of its norms
LARGEST_SHARE = 0.85  # of the arithmetic that "auto" packs for: gathering tokens takes time too

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, segments, mask of the rows of a shard


@dataclasses.dataclass(frozen=True)
class PackingSpec:
    """The settings of packed rows."""

    packing: str  # auto, true or false
    pack_length: int
    microbatch_tokens: int
    microbatch_rows: int
    group_size: int  # adjacent rows that may start with the same tokens
    whole_groups: bool  # they stay in one micro-batch: the loss compares them
    documents: bool  # data.packing has packed the rows already
    noise: bool  # algorithm.neftune_alpha
    logps_microbatch_tokens: int = 0
    own_images: bool = False  # rows of a group may have the same image tokens, and other images


class TypicalRows(NamedTuple):
    """Rows of one shard that stand for all of a run, by which the sizes of packed rows are chosen."""

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray
    prompt_width: int = 0


@dataclasses.dataclass(frozen=True)
class Packer:
    """Lays out batches for an objective that reads `positions`; `sizes` None leaves them as they are."""

    sizes: Sizes | None
    positions: Positions
    mesh: Mesh
    rows: int = 0  # of the batches, in a shard
    used: int = 1  # micro-batches that such a batch takes as a rule
    at_once: int = 1  # of which a pass without gradients computes so many as one

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its layouts, of all the tokens that the objective reads."""
        if self.sizes is None:
            return batch
        mask = batch.mask if batch.observed is None else batch.mask + batch.observed
        tokens, segments, mask = local_rows((batch.inputs.tokens, batch.inputs.segments, mask))
        mask = segments != 0 if self.positions.unmasked else mask
        if not self.positions.alternate:
            return batch.with_layout(self._plan(tokens, segments, mask, self.sizes))
        first = np.arange(len(mask))[:, None] % 2 == 0
        own, other = (self._plan(tokens, segments, mask * rows, self.sizes) for rows in (first, ~first))
        return batch.with_layout(own, other)

    def of_rows(self, rows: int) -> "Packer":
        """The packer of batches of so many rows in all shards; those of more have more micro-batches."""
        own = rows // row_shards(self.mesh)
        if self.sizes is None or own <= self.rows:
            return self
        return dataclasses.replace(
            self, sizes=self.sizes._replace(microbatches=-(-self.sizes.microbatches * own // self.rows)), rows=own
        )

    @property
    def passing_tokens(self) -> int | None:
        """Tokens, over all shards, that a pass without gradients computes at once; None where rows are not packed."""
        if self.sizes is None:
            return None
        return self.at_once * self.sizes.packed_rows * self.sizes.length * row_shards(self.mesh)

    def passing(self, tokens, segments, mask) -> PackedLayout | None:
        """The layout of rows `[N,T]` for a pass that reads the log-probs or values of the tokens in the mask."""
        if self.sizes is None:
            return None
        sizes = self.passing_sizes(len(tokens) // row_shards(self.mesh))
        tokens, segments, mask = local_rows((tokens, segments, mask))
        return self._plan(tokens, segments, mask, sizes)

    def passing_sizes(self, rows: int) -> Sizes:
        """The sizes of a pass over so many rows in a shard."""
        assert self.sizes is not None
        sizes, batches = self.sizes, max(rows // self.rows, 1)
        used = self.used * batches
        at_once = -(-used // -(-used // self.at_once))  # as even as can be: none is half empty
        return sizes._replace(
            whole_groups=False,
            last=False,
            after=False,
            packed_rows=sizes.packed_rows * at_once,
            rows=min(sizes.rows * at_once, rows),
            microbatches=-(-sizes.microbatches * batches // at_once),
        )

    def _plan(self, tokens, segments, mask, sizes: Sizes) -> PackedLayout:
        shards = row_shards(self.mesh) // row_groups(self.mesh)
        layout = plan(tokens, segments, mask, sizes, shards)
        if jax.process_count() > 1:  # all of them make the same number of steps
            used = most(int(layout.num_microbatches[0]))
            if used > layout.row_idx.shape[1]:
                layout = plan(tokens, segments, mask, sizes._replace(microbatches=used), shards)
            layout = dataclasses.replace(layout, num_microbatches=np.full(shards, used, np.int32))
        return rows_to_global(layout, self.mesh)


def make_packer(
    spec: PackingSpec,
    net: ModelConfig,
    mesh: Mesh,
    positions: Positions,
    sample: TypicalRows | None,
    backend: str | None = None,
    room: float | None = None,
) -> Packer:
    """The packer of a run; without a sample, or where nothing is saved, "auto" packs nothing.

    `backend` is what the run computes on, this process's own unless given, and `room` the bytes that the run leaves
    free on a device; None is unknown. Raises ConfigError where `packing` is true and cannot be, and for sizes that hold
    no row.
    """
    nothing = Packer(None, positions, mesh)
    if spec.packing == "false":
        return nothing
    forced = spec.packing == "true" or spec.microbatch_tokens
    reason = _obstacle(spec, net, sample)
    if reason is not None:
        if forced:
            wanted = "packing is true" if spec.packing == "true" else f"microbatch_tokens is {spec.microbatch_tokens}"
            raise ConfigError(f"batch.{wanted}, but {reason}")
        return nothing
    assert sample is not None
    backend = backend or jax.default_backend()
    together = mesh.shape["context"]  # devices that have a part of each row
    fewest = together * FEWEST_TOKENS.get(backend, FEWEST_TOKENS_ACCELERATOR)
    fit, fit_in_pass = (room and max(tokens_in(together * room, net, gradients), fewest) for gradients in (True, False))
    sizes, cost = packed_sizes(spec, net, mesh, positions, sample, backend, fewest, fit)
    if not forced:
        balances = net.experts and net.router_aux_loss_coef  # their evenness is asked of each micro-batch by itself
        saves = cost <= LARGEST_SHARE * _unpacked_cost(net, positions, sample)
        if balances or not saves:
            return nothing
    used = needs(*sample[:3], sizes._replace(whole_groups=False, last=False, after=False)).microbatches
    wanted, tokens = spec.logps_microbatch_tokens // row_shards(mesh), sizes.packed_rows * sizes.length
    at_once = wanted // tokens if wanted else min((fit_in_pass or 0) // tokens, used // MICROBATCHES_ACCELERATOR)
    return Packer(sizes, positions, mesh, len(sample.tokens), used, max(int(at_once), 1))


def tokens_in(room: float, net: ModelConfig, gradients: bool) -> int:
    """Tokens of a micro-batch of a shard that so many bytes of a device have room for, a power of two.

    An estimate: with gradients each layer keeps what `remat` says, in the type of the network, and one layer's results
    and their gradients exist at a time. A power of two is the same on devices whose memory differs a little.
    """
    size = np.dtype(net.dtype).itemsize
    experts = net.expert_ffn * net.experts_per_token + net.shared_expert_ffn
    ffn = net.ffn + experts if net.experts_beside else max(net.ffn, net.shared_ffn, experts)
    kinds = [net.of(kind) for kind in net.layer_configs]
    heads = max(kind.head_dim * (kind.heads + kind.kv_heads) for kind in kinds)
    products = 2 * heads + net.width + 2 * ffn  # the results of matmuls
    routed = net.experts_per_token * (net.expert_width or net.width)  # a token's copies, and what experts make of them
    products += routed
    layer = LAYER_RESULTS * size * (products + 2 * net.width + routed)
    between = size * net.width * max(net.altup_streams, net.hyper_streams, 1)  # hidden states that layers pass on
    kept = {"none": layer, "dots": size * products + between, "block": between, "offload": 0}[net.remat]
    token = 2 * layer + net.layers * kept if gradients else layer
    return 2 ** int(math.log2(max(ROOM_SHARE * room / token, 1)))


def _obstacle(spec: PackingSpec, net: ModelConfig, sample: TypicalRows | None) -> str | None:
    """The reason why rows cannot be packed, in words; None where they can."""
    if spec.documents:
        return "data.packing packs the rows already: set one of them to false"
    if spec.noise:
        return "algorithm.neftune_alpha draws the noise of each row apart: set it to 0, or batch.packing to false"
    if net.lora is not None and net.lora.dropout:
        return "lora.dropout drops the tokens of each row apart: set it to 0, or batch.packing to false"
    if sample is None:
        return "with data.streaming the rows are not known before: set batch.packing to false"
    if net.sees_prompts:
        return (
            "the tokens of a prompt see each other in this model, for which packed rows have no mask: set "
            "batch.packing to false"
        )
    if not net.shares_prefixes:
        return "the layers of this model cannot read a prefix that rows share: set batch.packing to false"
    if net.rope.changes_beyond is not None and sample.tokens.shape[1] > net.rope.changes_beyond:
        return f"rope_type {net.rope.kind} rotates a prompt by the length of its row: set batch.packing to false"
    return None


def packed_sizes(
    spec: PackingSpec,
    net: ModelConfig,
    mesh: Mesh,
    positions: Positions,
    sample: TypicalRows,
    backend: str,
    fewest: int,
    fit: float | None = None,
) -> tuple[Sizes, float]:
    """The sizes with which the rows of the sample take the least time, and that time in floating-point operations.

    Where the settings do not say how many packed tokens a micro-batch has, it has `fewest` or a share of the batch, the
    larger of the two. The share is one of MICROBATCHES; where `fit` tokens are known to have room, it is one of
    MICROBATCHES_ACCELERATOR, but no more than those.
    """
    rows, width = sample.tokens.shape
    group_size = math.gcd(spec.group_size, rows)
    mask = sample.segments != 0 if positions.unmasked else sample.mask
    if positions.alternate:
        mask = mask * (np.arange(rows)[:, None] % 2 == 0)
    arrays = (sample.tokens, sample.segments, mask)
    budget = (spec.microbatch_tokens or spec.microbatch_rows * width) // row_shards(mesh) or None
    whole_groups = spec.whole_groups and group_size > 1
    apart = None if net.vision is None or not spec.own_images else net.vision.image_token
    reads = {"last": positions.last, "after": positions.after}
    start = Sizes(0, 1, rows, 1, group_size, whole_groups, **reads, unread=net.experts > 0, apart=apart)
    choices: list[tuple[float, Sizes]] = []
    for length in _lengths(spec, arrays, group_size, budget, math.lcm(8, mesh.shape["context"])):
        # To see a prefix and its own tokens takes a mask `[W,W]`, where segments alone may take none.
        kernels = {implementation(net.of(kind), length, False, backend) for kind in net.layer_configs}
        masked = not kernels <= BY_SEGMENTS or ("flash" not in kernels and length <= MASKED_LENGTH)
        sizes = start._replace(length=length, shares=masked)
        sizes, packed_rows, logits = _sizes_for_length(arrays, sizes, budget, fewest, fit)
        cost = packed_rows * length * _token_cost(net, length) + logits * _logit_cost(net, positions)
        choices.append((cost, sizes))
    cost, sizes = min(choices)
    return sizes, cost


def _sizes_for_length(
    arrays: Arrays, sizes: Sizes, budget: int | None, fewest: int, fit: float | None
) -> tuple[Sizes, int, int]:
    """The sizes for packed rows of that length, how many of those the arrays need, and their tokens that are read."""
    rows, width = arrays[0].shape
    # As if every packed row were a micro-batch of its own: how many of them first fit finds.
    packed, most, read = needs(*arrays, sizes._replace(whole_groups=False))
    part = packed * sizes.length / (MICROBATCHES if fit is None else MICROBATCHES_ACCELERATOR)
    tokens = budget or max(fewest, min(part, math.inf if fit is None else fit))
    count = max(1, round(packed / max(tokens // sizes.length, 1)))
    count = min(count, count + 1, key=lambda number: number * -(-packed // number))  # the last one may be half empty
    packed_rows = max(-(-packed // count), sizes.group_size if sizes.whole_groups else 1)
    # Other batches may have shorter rows: room for four times the average, and for as many as the sample needs.
    room = max(4 * packed_rows * sizes.length // width, packed_rows * most)
    room = max(room, 2 * sizes.group_size if sizes.whole_groups else 1)
    sizes = sizes._replace(packed_rows=packed_rows, rows=min(_round_up(room, sizes.group_size), rows))
    used = needs(*arrays, sizes).microbatches * packed_rows
    # Rows of full length that share nothing need the most micro-batches.
    whole = max(sizes.length // width, 1) * sizes.packed_rows
    return sizes._replace(microbatches=-(-rows // min(whole, sizes.rows))), used, read


def _lengths(spec: PackingSpec, arrays: Arrays, group_size: int, budget: int | None, multiple: int) -> list[int]:
    """The lengths of packed rows to choose from, multiples of `multiple`; raises ConfigError where there is none.

    They hold one row of full length, or 1, 2, 4, ... rows of the longest group behind their common prefix.
    """
    width = arrays[0].shape[1]
    if spec.microbatch_tokens and (budget or 0) < width:
        raise ConfigError(
            f"batch.microbatch_tokens is {spec.microbatch_tokens}, but the micro-batch of each row shard of the mesh "
            f"holds at least one row of {width} tokens: set it to {width} x mesh.data x mesh.fsdp x mesh.expert or "
            "more, or to 0"
        )
    if spec.pack_length and spec.pack_length < width:
        raise ConfigError(
            f"batch.pack_length is {spec.pack_length}, but rows have up to {width} tokens: set it to 0 or to {width} "
            "or more"
        )
    if spec.pack_length:
        return [spec.pack_length]
    counts = {min(2**power, group_size) for power in range(1, 1 + math.ceil(math.log2(max(group_size, 2))))}
    items = {longest_item(*arrays, Sizes(width, 1, 1, 1, group_size), count) for count in counts} - {0}
    rounded = sorted({_round_up(max(size, width), multiple) for size in {width, *items}})
    return [length for length in rounded if budget is None or length <= max(budget, rounded[0])]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _unpacked_cost(net: ModelConfig, positions: Positions, sample: TypicalRows) -> float:
    rows, width = sample.tokens.shape
    logits = rows * (width - max(sample.prompt_width, 1))
    computed = rows // 2 if positions.alternate else rows
    return computed * width * _token_cost(net, width) + logits * computed / rows * _logit_cost(net, positions)


def _token_cost(net: ModelConfig, length: int) -> float:
    """Floating-point operations of the layers for a token of a row of `length`, forward and backward."""
    attention = net.width * net.head_dim * 2 * (net.heads + net.kv_heads)
    dense = 3 * net.width * net.ffn
    experts = 3 * net.width * (net.expert_ffn * net.experts_per_token + net.shared_expert_ffn)
    sparse = sum(kind.experts for kind in net.layer_configs)
    dense_layers = net.layers if net.experts_beside else net.layers - sparse
    matmuls = net.layers * attention + sparse * experts + dense_layers * dense
    return 6.0 * matmuls + ATTENTION_COST * 12.0 * net.layers * length * net.heads * net.head_dim


def _logit_cost(net: ModelConfig, positions: Positions) -> float:
    return 0.0 if positions.last or positions.after else 8.0 * net.width * net.vocab_size


def typical_rollouts(rows: int, group_size: int, prompt_width: int, completion: int) -> TypicalRows:
    """Rows with full prompts; completions are full in every other group, and have 1/8, 2/8, ... of that length in the
    rest."""
    width, number = prompt_width + completion, np.arange(rows)
    eighths = np.where(number // group_size % 2 == 0, 8, number % 8 + 1)
    column = np.arange(width)
    tokens = np.where(column < prompt_width, number[:, None] // group_size, number[:, None]).astype(np.int32)
    segments = (column < (prompt_width + -(-completion * eighths // 8))[:, None]).astype(np.int32)
    return TypicalRows(tokens, segments, (segments * (column >= prompt_width)).astype(np.float32), prompt_width)
