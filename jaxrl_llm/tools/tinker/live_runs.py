"""The runs that are trained at once, and the requests to each, which are done in the order that its client numbered."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxrl_llm.models.model import has_peft_adapter
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.results import Failure, Results, settled
from jaxrl_llm.tools.tinker.sessions import Sessions
from jaxrl_llm.tools.tinker.training_run import TrainingRun

MOST_RUNS = 32  # of adapters that are trained at once, which are on the devices with their moments
FORGOTTEN = 3600.0  # seconds of silence after which nobody goes on with a run
FORGOTTEN_FULL = 120.0  # the same of a run of all weights, whose place others wait for; a client is heard every 10
MISSED = 600.0  # seconds that requests wait for the one before them, which may never come: it was refused as too large


@dataclasses.dataclass(eq=False)
class LiveRun:
    """A run that is trained now, and the requests to it that wait for their turn."""

    model_id: str
    session: str
    run: TrainingRun
    info: dict[str, Any]  # what is saved beside its weights
    next: int = 1  # the number of the request that is done next
    waiting: dict[int, tuple["asyncio.Future[Any]", Callable[[], Awaitable[Any]]]] = dataclasses.field(
        default_factory=dict
    )
    came: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # another one to wait
    used: float = dataclasses.field(default_factory=time.time)
    worker: "asyncio.Task[None] | None" = None


class LiveRuns:
    """The runs by their ids, up to MOST_RUNS of adapters and `full_runs` of all weights."""

    def __init__(self, model: str, sessions: Sessions, results: Results, full_runs: int):
        """`model` is the name of what they adapt."""
        self.model, self.sessions, self.results, self.full_runs = model, sessions, results, full_runs
        self.found: dict[str, LiveRun] = {}
        self._adding = asyncio.Lock()

    def of(self, body: Mapping[str, Any]) -> LiveRun:
        """The run that a body names, which is used now. Raises BadRequestError where there is none."""
        live = self.found.get(str(body.get("model_id")))
        if live is None:
            raise BadRequestError(f"there is no run {body.get('model_id')!r:.200}: it was let go, or this server "
                                  "started anew. Create one, and load its newest weights", 404)  # fmt: skip
        live.used = time.time()
        return live

    async def add(
        self, model_id: str, session: str, full: bool, make: Callable[[], Awaitable[TrainingRun]], info: dict[str, Any]
    ) -> None:
        """Adds a run, `full` where it is of all weights; where there are as many as may be, one goes whose client is
        silent. Raises BadRequestError.
        """
        async with self._adding:
            if model_id in self.found:
                raise BadRequestError(f"there is a run {model_id} already; give another model_seq_id")
            most, seconds = (self.full_runs, FORGOTTEN_FULL) if full else (MOST_RUNS, FORGOTTEN)
            alike = [live for live in self.found.values() if (live.run.config is None) == full]
            if not most:
                raise BadRequestError(
                    "this server trains adapters alone: give a rank from 1 on, or start it with --full_runs=1"
                )
            if len(alike) >= most:
                silent = [live for live in alike if self.sessions.silent(live.session, seconds)]
                if not silent:
                    kind = "all weights" if full else "adapters"
                    more = ", or start the server with more --full_runs" if full else ""
                    raise BadRequestError(
                        f"as many runs of {kind} are trained as may be, {most}: unload one, or finish its session{more}"
                    )
                self.remove(min(silent, key=lambda live: live.used))
                del silent
            del alike  # the arrays of one that goes are gone before others come
            run = await make()
            if not full and not has_peft_adapter(run.whole()):
                raise BadRequestError(f"PEFT's folders have no place for adapters of {self.model}")
            self.found[model_id] = LiveRun(model_id, session, run, info)

    def remove(self, live: LiveRun) -> None:
        """Lets a run go, and the requests that wait for it."""
        self.found.pop(live.model_id, None)
        if live.worker is not None:
            live.worker.cancel()
        for future, _ in live.waiting.values():
            future.cancel()

    def submit(self, live: LiveRun, body: Mapping[str, Any], work: Callable[[], Awaitable[Any]]) -> Response:
        """Answers with the id of a request to a run, which is done in its turn; one that comes again is the same.

        The client has counted a request that is refused too: what is wrong with it is said in its turn, as its result.
        """
        number = body.get("seq_id")
        if not isinstance(number, int) or number < 1:
            number = max(live.waiting, default=live.next - 1) + 1
        request_id = f"{live.model_id}:{number}"
        if request_id not in self.results:
            if number < live.next:
                raise BadRequestError(f"seq_id is {number}, but the run is at {live.next}")
            future = asyncio.get_running_loop().create_future()
            self.results.add(request_id, future)
            live.waiting[number] = future, work
            live.came.set()
            if live.worker is None or live.worker.done():
                live.worker = asyncio.ensure_future(self._work(live))
        return JSONResponse({"request_id": request_id, "model_id": live.model_id})

    async def _work(self, live: LiveRun) -> None:
        """Does the requests of a run in turn; where one does not come those that wait for it fail."""
        while live.waiting:
            if live.next not in live.waiting:
                live.came.clear()
                try:
                    await asyncio.wait_for(live.came.wait(), MISSED)
                except TimeoutError:
                    missed = Failure(
                        f"request {live.next} of this run did not come in {MISSED:g} s, and none behind it was done: "
                        "call again what is missing, and this",
                        "user",
                    )
                    live.next = max(live.waiting) + 1
                    for future, _ in live.waiting.values():
                        future.set_result(missed)
                    live.waiting.clear()
                continue
            future, work = live.waiting.pop(live.next)
            live.next += 1
            try:
                result = await settled(work)
            except asyncio.CancelledError:
                future.cancel()
                raise
            if not future.done():
                future.set_result(result)
            if live.run.lost:  # a step without memory, after it had the arrays
                self.remove(live)
