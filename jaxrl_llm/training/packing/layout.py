"""The plan of a `PackedLayout`: which packed rows hold the tokens of a batch.

Losses speak of rows `[N,T]`; most of those columns may be padding, and the rows of a group start with the same prompt.
The net computes packed rows of L tokens instead, in which rows lie one behind the other and a group's common prefix
lies once, seen by the tokens of all its rows. Micro-batches are made of packed rows too, so they hold equal numbers of
tokens, not of rows. A batch is cut in Z shards of R = N / Z rows, each planned by itself.

Letters: E micro-batches, M packed rows of one of them in a shard, n places for rows, S places for scored tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.algorithms.batch import PackedLayout


class Sizes(NamedTuple):
    """The sizes of a layout that do not depend on the rows."""

    length: int  # L
    packed_rows: int  # M
    rows: int  # n
    parts: int  # E; more are made where they do not do
    group: int = 1  # adjacent rows that may start with the same tokens
    together: bool = False  # the rows of a group stay in one micro-batch
    last: bool = False  # read each row's last token; otherwise, of each scored token, the one before it
    whole: bool = False  # compute tokens that nothing is read of, too


class _Bundle(NamedTuple):
    """Rows of a group in one packed row, behind their common prefix."""

    rows: list[int]
    prefix: int

    def size(self, needed: np.ndarray) -> int:
        return self.prefix + int(needed[self.rows].sum()) - self.prefix * len(self.rows)


class _Seat(NamedTuple):
    part: int
    packed_row: int
    offset: int


class _Unit(NamedTuple):
    """What one micro-batch holds whole."""

    rows: list[int]
    bundles: list[_Bundle]


def plan(tokens, segments, mask, sizes: Sizes, shards: int = 1) -> PackedLayout:
    """The layout of rows `[N,T]`, with `Z = shards`, in which every token that is read is computed once.

    A row is one run of tokens whose segment is not 0. Of a row are read the tokens of the `mask`; rows without any are
    left out. `parts` holds as many micro-batches as the fullest shard needs.

    Raises ValueError for a row that is longer than a packed row, or a group of more rows than a micro-batch has room
    for where they stay together.
    """
    arrays = [np.asarray(x).reshape(shards, -1, np.shape(tokens)[-1]) for x in (tokens, segments, mask)]
    rows = [_Rows(arrays[0][z], arrays[1][z], arrays[2][z], sizes) for z in range(shards)]
    seats = [_seated(shard, sizes) for shard in rows]
    used = max(1, *(len(found) for found in seats))
    parts = max(sizes.parts, used)
    made = [_filled(shard, found, sizes, parts) for shard, found in zip(rows, seats, strict=True)]
    stacked = {name: np.stack([one[name] for one in made]) for name in made[0]}
    return PackedLayout(**stacked, num_microbatches=np.full(shards, used, np.int32))


class Needs(NamedTuple):
    """What a layout of a shard's rows takes."""

    parts: int  # micro-batches
    rows: int  # in the one of most rows
    read: int  # tokens that are read, those that rows share more than once


def needs(tokens, segments, mask, sizes: Sizes) -> Needs:
    """What `plan` would use for the rows `[R,T]` of one shard; it raises what that raises, and fills no arrays."""
    rows = _Rows(np.asarray(tokens), np.asarray(segments), np.asarray(mask), sizes)
    seated = _seated(rows, sizes)
    most = max((sum(len(unit.rows) for unit, _ in part) for part in seated), default=1)
    return Needs(max(len(seated), 1), most, int(rows.read.sum()))


def longest_bundle(tokens, segments, mask, sizes: Sizes, count: int) -> int:
    """The most tokens that the first `count` rows of a group of rows `[R,T]` take behind their common prefix."""
    rows = _Rows(np.asarray(tokens), np.asarray(segments), np.asarray(mask), sizes)
    longest = 0
    for first in range(0, rows.count, sizes.group):
        live = [row for row in range(first, min(first + count, rows.count)) if rows.live[row]]
        longest = max(longest, _Bundle(live, rows.shared(live)).size(rows.needed) if live else 0)
    return longest


