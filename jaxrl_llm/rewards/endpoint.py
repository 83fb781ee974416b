"""A client of an OpenAI-compatible chat endpoint: retries, rate and concurrency limits, a cache on disk, and spend.

It uses the standard library alone: requests wait in threads, as many as may be under way at once. Redirects are
refused, for they would carry the key elsewhere. The key is read from the environment when a request is sent, and is in
no message, cache entry or attribute.
"""

import asyncio
import contextlib
import email.utils
import hashlib
import http.client
import json
import os
import random
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards.signatures import RewardError, shorten

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
LONGEST_WAIT = 60.0  # seconds between two attempts, whatever Retry-After says


class EndpointError(RewardError):
    """A request that the endpoint did not answer, or did not answer as such endpoints do."""


class Limits(NamedTuple):
    """How an endpoint is asked: seconds for one attempt, attempts, requests under way, requests a minute (0: any).

    The pause after attempt i is `backoff` * 2^i seconds, times 0.5 to 1 by chance, or what Retry-After says; at most
    60.
    """

    timeout: float = 60.0
    attempts: int = 5
    concurrency: int = 16
    per_minute: float = 0.0
    backoff: float = 1.0


class Answer(NamedTuple):
    """A reply's text, its prompt and completion tokens, and whether the cache had it."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached: bool


class Endpoint:
    """`await endpoint.ask(messages)` -> Answer, of the model `model` at `url` (".../v1").

    `parameters` are sent with every request (temperature, max_tokens, ...). `cache` is a folder; entries are found by
    url, model, messages and parameters. `key` names the environment variable that holds the key; a request goes without
    when it is not set, unless `key` was changed from its default. `counts` holds requests, cached, retries, failures,
    prompt_tokens and completion_tokens since the last `take_counts`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        parameters: Mapping[str, Any],
        limits: Limits,
        cache: str | None = None,
        key: str = "OPENAI_API_KEY",
    ):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the judge's url is {url!r}; it starts with http:// or https:// and ends in /v1")
        base = url.rstrip("/")
        self.url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self.model, self.parameters, self.limits, self.key = model, dict(parameters), limits, key
        self.cache = None if cache is None else Path(cache).expanduser()
        self.counts: Counter[str] = Counter()
        self.threads = ThreadPoolExecutor(limits.concurrency, "judge")
        self.opener = urllib.request.build_opener(_NoRedirect)
        self.next_start = 0.0
        self.under_way: dict[tuple[int, str], asyncio.Task[Answer]] = {}
        if key != "OPENAI_API_KEY" and key not in os.environ:
            raise ConfigError(f"the judge's key is in the environment variable {key}, which is not set; export it")

    async def ask(
        self, messages: list[dict[str, str]], attempt: int = 0, memory: dict[str, asyncio.Task[Answer]] | None = None
    ) -> Answer:
        """The reply to `messages`; equal requests under way at the same time, or with the same memory, are sent once.

        `attempt` makes a request differ from those with another one in the cache: ask again with the next number.
        Raises EndpointError when the endpoint refuses, or fails every attempt.
        """
        body = {"model": self.model, "messages": messages, **self.parameters}
        name = _entry_name(self.url, body, attempt)
        if memory is not None and name in memory:
            return await asyncio.shield(memory[name])
        if (found := self._read(name)) is not None:
            self.counts["cached"] += 1
            return found
        one = (id(asyncio.get_running_loop()), name)
        if one not in self.under_way:
            task = asyncio.create_task(self._fetch(name, body))
            self.under_way[one] = task
            task.add_done_callback(lambda _: self.under_way.pop(one, None))
        task = self.under_way[one]
        if memory is not None:
            memory[name] = task
        return await asyncio.shield(task)

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call of this."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Ends the waiting threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def _fetch(self, name: str, body: dict[str, Any]) -> Answer:
        """The endpoint's reply, asked up to `limits.attempts` times, and kept in the cache."""
        limits, data, problem = self.limits, json.dumps(body).encode(), ""
        for attempt in range(limits.attempts):
            await asyncio.sleep(self._turn())
            self.counts["requests"] += 1
            try:
                reply = await asyncio.get_running_loop().run_in_executor(self.threads, self._post, data)
                answer = _read_reply(reply)
            except _Retry as again:
                problem = str(again)
                if attempt + 1 < limits.attempts:
                    self.counts["retries"] += 1
                    await asyncio.sleep(self._pause(attempt, again.after))
                continue
            except EndpointError:
                self.counts["failures"] += 1
                raise
            self.counts.update(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
            self._write(name, answer)
            return answer
        self.counts["failures"] += 1
        raise EndpointError(f"{self.url} failed {limits.attempts} attempts, the last time: {problem}")

    def _turn(self) -> float:
        """Seconds until the next request may start, under the limit of requests a minute; takes the place."""
        now = time.monotonic()
        start = max(now, self.next_start)
        if self.limits.per_minute:
            self.next_start = start + 60.0 / self.limits.per_minute
        return start - now

    def _pause(self, attempt: int, after: float | None) -> float:
        """Seconds before the next attempt: doubling, with jitter of up to half, and at least what the endpoint says."""
        grown = self.limits.backoff * 2**attempt * random.uniform(0.5, 1.0)
        return min(max(grown, after or 0.0), LONGEST_WAIT)

    def _post(self, data: bytes) -> bytes:
        """The body of the endpoint's reply. Raises _Retry or EndpointError."""
        key = os.environ.get(self.key, "")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url, data, headers, method="POST")
        try:
            with self.opener.open(request, timeout=self.limits.timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                said = _without(key, shorten(error.read(1000).decode("utf-8", "replace")))
            if error.code in RETRIED:
                raise _Retry(f"HTTP {error.code}: {said}", _retry_after(error.headers.get("Retry-After"))) from None
            raise EndpointError(f"{self.url} answered HTTP {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Retry(_without(key, f"{type(error).__name__}: {error}"), None) from None

    def _read(self, name: str) -> Answer | None:
        if self.cache is None:
            return None
        path = self.cache / name[:2] / f"{name}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):  # a damaged entry is asked for again
            entry = json.loads(path.read_text(encoding="utf-8"))
            return Answer(entry["text"], entry["prompt_tokens"], entry["completion_tokens"], cached=True)
        return None

    def _write(self, name: str, answer: Answer) -> None:
        """Writes a cache entry in one piece, so that processes that share the folder see all of it or nothing."""
        if self.cache is None:
            return
        folder = self.cache / name[:2]
        folder.mkdir(parents=True, exist_ok=True)
        entry = {"model": self.model, **answer._replace(cached=True)._asdict()}
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(entry, file)
        Path(file.name).replace(folder / f"{name}.json")


class _Retry(Exception):  # noqa: N818 (a signal to ask again, seen by no user)
    """The attempt failed in a way that may pass; `after` is what the endpoint asks to wait."""

    def __init__(self, problem: str, after: float | None):
        super().__init__(problem)
        self.after = after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def _entry_name(url: str, body: dict[str, Any], attempt: int) -> str:
    text = json.dumps([url, body, attempt], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_reply(reply: bytes) -> Answer:
    """The text and usage of a chat completion. Raises _Retry for what is none: servers under load send such."""
    try:
        tree = json.loads(reply)
        text = tree["choices"][0]["message"]["content"]
        usage = tree.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError
        return Answer(text, int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)), cached=False)
    except (ValueError, KeyError, IndexError, TypeError):
        raise _Retry(f"the reply is no chat completion: {shorten(reply)}", None) from None


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(float(value), 0.0)
    with contextlib.suppress(ValueError, TypeError):
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return None


def _without(key: str, text: str) -> str:
    return text.replace(key, "[key]") if key else text
