"""A client of an OpenAI-compatible chat endpoint: retries, rate and concurrency limits, a cache on disk, and spend.

The key is read from the environment when a request is sent, and is in no message, cache entry or attribute; neither are
user, password and keys in the address.
"""

import asyncio
import contextlib
import email.utils
import hashlib
import json
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from jaxrl_llm.config.http_client import HttpClient, RequestError, TooLargeError, http_address, json_headers
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.rewards.replies import ReplyError
from jaxrl_llm.rewards.signatures import RewardError, shorten

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
LONGEST_WAIT = 60.0  # seconds between two attempts, whatever Retry-After says
LARGEST_REPLY = 16 * 2**20  # bytes
DEFAULT_KEY = "OPENAI_API_KEY"
LEAST = {"attempts": 1, "concurrency": 1, "timeout": 0.001, "per_minute": 0.0, "backoff": 0.0}  # 1: a whole number


class EndpointError(RewardError):
    """A request that the endpoint did not answer, or did not answer with a chat completion."""


class NoTextError(ReplyError):
    """A chat completion without a text, of so many tokens: a refusal, a call of a tool, or reasoning alone."""

    def __init__(self, problem: str, prompt_tokens: int, completion_tokens: int):
        super().__init__(problem)
        self.tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


class RetryError(Exception):
    """A failed attempt that is worth another one, after `after` seconds where the endpoint says so."""

    def __init__(self, problem: str, after: float | None = None):
        super().__init__(problem)
        self.after = after


SPENT = ("requests", "cached", "retries", "failures", "prompt_tokens", "completion_tokens")  # counts of an endpoint


@dataclass(frozen=True)
class EndpointSpec:
    """Settings of an endpoint: the model `model` at `url` (".../v1"), limits and cache.

    `parameters` are sent with every request (max_tokens, ...; temperature is 0 unless given there), except those that
    are None. `timeout` is the seconds of one attempt, from connecting to the reply's last byte, `attempts` their
    number, `concurrency` the requests at once, `per_minute` the requests a minute (0: any number). The pause after
    attempt i is `backoff` * 2^i seconds, times 0.5 to 1 by chance, or what Retry-After says; at most 60. `cache` is a
    folder; entries are found by url, model, messages and parameters. `key` names the environment variable that holds
    the key; a request goes without when it is not set, unless `key` was changed from its default.
    """

    url: str | None = None
    model: str | None = None
    _: KW_ONLY
    cache: str | None = None
    key: str = DEFAULT_KEY
    timeout: float = 60.0
    attempts: int = 5
    concurrency: int = 16
    per_minute: float = 0.0
    backoff: float = 1.0
    parameters: Mapping[str, Any] | None = None


