"""Rollouts of agents: each row is a session of a program that talks to an endpoint of this process.

Of several processes each runs the agents of its own rows, and samples with all parameters on its own devices: how many
calls they make, and when, is no business of the others.

For a step, sessions are opened (prompts x group_size), the request queue takes the policy's weights, agents run against
their sessions' addresses, and what was sampled becomes the rows of the step. A session is one row whatever its agent
does: its branches and those of its sub-agents lie in it one behind the other, as documents that do not see each other.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.turn_advantages import Turn
from jaxrl_llm.config.user_code import error_text
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import Row
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.data.images import ImageLimits, data_url
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.templates import is_conversational
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.environments.agents import Agents, Connection, Outcome, Reward
from jaxrl_llm.environments.batch import warn_of_failures
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.models.net import Params
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.slots import Rollout, row_keys
from jaxrl_llm.serving.errors import lacks_memory
from jaxrl_llm.serving.queue import RequestQueue, compile_first
from jaxrl_llm.serving.sessions import MODEL, Branch, Session, SessionSpec
from jaxrl_llm.training.images import IMAGES
from jaxrl_llm.training.rollouts.external_rollout import ExternalRows, as_rollout

CHUNK = 8  # decode steps, at most, behind which an answer that has ended is sent


class SessionRow(NamedTuple):
    """A session as a row: the prompt of its first branch, and behind it all else.

    A turn that several branches begin with is in the mask once.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]  # 1 on sampled tokens
    logps: list[float]  # 0 on others
    segments: list[int]  # which branch a token of the completion is of, from 1
    turns: list[Turn]
    parts: list[Turn]  # of each session in the row: its end, its own reward (NaN without) and the name of a sub-agent
    last: Branch  # that of the last call
    images: list[Tiles]  # of the branches with any


def session_row(session: Session, longest: int, most: int) -> SessionRow | None:
    """The row of a session and its sub-agents, of `most` branches and `longest` tokens behind the first prompt at most.

    The branch of the session's last call is always there; the others are taken from the latest to the first, and those
    of sub-agents after its own. In the row they lie in their order, with sub-agents before the session that opened
    them. A session without a call has none.
    """
    found = [(one, branch) for one in session.family() for branch in one.leaves]
    if not found:
        return None
    kept: list[int] = []
    for number in reversed(range(len(found))):
        branches = [found[index][1] for index in [number, *kept]]
        tokens = sum(len(x.prompt_ids) + len(x.completion_ids) for x in branches) - len(branches[0].prompt_ids)
        if len(kept) < most and (not kept or tokens <= longest):
            kept.insert(0, number)
    row = SessionRow(found[kept[0]][1].prompt_ids, [], [], [], [], [], [], found[-1][1], [])
    known: set[int] = set()  # turns that are in the row
    for segment, (one, branch) in enumerate((found[number] for number in kept), start=1):
        prompt = branch.prompt_ids if segment > 1 else []
        first, mask, turn, chain = len(row.mask) + len(prompt), list(branch.mask), branch, []
        while turn is not None:
            chain.insert(0, turn)
            turn = turn.parent
        begin = 0
        for turn, (end, call, before) in zip(chain, branch.marks, strict=True):
            if id(turn) in known:
                mask[begin:end] = [0] * (end - begin)
            else:
                state = one.turn_states.get(call, before)
                row.turns.append(Turn(first + end, one.turn_rewards.get(call, 0.0), state))
            known.add(id(turn))
            begin = end
        row.completion_ids.extend([*prompt, *branch.completion_ids])
        row.images.extend([] if branch.tiles is None else [branch.tiles])
        row.mask.extend([*[0] * len(prompt), *mask])
        row.logps.extend([*[0.0] * len(prompt), *branch.logps])
        row.segments.extend([segment] * (len(prompt) + len(mask)))
        own = _reward(one, Outcome()) if one is not session else None
        # Parts of one state are compared: sub-agents of a name, and maybe of a session.
        state = one.role if one.compared_in == "group" else (one.role, session.name)
        part = Turn(len(row.mask), math.nan if own is None else _total(own), state)
        if row.parts and one is found[kept[segment - 2]][0]:
            row.parts.pop()
        row.parts.append(part)
    return row


