"""Rows as batches: numpy arrays of one width, where padding is segment 0 and what is under it never read; columns."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError


def columns_of(rows: Sequence[Mapping[str, Any]], without: Collection[str]) -> dict[str, list[Any]]:
    """The columns of all rows but those of some names, each with None for the rows that lack it."""
    names = dict.fromkeys(name for row in rows for name in row if name not in without)
    return {name: [row.get(name) for row in rows] for name in names}


def pad_prompts(prompts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments), both int32 [B, length], with each prompt at the right edge.

    Segments are 1 on real tokens and 0 on the padding before them. Raises ConfigError for a longer prompt.
    """
    tokens, segments = np.zeros((2, len(prompts), length), np.int32)
    for row, ids in enumerate(prompts):
        _check_fits(row, len(ids), length)
        tokens[row, length - len(ids) :] = ids
        segments[row, length - len(ids) :] = 1
    return tokens, segments


def pad_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[float]]], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32, segments int32, mask float32), each [N, length], with every row at the left edge.

    A row is (token ids, loss mask). Segments are 1 on real tokens; padding has segment 0 and mask 0. Raises
    ConfigError for a longer row, or one whose ids and mask differ in length.
    """
    tokens, segments = np.zeros((2, len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), np.float32)
    for row, (ids, weights) in enumerate(rows):
        _check_fits(row, len(ids), length)
        if len(ids) != len(weights):
            raise ConfigError(
                f"row {row} has {len(ids)} tokens but {len(weights)} mask values; give one for each token"
            )
        tokens[row, : len(ids)] = ids
        segments[row, : len(ids)] = 1
        mask[row, : len(ids)] = weights
    return tokens, segments, mask


def _check_fits(row: int, count: int, length: int) -> None:
    if count > length:
        raise ConfigError(
            f"row {row} has {count} tokens, more than the batch width {length}; shorten it or widen the batch"
        )
