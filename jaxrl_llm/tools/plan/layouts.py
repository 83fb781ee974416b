"""The layouts that batches of full-length rows get, as shapes; see training/packing/planner.py."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import PackedLayout
from jaxrl_llm.config import batch_rows, rows_together
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import row_shards
from jaxrl_llm.models.chunked_softmax import columns_at_once
from jaxrl_llm.models.transformer import Net
from jaxrl_llm.tools.plan.shapes import rows_shape
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.packing import planner
from jaxrl_llm.training.packing.layout import Sizes, plan
from jaxrl_llm.training.packing.planner import Packer, Sample, make_packer
from jaxrl_llm.training.setup.run import shard_rows
from jaxrl_llm.training.setup.specs import packing_spec

Turns = tuple[float, ...]  # of loops whose number the compiler does not know, the outer ones first


class Laid(NamedTuple):
    """The layouts of a minibatch, and of all rows in a pass without gradients; None where rows are not packed."""

    own: PackedLayout | None = None
    observed: PackedLayout | None = None
    passing: PackedLayout | None = None
    turns: Turns = ()
    passing_turns: Turns = ()


def lay_out(config, net: Net, mesh: Mesh, objective: Objective, widths: tuple[int, int], accelerator: bool,
            packer: Packer | None = None) -> Laid:  # fmt: skip
    """The layouts of rows of `widths` (prompt, all) tokens, by `packer` or the one that a run would have."""
    rows, shards = shard_rows(config, mesh), row_shards(mesh)
    sample = _sample(config, rows, widths)
    if packer is None:
        decides = sample
        if config.algorithm.name not in OFFLINE:
            decides = planner.sampled_rows(rows, config.rollout.group_size, widths[0], widths[1] - widths[0])
        backend, spec = "accelerator" if accelerator else None, packing_spec(config)
        packer = make_packer(spec, net.config, mesh, objective.positions, decides, backend)
    if packer.sizes is None:
        return Laid()
    columns, positions = net.config.vocab_size, packer.positions
    mask = sample.segments if positions.unmasked else sample.mask
    if positions.alternate:
        first = np.arange(len(mask))[:, None] % 2 == 0
        own, turns = _shapes(sample, mask * first, packer.sizes, mesh, columns)
        observed, _ = _shapes(sample, mask * ~first, packer.sizes, mesh, columns)
    else:
        (own, turns), observed = _shapes(sample, mask, packer.sizes, mesh, columns), None
    all_rows = batch_rows(config) // shards
    sample = _sample(config, all_rows, widths)
    passing, passing_turns = _shapes(sample, sample.mask, packer.passing_sizes(all_rows), mesh, columns)
    return Laid(own, observed, passing, turns, passing_turns)


def _sample(config, rows: int, widths: tuple[int, int]) -> Sample:
    """Rows of full length; those of a prompt share its tokens and no more."""
    prompt, width = widths
    group = rows_together(config) if config.algorithm.name not in OFFLINE else 1
    columns, numbers = np.arange(width), np.arange(rows)[:, None]
    tokens = np.where(columns < prompt, numbers // group, numbers).astype(np.int32)
    mask = np.broadcast_to((columns >= prompt).astype(np.float32), tokens.shape)
    return Sample(tokens, np.ones_like(tokens), mask, prompt)


def _shapes(sample: Sample, mask, sizes: Sizes, mesh: Mesh, vocabulary: int) -> tuple[PackedLayout, Turns]:
    """The shapes of a layout, every shard like the one of the sample; how often its loops turn."""
    one, shards = plan(sample.tokens, sample.segments, mask, sizes), row_shards(mesh)
    columns = columns_at_once(shards, vocabulary)
    chunks = float(max(one.num_read.max() / columns, 1.0))
    parts = float(one.num_microbatches[0])

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return rows_shape(mesh, (shards, *np.shape(x)[1:]), jnp.int32)

    return jax.tree.map(shape, one), ((parts, chunks) if one.row_idx.shape[1] > 1 else (chunks,))
