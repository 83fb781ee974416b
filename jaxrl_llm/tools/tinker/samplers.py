"""Samples of the model and of saved weights, which are adapters of the server's queue as long as they are used."""

import asyncio
import math
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.models.model import Model
from jaxrl_llm.serving.app import Answer, Server
from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.queue import RequestQueue
from jaxrl_llm.tools.tinker.checkpoints import SCHEME, Store, place_of
from jaxrl_llm.tools.tinker.messages import Completion, Likeliest, SampleAnswer, prompt_tokens
from jaxrl_llm.tools.tinker.results import Results
from jaxrl_llm.tools.tinker.sessions import Sessions

MOST_SAMPLERS = 32  # adapters that are kept to sample from; others are read again from their folder


class Samplers:
    """What clients sample from, by the names that they got for it."""

    def __init__(
        self, model: Model, queue: RequestQueue, store: Store, names: tuple[str, ...], results: Results,
        sessions: Sessions,
    ):  # fmt: skip
        """`names` are those of the model, the first one in answers."""
        self.model, self.queue, self.store, self.names = model, queue, store, names
        self.results, self.sessions = results, sessions
        self.paths: dict[str, str] = {}  # of each sampling session; empty: the model itself
        self.loaded: OrderedDict[str, None] = OrderedDict()  # paths whose adapters the queue has, the newest use last
        self.loading = asyncio.Lock()

    def check_base(self, name: Any) -> None:
        """Raises BadRequestError for another model than the one that is served."""
        if name not in self.names:
            raise BadRequestError(f"there is no model {name!r:.200}; this server has {self.names[0]}", 404)

    async def create(self, server: Server, request: Request) -> Response:
        """A name for a model, or for saved weights, that samples are asked of."""
        body = await server.body(request)
        self.sessions.of(body)
        path = body.get("model_path")
        if path is None:
            self.check_base(body.get("base_model"))
        else:
            await self._ensure(server, path)
        sampler = f"{body['session_id']}:sample:{body.get('sampling_session_seq_id')}"
        self.paths[sampler] = path or ""
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def get(self, server: Server, request: Request) -> Response:
        """What a sampler samples from."""
        sampler = request.path_params["sampler"]
        path = self._path(sampler)
        return JSONResponse({"sampler_id": sampler, "base_model": self.names[0], "model_path": path or None})

    def _path(self, name: Any) -> str:
        if name not in self.paths:
            raise BadRequestError(
                f"there is no sampling session {name!r:.200}: this server started anew. Create one", 404
            )
        return self.paths[name]

    async def _ensure(self, server: Server, path: str) -> None:
        """Has the adapters of a path to sample from, read from their folder where they were let go."""
        place_of(path)
        if path in self.queue.adapters:
            self.loaded.move_to_end(path)
            return
        async with self.loading:
            if path not in self.queue.adapters:
                config, adapters, _ = await asyncio.to_thread(self.store.load, path, self.model)
                await self.serve(server, path, (config, adapters))

    async def serve(self, server: Server, path: str, adapters: Any) -> None:
        """Makes adapters a model of the server, and lets those go that were not used for longest."""

        self.loaded[path] = None
        self.loaded.move_to_end(path)
        oldest = list(self.loaded)[:-MOST_SAMPLERS]

        def add() -> list[str]:
            self.queue.adapters[path] = adapters
            return [name for name in oldest if self.queue.forget_adapter(name)]

        for name in await self.queue.called(add):
            del self.loaded[name]
        server.names = (*(name for name in server.names if not name.startswith(SCHEME)), *self.loaded)

    async def sample(self, server: Server, request: Request) -> Response:
        """Completions of a prompt."""
        body = await server.body(request)
        sampler, number = body.get("sampling_session_id"), body.get("seq_id")
        if sampler is not None:
            path = self._path(sampler)
        else:
            path = body.get("model_path") or ""
            if not path:
                self.check_base(body.get("base_model"))
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if body.get(name):
                raise BadRequestError(f"{name} is given, but this server has none", code="unsupported", param=name)
        request_id = f"{sampler or uuid.uuid4().hex}:{uuid.uuid4().hex if number is None else number}"
        if request_id not in self.results:
            self.results.add(request_id, asyncio.ensure_future(self._sampled(server, path, body)))
        count = body.get("num_samples") or 1
        ids = [f"{request_id}:{index}" for index in range(count)] if isinstance(count, int) and count < 10**4 else None
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    async def _sampled(self, server: Server, path: str, body: Mapping[str, Any]) -> SampleAnswer:
        if path:
            await self._ensure(server, path)
        given = body.get("sampling_params") or {}
        prompt, top = prompt_tokens(body.get("prompt")), body.get("topk_sample_logprobs") or 0
        of_prompt = body.get("topk_prompt_logprobs") or (0 if body.get("prompt_logprobs") else None)
        stop = given.get("stop")
        ids = isinstance(stop, list) and all(isinstance(x, int) for x in stop)
        wanted = {
            "model": path or server.names[0], "prompt": prompt, "n": body.get("num_samples") or 1, "logprobs": top,
            "max_tokens": given.get("max_tokens") or max(server.limits.tokens - len(prompt), 1),
            "prompt_logprobs": of_prompt, "stop_token_ids" if ids else "stop": stop,
            **{name: given.get(name) for name in ("temperature", "top_p", "top_k", "seed")},
        }  # fmt: skip
        names = (server.names[0], path) if path else server.names[:1]  # let go meanwhile, it is there all the same
        limits = server.limits
        asked = await asyncio.to_thread(
            parse, wanted, False, server.tokenizer, names, server.eos, limits.tokens, server.vocabulary, limits.rows
        )
        while server.queue.counts.waiting + asked.n > limits.rows:  # the SDK sends all that it has at once
            await asyncio.sleep(0.05)
        answer = Answer(server, asked)
        try:
            async for _ in answer.pieces():
                pass
            scores = None if answer.choices[0].handle is None else answer.choices[0].handle.scores
        finally:
            answer.close()
        rows = [
            Completion(
                choice.ids, choice.logps, choice.finish_reason == "stop",
                Likeliest([ids[:top] for ids, _ in choice.top], [logps[:top] for _, logps in choice.top], top)
                if top else None,
            )
            for choice in answer.choices
        ]  # fmt: skip
        if scores is None or of_prompt is None:
            return SampleAnswer(rows)
        last = body.get("prompt_logprobs_last_n") or len(prompt) - 1
        first = max(1, len(prompt) - last)
        logps = [math.nan if place < first else x for place, x in enumerate(scores.logps.tolist())]
        if not body.get("topk_prompt_logprobs"):
            return SampleAnswer(rows, logps)
        ids, numbers = scores.top_ids[:, :of_prompt].tolist(), scores.top_logps[:, :of_prompt].tolist()
        empty: list[Any] = [[] for _ in range(first)]
        likeliest = Likeliest(empty + ids[first:], empty + numbers[first:], of_prompt)
        return SampleAnswer(rows, logps if body.get("prompt_logprobs") else None, likeliest)