class AgentEpisodes:
    """The sessions of a rollout batch that have ended; `RolloutWorker` asks them as it asks `EpisodeBatch`.

    Rows have up to `branches` branches, and `longest` tokens behind their first prompt. `names` are those of the agents
    that rows name, None where there is one agent.
    """

    def __init__(
        self,
        turns: TurnTokenizer,
        sessions: Sequence[Session],
        outcomes: Sequence[Outcome],
        seconds: Sequence[float],
        longest: int,
        branches: int,
        names: Sequence[str | None],
    ):
        self.tokenizer, self.sessions, self.seconds, self.branches = turns, sessions, seconds, branches
        self.names = names
        self.rows = [session_row(session, longest, branches) for session in sessions]
        self.rewards = [_reward(session, outcome) for session, outcome in zip(sessions, outcomes, strict=True)]
        self.reasons = [  # why a session has no reward
            outcome.failure or (_without_call(session) if row is None else "the agent gave no reward")
            if reward is None or row is None
            else None
            for session, outcome, row, reward in zip(sessions, outcomes, self.rows, self.rewards, strict=True)
        ]
        self.failed = np.asarray([reason is not None for reason in self.reasons])

    def finish(self, prompts: Sequence[Any], ids: Sequence[Sequence[int]]) -> tuple[list[Any], dict[str, list[Any]]]:
        """Completions `[N]` (text, or messages where the row's prompt is messages) and the columns for rewards."""
        completions = []
        for prompt, own, row in zip(prompts, ids, self.rows, strict=True):
            if row is not None and row.last.template and is_conversational(prompt):
                completions.append(row.last.messages)
            else:
                text = self.tokenizer.decode(own if row is None else row.last.completion_ids, True)
                completions.append([{"role": "assistant", "content": text}] if is_conversational(prompt) else text)
        named = [dict(reward) if isinstance(reward, Mapping) else {} for reward in self.rewards]
        totals = [
            None if failed or reward is None else _total(reward)
            for reward, failed in zip(self.rewards, self.failed, strict=True)
        ]
        return completions, {"environment_reward": totals, "environment_rewards": named}

    def image_rows(self, tasks: Sequence[Row]) -> list[Row]:
        """The token ids of each row and the tiles of its images, as `prompt_images` reads them.

        A session without a call has those of its task.
        """
        return [
            {"prompt_ids": task["prompt_ids"], PIXELS: task.get(PIXELS)}
            if row is None
            else {"prompt_ids": [*row.prompt_ids, *row.completion_ids], PIXELS: _joined(row.images)}
            for task, row in zip(tasks, self.rows, strict=True)
        ]

    def turn_records(self, lengths: Sequence[int]) -> tuple[list[list[Turn]], int]:
        """The turns of each row, which are calls of its session, and how many a row may have."""
        # A call with several choices has a turn for each that is kept; all but one of them are further branches.
        most = self.sessions[0].spec.calls + self.branches - 1
        return [[] if row is None else row.turns for row in self.rows], most

    def parts(self) -> tuple[list[list[Turn]], int]:
        """Of each row its sub-agents and its session, with what is known of them; and how many a row may have."""
        return [[] if row is None else row.parts for row in self.rows], self.branches

    def roles(self) -> list[list[str]]:
        """The names of the parts of each row, `agent/sub-agent`, as far as there are several; else `agent`."""

        def role(part: Turn) -> str | None:
            return part.state[0] if isinstance(part.state, tuple) else part.state

        return [
            ["/".join(filter(None, (name, role(part)))) or "agent" for part in own]
            for name, own in zip(self.names, self.parts()[0], strict=True)
        ]

    def release(self, counted: int) -> tuple[dict[str, list[float]], dict[str, float], dict[str, list[Any]]]:
        """Metrics (numbers to average) and totals (to add up) of the first `counted` rows, behind which others fill up
        the batch, and columns of the table of all. Warns of the most frequent failure."""
        warn_of_failures(f"agent: {reason}" for reason in self.reasons[:counted] if reason is not None)
        turns = [0 if row is None else len(row.turns) for row in self.rows]
        rows, rewards = self.rows[:counted], self.rewards[:counted]
        families = [session.family() for session in self.sessions[:counted]]
        names = sorted({name for reward in rewards if isinstance(reward, Mapping) for name in reward})
        metrics = {
            "environment/turns": [float(x) for x in turns[:counted]],
            "environment/calls": [float(sum(one.calls for one in family)) for family in families],
            "environment/branches": [float(0 if row is None else row.segments[-1]) for row in rows],
            "environment/seconds": list(self.seconds[:counted]),
        }
        for sub_agent in (one for family in families for one in family[:-1]):
            if (reward := _reward(sub_agent, Outcome())) is not None:
                metrics.setdefault(f"environment/sub_agents/{sub_agent.role}", []).append(_total(reward))
        for name in names:
            given = [reward[name] for reward in rewards if isinstance(reward, Mapping) and name in reward]
            metrics[f"environment/rewards/{name}"] = given
        sampled = sum(one.sampled for family in families for one in family)
        totals = {
            "environment/failures": float(self.failed[:counted].sum()),
            "environment/left_out_tokens": float(sampled - sum(sum(row.mask) for row in rows if row is not None)),
            "environment/retokenised_tokens": float(sum(one.retokenised for family in families for one in family)),
        }
        columns = {
            "environment/turns": turns,
            "environment/ended": [reason or "done" for reason in self.reasons],
            "environment/turn_rewards": [
                [reward for _, reward in sorted(session.turn_rewards.items())] or None for session in self.sessions
            ],
        }
        return metrics, totals, columns


