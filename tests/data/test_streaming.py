import json

import datasets
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.pipeline import Stream, StreamSource

ROWS = datasets.Dataset.from_list([{"x": i} for i in range(10)])


def keep(row):
    return [row["x"]]


def make(sources=(ROWS,), converts=None, weights=None, batch=3, buffer=7, **options):
    converts, weights = converts or [keep] * len(sources), [1.0] * len(sources) if weights is None else weights
    opened = [
        StreamSource(f"s{i}", source.to_iterable_dataset(num_shards=2), convert, weight)
        for i, (source, convert, weight) in enumerate(zip(sources, converts, weights, strict=True))
    ]
    return Stream(opened, batch, buffer=buffer, **options)


def taken(stream, batches):
    return [row for _ in range(batches) for row in next(stream)]


def test_everything_comes_once_an_epoch():
    # A block that divides the epoch: the epochs do not mix.
    seen = taken(make(buffer=5, batch=5), 6)
    epochs = [seen[start : start + 10] for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Any block: nothing is lost, nothing comes twice as often as another.
    seen = taken(make(), 70)
    assert all(seen.count(x) == 21 for x in range(10))


def test_order_without_shuffling():
    assert taken(make(shuffle=False), 10) == [x % 10 for x in range(30)]


def test_no_row_of_an_epoch_comes_in_the_next():
    """A buffer of more rows than there are held several epochs: a run of one saw some rows twice and others never."""
    few = datasets.Dataset.from_list([{"x": 100 + i} for i in range(2)])
    for sources, weights, rows in (((ROWS,), None, 10), ((ROWS, few), [None, None], 12)):
        seen = taken(make(sources, weights=weights, buffer=8, batch=2), 18)
        epochs = [seen[start : start + rows] for start in range(0, 36 - rows, rows)]
        assert all(len(set(epoch)) == rows for epoch in epochs) and epochs[0] != epochs[1]
    assert len(set(taken(make(buffer=1000, batch=5), 2))) == 10


def test_the_order_depends_on_the_seed_alone():
    assert taken(make(seed=1), 8) == taken(make(seed=1, batch=2), 12)
    assert taken(make(seed=1), 8) != taken(make(seed=2), 8)


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7, 11])
def test_resume_anywhere_gives_the_same_rest(done):
    stream = make()
    taken(stream, done)
    state = json.loads(json.dumps(stream.get_state()))
    again = make()
    taken(again, 2)
    again.set_state(state)
    assert again.get_state() == state
    third = make()
    third.set_state(json.loads(json.dumps(again.get_state())))
    rest = taken(stream, 9)
    assert taken(again, 9) == taken(third, 9) == rest
    assert again.get_state() == stream.get_state()


@pytest.mark.parametrize("done", [0, 1, 2, 3, 5])
def test_blocks_are_packed_by_themselves(done):
    def pairs(rows):
        return [rows[start : start + 2] for start in range(0, len(rows), 2)]

    stream = make(batch=2, pack=pairs, packed_width=8)
    seen = taken(make(batch=2, pack=pairs, packed_width=8), 8)  # of 7 rows, then the 3 that the epoch has left
    assert [sorted(map(len, block)) for block in (seen[:4], seen[4:6])] == [[1, 2, 2, 2], [1, 2]]
    assert sorted(x for group in seen[:6] for x in group) == list(range(10))
    taken(stream, done)
    again = make(batch=2, pack=pairs, packed_width=8)
    again.set_state(json.loads(json.dumps(stream.get_state())))
    assert taken(again, 5) == taken(stream, 5)
    with pytest.raises(ConfigError, match="packed_width=8 but this run has packed_width=4"):
        make(batch=2, pack=pairs, packed_width=4).set_state(stream.get_state())
    with pytest.raises(ConfigError, match="packed_width=8 but this run has packed_width=None"):
        make(batch=2).set_state(stream.get_state())


def test_packed_rows_are_shuffled_too():
    """Packing opens rows of its own, at the end of a block, for what no other has space for."""

    def in_order(rows):
        return sorted(rows)

    assert taken(make(buffer=10, batch=10, pack=in_order), 1) != sorted(range(10))
    assert taken(make(buffer=10, batch=10, pack=in_order, shuffle=False), 1) == sorted(range(10))


