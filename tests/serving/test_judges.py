"""Judges of a model that the run loads itself say what they say when the same model is served."""

import numpy as np
import pytest

from jaxrl_llm.rewards.judge import Judge, PairwiseJudge
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.training.local_judge import LocalJudge
from tests.serving.conftest import LONGEST

PARAMETERS = {"max_tokens": 12}
COMPLETIONS = ["4821", "90817", "4821", "35", "7" * 130, "1203"]  # two of them alike, one too long for a row


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def both(kind, url, completions=COMPLETIONS, **options):
    """What a judge gives and logs whose model is served, and whose model is loaded, three rows at a time."""
    options = {"parameters": PARAMETERS, **options}
    graded = []
    for judge in (
        kind(f"{url}/v1", "sorter", **options),
        LocalJudge(kind(path="embedded:sort", max_length=LONGEST, rows=3, **options)),
    ):
        rewards = load_rewards(judge)
        with pytest.warns(UserWarning, match="could not judge row"):
            graded.append(rewards.submit(["p"] * len(completions), completions, [[1]] * len(completions), {}).result())
        rewards.close()
    return graded


@pytest.mark.slow
@pytest.mark.parametrize("system", [None, "Sort."])
def test_a_judge_says_the_same_with_a_path(listening, system):
    options = {"template": "sort:{{ completion }}=", "scale": (0, 1e13), "on_failure": "none", "system": system}
    served, loaded = both(Judge, listening().url, **options)
    np.testing.assert_array_equal(loaded.rewards, served.rewards)
    assert np.isnan(loaded.rewards[4, 0]) and len(np.unique(loaded.rewards)) > 3
    assert served.logged.totals["judge/requests"] == 5  # that of row 4 was refused
    assert loaded.logged.totals == served.logged.totals | {"judge/requests": 4}


@pytest.mark.slow
def test_a_judge_that_compares_says_the_same_with_a_path(listening):
    """The model knows no letters: no reply can be read, and likeliest ones are not computed again."""
    options = {"template": "sort:{{ a }}{{ b }}=", "on_failure": 0.25}
    served, loaded = both(PairwiseJudge, listening().url, COMPLETIONS[:3], **options)
    np.testing.assert_array_equal(loaded.rewards, served.rewards)
    totals = loaded.logged.totals
    assert totals["pairwise_judge/unreadable"] == served.logged.totals["pairwise_judge/unreadable"] == 12
    assert (totals["pairwise_judge/requests"], totals["pairwise_judge/failed_rows"]) == (3, 6)
