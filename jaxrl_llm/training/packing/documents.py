"""Packing of documents: several short rows share one, told apart by their segment ids, or follow each other as one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.length_limit import pieces

MaskedIds = tuple[Sequence[int], Sequence[float]]  # token ids and loss mask of a document


def packed_rows(rows: Sequence[Mapping[str, Any]], capacity: int, strategy: str) -> list[list[Mapping[str, Any]]]:
    """The documents of each packed row of at most `capacity` tokens, of rows with `ids` and `mask`.

    "first_fit": whole rows (see there). "wrapped": all rows one after the other, in their order, cut every `capacity`
    tokens; a packed row is then one document, and its tokens see those of the rows before (`wrapped` of TRL). Raises
    ConfigError for a row longer than `capacity` that is to be whole, and for one with images that is not.
    """
    if strategy == "first_fit":
        return [[rows[i] for i in group] for group in first_fit([len(row["ids"]) for row in rows], capacity)]
    if any(row.keys() - {"ids", "mask"} for row in rows):
        raise ConfigError(
            f"data.packing_strategy is {strategy}, which cuts rows anywhere, but rows have images: set first_fit"
        )
    ids = np.concatenate([np.asarray(row["ids"], np.int32) for row in rows]) if rows else np.zeros(0, np.int32)
    mask = np.concatenate([np.asarray(row["mask"], np.float32) for row in rows]) if rows else ids
    return [[piece] for piece in pieces({"ids": ids, "mask": mask}, capacity)]


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of row indices: each row, in order, goes to the first group that has space for it.

    Every index appears once and a group's lengths sum to at most `capacity` tokens. It takes O(n log n) steps, by a
    tournament tree over the free space of the groups. Raises ConfigError for a row longer than `capacity`.
    """
    width = 1
    while width < len(lengths):
        width *= 2
    # A node holds the largest free space below it; the leaves, from `width` on, are the groups, unopened ones included.
    free = [capacity] * (2 * width)
    groups: list[list[int]] = []
    for row, length in enumerate(lengths):
        if length > capacity:
            raise ConfigError(
                f"row {row} has {length} tokens, more than the packed width {capacity}; shorten it or widen it"
            )
        node = 1
        while node < width:
            node = 2 * node if free[2 * node] >= length else 2 * node + 1
        if node - width == len(groups):
            groups.append([])
        groups[node - width].append(row)
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return groups


def pad_groups(
    groups: Sequence[Sequence[MaskedIds]], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, segments, positions: int32; mask: float32), each [N, length]: one packed row for each group of rows.

    Inside a packed row the segments count 1, 2, ..., the positions restart at 0 in each segment, and padding at the end
    has segment 0. The mask of a segment's first token is 0, because the token before it belongs to another row.

    Raises ConfigError: a group longer than `length`.
    """
    tokens, segments, positions = np.zeros((3, len(groups), length), np.int32)
    mask = np.zeros((len(groups), length), np.float32)
    for index, group in enumerate(groups):
        total = sum(len(ids) for ids, _ in group)
        if total > length:
            raise ConfigError(
                f"packed row {index} has {total} tokens, more than the batch width {length}; pack with {length}"
            )
        start = 0
        for segment, (ids, weights) in enumerate(group, start=1):
            stop = start + len(ids)
            tokens[index, start:stop] = ids
            segments[index, start:stop] = segment
            positions[index, start:stop] = np.arange(len(ids))
            mask[index, start:stop] = weights
            mask[index, start : start + 1] = 0.0
            start = stop
    return tokens, segments, positions, mask
