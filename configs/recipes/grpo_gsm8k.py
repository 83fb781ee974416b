"""GRPO (arXiv 2402.03300) on GSM8K (arXiv 2110.14168): grade-school problems, reward 1 for the right last number.

    python -m jaxrl_llm.train --config=recipes/grpo_gsm8k:qwen3-0.6b

Without a reference (beta 0), with the upper clip of DAPO (arXiv 2503.14476) and the constant normalisation of Dr. GRPO
(arXiv 2503.20783).

data: `openai/gsm8k` of the hub, 7,473 problems and 1,319 of the test; nothing to prepare. Evaluations answer all of the
test twice, greedily and by a sample.

| argument | H100s | GB on each | status | published |
|---|---|---|---|---|
| smollm2-135m | 1 | 4 to 7 | planned | none |
| smollm2-1.7b | 1 | 45 to 72 | planned | none |
| qwen3-0.6b | 1 | 21 to 36 | planned | 31.1 % -> 57.1 % in 100 steps, from the base model (tt-metal PR 54390) |
| qwen3-1.7b | 1 | 36 to 52 | planned | reward 0.808 after 100 steps (AI-Hypercomputer/maxtext PR 4015) |
| qwen3-8b | 1 | 49 to 70 | planned | none |
| qwen3-8b,full | 8 | 16 to 25 | planned | none |
| llama-3.2-1b | 1 | 21 to 33 | planned | none |
| gemma-3-1b | 1 | 17 to 24 | planned | none |
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file

models = import_file(Path(__file__).with_name("_models.py"))

QUESTION = "{}\nThink step by step, and end with the answer: a number after ####."


def problem(row: dict) -> dict:
    """A row of GSM8K as a prompt and the number that answers it."""
    return {
        "prompt": [{"role": "user", "content": QUESTION.format(row["question"])}],
        "answer": row["answer"].rpartition("####")[2].strip(),
    }


def get_config(arg: str = "qwen3-0.6b"):
    """A model of the table, as it is or with `,lora` or `,full`."""
    config, model = models.start("grpo_gsm8k", arg)
    config.model.path = model.chat
    config.data.chat_template_kwargs = model.template_kwargs
    config.data.path = "openai/gsm8k"
    config.data.name = "main"
    config.data.eval_split = "test"
    config.data.format = f"{Path(__file__)}:problem"
    config.data.overlong = "filter"
    # "judge(path='Qwen/Qwen3-4B', parameters={'max_tokens': 256})" beside it: a model in this process reads the steps.
    config.rewards.functions = ("numeric_answer",)
    config.total_steps = 200
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 512
    config.rollout.max_completion_length = 512
    config.rollout.slots = 128  # keys and values of so many completions; the others wait
    config.algorithm.scale_rewards = "none"
    config.algorithm.aggregation = "constant"
    config.algorithm.beta = 0.0
    config.algorithm.epsilon_high = 0.28
    config.batch.prompts = 64
    config.optimizer.learning_rate = 1e-5 if config.lora.rank else 1e-6
    config.optimizer.warmup_steps = 5
    config.eval.every = 20
    config.eval.prompts, config.eval.samples = 1319, 1
    return config
