import random
import time

import numpy as np
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.training.packing.documents import first_fit, packed_rows, pad_groups


def naive_first_fit(lengths, capacity):
    groups, free = [], []
    for row, length in enumerate(lengths):
        group = next((index for index, tokens in enumerate(free) if tokens >= length), None)
        if group is None:
            group = len(groups)
            groups.append([])
            free.append(capacity)
        groups[group].append(row)
        free[group] -= length
    return groups


def packed(rows, length):
    groups = first_fit([len(ids) for ids, _ in rows], length)
    return pad_groups([[rows[row] for row in group] for group in groups], length)


def test_first_fit_by_hand():
    assert first_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert first_fit([10, 10], 10) == [[0], [1]]
    assert first_fit([], 10) == []
    assert first_fit([3], 3) == [[0]]


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_equals_the_plain_search(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(0, 30) for _ in range(draw.randint(1, 200))]
    assert first_fit(lengths, 30) == naive_first_fit(lengths, 30)


def test_first_fit_of_many_rows_is_quick():
    draw = random.Random(0)
    started = time.monotonic()
    first_fit([draw.randint(500, 1000) for _ in range(20_000)], 1000)
    # The plain search looks at up to 2e4 groups for each row, which takes a minute.
    assert time.monotonic() - started < 5


def rows_of(*lengths):
    """Rows of so many tokens, counted through all of them; the first of each is in no mask."""
    ends = np.cumsum(lengths)
    spans = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    return [{"ids": ids, "mask": [0, *[1] * (len(ids) - 1)]} for ids in spans]


def test_whole_rows_and_wrapped_ones():
    rows = rows_of(3, 4, 2, 1)
    assert packed_rows(rows, 5, "first_fit") == [[rows[0], rows[2]], [rows[1], rows[3]]]
    wrapped = packed_rows(rows, 4, "wrapped")
    assert [[row["ids"].tolist() for row in group] for group in wrapped] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]]
    tokens, segments, positions, mask = pad_groups([[(row["ids"], row["mask"]) for row in x] for x in wrapped], 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert segments.tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]
    assert mask.tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert packed_rows([], 4, "wrapped") == []
    with pytest.raises(ConfigError, match="is wrapped, which cuts rows anywhere, but rows have images"):
        packed_rows([rows[0] | {"pixels": None}], 4, "wrapped")


def test_packed_arrays_by_hand():
    rows = [([11, 12, 13], [0, 1, 1]), ([21, 22, 23, 24], [0, 0, 1, 1]), ([31, 32], [0, 1])]
    tokens, segments, positions, mask = packed(rows, 5)
    assert tokens.tolist() == [[11, 12, 13, 31, 32], [21, 22, 23, 24, 0]]
    assert segments.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert mask.tolist() == [[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]]
    assert (tokens.dtype, positions.dtype, mask.dtype) == (np.int32, np.int32, np.float32)


def test_first_tokens_of_segments():
    _, _, _, mask = pad_groups([[([1, 2], [1, 1]), ([3], [1]), ([4, 5], [1, 1])]], 6)
    assert mask.tolist() == [[0, 1, 0, 0, 1, 0]]


def test_every_row_can_be_read_back():
    draw = random.Random(1)
    rows = [([draw.randint(1, 99) for _ in range(draw.randint(1, 12))], None) for _ in range(60)]
    rows = [(ids, [0] + [draw.randint(0, 1) for _ in ids[1:]]) for ids, _ in rows]
    tokens, segments, positions, mask = packed(rows, 16)
    back = []
    for row in range(len(tokens)):
        for segment in range(1, segments[row].max() + 1):
            here = segments[row] == segment
            assert np.flatnonzero(here).tolist() == list(range(here.argmax(), here.argmax() + here.sum()))
            assert positions[row][here].tolist() == list(range(here.sum()))
            back.append((tokens[row][here].tolist(), mask[row][here].tolist()))
    assert sorted(back) == sorted((ids, [float(x) for x in weights]) for ids, weights in rows)


def test_errors():
    with pytest.raises(ConfigError, match="row 1 has 11 tokens, more than the packed width 10"):
        first_fit([1, 11], 10)
    with pytest.raises(ConfigError, match="packed row 0 has 3 tokens, more than the batch width 2"):
        pad_groups([[([1, 2, 3], [0, 1, 1])]], 2)
