"""One step of an online algorithm, from prompts to the batch of an update, in this order:

| half | step | in -> out | file |
|---|---|---|---|
| `Producer` | 1 prompts | resumable iterator -> examples | this one |
| | 2 rollout | policy, prompts, a key per row -> tokens, segments, mask, sample_logps `[N,T]` | rollouts/worker.py |
| | 3 reward | texts, ids, columns -> rewards `[N,F]`, NaN where none applies; overlaps with 2 | rollouts/worker.py |
| `Learner` | 4 log-probs | of the old policy, reference, teacher; values: `[N,T]`, each where needed | learner.py |
| | 5 advantages | rewards, mask, values, teacher's log-probs -> advantages `[N,T]` | learner.py |
| | 6 update | minibatches x micro-batches -> state, metrics | step.py |

The producer reads a version of the policy and touches no training state: its state is the position in the data. The
learner's is the reference, the replay buffer and the controllers. `OnlineSource` joins the two by a queue: with length
0, each batch is sampled from the policy that it updates; with more (`rollout.staleness`), a thread makes batches ahead.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.sample_statistics import success_rates
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.pipeline import Pipeline, Stream
from jaxrl_llm.data.scored_prompts import ScoredPrompts
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.turns import turn
from jaxrl_llm.models.net import Params
from jaxrl_llm.rewards.runner import TrainerState
from jaxrl_llm.training.learner import Learner
from jaxrl_llm.training.logging.reward_metrics import add_totals
from jaxrl_llm.training.rollouts.dynamic_sampling import fill
from jaxrl_llm.training.rollouts.experience import Experience, Rollouts
from jaxrl_llm.training.rollouts.file_queue import FileQueue
from jaxrl_llm.training.rollouts.partial_rollouts import PartialRollouts
from jaxrl_llm.training.rollouts.rollout_queue import RolloutQueue
from jaxrl_llm.training.rollouts.worker import RolloutWorker
from jaxrl_llm.training.update import State

PromptStream = Pipeline | Stream | Curriculum | ScoredPrompts  # each endless and resumable


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
    pipeline: PromptStream
    group: RowGroup  # of the processes that make a batch together
    flat_groups: Callable[[np.ndarray, Any, list[str] | None], np.ndarray]
    partial: PartialRollouts | None = None

    def produce(self, params: Params, version: int, step: int, key) -> Rollouts:
        """The rollouts of a step, by the policy of `version` training steps.

        With `dynamic_sampling`, flat groups are sampled again for other prompts, until none is left. Raises ConfigError
        when some are left after the last round, and no replay buffer fills up.
        """
        spec, state, group = self.spec, TrainerState(step - 1, self.spec.total_steps), self.group
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
                unknown = sum(group.gather(int(np.isnan(rollouts.rewards).all(1).sum())))
                raise ConfigError(
                    f"algorithm.dynamic_sampling: after {spec.max_sampling_rounds} rounds of sampling, the completions "
                    f"of {missing} prompts of {spec.prompts} still score alike"
                    + (f", and {amount(unknown, 'completion')} have no reward. " if unknown else ". ")
                    + "Raise algorithm.max_sampling_rounds, "
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
            group, numbers = self.group, [0.0] * len(rewards)
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
            rates = self.group.gather(own)
            self.pipeline.observe([rate for share in rates for rate in share])
        if self.pipeline.newest is not None:
            scores = np.repeat(self.pipeline.newest, self.worker.engine.group_size, axis=0)
            rollouts = rollouts._replace(reference_scores=scores.tolist())
        return rollouts


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
        rollouts, metrics = self.queue.take(state.params, int(state.step), key)
        self.wait()
        pipeline = self.producer.pipeline
        if rollouts.partial is not None:
            metrics |= rollouts.partial.metrics(int(state.step))
        if rollouts.resampled_groups is not None:
            metrics |= {"rollout/resampled_groups": np.float32(rollouts.resampled_groups)}
        if isinstance(pipeline, Curriculum):
            metrics = pipeline.metrics() | metrics
        if rollouts.epochs is not None:
            metrics = {"epoch": rollouts.epochs} | metrics
        return self.learner.prepare(rollouts, state, key, metrics)

    def rest(self) -> None:
        """Wait until nothing is sampled or graded in the background."""
        self.queue.rest()

    def learn(self, metrics: dict[str, float]) -> None:
        """Update what depends on the metrics of a step's updates."""
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
        """The trees of arrays, by name, that `set_state` restores, with None for one of any shape."""
        learner, producer = self.learner, self.producer
        trees = learner.get_arrays() | ({} if learner.reference is None else learner.reference.tree()) | {"queue": None}
        trees |= {} if producer.partial is None else {"partial": None}
        return trees | dict.fromkeys(producer.pipeline.arrays)

    def set_state(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore what `get_state` and `get_arrays` returned, also those of a `MixedSource`."""
        state = state.get("online", state)  # as an earlier version had a mixed source's
        pipeline, position = self.producer.pipeline, dict(state["pipeline"])
        for name in pipeline.arrays:  # checkpoints of earlier versions have them in the position
            position |= arrays.get(name, {})
        pipeline.set_state(position)
        self.learner.restore(state["memory"], arrays)
        self.queue.restore(arrays)
        if self.producer.partial is not None:
            self.producer.partial.restore(arrays)
