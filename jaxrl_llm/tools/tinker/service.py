"""The HTTP interface of training runs: the endpoints that Tinker's SDK calls, beside those of `serving/endpoints.py`.

A call is answered at once with the id of a request, whose result the client fetches when it is there. Requests of a run
are done in the order that the client numbered them, whatever order they come in; those of several runs take turns, a
micro-batch at a time, with rows that decode. What a client saved to sample from is a model of the server, by its path.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.model import Model
from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.queue import RequestQueue
from jaxrl_llm.tools.tinker.checkpoints import Place, Store, expiry
from jaxrl_llm.tools.tinker.live_runs import LiveRun, LiveRuns
from jaxrl_llm.tools.tinker.messages import (
    PROTOBUF,
    GradientAnswer,
    gradient_message,
    gradient_request,
    gradient_request_of_json,
    whole,
)
from jaxrl_llm.tools.tinker.rest import DESCRIBED, Rest, rank_about
from jaxrl_llm.tools.tinker.results import Results
from jaxrl_llm.tools.tinker.samplers import Adapter, Samplers
from jaxrl_llm.tools.tinker.sessions import Sessions
from jaxrl_llm.tools.tinker.training_run import ADAM, TrainingRun, lora_config

MOST_RANK = 2**14
MOST_BYTES = 2**27  # of a request for gradients; the SDK sends up to 5 MB at a time
ABANDONED = 86400.0  # seconds of silence after which a session ends as if its client had finished it

Route = tuple[str, str, Callable[..., Awaitable[Response]]]  # a path, a method, and what answers


class TrainingService:
    """Training runs on one model, whose adapters and other weights the server samples from."""

    def __init__(
        self,
        model: Model,
        queue: RequestQueue,
        folder: Path,
        names: tuple[str, ...],
        microbatch_tokens: int,
        full_runs: int = 1,
        full_samplers: int = 2,
        check: Callable[[], None] | None = None,
    ):
        """`model` is what runs adapt; clients may call it by each of `names`, and answers by the first.

        Up to `full_runs` train all weights, each a copy of its own, and up to `full_samplers` sample from such.
        `check` is that of a `Store`. Raises ConfigError for a quantised model, and one whose prompts see themselves.
        """
        if model.net.config.quantized != "none":
            raise ConfigError(f"{model.path} stores its matrices as {model.net.config.quantized}: its adapters cannot "
                              "be sampled from, as they are not merged into such")  # fmt: skip
        if model.net.config.sees_prompts:
            raise ConfigError(f"the tokens of a prompt see each other in {model.path}, but rows of clients do not say "
                              "where their prompts end: use another model")  # fmt: skip
        self.model, self.queue, self.names, self.microbatch_tokens = model, queue, names, microbatch_tokens
        self.store, self.sessions, self.results = Store(folder, check), Sessions(), Results()
        self.runs = LiveRuns(names[0], self.sessions, self.results, full_runs)
        self.rest = Rest(self.store, self.runs.found)
        self.tokenizer = names[0]  # an id of the hub, or a folder that clients on this machine can read
        if Path(names[0]).is_dir() or ":" in names[0]:
            model.tokenizer.save_pretrained(folder / "tokenizer")
            self.tokenizer = str(folder / "tokenizer")
            if self.tokenizer.count("/") == 2:  # the SDK takes it for a variant of a model of the hub
                self.tokenizer = f"/{self.tokenizer}"
        self.samplers = Samplers(
            model,
            queue,
            self.store,
            names,
            self.results,
            self.sessions,
            self.tokenizer,
            full_samplers,
            self.runs.found,
        )

    @property
    def routes(self) -> list[Route]:
        """Paths, methods and their handlers."""
        posts = {
            "client/config": self.client_config, "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session, "session_heartbeat": self.sessions.heartbeat,
            "sessions/{session}/finish": self.finish_session, "telemetry": self.telemetry,
            "create_model": self.create_model, "get_info": self.get_info, "unload_model": self.unload_model,
            "forward_backward": self.forward_backward, "forward": self.forward, "optim_step": self.optim_step,
            "save_weights": self.save_weights, "load_weights": self.load_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "save_weights_external": self.save_weights_external, "weights_info": self.rest.weights_info,
            "create_sampling_session": self.samplers.create, "asample": self.samplers.sample,
            "retrieve_future": self.results.retrieve, "cancel_future": self.results.cancel,
        }  # fmt: skip
        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        gets = {
            "healthz": self.healthz, "get_server_capabilities": self.capabilities, "sessions": self.sessions.list,
            "sessions/{session}": self.get_session, "samplers/{sampler:path}": self.samplers.get,
            "training_runs": self.rest.list_runs, "training_runs/{run}": self.rest.get_run,
            "training_runs/{run}/checkpoints": self.rest.list_checkpoints, "checkpoints": self.rest.list_checkpoints,
            f"{checkpoint}/external_weights_urls": self.rest.list_urls,
            f"{checkpoint}/{{file:path}}": self.rest.get_file,
        }  # fmt: skip
        puts = {f"{checkpoint}/ttl": self.rest.set_ttl}
        methods = {"POST": posts, "GET": gets, "PUT": puts, "DELETE": {checkpoint: self.rest.delete_checkpoint}}
        others: list[Route] = [("/api/v1/{path:path}", method, unsupported) for method in (*methods, "PATCH")]
        own: list[Route] = [
            (f"/api/v1/{path}", method, handler) for method, paths in methods.items() for path, handler in paths.items()
        ]
        return own + others

    async def client_config(self, server: Server, request: Request) -> Response:
        """The settings with which the SDK talks to this server: over plain HTTP, uncompressed."""
        return JSONResponse({"use_pyqwest_transport": False, "proto_compress_fwdbwd": False})

    async def dynamic_config(self, server: Server, request: Request) -> Response:
        """A client that leaves a sample cancels it."""
        return JSONResponse({"sample_cancel_enabled": True})

    async def healthz(self, server: Server, request: Request) -> Response:
        """The answer ok, as long as requests are answered."""
        return JSONResponse({"status": "ok"})

    async def telemetry(self, server: Server, request: Request) -> Response:
        """Takes what the SDK tells of itself, and keeps none of it."""
        await server.read(request, MOST_BYTES)
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, server: Server, request: Request) -> Response:
        """The models that may be trained and sampled from: the one of the server."""
        about = {"model_name": self.names[0], "max_context_length": server.limits.tokens, "trainable": True,
                 "sampleable": True}  # fmt: skip
        return JSONResponse({"supported_models": [about]})

    async def create_session(self, server: Server, request: Request) -> Response:
        """A new session. Those that nobody goes on with end, or a server would keep all that it ever had."""
        for session in self.sessions.abandoned(ABANDONED):
            await self._finish(session)
        return await self.sessions.create(server, request)

    async def finish_session(self, server: Server, request: Request) -> Response:
        """Lets the session's runs go; what they saved stays."""
        await self._finish(request.path_params["session"])
        return JSONResponse({"status": "ok"})

    async def _finish(self, session: str) -> None:
        for live in [live for live in self.runs.found.values() if live.session == session]:
            self.runs.remove(live)
        await self.samplers.end(session)
        self.sessions.found.pop(session, None)

    async def get_session(self, server: Server, request: Request) -> Response:
        """The runs and samplers of a session."""
        session = request.path_params["session"]
        found = self.sessions.of({"session_id": session})
        samplers = [name for name in self.samplers.paths if name.startswith(f"{session}:")]
        runs = [live.model_id for live in self.runs.found.values() if live.session == session]
        return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers, "display_name": found["display_name"],
                             "user_metadata": found["user_metadata"]})  # fmt: skip

    async def create_model(self, server: Server, request: Request) -> Response:
        """A new run: of adapters, or with rank 0 or no `lora_config` of all weights."""
        body = await server.body(request)
        model_id = self._new_id(body)
        self.samplers.check_base(body.get("base_model"))
        check_adam(body.get("optimizer_config"))
        asked = body.get("lora_config") or {}
        if not isinstance(asked, Mapping):
            raise BadRequestError(f"lora_config is {asked!r:.100}; it takes an object")
        rank, seed = whole(asked, "rank", 0), whole(asked, "seed", uuid.uuid4().int % 2**31)
        if not 0 <= rank <= MOST_RANK:
            raise BadRequestError(f"lora_config.rank is {rank}; it takes 1 to {MOST_RANK}, or 0 for all weights")
        trained = {name: bool(asked.get(name, True)) for name in ("train_unembed", "train_mlp", "train_attn")}
        config = lora_config(rank, trained["train_attn"], trained["train_mlp"]) if rank else None
        if config is None and (left := [name for name, value in trained.items() if not value]):
            raise BadRequestError(f"lora_config.rank is 0, for all weights, and {left[0]} is false: give a rank")
        info = {"base_model": self.names[0], "lora_rank": rank, **trained, "user_metadata": body.get("user_metadata")}

        async def created() -> dict[str, Any]:
            async def run() -> TrainingRun:
                return await self.queue.called(lambda: TrainingRun(self.model, config, seed % 2**31))

            await self.runs.add(model_id, str(body["session_id"]), config is None, run, info)
            return {"type": "create_model", "model_id": model_id}

        self.results.start(f"{model_id}:create", created)
        return JSONResponse({"request_id": f"{model_id}:create", "model_id": model_id})

    def _new_id(self, body: Mapping[str, Any]) -> str:
        """The id of the run that a session asks for. Raises BadRequestError."""
        self.sessions.of(body)
        number = whole(body, "model_seq_id", 0)
        if not 0 <= number < 2**31:  # the id is the name of a folder
            raise BadRequestError(f"model_seq_id is {number!r:.100}; it takes 0 to {2**31 - 1}")
        return f"{body['session_id']}:train:{number}"

    async def unload_model(self, server: Server, request: Request) -> Response:
        """Lets a run go, behind its requests; what it saved stays."""
        body = await server.body(request)
        live = self.runs.of(body)

        async def unloaded() -> dict[str, Any]:
            self.runs.found.pop(live.model_id, None)
            return {"type": "unload_model", "model_id": live.model_id}

        return self.runs.submit(live, body, unloaded)

    async def get_info(self, server: Server, request: Request) -> Response:
        """The model that a run adapts, called by a name that clients load the tokenizer by, and its adapter's rank."""
        live = self.runs.of(await server.body(request))
        arch = (self.model.hf_config or {}).get("model_type")
        about = {"arch": arch, "model_name": self.tokenizer, "tokenizer_id": self.tokenizer}
        return JSONResponse({"type": "get_info", "model_data": about, "model_id": live.model_id,
                             "model_name": self.tokenizer, **rank_about(live.info)})  # fmt: skip

    async def forward_backward(self, server: Server, request: Request) -> Response:
        """Adds the gradient of a loss to those of a run."""
        return await self._gradients(server, request, forward_only=False)

    async def forward(self, server: Server, request: Request) -> Response:
        """The loss alone, as earlier clients ask for it."""
        return await self._gradients(server, request, forward_only=True)

    async def _gradients(self, server: Server, request: Request, forward_only: bool) -> Response:
        if request.headers.get("content-type", "").startswith(PROTOBUF):
            message = await asyncio.to_thread(gradient_message, await server.read(request, MOST_BYTES))
            body, read = {"model_id": message.model_id, "seq_id": message.seq_id}, partial(gradient_request, message)
        else:
            body = await server.body(request, MOST_BYTES)
            read = partial(gradient_request_of_json, body, forward_only)
        live = self.runs.of(body)

        async def computed() -> GradientAnswer:
            asked = await asyncio.to_thread(read)
            if (longest := max((len(datum.tokens) for datum in asked.data), default=0)) > server.limits.tokens:
                raise BadRequestError(f"a datum has {longest} tokens; this server's rows have {server.limits.tokens}")
            work = await asyncio.to_thread(live.run.forward_backward, asked, self.microbatch_tokens)
            for micro in work.microbatches:
                await self.queue.called(partial(work.compute, micro))
            return await self.queue.called(work.finish)

        return self.runs.submit(live, body, computed)

    async def optim_step(self, server: Server, request: Request) -> Response:
        """A step of AdamW along the gradients of a run."""
        body = await server.body(request)
        live = self.runs.of(body)

        async def stepped() -> dict[str, Any]:
            check_adam(body.get("optimizer_params"))
            settings = adam_settings(body.get("adam_params") or {})
            return {"metrics": await self.queue.called(partial(live.run.step, settings))}

        return self.runs.submit(live, body, stepped)

    async def save_weights(self, server: Server, request: Request) -> Response:
        """Saves what a run trains, and its moments."""
        body = await server.body(request)
        live = self.runs.of(body)

        async def saved() -> dict[str, Any]:
            place = Place(live.model_id, "weights", str(body.get("path") or f"{live.next - 1:06d}"))
            overwrite = bool(body.get("overwrite"))
            await asyncio.to_thread(self.store.save, place, live.run, self._about(live, body), overwrite)
            return {"type": "save_weights", "path": place.path}

        return self.runs.submit(live, body, saved)

    async def save_weights_external(self, server: Server, request: Request) -> Response:
        """Saves what a run trains for other libraries, to be downloaded."""
        body = await server.body(request)
        live = self.runs.of(body)

        async def saved() -> dict[str, Any]:
            if body.get("age_encryption_recipients"):
                raise BadRequestError("age_encryption_recipients is given; this server writes weights as they are")
            if body.get("path") is None:
                raise BadRequestError("path is missing: a name for the weights")
            place = Place(live.model_id, "external_weights", str(body.get("path")))
            await asyncio.to_thread(self.store.save, place, live.run, self._about(live, body))
            return {"type": "save_weights_external", "path": place.path}

        return self.runs.submit(live, body, saved)

    async def save_weights_for_sampler(self, server: Server, request: Request) -> Response:
        """Makes what a run trains a model to sample from: saved by a name, or kept while it is used."""
        body = await server.body(request)
        live = self.runs.of(body)

        async def saved() -> dict[str, Any]:
            if body.get("kind") not in (None, "snapshot"):
                raise BadRequestError(f"kind is {body['kind']!r:.100}; this server has snapshots")
            name, number = body.get("path"), body.get("sampling_session_seq_id")
            if name is None and number is None:
                raise BadRequestError("path is missing: a name for the weights")
            path, written = None, ""
            if name is not None:
                place = Place(live.model_id, "sampler_weights", str(name))
                written = await asyncio.to_thread(self.store.save, place, live.run, self._about(live, body))
                path = place.path
            served, config = path or f"{live.model_id}/{number}", live.run.config

            async def snapshot() -> Adapter:
                return config, await self.queue.called(live.run.snapshot)

            await self.samplers.serve(server, served, config is None, snapshot, written)
            sampler = None if number is None else f"{live.session}:sample:{number}"
            if sampler is not None:
                self.samplers.paths[sampler] = served
            return {"type": "save_weights_for_sampler", "path": path, "sampling_session_id": sampler}

        return self.runs.submit(live, body, saved)

    def _about(self, live: LiveRun, body: Mapping[str, Any]) -> dict[str, Any]:
        metadata = body.get("user_metadata")
        return {**live.info, "run_metadata": live.info.get("user_metadata"), "user_metadata": metadata,
                "expires_at": expiry(body.get("ttl_seconds"))}  # fmt: skip

    async def load_weights(self, server: Server, request: Request) -> Response:
        """Weights that were saved, in a run or as a new one."""
        body = await server.body(request)
        path = body.get("path")

        async def loaded() -> tuple[Any, ...]:
            check_adam(body.get("optimizer_config"))
            if body.get("weights_access_token"):
                raise BadRequestError("weights_access_token is given; this server has one account")
            return await asyncio.to_thread(self.store.load, path, self.model, bool(body.get("optimizer")))

        if body.get("model_id") is not None:
            live = self.runs.of(body)

            async def restored() -> dict[str, Any]:
                if bool(self.store.info(path)["lora_rank"]) != (live.run.config is not None):
                    raise BadRequestError(f"of {path} and this run one is of adapters, and the other of all weights: "
                                          "create a run from the weights")  # fmt: skip
                found = await loaded()
                await self.queue.called(lambda: live.run.restore(*found))
                return {"type": "load_weights", "path": path, "model_id": live.model_id}

            return self.runs.submit(live, body, restored)
        model_id = self._new_id(body)
        if body.get("base_model") is not None:
            self.samplers.check_base(body["base_model"])

        async def created() -> dict[str, Any]:
            info = self.store.info(path)

            async def run() -> TrainingRun:
                config, *saved = await loaded()
                return await self.queue.called(lambda: TrainingRun(self.model, config, saved=tuple(saved)))

            kept = {name: info[name] for name in DESCRIBED} | {"user_metadata": body.get("user_metadata")}
            await self.runs.add(model_id, str(body["session_id"]), not info["lora_rank"], run, kept)
            return {"type": "load_weights", "path": path, "model_id": model_id}

        self.results.start(f"{model_id}:0", created)
        return JSONResponse({"request_id": f"{model_id}:0", "model_id": model_id})


