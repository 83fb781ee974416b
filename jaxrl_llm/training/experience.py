"""Where batches come from: `offline` reads rows, `online` samples and scores them. Both give `next(state, key)`.

One online step, in the order of `Online.next`: prompts -> rollout -> rewards -> log-probs of policy and reference ->
advantages -> Batch.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms import advantages as advantage_rules
from jaxrl_llm.algorithms.aggregation import masked_mean, masked_var
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.config import ConfigError, resolve
from jaxrl_llm.data.chat import decode_completion, is_conversational
from jaxrl_llm.data.collate import pad_prompts, pad_rows
from jaxrl_llm.data.packing import pad_groups
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.policy import token_logps
from jaxrl_llm.rewards.grader import Rewards
from jaxrl_llm.rollout.engine import Engine, Rollout
from jaxrl_llm.sharding import local_rows, row_shards, rows_to_global
from jaxrl_llm.training.metrics import Stopwatch
from jaxrl_llm.training.update import State

Row = dict[str, Any]


class Experience(NamedTuple):
    """One step's batch, its metrics (device scalars) and, online, a table of this process's completions."""

    batch: Batch
    metrics: dict[str, jax.Array]
    table: list[Row]


class Sampled(NamedTuple):
    """Completions of some prompts: the rows on the device, and texts and rewards of this process's rows."""

    rollout: Rollout
    prompts: list[Any]
    completions: list[Any]
    rewards: np.ndarray  # [rows of this process, R], NaN where a function does not apply


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples completions of prompts and scores them."""

    engine: Engine
    rewards: Rewards
    tokenizer: Any
    mesh: Mesh
    prompt_width: int
    watch: Stopwatch

    def __call__(self, params: Params, examples: list[Row], key) -> Sampled:
        """`group_size` completions of every example of this process, rows of a prompt adjacent."""
        with self.watch("rollout"):
            padded = pad_prompts([e["prompt_ids"] for e in examples], self.prompt_width)
            prompts, segments = rows_to_global(padded, self.mesh)
            rollout = self.engine.generate(params, prompts, segments, key)
            tokens, lengths = local_rows((rollout.tokens, rollout.lengths))
        with self.watch("reward"):
            repeated = [e for e in examples for _ in range(self.engine.group_size)]
            ids = [
                row[self.prompt_width : self.prompt_width + n].tolist() for row, n in zip(tokens, lengths, strict=True)
            ]
            texts = [
                decode_completion(self.tokenizer, i, is_conversational(e["prompt"]))
                for i, e in zip(ids, repeated, strict=True)
            ]
            columns = {
                name: [e[name] for e in repeated] for name in examples[0] if name not in ("prompt", "prompt_ids")
            }
            asked = [e["prompt"] for e in repeated]
            return Sampled(rollout, asked, texts, self.rewards(asked, texts, ids, columns))


@dataclasses.dataclass(frozen=True)
class Online:
    """Batches of sampled and scored completions. `ref_params` is None unless a KL term needs the reference policy."""

    config: Any
    net: Net
    sampler: Sampler
    pipeline: Pipeline
    ref_params: Params | None

    def next(self, state: State, key) -> Experience:
        """The batch of one step, sampled from `state.params`."""
        config, names = self.config, self.sampler.rewards.names
        sampled = self.sampler(state.params, next(self.pipeline), key)
        rollout, mesh = sampled.rollout, self.sampler.mesh
        with self.sampler.watch("logps"):
            old_logps = self._logps(state.params, rollout) if self._reuses_rollouts() else None
            ref_logps = None if self.ref_params is None else self._logps(self.ref_params, rollout)
        mask = rollout.mask * rollout.finished[:, None] if config.algorithm.mask_truncated else rollout.mask
        rewards = rows_to_global(sampled.rewards, mesh)
        advantages, metrics = _advantages(
            rewards, self.sampler.rewards.weights, mask, rollout, config.algorithm.advantage, config.rollout.group_size,
            config.algorithm.scale_rewards, names,
        )  # fmt: skip
        batch = Batch(
            tokens=rollout.tokens,
            segments=rollout.segments,
            mask=mask,
            sample_logps=rollout.sample_logps,
            old_logps=old_logps,
            ref_logps=ref_logps,
            advantages=advantages,
            prompt_width=self.sampler.prompt_width,
        )
        row_advantages = local_rows(masked_mean(advantages, mask, axis=-1))
        table = [
            {"prompt": p, "completion": c, **dict(zip(names, map(float, r), strict=True)), "advantage": float(a)}
            for p, c, r, a in zip(sampled.prompts, sampled.completions, sampled.rewards, row_advantages, strict=True)
        ]
        return Experience(batch, metrics, table)

    def _reuses_rollouts(self) -> bool:
        """False when each batch gives one update: then the updated policy is the sampling one and the ratio is 1."""
        return self.config.algorithm.num_iterations > 1 or self.config.batch.minibatches > 1

    def _logps(self, params: Params, rollout: Rollout):
        temperature, batch = self.config.rollout.temperature, self.config.batch
        rows = batch.microbatch_rows or rollout.tokens.shape[0] // batch.minibatches
        return scored_logps(
            self.net, params, rollout.tokens, rollout.segments, temperature, self.sampler.prompt_width, rows,
            row_shards(self.sampler.mesh),
        )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6, 7))
def scored_logps(net: Net, params: Params, tokens, segments, temperature, prompt_width: int, rows: int, shards: int):
    """Log-probs `[N,T]` without gradients, computed `rows` rows at a time."""

    def part(x):
        return token_logps(net, params, *x, temperature=temperature, prompt_width=prompt_width)[0]

    def split(x):
        return x.reshape(shards, -1, rows // shards, x.shape[-1]).swapaxes(0, 1).reshape(-1, rows, x.shape[-1])

    out = jax.lax.map(part, (split(tokens), split(segments)))
    return out.reshape(-1, shards, rows // shards, out.shape[-1]).swapaxes(0, 1).reshape(tokens.shape)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _advantages(
    rewards, weights, mask, rollout: Rollout, rule: str, group_size: int, scale: str, names: tuple[str, ...]
):
    """Advantages `[N,T]` by the named rule, and the step's reward and length metrics over all processes.

    A rule is a function of any of: scores [N], rewards [N,R], weights [R], mask [N,T], lengths [N], finished [N],
    group_size, scale. It returns `[N]` or `[N,T]`.
    """
    scores = advantage_rules.combine_rewards(rewards, weights)
    known = {
        "scores": scores, "rewards": rewards, "weights": weights, "mask": mask, "lengths": rollout.lengths,
        "finished": rollout.finished, "group_size": group_size, "scale": scale,
    }  # fmt: skip
    function = advantage_rule(rule)
    values = function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})
    values = mask * (values if values.ndim == 2 else values[:, None])
    lengths, ended = rollout.lengths, rollout.finished
    metrics = {
        "reward": masked_mean(scores, ~jnp.isnan(scores)),
        "reward_std": jnp.sqrt(masked_var(scores, ~jnp.isnan(scores))),
        "frac_reward_zero_std": advantage_rules.frac_zero_std(scores, group_size),
        "unscorable_rows": advantage_rules.unscorable_rows(rewards).sum(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/mean_terminated_length": masked_mean(lengths, ended),
        "completions/clipped_ratio": 1.0 - ended.mean(),
        "num_tokens": rollout.segments.sum(),
    }
    for i, name in enumerate(names):
        applies = ~jnp.isnan(rewards[:, i])
        metrics[f"rewards/{name}/mean"] = masked_mean(rewards[:, i], applies)
        metrics[f"rewards/{name}/std"] = jnp.sqrt(masked_var(rewards[:, i], applies))
    return values, metrics


def advantage_rule(name: str):
    """The advantage function of a name: `group` is `advantages.group_advantages`."""
    rules: Mapping[str, Any] = {
        known.removesuffix("_advantages"): function
        for known, function in vars(advantage_rules).items()
        if known.endswith("_advantages")
    }
    return resolve(name, rules)


@dataclasses.dataclass(frozen=True)
class Offline:
    """Batches of given rows, padded to one width (or packed rows)."""

    config: Any
    pipeline: Pipeline
    mesh: Mesh
    width: int
    watch: Stopwatch

    def next(self, state: State, key) -> Experience:
        """The batch of one step; neither the state nor the key changes it."""
        del state, key
        with self.watch("data"):
            rows = next(self.pipeline)
            if self.config.data.packing:
                tokens, segments, positions, mask = pad_groups(rows, self.width)
            else:
                tokens, segments, mask = pad_rows([(row["ids"], row["mask"]) for row in rows], self.width)
                positions = None
            batch = rows_to_global(Batch(tokens, segments, mask, positions), self.mesh)
            return Experience(batch, {"num_tokens": (batch.segments != 0).sum()}, [])


def check_rows(config, rows: int, mesh: Mesh) -> None:
    """Raises ConfigError unless every micro-batch cuts into the mesh's row shards."""
    part = config.batch.microbatch_rows or rows // config.batch.minibatches
    if part % row_shards(mesh):
        raise ConfigError(
            f"a micro-batch of {part} rows does not divide into mesh.data x mesh.fsdp = {row_shards(mesh)} parts; "
            "change batch.prompts, rollout.group_size, batch.minibatches, batch.microbatch_rows or the mesh"
        )
