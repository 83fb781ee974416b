"""Sessions of agents: what one run of an agent has sampled, call by call, as rows of token ids.

A call whose messages extend those of an earlier one goes on behind its tokens: the sampled ids stay as they are, and
only the new messages are tokenised, between them. Any other call begins a row of its own: the session forks. A session
may open sub-agents: sessions with a name, limits and a reward of their own, whose calls are within its limits too.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data.image_rows import ImageText, Tiles
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.templates import continued_ids, render_prompt
from jaxrl_llm.environments.protocol import finite
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.bodies import Asked
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.conversations import Conversations
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.handles import Handle

MODEL = "policy"  # whatever model a request names
OVER, BUDGET, TOO_LONG = "session_over", "budget_exceeded", "context_length_exceeded"
LIMITS = ("max_turns", "max_tokens", "seconds")  # of a sub-agent
COMPARED_IN = ("group", "session")  # of a sub-agent: whose sub-agents of its name its reward is compared with
LONGEST_NAME = 100
UNSEEN = ("logit_bias", "bad_words", "min_tokens")  # fields that change what is sampled and that a trainer does not see


@dataclasses.dataclass(frozen=True)
class SessionSpec:
    """The bounds of sessions, and how they are sampled whatever a request asks for.

    prompt, completion: tokens of a row before and from its first sampled one. calls, tokens: of a session in all.
    """

    sampling: SamplingParams
    prompt: int
    completion: int
    calls: int
    tokens: int | None = None
    end: float = math.inf  # of time.monotonic(), behind which no call is taken


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A row up to the end of a sampled turn."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]  # 1 on sampled tokens
    logps: list[float]  # 0 on others
    turns: int
    ended: bool  # with an end-of-text id
    finished: bool  # so, or with a stop string: not at a limit
    history: str | list[str] | list[int]  # the text, keys of the messages or ids that a call which goes on begins with
    template: str  # tools and options with which messages were rendered
    messages: list[dict[str, Any]]  # of the completion: answers, and what came between them
    parent: "Branch | None"
    # Of each turn: tokens up to its end, call, and what is before it: ids, and digests of its images.
    marks: tuple[tuple[int, int, tuple[Any, ...]], ...] = ()
    tiles: Tiles | None = None  # of the images in prompt and completion


class Session:
    """The calls of one run of an agent, or of its sub-agent `role`, and the reward that it posts.

    `key` are bytes from which its samples are drawn: they depend on it, on a call's prompt and on how often that was
    asked before.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        spec: SessionSpec,
        turns: TurnTokenizer,
        parent: "Session | None" = None,
        role: str | None = None,
        compared_in: str = COMPARED_IN[0],
    ):
        self.name, self.key, self.spec, self.turns = name, key, spec, turns
        self.parent, self.role, self.compared_in = parent, role, compared_in
        self.sub_agents: list[Session] = []
        self.branches: list[Branch] = []  # in the order in which their last turns ended
        self.over: str | None = None  # why it takes no more calls
        self.refused: str | None = None  # why its last call that was refused was
        self.calls = self.sampled = self.retokenised = 0
        self.asked: Counter[bytes] = Counter()  # calls by the digest of their prompts
        self.handles: set[Handle] = set()  # of calls under way
        self.conversations = Conversations()
        self.reward: float | dict[str, float] | None = None
        self.turn_rewards: dict[int, float] = {}
        self.turn_states: dict[int, Any] = {}

    @property
    def leaves(self) -> list[Branch]:
        """The rows: branches that no call went on with. The last call's (its first choice's) comes last."""
        parents = {id(branch.parent) for branch in self.branches}
        return [branch for branch in self.branches if id(branch) not in parents]

    def family(self) -> "list[Session]":
        """The sessions of its sub-agents, and of theirs, and behind them itself."""
        return [*(one for sub_agent in self.sub_agents for one in sub_agent.family()), self]

    def check_open(self, rows: int = 1) -> None:
        """Raise BadRequestError where no call, of so many completions, is taken any more."""
        if self.parent is not None:
            self.parent.check_open(rows)
        spec, names = self.spec, ("environment.max_turns", "environment.agent_tokens")
        who = "the session"
        if self.role is not None:
            who, names = f"the sub-agent {self.role!r}", LIMITS
        if self.over is not None:
            raise BadRequestError(f"{who} is over: {self.over}", 403, OVER)
        if sum(one.calls for one in self.family()) >= spec.calls:
            raise BadRequestError(f"{who} has made its {amount(spec.calls, 'call')} ({names[0]})", 403, BUDGET)
        if (left := self.tokens_left) < rows:
            assert spec.tokens is not None  # without a limit there is no end to what is left
            raise BadRequestError(f"{who} has its {amount(spec.tokens, 'token')} ({names[1]}), sampled or kept for "
                                  f"calls under way: {left} are left for n = {rows}", 403, BUDGET)  # fmt: skip
        if time.monotonic() > spec.end:
            raise BadRequestError(f"{who} has had its seconds", 403, BUDGET)

    @property
    def tokens_left(self) -> float:
        """Tokens that the session and its sub-agents may still sample, when the calls under way take all of theirs."""
        limit = math.inf if self.spec.tokens is None else self.spec.tokens
        family = self.family()
        under_way = sum(handle.request.limit for one in family for handle in one.handles)
        return limit - under_way - sum(one.sampled for one in family)

    def open_sub_agent(self, body: Mapping[str, Any]) -> "Session":
        """A sub-agent as `{"name": "searcher", "max_turns": 3, "max_tokens": 100, "seconds": 60}` asks for it.

        `compared_in` says with which of its name its own reward is compared: those of the whole group or of the
        session. What it samples depends on the session's key, its name, and how many of that name there were before.
        Raises BadRequestError for other fields and values, and where the session takes no calls.
        """
        self.check_open()
        if unknown := sorted(body.keys() - {"name", "compared_in", *LIMITS}):
            raise BadRequestError(
                f"there is no field {unknown[0]!r}; it takes name, compared_in, {', '.join(LIMITS)}", param=unknown[0]
            )
        role = body.get("name")
        if not isinstance(role, str) or not 0 < len(role) <= LONGEST_NAME:
            raise BadRequestError(
                f"name is {role!r:.100}; it takes the sub-agent's name, of up to {LONGEST_NAME} characters",
                param="name",
            )
        compared_in = body.get("compared_in", COMPARED_IN[0])
        if compared_in not in COMPARED_IN:
            raise BadRequestError(
                f"compared_in is {compared_in!r:.100}; it takes {' or '.join(COMPARED_IN)}", param="compared_in"
            )
        for name in LIMITS:
            limit = body.get(name)
            whole = isinstance(limit, int) or name == "seconds"
            if limit is not None and not (is_finite(limit) and limit > 0 and whole):
                raise BadRequestError(f"{name} is {limit!r:.100}; it takes a number above 0", param=name)
        before = sum(other.role == role for other in self.sub_agents)
        key = hashlib.blake2b(self.key + f"{role} {before}".encode(), digest_size=16).digest()
        calls, tokens, seconds = (body.get(name) for name in LIMITS)
        end = math.inf if seconds is None else time.monotonic() + seconds
        spec = dataclasses.replace(self.spec, calls=calls or self.spec.calls, tokens=tokens, end=end)
        sub_agent = Session(f"{self.name}.{len(self.sub_agents)}", key, spec, self.turns, self, role, compared_in)
        self.sub_agents.append(sub_agent)
        return sub_agent

    def set_reward(self, body: Mapping[str, Any]) -> None:
        """Take `{"reward": 1.0}`, of named rewards `{"reward": {"right": 1.0}}`, or of a turn, with `"turn": 0`.

        `"state"` beside a turn tells the state that it answered, in place of the messages before it. Raises
        BadRequestError, which names the field; 403 once the session is over.
        """
        reward, turn = body.get("reward"), body.get("turn")
        if self.over is not None:
            raise BadRequestError(f"the session is over: {self.over}", 403, OVER)
        if unknown := sorted(body.keys() - {"reward", "turn", "state"}):
            raise BadRequestError(
                f"there is no field {unknown[0]!r}; it takes reward, turn and state", param=unknown[0]
            )
        if turn is None and "state" in body:
            raise BadRequestError("state is given without turn, the call that answered it", param="state")
        named: dict[str, float] | None = dict(reward) if isinstance(reward, Mapping) and turn is None else None
        values: list[Any] = [reward] if named is None else list(named.values())
        if not values or not all(map(is_finite, values)):
            raise BadRequestError(f"reward is {reward!r:.100}; it takes a finite number, or an object of numbers "
                                  "by their names, without turn", param="reward")  # fmt: skip
        if turn is None:
            self.reward = float(values[0]) if named is None else named
        elif isinstance(turn, int) and not isinstance(turn, bool) and 0 <= turn < self.calls:
            self.turn_rewards[turn] = float(values[0])
            if body.get("state") is not None:
                self.turn_states[turn] = body["state"]
        else:
            raise BadRequestError(
                f"turn is {turn!r:.100}; it takes the number of a call, from 0, and there "
                f"{'was' if self.calls == 1 else 'were'} {amount(self.calls, 'call')}",
                param="turn",
            )


