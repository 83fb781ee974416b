"""GiGPO (arXiv 2505.10978) on a game of ten turns: turns are compared with those that answered the same state.

    python -m jaxrl_llm.train --config=configs/gigpo.py:start
    python -m jaxrl_llm.train --config=configs/gigpo.py

The first command makes the model that the second one starts from, `runs/gigpo_start/hf`: it knows the game, and two in
three of its answers are wrong. Each turn asks for the smallest of four digits (`4821=`, `1`) and earns a tenth. All
episodes of a prompt meet the same questions, so an answer is compared with the answers to its own question, where GRPO
compares the sum over the ten turns. No answer changes a later question: gamma is 0. See docs/algorithms.md.

2 CPU cores: about 45 and 30 seconds. Held-out reward, the share of right answers, rises from 0.36 to 0.96 in 640
episodes (seed 0). It is first 0.9 after 256, with GRPO (`group`) after 384, medians of five seeds (docs/results.md).
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`start`: the model that it starts from. `tiny`: two steps from the embedded model, for a test."""
    if arg == "start":
        config = import_file(Path(__file__).with_name("sft_tiny.py")).get_config()
        config.output_dir = "runs/gigpo_start"
        config.model.random_init = False
        config.data.path = "task:smallest_demos"
        config.data.eval_path = "task:smallest_demos"
        config.rollout.max_prompt_length = 72
        config.batch.prompts = 64
        config.total_steps = 300
        config.eval.every = 0
        return config
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/gigpo"
    config.model.path = "embedded:sort" if arg == "tiny" else "runs/gigpo_start/hf"
    config.data.path = "task:smallest"
    config.total_steps = min(config.total_steps, 80)
    config.algorithm.advantage = "gigpo(gamma=0.0)"
    config.algorithm.beta = 0.0
    config.environment.name = "smallest_of_each"
    config.environment.max_turns = 10
    config.rewards.functions = ("environment",)
    config.rollout.max_prompt_length = 8
    config.rollout.max_completion_length = 72
    config.batch.prompts = 2 if arg == "tiny" else 1  # many episodes a step average out the noise of other turns
    config.optimizer.schedule, config.optimizer.min_lr_ratio = "constant", 0.0
    config.eval.every = 4
    config.eval.prompts, config.eval.samples = 8 if arg == "tiny" else 64, 2
    return config
