"""Rewards written for verl, verifiers and Harmony, and graders made of graders."""

import asyncio
import functools
import re
from dataclasses import dataclass

import numpy as np
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards.combined import CombinedGrader
from jaxrl_llm.rewards.runner import Rewards, load_rewards
from jaxrl_llm.rewards.signatures import RewardError


def score(specs, completions, columns=None, **options):
    rows = len(completions)
    prompts, ids = [f"p{row}" for row in range(rows)], [[row] for row in range(rows)]
    return load_rewards(specs, **options).submit(prompts, completions, ids, columns or {}).result()


# --- verl -------------------------------------------------------------------------------------------------------------

VERL = {
    "data_source": ["gsm8k", "math"],
    "reward_model": [{"style": "rule", "ground_truth": "4"}, {"style": "rule", "ground_truth": "5"}],
    "extra_info": [{"index": 0}, {"index": 7}],
}


def test_verl_compute_score_gets_the_rows_columns():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    graded = score(compute_score, ["4", "4"], VERL)
    assert graded.rewards.tolist() == [[1], [0]]
    assert seen == [("gsm8k", "4", "4", {"index": 0}), ("math", "4", "5", {"index": 7})]


def test_verl_mappings_become_metrics_and_columns():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        right = solution_str == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

    graded = score(compute_score, [[{"role": "assistant", "content": "4"}], "3"], VERL)
    assert graded.rewards.tolist() == [[1], [-1]]
    assert graded.logged.metrics == {"rewards/compute_score/acc": [0.5]}
    assert graded.logged.columns == {"compute_score/acc": [True, False], "compute_score/pred": ["4", "3"]}


def test_verl_batch_form():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        assert data_sources == ["gsm8k", "math"] and extra_infos[1] == {"index": 7}
        return [{"score": float(s == g), "n": 1} for s, g in zip(solution_strs, ground_truths, strict=True)]

    assert score(compute_score, ["4", "4"], VERL).rewards.tolist() == [[1], [0]]


def test_verl_async_form_and_a_ground_truth_column():
    async def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
        await asyncio.sleep(0)
        return float(solution_str == ground_truth)

    assert score(compute_score, ["4", "4"], {"ground_truth": ["4", "5"]}).rewards.tolist() == [[1], [0]]


def test_verl_without_ground_truth():
    def compute_score(data_source, solution_str, ground_truth):
        return 0.0

    with pytest.raises(
        RewardError, match=r"reads reward_model\['ground_truth'\] or .* has the columns answer, on row 0"
    ):
        score(compute_score, ["a"], {"answer": ["4"]})


def test_verl_forms_that_read_no_ground_truth():
    def short(solution_str, extra_info=None):
        return -float(len(solution_str))

    def long(solution_strs, **kwargs):
        assert set(kwargs) == {"data_sources", "ground_truths", "extra_infos"}
        return [float(len(text)) for text in solution_strs]

    assert score(short, ["a", "bc"], {"answer": ["4", "5"]}).rewards.tolist() == [[-1], [-2]]
    assert score(long, ["a", "bc"], VERL).rewards.tolist() == [[1], [2]]


# --- verifiers --------------------------------------------------------------------------------------------------------


def test_functions_of_a_rubric_get_one_completion_and_what_they_name():
    def right(completion, answer, info=None, **kwargs):
        assert info is None and kwargs == {"prompt": kwargs["prompt"], "level": 2}
        return float(completion[-1]["content"] == answer)

    async def brief(prompt, completion, *, most=1):
        return float(len(completion[-1]["content"]) <= most and prompt in ("p0", "p1"))

    said = [[{"role": "assistant", "content": text}] for text in ("4", "44")]
    columns = {"answer": ["4", "5"], "level": [2, 2]}
    assert score([right, brief], said, columns).rewards.tolist() == [[1, 1], [0, 0]]
    assert score(functools.partial(brief, most=2), said, {"most": [0, 0]}).rewards.tolist() == [[1], [1]]


def test_a_column_that_a_function_of_a_rubric_lacks_is_named():
    def right(completion, answer, state):
        return 1.0

    with pytest.raises(RewardError, match=r"reward 'right' needs 'state', which is no column; there are .*answer"):
        load_rewards(right).check_columns(["answer"])


def test_a_function_of_completions_may_take_a_column_completion():
    def same(completions, completion):
        return [float(x == y) for x, y in zip(completions, completion, strict=True)]

    assert score(same, ["a", "b"], {"completion": ["a", "a"]}).rewards.tolist() == [[1], [0]]


# --- Harmony ----------------------------------------------------------------------------------------------------------


@dataclass
class Grade:
    value: float
    grader_key: str = "mine"


class LengthGrader:
    """A grader as recipes write them: set up before it is used, one sample at a time, gives a Grade."""

    def __init__(self):
        self.calls = []

    async def setup(self):
        self.calls.append("setup")

    async def close(self):
        self.calls.append("close")

    async def grade(self, sample):
        assert self.calls == ["setup"]
        assert sample.turns[0] == ("user", sample.prompt) and sample.turns[-1] == ("assistant", sample.last_content())
        await asyncio.sleep(0)
        return Grade(len(sample.last_content()) * sample.metadata.get("factor", 1.0))


