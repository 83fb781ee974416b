"""What migrated configurations compute: the loss of rows that are given, and two steps of training."""

import inspect
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm
from jaxrl_llm.algorithms.advantages import token_rewards
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import assign, validate
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.training.advantages import advantage_rule
from jaxrl_llm.training.objectives.policy_gradient import policy_gradient, policy_objective
from jaxrl_llm.training.setup.objectives import policy_spec

N, T, K = 8, 7, 4


def made_rows():
    """Two groups of four rows with log-probs of the policy, of the old one, of the sampler and of the reference."""
    rng = np.random.default_rng(5)
    mask = (np.arange(T) < rng.integers(2, T + 1, (N, 1))).astype(np.float32)
    logps = {name: -rng.uniform(0.1, 2.5, (N, T)) for name in ("policy", "old", "sampled", "reference")}
    return SimpleNamespace(mask=mask, rewards=rng.normal(size=N), **logps)


def our_advantages(config, rows):
    """The advantages `[N]` or `[N, T]` that the configuration gives the rewards of the rows."""
    rule, options = advantage_rule(config.algorithm.advantage)
    given = {"scale": config.algorithm.scale_rewards, "group_size": K, "mask": rows.mask} | options
    takes = inspect.signature(rule).parameters
    first = token_rewards(rows.rewards, rows.mask) if "token_rewards" in takes else jnp.asarray(rows.rewards)
    return rule(first, **{name: value for name, value in given.items() if name in takes})


def our_loss(config, rows, old=None):
    """The loss of the configuration and its gradient by the policy's log-probs; `old` are those of the ratio."""
    spec = policy_spec(config)
    fields = {"mask": rows.mask, "advantages": jnp.broadcast_to(our_advantages(config, rows).reshape(N, -1), (N, T))}
    fields |= {"sample_logps": rows.sampled, "old_logps": rows.old if old is None else old}
    if config.algorithm.beta:
        fields["ref_logps"] = rows.reference
    batch = policy_gradient(spec, None).prepare(Batch(Inputs(np.zeros((N, T), np.int32)), **fields))
    return jax.value_and_grad(lambda logps: policy_objective(spec, TokenStatistics(logps, -logps, logps), batch)[0])(
        jnp.asarray(rows.policy)
    )


def two_steps(config, tmp_path, rows, **settings):
    """The metrics of two steps with the embedded model, on rows that are written to a file, on one device."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "output_dir": str(tmp_path / "run"), "model.path": "embedded:sort", "model.tokenizer": None, "data.name": None,
        "data.path": str(tmp_path / "rows.jsonl"), "data.split": "train", "data.eval_split": None, "total_steps": 2,
        "optimizer.warmup_steps": 0, "optimizer.warmup_init": 0.0, "optimizer.schedule_steps": 0, "checkpoint.every": 0,
        "eval.every": -1,
        "mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.context": 1, "mesh.expert": 1, "rollout.devices": 0,
        "rollout.mesh": "auto", "rollout.stop_token_ids": (), "rollout.max_prompt_length": 400, "data.max_length": 64,
        "rollout.max_completion_length": 8, "logging.backends": ("jsonl",), "batch.microbatch_rows": 0,
        "lora.targets": ("all-linear",), "num_epochs": None, "checkpoint.folder": None,
    } | settings  # fmt: skip
    for key, value in small.items():
        assign(config, key, value)
    validate(config)
    return jaxrl_llm.train(config).metrics
