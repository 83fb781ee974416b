"""GRPO on GSM8K with asynchronous rollouts, on devices that only sample where there are several.

    python -m jaxrl_llm.train --config=recipes/async_gsm8k:qwen3-8b,full

With `qwen3-8b,full` half of eight devices trains and the other half samples; otherwise one device does both, and only
grading overlaps with training. Batches are sampled by the policy of one update before, and get each new policy while
they are sampled (docs/asynchronous.md). The ratio of a token to the policy that sampled it is cut at 2. Everything else
is as in grpo_gsm8k.py beside it.

data: `openai/gsm8k` of the hub; nothing to prepare.

| argument | H100s | GB on each | status | published |
|---|---|---|---|---|
| qwen3-0.6b | 1 | 21 to 36 | planned | none |
| qwen3-1.7b | 1 | 36 to 52 | planned | none |
| qwen3-8b,full | 8 | 25 to 49 | planned | 2.3 to 2.7 times the speed in turns, other data (verl, fully asynchronous) |
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file

folder = Path(__file__).parent
models = import_file(folder / "_models.py")
gsm8k = import_file(folder / "grpo_gsm8k.py")


def get_config(arg: str = "qwen3-8b,full"):
    """A model of the table, as it is or with `,lora` or `,full`."""
    models.start("async_gsm8k", arg, ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))  # refuses others
    config = gsm8k.get_config(arg)
    config.output_dir = config.output_dir.replace("grpo_gsm8k", "async_gsm8k")
    config.rollout.staleness = 1
    config.rollout.update_in_flight = True
    config.algorithm.importance_correction = "token_truncate"
    config.algorithm.importance_max = 2.0
    if config.mesh.fsdp == -1:
        config.rollout.devices, config.rollout.mesh = 4, "tensor=4"
    return config
