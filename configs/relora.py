"""ReLoRA (arXiv 2307.05695) on the embedded model: adapters that are merged and begin anew, stage by stage.

    python -m jaxrl_llm stages --stages=configs/relora.py --output_dir=runs/relora

Each stage trains adapters of rank 4 on the merged model of the one before, with new moments and a warm-up of its own.
Together they change the matrices by a higher rank than any of them has, with the memory of one. Interrupted, the same
command goes on.
"""

import math
from pathlib import Path

from jaxrl_llm.config.resolve import import_file

STAGES = 4


def get_stages(folder: str, arg: str = ""):
    """The configurations by stage. `tiny`: two of two steps, for a test."""
    stages, count = {}, 2 if arg == "tiny" else STAGES
    for number in range(count):
        config = import_file(Path(__file__).with_name("sft.py")).get_config(arg)
        config.seed = number  # other adapters, and rows in another order
        config.total_steps = min(config.total_steps, 25)
        config.lora.rank = 4
        config.optimizer.learning_rate = 1e-3 * (1 + math.cos(math.pi * number / count)) / 2  # a cosine over all stages
        config.optimizer.schedule = "constant"
        config.optimizer.min_lr_ratio = 0.0
        config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, 5)
        if number:
            config.model.path = f"{folder}/merge_{number}/hf"
        stages[f"merge_{number + 1}"] = config
    return stages
