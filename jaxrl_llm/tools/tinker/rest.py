"""The endpoints of the SDK's `RestClient`: runs and checkpoints, which are listed, downloaded, let end and deleted."""

import asyncio
import datetime
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.checkpoints import Place, Store, expiry
from jaxrl_llm.tools.tinker.live_runs import LiveRun

DESCRIBED = ("base_model", "lora_rank", "train_unembed", "train_mlp", "train_attn")  # of a run, beside its weights
SIGNED = 3600.0  # seconds for which a file's URL needs no key


class Rest:
    """Checkpoints of a store, and the runs that they are of or that are `trained`."""

    def __init__(self, store: Store, trained: Mapping[str, LiveRun]):
        self.store, self.trained = store, trained

    async def weights_info(self, server: Server, request: Request) -> Response:
        """The model that saved weights are of, and their adapter's rank."""
        body = await server.body(request)
        info = self.store.info(body.get("tinker_path"))
        return JSONResponse({**{name: info[name] for name in DESCRIBED}, **rank_about(info)})

    async def list_runs(self, server: Server, request: Request) -> Response:
        """The runs that are trained, and those that saved something; the one used last first."""
        runs = await asyncio.to_thread(self._runs)
        newest_first = sorted(runs.values(), key=lambda run: run["last_request_time"], reverse=True)
        return JSONResponse(page(request, "training_runs", newest_first))

    async def get_run(self, server: Server, request: Request) -> Response:
        """Answers with what is known of the run in the path; 404 where there is none."""
        found = (await asyncio.to_thread(self._runs)).get(request.path_params["run"])
        if found is None:
            raise BadRequestError(f"there is no run {request.path_params['run']!r:.200}", 404)
        return JSONResponse(found)

    def _runs(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for run, live in list(self.trained.items()):  # which others change meanwhile
            used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(live.used))
            found[run] = run_about(run, live.info, live.info.get("user_metadata"), used)
        for place, info in self.store.all():
            about = run_about(place.run, info, info.get("run_metadata"), info["time"])
            about = found.setdefault(place.run, about)
            last = "last_sampler_checkpoint" if place.kind == "sampler_weights" else "last_checkpoint"
            if place.kind != "external_weights":
                about[last] = self.store.shown(place, info)
        return found

    async def list_checkpoints(self, server: Server, request: Request) -> Response:
        """The checkpoints of a run, or of all, the newest first."""

        def listed() -> list[dict[str, Any]]:
            return [self.store.shown(*each) for each in self.store.all(request.path_params.get("run", ""))[::-1]]

        return JSONResponse(page(request, "checkpoints", await asyncio.to_thread(listed)))

    async def list_urls(self, server: Server, request: Request) -> Response:
        """The URLs of a checkpoint's files, which open them without a key for a while."""
        place = asked(request)
        files = await asyncio.to_thread(self.store.files, place.path)
        folder = f"/api/v1/training_runs/{place.run}/checkpoints/{place.kind}/{place.name}"
        server_url = str(request.base_url).rstrip("/")
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=SIGNED)
        urls = {file: server_url + server.signed(f"{folder}/{file}", SIGNED) for file in files}
        return JSONResponse({"urls": urls, "expires": expires.isoformat()})

    async def get_file(self, server: Server, request: Request) -> Response:
        """Answers with a file of the checkpoint in the path; 404 where it has no such file."""
        place, name = asked(request), request.path_params["file"]
        files = await asyncio.to_thread(self.store.files, place.path)
        if name not in files:
            raise BadRequestError(f"{place.path} has no file {name!r:.200}", 404)
        return FileResponse(files[name])

    async def set_ttl(self, server: Server, request: Request) -> Response:
        """Let a checkpoint end so many seconds from now, or never."""
        body = await server.body(request)
        await asyncio.to_thread(self.store.set_expiry, asked(request).path, expiry(body.get("ttl_seconds")))
        return Response(status_code=204)

    async def delete_checkpoint(self, server: Server, request: Request) -> Response:
        """Deletes a checkpoint; one that is sampled from goes on as long as it is used."""
        await asyncio.to_thread(self.store.delete, asked(request).path)
        return Response(status_code=204)


def asked(request: Request) -> Place:
    """The checkpoint that a request's path names."""
    return Place(*(request.path_params[key] for key in ("run", "kind", "name")))


def run_about(run: str, info: Mapping[str, Any], metadata: Any, used: str) -> dict[str, Any]:
    """The facts of a run that clients are given, by the names of Tinker's API."""
    return {"training_run_id": run, "base_model": info["base_model"], "model_owner": "local", **rank_about(info),
            "last_request_time": used, "user_metadata": metadata}  # fmt: skip


def rank_about(info: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a run trains adapters, and of which rank, as clients read it."""
    return {"is_lora": bool(info["lora_rank"]), "lora_rank": info["lora_rank"] or None}


def page(request: Request, name: str, rows: list[Any]) -> dict[str, Any]:
    """The `limit` rows of a list from `offset` on, both of the query, with a cursor that says how many there are.

    Raises BadRequestError for an offset or a limit that is no number.
    """
    try:
        offset, limit = (
            int(request.query_params.get(key, default)) for key, default in (("offset", 0), ("limit", 100))
        )
    except ValueError:
        raise BadRequestError("offset and limit take numbers") from None
    shown = rows[max(offset, 0) :][: max(limit, 0)]
    return {name: shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)}}
