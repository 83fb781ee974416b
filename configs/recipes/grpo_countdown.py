"""GRPO (arXiv 2402.03300) on Countdown: reach a number with three or four others, each used once.

    pip install 'jaxrl_llm[puzzles]'
    python -m jaxrl_llm.train --config=recipes/grpo_countdown:qwen3-1.7b

data: made by the package reasoning-gym (arXiv 2505.24760) as the run starts; its own scorer is the reward, which gives
0.05 for an answer that is wrong and can be read.

| argument | H100s | GB on each | status | published |
|---|---|---|---|---|
| qwen3-0.6b | 1 | 26 to 57 | planned | none |
| qwen3-1.7b | 1 | 41 to 72 | planned | 0.45 -> 0.67 in 20 steps, 0.75 in 60, on its own rows (kvfrans/lmpo, README) |
| qwen3-8b | 1 | 46 to 66 | planned | none |
| qwen3-8b,full | 8 | 16 to 26 | planned | none |
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file

models = import_file(Path(__file__).with_name("_models.py"))


def get_config(arg: str = "qwen3-1.7b"):
    """A model of the table, as it is or with `,lora` or `,full`."""
    config, model = models.start("grpo_countdown", arg, ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))
    config.model.path = model.chat
    config.data.chat_template_kwargs = model.template_kwargs
    config.data.path = "task:reasoning_gym(countdown, min_numbers=3, max_numbers=4)"
    config.data.eval_split = "test"
    config.data.system_prompt = "Think step by step, then give the answer alone between <answer> and </answer>."
    config.rewards.functions = ("reasoning_gym_score",)
    config.total_steps = 100
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 256
    config.rollout.max_completion_length = 1024
    config.rollout.slots = 64 if "8b" in arg else 128  # keys and values of so many completions; the others wait
    config.algorithm.scale_rewards = "none"
    config.algorithm.aggregation = "constant"
    config.algorithm.beta = 0.0
    config.algorithm.epsilon_high = 0.28
    config.batch.prompts = 64
    config.optimizer.learning_rate = 1e-5 if config.lora.rank else 1e-6
    config.optimizer.warmup_steps = 5
    config.eval.every = 20
    config.eval.prompts, config.eval.samples = 512, 1
    return config
