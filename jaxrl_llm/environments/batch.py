"""All episodes of one rollout batch: they open its prompts, answer its rows while the engine samples, and are rewarded.

The order of calls is `EpisodeBatch.open`, then `submit` and `poll` by the engine, then `finish` and `release`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from jaxrl_llm.algorithms.turn_advantages import Turn
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.user_code import error_text
from jaxrl_llm.environments.call_pool import CallResult
from jaxrl_llm.environments.episode import Episode
from jaxrl_llm.environments.factory import Environments
from jaxrl_llm.environments.protocol import EpisodeError, is_messages

Row = dict[str, Any]
FAILED_BATCHES = 3  # in a row without an episode that did not fail, which end the run


class EpisodeTokenizer(Protocol):
    """Text and messages of episodes as token ids (`data.observations.TurnTokenizer`)."""

    def check_turns(self, role: str) -> None:
        """Raise ConfigError unless a conversation can go on, after a turn, with a message of `role`."""
        ...

    def prompt_ids(self, row: Row, prompt: Any, tools: list[Any]) -> list[int]:
        """The token ids of the prompt with which a row's episode opens, which shows the schemas of its tools."""
        ...

    def observation_ids(self, row: Row, observation: Any, tools: list[Any]) -> list[int]:
        """The token ids between a sampled turn and the next one: what ends the turn, the observation, and what opens
        the next."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids, with or without the special ones."""
        ...


