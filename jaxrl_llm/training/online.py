"""One step of an online algorithm, from prompts to the batch of an update. Read it from top to bottom.

| half | step | in -> out |
|---|---|---|
| `Producer` | 1 prompts | resumable iterator -> examples |
| | 2 rollout | policy version, prompts, a key per row -> tokens, segments, mask, sample_logps `[N,T]` |
| | 3 reward | texts, ids, columns -> rewards `[N,F]`, NaN where a function does not apply; overlaps with 2 |
| `Learner` | 4 log-probs | of the old policy, the reference, the teacher; values: `[N,T]`, each where it is needed |
| | 5 advantages | rewards, mask, values, teacher's log-probs -> advantages `[N,T]` |
| (step.py) | 6 update | minibatches x micro-batches -> state, metrics |

The producer reads a version of the policy and touches no training state: its state is the position in the data. The
learner's is the reference, the replay buffer and the controllers. `OnlineSource` joins the two by a queue: of length 0,
each batch is sampled from the policy that it updates; of more (`rollout.staleness`), a thread makes batches ahead.
"""

import dataclasses
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
from jaxrl_llm.algorithms.batch import Batch, Images, Inputs, Scalars, observation_mask
from jaxrl_llm.algorithms.controllers import Controllers
from jaxrl_llm.algorithms.off_policy import proximal_share
from jaxrl_llm.algorithms.random_streams import REPLAY, ROW_SEEDS
from jaxrl_llm.algorithms.sample_statistics import success_rates
from jaxrl_llm.algorithms.turn_advantages import Turns, turn_table
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import columns_of, pad_prompts
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.data.pipeline import Prompts
from jaxrl_llm.data.templates import decode_completion, is_conversational
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import local_rows, on_device, row_shards, rows_to_global
from jaxrl_llm.distributed.turns import turn, yielded
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.environments.factory import COLUMN
from jaxrl_llm.models.adapters.lora import copied
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.models.vision.row_images import count_tiles
from jaxrl_llm.rewards.runner import NO_STEP, NOTHING_LOGGED, Graded, Logged, Rewards, TrainerState
from jaxrl_llm.rewards.streaming import StreamingRewards
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.multi_turn import SilentTurnServer
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.advantages import AdvantageStep
from jaxrl_llm.training.algorithm import BatchSpec
from jaxrl_llm.training.images import IMAGES, check_kept, prompt_images, shown_images
from jaxrl_llm.training.logging.reward_metrics import add_totals, over_processes
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.passes import (
    images_of_rows,
    scored_distributions,
    scored_logps,
    scored_norms,
    values_before,
)
from jaxrl_llm.training.reference import Reference
from jaxrl_llm.training.rollouts import replay as replay_buffer
from jaxrl_llm.training.rollouts.agent_rollout import AgentRollout
from jaxrl_llm.training.rollouts.arrivals import Arrivals
from jaxrl_llm.training.rollouts.dynamic_sampling import fill
from jaxrl_llm.training.rollouts.experience import Experience, Partial, Rollouts
from jaxrl_llm.training.rollouts.external_rollout import ExternalRollout
from jaxrl_llm.training.rollouts.partial_rollouts import PartialRollouts
from jaxrl_llm.training.rollouts.replay import Replay
from jaxrl_llm.training.rollouts.rollout_files import FileQueue
from jaxrl_llm.training.rollouts.rollout_queue import RolloutQueue
from jaxrl_llm.training.step_credit import StepCredit
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer
from jaxrl_llm.training.teachers.served_teacher import ServedTeacher
from jaxrl_llm.training.teachers.teacher import SelfTeacher, Teacher
from jaxrl_llm.training.teachers.teacher_context import ContextRows, TeacherContext
from jaxrl_llm.training.update import State

BASELINE = "baselines/"  # before the names of roles