async def unsupported(server: Server, request: Request) -> Response:
    """Always an error, which names what this server has not."""
    raise BadRequestError(f"this server has no {request.method} {request.scope['path']:.200}", 404, "unsupported")


def check_adam(config: Any) -> None:
    """Raises BadRequestError for another optimizer than AdamW."""
    kind = config.get("type", "adamw") if isinstance(config, Mapping) else "adamw"
    if kind != "adamw":
        raise BadRequestError(f"the optimizer is {kind!r:.100}; this server has adamw", code="unsupported")


def adam_settings(given: Any) -> dict[str, float]:
    """The numbers of a step, as they are in fp32. Raises BadRequestError."""
    if not isinstance(given, Mapping):
        raise BadRequestError(f"adam_params is {given!r:.100}; it takes an object")
    chosen, fp32 = dict[str, float](), np.finfo(np.float32)
    for name, value in given.items():
        if name == "type":
            continue
        if name not in ADAM or type(value) not in (int, float) or not 0 <= value <= float(fp32.max):
            raise BadRequestError(f"adam_params has {name!r:.100} = {value!r:.100}; it takes numbers from 0 on: "
                                  f"{', '.join(ADAM)}")  # fmt: skip
        chosen[name] = float(np.float32(value))
    if any(chosen.get(name, 0.0) >= 1 for name in ("beta1", "beta2")):
        raise BadRequestError("beta1 and beta2 are below 1")
    if chosen.get("eps", 1.0) < fp32.tiny:
        raise BadRequestError(f"eps is {given['eps']}; it takes {fp32.tiny:.1e} or more, as weights without gradients "
                              "would become 0 / 0")  # fmt: skip
    return chosen
