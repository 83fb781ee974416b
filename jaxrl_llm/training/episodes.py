"""A batch of prompts as conversations: between the sampler, which has prompts, and environments, which have rows."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.observations import check_turns, observation_ids
from jaxrl_llm.data.templates import is_conversational, render_chat, render_prompt, template_options
from jaxrl_llm.environments.dialogue import Dialogue, Outcome
from jaxrl_llm.environments.episode import Episode
from jaxrl_llm.environments.factory import Environments
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.rewards.grader import Logged

log = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Converse:
    """Opens the conversations of a batch. template_kwargs: options of the chat template."""

    environments: Environments
    tokenizer: Any
    eos: tuple[int, ...]
    max_prompt_length: int
    template_kwargs: dict[str, Any]

    def __call__(self, examples: Sequence[Row], group_size: int) -> "Conversing":
        """The conversations of `group_size` rows for each example, rows of a prompt adjacent.

        Raises ConfigError: rows of a prompt that open differently (the completions of a group are compared, so that
        they must answer the same question), or a prompt that is too long.
        """
        if any(is_conversational(example["prompt"]) for example in examples):
            for role in ("user", "tool") if any(self.environments.schemas.values()) else ("user",):
                check_turns(self.tokenizer, self.eos, {"template_kwargs": self.template_kwargs}, role)
        rows = [example for example in examples for _ in range(group_size)]
        episodes = [self.environments.take(row) for row in rows]
        said = self._reset(rows, episodes)
        opened = []
        for start in range(0, len(rows), group_size):
            row, group = rows[start], said[start : start + group_size]
            if any(one != group[0] for one in group):
                raise EpisodeError(
                    f"{episodes[start].name}.reset opens rows of the same prompt differently ({group[0]!r} and "
                    "others): "
                    "draw what it needs from the row, such as a column seed, so that a group answers one question"
                )
            opened.append(self._opened(row, episodes[start], group[0]))
        return Conversing(self, opened, [row for row in opened for _ in range(group_size)], episodes)

    def options(self, row: Row) -> dict[str, Any]:
        """The options of the chat template for a row, its tools among them."""
        options = template_options(row, self.template_kwargs)
        tools = [*(options["tools"] or []), *self.environments.schemas[self.environments.name(row)]]
        return {**options, "tools": tools or None}

    def _reset(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Any]:
        calls = {i: functools.partial(e.reset, row) for i, (e, row) in enumerate(zip(episodes, rows, strict=True))}
        ended = self.environments.workers.all(calls)
        for i, end in ended.items():
            if end.error is not None or end.late:
                why = (
                    f"raised {type(end.error).__name__}: {end.error}"
                    if end.error
                    else "took more than environment.timeout"
                )
                raise EpisodeError(f"{episodes[i].name}.reset {why}, in row {i}") from end.error
        return [ended[i].result for i in range(len(rows))]

    def _opened(self, row: Row, episode: Episode, said: Any) -> Row:
        if said is None and not episode.tools:
            return row
        prompt, options = episode.opened(row["prompt"], said), self.options(row)
        if episode.tools:
            self._check_tools(prompt, options)
        ids = render_prompt(self.tokenizer, prompt, **options)
        if not 0 < len(ids) <= self.max_prompt_length:
            raise ConfigError(
                f"the prompt {prompt!r} has {len(ids)} tokens (what environments and tools add included), but it must "
                f"have 1 to rollout.max_prompt_length = {self.max_prompt_length}"
            )
        return {**row, "prompt": prompt, "prompt_ids": ids}

    def _check_tools(self, prompt: Any, options: dict[str, Any]) -> None:
        """Raises ConfigError for a prompt that tools cannot be shown with; warns of a template that shows none."""
        if not is_conversational(prompt):
            raise ConfigError(
                f"tools are shown and answered by the chat template, but the prompt {prompt!r} is plain text: give "
                "prompts that are lists of messages"
            )
        shown, without = (
            render_chat(self.tokenizer, prompt, True, tools, options["template_kwargs"])
            for tools in (options["tools"], None)
        )
        if shown == without:
            _warn("the chat template does not show tools: the policy has to know them; see docs/environments.md")


@functools.cache
def _warn(message: str) -> None:
    """Logs a warning, once."""
    log.warning(message)


class Conversing:
    """The conversations of one batch: `examples` with the prompts that are sampled from, and the engine's partner."""

    def __init__(self, converse: Converse, examples: list[Row], rows: list[Row], episodes: list[Episode]):
        self.converse, self.examples, self.rows, self.episodes = converse, examples, rows, episodes
        environments = converse.environments
        self.dialogue = Dialogue(episodes, environments.workers, self._decode, self._say, environments.on_error)
        self.outcomes: list[Outcome] = []

    def finish(self, ids: Sequence[Sequence[int]], instances: bool) -> tuple[list[Any], dict[str, list[Any]]]:
        """Completions (text, or messages) and the columns that rewards may read, when every row is over.

        With `instances` those are the environments themselves too, as in TRL.
        """
        self.outcomes = self.dialogue.outcomes([len(row) for row in ids])
        completions = [
            self.dialogue.completion(i, own) if is_conversational(row["prompt"]) else self._decode(own, True)
            for i, (row, own) in enumerate(zip(self.rows, ids, strict=True))
        ]
        columns: dict[str, list[Any]] = {"environment_reward": [outcome.reward for outcome in self.outcomes]}
        if instances:
            columns["environments"] = [episode.environment for episode in self.episodes]
        return completions, columns

    def logged(self, logged: Logged) -> Logged:
        """What was logged, with the metrics and columns of the conversations; environments are free for others then."""
        self.converse.environments.give_back(self.rows, self.episodes)
        o = self.outcomes
        metrics = {"environment/turns": [float(each.turns) for each in o]}
        totals = {"environment/failures": float(sum(each.failed for each in o))}
        if any(self.converse.environments.schemas.values()):
            metrics["tools/call_frequency"] = [float(each.calls) for each in o]
            failures = [[1.0] * each.failed_calls + [0.0] * (each.calls - each.failed_calls) for each in o]
            metrics["tools/failure_frequency"] = [one for each in failures for one in each]
        columns = {"environment/turns": [each.turns for each in o], "environment/ended": [each.ended for each in o]}
        return Logged(logged.metrics | metrics, logged.totals | totals, logged.columns | columns)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokenizer = self.converse.tokenizer
        return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def _say(self, row: int, observation: Any) -> list[int]:
        own, talk = self.rows[row], self.converse
        conversational = is_conversational(own["prompt"])
        return observation_ids(talk.tokenizer, talk.eos, observation, conversational, talk.options(own))