def test_resume_rereads_one_block_only():
    stream = make(buffer=2, batch=2, shuffle=False)
    taken(stream, 40)
    state, read = stream.get_state(), []

    def noted(row):
        read.append(row["x"])
        return keep(row)

    again = make(converts=[noted], buffer=2, batch=2, shuffle=False)
    taken(again, 1)
    read.clear()
    again.set_state(state)
    assert taken(again, 1) == [0, 1]
    assert len(read) <= 6


@pytest.mark.parametrize("count", [2, 3])
def test_order_is_the_same_for_all_processes(count):
    whole = make(batch=6)
    parts = [make(batch=6, process_index=index, process_count=count) for index in range(count)]
    for _ in range(5):
        assert [row for part in parts for row in next(part)] == next(whole)


def test_sources_are_mixed_by_weight():
    other = datasets.Dataset.from_list([{"x": 100 + i} for i in range(4)])
    seen = taken(make((ROWS, other), weights=[3.0, 1.0], buffer=8, batch=8), 5)
    assert sum(x >= 100 for x in seen) == 10
    assert sorted(x for x in seen if x >= 100)[:3] == [100, 100, 100]


@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_sources_without_weights_follow_each_other(done):
    few = datasets.Dataset.from_list([{"x": 100 + i} for i in range(2)])
    make_both = lambda **options: make((few, ROWS), weights=[None, None], buffer=5, **options)  # noqa: E731
    epoch = [100, 101, *range(10)]
    stream = make_both(shuffle=False)
    assert taken(stream, 8) == epoch * 2
    stream = make_both()
    before = taken(stream, done)
    state = json.loads(json.dumps(stream.get_state()))
    rest = taken(stream, 20 - done)
    again = make_both()
    again.set_state(state)
    assert taken(again, 20 - done) == rest
    assert sorted(before + rest) == sorted(epoch * 5)


def test_a_row_that_becomes_two_counts_twice():
    """As in memory, where weights are shares of token rows: pairs are two labelled rows each."""
    other = datasets.Dataset.from_list([{"x": 100 + i} for i in range(40)])
    twice = lambda row: [row["x"], row["x"]]  # noqa: E731
    seen = taken(make((ROWS, other), [twice, keep], [1.0, 1.0], shuffle=False), 10)
    assert sum(x < 100 for x in seen) in (15, 16)


def test_rows_may_be_dropped_or_doubled():
    stream = make(converts=[lambda row: [row["x"]] * (row["x"] % 3)], shuffle=False)
    assert taken(stream, 3) == [1, 2, 2, 4, 5, 5, 7, 8, 8]


def test_a_position_waits_for_no_block():
    """Or a row that cannot be read would stop the run inside its checkpoint, which has no need of it."""

    def convert(row):
        if row["x"] == 7:
            raise ConfigError("it is wrong")
        return keep(row)

    stream = make(converts=[convert], buffer=5, batch=5, shuffle=False)
    assert next(stream) == [0, 1, 2, 3, 4]
    state = json.loads(json.dumps(stream.get_state()))
    with pytest.raises(ConfigError, match="s0 row 7: it is wrong"):
        next(stream)
    mended = make(buffer=5, batch=5, shuffle=False)
    mended.set_state(state)
    assert next(mended) == [5, 6, 7, 8, 9]


def test_errors():
    def fail(row):
        raise ConfigError("it is wrong") if row["x"] == 4 else ConfigError("all wrong")

    with pytest.raises(ConfigError, match="s0 row 0: all wrong"):
        next(make(converts=[fail]))
    with pytest.raises(ConfigError, match="no row is left to train on, of 10 that were read"):
        next(make(converts=[lambda row: []]))
    with pytest.raises(ConfigError, match="a batch of 3 prompts cannot be shared by 2 processes"):
        make(process_count=2)
    with pytest.raises(ConfigError, match="seed=0 but this run has seed=1"):
        make(seed=1).set_state(make().get_state())
