"""Graders that ask a language model: `Judge` scores each completion, `PairwiseJudge` compares those of a prompt.

Both talk to an OpenAI-compatible chat endpoint (OpenAI, vLLM, SGLang, llama.cpp, ...).
"""

import asyncio
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards.endpoint import Endpoint, EndpointError, Limits
from jaxrl_llm.rewards.replies import ReplyError, read_rubric, read_score, read_winner
from jaxrl_llm.rewards.signatures import RewardError, text_of

SCORE_TEMPLATE = """\
Rate how well the answer solves the task, from {{ low }} (useless) to {{ high }} (perfect).

# Task
{{ prompt }}

# Answer
{{ completion }}

{% if criteria -%}
Reply with a JSON object that rates each of these from {{ low }} to {{ high }}: {{ criteria | join(", ") }}.
{%- else -%}
Reply with a JSON object: {"score": number}
{%- endif %}
"""

PAIR_TEMPLATE = """\
Which of two answers solves the task better?

# Task
{{ prompt }}

# Answer A
{{ a }}

# Answer B
{{ b }}

Reply with one word: A, B or tie.
"""


class _Asks:
    """What both judges share: the template, the endpoint, and what a row gets that it could not judge."""

    def __init__(
        self, url: str, model: str, *, template: str, system: str | None, name: str, scale: tuple[float, float] | None,
        on_failure: str | float | None, tries: int, prices: tuple[float, float], cache: str | None, key: str,
        limits: Limits, parameters: Mapping[str, Any],
    ):  # fmt: skip
        self.name, self.system, self.scale, self.tries, self.prices = name, system, scale, tries, prices
        self.template = _template(template)
        self.on_failure = on_failure
        if not (on_failure in ("stop", "none", None) or isinstance(on_failure, (int, float))):
            raise ConfigError(f"on_failure of the judge {name!r} is {on_failure!r}; it is stop, none or a number")
        if scale is not None and not (len(scale) == 2 and scale[0] < scale[1]):
            raise ConfigError(f"scale of the judge {name!r} is {scale!r}; it is (lowest, highest), or None")
        self.endpoint = Endpoint(url, model, parameters, limits, cache, key)

    def close(self) -> None:
        """Ends the threads that wait for the endpoint."""
        self.endpoint.close()

    async def _judged(self, values: Mapping[str, Any], read: Callable[[str], Any], memory: Any = None) -> Any:
        """What `read` finds in the reply to the filled-in template; asked again for replies that it cannot read.

        A RewardError when it does not succeed: the caller decides what that means for the row.
        """
        try:
            content = self.template.render(**values)
        except jinja2.UndefinedError as error:
            known = ", ".join(sorted(values))
            raise ConfigError(f"the template of the judge {self.name!r}: {error}; it may use {known}") from error
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": content})
        problem: RewardError | None = None
        for attempt in range(self.tries):
            try:
                return read((await self.endpoint.ask(messages, attempt, memory)).text)
            except ReplyError as error:
                problem = error
                self.endpoint.counts["unreadable"] += 1
            except EndpointError as error:
                return error
        return problem

    def _settle(self, row: int, found: Any, log_total: Any) -> Any:
        """The finding of a row, or what `on_failure` gives a row that failed."""
        if not isinstance(found, RewardError):
            return found
        if self.on_failure == "stop":
            raise RewardError(f"judge {self.name!r} could not judge row {row}: {found}") from found
        warnings.warn(f"judge {self.name!r} could not judge row {row}: {found}", stacklevel=2)
        if log_total is not None:
            log_total(f"{self.name}/failed_rows", 1)
        return None if self.on_failure in ("none", None) else float(self.on_failure)

    def _spend(self, log_total: Any) -> None:
        if log_total is None:
            return
        counts = self.endpoint.take_counts()
        for name in ("requests", "cached", "retries", "failures", "unreadable", "prompt_tokens", "completion_tokens"):
            log_total(f"{self.name}/{name}", counts.get(name, 0))
        tokens = (counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0))
        if any(self.prices):
            log_total(f"{self.name}/cost", sum(n * price / 1e6 for n, price in zip(tokens, self.prices, strict=True)))


