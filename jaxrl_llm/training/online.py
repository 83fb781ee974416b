"""Batches of completions that are sampled and scored: `Online` gives `next(state, key)`, as `offline.Offline` does.

One step, in the order of `Online.next`: prompts -> rollout -> rewards (again for groups that score alike, with dynamic
sampling) -> log-probs of policy and reference -> advantages -> replay -> Batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl_llm.algorithms.aggregation import masked_mean
from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.algorithms.random_streams import REPLAY, ROW_SEEDS
from jaxrl_llm.config import ConfigError, rows_together
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.data.chat import decode_completion, is_conversational
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.streaming import Stream
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.distributed.sharding import constrain, local_rows, on_device, row_shards, rows_to_global
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.models.logprobs import token_logps, token_values
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.rewards.runner import NOTHING_LOGGED, Logged, Rewards, TrainerState
from jaxrl_llm.rewards.streaming import StreamingRewards
from jaxrl_llm.rollout.engine import Engine, Rollout
from jaxrl_llm.training.advantages import Scorer
from jaxrl_llm.training.external_rollout import ExternalRollout
from jaxrl_llm.training.logging.reward_metrics import add_totals, join, over_processes, table_value
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.microbatch import map_microbatches
from jaxrl_llm.training.objective_specs import critic_spec, policy_loss
from jaxrl_llm.training.objectives.value import critic_params
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.reference import Memory
from jaxrl_llm.training.update import State

Row = dict[str, Any]


class Experience(NamedTuple):
    """One step's batch, its metrics (device scalars) and, online, a table of all completions."""

    batch: Batch
    metrics: dict[str, jax.Array]
    table: list[Row]


