"""First-fit packing of rows into a `PackedLayout`: which packed rows hold the tokens of a batch.

Losses speak of rows `[N,T]`; most of those columns may be padding, and the rows of a group start with the same prompt.
The network computes packed rows of W tokens instead, in which rows lie one behind the other and a group's common prefix
lies once, seen by the tokens of all its rows. Micro-batches are made of packed rows too, so they hold equal numbers of
tokens, not of rows. Each of the Z shards of a batch plans its N / Z rows by itself. Letters are `PackedLayout`'s.

It is bin packing twice: items (the rows of a group behind their common prefix) go into packed rows, and clusters (items
that stay together) into micro-batches, first fit, the largest first.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.algorithms.batch import PackedLayout


class Sizes(NamedTuple):
    """The sizes of a layout that do not depend on the rows."""

    length: int  # W, tokens of a packed row
    packed_rows: int  # Q, packed rows of a micro-batch in a shard
    rows: int  # n, rows that a micro-batch has room for
    microbatches: int  # I; more are made where these do not hold all rows
    group_size: int = 1  # adjacent rows that may start with the same tokens
    whole_groups: bool = False  # the rows of a group stay in one micro-batch
    last: bool = False  # read each row's last token, instead of those of the mask
    after: bool = False  # read a token itself, as with `last`; otherwise the one before it, which predicts it
    unread: bool = False  # compute tokens behind the last that is read, too
    shares: bool = True  # rows of a group share their common prefix; else segments alone say what a token sees
    apart: int | None = None  # a token that no two rows share, as what it stands for differs from row to row


class _Item(NamedTuple):
    """Rows of a group that lie in one packed row, behind their common prefix."""

    rows: list[int]
    prefix: int

    def size(self, needed: np.ndarray) -> int:
        """Tokens of the packed row that it takes; `needed` are the tokens of each row."""
        return self.prefix + int(needed[self.rows].sum()) - self.prefix * len(self.rows)


class _Cluster(NamedTuple):
    """Rows that lie in one micro-batch together, and their items, of which each lies in one packed row."""

    rows: list[int]
    items: list[_Item]


class _Placement(NamedTuple):
    """The place of an item."""

    microbatch: int
    packed_row: int
    offset: int


_Microbatch = list[tuple[_Cluster, list[_Placement]]]


def plan(tokens, segments, mask, sizes: Sizes, shards: int = 1) -> PackedLayout:
    """The layout of rows `[N,T]`, with `Z = shards`, in which every token that is read is computed once.

    A row is one run of tokens whose segment is not 0; where that changes, a document begins that sees none before it.
    Of a row are read the tokens of the `mask`; rows without any are left out. It has as many micro-batches as the
    fullest shard needs.

    Raises ValueError for a row that is longer than a packed row, or a group of more rows than a micro-batch has room
    for where they stay together.
    """
    arrays = [np.asarray(x).reshape(shards, -1, np.shape(tokens)[-1]) for x in (tokens, segments, mask)]
    rows = [_Rows(arrays[0][z], arrays[1][z], arrays[2][z], sizes) for z in range(shards)]
    packed = [_pack(shard, sizes) for shard in rows]
    used = max(1, *(len(microbatches) for microbatches in packed))
    count = max(sizes.microbatches, used)
    indices = [
        _index_arrays(shard, microbatches, sizes, count) for shard, microbatches in zip(rows, packed, strict=True)
    ]
    stacked = {name: np.stack([shard[name] for shard in indices]) for name in indices[0]}
    layout = PackedLayout(**stacked, num_microbatches=np.full(shards, used, np.int32))
    return layout if sizes.shares else dataclasses.replace(layout, prefix_segments=None)


class Needs(NamedTuple):
    """The room that the layout of a shard's rows takes, by which the sizes of later layouts are chosen."""

    microbatches: int
    rows: int  # in the micro-batch of most rows
    read: int  # tokens that are read; those that rows share count once for each


def needs(tokens, segments, mask, sizes: Sizes) -> Needs:
    """The room that `plan` would use for the rows of one shard; it raises what that raises, and makes no arrays."""
    rows = _Rows(np.asarray(tokens), np.asarray(segments), np.asarray(mask), sizes)
    packed = _pack(rows, sizes)
    most = max((sum(len(cluster.rows) for cluster, _ in microbatch) for microbatch in packed), default=1)
    return Needs(max(len(packed), 1), most, int(rows.read.sum()))


def longest_item(tokens, segments, mask, sizes: Sizes, count: int) -> int:
    """The most tokens that the first `count` rows of a group take behind their common prefix."""
    rows = _Rows(np.asarray(tokens), np.asarray(segments), np.asarray(mask), sizes)
    longest = 0
    for first in range(0, rows.count, sizes.group_size):
        live = [row for row in range(first, min(first + count, rows.count)) if rows.live[row]]
        longest = max(longest, _Item(live, rows.common_prefix(live)).size(rows.needed) if live else 0)
    return longest


