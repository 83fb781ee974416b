"""Reinforcement learning from preferences in three stages on the embedded model (arXiv 2203.02155):

    python -m jaxrl_llm stages --stages=configs/rlhf.py --output_dir=runs/rlhf

`sft` learns from demonstrations, `reward_model` from pairs of answers, starting from the former; `ppo` trains the
former with the scores of the latter, which is also what its critic starts from. Nothing after the demonstrations sees
a right answer: the exact match is measured, with weight 0. Interrupted, the same command goes on.

2 CPU cores, seed 0: the reward model ranks all held-out pairs right, and 100 steps of PPO take held-out accuracy from
0.29 to 0.81 (greedy: 0.80 to 0.97). With a tenth of beta the reward rises further and accuracy does not: the policy
finds wrong answers that the reward model likes.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_stages(folder: str, arg: str = ""):
    """The configurations by stage. `tiny`: two steps each, for a test."""
    sft, reward_model, ppo = (_config(name, arg) for name in ("sft", "reward_model", "ppo"))
    sft.total_steps = min(sft.total_steps, 60)
    reward_model.model.path = f"{folder}/sft/hf"
    ppo.model.path = f"{folder}/sft/hf"
    ppo.critic.path = f"{folder}/reward_model/hf"
    ppo.rewards.functions = ("exact_match", f"model:{folder}/reward_model/hf(add_eos=True)")
    ppo.rewards.weights = (0.0, 1.0)
    ppo.algorithm.beta = 0.5
    ppo.total_steps = min(ppo.total_steps, 100)
    return {"sft": sft, "reward_model": reward_model, "ppo": ppo}


def _config(name: str, arg: str):
    return import_file(Path(__file__).with_name(f"{name}.py")).get_config(arg)