class Judge(_Asks):
    """A grader that has a language model score each completion.

    `template` is a jinja2 text, or a file that holds one (name.txt, name.j2, name.md), with `prompt`, `completion`,
    every column, `low`, `high` and `criteria`. The score is read by the regular expression `pattern`, or at `field` of
    a JSON object in the reply, or is its last number; on `scale` (lowest, highest) it becomes 0 to 1, with `scale=None`
    it is taken as it is. `criteria` {name: weight} makes it a rubric: the reward is their weighted mean, and each is
    logged. Replies that cannot be read are asked for again, `tries` times in all; a row that fails gets `on_failure`:
    "stop" (an error), "none" or a number. `parameters` go to the endpoint (temperature is 0 unless given there);
    `cache` is a folder; `prices` are per million prompt and completion tokens, for the metric `<name>/cost`; `key`
    names the environment variable of the API key. Limits: `timeout` seconds for an attempt, `attempts` with growing
    pauses from `backoff` seconds on, `concurrency` requests at once, `per_minute` requests a minute (0: any number).
    """

    def __init__(
        self, url: str, model: str, template: str = SCORE_TEMPLATE, *, system: str | None = None,
        criteria: Mapping[str, float] | None = None, pattern: str | None = None, field: str = "score",
        scale: tuple[float, float] | None = (0, 10), on_failure: str | float | None = "stop", tries: int = 2,
        name: str = "judge", prices: tuple[float, float] = (0.0, 0.0), cache: str | None = None,
        key: str = "OPENAI_API_KEY", timeout: float = 60.0, attempts: int = 5, concurrency: int = 16,
        per_minute: float = 0.0, backoff: float = 1.0, parameters: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__(
            url, model, template=template, system=system, name=name, scale=scale, on_failure=on_failure, tries=tries,
            prices=prices, cache=cache, key=key, limits=Limits(timeout, attempts, concurrency, per_minute, backoff),
            parameters={"temperature": 0.0, **(parameters or {})},
        )  # fmt: skip
        self.criteria, self.pattern, self.field = dict(criteria or {}), pattern, field

    by_row = True  # a row's score depends on that row alone: it is asked for as soon as the row has ended

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_total: Any = None,
        row_numbers: Sequence[int] | None = None, batch_memory: Any = None, **columns: Any,
    ) -> list[Any]:  # fmt: skip
        """The scores; a mapping with each criterion's where there is a rubric."""
        numbers = range(len(prompts)) if row_numbers is None else row_numbers
        found = await asyncio.gather(
            *(
                self._judged(self._values(row, prompts, completions, columns), self._read, batch_memory)
                for row in range(len(prompts))
            )
        )
        self._spend(log_total)
        return [self._settle(row, score, log_total) for row, score in zip(numbers, found, strict=True)]

    def _values(self, row: int, prompts: Any, completions: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self.scale or (None, None)
        own = {"low": low, "high": high, "criteria": list(self.criteria)}
        given = {name: values[row] for name, values in columns.items() if isinstance(values, list)}
        return {**given, **own, "prompt": shown(prompts[row]), "completion": text_of(completions[row])}

    def _read(self, text: str) -> Any:
        if not self.criteria:
            return read_score(text, self.pattern, self.field, self.scale)
        score, each = read_rubric(text, self.criteria, self.scale)
        return {"score": score, **each}


class PairwiseJudge(_Asks):
    """A grader that has a language model compare the completions of a prompt: the reward is the share of wins.

    Every two completions of a prompt (adjacent rows with the same prompt) are compared, in both orders unless
    `both_orders` is false (models favour a place); a tie is half a win. `template` has `prompt`, `a`, `b` and every
    column. A comparison that fails counts as nothing with on_failure="none", and as that share of a win with a number;
    a completion without any comparison gets None. The other options are as in `Judge`.
    """

    def __init__(
        self, url: str, model: str, template: str = PAIR_TEMPLATE, *, system: str | None = None,
        both_orders: bool = True, on_failure: str | float | None = "stop", tries: int = 2,
        name: str = "pairwise_judge", prices: tuple[float, float] = (0.0, 0.0), cache: str | None = None,
        key: str = "OPENAI_API_KEY", timeout: float = 60.0, attempts: int = 5, concurrency: int = 16,
        per_minute: float = 0.0, backoff: float = 1.0, parameters: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__(
            url, model, template=template, system=system, name=name, scale=None, on_failure=on_failure, tries=tries,
            prices=prices, cache=cache, key=key, limits=Limits(timeout, attempts, concurrency, per_minute, backoff),
            parameters={"temperature": 0.0, **(parameters or {})},
        )  # fmt: skip
        self.both_orders = both_orders

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_total: Any = None, **columns: Any
    ) -> list[float | None]:
        """Each completion's share of wins."""
        pairs = [pair for group in groups(prompts) for pair in itertools.combinations(group, 2)]
        if self.both_orders:
            pairs += [(second, first) for first, second in pairs]
        found = await asyncio.gather(
            *(
                self._judged(
                    {name: values[a] for name, values in columns.items() if isinstance(values, list)}
                    | {"prompt": shown(prompts[a]), "a": text_of(completions[a]), "b": text_of(completions[b])},
                    read_winner,
                )
                for a, b in pairs
            )
        )
        self._spend(log_total)
        wins: list[list[float]] = [[] for _ in prompts]
        for (a, b), outcome in zip(pairs, found, strict=True):
            failed = isinstance(outcome, RewardError)
            share = self._settle(a, outcome, log_total)
            if share is not None:
                wins[a].append(share)
                wins[b].append(share if failed else 1.0 - share)
        return [sum(shares) / len(shares) if shares else None for shares in wins]


def groups(prompts: Sequence[Any]) -> list[list[int]]:
    """The rows of each run of equal adjacent prompts."""
    return [list(rows) for _, rows in itertools.groupby(range(len(prompts)), key=lambda row: prompts[row])]


def shown(prompt: Any) -> str:
    """A prompt as a judge reads it: a text, or a conversation with the role before each message."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _template(template: str) -> jinja2.Template:
    """The template of a text, or of the file that it names."""
    if "\n" not in template and template.endswith((".txt", ".j2", ".md", ".jinja")):
        path = Path(template).expanduser()
        if not path.is_file():
            raise ConfigError(f"the judge's template is {template!r}, but there is no such file in {Path.cwd()}")
        template = path.read_text(encoding="utf-8")
    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the judge's template, line {error.lineno}: {error.message}") from error