class _Rows:
    """The rows of a shard: where they start, how many of their tokens are needed, and which are read."""

    def __init__(self, tokens, segments, mask, sizes: Sizes):
        count, width = tokens.shape
        real, column = segments != 0, np.arange(width)
        self.width, self.count, self.apart = width, count, sizes.apart
        self.start = np.where(real.any(1), real.argmax(1), 0)
        length = real.sum(1)
        # From here on columns count from the start of each row, whichever side its padding is on.
        index = np.minimum(self.start[:, None] + column, width - 1)
        self.tokens = np.where(column < length[:, None], np.take_along_axis(tokens, index, 1), -1)
        read = (np.take_along_axis(mask, index, 1) > 0) & (column < length[:, None])
        segments = np.take_along_axis(segments, index, 1)
        begins = np.diff(segments, axis=1, prepend=-1) != 0
        self.document = begins.cumsum(1) - 1  # which of a row's documents a token is of
        self.position = column - np.maximum.accumulate(np.where(begins, column, 0), 1)  # in its document
        itself = sizes.last or sizes.after
        read &= ~begins | itself  # nothing comes before the first token of a document that could predict it
        live = read.any(1)
        if sizes.last:
            read = live[:, None] & (column == length[:, None] - 1)
        last = np.where(live, width - 1 - read[:, ::-1].argmax(1), 0)
        self.read, self.live = read, live
        # The last token that is read is predicted by the one before it, and need not be computed itself.
        self.needed = np.where(live, length if sizes.unread else last + itself, 0)
        if self.needed.max(initial=0) > sizes.length:
            raise ValueError(f"a row of {self.needed.max()} tokens is longer than packed rows, of {sizes.length}")

    def common_prefix(self, rows: Sequence[int]) -> int:
        """The number of tokens that the rows have in common at their start, among those that all of them need, in
        their first documents."""
        if len(rows) < 2:
            return 0
        end = self.needed[list(rows)].min()
        tokens, document = self.tokens[list(rows), :end], self.document[list(rows), :end]
        common = (tokens == tokens[0]).all(0) & (document == 0).all(0) & (tokens[0] != self.apart)
        return int(np.logical_and.accumulate(common).sum())


def _items(rows: _Rows, members: list[int], sizes: Sizes) -> list[_Item]:
    """The rows of a group in as few packed rows as first-fit by falling length finds."""
    prefix = rows.common_prefix(members) if sizes.shares else 0
    if not prefix:
        return [_Item([row], 0) for row in members]
    bins: list[list[int]] = []
    free: list[int] = []  # tokens that are left in each bin
    for row in sorted(members, key=lambda row: -rows.needed[row]):
        size = int(rows.needed[row]) - prefix
        chosen = next((number for number, room in enumerate(free) if room >= size), len(bins))
        if chosen == len(bins):
            bins.append([])
            free.append(sizes.length - prefix)
        bins[chosen].append(row)
        free[chosen] -= size
    return [_Item(sorted(held), prefix if len(held) > 1 else 0) for held in bins]


def _clusters(rows: _Rows, sizes: Sizes) -> list[_Cluster]:
    """The rows as clusters, the largest first; a row that nothing is read of is in none, unless with its group."""
    clusters: list[_Cluster] = []
    for first in range(0, rows.count, sizes.group_size):
        group = range(first, min(first + sizes.group_size, rows.count))
        live = [row for row in group if rows.live[row]]
        items = _items(rows, live, sizes) if live else []
        if sizes.whole_groups:
            clusters += [_Cluster(list(group), items)] if items else []
            continue
        for item in items:
            # An item of more rows than a micro-batch has room for is split, and its prefix computed again.
            for start in range(0, len(item.rows), sizes.rows):
                held = item.rows[start : start + sizes.rows]
                clusters.append(_Cluster(held, [_Item(held, item.prefix)]))
    return sorted(clusters, key=lambda cluster: -sum(item.size(rows.needed) for item in cluster.items))


def _pack(rows: _Rows, sizes: Sizes) -> list[_Microbatch]:
    """The clusters of each micro-batch with the placements of their items: first fit, the largest first."""
    free = np.zeros((0, sizes.packed_rows), np.int64)  # tokens that are left in each packed row of each micro-batch
    free_rows = np.zeros(0, np.int64)  # rows that each micro-batch still has room for
    microbatches: list[_Microbatch] = []
    for cluster in _clusters(rows, sizes):
        if len(cluster.rows) > sizes.rows:
            raise ValueError(f"{len(cluster.rows)} rows stay together, and a micro-batch has room for {sizes.rows}")
        needed = [item.size(rows.needed) for item in cluster.items]
        placements = None
        for number in np.flatnonzero((free_rows >= len(cluster.rows)) & (free.max(1, initial=0) >= max(needed))):
            placements = _best_fit(free[number], needed, int(number), sizes.length)
            if placements is not None:
                break
        if placements is None:
            microbatches.append([])
            free = np.concatenate([free, np.full((1, sizes.packed_rows), sizes.length)])
            free_rows = np.append(free_rows, sizes.rows)
            placements = _best_fit(free[-1], needed, len(microbatches) - 1, sizes.length)
        if placements is None:
            raise ValueError(
                f"rows that stay together take {sum(needed)} tokens, and a micro-batch has {sizes.packed_rows} packed "
                f"rows of {sizes.length}"
            )
        number = placements[0].microbatch
        free_rows[number] -= len(cluster.rows)
        for placement, size in zip(placements, needed, strict=True):
            free[number, placement.packed_row] -= size
        microbatches[number].append((cluster, placements))
    return microbatches


