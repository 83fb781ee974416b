"""PPO (arXiv 1707.06347, 1909.08593) on the embedded model and task of grpo.py: a critic instead of a group.

    python -m jaxrl_llm.train --config=configs/ppo.py

One completion for each of 256 prompts; the advantage of a token is what the rewards from it on were above the critic's
expectation (GAE), the KL to the reference is subtracted token by token, and each batch is used twice. The critic starts
from the same model with a new score head, learns alone for five steps, and is saved in `runs/ppo/critic`.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/ppo"
    config.algorithm.name = "ppo"
    config.algorithm.advantage = "ppo(gamma=1.0, lam=0.95)"
    config.algorithm.kl_in_reward = True
    config.algorithm.kl = "k1"
    config.algorithm.beta = 0.01
    config.algorithm.epsilon_high = 0.2
    config.algorithm.num_iterations = 2
    config.batch.prompts *= config.rollout.group_size
    config.rollout.group_size = 1
    config.critic.learning_rate = 1e-3
    config.critic.warmup_steps = 0 if arg == "tiny" else 5
    return config
