"""SFT of a base model on conversations: smol-smoltalk, made for models of up to a few hundred million parameters.

    python -m jaxrl_llm.train --config=recipes/sft:smollm2-135m

Learning rate, batch and epochs of SmolLM2 are those of its own recipe (huggingface/alignment-handbook,
recipes/smollm2). The other models have adapters, with ten times the learning rate of full training
(docs/adapters.md).

data: `HuggingFaceTB/smol-smoltalk` of the hub, splits train and test, column `messages`; nothing to prepare.

| argument | H100s | GB on each | status | published |
|---|---|---|---|---|
| smollm2-135m | 1 | 2 to 7 | planned | none of SFT by itself |
| smollm2-1.7b | 1 | 21 to 51 | planned | none of SFT by itself |
| qwen3-0.6b | 1 | 7 to 20 | planned | none |
| qwen3-1.7b | 1 | 21 to 45 | planned | none |
| qwen3-8b | 1 | 17 to 74 | planned | none |
| qwen3-8b,full | 8 | 12 to 27 | planned | none |
| llama-3.2-1b | 1 | 15 to 39 | planned | none |
| gemma-3-1b | 1 | 12 to 27 | planned | none |
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file

models = import_file(Path(__file__).with_name("_models.py"))


def get_config(arg: str = "smollm2-135m"):
    """A model of the table, as it is or with `,lora` or `,full`."""
    config, model = models.start("sft", arg)
    config.model.path = model.base
    config.data.chat_template = model.base_template
    config.data.path = "HuggingFaceTB/smol-smoltalk"
    config.data.eval_split = "test"
    config.data.max_length = 2048
    config.data.overlong = "truncate_right"
    config.algorithm.name = "sft"
    config.num_epochs = 2
    config.batch.prompts = 128
    config.optimizer.learning_rate = 1e-3 if "135m" in arg else 3e-4 if "1.7b" in arg else 1e-4
    if config.lora.rank:
        config.optimizer.learning_rate *= 10 if config.optimizer.learning_rate < 3e-4 else 1
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_ratio = 0.1
    config.eval.every = 500
    config.eval.prompts = 1024
    return config
