# ruff: noqa: E402
# %% [markdown]
# # Inside one GRPO step
#
# One step of GRPO, array by array, computed by hand from the pure functions of `jaxrl_llm.algorithms`; at the end the
# library does the same step, and every number agrees. Under a minute on two CPU cores.
#
# `build` makes a run from a configuration: model, prompts, sampler, rewards, the jitted update, and the state that
# training changes. `jaxrl_llm.train` is a loop over these.
#
# Dimension letters: B prompts, K completions of each, N = B K rows, P prompt length, C completion length, T = P + C,
# F reward functions.

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
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm
from jaxrl_llm.algorithms.advantages import combine_rewards, group_advantages
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.algorithms.policy_losses import ppo_clip
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import build

np.set_printoptions(precision=2, suppress=True, linewidth=120)

config = jaxrl_llm.default_config()
config.model.dtype = "float32"  # so that numbers can be compared on accelerators too
config.batch.prompts, config.rollout.group_size = 4, 4
config.rollout.max_prompt_length, config.rollout.max_completion_length = 16, 10
config.algorithm.beta = 0.05
config.optimizer.learning_rate = 1e-4
config.eval.every = -1
mesh = build_mesh(config)
jax.set_mesh(mesh)
run = build(config, mesh)
net, tokenizer, params = run.model.net, run.model.tokenizer, run.state.params
key = jax.random.key(3)
start = run.source.get_state()  # the position in the data, to come back to
print(f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.2f} M parameters,", "devices", dict(mesh.shape))

# %% [markdown]
# ## 1. Prompts, and K completions of each
#
# Prompts are padded on the left, completions on the right. *Layout*: `segments` says what is padding (0); no token is
# ever compared with a padding token. *Grouping*: the K rows of a prompt are adjacent.

# %%
examples = next(run.source.producer.pipeline)
width, completion = run.source.producer.worker.prompt_width, config.rollout.max_completion_length
prompts, prompt_segments = pad_prompts([example["prompt_ids"] for example in examples], width)
rollout = run.source.producer.worker.engine.generate(params, prompts, prompt_segments, key)
print("prompts [B,P]", prompts.shape, "  tokens [N,T]", rollout.tokens.shape)
for name, array in (("tokens", rollout.tokens), ("segments", rollout.segments), ("mask", rollout.mask.astype(int))):
    print(f"{name:9s}", *(f"{value:4d}" for value in np.asarray(array[0])))

# %% [markdown]
# ## 2. Rewards `[N,F]` and advantages `[N]`
#
# Reward functions see texts, on the host. The advantage is a score minus the mean of its group, divided by the group's
# standard deviation: how much better than its siblings was this answer? A group whose answers all score alike teaches
# nothing: its advantages are 0.

# %%
ids = [np.asarray(row[width : width + n]).tolist() for row, n in zip(rollout.tokens, rollout.lengths, strict=True)]
texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
asked = [example["prompt"] for example in examples for _ in range(config.rollout.group_size)]
answers = [example["answer"] for example in examples for _ in range(config.rollout.group_size)]
rewards = load_rewards("exact_match")(asked, texts, ids, {"answer": answers})
for prompt, text, reward in zip(asked, texts, rewards[:, 0], strict=True):
    print(f"{prompt:14s} {text:10s} {reward:.0f}")

scores = combine_rewards(rewards, [1.0])
advantages = group_advantages(scores, config.rollout.group_size)
grouped = np.asarray(scores).reshape(-1, config.rollout.group_size)
by_hand = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
np.testing.assert_allclose(advantages, by_hand.ravel(), atol=1e-5)
print(np.asarray(advantages).reshape(grouped.shape))

# %% [markdown]
# ## 3. Log-probs `[N,T]`
#
# *Alignment*: index t speaks of token t. The sampler has noted the log-prob of each token that it drew; the trainer
# computes the same numbers in one pass over the rows. The two must agree, and every run logs how well they do
# (`sampling/sampling_logp_difference/mean`). The reference is the policy before the first step, so the KL is still 0.


# %%
@jax.jit
def logps_of(policy):
    return token_logps(net, policy, Inputs(rollout.tokens, rollout.segments), config.rollout.temperature)[0]


old_logps = ref_logps = logps_of(params)
mask = rollout.mask
print("sampler", np.asarray(rollout.sample_logps[0, width:]))
print("trainer", np.asarray((old_logps * mask)[0, width:]))
np.testing.assert_allclose(old_logps * mask, rollout.sample_logps, atol=1e-3)

# %% [markdown]
# ## 4. The loss
#
# *Reduction*: losses are `[N,T]`, and the only sum is `sum(weights * loss)`. The weights say how tokens are averaged,
# here over each row and then over rows, and come from the whole batch, whatever its micro-batches.
#
# The loss itself is 0 in the first update of a step: all ratios are 1, and the advantages of a group add up to 0. Its
# gradient is not.

# %%
weights = loss_weights(mask, config.algorithm.aggregation)


def loss_of(policy):
    logps = logps_of(policy)
    clipped, _ = ppo_clip(logps, old_logps, advantages[:, None] * mask, 0.2, 0.2)
    return (weights * (clipped + config.algorithm.beta * kl_estimate(logps, ref_logps, "k3"))).sum()


loss, gradient = jax.jit(jax.value_and_grad(loss_of))(params)
norm = optax.global_norm(gradient)
print(f"weights {weights.shape} add up to {weights.sum():.3f}; loss {abs(loss):.5f}; gradient norm {norm:.4f}")

# %% [markdown]
# ## 5. The library's step
#
# `source.next` is sections 1 to 3, `update` is section 4 and the optimizer, in one jitted program that writes over the
# old state. After it good answers have gained on bad ones.

# %%
run.source.set_state(start, {})
experience = run.source.next(run.state, key)
batch = experience.batch
np.testing.assert_array_equal(batch.inputs.tokens, rollout.tokens)
np.testing.assert_allclose(batch.advantages, advantages[:, None] * mask, atol=1e-5)
before = jax.tree.map(jnp.copy, params)
state, metrics = run.update(run.state, run.pack(batch), run.frozen)
np.testing.assert_allclose(float(metrics["loss"]), float(loss), atol=1e-5)
np.testing.assert_allclose(float(metrics["grad_norm"]), float(norm), rtol=1e-3)
print(f"loss {abs(float(metrics['loss'])):.5f}, gradient norm {float(metrics['grad_norm']):.4f}: as by hand")

change = ((logps_of(state.params) - logps_of(before)) * mask).sum(axis=1)
for name, rows in (("better than their group", advantages > 0), ("worse", advantages < 0)):
    print(f"{name:24s} log-prob changes by {float(change[rows].mean()):+.3f} on average, {int(rows.sum())} rows")
assert change[advantages > 0].mean() > change[advantages < 0].mean()
