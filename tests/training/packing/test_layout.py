"""The plan of packed rows: every token that is read is computed once, at its place, behind its own prompt."""

import numpy as np
import pytest

from jaxrl_llm.training.packing.layout import Sizes, plan

PAD = 0


def rows_of(prompts, completions, left: int = 0, width: int = 16):
    """Tokens, segments and mask of rows `prompt + completion`, after `left` columns of padding."""
    tokens, segments, mask = np.zeros((3, len(prompts), width), np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start = left + 3 - len(prompt) if left else 0
        stop = start + len(prompt) + len(completion)
        tokens[row, start:stop] = [*prompt, *completion]
        segments[row, start:stop] = 1
        mask[row, start + len(prompt) : stop] = 1
    return tokens, segments, mask


def seen_by(layout, microbatch: int, index: int) -> list[int]:
    """The packed tokens that the one at `index` attends to, itself the last, of shard 0."""
    length = layout.segments.shape[-1]
    row, column = divmod(index, length)
    segments = layout.segments[0, microbatch, row]
    prefixes = segments if layout.prefix_segments is None else layout.prefix_segments[0, microbatch, row]
    same = (segments == segments[column]) | (segments == prefixes[column])
    return [row * length + n for n in np.flatnonzero(same & (np.arange(length) <= column) & (segments > 0))]


def contexts(layout, tokens, count: int):
    """For each row and column that is read: the tokens and positions seen where it is predicted, and the target."""
    found = {}
    width = tokens.shape[1]
    for microbatch in range(int(layout.num_microbatches[0])):
        rows = layout.row_idx[0, microbatch]
        own = tokens[np.minimum(rows, count - 1)].reshape(-1)
        packed = own[layout.token_idx[0, microbatch].reshape(-1)]
        for n, t in zip(*np.nonzero(layout.logp_idx[0, microbatch] < layout.hidden_idx.shape[-1]), strict=True):
            slot = layout.logp_idx[0, microbatch, n, t]
            assert slot < layout.num_read[0, microbatch]
            seen = seen_by(layout, microbatch, int(layout.hidden_idx[0, microbatch, slot]))
            positions = layout.positions[0, microbatch].reshape(-1)[seen]
            key = (int(rows[n]), int(t))
            assert key not in found and rows[n] < count
            found[key] = packed[seen].tolist(), positions.tolist(), int(own[layout.target_idx[0, microbatch, slot]])
    assert width == layout.logp_idx.shape[-1]
    return found


CASES = {
    "ragged, with an empty completion": (
        [[1, 2, 3]] * 4 + [[4, 5]] * 4,
        [[6, 7], [8], [], [9, 9, 9], [6], [7, 8], [6], []],
    ),
    "all alike": ([[1, 2, 3]] * 4, [[5, 6]] * 4),
    "nothing in common": ([[n, 2, 3] for n in range(1, 5)], [[5, 6, 7]] * 4),
    "completions that start alike": ([[1, 2]] * 4, [[5, 6, 7], [5, 6, 8], [5, 6], [5]]),
    "no completion at all": ([[1, 2, 3]] * 4, [[]] * 4),
}


@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("length", "packed_rows", "rows"), [(16, 1, 2), (12, 2, 8), (40, 1, 8)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_is_predicted_once(case, length, packed_rows, rows, shares, left):
    prompts, completions = CASES[case]
    tokens, segments, mask = rows_of(prompts, completions, left)
    layout = plan(tokens, segments, mask, Sizes(length, packed_rows, rows, 1, group_size=4, shares=shares))
    assert (layout.prefix_segments is None) != shares and (shares or layout.multiplicity.max() <= 1)
    found = contexts(layout, tokens, len(tokens))
    assert set(found) == set(zip(*np.nonzero(mask), strict=True))
    for (row, t), (seen, positions, target) in found.items():
        start = int(np.flatnonzero(segments[row])[0])
        assert seen == tokens[row, start:t].tolist()
        assert positions == list(range(t - start))
        assert target == tokens[row, t]


@pytest.mark.parametrize("last", [[9, 9], [7, 8]])
def test_documents_of_a_row_do_not_see_each_other(last):
    """Rows of several documents, of which the first alone has what its group has in common."""
    tokens, segments, mask = rows_of([[1, 2, 3]] * 4, [[5, 6, 7, 8], [5, 6, *last], [6, 6], [7, 7, 7, 7, 8]])
    for row, begins in enumerate(([5], [5], [], [3, 6])):  # a document behind the prompt is in its place
        for column in begins:
            segments[row, column:] += segments[row, column:] > 0
            mask[row, column] = 0
    layout = plan(tokens, segments, mask, Sizes(24, 1, 4, 1, group_size=2))
    found = contexts(layout, tokens, len(tokens))
    assert set(found) == set(zip(*np.nonzero(mask), strict=True))
    for (row, t), (seen, positions, target) in found.items():
        own = np.flatnonzero(segments[row, :t] == segments[row, t])
        assert seen == tokens[row, own].tolist() and positions == list(range(len(own))) and target == tokens[row, t]
    assert (layout.multiplicity == 2).sum() == 5 + 3  # 1 2 3 5 6, and the prompt of the others


def test_a_prompt_is_computed_once():
    tokens, segments, mask = rows_of([[1, 2, 3]] * 4, [[5, 6], [6, 6], [7, 6], [8, 6]])
    layout = plan(tokens, segments, mask, Sizes(16, 1, 4, 1, group_size=4))
    # 3 of the prompt, and of each completion the first: nothing is predicted from the last
    assert (layout.segments > 0).sum() == 7
    np.testing.assert_array_equal(layout.multiplicity[0, 0, 0, :7], [4, 4, 4, 1, 1, 1, 1])
    np.testing.assert_array_equal(layout.prefix_segments[0, 0, 0, :7], [1] * 7)
    np.testing.assert_array_equal(layout.positions[0, 0, 0, :7], [0, 1, 2, 3, 3, 3, 3])
    assert layout.num_read.tolist() == [[8]]


def test_rows_share_no_token_that_stands_for_something_of_their_own():
    """Rows that begin alike, with an image token behind the prompt: the images may differ."""
    tokens, segments, mask = rows_of([[1, 2, 3]] * 4, [[5, 9, 9, 6, row] for row in range(4)])
    mask[:, 4:6] = 0
    layout = plan(tokens, segments, mask, Sizes(32, 1, 4, 1, group_size=4, apart=9))
    assert (layout.multiplicity > 1).sum() == 4  # 1 2 3 5
    found = contexts(layout, tokens, len(tokens))
    assert set(found) == set(zip(*np.nonzero(mask), strict=True))
    for (row, t), (seen, positions, target) in found.items():
        assert seen == tokens[row, :t].tolist() and positions == list(range(t)) and target == tokens[row, t]


def test_pairs_stay_together_and_keep_both_rows():
    tokens, segments, mask = rows_of([[1, 2, 3]] * 6, [[5] * 9, [], [6] * 8, [7] * 9, [], []])
    layout = plan(tokens, segments, mask, Sizes(16, 2, 2, 1, group_size=2, whole_groups=True))
    assert sorted(layout.row_idx[0, : int(layout.num_microbatches[0])].tolist()) == [[0, 1], [2, 3]]


def test_the_last_token_of_a_row_is_read_itself():
    tokens, segments, mask = rows_of([[1, 2, 3]] * 2, [[5, 6], [7]])
    layout = plan(tokens, segments, mask, Sizes(16, 1, 2, 1, group_size=2, whole_groups=True, last=True))
    found = contexts(layout, tokens, 2)
    assert {key: seen for key, (seen, _, _) in found.items()} == {(0, 4): [1, 2, 3, 5, 6], (1, 3): [1, 2, 3, 7]}


def test_shards_have_as_many_microbatches():
    tokens, segments, mask = rows_of([[1, 2, 3]] * 4, [[5] * 9, [6] * 9, [5], [6]])
    layout = plan(tokens, segments, mask, Sizes(16, 1, 2, 1, group_size=2), shards=2)
    assert layout.num_microbatches.tolist() == [2, 2]
    assert sorted(row for row in layout.row_idx[0].reshape(-1) if row < 2) == [0, 1]
    assert layout.row_idx[1].tolist() == [[0, 1], [2, 2]]


def test_what_cannot_be_laid_out_is_an_error():
    tokens, segments, mask = rows_of([[1, 2, 3]] * 2, [[5] * 9, [6] * 9])
    with pytest.raises(ValueError, match="a row of 11 tokens is longer than packed rows, of 8"):
        plan(tokens, segments, mask, Sizes(8, 1, 2, 1))
    with pytest.raises(ValueError, match="take 22 tokens, and a micro-batch has 1 packed rows of 12"):
        plan(tokens, segments, mask, Sizes(12, 1, 2, 1, group_size=2, whole_groups=True))
