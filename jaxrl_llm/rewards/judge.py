"""Graders that ask a language model: `Judge` scores each completion, `PairwiseJudge` compares those of a prompt.

Both talk to an OpenAI-compatible chat endpoint (OpenAI, vLLM, SGLang, llama.cpp, ...), or to a model at a path, which
the run loads beside its own (training/local_judge.py).
"""

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards.endpoint import Endpoint, EndpointError, EndpointSpec, log_counts
from jaxrl_llm.rewards.replies import ReplyError, read_rubric, read_score, read_winner
from jaxrl_llm.rewards.signatures import RewardError, rows_of, text_of, text_of_content

SCORE_TEMPLATE = """\
Rate how well the answer solves the task{% if low is not none %}, from {{ low }} (useless) to {{ high }} (perfect)\
{% endif %}.

# Task
{{ prompt }}

# Answer
{{ completion }}

{% if criteria -%}
Reply with a JSON object that rates each of these{% if low is not none %} from {{ low }} to {{ high }}{% endif %}: \
{{ criteria | join(", ") }}.
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


@dataclass(frozen=True)
class PathSpec:
    """Settings of a judge's model that the run loads itself, in the place of an endpoint.

    `path` is a Hugging Face folder, its URL or hub id, or `embedded:<name>`. A prompt and its reply have up to
    `max_length` tokens (None: as many as the model has positions, and at most 4096), `rows` are answered at a time. The
    other settings are those of a `RewardModel`.
    """

    _: KW_ONLY
    path: str | None = None
    max_length: int | None = None
    rows: int = 32
    dtype: str = "auto"
    offload: bool = False
    tokenizer: Any = None
    chat_template: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, eq=False)
class JudgeSpec(PathSpec, EndpointSpec):
    """Settings of a judge, those of its endpoint or of its own model among them, and how it asks.

    Raises ConfigError: a template that cannot be read, a setting out of its range, a wrong endpoint, neither `url` nor
    `path` or both, or settings of the one beside the other.
    """

    template: str = ""
    _: KW_ONLY
    system: str | None = None
    on_failure: str | float | None = "stop"
    tries: int = 2
    name: str = ""
    prices: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self):
        if not (self.on_failure in ("stop", "none", None) or isinstance(self.on_failure, (int, float))):
            raise ConfigError(
                f"on_failure of the judge {self.name!r} is {self.on_failure!r}; it is stop, none or a number"
            )
        if not self.tries >= 1:
            raise ConfigError(f"tries of the judge {self.name!r} is {self.tries!r}; a reply is asked for once or more")
        if len(self.prices) != 2:
            raise ConfigError(
                f"prices of the judge {self.name!r} is {self.prices!r}; it is two numbers, for a million tokens "
                "of prompts and of completions"
            )
        if (self.url is None) == (self.path is None):
            raise ConfigError(
                f"the judge {self.name!r} has {'neither url nor path' if self.url is None else 'both url and path'}; "
                "give url and model of a server, or the path of a model that the run loads"
            )
        if self.url is not None and self.model is None:
            raise ConfigError(f"the judge {self.name!r} has a url, but no model: name the one that the server has")
        given, foreign = ("url", PathSpec) if self.path is None else ("path", EndpointSpec)
        wrong = [x.name for x in fields(foreign) if x.name != "parameters" and getattr(self, x.name) != x.default]
        if wrong:
            raise ConfigError(f"the judge {self.name!r} has a {given}, beside which it has no {wrong[0]}: leave it out")
        # Made here, so that a wrong template or url is seen when the judge is made.
        _ = self.compiled
        if self.path is None:
            _ = self.endpoint

    @functools.cached_property
    def endpoint(self) -> Any:
        """The client of the endpoint; of a judge with a path what training/local_judge.py has set.

        Raises ConfigError where that is missing.
        """
        if self.path is not None:
            raise ConfigError(
                f"the judge {self.name!r} has the path {self.path}, whose model a run loads for a reward of its own: "
                "outside of a run wrap it, jaxrl_llm.training.local_judge.LocalJudge(judge)"
            )
        return Endpoint(self)

    @functools.cached_property
    def compiled(self) -> jinja2.Template:
        """The template, of the text or of the file that `template` names."""
        return _compile(self.template)

    def close(self) -> None:
        """End the threads that wait for the endpoint."""
        if self.path is None:
            self.endpoint.close()

    async def _judge(self, values: Mapping[str, Any], read: Callable[[str], Any], memory: dict[str, Any]) -> Any:
        """The result of `read` for the reply to the filled-in template; asks again for replies that it cannot read.

        Returns a RewardError when it does not succeed: the caller decides what that means for the row.
        """
        try:
            content = self.compiled.render(**values)
        except jinja2.UndefinedError as error:
            known = ", ".join(sorted(values))
            raise ConfigError(f"the template of the judge {self.name!r}: {error}; it may use {known}") from error
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": content})
        problem: RewardError | None = None
        for attempt in range(self.tries):
            try:
                return read((await self.endpoint.ask(messages, memory, attempt)).text)
            except ReplyError as error:
                problem = error
                self.endpoint.counts["unreadable"] += 1
            except EndpointError as error:
                return error
        return problem

    def _settle(self, row: int, judgement: Any, log_total: Any) -> Any:
        """The judgement of a row, or what `on_failure` gives a row that failed."""
        if not isinstance(judgement, RewardError):
            return judgement
        message = f"judge {self.name!r} could not judge row {row}: {judgement}"
        if self.on_failure == "stop":
            raise RewardError(message) from judgement
        warnings.warn(message, stacklevel=2)
        if log_total is not None:
            log_total(f"{self.name}/failed_rows", 1)
        return None if self.on_failure in ("none", None) else float(self.on_failure)

    def _log_spend(self, log_total: Any) -> None:
        if log_total is None:
            return
        counts = log_counts([self.endpoint], self.name, log_total, ("unreadable",))
        tokens = (counts["prompt_tokens"], counts["completion_tokens"])
        if any(self.prices):
            log_total(f"{self.name}/cost", sum(n * price / 1e6 for n, price in zip(tokens, self.prices, strict=True)))


@dataclass(frozen=True, eq=False)
class Judge(JudgeSpec):
    """A grader that has a language model score each completion.

    `template` is a jinja2 text, or a file that holds one (name.txt, name.j2, name.md), with `prompt`, `completion`,
    every column, and `low`, `high` and `criteria` where the data has no such column. The score is read by the regular
    expression `pattern`, or at `field` of a JSON object in the reply, or behind `Score:`, or is its last number; on
    `scale` (lowest, highest) it becomes 0 to 1, with `scale=None` it is taken as it is. `criteria` {name: weight} makes
    it a rubric: the reward is their weighted mean, and each is logged. Replies that cannot be read are asked for again,
    `tries` times in all; a row that fails gets `on_failure`: "stop" (an error), "none" or a number. `prices` are per
    million prompt and completion tokens, for the metric `<name>/cost`. The other options are those of `EndpointSpec` or
    `PathSpec`.
    """

    template: str = SCORE_TEMPLATE
    _: KW_ONLY
    name: str = "judge"
    criteria: Mapping[str, float] | None = None
    pattern: str | None = None
    field: str = "score"
    scale: tuple[float, float] | None = (0, 10)

    def __post_init__(self):
        super().__post_init__()
        if self.scale is not None and not (len(self.scale) == 2 and self.scale[0] < self.scale[1]):
            raise ConfigError(f"scale of the judge {self.name!r} is {self.scale!r}; it is (lowest, highest), or None")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ConfigError(
                f"pattern of the judge {self.name!r} is {self.pattern!r}, which is no regular expression: {error}"
            ) from None
        if self.criteria and not sum(self.criteria.values()):
            raise ConfigError(
                f"the weights in criteria of the judge {self.name!r}, {dict(self.criteria)}, have the sum 0, by which "
                "their mean is divided; give others"
            )

    by_row: ClassVar[bool] = True  # a row's score depends on that row alone, so a row is judged as soon as it has ended

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_total: Any = None,
        row_numbers: Sequence[int] | None = None,
        batch_memory: dict[str, Any] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """The scores; a mapping with each criterion's where there is a rubric."""
        low, high = self.scale or (None, None)
        memory = {} if batch_memory is None else batch_memory
        own = {"low": low, "high": high, "criteria": list(self.criteria or ())}
        is_users = self.template != SCORE_TEMPLATE  # {{ criteria }} of such a template is the column, if there is one
        judgements = await self.endpoint.gather(
            *(
                self._judge(
                    (own | row if is_users else row | own)
                    | {"prompt": shown(prompt), "completion": text_of(completion)},
                    self._read,
                    memory,
                )
                for prompt, completion, row in zip(prompts, completions, rows_of(columns, len(prompts)), strict=True)
            )
        )
        self._log_spend(log_total)
        numbers = range(len(prompts)) if row_numbers is None else row_numbers
        return [self._settle(row, score, log_total) for row, score in zip(numbers, judgements, strict=True)]

    def _read(self, text: str) -> Any:
        if not self.criteria:
            return read_score(text, self.pattern, self.field, self.scale)
        score, each = read_rubric(text, self.criteria, self.scale)
        return {"score": score, **each}