class Sampled(NamedTuple):
    """Completions of some prompts: the rows on the device, and texts and rewards of this process's rows."""

    rollout: Rollout
    examples: list[Row]
    prompts: list[Any]
    completions: list[Any]
    rewards: np.ndarray  # [rows of this process, R], NaN where a function does not apply
    logged: Logged = NOTHING_LOGGED  # by the reward functions


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples completions of prompts and scores them.

    With `open_episodes` rows are episodes of environments; `external` samples in place of the engine.
    """

    engine: Engine
    rewards: Rewards
    tokenizer: Any
    mesh: Mesh
    prompt_width: int
    watch: Stopwatch
    open_episodes: Callable[[list[Row], int], EpisodeBatch] | None = None
    external: ExternalRollout | None = None

    def __call__(
        self,
        params: Params,
        examples: list[Row],
        key,
        first_row: int = 0,
        state: TrainerState = TrainerState(),  # noqa: B008 (immutable)
    ) -> Sampled:
        """`group_size` completions of every example of this process, rows of a prompt adjacent.

        Row i draws its random numbers from `fold_in(key, first_row + i)`.
        """
        with self.watch("rollout"):
            episodes = None if self.open_episodes is None else self.open_episodes(examples, self.engine.group_size)
            opened = examples if episodes is None else episodes.examples
            repeated = [e for e in opened for _ in range(self.engine.group_size)]
            columns = {
                name: [e[name] for e in repeated] for name in examples[0] if name not in ("prompt", "prompt_ids")
            }
            asked = [e["prompt"] for e in repeated]

            def decode(row: int, tokens: list[int]) -> Any:
                return decode_completion(self.tokenizer, tokens, is_conversational(asked[row]))

            early = None
            if episodes is None and self.external is None and self.rewards.takes_rows:
                with all_or_none():
                    early = StreamingRewards(self.rewards.open(asked, columns, state), decode)
            rollout, results = self._rollout(params, opened, key, first_row, state, episodes, early)
            tokens, lengths = local_rows((rollout.tokens, rollout.lengths))
        with self.watch("reward"), all_or_none():
            ids = [
                row[self.prompt_width : self.prompt_width + n].tolist() for row, n in zip(tokens, lengths, strict=True)
            ]
            texts = None
            if episodes is not None:
                texts, results = episodes.finish(ids, self.rewards.workers is None)
            if early is None:
                early = StreamingRewards(self.rewards.open(asked, columns | results, state), decode)
            texts = early.finish(ids, texts)
            graded = early.pending.result()
            if episodes is not None:
                metrics, totals, table = episodes.release()
                logged = graded.logged
                logged = Logged(logged.metrics | metrics, logged.totals | totals, logged.columns | table)
                graded = graded._replace(logged=logged)
            return Sampled(rollout, examples, asked, texts, *graded)

    def _rollout(
        self, params: Params, examples: list[Row], key, first_row: int, state: TrainerState,
        episodes: EpisodeBatch | None, early: StreamingRewards | None,
    ) -> tuple[Rollout, dict[str, list[Any]]]:  # fmt: skip
        """The rows, and the columns for rewards that come with them."""
        if self.external is not None:
            return self.external(params, examples, jax.random.fold_in(key, first_row), state)
        padded = pad_prompts([e["prompt_ids"] for e in examples], self.prompt_width)
        prompts, segments = rows_to_global(padded, self.mesh)
        return self.engine.generate(params, prompts, segments, key, first_row, episodes, on_finished=early), {}


@dataclasses.dataclass(frozen=True)
class Online:
    """Batches of sampled and scored completions.

    `greedy` samples the baseline of a rule that compares with it; `critic` is PPO's value network.
    """

    config: Any
    net: Net
    critic: Net | None
    sampler: Sampler
    greedy: Sampler | None
    pipeline: Pipeline | Stream
    scorer: Scorer
    memory: Memory
    pack: Packer | None = None

    def next(self, state: State, key) -> Experience:
        """The batch of one step, sampled from `state.params`."""
        algorithm, memory, mesh, watch = self.config.algorithm, self.memory, self.sampler.mesh, self.sampler.watch
        memory.sync_reference(state)
        sampled, resampled = self._sample(state, key)
        rollout = sampled.rollout
        with watch("logps"):
            old_logps = self._logps(state.params, rollout) if self._needs_old_logps() else None
            ref_logps = self._logps(on_device(memory.reference), rollout) if self._measures_kl() else None
            values = self._values(state, rollout)
        mask = rollout.mask * rollout.finished[:, None] if algorithm.mask_truncated else rollout.mask
        greedy, greedy_rewards, logged = self._greedy(state.params, sampled, key)
        scored = self.scorer(
            rollout, mask, rows_to_global(sampled.rewards, mesh), self.sampler.rewards.weights, old_logps, ref_logps,
            memory.kl.coef, greedy_rewards, values, greedy,
        )  # fmt: skip
        batch = Batch(
            Inputs(rollout.tokens, rollout.segments, prompt_width=self.sampler.prompt_width),
            mask=scored.mask,
            sample_logps=rollout.sample_logps,
            old_logps=old_logps,
            advantages=scored.values,
            values=values,
            returns=scored.returns,
        )
        metrics = scored.metrics | resampled | over_processes(logged, scored.metrics)
        metrics["rollout/useful_token_fraction"] = _useful(rollout.lengths, rollout.steps)
        if memory.replay is not None:
            batch, metrics["rollout/replayed_groups"] = memory.replay_groups(
                batch, scored.priority, jax.random.fold_in(key, REPLAY), self.config.rollout.group_size
            )
        batch = self._with_terms(batch, None if memory.replay is not None else ref_logps, key)
        metrics |= memory.coefficients()
        memory.control_kl(scored.kl, batch.rows)
        return Experience(batch, metrics, self._table(sampled, scored.values, mask))

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs besides the training state and `get_arrays`."""
        return {"pipeline": self.pipeline.get_state(), "memory": self.memory.numbers()}

    def get_arrays(self) -> dict[str, Any]:
        """The trees of arrays, by name, that a resumed run needs besides the training state."""
        return self.memory.arrays()

    def set_state(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Goes on where `get_state` and `get_arrays` were called."""
        self.pipeline.set_state(state["pipeline"])
        self.memory.restore(state["memory"], arrays)

    def learn(self, metrics: dict[str, float]) -> None:
        """Takes notice of the metrics of a step's updates."""
        self.memory.control_entropy(metrics)

    def _prompts(self) -> list[Row]:
        with all_or_none():
            return next(self.pipeline)

    def _sample(self, state: State, key) -> tuple[Sampled, dict[str, Any]]:
        """Scored completions; with `algorithm.dynamic_sampling` of prompts whose completions score differently."""
        algorithm, weights = self.config.algorithm, self.sampler.rewards.weights
        params, progress = state.params, TrainerState(int(state.step), self.config.total_steps)
        sampled = self.sampler(params, self._prompts(), key, state=progress)
        if not algorithm.dynamic_sampling:
            return sampled, {}
        flat, resampled = self.scorer.flat_groups(sampled.rewards, weights), 0
        rows = len(sampled.rewards) * jax.process_count()
        for sampling_round in range(1, algorithm.max_sampling_rounds):
            missing = _sum_over_processes(flat)
            if not missing:
                break
            resampled += missing
            fresh = self.sampler(params, self._prompts(), key, sampling_round * rows, progress)
            fresh_flat = self.scorer.flat_groups(fresh.rewards, weights)
            sampled, flat = fill(sampled, flat, fresh, fresh_flat, self.sampler.mesh)
        missing = _sum_over_processes(flat)
        if missing and self.memory.replay is None:
            raise ConfigError(
                f"algorithm.dynamic_sampling: after {algorithm.max_sampling_rounds} rounds of sampling, the "
                f"completions of {missing} prompts of {self.config.batch.prompts} still score alike. Raise "
                "algorithm.max_sampling_rounds, fill up from earlier steps with algorithm.replay_groups, set "
                "algorithm.dynamic_sampling to false, or give prompts that are neither too easy nor too hard"
            )
        return sampled, {"rollout/resampled_groups": np.float32(resampled)}

    def _greedy(self, params: Params, sampled: Sampled, key) -> tuple[Rollout | None, Any, Logged]:
        """A greedy completion of each example and its rewards `[B,R]`, None unless the advantage rule asks for them;
        and what was logged with the samples, with what grading these has cost."""
        if self.greedy is None:
            return None, None, sampled.logged
        found = self.greedy(params, sampled.examples, key)
        logged = add_totals(sampled.logged, found.logged)
        return found.rollout, rows_to_global(found.rewards, self.sampler.mesh), logged

    def _with_terms(self, batch: Batch, ref_logps, key) -> Batch:
        """The batch with what the terms of the objective read: the reference, moving coefficients, random seeds."""
        memory, mesh, rows = self.memory, self.sampler.mesh, batch.rows // jax.process_count()
        if memory.reference is not None and not self.config.algorithm.kl_in_reward:
            with self.sampler.watch("logps"):
                known = ref_logps is not None
                batch = batch.replace(ref_logps=ref_logps if known else self._logps(on_device(memory.reference), batch))
        measured = memory.reference is not None and not self.config.algorithm.kl_in_reward
        adaptive, by_tokens = isinstance(memory.kl, AdaptiveKL), self.config.algorithm.aggregation == "rollout_token"
        tokens = float((batch.mask > 0).sum()) / self.config.batch.minibatches if by_tokens else None
        batch = batch.replace(
            scalars=Scalars(
                kl_coef=np.float32(memory.kl.coef) if measured and adaptive else None,
                entropy_coef=None if memory.entropy is None else np.float32(memory.entropy.applied),
                token_count=None if tokens is None else np.float32(tokens),
            )
        )
        if "key" in policy_loss(self.config).takes:
            first = int(jax.random.bits(jax.random.fold_in(key, ROW_SEEDS)))
            seeds = np.random.default_rng([first, 0]).integers(2**32, size=batch.rows, dtype=np.uint32)
            own = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
            batch = batch.replace(seeds=rows_to_global(seeds[own], mesh))
        return batch

    def _table(self, sampled: Sampled, advantages, mask) -> list[Row]:
        """The completions of all processes, in the order of rows."""
        names, row_advantages = self.sampler.rewards.names, local_rows(masked_mean(advantages, mask, axis=-1))
        rows = zip(sampled.prompts, sampled.completions, sampled.rewards, row_advantages, strict=True)
        own = [
            {"prompt": p, "completion": c, **dict(zip(names, map(float, r), strict=True)), "advantage": float(a)}
            | {name: table_value(values[row]) for name, values in sampled.logged.columns.items()}
            for row, (p, c, r, a) in enumerate(rows)
        ]
        return [row for part in gather(own) for row in part]

    def _measures_kl(self) -> bool:
        """True when the reference is needed before the objective: for rewards, or to steer the KL coefficient."""
        return self.config.algorithm.kl_in_reward or isinstance(self.memory.kl, AdaptiveKL)

    def _needs_old_logps(self) -> bool:
        """False when the sampled rows give one update: then the policy that is updated has sampled them."""
        one_update = self.config.algorithm.num_iterations == 1 and self.config.batch.minibatches == 1
        return not one_update or self.memory.replay is not None or self._measures_kl()

    def _logps(self, params: Params | None, rows: Rollout | Batch):
        assert params is not None
        inputs, count = self._inputs(rows)
        temperature, shards = self.config.rollout.temperature, row_shards(self.sampler.mesh)
        return scored_logps(self.net, params, inputs, temperature, count, shards)

    def _values(self, state: State, rows: Rollout):
        """Values `[N,T]` of the critic before the update, None without one."""
        if self.critic is None or state.critic is None:
            return None
        inputs, count = self._inputs(rows)
        return values_before(
            self.critic, critic_params(critic_spec(self.config), state), inputs, count, row_shards(self.sampler.mesh)
        )

    def _inputs(self, rows: Rollout | Batch) -> tuple[Inputs, int]:
        """What a network reads of the rows, and how many rows it computes at a time."""
        source = rows if isinstance(rows, Rollout) else rows.inputs
        tokens, segments = source.tokens, source.segments
        layout = None if self.pack is None else self.pack.passing(tokens, segments, rows.mask)
        inputs = Inputs(tokens, segments, layout=layout, prompt_width=self.sampler.prompt_width)
        return inputs, self.config.batch.microbatch_rows or tokens.shape[0] // self.config.batch.minibatches


def fill(
    held: Sampled, flat: np.ndarray, fresh: Sampled, fresh_flat: np.ndarray, mesh: Mesh
) -> tuple[Sampled, np.ndarray]:
    """`held` with its flat groups replaced by groups of `fresh` that are not, as far as those go; which are flat then.

    `flat` and `fresh_flat` `[B]` are of this process, which fills its own groups only: texts never travel.
    """
    slots, found = np.flatnonzero(flat), np.flatnonzero(~fresh_flat)
    slots, found = slots[: len(found)], found[: len(slots)]
    groups, size = len(flat), len(held.prompts) // len(flat)
    source = np.arange(groups)
    source[slots] = groups + found
    index = (source[:, None] * size + np.arange(size)).reshape(-1)  # into the local rows of held, then of fresh

    def pick(old: list, new: list, where: np.ndarray) -> list:
        both = [*old, *new]
        return [both[i] for i in where]

    rows, process, processes = groups * size, jax.process_index(), jax.process_count()
    # The same in global rows, where all of held comes before all of fresh.
    in_all = index + np.where(index < rows, process, process + processes - 1) * rows
    filled = Sampled(
        rollout=_pick_rows(held.rollout, fresh.rollout, rows_to_global(in_all.astype(np.int32), mesh)),
        examples=pick(held.examples, fresh.examples, source),
        prompts=pick(held.prompts, fresh.prompts, index),
        completions=pick(held.completions, fresh.completions, index),
        rewards=np.concatenate([held.rewards, fresh.rewards])[index],
        logged=join(held.logged, fresh.logged, index, rows),
    )
    still = flat.copy()
    still[slots] = False
    return filled, still


@jax.jit
def _useful(lengths, steps):
    """The share of decode steps that gave a token: a row's first comes from the prefill, idle slots give none."""
    return (lengths - 1).sum() / jnp.maximum(steps.sum(), 1.0)


@jax.jit
def _pick_rows(held: Rollout, fresh: Rollout, index) -> Rollout:
    return jax.tree.map(
        lambda a, b: constrain(jnp.concatenate([a, b])[index], "rows", *(None,) * (a.ndim - 1)), held, fresh
    )


def _sum_over_processes(flags: np.ndarray) -> int:
    return int(multihost_utils.process_allgather(np.int32(flags.sum())).sum())


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def scored_logps(net: Net, params: Params, inputs: Inputs, temperature: float, rows: int, shards: int) -> jax.Array:
    """Log-probs `[N,T]` without gradients, computed `rows` rows at a time or as the layout says."""
    batch = Batch(inputs, mask=None)
    count = batch.rows // rows
    return map_microbatches(lambda x: token_logps(net, params, x.inputs, temperature)[0], batch, count, shards)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def values_before(net: Net, params: Params, inputs: Inputs, rows: int, shards: int) -> jax.Array:
    """A critic's values `[N,T]` without gradients, computed `rows` rows at a time or as the layout says."""
    batch = Batch(inputs, mask=None)
    return map_microbatches(lambda x: token_values(net, params, x.inputs), batch, batch.rows // rows, shards)


def check_rows(config, rows: int, mesh: Mesh) -> None:
    """Raises ConfigError unless every micro-batch cuts into the mesh's row shards."""
    if config.algorithm.aggregation == "microbatch_token" and row_shards(mesh) > 1:
        raise ConfigError(
            "algorithm.aggregation = 'microbatch_token' is of adjacent rows, but a micro-batch takes rows of each of "
            f"the {row_shards(mesh)} shards of the mesh; use token, or mesh.data = mesh.fsdp = 1"
        )
    part = config.batch.microbatch_rows or rows // config.batch.minibatches
    pairs = config.algorithm.name in OFFLINE and rows_together(config) == 2
    if part % (row_shards(mesh) * (2 if pairs else 1)):
        raise ConfigError(
            "a micro-batch of "
            f"{part} rows does not divide into mesh.data x mesh.fsdp x mesh.expert = {row_shards(mesh)} parts"
            f"{' of whole pairs' if pairs else ''}; "
            "change batch.prompts, rollout.group_size, batch.minibatches, batch.microbatch_rows or the mesh"
        )
