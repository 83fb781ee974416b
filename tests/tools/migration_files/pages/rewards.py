"""Functions of axolotl's page on reinforcement learning."""

# rewards.py
import random


def rand_reward_func(completions, **kwargs) -> list[float]:
    return [random.uniform(0, 1) for _ in completions]


def oai_gsm8k_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip().replace(",", "")
        return {
            "prompt": [
                {"role": "user", "content": example["question"]},
            ],
            "answer": label,
        }

    return transform_fn, {"remove_columns": ["question"]}


# rewards.py
def format_reward(completions, **kwargs) -> list[float]:
    return [1.0 if len(c) > 10 else 0.0 for c in completions]


def correctness_reward(completions, answers, **kwargs) -> list[float]:
    rewards = []
    for completion, answer in zip(completions, answers, strict=True):
        # Your scoring logic here
        score = float(answer in str(completion))
        rewards.append(score)
    return rewards