def test_row_graders_are_set_up_once_and_closed():
    grader = LengthGrader()
    rewards = load_rewards([grader])
    assert rewards.names == ("LengthGrader",) and grader.calls == []
    for _ in range(2):
        assert rewards(["p", "q"], ["ab", "c"], [[1], [2]], {"factor": [2.0, 1.0]}).tolist() == [[4], [1]]
    rewards.close()
    assert grader.calls == ["setup", "close"]


def test_a_synchronous_grade_method():
    class Exact:
        name = "exact"

        def grade(self, sample):
            return float(sample.text == sample.columns["answer"])

    rewards = load_rewards([Exact()])
    assert rewards.names == ("exact",)
    assert rewards(["p", "q"], ["a", "b"], [[1], [2]], {"answer": ["a", "a"]}).tolist() == [[1], [0]]


def test_a_grade_method_of_a_batch():
    class Batch:
        async def grade(self, completions, **columns):
            return [len(completion) for completion in completions]

    assert score([Batch()], ["a", "bc"]).rewards.tolist() == [[1], [2]]


def test_a_setup_that_fails_is_named():
    class Broken:
        def setup(self):
            raise OSError("no server")

        def grade(self, sample):
            return 0.0

    with pytest.raises(RewardError, match=r"setup\(\) of reward 'Broken' raised OSError: no server"):
        score([Broken()], ["a"])


def test_a_class_that_was_not_made():
    with pytest.raises(RewardError, match="the reward LengthGrader is a class; make one"):
        Rewards([LengthGrader])


def test_a_class_named_with_options(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Fixed:\n"
        "    def __init__(self, value):\n        self.value_of_all, self.name = value, 'fixed'\n"
        "    def grade(self, sample):\n        return self.value_of_all\n"
    )
    rewards = load_rewards(f"{tmp_path}/mine.py:Fixed(value=0.25)")
    assert rewards.names == ("fixed",)
    assert rewards(["p"], ["a"], [[1]], {}).tolist() == [[0.25]]
    with pytest.raises(RewardError, match=r"missing a required argument: 'value'; write .*Fixed\(name=value, ...\)"):
        load_rewards(f"{tmp_path}/mine.py:Fixed")
    with pytest.raises(ConfigError, match="has no option 'valu'"):
        load_rewards(f"{tmp_path}/mine.py:Fixed(valu=0.25)")


# --- CombinedGrader ---------------------------------------------------------------------------------------------------


def test_combined_grader_adds_and_sets_up_children():
    children = [LengthGrader(), LengthGrader()]

    def sometimes(completions, **kwargs):
        return [None if completion == "none" else 10.0 for completion in completions]

    inner = CombinedGrader([children[1], sometimes], [1.0, 0.5], name="inner")
    outer = CombinedGrader([children[0], inner], [2.0, 1.0])
    asyncio.run(outer.setup())  # as recipes do; the run calls it for those that did not
    rewards = load_rewards(outer)
    graded = rewards.submit(["p", "q"], ["ab", "none"], [[1], [2]], {}).result()
    # 2 * 2 + (2 + 0.5 * 10), and 2 * 4 + 4.
    assert graded.rewards.tolist() == [[11.0], [12.0]]
    assert graded.logged.metrics == {
        "rewards/combined/LengthGrader": [3.0],
        "rewards/combined/inner": [5.5],
        "rewards/inner/LengthGrader": [3.0],
        "rewards/inner/sometimes": [10.0],
    }
    rewards.close()
    assert [child.calls for child in children] == [["setup", "close"]] * 2


def test_a_completion_to_which_no_child_applies():
    grader = CombinedGrader([lambda completions, **_: [None, 1.0], lambda completions, **_: [None, None]])
    np.testing.assert_array_equal(score(grader, ["a", "b"]).rewards, np.float32([[np.nan], [1.0]]))


def test_combined_functions_are_offered_what_others_are_and_told_apart():
    def first(completions, log_extra, trainer_state, row_numbers):
        log_extra(f"said {len(row_numbers)}", completions)
        return [float(trainer_state.max_steps + row) for row in row_numbers]

    def half(completions):
        return [0.5] * len(completions)

    graded = score(CombinedGrader([first, half, half]), ["a", "b"])
    assert graded.rewards[:, 0].tolist() == [1.0, 2.0] and graded.logged.columns == {"said 2": ["a", "b"]}
    assert list(graded.logged.metrics) == [f"rewards/combined/{name}" for name in ("first", "half", "half_2")]


def test_combined_grader_by_name():
    rewards = load_rewards("combined(graders=['exact_match', 'target_length(target=1)'], weights=[1.0, 0.1])")
    np.testing.assert_allclose(rewards(["p"], ["abc"], [[1]], {"answer": ["abc"]}), [[0.8]], rtol=1e-6)


@pytest.mark.parametrize(("graders", "weights"), [([], None), ([len], [1.0, 2.0]), ([len], [float("nan")])])
def test_combined_graders_that_do_not_fit(graders, weights):
    with pytest.raises(RewardError, match=re.escape(f"has {len(graders)} graders and the weights")):
        CombinedGrader(graders, weights)