@dataclasses.dataclass
class AgentRollout:
    """Runs the agents of a step against the policy, in place of `Engine.generate`."""

    agents: Agents
    engine: Engine  # its group_size and sampling are those of the rows
    turns: TurnTokenizer
    mesh: Mesh
    prompt_width: int
    slots: int  # of this process
    own: OwnPart  # of the mesh
    images: ImageLimits = dataclasses.field(default_factory=ImageLimits)  # of those that agents send
    gateway: Any = None  # the endpoint, once it is open

    def __call__(self, params: Params, examples: Sequence[Row], key) -> tuple[Rollout, AgentEpisodes]:
        """The rows of the step, those of an example adjacent, and their sessions.

        Row i of all processes draws from `fold_in(key, i)`. Raises EpisodeError when every agent has failed, or one
        where `environment.on_error` is stop, in all processes; and where there was no memory for a completion.
        """
        spec, engine = self.agents.spec, self.engine
        is_new = self.gateway is None
        gateway = self._gateway(self.own.params(params))
        tasks = [example for example in examples for _ in range(engine.group_size)]
        longest = engine.max_completion_length
        # Image tokens that are sampled would be taken for those of the images that are sent behind them.
        vision = engine.net.config.vision
        unsampled = () if vision is None else ((vision.image_token,),)
        sampling = dataclasses.replace(engine.sampling, bad_words=(*engine.sampling.bad_words, *unsampled))
        bounds = SessionSpec(sampling, self.prompt_width, longest, spec.calls, spec.tokens)
        first = np.uint32(jax.process_index() * len(tasks))
        data = np.asarray(jax.random.key_data(row_keys(key, first, len(tasks))))
        sessions = gateway.open([row.tobytes() for row in data], bounds)
        connections = [
            Connection(
                gateway.base_url(session), gateway.key, MODEL, f"{gateway.base_url(session)}/reward", session.name,
                spec.timeout,
            )
            for session in sessions
        ]  # fmt: skip
        outcomes, seconds = [Outcome() for _ in tasks], [0.0 for _ in tasks]

        def ended(number: int, outcome: Outcome) -> None:
            gateway.end(sessions[number], outcome.failure or "its agent has ended")
            outcomes[number], seconds[number] = outcome, time.monotonic() - started

        with all_or_none():
            try:
                if is_new:  # before the time of agents runs, and that of their clients
                    self._compile(gateway.queue, len(tasks[0]["prompt_ids"]), sampling)
                started, refused = time.monotonic(), gateway.queue.counts.refused_rows
                self.agents.run(connections, list(map(_given, tasks)), ended)
            finally:
                for session in sessions:
                    gateway.end(session, "the step is over")
                gateway.queue.call(gateway.queue.release).result()
            if refused := gateway.queue.counts.refused_rows - refused:  # which is no failure of an agent
                raise EpisodeError(
                    f"{amount(refused, 'completion')} of agents could not be sampled, as the error above says; where "
                    "there was no memory, set fewer rollout.slots"
                )
            names = [task.get("agent") if spec.others else None for task in tasks]
            episodes = AgentEpisodes(self.turns, sessions, outcomes, seconds, longest, spec.branches, names)
        reasons = [reason for own in gather(episodes.reasons) for reason in own]
        failed = [reason for reason in reasons if reason is not None]
        if len(failed) == len(reasons) or (failed and spec.on_error == "stop"):
            reason, times = Counter(failed).most_common(1)[0]
            often = "" if reason == failed[0] else f"; most often ({amount(times, 'time')}): {reason}"
            raise EpisodeError(
                f"{'all' if len(failed) == len(reasons) else len(failed)} of the step's {len(reasons)} agents failed "
                f"(environment.agent); the first: {failed[0]}{often}"
            )
        found = episodes.rows
        # A session without a call has a row too, of which nothing is in the mask.
        rows = ExternalRows(
            [task["prompt_ids"] if row is None else row.prompt_ids for task, row in zip(tasks, found, strict=True)],
            [[self.turns.eos[0]] if row is None else row.completion_ids for row in found],
            [[0] if row is None else row.mask for row in found],
            [[0.0] if row is None else row.logps for row in found],
            {},
            [[1] if row is None else row.segments for row in found],
        )
        finished = [row is not None and row.last.finished for row in found]
        return as_rollout(rows, finished, self.prompt_width, longest, self.mesh), episodes

    @staticmethod
    def _compile(queue: RequestQueue, width: int, sampling: SamplingParams) -> None:
        """Compile the programs of the first calls; raises EpisodeError where there is no memory for one."""
        try:
            compile_first(queue, width, sampling)
        except Exception as error:
            if not lacks_memory(error):
                raise
            raise EpisodeError(
                f"there was no memory for a first completion ({error_text(error):.200}): set fewer rollout.slots"
            ) from error

    def _gateway(self, params: Params) -> Any:
        """The endpoint, with these parameters."""
        from jaxrl_llm.serving.gateway import Gateway  # here: its packages are those of the extra `serve`

        if self.gateway is not None:
            queue = self.gateway.queue
            queue.call(lambda: queue.replace(params)).result()
            return self.gateway
        # Requests bring their sampling, and agents wait for the end of a chunk.
        engine = dataclasses.replace(
            self.engine, group_size=1, sampling=SamplingParams(), eos=(), chunk=min(self.engine.chunk, CHUNK)
        )
        queue = RequestQueue(engine, params, self.slots, self.own.mesh)
        queue.start()
        self.gateway = Gateway(queue, self.turns, engine.net.config.vocab_size, self.agents.spec.timeout, self.images)
        self.agents.closing += [self.gateway.close, lambda: queue.stop(10)]
        return self.gateway


