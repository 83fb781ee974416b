"""A teacher behind HTTP: a server of the OpenAI kind that gives log-probs of the tokens of a prompt.

Such are `python -m jaxrl_llm serve` and vLLM: `/v1/completions` with `prompt_logprobs`.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.http_client import HttpClient, RequestError, http_address, json_headers
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import local_rows, rows_to_global
from jaxrl_llm.training.teachers.teacher import TeacherSpec

CONCURRENT_REQUESTS = 16
BYTES_PER_ENTRY = 4096  # of a reply, at most: a token's text and its log-prob
NOWHERE = -1e4  # the least log-prob, and that of entries that a server leaves out: exp of it is 0


class TeacherError(ConfigError):
    """A server that is not there, or does not answer with the log-probs of a prompt."""


@dataclasses.dataclass(frozen=True)
class Server:
    """The endpoint of a served teacher.

    url ends in /v1. timeout: seconds for each request, to the reply's last byte. api_key: environment variable with the
    key, if there is one. Raises ConfigError for a url that is none.
    """

    url: str
    model: str
    timeout: float = 120.0
    api_key: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        http_address("the url of a served teacher", self.url)


@dataclasses.dataclass(frozen=True)
class ServedTeacher:
    """A `Teacher` that a server computes, at temperature 1; each process asks for its own rows, of a row group one.

    `key` is the setting that names the server, for messages.
    """

    spec: TeacherSpec
    server: Server
    mesh: Mesh
    key: str

    def logps(self, inputs: Inputs, rows: int) -> jax.Array:
        """Log-probs `[N,T]` of the tokens; 0 on padding and on the first token of a row. Raises TeacherError."""
        del rows  # the server's own matter
        found = np.zeros(local_rows(inputs.tokens).shape, np.float32)
        for row, column, token, entries in self._entries(inputs, 0):
            found[row, column] = self._logprob(entries, token)
        return rows_to_global(RowGroup.of(self.mesh).shared_array(found), self.mesh)

    def with_distributions(self, batch: Batch, inputs: Inputs, rows: int) -> Batch:
        """The batch with the likeliest tokens of the teacher where each token is. Raises TeacherError."""
        del rows
        k = self.spec.top_k
        shape = (*local_rows(inputs.tokens).shape, k)
        ids, logps = np.tile(np.arange(k, dtype=np.int32), (*shape[:2], 1)), np.full(shape, NOWHERE, np.float32)
        for row, column, _, entries in self._entries(inputs, k):
            best = sorted(((self._logprob(entries, token), int(token)) for token in entries or ()), reverse=True)[:k]
            if len(best) < k:
                raise TeacherError(
                    f"{self.key}: {self.server.url} gave {len(best)} likeliest tokens of teacher.top_k = {k}"
                )
            logps[row, column], ids[row, column] = zip(*best, strict=True)
        shared = RowGroup.of(self.mesh).shared_array
        top_ids, top_logps = rows_to_global((shared(ids), shared(logps)), self.mesh)
        return batch.replace(teacher_ids=top_ids, teacher_top_logps=top_logps)

    def _entries(self, inputs: Inputs, k: int) -> Iterable[tuple[int, int, str, dict[str, Any]]]:
        """(row, column, token id, log-probs by token id) of every token of this process that has tokens before it.

        Of a row group its leader alone has them.
        """
        tokens, segments = local_rows((inputs.tokens, inputs.segments))
        # Each document of a row by itself; a row without tokens is another teacher's.
        asked = enumerate(segments if RowGroup.of(self.mesh).leads else ())
        places = [(row, np.flatnonzero(own == s)) for row, own in asked for s in np.unique(own[own > 0])]
        headers = json_headers(os.environ.get(self.server.api_key))
        with (
            all_or_none(),
            contextlib.closing(HttpClient(CONCURRENT_REQUESTS)) as client,
            ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool,
        ):
            texts = [tokens[row, where].tolist() for row, where in places]
            answers = list(pool.map(lambda ids: self._asked(client, headers, ids, k) if len(ids) > 1 else [], texts))
        for (row, where), ids, answer in zip(places, texts, answers, strict=True):
            for column, token, entries in zip(where[1:], ids[1:], answer[1:], strict=True):
                yield row, int(column), str(token), entries

    def _asked(self, client: HttpClient, headers: dict[str, str], ids: list[int], k: int) -> list[Any]:
        """The log-probs of one row, an entry a token."""
        server, endpoint = self.server, f"{self.server.url.rstrip('/')}/completions"
        body = {
            "model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k,
        }  # fmt: skip
        largest = 2**20 + BYTES_PER_ENTRY * (k + 1) * len(ids)
        try:
            reply = client.post(endpoint, json.dumps(body).encode(), headers, server.timeout, largest)
        except RequestError as error:
            raise TeacherError(
                f"{self.key}: {endpoint} did not answer within {server.timeout:g} seconds ({error}); start the "
                "server, or change url or timeout"
            ) from error
        if not reply.ok:
            text = reply.data[:300].decode("utf-8", "replace")
            raise TeacherError(f"{self.key}: {endpoint} answered {reply.status} {reply.reason}: {text}")
        try:
            found = json.loads(reply.data)["choices"][0]["prompt_logprobs"]
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise TeacherError(
                f"{self.key}: {endpoint} answered without prompt_logprobs ({type(error).__name__}: {error}); use "
                "python -m jaxrl_llm serve, or vLLM"
            ) from error
        if not isinstance(found, list) or len(found) != len(ids):
            raise TeacherError(f"{self.key}: {endpoint} gave log-probs of another prompt than of {len(ids)} tokens")
        return found

    def _logprob(self, entries: Any, token: str) -> float:
        """The log-prob of a token among those of its place."""
        try:
            if not math.isnan(logprob := float(entries[token]["logprob"])):
                return max(logprob, NOWHERE)
            cause = None
        except (LookupError, TypeError, ValueError) as error:
            cause = error
        raise TeacherError(
            f"{self.key}: {self.server.url} gave no log-prob of token {token}: {entries!r:.200}"
        ) from cause
