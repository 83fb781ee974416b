"""Self-play (SPIRAL, arXiv 2506.24119) of the embedded model: both players of a game, each against its own baseline.

    pip install "jaxrl_llm[serve]" openai
    python -m jaxrl_llm.train --config=configs/self_play.py

The game is agents/taking_game.py beside this file; the model has never seen it. Accuracy is the share of games in which
no player gave a win away. See docs/agents.md. It starts from grpo.py.

2 CPU cores, seed 0: of the moves that can keep a win, 42 % do in steps 1 to 3, and 96 % in steps 31 to 35. Baselines
are then 0.57 for who begins and -0.51 for the other: of five openings, one is lost.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    here = Path(__file__)
    config = import_file(here.with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/self_play"
    config.total_steps = min(config.total_steps, 100)
    config.algorithm.advantage = "rae(decay=0.95)"
    config.algorithm.beta = 0.0
    config.algorithm.entropy_coef = 0.05  # without it both soon play the first move that was legal
    config.environment.agent = f"{here.parent / 'agents' / 'taking_game.py'}:run"
    config.environment.max_turns = 6
    config.environment.agent_branches = 6
    config.environment.workers = 32
    config.rewards.functions = ("environment(name='optimal')",)
    config.rollout.group_size = 1
    config.rollout.max_completion_length = 72
    config.batch.prompts = 8 if arg == "tiny" else 64
    config.eval.prompts = 8 if arg == "tiny" else 128
    return config
