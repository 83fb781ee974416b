"""Steps 2 and 3 of an online algorithm: prompts are sampled from, by whatever samples, and completions rewarded."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.algorithms.turn_advantages import Turns, turn_table
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import columns_of, pad_prompts
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.data.templates import decode_completion, is_conversational
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import local_rows, rows_to_global
from jaxrl_llm.distributed.turns import turn, yielded
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.environments.factory import COLUMN
from jaxrl_llm.models.adapters.lora import copied
from jaxrl_llm.models.net import Params
from jaxrl_llm.models.vision.row_images import count_tiles
from jaxrl_llm.rewards.runner import NO_STEP, NOTHING_LOGGED, Graded, Logged, Rewards, TrainerState
from jaxrl_llm.rewards.streaming import StreamingRewards
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.multi_turn import SilentTurnServer
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.images import IMAGES, prompt_images, shown_images
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.agent_rollout import AgentEpisodes, AgentRollout
from jaxrl_llm.training.rollouts.arrivals import Arrivals
from jaxrl_llm.training.rollouts.experience import Partial, Rollouts
from jaxrl_llm.training.rollouts.external_rollout import ExternalRollout
from jaxrl_llm.training.step_credit import StepCredit


@dataclasses.dataclass(frozen=True)
class RolloutWorker:
    """Steps 2 and 3: `group_size` completions of each prompt, and their rewards.

    With `open_episodes` rows are episodes of environments; `external` samples in place of the engine, and `agents` run
    the programs whose sessions are the rows. With `arrivals` a policy may come while rows are sampled. Of
    `several_environments` a column of each row names its own. With `steps` those of completions are turns. Where `mesh`
    is of this process alone, beside others of the run, its rows are the share of that number of the rows of all.
    Completions are texts where `external` makes texts, and otherwise what their prompts are, texts or messages.
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
    share: int = 0

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

        Row i of all processes draws its random numbers from `fold_in(key, first_row + i)`. Rows that are `sampled` are
        graded alone. Examples behind the first `counted` only fill up the batch: they are sampled, and get no reward
        (NaN).
        """
        group_size, group = self.engine.group_size, RowGroup.of(self.mesh)
        with self.stopwatch("rollout"), turn():
            episodes, opened = self._opened(examples, group)
            rows = [example for example in opened for _ in range(group_size)]
            prompts = [row["prompt"] for row in rows]
            columns = columns_of(rows, ("prompt", "prompt_ids", PIXELS))
            with all_or_none():
                shown = shown_images(opened, group_size)
            columns |= {} if shown is None else {IMAGES: shown[0]}
            graded_rows = len(rows) if counted is None else counted * group_size

            def decode(row: int, tokens: list[int]) -> Any:
                conversational = is_conversational(prompts[row]) and not self.as_texts
                return decode_completion(self.tokenizer, tokens, conversational)

            def open_rewards(columns: dict[str, list[Any]]) -> StreamingRewards:
                known = {name: values[:graded_rows] for name, values in columns.items()}
                numbers = [row // group_size for row in range(graded_rows)]
                return StreamingRewards(self.rewards.open(prompts[:graded_rows], known, state, numbers), decode)

            streaming = None
            # Rows are graded while others are still sampled, unless their rewards need the whole conversation.
            others = (self.open_episodes, self.external, self.agents, sampled)
            if not any(x is not None for x in others) and self.rewards.takes_rows:
                with all_or_none():
                    streaming = open_rewards(columns) if group.leads else None
            made = self._sample(params, opened, key, first_row, state, sampled, episodes, streaming)
            tokens, lengths = local_rows((made.rollout.tokens, made.rollout.lengths))

        # What users compute with JAX is of their process alone: on the run's mesh each program would be one of all
        # processes, which do not start as many.
        with self.stopwatch("reward"), yielded(), all_or_none(), jax.set_mesh(None):
            ids = [row[self.prompt_width :][:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
            texts, results = None, made.results
            if episodes is not None:
                texts, results = episodes.finish(ids, self.rewards.workers is None)
            elif made.sessions is not None:
                texts, results = made.sessions.finish(prompts, ids)
            if group.leads:
                if streaming is None:
                    streaming = open_rewards(columns | (results or {}))
                texts = streaming.finish(ids, texts)
                rewards, logged = streaming.pending.result()
            else:
                texts = []
                rewards, logged = np.zeros((graded_rows, len(self.rewards.names)), np.float32), NOTHING_LOGGED
            if spare := len(rows) - graded_rows:
                rewards = np.pad(rewards, ((0, spare), (0, 0)), constant_values=np.nan)
                logged = logged._replace(columns={name: [*x, *[None] * spare] for name, x in logged.columns.items()})
            graded = Graded(rewards, logged)
            (rewards, logged), of_turns = self._with_turns(made, episodes, graded, texts, ids, graded_rows)
            logged = logged._replace(metrics=logged.metrics | {name: [x] for name, x in made.published.items()})
            if shown is not None:
                logged = logged._replace(columns={IMAGES: shown[1]} | logged.columns)
            names = [str(row.get(COLUMN)) for row in rows] if self.several_environments else None
            rollouts = Rollouts(
                made.rollout, examples, prompts, texts, rewards, logged, images=made.images, partial=made.partial,
                environments=names, **of_turns,
            )  # fmt: skip
        if group.size == 1:
            return rollouts
        # What the leader found is its group's; what it logged stays with it, and counts once.
        turns = rollouts.turns
        lists = group.shared(None if turns is None else [x.tolist() for x in turns])
        return rollouts._replace(
            rewards=group.shared_array(rewards),
            completions=group.shared(texts),
            turns=None if lists is None else Turns(*map(np.array, lists, (np.float32, np.int32, np.int32))),
        )

    def _opened(self, examples: list[Row], group: RowGroup) -> tuple[EpisodeBatch | None, list[Row]]:
        """The episodes of the examples, in the leader of a row group, and the examples with the prompts that they begin
        with; None and the examples themselves where none are played."""
        if self.open_episodes is None:
            return None, examples
        episodes = self.open_episodes(examples, self.engine.group_size) if group.leads else None
        opened = examples if episodes is None else episodes.examples
        if group.size > 1:
            found = group.shared([{name: row[name] for name in ("prompt", "prompt_ids")} for row in opened])
            opened = [{**row, **prompt} for row, prompt in zip(opened, found, strict=True)]
        return episodes, opened

    def _with_turns(
        self,
        made: "_Made",
        episodes: EpisodeBatch | None,
        graded: Graded,
        texts: Any,
        ids: list[list[int]],
        graded_rows: int,
    ) -> tuple[Graded, dict[str, Any]]:
        """Add what the rows played to their rewards and to what is logged; returns these, and the rows' `turns`,
        `parts` and `roles`, as in `Rollouts`, of which a row that is one completion has none."""
        (rewards, logged), sessions, width = graded, made.sessions, self.prompt_width
        turns = parts = roles = None
        if sessions is not None:
            # Whatever else rewards say: nothing is learned from a session that failed.
            rewards = np.where(sessions.failed[:, None], np.float32(np.nan), rewards)
            parts, roles = turn_table(*sessions.parts(), self.engine.group_size, width), sessions.roles()
        if (played := episodes or sessions) is not None:
            turns = turn_table(*played.turn_records(list(map(len, ids))), self.engine.group_size, width)
            metrics, totals, table = played.release(graded_rows)
            logged = Logged(logged.metrics | metrics, logged.totals | totals, logged.columns | table)
        elif self.steps is not None and RowGroup.of(self.mesh).leads:
            turns = self.steps.table(Graded(rewards, logged), texts, ids, self.engine.group_size, width)
        return Graded(rewards, logged), {"turns": turns, "parts": parts, "roles": roles}

    def _sample(
        self,
        params: Params,
        opened: list[Row],
        key,
        first_row: int,
        state: TrainerState,
        sampled: Rollout | None,
        episodes: EpisodeBatch | None,
        streaming: StreamingRewards | None,
    ) -> "_Made":
        """The rows that agents, a function or the engine samples behind the prompts that were `opened`, or those that
        are `sampled` already. The engine hands finished rows to `streaming`, and asks `episodes` for their next turns.

        Raises ConfigError for images that agents or a function would lose.
        """
        tiles = [row[PIXELS] for row in opened if any(count_tiles([row.get(PIXELS)]))]
        if self.agents is not None:
            if any(not isinstance(x, Tiles) for x in tiles):
                raise ConfigError(
                    "rows have images as pixels, which environment.agent does not hand on: give them as files, "
                    "bytes or data: URLs (docs/vision.md)"
                )
            rollout, sessions = self.agents(params, opened, jax.random.fold_in(key, first_row))
            rows = [example for example in opened for _ in range(self.engine.group_size)]
            return _Made(rollout, self._images(sessions.image_rows(rows)), sessions=sessions)
        if self.external is not None:
            if tiles:
                raise ConfigError(
                    "rows have images, which environment.rollout_func does not hand on: leave it unset, or use rows "
                    "without images"
                )
            rollout, results = self.external(params, opened, jax.random.fold_in(key, first_row), state)
            return _Made(rollout, results=results, published=self.external.metrics())
        images = self._images(opened)
        if sampled is not None:
            return _Made(sampled, images)
        padded = pad_prompts([example["prompt_ids"] for example in opened], self.prompt_width)
        RowGroup.of(self.mesh).check_same(*padded)
        tokens, segments = rows_to_global(padded, self.mesh)
        arrivals, plays = self.arrivals, self.open_episodes is not None
        rollout = self.engine.generate(
            params if arrivals is None else arrivals.start(params), tokens, segments, key,
            first_row + self.share * len(opened) * self.engine.group_size,
            SilentTurnServer() if plays and episodes is None else episodes,
            on_finished=streaming, images=images, on_border=None if arrivals is None else arrivals.border,
        )  # fmt: skip
        if arrivals is None:
            return _Made(rollout, images)
        width = rollout.tokens.shape[1] - self.prompt_width
        return _Made(rollout, images, Partial(arrivals.versions(local_rows(rollout.lengths), width), 0, 1))

    def _images(self, rows: list[Row]) -> Images | None:
        """The images of rows of this process, on the devices of all."""
        with all_or_none():
            images = prompt_images(rows, self.engine.net.config.vision)
        return rows_to_global(images, self.mesh)

    def copy_policy(self, params: Params) -> Params:
        """The policy's parameters in arrays that no update donates, from which the same is sampled."""
        return copied(params) if self.external is not None else self.engine.policy_copy(params)


class _Made(NamedTuple):
    """Rows that were sampled, with what else came of it."""

    rollout: Rollout
    images: Images | None = None  # as in `Rollouts`
    partial: Partial | None = None  # of rows that a policy came to
    sessions: AgentEpisodes | None = None  # of agents
    results: dict[str, list[Any]] | None = None  # columns for rewards
    published: Mapping[str, float] = MappingProxyType({})  # metrics of weights that were sent for it
