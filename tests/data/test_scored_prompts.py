"""Prompts with the scores of a reference: the order of those that are left, their shares, columns and resuming."""

import json

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.scored_prompts import ScoredPrompts, column_scores

ROWS = [{"prompt": str(index)} for index in range(10)]
SCORES = np.zeros((10, 3), np.float32)
SCORES[[0, 3, 4, 8], [0, 1, 2, 0]] = (1.0, 0.25, -1.0, 2.0)
SCORES[9] = np.nan
SOLVED = [0, 3, 4, 8]


def scored(batch=3, drop=True, **options):
    prompts = ScoredPrompts(ROWS, batch, drop, **options)
    prompts.give(SCORES)
    return prompts


def numbers(rows):
    return [int(row["prompt"]) for row in rows]


@pytest.mark.parametrize("drop", [True, False])
def test_the_order_is_that_of_a_pipeline_over_the_others(drop):
    prompts, kept = scored(drop=drop, seed=5), SOLVED if drop else list(range(10))
    plain = Pipeline(kept, 3, seed=5)
    for _ in range(9):
        expected = next(plain)
        assert numbers(next(prompts)) == expected
        np.testing.assert_array_equal(prompts.newest, SCORES[expected])
    assert prompts.left_out == 10 - len(kept) and prompts.epochs == plain.epochs


def test_processes_share_each_batch_and_its_scores():
    whole, parts = scored(4), [scored(4, process_index=index, process_count=2) for index in range(2)]
    for _ in range(5):
        assert numbers(next(whole)) == numbers(next(parts[0])) + numbers(next(parts[1]))
        np.testing.assert_array_equal(whole.newest, np.concatenate([part.newest for part in parts]))


def test_shares_of_sources_are_of_the_prompts_that_are_left():
    """The last of three sources has none left, and gives none; the others keep their weights."""
    prompts = scored(4, shares=[(4, 3.0), (5, 1.0), (1, 9.0)])
    drawn = np.concatenate([numbers(next(prompts)) for _ in range(20)])
    assert set(drawn) == set(SOLVED) and np.isin(drawn, [0, 3]).mean() == 0.75


def test_a_run_that_goes_on_samples_nothing_anew():
    prompts = scored(seed=1)
    next(prompts)
    state, arrays = json.loads(json.dumps(prompts.get_state())), prompts.get_arrays()
    resumed, earlier = ScoredPrompts(ROWS, 3, True, seed=1), ScoredPrompts(ROWS, 3, True, seed=1)
    assert not resumed.known and resumed.get_arrays() == {} and "scores" not in state
    (name,) = prompts.arrays
    resumed.set_state({**state, **arrays[name]})
    earlier.set_state({**state, "scores": SCORES.tolist()})  # as earlier versions kept them
    assert resumed.known
    for _ in range(4):
        assert next(resumed) == next(prompts) == next(earlier)
        np.testing.assert_array_equal(resumed.newest, prompts.newest)
        np.testing.assert_array_equal(earlier.newest, prompts.newest)
    for other, words in (
        (ScoredPrompts(ROWS[:-1], 3, True, seed=1), "has those of 10 prompts, and this run reads them of 9"),
        (ScoredPrompts(ROWS, 3, False, seed=1), "examples=4 but this run has examples=10"),
    ):
        with pytest.raises(ConfigError, match=words):
            other.set_state({**state, **arrays[name]})
    with pytest.raises(ConfigError, match="has no scores of the reference"):
        ScoredPrompts(ROWS, 3, True).set_state(Pipeline(ROWS, 3).get_state())


def test_a_column_takes_the_place_of_samples():
    rows = [{"prompt": "0", "reference_scores": [1, None]}, {"prompt": "1", "reference_scores": 0.5}]
    np.testing.assert_array_equal(column_scores(rows), np.float32([[1, np.nan], [0.5, np.nan]]))
    unscored = {"prompt": "3", "reference_scores": [None, None]}  # as a first stage writes a prompt that it has none of
    prompts = ScoredPrompts([*rows, {"prompt": "2", "reference_scores": [0.0, 0.0]}, unscored], 2, True)
    assert prompts.known and prompts.left_out == 2
    for wrong in ("many", None, [], {"a": 1}):
        with pytest.raises(ConfigError, match=r"row 1 has reference_scores = .*it takes the scores"):
            ScoredPrompts([rows[0], {"prompt": "1", "reference_scores": wrong}], 2, True)


def test_no_prompt_is_left():
    prompts = ScoredPrompts(ROWS, 2, True)
    with pytest.raises(ConfigError, match="no completion of the reference for any of 10 prompts"):
        prompts.give(np.zeros((10, 2)))
    for drop in (True, False):
        with pytest.raises(ConfigError, match="none of 10 prompts has a score of the reference: check what"):
            ScoredPrompts(ROWS, 2, drop).give(np.full((10, 2), np.nan))
