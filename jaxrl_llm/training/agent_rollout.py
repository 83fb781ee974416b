"""Rollouts of agents: each row is a session of a program that talks to an endpoint of this process.

For a step, sessions are opened (prompts x group_size), the request queue takes the policy's weights, agents run against
their sessions' addresses, and what was sampled becomes the rows of the step. A session is one row whatever its agent
does: the row of its last call. Rows of earlier forks are left out, and counted.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.turn_advantages import Turn
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.templates import is_conversational
from jaxrl_llm.environments.agents import Agents, Connection, Outcome, Reward
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import Engine, Rollout
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.serving.queue import RequestQueue
from jaxrl_llm.serving.sessions import MODEL, Branch, Session, SessionSpec
from jaxrl_llm.training.external_rollout import ExternalRows, as_rollout

CHUNK = 8  # decode steps, at most, behind which an answer that has ended is sent

Row = dict[str, Any]


class AgentEpisodes:
    """The sessions of a rollout batch that have ended; `RolloutWorker` asks them as it asks `EpisodeBatch`."""

    def __init__(
        self, turns: TurnTokenizer, sessions: Sequence[Session], outcomes: Sequence[Outcome], seconds: Sequence[float]
    ):
        self.tokenizer, self.sessions, self.seconds = turns, sessions, seconds
        self.leaves = [session.leaves for session in sessions]
        self.rewards = [_reward(session, outcome) for session, outcome in zip(sessions, outcomes, strict=True)]
        self.reasons = [  # why a session has no reward
            outcome.failure or ("the agent made no call" if not leaves else "the agent gave no reward")
            if reward is None or not leaves
            else None
            for outcome, leaves, reward in zip(outcomes, self.leaves, self.rewards, strict=True)
        ]
        self.failed = np.asarray([reason is not None for reason in self.reasons])

    def rows(self) -> list[Branch | None]:
        """The branch of each session that is its row; None where it made no call."""
        return [leaves[-1] if leaves else None for leaves in self.leaves]

    def finish(self, prompts: Sequence[Any], ids: Sequence[Sequence[int]]) -> tuple[list[Any], dict[str, list[Any]]]:
        """Completions `[N]` (text, or messages where the row's prompt is messages) and the columns for rewards."""
        completions = []
        for prompt, row, branch in zip(prompts, ids, self.rows(), strict=True):
            if branch is not None and branch.template and is_conversational(prompt):
                completions.append(branch.messages)
            else:
                text = self.tokenizer.decode(row, True)
                completions.append([{"role": "assistant", "content": text}] if is_conversational(prompt) else text)
        named = [dict(reward) if isinstance(reward, Mapping) else {} for reward in self.rewards]
        totals = [
            None if failed or reward is None else sum(reward.values()) if isinstance(reward, Mapping) else reward
            for reward, failed in zip(self.rewards, self.failed, strict=True)
        ]
        return completions, {"environment_reward": totals, "environment_rewards": named}

    def turn_records(self, lengths: Sequence[int]) -> tuple[list[list[Turn]], int]:
        """The turns of each row, which are calls of its session, and how many a row may have."""
        records = [
            []
            if branch is None
            else [Turn(end, session.turn_rewards.get(call, 0.0), before) for end, call, before in branch.marks]
            for session, branch in zip(self.sessions, self.rows(), strict=True)
        ]
        return records, self.sessions[0].spec.calls

    def release(self) -> tuple[dict[str, list[float]], dict[str, float], dict[str, list[Any]]]:
        """Metrics (numbers to average), totals (to add up) and columns of the table."""
        rows = self.rows()
        turns = [0 if branch is None else branch.turns for branch in rows]
        left_out = [
            sum(sum(branch.mask) for branch in leaves[:-1]) for leaves in self.leaves
        ]  # a token that two forks share counts in both
        names = sorted({name for reward in self.rewards if isinstance(reward, Mapping) for name in reward})
        metrics = {
            "environment/turns": [float(x) for x in turns],
            "environment/calls": [float(session.calls) for session in self.sessions],
            "environment/seconds": list(self.seconds),
        }
        for name in names:
            given = [reward[name] for reward in self.rewards if isinstance(reward, Mapping) and name in reward]
            metrics[f"environment/rewards/{name}"] = given
        totals = {
            "environment/failures": float(self.failed.sum()),
            "environment/forks": float(sum(max(len(leaves) - 1, 0) for leaves in self.leaves)),
            "environment/fork_tokens": float(sum(left_out)),
            "environment/retokenised_tokens": float(sum(session.retokenised for session in self.sessions)),
        }
        columns = {
            "environment/turns": turns,
            "environment/ended": [reason or "done" for reason in self.reasons],
            "environment/turn_rewards": [
                [reward for _, reward in sorted(session.turn_rewards.items())] or None for session in self.sessions
            ],
        }
        return metrics, totals, columns


@dataclasses.dataclass(frozen=True)
class AgentRollout:
    """Runs the agents of a step against the policy, in place of `Engine.generate`."""

    agents: Agents
    engine: Engine  # its group_size and sampling are those of the rows
    turns: TurnTokenizer
    mesh: Mesh
    prompt_width: int
    slots: int
    held: dict[str, Any] = dataclasses.field(default_factory=dict)  # the endpoint, once it is open

    def __call__(self, params: Params, examples: Sequence[Row], key) -> tuple[Rollout, AgentEpisodes]:
        """The rows of the step, those of an example adjacent, and their sessions; row i draws from `fold_in(key, i)`.

        Raises EpisodeError when every agent has failed, or one where `environment.on_error` is stop.
        """
        spec, engine = self.agents.spec, self.engine
        gateway = self._gateway(params)
        tasks = [example for example in examples for _ in range(engine.group_size)]
        bounds = SessionSpec(engine.sampling, self.prompt_width, engine.max_completion_length, spec.calls, spec.tokens)
        data = np.asarray(jax.random.key_data(row_keys(key, np.uint32(0), len(tasks))))
        sessions = gateway.open([row.tobytes() for row in data], bounds)
        connections = [
            Connection(
                gateway.base_url(session), gateway.key, MODEL, f"{gateway.base_url(session)}/reward", session.name,
                spec.timeout,
            )
            for session in sessions
        ]  # fmt: skip
        outcomes, seconds = [Outcome() for _ in tasks], [0.0 for _ in tasks]
        started = time.monotonic()

        def ended(number: int, outcome: Outcome) -> None:
            gateway.end(sessions[number], outcome.failure or "its agent has ended")
            outcomes[number], seconds[number] = outcome, time.monotonic() - started

        try:
            given = [{name: value for name, value in task.items() if name != "prompt_ids"} for task in tasks]
            self.agents.run(connections, given, ended)
        finally:
            for session in sessions:
                gateway.end(session, "the step is over")
            _wait(gateway.queue, gateway.queue.release)
        episodes = AgentEpisodes(self.turns, sessions, outcomes, seconds)
        failed = int(episodes.failed.sum())
        if failed == len(tasks) or (failed and spec.on_error == "stop"):
            raise EpisodeError(
                f"{'all' if failed == len(tasks) else failed} of the step's {len(tasks)} agents failed "
                f"(environment.agent); the first: {episodes.reasons[int(episodes.failed.argmax())]}"
            )
        branches = episodes.rows()
        # A session without a call has a row too, of which nothing is in the mask.
        rows = ExternalRows(
            [task["prompt_ids"] if b is None else b.prompt_ids for task, b in zip(tasks, branches, strict=True)],
            [[self.turns.eos[0]] if b is None else b.completion_ids for b in branches],
            [[0] if b is None else b.mask for b in branches],
            [[0.0] if b is None else b.logps for b in branches],
            {},
        )
        finished = [b is not None and b.finished for b in branches]
        return as_rollout(rows, finished, self.prompt_width, engine.max_completion_length, self.mesh), episodes

    def _gateway(self, params: Params) -> Any:
        """The endpoint, with these parameters."""
        from jaxrl_llm.serving.gateway import Gateway  # here: its packages are those of the extra `serve`

        if "gateway" in self.held:
            gateway = self.held["gateway"]
            _wait(gateway.queue, lambda done: gateway.queue.set_params(params, done))
            return gateway
        # Requests bring their sampling, and agents wait for the end of a chunk.
        engine = dataclasses.replace(
            self.engine, group_size=1, sampling=SamplingParams(), eos=(), chunk=min(self.engine.chunk, CHUNK)
        )
        queue = RequestQueue(engine, params, self.slots, self.mesh)
        queue.start()
        gateway = Gateway(queue, self.turns, engine.net.config.vocab_size, self.agents.spec.timeout)
        self.agents.closing += [gateway.close, lambda: queue.stop(10)]
        self.held["gateway"] = gateway
        return gateway


def _wait(queue: RequestQueue, ask: Callable[[Callable[[BaseException | None], None]], None]) -> None:
    """Returns when `ask(done)`, a call of the queue's thread, is done; raises what it raised, or ended the thread."""
    errors: SimpleQueue[BaseException | None] = SimpleQueue()
    ask(errors.put)
    while queue.failure is None:
        with contextlib.suppress(Empty):
            if (error := errors.get(timeout=1)) is not None:
                raise error
            return
    raise queue.failure


def _reward(session: Session, outcome: Outcome) -> Reward | None:
    """What the agent returned, or else posted: for the session, or the sum of its turns. None where it failed."""
    if outcome.failure is not None:
        return None
    if outcome.reward is not None:
        return outcome.reward
    if session.reward is not None:
        return session.reward
    return sum(session.turn_rewards.values()) if session.turn_rewards else None
