"""On-policy distillation (arXiv 2306.13649) of a larger Qwen3 on GSM8K's problems: the reverse KL of sampled tokens.

    python -m jaxrl_llm.train --config=recipes/distill_gsm8k:qwen3-0.6b

The teacher, Qwen3-8B (of 8B: 32B), gives each sampled token its log-prob in one forward pass of the packed rows;
rewards are measured and teach nothing (docs/distillation.md). Data and rewards are those
of grpo_gsm8k.py beside it; 100 steps, four completions a prompt, and ten times its learning rate.

data: `openai/gsm8k` of the hub; nothing to prepare.

| argument | H100s | GB on each | status | published |
|---|---|---|---|---|
| qwen3-0.6b | 1 | 38 to 57 | planned | none of this size |
| qwen3-1.7b | 1 | 54 to 70 | planned | none |
| qwen3-8b,full | 8 | 25 to 39 | planned | AIME'24 74.4 % from 32B, other prompts (Qwen3, arXiv 2505.09388) |
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file

folder = Path(__file__).parent
models = import_file(folder / "_models.py")
gsm8k = import_file(folder / "grpo_gsm8k.py")


def get_config(arg: str = "qwen3-0.6b"):
    """A model of the table, as it is or with `,lora` or `,full`."""
    models.start("distill_gsm8k", arg, ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))  # refuses others
    config = gsm8k.get_config(arg)
    config.output_dir = config.output_dir.replace("grpo_gsm8k", "distill_gsm8k")
    config.teacher.path = "Qwen/Qwen3-32B" if "8b" in arg else "Qwen/Qwen3-8B"
    config.algorithm.advantage = "zero"
    config.total_steps = 100
    config.rollout.group_size = 4
    config.optimizer.learning_rate *= 10  # every token teaches
    return config
