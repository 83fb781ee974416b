"""Samples of the model and of saved weights, which are adapters of the server's queue as long as they are used.

All weights of a model are such an adapter too, of which there is room for few: who needs another waits until one of
them is in no more use.
"""

import asyncio
import math
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.models.adapters.lora import LoraConfig, combine
from jaxrl_llm.models.model import Model
from jaxrl_llm.serving.answers import Answer
from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.grid import MOST_PROMPT_TOP, MOST_TOP
from jaxrl_llm.serving.queue import RequestQueue
from jaxrl_llm.tools.tinker.checkpoints import SCHEME, Store
from jaxrl_llm.tools.tinker.messages import Completion, Likeliest, SampleAnswer, prompt_tokens, whole
from jaxrl_llm.tools.tinker.results import Results
from jaxrl_llm.tools.tinker.sessions import Sessions

MOST_SAMPLES = 2**14  # of a prompt, in one request
MOST_COMPLETIONS = 128  # of it that are asked of the queue at a time
MOST_SAMPLERS = 32  # adapters that are kept to sample from; others are read again from their folder

Adapter = tuple[LoraConfig | None, Any]  # as the queue takes them: without a LoraConfig all weights of the model


class Loaded(NamedTuple):
    """Weights that the queue has: when they were written, and whether they are all of the model."""

    written: str
    full: bool


