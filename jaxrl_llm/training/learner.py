"""Steps 4 and 5 of an online algorithm: log-probs and advantages of rewarded rows, and the batch made of them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.algorithms.aggregation import masked_mean
from jaxrl_llm.algorithms.batch import Batch, ImageEmbeddings, Images, Inputs, Scalars, observation_mask
from jaxrl_llm.algorithms.controllers import Controllers
from jaxrl_llm.algorithms.off_policy import proximal_share
from jaxrl_llm.algorithms.pairs import ranked_pairs
from jaxrl_llm.algorithms.random_streams import REPLAY, ROW_SEEDS
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import local_rows, on_device, row_shards, rows_to_global
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.advantages import Advantages, AdvantageStep
from jaxrl_llm.training.images import check_kept
from jaxrl_llm.training.logging.reward_metrics import over_processes
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.microbatch import BatchSpec, rows_at
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.passes import images_of_rows, scored_distributions, scored_logps, scored_norms, values_before
from jaxrl_llm.training.reference import Reference
from jaxrl_llm.training.rollouts import replay as replay_buffer
from jaxrl_llm.training.rollouts.experience import Experience, Rollouts
from jaxrl_llm.training.rollouts.replay import Replay
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer, SpanRows
from jaxrl_llm.training.teachers.served_teacher import ServedTeacher
from jaxrl_llm.training.teachers.teacher import SelfTeacher, Teacher
from jaxrl_llm.training.teachers.teacher_context import ContextRows, TeacherContext
from jaxrl_llm.training.update import State

BASELINE = "baselines/"  # before the names of roles


@dataclasses.dataclass(frozen=True)
class LearnerSpec:
    """The settings of a learner."""

    # Whom the ratio compares with: trainer (computed), sampler, reference, interpolated, or policy (itself).
    old_logps: str
    temperature: float
    kl_in_reward: bool
    reward_beta: float  # above 0: there is a KL in the reward besides that in the loss
    full_kl: bool  # that in the loss sums over the vocabulary
    mask_truncated: bool
    aggregation: str
    observations: bool  # the loss predicts observation tokens
    correct_at: float | None  # the first reward of completions that the loss learns by their likelihood; None: of none
    draws_seeds: bool  # the loss draws random numbers
    pairs: int = 0  # of each prompt, for a loss that compares two completions; 0: rows are learned from as they are
    # Of rows by the name of their environment, and under None of all others; empty: the same on all rows.
    kl_weights: Mapping[str | None, float] = dataclasses.field(default_factory=dict)
    loss_weights: Mapping[str | None, float] = dataclasses.field(default_factory=dict)


class LogProbs(NamedTuple):
    """Arrays `[N,T]` of the rows as they were sampled, each None where nothing asks for it before the advantages."""

    old: jax.Array | None  # the policy that the ratio compares with
    reference: jax.Array | None
    values: jax.Array | None  # of the critic
    norms: jax.Array | None  # squared, of the gradients by the logits (`passes.scored_norms`)
    teacher: jax.Array | None


class Critic(NamedTuple):
    """PPO's value network, and a function that gives its parameters in a state."""

    net: Net
    params: Callable[[State], Params]


