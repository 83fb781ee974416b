"""Online DPO (arXiv 2402.04792) on the embedded model and task of grpo.py: the better of two samples is preferred.

    python -m jaxrl_llm.train --config=configs/online_dpo.py

Each prompt is completed twice, the rewards say which completion is chosen, and DPO's loss learns from the pair; prompts
whose completions score alike teach nothing. Any loss of pairs may take its place (`algorithm.loss=ipo`), and with
`rollout.group_size=8` the best is compared with the worst of eight. It starts from grpo.py beside it. Seed 0: held-out
accuracy of sampled completions 25 % -> 65 % after 60 steps, of greedy ones 74 % -> 99 %.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file


def get_config(arg: str = ""):
    """`tiny`: two steps, for a test."""
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(arg)
    config.output_dir = "runs/online_dpo"
    config.algorithm.name = "online_preference"
    config.algorithm.loss = "dpo"
    config.algorithm.beta = 1.0  # answers are short; 0.1 is usual for long ones
    config.algorithm.aggregation = "sequence"  # not read, as epsilon_high
    config.algorithm.epsilon_high = 0.2
    config.batch.prompts *= config.rollout.group_size // 2
    config.rollout.group_size = 2
    config.optimizer.learning_rate = 1e-4
    return config