class Samplers:
    """The weights that clients sample from, by the names that they got for them."""

    def __init__(
        self, model: Model, queue: RequestQueue, store: Store, names: tuple[str, ...], results: Results,
        sessions: Sessions, tokenizer: str, most_full: int, trained: Collection[str],
    ):  # fmt: skip
        """`names` are those of the model, the first one in answers; clients load its tokenizer by `tokenizer`.

        Up to `most_full` samplers of all weights are kept. `trained` are the runs that are at the moment.
        """
        self.model, self.queue, self.store, self.names = model, queue, store, names
        self.results, self.sessions, self.tokenizer = results, sessions, tokenizer
        self.most_full, self.trained = most_full, trained
        self.paths: dict[str, str] = {}  # of each sampling session; empty: the model itself
        self.loaded: OrderedDict[str, Loaded] = OrderedDict()  # by their paths, the newest use last
        self.using: Counter[str] = Counter()  # samples of each path that are not done
        self.changing = {full: asyncio.Lock() for full in (False, True)}  # what is loaded of the kind
        self.admission = asyncio.Lock()

    def check_base(self, name: Any) -> None:
        """Raises BadRequestError for another model than the one that is served."""
        if name not in (*self.names, self.tokenizer):
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
        """The facts of a sampler's weights. Their base is called by a name that clients load the tokenizer by."""
        sampler = request.path_params["sampler"]
        path = self._path(sampler)
        named = path if path.startswith(SCHEME) else None
        return JSONResponse({"sampler_id": sampler, "base_model": self.tokenizer, "model_path": named})

    async def end(self, session: str) -> None:
        """Lets the samplers of a session go, and the snapshots of its runs; what has a name stays."""
        for name in [name for name in self.paths if name.startswith(f"{session}:")]:
            del self.paths[name]
        await self._forget([path for path in self.loaded if path.startswith(f"{session}:")])

    async def _forget(self, paths: Sequence[str]) -> None:
        """Lets weights go but those in use. Meanwhile no sample finds them."""
        loaded = {path: self.loaded.pop(path) for path in paths}

        async def forgotten() -> None:
            gone = await self.queue.called(lambda: [path for path in paths if self.queue.forget_adapter(path)])
            for path in reversed([path for path in paths if path not in gone]):
                self.loaded[path] = loaded[path]
                self.loaded.move_to_end(path, last=False)

        await completed(forgotten())

    def _path(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self.paths:
            raise BadRequestError(f"there is no sampling session {name!r:.200}; create one anew", 404)
        return self.paths[name]

    async def _ensure(self, server: Server, path: Any) -> None:
        """Load the weights of a path to sample from, where they are not loaded, or are others in their folder now."""
        if not isinstance(path, str):
            raise BadRequestError(f"model_path is {path!r:.100}; it takes the path of saved weights")
        if not path.startswith(SCHEME):
            if path not in self.loaded:
                raise BadRequestError(
                    f"the snapshot was let go, as {MOST_SAMPLERS} others were used since, or {self.most_full} of all "
                    "weights: save weights by a name",
                    404,
                )
            self.loaded.move_to_end(path)
            return
        info = await asyncio.to_thread(self.store.info, path)
        full = not info["lora_rank"]
        if self.loaded.get(path) != Loaded(info["time"], full):
            async with self.changing[full]:
                written = (await asyncio.to_thread(self.store.info, path))["time"]
                if self.loaded.get(path) != Loaded(written, full):

                    async def read() -> Adapter:
                        config, weights, _ = await asyncio.to_thread(self.store.load, path, self.model)
                        return config, combine(self.model.params, weights) if full else weights  # with what is frozen

                    await self._serve(server, path, full, read, written)
        self.loaded.move_to_end(path)

    async def serve(
        self, server: Server, path: str, full: bool, make: Callable[[], Awaitable[Adapter]], written: str = ""
    ) -> None:
        """Makes weights a model of the server, `full` where they are all of one. `make` gives them when there is room.

        Those of their kind go that were not used for longest. Where all are used adapters become more than may be, and
        all weights wait.
        """
        async with self.changing[full]:
            await self._serve(server, path, full, make, written)

    async def _serve(
        self, server: Server, path: str, full: bool, make: Callable[[], Awaitable[Adapter]], written: str
    ) -> None:
        most = self.most_full if full else MOST_SAMPLERS
        while True:
            alike = [name for name, kept in self.loaded.items() if kept.full == full and name != path]
            # The newest of another run that is trained goes last: its client is about to sample.
            newest = {run_of(name): name for name in alike if run_of(name) in self.trained} | {run_of(path): path}
            unused = sorted((name for name in alike if not self.using[name]), key=lambda name: name in newest.values())
            await self._forget(unused[: max(len(alike) + 1 - most, 0)])
            self._show(server)
            if not full or sum(name in self.loaded for name in alike) < most:
                break
            await asyncio.sleep(0.05)
        adapter = await make()

        async def loaded() -> None:
            await self.queue.called(partial(self.queue.set_adapter, path, adapter))
            self.loaded[path] = Loaded(written, full)
            self.loaded.move_to_end(path)
            self._show(server)

        await completed(loaded())

    def _show(self, server: Server) -> None:
        """Show the saved weights that are loaded as models of the server."""
        saved = (name for name in self.loaded if name.startswith(SCHEME))
        server.names = (*(name for name in server.names if not name.startswith(SCHEME)), *saved)

    async def sample(self, server: Server, request: Request) -> Response:
        """Starts to sample completions of a prompt, and answers with the id under which the result is fetched."""
        body = await server.body(request)
        sampler, number, count = body.get("sampling_session_id"), body.get("seq_id"), whole(body, "num_samples", 1)
        path = self._path(sampler) if sampler is not None else body.get("model_path") or ""
        if sampler is None and not path:
            self.check_base(body.get("base_model"))
        request_id = f"{sampler or uuid.uuid4().hex}:{uuid.uuid4().hex if number is None else number}"
        self.results.start(request_id, partial(self._sampled, server, path, body))
        ids = [f"{request_id}:{index}" for index in range(min(count, MOST_SAMPLES))]  # more are refused in the result
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    async def _sampled(self, server: Server, path: Any, body: Mapping[str, Any]) -> SampleAnswer:
        wanted, count = checked(body, server.limits.tokens), whole(body, "num_samples", 1)
        if path:
            await self._ensure(server, path)
        self.using[path] += 1  # so long it is not let go
        try:
            names = (server.names[0], path) if path else server.names[:1]
            most = min(MOST_COMPLETIONS, server.limits.rows)
            answers = [
                await self._answered(server, names, wanted, min(count - start, most), start)
                for start in range(0, count, most)
            ]
        finally:
            self.using[path] -= 1
            if not self.using[path]:
                del self.using[path]
        top, of_prompt = wanted["logprobs"], wanted["prompt_logprobs"]
        rows = [
            Completion(
                choice.ids, choice.logps, choice.finish_reason == "stop",
                Likeliest([ids[:top] for ids, _ in choice.top], [logps[:top] for _, logps in choice.top], top)
                if top else None,
            )
            for choices, _ in answers for choice in choices
        ]  # fmt: skip
        scores = answers[0][1]
        if scores is None or of_prompt is None:
            return SampleAnswer(rows)
        prompt = wanted["prompt"]
        first = max(1, len(prompt) - whole(body, "prompt_logprobs_last_n", len(prompt) - 1))
        logps = [math.nan if place < first else x for place, x in enumerate(scores.logps.tolist())]
        if not body.get("topk_prompt_logprobs"):
            return SampleAnswer(rows, logps)
        ids, numbers = scores.top_ids[:, :of_prompt].tolist(), scores.top_logps[:, :of_prompt].tolist()
        empty: list[Any] = [[] for _ in range(first)]
        likeliest = Likeliest(empty + ids[first:], empty + numbers[first:], of_prompt)
        return SampleAnswer(rows, logps if body.get("prompt_logprobs") else None, likeliest)

    async def _answered(
        self, server: Server, names: Sequence[str], wanted: Mapping[str, Any], count: int, start: int
    ) -> tuple[list[Choice], Any]:
        """Completions from the number `start` on, and the scores of the prompt's tokens."""
        limits, seed = server.limits, wanted["seed"]
        body = {**wanted, "model": names[-1], "n": count, "seed": None if seed is None else seed + start}
        asked = await asyncio.to_thread(
            parse, body, False, server.tokenizer, names, server.eos, limits.tokens, server.vocabulary, limits.rows
        )
        async with self.admission:  # in order, as the SDK sends all that it has at once
            while server.queue.counts.waiting + count > limits.rows:
                await asyncio.sleep(0.05)
            answer = Answer(server, asked, patient=True)
        try:
            await answer.finished()
            return answer.choices, None if answer.choices[0].handle is None else answer.choices[0].handle.scores
        finally:
            answer.close()


async def completed(work: Coroutine[Any, Any, None]) -> None:
    """Waits for a coroutine that goes on to its end when who waits is cancelled, and is cancelled then.

    The queue's thread does what it was asked for all the same: what it has, and what is known of it, would differ.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def run_of(path: str) -> str:
    """The id of the run whose weights are at a path `tinker://RUN/...`."""
    return path.removeprefix(SCHEME).partition("/")[0]


def checked(body: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The fields of a text completion that a client asks for. Raises BadRequestError in the client's words."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if body.get(name):
            raise BadRequestError(f"{name} is given, but this server has none", code="unsupported", param=name)
    given, prompt = body.get("sampling_params") or {}, prompt_tokens(body.get("prompt"))
    if not isinstance(given, Mapping):
        raise BadRequestError(f"sampling_params is {given!r:.100}; it takes an object")
    top, of_prompt = whole(body, "topk_sample_logprobs", 0), whole(body, "topk_prompt_logprobs", 0)
    for name, value, least, most in (
        ("num_samples", whole(body, "num_samples", 1), 1, MOST_SAMPLES),
        ("topk_sample_logprobs", top, 0, MOST_TOP),
        ("topk_prompt_logprobs", of_prompt, 0, MOST_PROMPT_TOP),
        ("prompt_logprobs_last_n", whole(body, "prompt_logprobs_last_n", 0), 0, 2**31 - 1),
    ):
        if not least <= value <= most:
            raise BadRequestError(f"{name} is {value}; this server takes {least} to {most}")
    stop, tokens, seed = (given.get(name) for name in ("stop", "max_tokens", "seed"))
    by_ids = isinstance(stop, list) and all(isinstance(x, int) for x in stop)
    return {
        "prompt": prompt, "logprobs": top, "stop_token_ids" if by_ids else "stop": stop,
        "prompt_logprobs": of_prompt or (0 if body.get("prompt_logprobs") else None),
        "max_tokens": max(longest - len(prompt), 1) if tokens is None else tokens,
        "seed": None if seed is None else whole(given, "seed", 0),
        **{name: given.get(name) for name in ("temperature", "top_p", "top_k")},
    }  # fmt: skip
