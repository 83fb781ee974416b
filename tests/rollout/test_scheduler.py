"""The scheduler: every row is assigned once, keeps its shard and its prompt, and few slots stay idle."""

import numpy as np
import pytest

from jaxrl_llm.rollout.scheduler import IDLE, Scheduler
from jaxrl_llm.rollout.slots import flat, put, take


def run(scheduler, lengths):
    """Decodes rows of these lengths `[shards, rows]`, one step at a time; the fraction of slots that were of use."""
    grid, left, assigned = scheduler.grid, lengths.copy(), [set() for _ in lengths]
    shapes, used, executed, pause_at = {grid.row.shape}, 0, 0, None
    while True:
        for shard, rows in enumerate(grid.row):
            present = rows[rows != IDLE]
            assert len(set(present.tolist())) == present.size
            owners = np.broadcast_to(grid.prompt[shard][:, None], rows.shape)
            assert (present // scheduler.group_size == owners[rows != IDLE]).all()
            assigned[shard] |= set(present.tolist())
        index = np.maximum(grid.row, 0).reshape(len(lengths), -1)
        live = (np.take_along_axis(left, index, 1).reshape(grid.row.shape) > 0) & (grid.row != IDLE)
        following = scheduler.next(live)
        most = max(map(np.sum, live))
        if following is not None:
            assert pause_at is None or most <= pause_at, "decoding would not have paused for this grid"
            pause_at = None
            gone = [
                set(g[a].tolist()) - set(f.ravel().tolist())
                for g, a, f in zip(grid.row, live, following.row, strict=True)
            ]
            assert not any(gone), "a live row lost its slot"
            grid = following
            shapes.add(grid.row.shape)
            continue
        if not live.any():
            break
        if pause_at is None or most <= pause_at:
            pause_at = scheduler.pause_at(live)
            assert 0 <= pause_at < most
        executed, used = executed + live.size, used + live.sum()
        for shard in range(len(lengths)):
            left[shard, grid.row[shard][live[shard]]] -= 1
    assert (left <= 0).all()
    assert all(rows == set(range(lengths.shape[1])) for rows in assigned)
    return used / executed, shapes


@pytest.mark.parametrize("shrink", [0.5, 0.85])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("prompts", "group", "slots"), [(8, 8, 64), (8, 8, 16), (3, 5, 4), (4, 1, 3), (1, 8, 8), (2, 6, 1)]
)
def test_every_row_is_decoded(prompts, group, slots, shards, shrink):
    lengths = np.random.default_rng(0).geometric(1 / 20, size=(shards, prompts * group))
    run(Scheduler(prompts, group, shards, slots, shrink, (16, 64)), lengths)


def test_few_slots_are_idle():
    lengths = np.random.default_rng(1).geometric(1 / 32, size=(1, 64)).clip(max=128)
    fraction, shapes = run(Scheduler(8, 8, 1, 64), lengths)
    assert fraction > 0.6
    assert len(shapes) <= 7
    fraction, _ = run(Scheduler(8, 8, 1, 16), lengths)
    assert fraction > 0.8


def test_smaller_steps_leave_fewer_idle_slots():
    lengths = np.random.default_rng(1).geometric(1 / 32, size=(1, 64)).clip(max=128)
    halves, _ = run(Scheduler(8, 8, 1, 64, 0.5, (64, 128)), lengths)
    steps, shapes = run(Scheduler(8, 8, 1, 64, 0.85, (64, 128)), lengths)
    assert steps > 0.9 > 0.8 > halves
    assert len(shapes) <= 20


def test_prompts_are_copied_within_the_memory():
    """32 rows are left: 5 of two prompts, 2 of one, 4 of the others. In pairs they would need 17 prompts of 16."""
    scheduler = Scheduler(8, 8, 1, 64, 0.5, (64, 128))
    assert scheduler.capacity == 8 * 64 + 64 * 128
    live = np.zeros((1, 8, 8), bool)
    live[0, :, :4] = True
    live[0, 0, 4] = live[0, 1, 4] = True
    live[0, 2, 2:] = False
    grid = scheduler.next(live)
    assert grid is not None and grid.row.shape == (1, 32, 1)
    long = Scheduler(8, 8, 1, 64, 0.5, (1024, 128))
    assert long.next(live) is None, "32 copies of long prompts would take more than was there"


def test_all_rows_at_once_are_the_batch_itself():
    grid = Scheduler(3, 4, 2, 12).grid
    np.testing.assert_array_equal(grid.prompt, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(grid.row, [np.arange(12).reshape(3, 4)] * 2)


def test_caches_without_numbers_go_with_their_rows():
    """Those of what prompts are too short for: of 2 shards with 3 prompts each, and 4 rows of each prompt."""
    of_prompts, of_rows = np.zeros((6, 0, 5)), np.zeros((6, 4, 0, 5))
    assert take(of_prompts, np.array([[2, 0], [1, 1]]), 0).shape == (4, 0, 5)
    assert flat(of_rows, 0).shape == (24, 0, 5)
    assert put(of_rows, np.array([[7], [11]]), np.zeros((2, 1, 0, 5)), 0).shape == of_rows.shape