@dataclasses.dataclass
class Learner:
    """Steps 4 and 5: the batch of an update, of the rollouts of a producer."""

    spec: LearnerSpec
    batch: BatchSpec
    net: Net
    mesh: Mesh
    prompt_width: int
    reward_weights: np.ndarray  # [F]
    advantages: AdvantageStep
    pack: Packer
    stopwatch: Stopwatch
    controllers: Controllers
    reference: Reference | None = None
    replay: Replay | None = None
    critic: Critic | None = None
    teacher: Teacher | ServedTeacher | SelfTeacher | None = None
    context: TeacherContext | CrossTokenizer | None = None  # which makes the teacher's rows; None: it reads these
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)  # of roles, by name, for a rule that asks
    # By the value of the column that names them.
    other_teachers: Mapping[str, Teacher | ServedTeacher] = dataclasses.field(default_factory=dict)

    @property
    def kl_in_loss(self) -> bool:
        """True where the loss has a KL term; a policy loss that compares with the reference itself has none."""
        return self.reference is not None and not self.spec.kl_in_reward and self.spec.old_logps != "reference"

    def prepare(
        self, rollouts: Rollouts, state: State, key, made: Mapping[str, Any] = MappingProxyType({})
    ) -> Experience:
        """The batch with everything that its objective reads, and the metrics and table of the rollouts.

        `made` are metrics of how the rollouts were made. Raises RewardError where a reward function logs a name of the
        run's own.
        """
        spec, rollout, group_size = self.spec, rollouts.rollout, self.batch.group_size
        if self.reference is not None:
            self.reference.sync(state)
        teacher = self.teacher.at(state) if isinstance(self.teacher, SelfTeacher) else self.teacher
        mask = rollout.mask * rollout.finished[:, None] if spec.mask_truncated else rollout.mask
        images, shown = self._images(rollouts, state), None
        if self.context is not None:
            with self.stopwatch("logps"):
                scores = np.asarray(combine_rewards(rollouts.rewards, self.reward_weights))
                shown = self.context.read(rollouts, scores)
            if shown.asked is not None:
                columns = rollouts.logged.columns | {"teacher_prompt": shown.asked}
                rollouts = rollouts._replace(logged=rollouts.logged._replace(columns=columns))

        # 4 log-probs, of the rows as they were sampled
        before = self._log_probs(rollouts, state, images, teacher, shown)

        # 5 advantages
        result = self._advantages(rollouts, mask, before, None if shown is None else shown.taught)
        metrics: dict[str, Any] = dict(result.metrics) | ({} if shown is None else shown.metrics)
        if result.baselines is not None:
            self.baselines = dict(zip(self.baselines, np.asarray(result.baselines).tolist(), strict=True))
            metrics |= {f"{BASELINE}{name}": np.float32(value) for name, value in self.baselines.items()}

        # The batch of step 6, of these rows or of some that were kept, and what its loss compares them with.
        batch, ref_logps = self._batch(rollouts, images, before, result, int(state.step)), before.reference
        if batch.proximal_share is not None:
            metrics["rollout/proximal_share"] = masked_mean(batch.proximal_share, rollout.mask)
        if self.replay is not None:
            ref_logps = None  # of the rows before the exchange
            self.replay, batch, metrics["rollout/replayed_groups"] = replay_buffer.exchange(
                self.replay, batch, result.priority, jax.random.fold_in(key, REPLAY), group_size=group_size
            )
        if spec.pairs:
            batch, of_pairs = _paired(batch, result.scores, group_size, spec.pairs, self.mesh)
            metrics |= of_pairs
        batch = self._with_distributions(batch, ref_logps, teacher, shown)
        if spec.draws_seeds:  # those of all rows, so that the number of processes changes none
            first, group = int(jax.random.bits(jax.random.fold_in(key, ROW_SEEDS))), RowGroup.of(self.mesh)
            seeds = np.random.default_rng([first, 0]).integers(2**32, size=batch.rows, dtype=np.uint32)
            batch = batch.replace(seeds=rows_to_global(np.split(seeds, group.count)[group.index], self.mesh))

        metrics |= {**self.controllers.metrics(), **made}
        metrics |= over_processes(rollouts.logged, {*metrics, "step", "time"})  # which each line has
        self.controllers = self.controllers.after_rollouts(result.kl, batch.rows)
        row_advantages = local_rows(masked_mean(result.advantages, mask, axis=-1))
        table = rollouts.table(RowGroup.of(self.mesh), self.advantages.reward_names, {}, row_advantages)
        return Experience(batch, metrics, table)

    def _log_probs(
        self,
        rollouts: Rollouts,
        state: State,
        images: Images | None,
        teacher: Teacher | ServedTeacher | None,
        shown: ContextRows | SpanRows | None,
    ) -> LogProbs:
        """Step 4: the log-probs that are known before the advantages.

        The reference's are among them for a KL in the reward and for an adaptive coefficient; otherwise they are
        computed after the replay, which exchanges rows.
        """
        spec, rollout, rows, shards = self.spec, rollouts.rollout, self.batch.forward_rows, row_shards(self.mesh)
        old = rollout.sample_logps if spec.old_logps == "sampler" else None
        reference = values = norms = of_teacher = None
        measures_kl = spec.kl_in_reward or spec.reward_beta or self.controllers.is_kl_adaptive
        rates = teacher is not None and not teacher.spec.divergence  # sampled tokens, in the advantages
        reads_norms = self.advantages.asks_for("logit_norms")
        computed = spec.old_logps in ("trainer", "reference")
        with self.stopwatch("logps"):
            if computed or measures_kl or self.critic is not None or rates or reads_norms:
                inputs = self.inputs(rollout.tokens, rollout.segments, rollout.mask, images)
                if reads_norms:
                    own = on_device(state.params), inputs.replace(experts=rollout.experts), spec.temperature
                    logps, norms = scored_norms(self.net, *own, rows, shards)
                    old = logps if spec.old_logps == "trainer" else old
                elif spec.old_logps == "trainer":
                    old = self._logps(state.params, inputs.replace(experts=rollout.experts))
                if spec.old_logps == "reference":
                    old = self._reference_logps(inputs)
                if measures_kl:
                    reference = self._reference_logps(inputs)
                if self.critic is not None:
                    params = on_device(self.critic.params(state))
                    values = values_before(self.critic.net, params, inputs, rows, shards)
                if teacher is not None and rates and isinstance(shown, ContextRows):
                    of_teacher = shown.at_tokens(teacher.logps(shown.inputs, rows))
                elif teacher is not None and rates:
                    of_teacher = self._teacher_logps(teacher, rollouts, inputs)
        return LogProbs(old, reference, values, norms, of_teacher)

    def _advantages(self, rollouts: Rollouts, mask, before: LogProbs, taught) -> Advantages:
        """Step 5, from rewards, with a KL penalty and the teacher's log-probs if there are any.

        Raises ConfigError for a sub-agent's own reward beside a critic.
        """
        spec, greedy, parts, names = self.spec, rollouts.greedy, rollouts.parts, rollouts.roles
        if self.critic is not None and parts is not None and not np.isnan(parts.rewards).all():
            raise ConfigError(
                "a sub-agent was given a reward of its own, which is compared with its group's and with no critic: "
                "leave that out, or train with algorithm.name=grpo"
            )
        roles = reference_scores = rule_numbers = None
        if rollouts.reference_scores is not None:
            reference_scores = np.array(rollouts.reference_scores, np.float32)
        if self.advantages.asks_for("baselines") and parts is not None and names is not None:
            seen = gather([*dict.fromkeys(itertools.chain(*names))])  # each process its own rows'
            self.baselines = dict.fromkeys(itertools.chain(*seen), 0.0) | self.baselines
            numbers = {name: number for number, name in enumerate(self.baselines)}
            roles = np.zeros(parts.rewards.shape, np.int32)
            for row, own in enumerate(names):
                roles[row, : len(own)] = [numbers[name] for name in own]
        if len(self.advantages.rules) > 1:
            rule_numbers = self.advantages.rule_numbers(names_of_environments(rollouts.environments))
        of_rows = {
            "reference_scores": reference_scores,
            "greedy_rewards": None if greedy is None else greedy.rewards,
            "turns": rollouts.turns if self.advantages.asks_for("turns") else None,
            "parts": parts,
            "roles": roles,
            "rule_numbers": rule_numbers,
        }
        return self.advantages(
            rollouts.rollout,
            mask,
            rows_to_global(rollouts.rewards, self.mesh),
            self.reward_weights,
            logps=None if spec.old_logps == "reference" else before.old,
            ref_logps=before.reference,
            teacher_logps=before.teacher,
            taught=taught,
            kl_coef=self.controllers.kl.coef,
            values=before.values,
            logit_norms=before.norms,
            greedy_rollout=None if greedy is None else greedy.rollout,
            baselines=None if roles is None else np.array([*self.baselines.values()], np.float32),
            **rows_to_global(of_rows, self.mesh),
        )

    def _batch(
        self, rollouts: Rollouts, images: Images | None, before: LogProbs, result: Advantages, step: int
    ) -> Batch:
        """The rows that were sampled, after `step` training steps, with what the loss reads of each. `like` has the
        same fields."""
        spec, rollout, proximal, positive, observed = self.spec, rollouts.rollout, None, None, None
        if spec.old_logps == "interpolated":
            versions = np.full((len(rollouts.prompts), rollout.tokens.shape[1]), rollouts.version, np.int32)
            if rollouts.partial is not None:
                versions[:, self.prompt_width :] = rollouts.partial.versions
            proximal = proximal_share(rows_to_global(versions, self.mesh), step)
        if spec.correct_at is not None:
            correct = (rollouts.rewards[:, 0] >= spec.correct_at).astype(np.float32)
            positive = rows_to_global(correct, self.mesh)
        if spec.observations:
            observed = observation_mask(rollout.segments, rollout.mask, self.prompt_width)
        return Batch(
            Inputs(
                rollout.tokens, rollout.segments, images=images, experts=rollout.experts, prompt_width=self.prompt_width
            ),
            mask=result.mask,
            sample_logps=rollout.sample_logps,
            old_logps=before.old,
            proximal_share=proximal,
            advantages=result.advantages,
            values=before.values,
            returns=result.returns,
            positive=positive,
            observed=observed,
            **self.weights_of_rows(rollouts.environments),
        )

    def like(self, tokens, segments, mask) -> Batch:
        """A batch of these rows with the fields, shapes and types of those of `prepare`, in which the mask stands for
        other numbers: for programs that are compiled before there is one. It is without scalars, and without what
        `ahead.compilations` leaves to the first step."""
        spec, rows = self.spec, len(tokens)
        return Batch(
            Inputs(tokens, segments, prompt_width=self.prompt_width),
            mask=mask,
            sample_logps=mask,
            old_logps=mask if spec.old_logps in ("trainer", "sampler", "reference") else None,
            proximal_share=mask if spec.old_logps == "interpolated" else None,
            ref_logps=mask if self.kl_in_loss else None,
            advantages=mask,
            positive=mask[:, 0] if spec.correct_at is not None else None,
            observed=mask if spec.observations else None,
            seeds=np.zeros(rows, np.uint32) if spec.draws_seeds else None,
            **self.weights_of_rows([""] * rows),
        )

    def _with_distributions(
        self,
        batch: Batch,
        ref_logps: jax.Array | None,
        teacher: Teacher | ServedTeacher | None,
        shown: ContextRows | SpanRows | None,
    ) -> Batch:
        """The batch with the coefficients of its loss, and with what the loss compares the policy with: the reference's
        log-probs, which are `ref_logps` where these are known, or its distributions; and the teacher's distributions.
        """
        rows, ref_head = self.batch.forward_rows, None

        def inputs() -> Inputs:
            own = batch.inputs
            return self.inputs(own.tokens, own.segments, batch.mask, own.images)

        if self.kl_in_loss:
            with self.stopwatch("logps"):
                if self.spec.full_kl:
                    assert self.reference is not None
                    own = on_device(self.reference.params), inputs(), rows, row_shards(self.mesh)
                    ref_hidden, ref_head = scored_distributions(self.net, *own)
                    batch = batch.replace(ref_hidden=ref_hidden)
                else:
                    batch = batch.replace(ref_logps=self._reference_logps(inputs()) if ref_logps is None else ref_logps)
        batch = batch.replace(scalars=self.scalars(batch, ref_head))
        if teacher is not None and teacher.spec.divergence:
            with self.stopwatch("logps"):
                batch = teacher.with_distributions(batch, inputs() if shown is None else shown.inputs, rows)
                batch = batch if shown is None else shown.aligned(batch)
        return batch

    def learn(self, metrics: dict[str, float]) -> None:
        """Update what depends on the metrics of a step's updates."""
        entropy = metrics.get("entropy_kept", metrics.get("entropy", math.nan))
        if not math.isnan(entropy):  # as where only the critic was trained, or every row was masked
            self.controllers = self.controllers.after_updates(entropy)

    def get_state(self) -> dict[str, float]:
        """The numbers, by name, that a resumed run needs: the controllers', and the baselines of roles."""
        return self.controllers.get_state() | {f"{BASELINE}{name}": value for name, value in self.baselines.items()}

    def get_arrays(self) -> dict[str, Any]:
        """The trees of arrays, by name, that a resumed run needs."""
        reference = {} if self.reference is None else self.reference.arrays()
        if isinstance(self.teacher, SelfTeacher):
            reference |= self.teacher.arrays()
        return reference | ({} if self.replay is None else {"replay": replay_buffer.get_arrays(self.replay)})

    def restore(self, state: dict[str, float], arrays: dict[str, Any]) -> None:
        """Restore the numbers and the arrays; what they lack (it was not used) keeps its initial state."""
        self.controllers = self.controllers.with_state(state)
        known = (name for name in state if name.startswith(BASELINE))
        self.baselines = {name.removeprefix(BASELINE): state[name] for name in known}
        if self.reference is not None:
            self.reference.restore(arrays)
        if isinstance(self.teacher, SelfTeacher):
            self.teacher.restore(arrays)
        if self.replay is not None and "replay" in arrays:
            self.replay = replay_buffer.with_arrays(self.replay, arrays["replay"])

    def inputs(self, tokens, segments, mask, images: Images | ImageEmbeddings | None = None) -> Inputs:
        """The rows as a network reads them for the log-probs or values of the tokens in the mask."""
        layout = self.pack.passing(tokens, segments, mask)
        return Inputs(tokens, segments, images=images, layout=layout, prompt_width=self.prompt_width)

    def _images(self, rollouts: Rollouts, state: State) -> Images | None:
        """The images of the rows; raises ConfigError for settings that would lose them.

        What encodes them is frozen, or each pass encodes anew. A critic has an encoder of its own.
        """
        if rollouts.images is None:
            return None
        check_kept(self.replay is not None, self.teacher is not None)  # rows may be streamed, or an environment's
        encode = "vision" in self.net.config.frozen and self.critic is None
        size = len(rollouts.rollout.tokens) // len(rollouts.images.count)  # rows of a prompt; 1 where each has its own
        with self.stopwatch("logps"):
            shards = row_shards(self.mesh)
            return images_of_rows(self.net, on_device(state.params), rollouts.images, size, encode, shards)

    def _logps(self, params: Params, inputs: Inputs) -> jax.Array:
        rows, shards = self.batch.forward_rows, row_shards(self.mesh)
        return scored_logps(self.net, on_device(params), inputs, self.spec.temperature, rows, shards)

    def _reference_logps(self, inputs: Inputs) -> jax.Array:
        assert self.reference is not None  # as is where a setting or a loss reads it
        return self._logps(self.reference.params, inputs)

    def _teacher_logps(self, first: Teacher | ServedTeacher, rollouts: Rollouts, inputs: Inputs) -> jax.Array:
        """Log-probs `[N,T]` of the teacher, and on rows that name another teacher those of that one.

        Each teacher reads its own rows; the others are padding to it, of which packed rows have none.
        """
        rows, column = self.batch.forward_rows, first.spec.column
        if not self.other_teachers:
            return first.logps(inputs, rows)
        names = [str(example.get(column)) for example in rollouts.examples for _ in range(self.batch.group_size)]
        total, rollout = jnp.zeros(rollouts.rollout.mask.shape), rollouts.rollout
        for name, teacher in [(None, first), *self.other_teachers.items()]:
            own = [other == name if name is not None else other not in self.other_teachers for other in names]
            mine = rows_to_global(np.array(own, np.int32), self.mesh)[:, None]
            read = self.inputs(rollout.tokens, rollout.segments * mine, rollout.mask * mine)
            total += teacher.logps(read, rows)  # 0 on the rows of others
        return total

    def weights_of_rows(self, environments: Sequence[str] | None) -> dict[str, Any]:
        """The fields of a batch that differ by the environments of rows `[N]`: `kl_weight` and `loss_weight`.

        A field is left out where all rows have the same weight, and `kl_weight` where the loss has no KL term.
        """
        by_field = {"kl_weight": self.spec.kl_weights if self.kl_in_loss else {}, "loss_weight": self.spec.loss_weights}
        fields = {}
        for field, weights in by_field.items():
            if weights:
                own = [weights.get(name, weights[None]) for name in names_of_environments(environments)]
                fields[field] = rows_to_global(np.array(own, np.float32), self.mesh)
        return fields

    def scalars(self, batch: Batch, ref_head=None) -> Scalars:
        """The coefficients that change from step to step, and the tokens of an average optimizer batch where the
        weights divide by them."""
        kl, entropy, tokens = self.controllers.kl.coef, self.controllers.entropy, None
        if self.spec.aggregation == "rollout_token":
            tokens = np.float32(float((batch.mask > 0).sum()) / self.batch.minibatches)
        moves = self.kl_in_loss and self.controllers.is_kl_adaptive and not self.spec.reward_beta
        return Scalars(
            kl_coef=np.float32(kl) if moves else None,
            entropy_coef=None if entropy is None else np.float32(entropy.applied),
            token_count=tokens,
            ref_head=ref_head,
        )


