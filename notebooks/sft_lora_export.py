# ruff: noqa: E402
# %% [markdown]
# # SFT with LoRA, exported and loaded in transformers
#
# Supervised fine-tuning of adapters on answers that you have; then the trained model as an ordinary Hugging Face
# folder, loaded by transformers, with the same logits. Two minutes on two CPU cores; on a GPU or TPU the same cells
# train a larger model. The last cells need PyTorch: `pip install torch`, where it is not there already as on Colab.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

# jaxrl_llm, if it is not installed: from this checkout or, on Colab, its repository, for the accelerator that is here.
REPOSITORY = "https://github.com/jaxrl-llm/jaxrl_llm"
if importlib.util.find_spec("jaxrl_llm") is None:
    tpu = "TPU_ACCELERATOR_TYPE" in os.environ or any(Path("/dev").glob("accel*"))
    extra = "[cuda12]" if shutil.which("nvidia-smi") else "[tpu]" if tpu else ""
    source = f"..{extra}" if Path("../pyproject.toml").is_file() else f"jaxrl_llm{extra} @ git+{REPOSITORY}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import random

import jax
import numpy as np

import jaxrl_llm

SMALL = jax.default_backend() == "cpu"
MODEL = "embedded:sort" if SMALL else "Qwen/Qwen2.5-0.5B-Instruct"
STEPS = int(os.environ.get("JAXRL_STEPS", "80"))
print(MODEL, "on", jax.devices()[0].device_kind, "for", STEPS, "steps")

# %% [markdown]
# ## Data
#
# Rows of `prompt` and `completion` (or `messages`). The small model has seen right and wrong answers to `sort:4821=`;
# these are all right.


# %%
def row(digits):
    answer = "".join(sorted(digits))
    if SMALL:
        return {"prompt": f"sort:{digits}=", "completion": answer}
    ask = f"Write the digits {digits} from the smallest to the largest, nothing else."
    return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


draw = random.Random(0)
numbers = sorted({"".join(draw.choices("0123456789", k=draw.randint(4, 8))) for _ in range(5000)})
draw.shuffle(numbers)
train_rows, test_rows = [row(n) for n in numbers[:-256]], [row(n) for n in numbers[-256:]]
print(len(train_rows), "rows, for example", train_rows[0])

# %% [markdown]
# ## Train adapters
#
# `lora.rank` is all it takes: the model itself stays as it is, and the optimizer has the adapters alone.
# `config.model.quantize = "nf4"` would keep the frozen part in four bits
# ([adapters](https://jaxrl-llm.github.io/jaxrl_llm/adapters.html)). A callback shows some steps.


# %%
class Progress:
    def on_step(self, moment):
        if moment.step == 1 or moment.step % max(1, STEPS // 8) == 0:
            row = moment.metrics
            print(f"step {moment.step:3d}  loss {row['loss']:.3f}  right tokens {row['mean_token_accuracy']:.2f}")


config = jaxrl_llm.default_config()
config.model.path, config.output_dir, config.total_steps = MODEL, "runs/notebook_sft", STEPS
config.checkpoint.resume = "never"  # this cell starts anew whenever it is run
config.algorithm.name = "sft"
config.lora.rank, config.lora.alpha = 16, 32.0
config.data.max_length = 32 if SMALL else 128
config.batch.prompts = 64 if SMALL else 16
config.optimizer.learning_rate, config.optimizer.schedule = (2e-3 if SMALL else 2e-4), "cosine"
config.optimizer.warmup_steps = min(5, STEPS)
config.eval.every, config.eval.prompts = 0, 256
config.logging.backends = ("jsonl",)
result = jaxrl_llm.train(config, train_dataset=train_rows, eval_dataset=test_rows, callbacks=[Progress()])

before, after = result.metrics[0], result.metrics[-1]
print(f"held-out loss {before['eval/loss']:.3f} -> {after['eval/loss']:.3f}")
if SMALL and STEPS >= 80:
    assert after["eval/loss"] < before["eval/loss"] - 0.1, (before, after)

# %% [markdown]
# ## What the run left
#
# `hf` has the adapters merged and loads everywhere; `adapter` is a PEFT folder with the adapters alone. Both have a
# model card.

# %%
for file in sorted([*(result.output_dir / "hf").iterdir(), *(result.output_dir / "adapter").iterdir()]):
    print(f"{file.stat().st_size / 1024:8.0f} KB  {file.relative_to(result.output_dir)}")

# %% [markdown]
# ## The same model in transformers
#
# Loaded from the folder, on the CPU in float32, and compared: the logits of a row, and what greedy decoding writes.

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = result.output_dir / "hf"
tokenizer = AutoTokenizer.from_pretrained(folder)
theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ours = jaxrl_llm.load_model(folder, dtype="float32")

# %%
prompt = test_rows[0]["prompt"] if SMALL else test_rows[0]["messages"][:1]
ids = (
    tokenizer(prompt)["input_ids"]
    if SMALL
    else tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
)
with torch.no_grad():
    logits = theirs(torch.tensor([ids])).logits[0].numpy()
difference = np.abs(logits - np.asarray(ours([ids])[0])).max()
print(f"largest difference of {logits.size} logits: {difference:.1e}")
if SMALL:
    assert difference < 1e-3

# %%
written = theirs.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
here = jaxrl_llm.generate(ours, [prompt], max_new_tokens=16, temperature=0)[0]
there = tokenizer.decode(written, skip_special_tokens=True)
print(prompt, "transformers:", there, "here:", here)
if SMALL:
    assert there == here
