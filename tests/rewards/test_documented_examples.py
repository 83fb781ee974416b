"""Reward functions as the documentation of TRL, axolotl and verl shows them run here unchanged."""

import random
import re

import numpy as np
import pytest

from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.rewards.signatures import RewardError


def grade(specs, prompts, completions, columns):
    return load_rewards(specs)(prompts, completions, [[1]] * len(prompts), columns)


# --- TRL --------------------------------------------------------------------------------------------------------------


def test_length_rewards():
    def reward_len(completions, **kwargs):
        return [-abs(20 - len(completion)) for completion in completions]

    def reward_num_unique_chars(completions, **kwargs):
        return [len(set(c)) for c in completions]

    def reward_func(completions, **kwargs):
        """Reward function that gives higher scores to longer completions."""
        return [float(len(completion)) for completion in completions]

    prompts = ["The sky is", "The sun is"]
    completions = [" blue.", " in the sky."]
    rewards = load_rewards([reward_len, reward_num_unique_chars, reward_func])
    assert rewards.names == ("reward_len", "reward_num_unique_chars", "reward_func")
    assert grade(rewards.functions, prompts, completions, {}).tolist() == [[-14, 6, 6], [-8, 10, 12]]


def test_format_reward_on_messages():
    def format_reward_func(completions, **kwargs):
        """Reward function that checks if the completion has a specific format."""
        pattern = r"^<think>.*?</think><answer>.*?</answer>$"
        completion_contents = [completion[0]["content"] for completion in completions]
        matches = [re.match(pattern, content) for content in completion_contents]
        return [1.0 if match else 0.0 for match in matches]

    prompts = [
        [{"role": "assistant", "content": "What is the result of (1 + 2) * 4?"}],
        [{"role": "assistant", "content": "What is the result of (3 + 1) * 2?"}],
    ]
    completions = [
        [
            {
                "role": "assistant",
                "content": "<think>The sum of 1 and 2 is 3, which we multiply by 4 to get 12.</think>"
                "<answer>(1 + 2) * 4 = 12</answer>",
            }
        ],
        [
            {
                "role": "assistant",
                "content": "The sum of 3 and 1 is 4, which we multiply by 2 to get 8. So (3 + 1) * 2 = 8.",
            }
        ],
    ]
    assert grade(format_reward_func, prompts, completions, {}).tolist() == [[1.0], [0.0]]


def test_accuracy_reward_with_a_ground_truth_column():
    def reward_func(completions, ground_truth, **kwargs):
        # Regular expression to capture content inside \boxed{}
        matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in matches]
        # Reward 1 if the content is the same as the ground truth, 0 otherwise
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]  # noqa: B905

    prompts = ["Problem: Solve the equation $2x + 3 = 7$. Solution:", "Problem: Solve the equation $3x - 5 = 10$."]
    completions = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
    ground_truth = ["2", "5"]
    assert grade(reward_func, prompts, completions, {"ground_truth": ground_truth}).tolist() == [[1.0], [0.0]]


@pytest.fixture
def multi_task():
    def check_math_solution(prompt, completion):
        return completion == "4"

    def test_code_solution(prompt, completion):
        return "return" in completion

    def math_reward_func(prompts, completions, task, **kwargs):
        rewards = []
        for prompt, completion, t in zip(prompts, completions, task):  # noqa: B905
            if t == "math":
                # Calculate math-specific reward
                correct = check_math_solution(prompt, completion)
                reward = 1.0 if correct else -1.0
                rewards.append(reward)
            else:
                # Return None for non-math tasks
                rewards.append(None)
        return rewards

    def coding_reward_func(prompts, completions, task, **kwargs):
        rewards = []
        for prompt, completion, t in zip(prompts, completions, task):  # noqa: B905
            if t == "coding":
                # Calculate coding-specific reward
                works = test_code_solution(prompt, completion)
                reward = 1.0 if works else -1.0
                rewards.append(reward)
            else:
                # Return None for non-coding tasks
                rewards.append(None)
        return rewards

    return [math_reward_func, coding_reward_func]


PROMPTS = [
    "What is 2+2?",
    "Write a function that returns the sum of two numbers.",
    "What is 3*4?",
    "Write a function that returns the product of two numbers.",
]
COMPLETIONS = ["4", "return a + b", "11", "pass"]


def test_multi_task_rewards(multi_task):
    """The page's own data says "code" where its reward tests for "coding": such rows have no reward at all."""
    tasks = ["math", "coding", "math", "code"]
    rewards = grade(multi_task, PROMPTS, COMPLETIONS, {"task": tasks})
    nan = np.nan
    np.testing.assert_array_equal(rewards, np.float32([[1, nan], [nan, 1], [-1, nan], [nan, nan]]))


