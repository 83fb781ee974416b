import math

import pytest

from jaxrl_llm.rewards import functions as f
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.rewards.signatures import RewardError


def messages(text):
    return [{"role": "assistant", "content": text}]


def test_exact_match():
    completions = ["12", " 12\n", "123", "", messages("12")]
    assert f.exact_match(completions=completions, answer=["12"] * 5) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert f.exact_match(completions=["12", "12"], answer=[12, None]) == [1.0, None]
    # A column of integers with a fraction among them is one of floats.
    assert f.exact_match(completions=["12", "12.0", "12", "1"], answer=[12.0, 12.0, 12.5, 10.0]) == [1.0, 1.0, 0.0, 0.0]


def test_exact_match_reads_the_last_message():
    turns = [{"role": "assistant", "content": "no"}, {"role": "tool", "content": "x"}, *messages("yes")]
    assert f.exact_match(completions=[turns], answer=["yes"]) == [1.0]


def test_only_agents_name_rewards():
    named = [{"right": 1.0}, {}]
    assert f.environment([1.5, None], named) == [1.5, None]
    assert f.environment([1.5, None], named, name="right") == [1.0, None]
    with pytest.warns(UserWarning, match=r"environment\(name='rigth'\): no agent .*; they gave right"):
        assert f.environment([1.0, None], [{"right": 1.0}, {}], name="rigth") == [None, None]
    with pytest.raises(RewardError, match=r"environment\(name='right'\): agents name rewards"):
        f.environment([1.5, None], name="right")


def test_target_length():
    assert f.target_length(completions=["a" * 20, "a" * 5, "a" * 30]) == [0.0, -15.0, -10.0]
    assert f.target_length(completions=["abc"], target=4) == [-1.0]


THOUGHTS = [
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "<think>a</think>b",
    "<think>a<think>b</think>c",
    "say <think>a</think>",
    "",
    "first\n<think>a</think>b",
    "<think></think>",
]


def test_think_format():
    assert f.think_format(completions=THOUGHTS) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert f.think_format(completions=[messages(text) for text in THOUGHTS]) == f.think_format(completions=THOUGHTS)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"The solution is \boxed{2}.", "2", 1.0),
        (r"The solution is \boxed{6}.", "5", 0.0),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0),
        (r"first \boxed{1}, then \boxed{2}", "2", 1.0),
        (r"first \boxed{1}, then \boxed{2}", "1", 0.0),
        (r"\boxed{1} and \boxed{2", "1", 1.0),
        (r"\boxed{ 1,000 }", "1000.0", 1.0),
        (r"\boxed{0.50}", ".5", 1.0),
        (r"\boxed{-3}", -3, 1.0),
        (r"\boxed{\$12}", r"\$ 12", 1.0),
        # A pair is not the number twelve.
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{1,2}", "1, 2", 1.0),
        (r"\boxed{x + 1}", r"so \boxed{x+1}", 1.0),
        ("2", "2", 0.0),
        (r"\boxed{}", "", 0.0),
        (r"\boxed{2}", None, None),
    ],
)
def test_boxed_accuracy(completion, answer, reward):
    assert f.boxed_accuracy(completions=[completion, messages(completion)], answer=[answer] * 2) == [reward] * 2


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so 5\n#### 5", "Natalia sold 5\n#### 5", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### $7.50", "7.5", 1.0),
        ("#### 5. Done", "5", 1.0),
        ("#### 3 wait #### 4", "#### 4", 1.0),
        ("#### -4", "-4", 1.0),
        ("#### 5", "6", 0.0),
        ("The answer is 5", "5", 0.0),
        ("####", "5", 0.0),
        ("#### 5", None, None),
    ],
)
def test_gsm8k_accuracy(completion, answer, reward):
    assert f.gsm8k_accuracy(completions=[completion], answer=[answer]) == [reward]


def test_cosine_scaled():
    right, wrong = r"\boxed{1}", r"\boxed{2}"

    def reward(text, tokens):
        return f.cosine_scaled([text], ["1"], [[0] * tokens], max_length=100)[0]

    # At a quarter of the length: 0.5 + 0.25 * (1 + sqrt(1/2)).
    assert reward(right, 25) == pytest.approx(0.5 + 0.25 * (1 + math.sqrt(0.5)))
    assert reward(right, 25) == pytest.approx(0.92678, abs=1e-5)
    assert reward(right, 75) == pytest.approx(0.57322, abs=1e-5)
    assert reward(right, 50) == pytest.approx(0.75)
    assert reward(wrong, 50) == pytest.approx(-0.75)
    assert [reward(right, 0), reward(right, 100), reward(right, 250)] == pytest.approx([1.0, 0.5, 0.5])
    assert [reward(wrong, 0), reward(wrong, 100), reward(wrong, 250)] == pytest.approx([-1.0, -0.5, -0.5])
    assert f.cosine_scaled([right], [None], [[0]], max_length=100) == [None]


