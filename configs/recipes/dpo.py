"""DPO (arXiv 2305.18290) of an instruction-tuned model on UltraFeedback (arXiv 2310.01377).

    python -m jaxrl_llm.train --config=recipes/dpo:smollm2-135m

Settings are those of SmolLM2's own recipe (huggingface/alignment-handbook, recipes/smollm2): beta 0.5, 128 pairs a
step, learning rate 1e-6, which adapters have tenfold. The reference scores the data once and is freed.

data: `HuggingFaceH4/ultrafeedback_binarized` of the hub, splits train_prefs and test_prefs; nothing to prepare.

| argument | H100s | GB on each | status | published |
|---|---|---|---|---|
| smollm2-135m | 1 | 2 to 7 | planned | loss 0.674, accuracy 0.615, margin 0.269 (model card of SmolLM2-135M-Instruct) |
| smollm2-1.7b | 1 | 21 to 41 | planned | loss 0.588, accuracy 0.675, margin 0.591 (model card of its DPO model) |
| qwen3-0.6b | 1 | 7 to 21 | planned | none |
| qwen3-1.7b | 1 | 21 to 45 | planned | none |
| qwen3-8b | 1 | 17 to 62 | planned | none |
| qwen3-8b,full | 8 | 12 to 26 | planned | none |
| llama-3.2-1b | 1 | 15 to 33 | planned | none |
| gemma-3-1b | 1 | 12 to 24 | planned | none |

The published numbers start from models before their DPO, which are not on the hub: those here have seen these pairs.
"""

from pathlib import Path

from jaxrl_llm.config.resolve import import_file

models = import_file(Path(__file__).with_name("_models.py"))


def get_config(arg: str = "smollm2-135m"):
    """A model of the table, as it is or with `,lora` or `,full`."""
    config, model = models.start("dpo", arg)
    config.model.path = model.chat
    config.data.chat_template_kwargs = model.template_kwargs
    config.data.path = "HuggingFaceH4/ultrafeedback_binarized"
    config.data.split, config.data.eval_split = "train_prefs", "test_prefs"
    config.data.max_length = 1024
    config.data.overlong = "filter"
    config.data.precompute_reference = True
    config.algorithm.name = "preference"
    config.algorithm.loss = "dpo"
    config.algorithm.beta = 0.5
    config.num_epochs = 2
    config.batch.prompts = 128
    config.optimizer.learning_rate = 1e-5 if config.lora.rank else 1e-6
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_ratio = 0.1
    config.eval.every = 100
    config.eval.prompts = 2000
    return config