@functools.partial(jax.jit, static_argnames=("group_size", "pairs", "mesh"))
def _paired(batch: Batch, scores, group_size: int, pairs: int, mesh: Mesh) -> tuple[Batch, dict[str, jax.Array]]:
    """The rows of a batch in pairs (`ranked_pairs`), those that are in none empty, and the metrics of the pairs."""
    order, used = ranked_pairs(scores, group_size, pairs)
    kept = jnp.repeat(used, 2)[:, None]
    batch = rows_at(batch, order, group_size, mesh)
    batch = batch.replace(mask=batch.mask * kept, inputs=batch.inputs.replace(segments=batch.inputs.segments * kept))
    better, worse = scores[order].reshape(-1, 2).T
    margin = jnp.where(used.any(), masked_mean(jnp.where(used, better - worse, 0.0), used), jnp.nan)
    return batch, {"pairs/count": used.sum().astype(jnp.float32), "pairs/score_margin": margin}


def names_of_environments(environments: Sequence[str] | None) -> Sequence[str]:
    """The names of rows' environments; raises ConfigError for rollouts that an earlier version saved without them."""
    if environments is None:
        raise ConfigError(
            "environment.options is set, but the checkpoint has rollouts of a run of an earlier version, which do not "
            "say their environments: leave it out until these are learned from (rollout.staleness steps)"
        )
    return environments