def _best_fit(free: np.ndarray, needed: list[int], microbatch: int, length: int) -> list[_Placement] | None:
    """Placements of items of these sizes, each in the fullest packed row that holds it; None where one finds none."""
    left, placements = free.copy(), []
    for size in needed:
        fits = np.flatnonzero(left >= size)
        if not fits.size:
            return None
        row = int(fits[np.argmin(left[fits])])
        placements.append(_Placement(microbatch, row, length - int(left[row])))
        left[row] -= size
    return placements


def _index_arrays(rows: _Rows, packed: list[_Microbatch], sizes: Sizes, count: int) -> dict[str, np.ndarray]:
    """The index arrays of a shard, without their dimension Z."""
    most_read = sizes.packed_rows * sizes.length + sizes.rows  # X: a row's last token is read and not computed
    shape = (count, sizes.packed_rows, sizes.length)
    out: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.int32)
        for name in ("token_idx", "segments", "prefix_segments", "positions", "multiplicity")
    }
    out |= {name: np.zeros((count, most_read), np.int32) for name in ("hidden_idx", "target_idx")}
    out["row_idx"] = np.full((count, sizes.rows), rows.count, np.int32)
    out["logp_idx"] = np.full((count, sizes.rows, rows.width), most_read, np.int32)
    out["num_read"] = np.zeros(count, np.int32)
    if not packed:  # a row of which nothing is read, as means over none are no numbers: rows that fill up are 0
        together = sizes.group_size if sizes.whole_groups else 1
        out["row_idx"][0, :together] = np.arange(together)
    for microbatch, clusters in enumerate(packed):
        held = 0
        for cluster, placements in clusters:
            slots = {row: held + number for number, row in enumerate(cluster.rows)}
            held += len(cluster.rows)
            for row, slot in slots.items():
                out["row_idx"][microbatch, slot] = row
            for item, placement in zip(cluster.items, placements, strict=True):
                _fill_item(rows, item, placement, slots, out, sizes)
    return out


def _fill_item(
    rows: _Rows, item: _Item, placement: _Placement, slots: dict[int, int], out: dict[str, np.ndarray], sizes: Sizes
) -> None:
    """Writes the packed tokens of an item, and the positions that are read of them."""
    microbatch, packed_row, start = placement
    prefix = item.prefix
    segment = out["segments"][microbatch, packed_row].max() + 1

    def write(row: int, begin: int, end: int, offset: int, segment: int, prefix_segment: int, multiplicity: int):
        where = (microbatch, packed_row, slice(offset, offset + end - begin))
        document = rows.document[row, begin:end]
        out["token_idx"][where] = slots[row] * rows.width + rows.start[row] + np.arange(begin, end)
        out["positions"][where] = rows.position[row, begin:end]
        out["segments"][where] = segment + document
        out["prefix_segments"][where] = np.where(document == 0, prefix_segment, segment + document)
        out["multiplicity"][where] = multiplicity

    write(item.rows[0], 0, prefix, start, segment, segment, len(item.rows))
    offset, own_segment = start + prefix, segment + bool(prefix)
    in_prefix = np.arange(rows.width) < prefix
    read_in_prefix = np.full(rows.width, -1)  # which of the X speaks of each token of the prefix, once one does
    for row in item.rows:
        needed = int(rows.needed[row])
        write(row, prefix, needed, offset, own_segment, segment if prefix else own_segment, 1)
        read = np.flatnonzero(rows.read[row])
        # Tokens of the prefix that an earlier row of the item reads too have the same log-prob: it is computed once.
        fresh = read[~in_prefix[read] | (read_in_prefix[read] < 0)]
        positions = out["num_read"][microbatch] + np.arange(len(fresh))
        predictors = fresh if sizes.last or sizes.after else fresh - 1
        packed = np.where(predictors < prefix, start + predictors, offset + predictors - prefix)
        out["hidden_idx"][microbatch, positions] = packed_row * sizes.length + packed
        out["target_idx"][microbatch, positions] = slots[row] * rows.width + rows.start[row] + fresh
        by_column = np.full(rows.width, -1)
        by_column[fresh] = positions
        read_in_prefix = np.where(in_prefix & (by_column >= 0), by_column, read_in_prefix)
        logp_idx = np.where(in_prefix, read_in_prefix, by_column)[read]
        out["logp_idx"][microbatch, slots[row], rows.start[row] + read] = logp_idx
        out["num_read"][microbatch] += len(fresh)
        offset += needed - prefix
        own_segment += 1 + int(rows.document[row, max(needed - 1, 0)])