class _Rows:
    """The rows of a shard `[R,T]`: where they start, how many of their tokens are needed, and which are read."""

    def __init__(self, tokens, segments, mask, sizes: Sizes):
        count, width = tokens.shape
        real, column = segments != 0, np.arange(width)
        self.width, self.count = width, count
        self.start = np.where(real.any(1), real.argmax(1), 0)
        length = real.sum(1)
        # Columns are now counted from the start of each row.
        index = np.minimum(self.start[:, None] + column, width - 1)
        self.tokens = np.where(column < length[:, None], np.take_along_axis(tokens, index, 1), -1)
        read = (np.take_along_axis(mask, index, 1) > 0) & (column < length[:, None])
        read[:, 0] &= sizes.last
        live = read.any(1)
        if sizes.last:
            read = live[:, None] & (column == length[:, None] - 1)
        last = np.where(live, width - 1 - read[:, ::-1].argmax(1), 0)
        self.read, self.live = read, live
        self.needed = np.where(live, length if sizes.whole else last + sizes.last, 0)
        if self.needed.max(initial=0) > sizes.length:
            raise ValueError(f"a row of {self.needed.max()} tokens is longer than packed rows, of {sizes.length}")

    def shared(self, rows: Sequence[int]) -> int:
        """How many tokens the rows have in common at their start, among those that all of them need."""
        if len(rows) < 2:
            return 0
        tokens = self.tokens[list(rows), : self.needed[list(rows)].min()]
        return int(np.logical_and.accumulate((tokens == tokens[0]).all(0)).sum())


def _bundles(rows: _Rows, members: list[int], sizes: Sizes) -> list[_Bundle]:
    """The live members of a group in as few packed rows as first-fit by falling length finds."""
    prefix = rows.shared(members)
    if not prefix:
        return [_Bundle([row], 0) for row in members]
    found: list[tuple[list[int], int]] = []  # rows and the room that is left
    for row in sorted(members, key=lambda row: -rows.needed[row]):
        own = int(rows.needed[row]) - prefix
        at = next((n for n, (_, room) in enumerate(found) if room >= own), len(found))
        if at == len(found):
            found.append(([], sizes.length - prefix))
        found[at] = ([*found[at][0], row], found[at][1] - own)
    return [_Bundle(sorted(held), prefix if len(held) > 1 else 0) for held, _ in found]


def _units(rows: _Rows, sizes: Sizes) -> list[_Unit]:
    found: list[_Unit] = []
    for first in range(0, rows.count, sizes.group):
        group = range(first, min(first + sizes.group, rows.count))
        live = [row for row in group if rows.live[row]]
        bundles = _bundles(rows, live, sizes) if live else []
        if sizes.together:
            found += [_Unit(list(group), bundles)] if bundles else []
        else:
            found += [
                _Unit(part, [_Bundle(part, one.prefix)]) for one in bundles for part in _cut(one.rows, sizes.rows)
            ]
    return sorted(found, key=lambda unit: -sum(one.size(rows.needed) for one in unit.bundles))


def _cut(rows: list[int], most: int) -> list[list[int]]:
    return [rows[at : at + most] for at in range(0, len(rows), most)]


def _seated(rows: _Rows, sizes: Sizes) -> list[list[tuple[_Unit, list[_Seat]]]]:
    """The units of each micro-batch with the seats of their bundles: first fit, the largest first."""
    room = np.zeros((0, sizes.packed_rows), np.int64)
    free = np.zeros(0, np.int64)
    parts: list[list[tuple[_Unit, list[_Seat]]]] = []
    for unit in _units(rows, sizes):
        if len(unit.rows) > sizes.rows:
            raise ValueError(f"{len(unit.rows)} rows stay together, and a micro-batch has room for {sizes.rows}")
        needs = [one.size(rows.needed) for one in unit.bundles]
        seats = None
        for part in np.flatnonzero((free >= len(unit.rows)) & (room.max(1, initial=0) >= max(needs))):
            seats = _fit(room[part], needs, int(part), sizes.length)
            if seats is not None:
                break
        if seats is None:
            parts.append([])
            room = np.concatenate([room, np.full((1, sizes.packed_rows), sizes.length)])
            free = np.append(free, sizes.rows)
            seats = _fit(room[-1], needs, len(parts) - 1, sizes.length)
        if seats is None:
            raise ValueError(
                f"rows that stay together take {sum(needs)} tokens, and a micro-batch has {sizes.packed_rows} packed "
                f"rows of {sizes.length}"
            )
        part = seats[0].part
        free[part] -= len(unit.rows)
        for seat, need in zip(seats, needs, strict=True):
            room[part, seat.packed_row] -= need
        parts[part].append((unit, seats))
    return parts