class EpisodeBatch:
    """The episodes of this process's rows in one rollout batch; a `TurnServer` for the engine.

    examples `[B]` have the prompts; rows `[N]` and episodes `[N]` count from 0, rows of a prompt adjacent. An
    environment that raises, or is late, ends its own episode, or the run where `environment.on_error` is stop.
    """

    def __init__(
        self,
        environments: Environments,
        tokenizer: EpisodeTokenizer,
        examples: Sequence[Row],
        rows: Sequence[Row],
        episodes: Sequence[Episode],
    ):
        self.environments, self.tokenizer = environments, tokenizer
        self.examples, self.rows, self.episodes = list(examples), list(rows), list(episodes)

    @classmethod
    def open(
        cls, environments: Environments, tokenizer: EpisodeTokenizer, examples: Sequence[Row], group_size: int
    ) -> "EpisodeBatch":
        """Reset an environment for each of `group_size` rows of every example.

        Raises EpisodeError: a `reset` fails, or opens rows of a prompt differently (their completions are compared, so
        they must answer the same question). Raises ConfigError: a prompt that is too long or cannot show tools, or a
        chat template with which no conversation can go on.
        """
        if any(is_messages(example["prompt"]) for example in examples):
            for role in ("user", "tool") if any(environments.schemas.values()) else ("user",):
                tokenizer.check_turns(role)
        rows = [example for example in examples for _ in range(group_size)]
        episodes = environments.acquire(rows)
        resets = {i: partial(episode.reset, row) for i, (episode, row) in enumerate(zip(episodes, rows, strict=True))}
        results = environments.pool.run(resets)
        for i, result in sorted(results.items()):
            if failure := result.failure:
                raise EpisodeError(f"{episodes[i].name}.reset {failure}, in row {i}") from result.error
        opened = []
        for number, example in enumerate(examples):
            first = number * group_size
            openings = [results[first + member].result for member in range(group_size)]
            opening, episode = openings[0], episodes[first]
            if any(other != opening for other in openings):
                raise EpisodeError(
                    f"{episode.name}.reset opens rows of the same prompt differently ({opening!r:.200} and others): "
                    "draw what it needs from the row, such as a column seed, so that a group answers one question"
                )
            if opening is not None or episode.tools:
                prompt = episode.opening_prompt(example["prompt"], opening)
                ids = tokenizer.prompt_ids(example, prompt, environments.schemas[environments.name(example)])
                example = {**example, "prompt": prompt, "prompt_ids": ids}
            opened.append(example)
        return cls(environments, tokenizer, opened, [row for row in opened for _ in range(group_size)], episodes)

    def submit(self, row: int, tokens: list[int]) -> None:
        """Give the newest turn of a row to its environment, without waiting; `tokens` are its completion so far."""
        episode = self.episodes[row]
        turn = tokens[episode.observation_spans[-1][1] if episode.observation_spans else 0 :]
        episode.turns += 1
        episode.turn_ends.append(len(tokens))
        text, raw = (self.tokenizer.decode(turn, skip_special_tokens) for skip_special_tokens in (True, False))
        self.environments.pool.submit(row, partial(episode.respond, text, raw))

    def poll(self, wait: bool) -> dict[int, list[int] | None]:
        """The observation tokens of each row that is answered by now, None where its episode is over."""
        return {result.key: self._observation_tokens(result) for result in self.environments.pool.poll(wait)}

    def finish(self, ids: Sequence[Sequence[int]], instances: bool) -> tuple[list[Any], dict[str, list[Any]]]:
        """Completions `[N]` (text, or messages) and the columns for rewards, when all rows `ids` are sampled.

        With `instances` the environments themselves are a column too, as in TRL.
        """
        for episode, row_ids in zip(self.episodes, ids, strict=True):
            episode.end_at(len(row_ids))
        get_rewards: dict[int, Callable[[], Any]] = {
            row: episode.environment.get_reward
            for row, episode in enumerate(self.episodes)
            if not episode.failed and hasattr(episode.environment, "get_reward")
        }
        for row, result in self.environments.pool.run(get_rewards).items():
            if self._has_failed(result, "get_reward"):
                continue
            try:
                self.episodes[row].set_reward(result.result)
            except EpisodeError as error:
                self._has_failed(result._replace(error=error), "get_reward")
        completions = [
            episode.messages(row_ids, self.tokenizer.decode)
            if is_messages(row["prompt"])
            else self.tokenizer.decode(row_ids, True)
            for episode, row, row_ids in zip(self.episodes, self.rows, ids, strict=True)
        ]
        played = zip(self.rows, self.episodes, strict=True)
        columns: dict[str, list[Any]] = {
            "environment_reward": [self.environments.scaled(row, episode.reward) for row, episode in played]
        }
        if instances:
            columns["environments"] = [episode.environment for episode in self.episodes]
        return completions, columns

    def turn_records(self, lengths: Sequence[int]) -> tuple[list[list[Turn]], int]:
        """The turns of each row, whose completion has `lengths` tokens, and the most turns that a row may have.

        Their rewards are on the scale of the row's environment, as the episode's is.
        """
        scaled, played = self.environments.scaled, zip(self.rows, self.episodes, lengths, strict=True)
        records = [
            [turn._replace(reward=scaled(row, turn.reward)) for turn in episode.turn_records(length)]
            for row, episode, length in played
        ]
        return records, self.environments.spec.max_turns

    def release(self, counted: int) -> tuple[dict[str, list[float]], dict[str, float], dict[str, list[Any]]]:
        """Free the environments for other rows; returns metrics (numbers to average), totals (to add up) and columns.

        Metrics and totals are of the first `counted` rows, behind which others fill up the batch. After rewards, as
        these may read the environments. Warns of the most frequent failure. Raises EpisodeError where all episodes of
        FAILED_BATCHES batches in a row have failed.
        """
        self.environments.release(self.rows, self.episodes)
        episodes = self.episodes[:counted]
        late = {"timeout": "it took more than environment.timeout"}
        reasons = [f"{x.name}: {late.get(x.stop_reason or '', x.stop_reason)}" for x in episodes if x.failed]
        warn_of_failures(reasons)
        is_lost = bool(episodes) and len(reasons) == len(episodes)
        self.environments.lost_batches = self.environments.lost_batches + 1 if is_lost else 0
        if self.environments.lost_batches == FAILED_BATCHES:
            raise EpisodeError(
                f"all episodes of {FAILED_BATCHES} batches in a row failed, so that nothing is learned; the most "
                f"frequent reason of the last is {Counter(reasons).most_common(1)[0][0]}"
            )
        metrics = {"environment/turns": [float(episode.turns) for episode in episodes]}
        totals = {"environment/failures": float(sum(episode.failed for episode in episodes))}
        if self.environments.routed:
            names = [self.environments.name(row) for row in self.rows[:counted]]
            for name in sorted({str(name) for name in names}):
                own = [episode for episode, other in zip(episodes, names, strict=True) if other == name]
                rewards = [episode.reward for episode in own if episode.reward is not None]
                metrics |= {f"environment/{name}/reward": rewards}  # as it gave them, not scaled
                metrics |= {f"environment/{name}/turns": [float(episode.turns) for episode in own]}
                totals |= {f"environment/{name}/episodes": float(len(own))}
                totals |= {f"environment/{name}/failures": float(sum(episode.failed for episode in own))}
        if any(self.environments.schemas.values()):
            metrics["tools/call_frequency"] = [float(episode.calls) for episode in episodes]
            metrics["tools/failure_frequency"] = [
                float(call < episode.failed_calls) for episode in episodes for call in range(episode.calls)
            ]
        columns = {
            "environment/turns": [episode.turns for episode in self.episodes],
            "environment/ended": [episode.stop_reason for episode in self.episodes],
        }
        return metrics, totals, columns

    def _observation_tokens(self, result: CallResult) -> list[int] | None:
        row, episode = result.key, self.episodes[result.key]
        if self._has_failed(result, "step"):
            return None
        episode.record(result.result)
        if episode.stop_reason is not None:
            return None
        observation = result.result.step.observation
        try:
            tools = self.environments.schemas[self.environments.name(self.rows[row])]
            tokens = self.tokenizer.observation_ids(self.rows[row], observation, tools)
        except (TypeError, ValueError) as error:
            # A fault of its environment: the chat template refuses it, or the tokenizer, which takes Unicode alone.
            if not isinstance(error, ConfigError):
                error = EpisodeError(f"the observation {observation!r:.200} is no text for the tokenizer: {error}")
            self._has_failed(result._replace(error=error), "step")
            return None
        if not tokens:
            episode.stop_reason = "done"
            return None
        start, state = episode.turn_ends[-1], result.result.step.state
        episode.observations.append(observation)
        episode.states.append(observation if state is None else state)
        episode.observation_spans.append((start, start + len(tokens)))
        return tokens

    def _has_failed(self, result: CallResult, method: str) -> bool:
        """True for a call that raised or was late: its episode ends, or EpisodeError is raised to stop the run."""
        failure, episode = result.failure, self.episodes[result.key]
        if failure is None:
            return False
        if self.environments.on_error == "stop":
            raise EpisodeError(
                f"{episode.name}.{method} {failure}, in row {result.key}, turn {episode.turns}; fix it, or end such "
                "rows with environment.on_error=end"
            ) from result.error
        episode.fail("timeout" if result.error is None else error_text(result.error))
        return True


def warn_of_failures(reasons: Iterable[str]) -> None:
    """Warn that episodes failed, for the most frequent of these reasons; once for each, as Python's warnings are."""
    for reason, _ in Counter(reasons).most_common(1):
        warnings.warn(
            f"an episode failed, and has no reward ({reason}); environment/failures counts such episodes, and "
            "environment.on_error=stop ends the run",
            stacklevel=2,
        )