@dataclass(frozen=True, eq=False)
class PairwiseJudge(JudgeSpec):
    """A grader that has a language model compare the completions of a prompt: the reward is the share of wins.

    Every two completions of a prompt are compared, in both orders unless `both_orders` is false (models favour a
    position); a tie is half a win. Adjacent rows are of one prompt where `prompt_numbers` are the same, for prompts of
    one text may have other images; where a caller gives none, where the prompts are. `template` has `prompt`, `a`, `b`
    and every column. A comparison that fails counts as nothing with on_failure="none", and as that share of a win with
    a number; a completion without any comparison gets None. The other options are as in `Judge`.
    """

    template: str = PAIR_TEMPLATE
    _: KW_ONLY
    name: str = "pairwise_judge"
    both_orders: bool = True

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_total: Any = None,
        prompt_numbers: Sequence[int] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Each completion's share of wins."""
        known = prompts if prompt_numbers is None else prompt_numbers
        of_prompts = itertools.groupby(range(len(prompts)), key=lambda row: known[row])
        pairs = [pair for _, rows in of_prompts for pair in itertools.combinations(rows, 2)]
        if self.both_orders:
            pairs += [(second, first) for first, second in pairs]
        memory: dict[str, Any] = {}
        rows = rows_of(columns, len(prompts))
        judgements = await self.endpoint.gather(
            *(
                self._judge(
                    rows[a] | {"prompt": shown(prompts[a]), "a": text_of(completions[a]), "b": text_of(completions[b])},
                    read_winner,
                    memory,
                )
                for a, b in pairs
            )
        )
        self._log_spend(log_total)
        wins: list[list[float]] = [[] for _ in prompts]
        for (a, b), judgement in zip(pairs, judgements, strict=True):
            failed = isinstance(judgement, RewardError)
            share = self._settle(a, judgement, log_total)
            if share is not None:
                wins[a].append(share)
                wins[b].append(share if failed else 1.0 - share)
        return [sum(shares) / len(shares) if shares else None for shares in wins]


def shown(prompt: Any) -> str:
    """A prompt as a judge reads it: a text, or a conversation with the role before each message."""
    if isinstance(prompt, str):
        return prompt
    texts = [text_of_content(message.get("content")) for message in prompt]  # a call of a tool may have none
    if len(prompt) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(prompt, texts, strict=True))


def _compile(template: str) -> jinja2.Template:
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
