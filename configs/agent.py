"""GRPO of an agent: a program calls the policy through OpenAI's API, and its calls are learned from.

    pip install "jaxrl_llm[serve]" openai
    python -m jaxrl_llm.train --config=configs/agent.py

The agent is agents/two_questions.py beside this file. See docs/agents.md. It starts from grpo.py.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    here = Path(__file__)
    config = import_file(here.with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/agent"
    config.total_steps = min(config.total_steps, 220)
    config.environment.agent = f"{here.parent / 'agents' / 'two_questions.py'}:run"
    config.environment.max_turns = 2
    config.environment.workers = 64
    config.rewards.functions = ("environment",)
    config.rollout.max_completion_length = 20
    config.eval.prompts = 8 if arg == "tiny" else 128
    return config