def is_finite(value: Any) -> bool:
    """True for a finite number that is no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and finite(value) is not None


class Call:
    """One request of a session: its prompt as token ids (`render`), its bounds (`bounded`), what came (`record`)."""

    def __init__(self, session: Session):
        self.session = session
        self.before: Branch | None = None  # the branch that it goes on with
        self.observed: list[int] = []  # ids between that and the answer
        self.new: list[dict[str, Any]] = []  # messages between them
        self.history: str | list[str] | list[int] = ""
        self.template = ""
        self.number = 0  # among the calls of the session
        self.retokenised = 0  # sampled tokens that it tokenises again, as the template rewrites them
        self.images: ImageText | None = None
        self.shown: list[str] = []  # digests of those behind the branch

    def render(
        self,
        prompt: Any,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        images: ImageText | None = None,
    ) -> list[int]:
        """The token ids of a prompt: text, messages (with `images`) or ids. Raises ConfigError as `render_prompt`.

        A thread may do it: it changes nothing of the session.
        """
        self.images = images
        turns = self.session.turns
        if isinstance(prompt, str):
            self.history = prompt
            self.before = self._longest()
            if self.before is not None:
                self.observed = continued_ids(turns.tokenizer, None, prompt[len(self.before.history) :])
        elif all(isinstance(index, int) for index in prompt):
            self.history = prompt
            self.before = self._longest()
            if self.before is not None:
                self.observed = prompt[len(self.before.history) :]
        else:
            self.shown = [] if images is None else [image.digest() for image in images.tiles.images]
            self.history = [message_key(message) for message in _with_digests(prompt, self.shown)]
            self.new = list(prompt)
            self.template = json.dumps([tools, options], sort_keys=True, default=repr)
            self.before = self._longest()
            if self.before is not None:
                new = self.new[len(self.before.history) :]
                row = {"prompt": prompt, "chat_template_kwargs": options}
                seen = sum(map(_images_in, self.new[: len(self.before.history)]))
                behind = None if images is None else images.behind(seen)
                try:
                    self.observed = []
                    if new:
                        self.observed = turns.observation_ids(row, new, tools or (), self.before.ended, behind)
                    self.new, self.shown = new, self.shown[seen:]
                except ConfigError:  # the template rewrites what came before, so the row cannot go on
                    self.retokenised, self.before = sum(self.before.mask), None
        if self.before is not None:
            return [*self.before.prompt_ids, *self.before.completion_ids, *self.observed]
        if not isinstance(prompt, str) and not self.template:
            return prompt
        options, expand = {**turns.template_kwargs, **(options or {})}, None if images is None else images.expand
        return render_prompt(turns.tokenizer, prompt, tools, options, expand)

    def _longest(self) -> Branch | None:
        """The branch with most tokens that the history goes on with; one that ended needs something new behind it."""
        history, found = self.history, None
        for branch in tuple(self.session.branches):
            size = len(branch.history)
            extends = type(branch.history) is type(history) and branch.template == self.template
            if extends and history[:size] == branch.history and (len(history) > size or not branch.ended):
                tokens = len(branch.completion_ids)
                found = branch if found is None or tokens >= len(found.completion_ids) else found
        return found

    def bounded(self, asked: Asked) -> Asked:
        """The request with the sampling, the seed and the limits of its session. Raises BadRequestError."""
        session, spec = self.session, self.session.spec
        session.check_open(asked.n)
        if len(asked.prompts) > 1:
            raise BadRequestError(
                f"prompt has {len(asked.prompts)} prompts; a session takes one a call", param="prompt"
            )
        if not asked.limits[0]:
            raise BadRequestError("max_tokens is 0, but sessions are of what they sample: ask for 1 or more",
                                  code="unsupported", param="max_tokens")  # fmt: skip
        for name in UNSEEN:
            if value := getattr(asked.sampling, name):
                raise BadRequestError(f"{name} is {value!r:.100}, which sessions do not take, as what they sample is "
                                      "trained on: leave it out", code="unsupported", param=name)  # fmt: skip
        if not self.history:  # token ids, which nobody has rendered
            asked.prompts[0] = self.render(asked.prompts[0])
        prompt, room = asked.prompts[0], spec.completion
        if self.before is not None:
            room -= len(self.before.completion_ids) + len(self.observed)
        elif len(prompt) > spec.prompt:
            raise BadRequestError(f"the prompt has {len(prompt)} tokens, but rows begin with up to {spec.prompt} "
                                  "(rollout.max_prompt_length)", code=TOO_LONG, param="messages")  # fmt: skip
        if room < 1:
            raise BadRequestError(f"the row has no room for an answer: behind its first prompt it has up to "
                                  f"{spec.completion} tokens (rollout.max_completion_length)", code=TOO_LONG,
                                  param="messages")  # fmt: skip
        tokens, one = math.inf, session
        while one is not None:
            tokens, one = min(tokens, one.tokens_left), one.parent
        if tokens < room * asked.n:
            room = int(tokens) // asked.n
        digest = hashlib.blake2b(session.key + np.asarray(prompt, np.int32).tobytes(), digest_size=8).digest()
        seed = hashlib.blake2b(digest + session.asked[digest].to_bytes(4), digest_size=4).digest()
        session.asked[digest] += 1
        self.number, session.calls = session.calls, session.calls + 1
        session.retokenised += self.retokenised
        return dataclasses.replace(
            asked, limits=[min(asked.limits[0], room)], sampling=spec.sampling, seed=int.from_bytes(seed)
        )

    def record(self, choices: Sequence[Choice]) -> None:
        """Add the branches of an answer, that of its first choice last."""
        session, before = self.session, self.before
        for choice in reversed(choices):
            ids, logps, observed = list(choice.ids), list(choice.logps), self.observed
            completion, mask, all_logps, messages, turns = ids, [1] * len(ids), logps, [], 0
            if before is not None:
                completion = [*before.completion_ids, *observed, *ids]
                mask = [*before.mask, *[0] * len(observed), *mask]
                all_logps = [*before.logps, *[0.0] * len(observed), *logps]
                messages, turns = [*before.messages, *self.new], before.turns
            start = choice.prompt if before is None else observed
            mark = (len(completion), self.number, (*start, *self.shown))
            answer, history, ended = answer_message(choice), self.history, bool(ids) and ids[-1] in session.turns.eos
            # What a stop string has cut off is in the row: a call goes on with it where its prompt has that too.
            text = choice.text + ("" if ended else choice.left_out)
            if isinstance(history, str):
                history += text
            elif self.template:
                history = [*history, message_key(answer if choice.calls else {**answer, "content": text})]
            else:
                history = [*history, *ids]
            session.branches.append(
                Branch(
                    choice.prompt if before is None else before.prompt_ids, completion, mask, all_logps, turns + 1,
                    ended, choice.finish_reason != "length", history,
                    self.template, [*messages, answer], before, (*(() if before is None else before.marks), mark),
                    None if self.images is None else self.images.tiles,
                )
            )  # fmt: skip
            session.sampled += len(ids)


def _images_in(message: Mapping[str, Any]) -> int:
    """The number of images in a message."""
    content = message.get("content")
    return sum(part["type"] == "image" for part in content) if isinstance(content, list) else 0


def _with_digests(messages: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> list[dict[str, Any]]:
    """The messages, with what tells their images apart in place of them."""
    digests = iter(shown)
    return [
        {**message, "content": [part if part["type"] != "image" else [next(digests)] for part in message["content"]]}
        if _images_in(message)
        else dict(message)
        for message in messages
    ]


def answer_message(choice: Choice) -> dict[str, Any]:
    """The message of an answer that has ended, the arguments of its calls as objects."""
    thoughts = {"reasoning_content": choice.thought} if choice.thought else {}
    if not choice.calls:
        return {"role": "assistant", "content": choice.text, **thoughts}
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in choice.calls
    ]
    return {"role": "assistant", "content": choice.text[: choice.given].strip(), "tool_calls": calls, **thoughts}


def message_key(message: Mapping[str, Any]) -> str:
    """A text that is the same for a message and what clients make of it.

    Of an answer they may leave out the space around its text, empty fields and the ids of its calls.
    """
    kept = {name: value for name, value in message.items() if value not in (None, "", [], {}) and name != "refusal"}
    if message["role"] == "assistant":
        content = message.get("content") or ""
        kept = {"role": "assistant", "content": content.strip() if isinstance(content, str) else content}
        kept["thoughts"] = str(message.get("reasoning_content") or "").strip()
        kept["calls"] = [
            [call["function"].get("name"), call["function"].get("arguments")]
            for call in message.get("tool_calls") or ()
        ]
    return json.dumps(kept, sort_keys=True, default=repr)