def test_repetition_penalty():
    assert f.repetition_penalty(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]], ngram_size=2) == [0.0, -0.75]
    assert f.repetition_penalty(completion_ids=[[], [1, 1]]) == [0.0, 0.0]
    assert f.repetition_penalty(completion_ids=[[1, 1, 1, 1]], max_penalty=-2.0) == [-1.0]
    with pytest.raises(RewardError, match=r"max_penalty is 1.0"):
        f.repetition_penalty(completion_ids=[[1]], max_penalty=1.0)


def test_soft_overlong_counts_tokens():
    ids = [[0] * count for count in (0, 80, 81, 90, 100, 101)]
    assert f.soft_overlong(completion_ids=ids, max_length=100, cache=20) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]
    assert f.soft_overlong(completion_ids=[[0] * 100, [0] * 101], max_length=100, cache=0) == [0.0, -1.0]


def test_parity_with_trl():
    rewards = pytest.importorskip("trl.rewards")
    conversations = [messages(text) for text in THOUGHTS if text != "<think></think>"]  # theirs takes no thought too
    assert f.think_format(completions=conversations) == rewards.think_format_reward(conversations)

    ids = [[7] * count for count in range(0, 60, 7)] + [list(range(9)), [1, 2, 1, 2, 1, 2, 3]]
    ours = f.soft_overlong(completion_ids=ids, max_length=40, cache=15)
    assert ours == rewards.get_soft_overlong_punishment(40, 15)(ids)
    for size in (1, 2, 3, 5):
        ours = f.repetition_penalty(completion_ids=ids, ngram_size=size, max_penalty=-0.5)
        assert ours == pytest.approx(rewards.get_repetition_penalty_reward(size, -0.5)(ids))


def test_cosine_parity_with_trl():
    rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    completions = [messages(r"\boxed{\frac{1}{3}}"), messages(r"\boxed{\frac{1}{2}}")] * 4
    ids = [[1] * (20 * index) for index in range(8)]
    answer = [r"\frac{1}{3}"] * 8
    theirs = rewards.get_cosine_scaled_reward(max_len=100)(completions, answer, ids)
    assert f.cosine_scaled(completions, answer, ids, max_length=100) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("soft_overlong(max_length=4, cache=10)", "cache is 10; it is from 0 to max_length, which is 4"),
        ("cosine_scaled(max_length=0)", "max_length is 0"),
        ("repetition_penalty(ngram_size=0)", "ngram_size is 0"),
        ("length_range(minimum=5, maximum=2)", "minimum is 5, above maximum"),
    ],
)
def test_options_out_of_their_range(spec, message):
    with pytest.raises(RewardError, match=message):
        load_rewards(spec)(["p"], ["a"], [[1]], {"answer": ["a"]})


def test_a_column_is_no_option_of_a_built_in_reward():
    """Whatever it is called: `name`, `target` or `after` are common ones."""
    columns = {"environment_reward": [1.5], "name": ["Ann"], "target": [3], "answer": ["5"], "tolerance": ["x"]}
    rewards = load_rewards(["environment", "target_length", "numeric_answer", "target_length(target=1)"])
    assert rewards(["p"], ["5"], [[1]], columns).tolist() == [[1.5, -19.0, 1.0, 0.0]]

    def wanted(completions, *, target, **columns):  # of a user's function it is an argument
        return target

    assert load_rewards(wanted)(["p"], ["5"], [[1]], columns).tolist() == [[3.0]]
    schemas = {"schema": [{"type": "integer"}, '{"type": "string"}', None]}
    got = load_rewards(["json_schema", "json_schema(schema={'type': 'integer'})"])(
        ["p"] * 3, ["3"] * 3, [[1]] * 3, schemas
    )
    assert got[:2].tolist() == [[1, 1], [0, 1]] and math.isnan(got[2, 0])
    with pytest.raises(RewardError, match=r"the schema '\{' is no JSON"):
        load_rewards("json_schema")(["p"], ["3"], [[1]], {"schema": ["{"]})
