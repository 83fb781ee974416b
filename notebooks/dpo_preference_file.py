# ruff: noqa: E402
# %% [markdown]
# # DPO from a preference file
#
# You have a file of pairs: a prompt, an answer that is preferred, and one that is not. DPO trains the model on it
# without sampling and without a reward model. About two minutes on two CPU cores with the small model that the package
# brings; on a GPU or TPU the same cells train a larger one.

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
import json
import random

import jax

import jaxrl_llm
from jaxrl_llm.commands.preview import preview

SMALL = jax.default_backend() == "cpu"
MODEL = "embedded:sort" if SMALL else "Qwen/Qwen2.5-0.5B-Instruct"
STEPS = int(os.environ.get("JAXRL_STEPS", "80"))
print(MODEL, "on", jax.devices()[0].device_kind, "for", STEPS, "steps")

# %% [markdown]
# ## The file
#
# One JSON object a line: `prompt`, `chosen`, `rejected`. Files of TRL, axolotl, OpenAI and Harmony are
# [read as they are](https://jaxrl-llm.github.io/jaxrl_llm/data.html). Here the chosen answer has the digits in order,
# the rejected one has them downwards, as they were, or reversed: the mistakes in what the small model was taught.


# %%
def pair(digits):
    right = "".join(sorted(digits))
    wrong = draw.choice([text for text in (right[::-1], digits, digits[::-1]) if text != right])
    if SMALL:
        return {"prompt": f"sort:{digits}=", "chosen": right, "rejected": wrong}
    ask = f"Write the digits {digits} from the smallest to the largest, nothing else."
    return {
        "prompt": [{"role": "user", "content": ask}],
        "chosen": [{"role": "assistant", "content": right}],
        "rejected": [{"role": "assistant", "content": wrong}],
    }


draw = random.Random(0)
numbers = sorted({"".join(draw.choices("0123456789", k=draw.randint(4, 8))) for _ in range(4500)})
pairs = [pair(number) for number in numbers if len(set(number)) > 1]
draw.shuffle(pairs)
for name, part in (("pairs.jsonl", pairs[:-256]), ("held_out.jsonl", pairs[-256:])):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
print(len(pairs) - 256, "pairs to train on;", Path("pairs.jsonl").read_text(encoding="utf-8").splitlines()[0])

# %% [markdown]
# ## Settings, and a look at the data
#
# The preview shows the rows as the model will see them, the learned tokens in ⟦brackets⟧. It loads a tokenizer and no
# weights.

# %%
config = jaxrl_llm.default_config()
config.model.path, config.output_dir, config.total_steps = MODEL, "runs/notebook_dpo", STEPS
config.checkpoint.resume = "never"  # training starts anew whenever it is run
config.data.path, config.data.eval_path, config.data.eval_split = "pairs.jsonl", "held_out.jsonl", "train"
config.data.max_length = 32 if SMALL else 128
config.algorithm.name, config.algorithm.loss = "preference", "dpo"
config.algorithm.beta = 3.0 if SMALL else 0.1  # answers are short; 0.1 is usual for long ones
config.batch.prompts = 64 if SMALL else 16
config.optimizer.learning_rate, config.optimizer.schedule = (5e-5 if SMALL else 1e-6), "cosine"
config.optimizer.warmup_steps, config.optimizer.b2 = min(5, STEPS), 0.99
config.eval.every, config.eval.prompts = 0, 256
config.logging.backends = ("jsonl",)
print(preview(config, rows=1))

# %% [markdown]
# ## Train
#
# A [callback](https://jaxrl-llm.github.io/jaxrl_llm/callbacks.html) shows some steps. `rewards/accuracies` is the share
# of pairs that the policy, compared with where it started, ranks right; `rewards/margins` is by how much. Watch
# `logps/chosen` too: DPO lowers both log-probs when it is pushed too far.


# %%
class Progress:
    def on_step(self, moment):
        if moment.step == 1 or moment.step % max(1, STEPS // 8) == 0:
            row = moment.metrics
            print(
                f"step {moment.step:3d}  loss {row['loss']:.3f}  right {row['rewards/accuracies']:.2f}  "
                f"margin {row['rewards/margins']:.2f}  log-prob chosen {row['logps/chosen']:.1f} "
                f"rejected {row['logps/rejected']:.1f}"
            )


result = jaxrl_llm.train(config, callbacks=[Progress()])

# %% [markdown]
# ## What happened
#
# The same numbers of held-out pairs; then what the model writes for their prompts: a sample for each, and the greedy
# answer.

# %%
before, after = result.metrics[0], result.metrics[-1]
for name in ("eval/loss", "eval/rewards/accuracies", "eval/logps/chosen", "eval/logps/rejected"):
    print(f"{name:24s} {before[name]:.2f} -> {after[name]:.2f}")


# %%
def text_of(answer):
    return answer if isinstance(answer, str) else answer[-1]["content"]


def right_share(model, temperature):
    held_out = pairs[-256:]
    asked = [row["prompt"] for row in held_out]
    written = jaxrl_llm.generate(model, asked, max_new_tokens=16, temperature=temperature)
    return sum(a.strip() == text_of(row["chosen"]) for a, row in zip(written, held_out, strict=True)) / len(held_out)


start = jaxrl_llm.load_model(MODEL)
shares = {t: (right_share(start, t), right_share(result.model, t)) for t in (1.0, 0.0)}
for temperature, (first, last) in shares.items():
    print(f"right answers at temperature {temperature}: {first:.0%} -> {last:.0%}")
if SMALL and STEPS >= 80:
    assert after["eval/rewards/accuracies"] > 0.9, after
    assert after["eval/loss"] < before["eval/loss"], (before, after)
    assert shares[1.0][1] > shares[1.0][0] + 0.1, shares

# %% [markdown]
# The model is in `runs/notebook_dpo/hf`. The same file trains IPO, SimPO, ORPO, KTO and
# [others](https://jaxrl-llm.github.io/jaxrl_llm/algorithms.html#offline-algorithms): `config.algorithm.loss`. With LoRA
# (`config.lora.rank = 16`) the reference costs no memory.