class Answer(NamedTuple):
    """A reply's text, its prompt and completion tokens, and whether it came from the cache."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached: bool


def log_counts(endpoints: Sequence["Endpoint"], name: str, log_total: Any, more: Sequence[str] = ()) -> Counter[str]:
    """The counts of all since they were last taken; those in SPENT, and `more`, are logged as `<name>/<count>`."""
    counts: Counter[str] = Counter()
    for endpoint in endpoints:
        counts.update(endpoint.take_counts())
    if log_total is not None:
        for count in (*SPENT, *more):
            log_total(f"{name}/{count}", counts[count])
    return counts


class Endpoint:
    """`await endpoint.ask(messages)` -> Answer.

    `counts` holds requests, cached, retries, failures, prompt_tokens and completion_tokens since the last
    `take_counts`. `await endpoint.gather(...)` waits for coroutines that ask. Raises ConfigError: a url that is none,
    a key that is not set, or a number that is out of its range.
    """

    gather = staticmethod(asyncio.gather)

    def __init__(self, spec: EndpointSpec):
        address = http_address("the judge's url", spec.url)
        if spec.key != DEFAULT_KEY and spec.key not in os.environ:
            raise ConfigError(f"the judge's key is in the environment variable {spec.key}, which is not set; export it")
        for name, least in LEAST.items():
            value = getattr(spec, name)
            if not (isinstance(value, (int, type(least))) and least <= value < math.inf):
                kind = "whole number" if least == 1 else "number"
                raise ConfigError(f"the judge's {name} is {value!r}; it is a {kind} of at least {least:g}")
        self.spec = spec
        path = address.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.url = address._replace(path=path).geturl()
        known = [address.username, address.password, *(value for _, value in parse_qsl(address.query))]
        self.secrets = [text for text in known if text and text not in masked(self.url)]
        parameters = {"temperature": 0.0, **(spec.parameters or {})}
        self.parameters = {name: value for name, value in parameters.items() if value is not None}
        self.cache = None if spec.cache is None else Path(spec.cache).expanduser()
        self.counts: Counter[str] = Counter()
        # Threads, and a client with an event loop of its own: a judge may outlive the caller's event loop.
        self.threads = ThreadPoolExecutor(spec.concurrency, "judge")
        self.client = HttpClient(spec.concurrency)
        self.next_start = 0.0
        self.waiting: Counter[asyncio.Task[Answer]] = Counter()  # callers of `ask` by what they wait for

    async def ask(
        self, messages: list[dict[str, str]], memory: dict[str, asyncio.Task[Answer]], attempt: int = 0
    ) -> Answer:
        """The reply to `messages`; equal requests with the same `memory`, a dictionary, are sent once.

        `attempt` makes a request differ from those with another one in the cache: ask again with the next number.
        Raises EndpointError when the endpoint refuses, or fails every attempt; NoTextError for a reply without a text,
        which is not asked for again here and is in no cache.
        """
        body = {"model": self.spec.model, "messages": messages, **self.parameters}
        text = json.dumps([self.url, body, attempt], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        if name not in memory:
            if (cached := self._read(name)) is not None:
                self.counts["cached"] += 1
                return cached
            memory[name] = asyncio.create_task(self._fetch(name, body))
        task = memory[name]
        self.waiting[task] += 1
        try:  # whoever waits may be cancelled at a time limit; the others that wait for the same reply are not
            return await asyncio.shield(task)
        finally:
            self.waiting[task] -= 1
            if not self.waiting[task]:
                del self.waiting[task]
                if not task.done():  # and what nobody waits for any more is not asked
                    task.cancel()
                    del memory[name]

    def take_counts(self) -> dict[str, int]:
        """The counts of requests, replies from the cache, retries and failures since this was called last; they begin
        anew."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """End the waiting threads and the connections."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    async def _fetch(self, name: str, body: dict[str, Any]) -> Answer:
        """The endpoint's reply, asked up to `attempts` times, and kept in the cache."""
        spec, problem = self.spec, ""
        for attempt in range(spec.attempts):
            now = time.monotonic()
            start = max(now, self.next_start)
            if spec.per_minute:
                self.next_start = start + 60.0 / spec.per_minute
            await asyncio.sleep(start - now)
            self.counts["requests"] += 1
            try:
                answer = await asyncio.get_running_loop().run_in_executor(self.threads, self._post, body)
            except RetryError as error:
                problem = str(error)
                if attempt + 1 < spec.attempts:
                    self.counts["retries"] += 1
                    await asyncio.sleep(self._pause(attempt, error.after))
                continue
            except EndpointError:
                self.counts["failures"] += 1
                raise
            except NoTextError as error:
                self.counts.update(error.tokens)
                raise
            self.counts.update(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
            self._write(name, answer)
            return answer
        self.counts["failures"] += 1
        raise EndpointError(f"{self.url} failed {spec.attempts} attempts, the last time: {problem}")

    def _pause(self, attempt: int, after: float | None) -> float:
        """Seconds before the next attempt: doubling, with jitter of up to half, and at least what the endpoint says."""
        backoff = self.spec.backoff * 2**attempt * random.uniform(0.5, 1.0)
        return min(max(backoff, after or 0.0), LONGEST_WAIT)

    def _post(self, body: dict[str, Any]) -> Answer:
        """The endpoint's reply to one request. Raises RetryError, EndpointError or NoTextError."""
        key = os.environ.get(self.spec.key, "").strip()
        headers = json_headers(key)

        def without_secrets(text: str) -> str:
            text = text.replace(key, "[key]") if key else text
            for secret in self.secrets:
                text = text.replace(secret, "[secret]")
            return masked(text)

        try:
            reply = self.client.post(self.url, json.dumps(body).encode(), headers, self.spec.timeout, LARGEST_REPLY)
        except TooLargeError as error:
            raise EndpointError(f"{self.url}: {error}") from None
        except RequestError as error:
            raise RetryError(without_secrets(str(error))) from None
        status, data = reply.status, reply.data
        if not reply.ok:
            problem = f"HTTP {status}: {without_secrets(shorten(data[:1000].decode('utf-8', 'replace')))}"
            if status in RETRIED:
                raise RetryError(problem, _retry_after(reply.headers.get("Retry-After")))
            raise EndpointError(f"{self.url} answered {problem}")
        try:
            tree = json.loads(data)
            choice = tree["choices"][0]
            text, usage = choice["message"].get("content"), tree.get("usage") or {}
            tokens = [int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion")]
            if not (choice["message"] and isinstance(text, str | None)):
                raise TypeError
            why = None if text is not None else _without_text(choice)
        # Servers under load send such replies; RecursionError is of JSON that is nested too deep.
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
            raise RetryError(without_secrets(f"the reply is no chat completion: {shorten(data[:1000])}")) from None
        if text is None:
            raise NoTextError(without_secrets(f"the reply has no text: {why}"), *tokens)
        return Answer(text, *tokens, cached=False)

    def _read(self, name: str) -> Answer | None:
        if self.cache is None:
            return None
        path = self.cache / name[:2] / f"{name}.json"
        # A damaged entry is asked for again.
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            entry = json.loads(path.read_text(encoding="utf-8"))
            return Answer(entry["text"] + "", int(entry["prompt_tokens"]), int(entry["completion_tokens"]), cached=True)
        return None

    def _write(self, name: str, answer: Answer) -> None:
        """Replace the cache entry atomically, so that processes that share the folder never read half of one."""
        if self.cache is None:
            return
        folder = self.cache / name[:2]
        folder.mkdir(parents=True, exist_ok=True)
        entry = {"model": self.spec.model, **answer._replace(cached=True)._asdict()}
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(entry, file)
        Path(file.name).replace(folder / f"{name}.json")


def _without_text(choice: Mapping[str, Any]) -> str:
    """Why the message of a completion has no text."""
    message, reason = choice["message"], choice.get("finish_reason")
    if message.get("refusal") is not None or reason == "content_filter":
        return f"the model refused, {shorten(message.get('refusal') or reason)}"
    if message.get("tool_calls"):
        return f"it calls a tool, {shorten(message['tool_calls'][0])}"
    if reason == "length":
        return "it reasoned until max_tokens ended it; give more in parameters"
    return f"it is {shorten(message)}"


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None for anything else."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(float(value), 0.0)
    with contextlib.suppress(ValueError, TypeError):
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return None
