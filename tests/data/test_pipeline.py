import json

import numpy as np
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.pipeline import Pipeline

EXAMPLES = [{"prompt": f"p{index}"} for index in range(10)]


def stream(pipeline, batches):
    return [example["prompt"] for _ in range(batches) for example in next(pipeline)]


def test_each_epoch_is_another_permutation():
    pipeline = Pipeline(EXAMPLES, 4, seed=1)
    seen = stream(pipeline, 15)
    epochs = [seen[start : start + 10] for start in range(0, 60, 10)]
    names = sorted(example["prompt"] for example in EXAMPLES)
    assert all(sorted(epoch) == names for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_the_order_depends_on_the_seed_alone():
    assert stream(Pipeline(EXAMPLES, 4, seed=1), 9) == stream(Pipeline(EXAMPLES, 2, seed=1), 18)
    assert stream(Pipeline(EXAMPLES, 4, seed=1), 9) != stream(Pipeline(EXAMPLES, 4, seed=2), 9)


def test_rows_of_like_length_lie_in_a_batch():
    """The stream sorted within every 50 batches of an epoch, whose last batches are sorted by themselves."""
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 100, 230)]
    examples = list(enumerate(lengths))
    plain = Pipeline(examples, 2, seed=1)
    drawn = [[example for _ in range(count) for example in next(plain)] for count in (50, 50, 15) * 2]
    grouped = Pipeline(examples, 2, seed=1, lengths=lengths)
    for block in drawn:
        assert [next(grouped) for _ in range(len(block) // 2)] == [
            list(pair) for pair in zip(*[iter(sorted(block, key=lambda example: -example[1]))] * 2, strict=True)
        ]
    state, expected = grouped.get_state(), [next(grouped) for _ in range(60)]
    other = Pipeline(examples, 2, seed=1, lengths=lengths)
    other.set_state(state)
    assert [next(other) for _ in range(60)] == expected
    for one, another in ((plain, grouped), (grouped, plain)):
        with pytest.raises(ConfigError, match="megabatch"):
            one.set_state(another.get_state())
    halves = [Pipeline(examples, 2, 1, process_index=p, process_count=2, lengths=lengths) for p in (0, 1)]
    whole = Pipeline(examples, 2, seed=1, lengths=lengths)
    assert [next(halves[0]) + next(halves[1]) for _ in range(9)] == [next(whole) for _ in range(9)]


@pytest.mark.parametrize(("batch", "shares"), [(1, None), (32, None), (3, [(60, 1.0), (40, 3.0)])])
def test_an_epoch_of_rows_by_length_has_the_rows_of_an_epoch(batch, shares):
    """And none twice: a megabatch that crossed its end would put long rows of the next epoch before its short ones."""
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 100, 100)]
    grouped = Pipeline(range(100), batch, seed=1, lengths=lengths, shares=shares)
    plain = Pipeline(range(100), batch, seed=1, shares=shares)
    for first in range(0, 300, 100):
        epoch = range(first, first + 100)
        assert sorted(map(grouped.example, epoch)) == sorted(map(plain.example, epoch))
        assert shares or sorted(map(grouped.example, epoch)) == list(range(100))
    assert lengths[grouped.example(100)] == max(lengths[grouped.example(place)] for place in range(100, 100 + batch))


def test_order_without_shuffling():
    seen = stream(Pipeline(EXAMPLES, 5, shuffle=False), 4)
    assert seen == [f"p{index}" for index in range(10)] * 2


@pytest.mark.parametrize("count", [1, 2, 4])
def test_order_is_the_same_for_all_processes(count):
    whole = Pipeline(EXAMPLES, 8, seed=3)
    parts = [Pipeline(EXAMPLES, 8, seed=3, process_index=index, process_count=count) for index in range(count)]
    for _ in range(7):
        assert [example for part in parts for example in next(part)] == next(whole)


@pytest.mark.parametrize("done", [0, 3, 8])
def test_resume_anywhere_gives_the_same_rest(done):
    pipeline = Pipeline(EXAMPLES, 4, seed=5)
    stream(pipeline, done)
    state = json.loads(json.dumps(pipeline.get_state()))
    again = Pipeline(EXAMPLES, 4, seed=5)
    stream(again, 2)
    again.set_state(state)
    assert stream(again, 10) == stream(pipeline, 10)


def test_resume_with_other_processes():
    pipeline = Pipeline(EXAMPLES, 4, seed=5)
    stream(pipeline, 3)
    state = pipeline.get_state()
    rest = stream(pipeline, 6)
    halves = [Pipeline(EXAMPLES, 8, seed=5, process_index=index, process_count=2) for index in (0, 1)]
    for half in halves:
        half.set_state(state)
    resumed = [example["prompt"] for _ in range(3) for half in halves for example in next(half)]
    assert resumed == rest


def test_a_far_position_costs_no_replay():
    pipeline = Pipeline(EXAMPLES, 4)
    pipeline.set_state({**pipeline.get_state(), "position": 4 * 10**8})
    assert len(next(pipeline)) == 4
    assert int(pipeline.epochs) == 4 * 10**7


def test_epochs_are_a_multiple_of_all_examples():
    pipeline = Pipeline(EXAMPLES, 4)
    epochs = []
    for _ in range(6):
        epochs.append(pipeline.epochs)
        next(pipeline)
    assert epochs == [4 * step / len(EXAMPLES) for step in range(6)]


def test_it_is_an_iterator_over_any_sequence():
    for batch in Pipeline(range(6), 3, shuffle=False):
        assert batch == [0, 1, 2]
        break


def test_a_batch_of_more_than_all_examples_spans_epochs():
    assert next(Pipeline(range(3), 8, shuffle=False)) == [0, 1, 2, 0, 1, 2, 0, 1]
    pipeline = Pipeline(range(3), 8)
    batches = [next(pipeline) for _ in range(3)]
    assert sorted(x for batch in batches for x in batch) == [0] * 8 + [1] * 8 + [2] * 8
    assert pipeline.epochs == 8


def test_errors():
    with pytest.raises(ConfigError, match="the data has no examples"):
        Pipeline([], 16)
    with pytest.raises(ConfigError, match="a batch of 6 prompts cannot be shared by 4 processes"):
        Pipeline(EXAMPLES, 6, process_count=4)
    with pytest.raises(ConfigError, match="process 2 is not one of 2"):
        Pipeline(EXAMPLES, 4, process_index=2, process_count=2)
    state = Pipeline(EXAMPLES, 4, seed=1).get_state()
    for other, message in [
        (Pipeline(EXAMPLES, 4, seed=2), "seed=1 but this run has seed=2"),
        (Pipeline(EXAMPLES[:8], 4, seed=1), "examples=10 but this run has examples=8"),
        (Pipeline(EXAMPLES, 4, seed=1, shuffle=False), "shuffle=True but this run has shuffle=False"),
    ]:
        with pytest.raises(ConfigError, match=message):
            other.set_state(state)
