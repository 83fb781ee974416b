"""A step of PPO against the same in torch with transformers' networks: rewards to advantages, critic, four updates.

TRL has no PPO any more, so the loop is written here, as its last one and verl's are: a KL in the rewards of tokens,
GAE, whitened advantages, two minibatches twice, two networks with an optimizer each.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import minibatch_indices
from jaxrl_llm.config import default, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import Model, save_hf
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import merge_frozen

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROWS, TEMPERATURE, BETA, GAMMA, LAMBDA, NO_END = 8, 0.8, 0.05, 0.97, 0.9, 0.3
LOW, HIGH, NEAR, ENTROPY = 0.02, 0.03, 0.1, 0.01
RATES, NORMS, EPS, DECAY = (1e-3, 2e-3), (1.0, 0.5), 1e-3, 0.1  # of the policy, and of the critic


def digits(completions, **_):
    """A reward with many values, and none for some."""
    sums = [sum(map(ord, completion)) for completion in completions]
    return [None if number % 5 == 0 else number % 7 / 3 - 1 for number in sums]


def configured():
    c = default()
    c.eval.every, c.batch.prompts, c.batch.minibatches, c.batch.microbatch_rows = -1, ROWS, 2, 2
    c.batch.packing, c.rollout.group_size, c.rollout.temperature = "true", 1, TEMPERATURE
    c.rollout.max_prompt_length, c.rollout.max_completion_length = 16, 8
    c.algorithm.update(
        {"name": "ppo", "advantage": f"ppo(gamma={GAMMA}, lam={LAMBDA})", "aggregation": "token", "num_iterations": 2,
         "kl_in_reward": True, "kl": "k1", "beta": BETA, "missing_eos_penalty": NO_END, "epsilon_low": LOW,
         "epsilon_high": HIGH, "entropy_coef": ENTROPY}
    )  # fmt: skip
    c.optimizer.schedule, c.optimizer.eps, c.optimizer.weight_decay = "constant", EPS, DECAY
    (c.optimizer.learning_rate, c.critic.learning_rate), c.critic.epsilon = RATES, NEAR
    c.optimizer.max_grad_norm, c.critic.max_grad_norm = NORMS
    validate(c)
    return c


def save(run, state, folder):
    """The policy and the critic of a state, as folders that transformers loads."""
    whole = merge_frozen(state, run.frozen)
    save_hf(Model(run.model.net, whole.params, run.model.tokenizer, run.model.hf_config), folder / "policy")
    save_hf(dataclasses.replace(run.critic, params=whole.critic.params), folder / "critic")


def load(folder):
    auto = "AutoModelForSequenceClassification" if folder.name == "critic" else "AutoModelForCausalLM"
    return getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32)


def test_a_step(tmp_path):
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = build(configured(), mesh, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        learner, tokenizer = run.source.learner, run.model.tokenizer
        learner.reference.params = jax.tree.map(lambda x: 1.02 * x, learner.reference.params)
        save(run, run.state, tmp_path / "before")
        save_hf(Model(run.model.net, learner.reference.params, tokenizer, run.model.hf_config), tmp_path / "reference")
        experience = run.source.next(run.state, jax.random.key(1))
        batch = jax.device_get(experience.batch)
        state, updates = improve(run, run.state, experience.batch)
        save(run, state, tmp_path / "after")
    policy, critic, reference = (load(tmp_path / name) for name in ("before/policy", "before/critic", "reference"))
    tokens, real = torch.tensor(batch.inputs.tokens).long(), torch.tensor(batch.inputs.segments > 0)
    given = {"input_ids": tokens, "attention_mask": real.long()}
    given["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    first = torch.zeros(ROWS, 1)  # nothing predicts it

    def logps_of(model):
        logps = torch.log_softmax(model(**given).logits[:, :-1] / TEMPERATURE, -1)
        own, entropy = logps.gather(2, tokens[:, 1:, None])[..., 0], -(logps.exp() * logps).sum(-1)
        return torch.cat([first, own], 1), torch.cat([first, entropy], 1)

    def values_of(model):
        return torch.cat([first, model.score(model.base_model(**given).last_hidden_state)[:, :-1, 0]], 1)

    sampled = real & (torch.arange(tokens.shape[1]) >= batch.inputs.prompt_width)
    ids = [row[own].tolist() for row, own in zip(tokens, sampled, strict=True)]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    scores = [
        np.nan if score is None else score - NO_END * (row[-1] != tokenizer.eos_token_id)
        for score, row in zip(digits(texts), ids, strict=True)
    ]
    scored = torch.tensor(~np.isnan(scores))
    assert 0 < scored.sum() < ROWS
    mask = (sampled & scored[:, None]).float()
    with torch.no_grad():
        old, values = logps_of(policy)[0], values_of(critic)
        kl = (old - logps_of(reference)[0]) * mask
    rewards, advantages = -BETA * kl, torch.zeros_like(values)
    for row, live in enumerate(mask > 0):
        after = value = 0.0
        rewards[row, live] += scores[row] * (live.cumsum(0)[live] == live.sum())
        for t in reversed(live.nonzero()[:, 0].tolist()):
            after = rewards[row, t] + GAMMA * value - values[row, t] + GAMMA * LAMBDA * after
            advantages[row, t], value = after, values[row, t]
    returns, known = (advantages + values) * mask, advantages[mask > 0]
    advantages = (advantages - known.mean()) / known.std() * mask
    for name, theirs in (("advantages", advantages), ("returns", returns), ("values", values * mask)):
        np.testing.assert_allclose(getattr(batch, name) * batch.mask, theirs, atol=2e-5, err_msg=name)

    def optimizer_of(model, rate):
        matrices, norms = ([x for x in model.parameters() if (x.ndim > 1) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, run.config.optimizer.b2), eps=EPS)

    optimizers = list(map(optimizer_of, (policy, critic), RATES))
    theirs = []
    seed = (run.batch.seed, 0) if run.batch.shuffle else None
    for rows in minibatch_indices(ROWS, 1, 2, 2, seed):
        share = mask * torch.isin(torch.arange(ROWS), torch.tensor(rows))[:, None]
        share = share / share.sum()
        now = values_of(critic)
        near = torch.clamp(now, values - NEAR, values + NEAR)
        clipped = (near - returns) ** 2 > (now - returns) ** 2
        error = (share * 0.5 * torch.maximum((now - returns) ** 2, (near - returns) ** 2)).sum()
        logps, entropy = logps_of(policy)
        ratio = torch.exp((logps - old) * mask)
        surrogate = -torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        outside = (ratio < 1 - LOW) & (advantages < 0) | (ratio > 1 + HIGH) & (advantages > 0)
        loss = (share * (surrogate - ENTROPY * entropy)).sum()
        norms = []
        for value, model, optimizer, most in zip((loss, error), (policy, critic), optimizers, NORMS, strict=True):
            optimizer.zero_grad()
            value.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), most)))
            optimizer.step()
        means = {"entropy": entropy, "ratio/kl": old - logps, "clip_ratio/region_mean": outside,
                 "critic/vf_clipfrac": clipped, "critic/vpred_mean": now}  # fmt: skip
        line = {name: float((share * x).sum()) for name, x in means.items()}
        line |= {"loss": float(loss), "critic/loss": float(error), "grad_norm": norms[0], "critic/grad_norm": norms[1]}
        theirs.append(line)
    assert len(updates) == len(theirs) == 4
    for name in theirs[0]:
        ours = [float(update[name].value) for update in updates]
        np.testing.assert_allclose(ours, [line[name] for line in theirs], rtol=1e-3, atol=1e-5, err_msg=name)
    for name, model in (("policy", policy), ("critic", critic)):
        after, before = load(tmp_path / "after" / name), load(tmp_path / "before" / name)
        for parameter, ours in after.named_parameters():
            found = model.get_parameter(parameter)
            np.testing.assert_allclose(ours.detach(), found.detach(), atol=1e-5, err_msg=f"{name} {parameter}")
        moved = [(a - b).abs().max() for a, b in zip(after.parameters(), before.parameters(), strict=True)]
        assert max(moved) > 1e-3
    metrics = {
        "objective/kl": kl.sum(1)[scored].mean(),
        "objective/entropy": (-old * mask).sum(1)[scored].mean(),
        "objective/rlhf_reward": np.nanmean(scores) - BETA * kl.sum(1)[scored].mean(),
        "critic/explained_variance": 1 - (returns - values)[mask > 0].var() / returns[mask > 0].var(),
    }
    for name, expected in metrics.items():
        np.testing.assert_allclose(experience.metrics[name], expected, rtol=1e-4, err_msg=name)
