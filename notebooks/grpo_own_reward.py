# ruff: noqa: E402
# %% [markdown]
# # GRPO with a reward of your own
#
# The package brings a small model (0.37 M parameters) that has seen demonstrations of mixed quality: asked
# `sort:4821=` it sorts upwards, sorts downwards, copies, or reverses. Here you write the reward that says which of
# these is wanted: *downwards*. Two minutes on two CPU cores; on a GPU or TPU the same cells train a larger model.

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

import jaxrl_llm

SMALL = jax.default_backend() == "cpu"
MODEL = "embedded:sort" if SMALL else "Qwen/Qwen2.5-0.5B-Instruct"
STEPS = int(os.environ.get("JAXRL_STEPS", "150"))
print(MODEL, "on", jax.devices()[0].device_kind, "for", STEPS, "steps")

# %% [markdown]
# ## Prompts
#
# Rows are dictionaries. `prompt` is what the model reads: text, or a list of messages for a chat model. Every other
# column is handed to the reward by its name.


# %%
def ask(digits):
    if SMALL:
        return f"sort:{digits}="
    return [{"role": "user", "content": f"Write the digits {digits} from the largest to the smallest, nothing else."}]


draw = random.Random(0)
numbers = sorted({"".join(draw.choices("0123456789", k=draw.randint(4, 6))) for _ in range(2100)})
draw.shuffle(numbers)
rows = [{"prompt": ask(number), "digits": number} for number in numbers]
train_rows, test_rows = rows[:-128], rows[-128:]
print(len(train_rows), "to train on,", len(test_rows), "held out, for example", test_rows[0])

# %% [markdown]
# ## The reward
#
# One number for each completion, here between 0 and 1: the share of the places that are right. Partial credit makes the
# completions of a prompt differ, and differences within a prompt's group are all that GRPO learns from.


# %%
def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def downwards(completions, digits, **kwargs):
    scores = []
    for completion, given in zip(completions, digits, strict=True):
        answer, wanted = text_of(completion).strip(), "".join(sorted(given, reverse=True))
        right = sum(a == b for a, b in zip(answer, wanted, strict=False))
        scores.append(right / max(len(answer), len(wanted)))
    return scores


assert downwards(["8421", "1248", ""], ["4821"] * 3) == [1.0, 0.0, 0.0]

# %% [markdown]
# ## Train
#
# `eval.every = 0` measures the held-out prompts before the first step and after the last. A completion counts as
# correct when its reward is 1. A [callback](https://jaxrl-llm.github.io/jaxrl_llm/callbacks.html) shows some steps.
# The first takes longest, as its programs are compiled.


# %%
class Progress:
    def on_step(self, moment):
        if moment.step == 1 or moment.step % max(1, STEPS // 10) == 0:
            row, bar = moment.metrics, "#" * round(40 * moment.metrics["reward"])
            print(f"step {moment.step:3d}  reward {row['reward']:.2f} {bar:40s} kl {row['kl']:.3f}")


config = jaxrl_llm.default_config()
config.model.path, config.output_dir, config.total_steps = MODEL, "runs/notebook_grpo", STEPS
config.checkpoint.resume = "never"  # this cell starts anew whenever it is run
config.batch.prompts, config.rollout.group_size = 32, 8
config.rollout.max_prompt_length, config.rollout.max_completion_length = (16, 10) if SMALL else (64, 16)
config.algorithm.beta, config.algorithm.aggregation = 0.01, "token"
config.optimizer.learning_rate, config.optimizer.schedule = (5e-4 if SMALL else 2e-6), "cosine"
config.optimizer.warmup_steps, config.optimizer.b2 = min(5, STEPS), 0.99
config.eval.every, config.eval.prompts = 0, 128
config.logging.backends = ("jsonl",)
result = jaxrl_llm.train(
    config, train_dataset=train_rows, eval_dataset=test_rows, rewards=downwards, callbacks=[Progress()]
)

# %% [markdown]
# ## What happened
#
# `result.metrics` has the numbers of every step, as `metrics.jsonl` in the folder of the run. The page that
# `!python -m jaxrl_llm report runs/notebook_grpo` writes has them as curves, and every completion.

# %%
before, after = result.metrics[0], result.metrics[-1]
for name in ("eval/accuracy", "eval/greedy_accuracy", "eval/reward"):
    print(f"{name:22s} {before[name]:.2f} -> {after[name]:.2f}")

# %%
samples = [ask("4821"), ask("90210"), ask("314159")]
greedy = jaxrl_llm.generate(result.model, samples, max_new_tokens=16, temperature=0)
for prompt, completion in zip(samples, greedy, strict=True):
    print(prompt, completion)
if SMALL and STEPS >= 150:
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.4, (before, after)

# %% [markdown]
# The model is in `runs/notebook_grpo/hf`, a folder that transformers and vLLM load. Next: other shapes of
# [rewards](https://jaxrl-llm.github.io/jaxrl_llm/rewards.html), other
# [algorithms](https://jaxrl-llm.github.io/jaxrl_llm/algorithms.html), each a few keys away, and what to do
# [when the reward stays flat](https://jaxrl-llm.github.io/jaxrl_llm/troubleshooting.html).