@dataclasses.dataclass(frozen=True)
class RolloutWorker:
    """Steps 2 and 3: `group_size` completions of each prompt, and their rewards.

    With `open_episodes` rows are episodes of environments; `external` samples in place of the engine, and `agents` run
    the programs whose sessions are the rows. With `arrivals` a policy may come while rows are sampled. Of
    `several_environments` a column of each row names its own. With `steps` those of completions are turns. Completions
    are texts where `external` makes texts, and otherwise what their prompts are, texts or messages.
    """

    engine: Engine
    rewards: Rewards
    tokenizer: Any
    mesh: Mesh
    prompt_width: int
    stopwatch: Stopwatch
    open_episodes: Callable[[list[Row], int], EpisodeBatch] | None = None
    external: ExternalRollout | None = None
    agents: AgentRollout | None = None
    as_texts: bool = False
    arrivals: Arrivals | None = None
    several_environments: bool = False
    steps: StepCredit | None = None

    def __call__(
        self,
        params: Params,
        examples: list[Row],
        key,
        first_row: int = 0,
        state: TrainerState = NO_STEP,
        sampled: Rollout | None = None,
        counted: int | None = None,
    ) -> Rollouts:
        """The completions of every example of this process, rows of a prompt adjacent.

        Row i draws its random numbers from `fold_in(key, first_row + i)`. Rows that are `sampled` are graded alone. Of
        the examples those behind the first `counted` fill up the batch: they are sampled, and get no reward (NaN).
        """
        group_size, width, group = self.engine.group_size, self.prompt_width, RowGroup.of(self.mesh)
        with self.stopwatch("rollout"), turn():
            plays, episodes = self.open_episodes is not None, None
            if self.open_episodes is not None and group.leads:
                episodes = self.open_episodes(examples, group_size)
            opened = examples if episodes is None else episodes.examples
            if plays and group.size > 1:
                found = group.shared([{name: row[name] for name in ("prompt", "prompt_ids")} for row in opened])
                opened = [{**row, **prompt} for row, prompt in zip(opened, found, strict=True)]
            rows = [example for example in opened for _ in range(group_size)]
            columns = columns_of(rows, ("prompt", "prompt_ids", PIXELS))
            prompts = [row["prompt"] for row in rows]
            graded_rows = len(rows) if counted is None else counted * group_size
            with all_or_none():
                shown = shown_images(opened, group_size)
            columns |= {} if shown is None else {IMAGES: shown[0]}

            def decode(row: int, tokens: list[int]) -> Any:
                conversational = is_conversational(prompts[row]) and not self.as_texts
                return decode_completion(self.tokenizer, tokens, conversational)

            def opened_rewards(columns: dict[str, list[Any]]) -> StreamingRewards:
                known = {name: values[:graded_rows] for name, values in columns.items()}
                numbers = [row // group_size for row in range(graded_rows)]
                return StreamingRewards(self.rewards.open(prompts[:graded_rows], known, state, numbers), decode)

            streaming = None
            # Rows are graded while others are still sampled, unless their rewards need the whole conversation.
            others = (self.external, self.agents, sampled)
            if not plays and not any(x is not None for x in others) and self.rewards.takes_rows:
                with all_or_none():
                    streaming = opened_rewards(columns) if group.leads else None
            results: dict[str, list[Any]] = {}  # columns for rewards that come with the rollout
            published: Mapping[str, float] = {}  # metrics of weights that were sent for it
            sessions = images = None
            seen = [row for row in opened if any(count_tiles([row.get(PIXELS)]))]
            if self.external is not None and seen:
                raise ConfigError(
                    "rows have images, which environment.rollout_func does not hand on: leave it unset, or use rows "
                    "without images"
                )
            if self.agents is not None:
                if any(not isinstance(row[PIXELS], Tiles) for row in seen):
                    raise ConfigError(
                        "rows have images as pixels, which environment.agent does not hand on: give them as files, "
                        "bytes or data: URLs (docs/vision.md)"
                    )
                rollout, sessions = self.agents(params, opened, jax.random.fold_in(key, first_row))
                with all_or_none():
                    images = prompt_images(sessions.image_rows(rows), self.engine.net.config.vision)
                images = rows_to_global(images, self.mesh)
            elif self.external is not None:
                rollout, results = self.external(params, opened, jax.random.fold_in(key, first_row), state)
                published = self.external.metrics()
            else:
                with all_or_none():
                    images = prompt_images(opened, self.engine.net.config.vision)
                images = rows_to_global(images, self.mesh)
                rollout = sampled
                if rollout is None:
                    padded = pad_prompts([example["prompt_ids"] for example in opened], width)
                    group.check_same(*padded)
                    tokens, segments = rows_to_global(padded, self.mesh)
                    arrivals = self.arrivals
                    rollout = self.engine.generate(
                        params if arrivals is None else arrivals.start(params), tokens, segments, key, first_row,
                        SilentTurnServer() if plays and episodes is None else episodes,
                        on_finished=streaming, images=images,
                        on_border=None if arrivals is None else arrivals.border,
                    )  # fmt: skip
            tokens, lengths = local_rows((rollout.tokens, rollout.lengths))
            partial = None
            if self.arrivals is not None and sampled is None:
                partial = Partial(self.arrivals.versions(lengths, tokens.shape[1] - width), 0, 1)
        with self.stopwatch("reward"), yielded(), all_or_none():
            ids = [row[width : width + length].tolist() for row, length in zip(tokens, lengths, strict=True)]
            texts = None
            if episodes is not None:
                texts, results = episodes.finish(ids, self.rewards.workers is None)
            elif sessions is not None:
                texts, results = sessions.finish(prompts, ids)
            if group.leads:
                if streaming is None:
                    streaming = opened_rewards(columns | results)
                texts = streaming.finish(ids, texts)
                graded = streaming.pending.result()
            else:
                texts = []
                graded = Graded(np.zeros((graded_rows, len(self.rewards.names)), np.float32), NOTHING_LOGGED)
            if spare := len(rows) - graded_rows:
                rewards = np.pad(graded.rewards, ((0, spare), (0, 0)), constant_values=np.nan)
                filled = {name: [*values, *[None] * spare] for name, values in graded.logged.columns.items()}
                graded = Graded(rewards, graded.logged._replace(columns=filled))
            if sessions is not None:  # whatever else rewards say: nothing is learned from a session that failed
                graded = graded._replace(rewards=np.where(sessions.failed[:, None], np.float32(np.nan), graded.rewards))
            turns = parts = roles = None
            if sessions is not None:
                parts, roles = turn_table(*sessions.parts(), group_size, width), sessions.roles()
            if (played := episodes or sessions) is not None:
                turns = turn_table(*played.turn_records(lengths.tolist()), group_size, width)
                metrics, totals, table = played.release(graded_rows)
                logged = graded.logged
                logged = Logged(logged.metrics | metrics, logged.totals | totals, logged.columns | table)
                graded = graded._replace(logged=logged)
            elif self.steps is not None and group.leads:
                turns = self.steps.table(graded, texts, ids, group_size, width)
            logged = graded.logged
            logged = logged._replace(metrics=logged.metrics | {name: [x] for name, x in published.items()})
            if shown is not None:
                logged = logged._replace(columns={IMAGES: shown[1]} | logged.columns)
            names = [str(row.get(COLUMN)) for row in rows] if self.several_environments else None
            rollouts = Rollouts(
                rollout, examples, prompts, texts, graded.rewards, logged, turns=turns, images=images, parts=parts,
                partial=partial, roles=roles, environments=names,
            )  # fmt: skip
        if group.size == 1:
            return rollouts
        # What the leader found is its group's; what it logged stays with it, and counts once.
        lists = group.shared(None if rollouts.turns is None else [x.tolist() for x in rollouts.turns])
        return rollouts._replace(
            rewards=group.shared_array(rollouts.rewards),
            completions=group.shared(rollouts.completions),
            turns=None if lists is None else Turns(*map(np.array, lists, (np.float32, np.int32, np.int32))),
        )

    def copy_policy(self, params: Params) -> Params:
        """The policy's parameters in arrays that no update donates, from which the same is sampled."""
        return copied(params) if self.external is not None else self.engine.policy_copy(params)


@dataclasses.dataclass(frozen=True)
class ProducerSpec:
    """The settings of a producer."""

    prompts: int  # of a step, over all processes
    total_steps: int
    dynamic_sampling: bool
    dynamic_sampling_metric: str | None  # the column of numbers that tells flat groups; None is the rewards
    max_sampling_rounds: int
    replay_groups: int
    correct_at: float  # a completion is solved when its first reward is at least this; for a curriculum


@dataclasses.dataclass(frozen=True)
class Producer:
    """Steps 1 to 3. `greedy` samples the baseline of a rule that compares with it; with `partial` rows are sampled over
    several steps.

    `flat_groups(rewards, weights, environments) -> [B]` is true for prompts whose completions all have the same reward.
    """

    spec: ProducerSpec
    worker: RolloutWorker
    greedy: RolloutWorker | None
    pipeline: Prompts
    flat_groups: Callable[[np.ndarray, Any, list[str] | None], np.ndarray]
    partial: PartialRollouts | None = None

    def produce(self, params: Params, version: int, step: int, key) -> Rollouts:
        """The rollouts of a step, by the policy of `version` training steps.

        With `dynamic_sampling`, flat groups are sampled again for other prompts, until none is left. Raises ConfigError
        when some are left after the last round, and no replay buffer fills up.
        """
        spec, state, group = self.spec, TrainerState(step - 1, self.spec.total_steps), RowGroup.of(self.worker.mesh)
        rollouts = self._sample(params, version, key, 0, state)
        if spec.dynamic_sampling:
            flat, resampled = self._flat(rollouts), 0
            rows = len(rollouts.rewards) * group.count
            for sampling_round in range(1, spec.max_sampling_rounds):
                missing = sum(group.gather(int(flat.sum())))
                if not missing:
                    break
                resampled += missing
                # Later rounds count their rows on, so that no two rows of a step draw the same numbers.
                fresh = self._sample(params, version, key, sampling_round * rows, state)
                fresh_flat = self._flat(fresh)
                with turn():
                    rollouts, flat = fill(rollouts, flat, fresh, fresh_flat, self.worker.mesh)
            missing = sum(group.gather(int(flat.sum())))
            if missing and not spec.replay_groups:
                raise ConfigError(
                    f"algorithm.dynamic_sampling: after {spec.max_sampling_rounds} rounds of sampling, the completions "
                    f"of {missing} prompts of {spec.prompts} still score alike. Raise algorithm.max_sampling_rounds, "
                    "fill up from earlier steps with algorithm.replay_groups, set algorithm.dynamic_sampling to false, "
                    "or give prompts that are neither too easy nor too hard"
                )
            rollouts = rollouts._replace(resampled_groups=resampled)
        if self.greedy is not None:
            greedy = self.greedy(params, rollouts.examples, key, state=state)
            rollouts = rollouts._replace(greedy=greedy, logged=add_totals(rollouts.logged, greedy.logged))
        return rollouts._replace(version=version, epochs=self.pipeline.epochs)

    def _flat(self, rollouts: Rollouts) -> np.ndarray:
        """Booleans `[B]`, true for prompts whose completions are all alike in what dynamic sampling looks at.

        Raises ConfigError, in all processes, where that is a column that no reward function logs, or is no number.
        """
        rewards, weights, metric = rollouts.rewards, self.worker.rewards.weights, self.spec.dynamic_sampling_metric
        if metric is not None:
            group, numbers = RowGroup.of(self.worker.mesh), [0.0] * len(rewards)
            with all_or_none():
                columns, named = rollouts.logged.columns, "algorithm.dynamic_sampling_metric is"
                found = [name for name in columns if metric in (name, name.rpartition("/")[2])]
                if group.leads and len(found) != 1:
                    raise ConfigError(
                        f"{named} {metric!r}, but reward functions log {', '.join(found or columns) or 'nothing'}: "
                        "name the column of one of them, which log_extra or a value beside the score makes"
                    )
                try:
                    if group.leads:
                        numbers = [np.nan if value is None else float(value) for value in columns[found[0]]]
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{named} {metric!r}, a column of other things than numbers: {error}") from None
            rewards, weights = group.shared_array(np.array(numbers, np.float32)[:, None]), np.ones(1, np.float32)
        return self.flat_groups(rewards, weights, rollouts.environments)

    def _sample(self, params: Params, version: int, key, first_row: int, state: TrainerState) -> Rollouts:
        """The rollouts of the next prompts, with their scores by the reference where these are known.

        A curriculum learns how often the prompts are solved.
        """
        if self.partial is not None:
            examples, rollout, partial = self.partial.take(params, version)
            return self.worker(params, examples, key, first_row, state, rollout)._replace(partial=partial)
        with all_or_none():
            examples = next(self.pipeline)
        rollouts = self.worker(params, examples, key, first_row, state)
        if isinstance(self.pipeline, Curriculum):
            own = success_rates(rollouts.rewards, len(examples), self.spec.correct_at)
            rates = RowGroup.of(self.worker.mesh).gather(own)
            self.pipeline.observe([rate for share in rates for rate in share])
        if self.pipeline.newest is not None:
            scores = np.repeat(self.pipeline.newest, self.worker.engine.group_size, axis=0)
            rollouts = rollouts._replace(reference_scores=scores.tolist())
        return rollouts


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
    draws_seeds: bool  # the loss draws random numbers
    # Of rows by the name of their environment, and under None of all others; empty: the same on all rows.
    kl_weights: Mapping[str | None, float] = dataclasses.field(default_factory=dict)
    loss_weights: Mapping[str | None, float] = dataclasses.field(default_factory=dict)


class Critic(NamedTuple):
    """PPO's value network, and its parameters in a state."""

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
        spec, rollout, controllers = self.spec, rollouts.rollout, self.controllers
        if self.reference is not None:
            self.reference.sync(state)
        teacher = self.teacher.at(state) if isinstance(self.teacher, SelfTeacher) else self.teacher
        in_loss = self.kl_in_loss
        mask = rollout.mask * rollout.finished[:, None] if spec.mask_truncated else rollout.mask
        images = self._images(rollouts, state)
        shown = None
        if self.context is not None:
            with self.stopwatch("logps"):
                scores = np.asarray(combine_rewards(rollouts.rewards, self.reward_weights))
                shown = self.context.read(rollouts, scores)
            if shown.asked is not None:
                columns = rollouts.logged.columns | {"teacher_prompt": shown.asked}
                rollouts = rollouts._replace(logged=rollouts.logged._replace(columns=columns))

        # 4 log-probs. The reference's are needed before the advantages for a KL in the reward, or one that is measured
        # to move its coefficient; else after the replay, which exchanges rows.
        old_logps = rollout.sample_logps if spec.old_logps == "sampler" else None
        ref_logps = ref_head = values = logit_norms = teacher_logps = None
        measures_kl = spec.kl_in_reward or spec.reward_beta or controllers.is_kl_adaptive
        rates = teacher is not None and not teacher.spec.divergence  # sampled tokens, in the advantages
        reads_norms = self.advantages.asks_for("logit_norms")
        with self.stopwatch("logps"):
            computed = spec.old_logps in ("trainer", "reference")
            if computed or measures_kl or self.critic is not None or rates or reads_norms:
                inputs = self.inputs(rollout.tokens, rollout.segments, rollout.mask, images)
                if reads_norms:
                    own = on_device(state.params), inputs.replace(experts=rollout.experts), spec.temperature
                    logps, logit_norms = scored_norms(self.net, *own, self.batch.forward_rows, row_shards(self.mesh))
                    old_logps = logps if spec.old_logps == "trainer" else old_logps
                elif spec.old_logps == "trainer":
                    old_logps = self._logps(state.params, inputs.replace(experts=rollout.experts))
                if spec.old_logps == "reference":
                    old_logps = self._reference_logps(inputs)
                if measures_kl:
                    ref_logps = self._reference_logps(inputs)
                if self.critic is not None:
                    params, shards = on_device(self.critic.params(state)), row_shards(self.mesh)
                    values = values_before(self.critic.net, params, inputs, self.batch.forward_rows, shards)
                if teacher is not None and rates and isinstance(shown, ContextRows):
                    teacher_logps = shown.at_tokens(teacher.logps(shown.inputs, self.batch.forward_rows))
                elif teacher is not None and rates:
                    teacher_logps = self._teacher_logps(teacher, rollouts, inputs)

        if self.critic is not None and rollouts.parts is not None and not np.isnan(rollouts.parts.rewards).all():
            raise ConfigError(
                "a sub-agent was given a reward of its own, which is compared with its group's and with no critic: "
                "leave that out, or train with algorithm.name=grpo"
            )

        # 5 advantages, of rewards that may hold the KL penalty, and of what the teacher says of each token.
        greedy, roles, names = rollouts.greedy, None, rollouts.roles
        reference_scores = rollouts.reference_scores
        if reference_scores is not None:
            reference_scores = np.array(reference_scores, np.float32)
        if self.advantages.asks_for("baselines") and rollouts.parts is not None and names is not None:
            seen = gather([*dict.fromkeys(itertools.chain(*names))])  # each process its own rows'
            self.baselines = dict.fromkeys(itertools.chain(*seen), 0.0) | self.baselines
            numbers = {name: number for number, name in enumerate(self.baselines)}
            roles = np.zeros(rollouts.parts.rewards.shape, np.int32)
            for row, own in enumerate(names):
                roles[row, : len(own)] = [numbers[name] for name in own]
        result = self.advantages(
            rollout,
            mask,
            rows_to_global(rollouts.rewards, self.mesh),
            self.reward_weights,
            logps=None if spec.old_logps == "reference" else old_logps,
            ref_logps=ref_logps,
            teacher_logps=teacher_logps,
            taught=None if shown is None else shown.taught,
            kl_coef=controllers.kl.coef,
            values=values,
            logit_norms=logit_norms,
            reference_scores=rows_to_global(reference_scores, self.mesh),
            greedy_rewards=None if greedy is None else rows_to_global(greedy.rewards, self.mesh),
            greedy_rollout=None if greedy is None else greedy.rollout,
            turns=rows_to_global(rollouts.turns, self.mesh) if self.advantages.asks_for("turns") else None,
            parts=rows_to_global(rollouts.parts, self.mesh),
            roles=rows_to_global(roles, self.mesh),
            baselines=None if roles is None else np.array([*self.baselines.values()], np.float32),
            rule_numbers=None
            if len(self.advantages.rules) == 1
            else rows_to_global(self.advantages.rule_numbers(names_of_environments(rollouts.environments)), self.mesh),
        )
        metrics = dict(result.metrics) | ({} if shown is None else shown.metrics)
        if result.baselines is not None:
            self.baselines = dict(zip(self.baselines, np.asarray(result.baselines).tolist(), strict=True))
            metrics |= {f"{BASELINE}{name}": np.float32(value) for name, value in self.baselines.items()}
        if rollouts.resampled_groups is not None:
            metrics["rollout/resampled_groups"] = np.float32(rollouts.resampled_groups)
        batch = Batch(
            Inputs(
                rollout.tokens, rollout.segments, images=images, experts=rollout.experts, prompt_width=self.prompt_width
            ),
            mask=result.mask,
            sample_logps=rollout.sample_logps,
            old_logps=old_logps,
            advantages=result.advantages,
            values=values,
            returns=result.returns,
            **self.weights_of_rows(rollouts.environments, in_loss),
        )
        if spec.old_logps == "interpolated":
            versions = np.full((len(rollouts.prompts), rollout.tokens.shape[1]), rollouts.version, np.int32)
            if rollouts.partial is not None:
                versions[:, self.prompt_width :] = rollouts.partial.versions
            batch = batch.replace(proximal_share=proximal_share(rows_to_global(versions, self.mesh), int(state.step)))
            metrics["rollout/proximal_share"] = masked_mean(batch.proximal_share, rollout.mask)
        if spec.observations:
            batch = batch.replace(observed=observation_mask(rollout.segments, rollout.mask, self.prompt_width))
        if self.replay is not None:
            ref_logps, group_size = None, self.batch.group_size  # the reference's are of the rows before the exchange
            self.replay, batch, metrics["rollout/replayed_groups"] = replay_buffer.exchange(
                self.replay, batch, result.priority, jax.random.fold_in(key, REPLAY), group_size=group_size
            )
        if in_loss:
            with self.stopwatch("logps"):
                if spec.full_kl or ref_logps is None:
                    inputs = self.inputs(batch.inputs.tokens, batch.inputs.segments, batch.mask, images)
                if spec.full_kl:
                    assert self.reference is not None
                    own = on_device(self.reference.params), inputs, self.batch.forward_rows, row_shards(self.mesh)
                    ref_hidden, ref_head = scored_distributions(self.net, *own)
                    batch = batch.replace(ref_hidden=ref_hidden)
                else:
                    batch = batch.replace(ref_logps=self._reference_logps(inputs) if ref_logps is None else ref_logps)
        batch = batch.replace(scalars=self.scalars(batch, in_loss, ref_head))
        if teacher is not None and not rates:
            with self.stopwatch("logps"):
                if shown is None:
                    inputs = self.inputs(batch.inputs.tokens, batch.inputs.segments, batch.mask)
                    batch = teacher.with_distributions(batch, inputs, self.batch.forward_rows)
                else:
                    batch = teacher.with_distributions(batch, shown.inputs, self.batch.forward_rows)
                    batch = shown.aligned(batch)
        if spec.draws_seeds:
            batch = batch.replace(seeds=_row_seeds(batch.rows, key, self.mesh))

        metrics |= {**controllers.metrics(), **made}
        metrics |= over_processes(rollouts.logged, metrics)
        self.controllers = controllers.after_rollouts(result.kl, batch.rows)
        row_advantages = local_rows(masked_mean(result.advantages, mask, axis=-1))
        table = rollouts.table(RowGroup.of(self.mesh), self.advantages.reward_names, {}, row_advantages)
        return Experience(batch, metrics, table)

    def learn(self, metrics: dict[str, float]) -> None:
        """Move what follows the metrics of a step's updates."""
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
        """Take up the numbers and the arrays; what these lack (it was not used) stays as it starts."""
        self.controllers = self.controllers.with_state(state)
        known = (name for name in state if name.startswith(BASELINE))
        self.baselines = {name.removeprefix(BASELINE): state[name] for name in known}
        if self.reference is not None:
            self.reference.restore(arrays)
        if isinstance(self.teacher, SelfTeacher):
            self.teacher.restore(arrays)
        if self.replay is not None and "replay" in arrays:
            self.replay = replay_buffer.with_arrays(self.replay, arrays["replay"])

    def inputs(self, tokens, segments, mask, images: Images | None = None) -> Inputs:
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
            return images_of_rows(self.net, on_device(state.params), rollouts.images, size, encode)

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

    def weights_of_rows(self, environments: Sequence[str] | None, in_loss: bool) -> dict[str, Any]:
        """The fields of a batch that differ by the environments of rows `[N]`: `kl_weight` and `loss_weight`.

        Neither where all rows have the same; no `kl_weight` where the KL term is not `in_loss`.
        """
        by_field = {"kl_weight": self.spec.kl_weights if in_loss else {}, "loss_weight": self.spec.loss_weights}
        fields = {}
        for field, weights in by_field.items():
            if weights:
                own = [weights.get(name, weights[None]) for name in names_of_environments(environments)]
                fields[field] = rows_to_global(np.array(own, np.float32), self.mesh)
        return fields

    def scalars(self, batch: Batch, in_loss: bool, ref_head=None) -> Scalars:
        """The coefficients that move, and the tokens of an average optimizer batch where the weights divide by them."""
        kl, entropy, tokens = self.controllers.kl.coef, self.controllers.entropy, None
        if self.spec.aggregation == "rollout_token":
            tokens = np.float32(float((batch.mask > 0).sum()) / self.batch.minibatches)
        moves = in_loss and self.controllers.is_kl_adaptive and not self.spec.reward_beta
        return Scalars(
            kl_coef=np.float32(kl) if moves else None,
            entropy_coef=None if entropy is None else np.float32(entropy.applied),
            token_count=tokens,
            ref_head=ref_head,
        )


@dataclasses.dataclass(frozen=True)
class OnlineSource:
    """Batches of sampled and rewarded completions: a producer and a learner, joined by a queue.

    `wait` is called between the two: for programs of the learner that are still compiled elsewhere. `first_stage` is
    called before the first step, with the policy and with what shows a line.
    """

    producer: Producer
    learner: Learner
    queue: RolloutQueue | FileQueue
    wait: Callable[[], None] = lambda: None
    first_stage: Callable[[Params, Callable[[str], None]], None] | None = None

    def next(self, state: State, key) -> Experience:
        """The batch of one step; with a queue of length 0, sampled from `state.params`."""
        rollouts, metrics = self.queue.take(self.producer.produce, state.params, int(state.step), key)
        self.wait()
        pipeline = self.producer.pipeline
        if rollouts.partial is not None:
            metrics |= rollouts.partial.metrics(int(state.step))
        if isinstance(pipeline, Curriculum):
            metrics = pipeline.metrics() | metrics
        if rollouts.epochs is not None:
            metrics = {"epoch": rollouts.epochs} | metrics
        return self.learner.prepare(rollouts, state, key, metrics)

    def rest(self) -> None:
        """Wait until nothing is sampled or graded in the background."""
        self.queue.rest()

    def learn(self, metrics: dict[str, float]) -> None:
        """Take notice of the metrics of a step's updates."""
        self.learner.learn(metrics)

    def get_state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs besides the training state and `get_arrays`."""
        self.rest()
        return {"pipeline": self.producer.pipeline.get_state(), "memory": self.learner.get_state()}

    def get_arrays(self) -> dict[str, Any]:
        """The trees of arrays, by name, that a resumed run needs besides the training state."""
        partial, pipeline = self.producer.partial, self.producer.pipeline
        arrays = self.learner.get_arrays() | self.queue.get_arrays() | ({} if partial is None else partial.get_arrays())
        return arrays | pipeline.get_arrays()

    def restorable(self) -> dict[str, Any]:
        """The trees of arrays, by name, that `set_state` takes up; None for one of any shape."""
        learner, producer = self.learner, self.producer
        trees = learner.get_arrays() | ({} if learner.reference is None else learner.reference.tree()) | {"queue": None}
        trees |= {} if producer.partial is None else {"partial": None}
        return trees | dict.fromkeys(producer.pipeline.arrays)

    def set_state(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Go on where `get_state` and `get_arrays` were called."""
        pipeline, position = self.producer.pipeline, dict(state["pipeline"])
        for name in pipeline.arrays:  # checkpoints of earlier versions have them in the position
            position |= arrays.get(name, {})
        pipeline.set_state(position)
        self.learner.restore(state["memory"], arrays)
        self.queue.restore(arrays)
        if self.producer.partial is not None:
            self.producer.partial.restore(arrays)


def names_of_environments(environments: Sequence[str] | None) -> Sequence[str]:
    """The names of rows' environments; raises ConfigError for rollouts that an earlier version saved without them."""
    if environments is None:
        raise ConfigError(
            "environment.options is set, but the checkpoint has rollouts of a run of an earlier version, which do not "
            "say their environments: leave it out until these are learned from (rollout.staleness steps)"
        )
    return environments


def _row_seeds(rows: int, key, mesh: Mesh) -> jax.Array:
    """A seed `[N]` for each row of all processes, the same however many processes there are."""
    first, group = int(jax.random.bits(jax.random.fold_in(key, ROW_SEEDS))), RowGroup.of(mesh)
    seeds = np.random.default_rng([first, 0]).integers(2**32, size=rows, dtype=np.uint32)
    return rows_to_global(np.split(seeds, group.count)[group.index], mesh)