def _fit(room: np.ndarray, needs: list[int], part: int, length: int) -> list[_Seat] | None:
    """Seats for bundles of these sizes in the packed rows of one micro-batch; None where they do not fit."""
    left, seats = room.copy(), []
    for need in needs:
        fits = np.flatnonzero(left >= need)
        if not fits.size:
            return None
        row = int(fits[np.argmin(left[fits])])
        seats.append(_Seat(part, row, length - int(left[row])))
        left[row] -= need
    return seats


def _filled(rows: _Rows, seated, sizes: Sizes, parts: int) -> dict[str, np.ndarray]:
    """The index arrays of a shard, without their dimension Z."""
    scored = sizes.packed_rows * sizes.length + sizes.rows  # a row's last token is scored and not computed
    packed = (parts, sizes.packed_rows, sizes.length)
    out: dict[str, np.ndarray] = {
        name: np.zeros(packed, np.int32)
        for name in ("token_idx", "segments", "prefix_segments", "positions", "multiplicity")
    }
    out |= {name: np.zeros((parts, scored), np.int32) for name in ("hidden_idx", "target_idx")}
    out["row_idx"] = np.full((parts, sizes.rows), rows.count, np.int32)
    out["logp_idx"] = np.full((parts, sizes.rows, rows.width), scored, np.int32)
    out["num_read"] = np.zeros(parts, np.int32)
    for part, held in enumerate(seated):
        number = 0
        for unit, seats in held:
            place = {row: number + at for at, row in enumerate(unit.rows)}
            number += len(unit.rows)
            for row, at in place.items():
                out["row_idx"][part, at] = row
            for bundle, seat in zip(unit.bundles, seats, strict=True):
                _fill_bundle(rows, bundle, seat, place, out, sizes)
    return out


def _fill_bundle(rows: _Rows, bundle: _Bundle, seat: _Seat, place: dict[int, int], out, sizes: Sizes) -> None:
    """Writes the packed tokens of a bundle, and what is read of them."""
    at = (seat.part, seat.packed_row)
    shared, first = bundle.prefix, bundle.rows[0]
    offset = seat.offset
    segment = out["segments"][at].max() + 1

    def put(row: int, begin: int, end: int, offset: int, segment: int, prefix: int, uses: int) -> None:
        where = (*at, slice(offset, offset + end - begin))
        out["token_idx"][where] = place[row] * rows.width + rows.start[row] + np.arange(begin, end)
        out["positions"][where] = np.arange(begin, end)
        out["segments"][where], out["prefix_segments"][where], out["multiplicity"][where] = segment, prefix, uses

    put(first, 0, shared, offset, segment, segment, len(bundle.rows))
    own = offset + shared
    common = np.arange(rows.width) < shared
    slot_of = np.full(rows.width, -1)  # of tokens in the prefix
    for number, row in enumerate(bundle.rows, start=1 if shared else 0):
        needed = int(rows.needed[row])
        put(row, shared, needed, own, segment + number, segment if shared else segment + number, 1)
        read = np.flatnonzero(rows.read[row])
        fresh = read[~common[read] | (slot_of[read] < 0)]
        slots = out["num_read"][seat.part] + np.arange(len(fresh))
        source = fresh if sizes.last else fresh - 1  # the token whose hidden state is read
        packed = np.where(source < shared, offset + source, own + source - shared)
        out["hidden_idx"][seat.part, slots] = seat.packed_row * sizes.length + packed
        out["target_idx"][seat.part, slots] = place[row] * rows.width + rows.start[row] + fresh
        found = np.full(rows.width, -1)
        found[fresh] = slots
        slot_of = np.where(common & (found >= 0), found, slot_of)
        out["logp_idx"][seat.part, place[row], rows.start[row] + read] = np.where(common, slot_of, found)[read]
        out["num_read"][seat.part] += len(fresh)
        own += needed - shared