def _given(task: Row) -> Row:
    """The row as an agent is given it: its images as data: URLs, in a column and in the messages that have them."""
    given = {name: value for name, value in task.items() if name not in ("prompt_ids", PIXELS)}
    if not isinstance(tiles := task.get(PIXELS), Tiles):
        return given
    urls = [data_url(image) for image in tiles.read()]
    left, prompt = iter(urls), given["prompt"]

    def part(of_content: Any) -> Any:
        is_image = isinstance(of_content, Mapping) and of_content.get("type") == "image"
        return {"type": "image_url", "image_url": {"url": next(left)}} if is_image else of_content

    if is_conversational(prompt):
        prompt = [
            {**message, "content": [part(x) for x in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in prompt
        ]
    return {**given, "prompt": prompt, IMAGES: urls}


def _joined(images: Sequence[Tiles]) -> Tiles | None:
    """The tiles of all, in their order."""
    if not images:
        return None
    held = tuple(image for tiles in images for image in tiles.images)
    alike = all(tiles.processor is images[0].processor for tiles in images)
    return Tiles(held, images[0].processor, sum(map(len, images)), () if alike else tuple(images))


def _without_call(session: Session) -> str:
    """The reason why a session has no row."""
    refused = [one.refused for one in session.family() if one.refused is not None]
    return f"no call of the agent was answered; one was refused: {refused[-1]}" if refused else "the agent made no call"


def _total(reward: Reward) -> float:
    return sum(reward.values()) if isinstance(reward, Mapping) else reward


def _reward(session: Session, outcome: Outcome) -> Reward | None:
    """The reward that an agent returned, or else posted: the session's, or its turns' sum; None if it failed."""
    if outcome.failure is not None:
        return None
    if outcome.reward is not None:
        return outcome.reward
    if session.reward is not None:
        return session.reward
    return sum(session.turn_rewards.values()) if session.turn_rewards else None