# --- axolotl ----------------------------------------------------------------------------------------------------------

REWARDS_FILE = """
import random

def rand_reward_func(completions, **kwargs) -> list[float]:
    return [random.uniform(0, 1) for _ in completions]

def oai_gsm8k_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip().replace(",", "")
        return {
            "prompt": [{"role": "user", "content": example["question"]},],
            "answer": label,
        }
    return transform_fn, {"remove_columns": ["question"]}

def format_reward(completions, **kwargs) -> list[float]:
    return [1.0 if len(c) > 10 else 0.0 for c in completions]

def correctness_reward(completions, answers, **kwargs) -> list[float]:
    rewards = []
    for completion, answer in zip(completions, answers):
        # Your scoring logic here
        rewards.append(score)
    return rewards
"""

MATH_FILE = '''
import re

def math_reward(prompts, completions, answers, **kwargs):
    """Reward function that checks mathematical correctness"""
    rewards = []

    for completion, correct_answer in zip(completions, answers):
        # Extract predicted answer
        match = re.search(r"FINAL ANSWER:\\s*(.+)", completion)
        predicted = match.group(1).strip() if match else ""

        # Compare with correct answer
        reward = 1.0 if predicted == str(correct_answer) else 0.0
        rewards.append(reward)

    return rewards
'''


@pytest.fixture
def axolotl(tmp_path, monkeypatch):
    (tmp_path / "axolotl_rewards.py").write_text(REWARDS_FILE)
    (tmp_path / "axolotl_math_env.py").write_text(MATH_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_axolotl_names_by_file_and_function(axolotl):
    random.seed(0)
    by_name = grade("axolotl_rewards.rand_reward_func", ["p"] * 3, list("abc"), {})
    random.seed(0)
    by_file = grade("axolotl_rewards.py:rand_reward_func", ["p"] * 3, list("abc"), {})
    random.seed(0)
    np.testing.assert_array_equal(by_name[:, 0], np.float32([random.uniform(0, 1) for _ in range(3)]))
    np.testing.assert_array_equal(by_name, by_file)


def test_axolotl_math_reward(axolotl):
    completions = ["2 + 2\nFINAL ANSWER: 4", "FINAL ANSWER: 5", "4"]
    rewards = grade(["axolotl_math_env.math_reward"], ["p"] * 3, completions, {"answers": [4, 4, 4]})
    assert rewards.tolist() == [[1.0], [0.0], [0.0]]


def test_axolotl_arguments_named_by_the_plural_of_a_column(axolotl):
    """The page's rewards ask for `answers`, and the rows that its transforms make have `answer`."""
    completions = ["FINAL ANSWER: 4", "FINAL ANSWER: 5"]
    rewards = grade("axolotl_math_env.math_reward", ["p"] * 2, completions, {"answer": ["4", "4"]})
    assert rewards.tolist() == [[1.0], [0.0]]
    with pytest.raises(RewardError, match=r"needs 'answers', which is neither a column .*; the closest is answered"):
        grade("axolotl_rewards.correctness_reward", ["p"], ["FINAL ANSWER: 4"], {"answered": ["4"]})


def test_axolotl_placeholder_fails_by_name_and_row(axolotl):
    specs = ["axolotl_rewards.format_reward", "axolotl_rewards.correctness_reward"]
    assert grade(specs[0], ["p"] * 2, ["a long completion", "short"], {}).tolist() == [[1.0], [0.0]]
    with pytest.raises(RewardError, match=r"reward 'correctness_reward' raised NameError: name 'score' .*, on row 0"):
        grade(specs, ["p"], ["a long completion"], {"answers": ["4"]})


# --- verl -------------------------------------------------------------------------------------------------------------


def test_verl_custom_reward_function_path_and_name(tmp_path):
    """`custom_reward_function.path` names a file, and `name` a function of it that is `compute_score` by default."""
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if solution_str.strip() == ground_truth else 0.0\n"
        "def other_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str), 'source': data_source}\n"
    )
    columns = {"data_source": ["gsm8k"] * 2, "reward_model": [{"style": "rule", "ground_truth": "4"}] * 2}
    specs = [str(path), f"{path}:compute_score", f"{path}:other_score"]
    assert grade(specs, ["p"] * 2, ["4", " 5"], columns).tolist() == [[1, 1, 1], [0, 0, 2]]
