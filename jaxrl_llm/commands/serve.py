"""Serve a model over HTTP, to any client of the OpenAI API.

    jaxrl-llm serve runs/grpo
    jaxrl-llm serve embedded:sort --port=8000 --slots=16
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "grpo", "messages": [{"role": "user", "content": "sort:4821="}]}'

MODEL is a Hugging Face folder, its URL or hub id, `embedded:<name>`, the folder of a run (its newest checkpoint) or of
one of its checkpoints. Endpoints: /v1/chat/completions, /v1/responses, /v1/completions, /v1/messages (Anthropic's),
/v1/models, /health, /metrics, those of TRL's and axolotl's servers, and vLLM's by which adapters come and go; with
--tinker=FOLDER those of Tinker, by which clients train the model, or adapters of it. With a key in the variable
JAXRL_LLM_API_KEY requests must bring it. SIGTERM and Ctrl-C let the answers under way end. Needs `pip install
"jaxrl_llm[serve]"`. See docs/serving.md.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from jaxrl_llm.commands.generate import MODEL
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options, positional
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters.lora import has_adapters, merge
from jaxrl_llm.models.files.weight_versions import LocalCheckpoint
from jaxrl_llm.models.model import Model, check_tokenizer, load_adapter
from jaxrl_llm.models.net import Net, Params, restacked
from jaxrl_llm.models.rope import check_length
from jaxrl_llm.rollout.engine import COMPILE_WORK, Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.logging.console import stderr_console, waiting
from jaxrl_llm.training.runtime.lock import RunLock
from jaxrl_llm.training.setup.run_models import load_named
from jaxrl_llm.training.setup.worker import eos_ids

KEY_VARIABLE = "JAXRL_LLM_API_KEY"
DEFAULT_LENGTH = 4096

FLAGS = (
    *MODEL,
    Setting("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is all of this machine's, for other machines."),
    Setting("port", 8000, "Port to listen on; 0 takes a free one.", int, minimum=0, maximum=65535),
    Setting("name", "", "Name of the model in requests; none given: the last part of its path."),
    Setting("lora", (), "Adapters that are further models, each `NAME=FOLDER` of a PEFT adapter."),
    Setting("slots", 16, "Rows that are decoded side by side; others wait.", int, minimum=1),
    Setting("max_length", 0, "Most tokens of a prompt and its completion; 0 is the model's, up to 4096.", int,
            minimum=0),
    Setting("chunk", 8, "Decode steps between two looks at the requests: fewer answer sooner, more cost less.", int,
            minimum=1),
    Setting("cache_dtype", None, "Type of the keys and values; none is that of the computation.",
            choices=("float32", "bfloat16", "float16", "fp8")),
    Setting("prefix_cache_gb", 1.0, "Memory for texts that were computed, for requests that go on with them; 0: none.",
            float, minimum=0),
    Setting("speculative_tokens", 0, "Tokens of a row that are proposed and verified at once; samples stay the same.",
            int, minimum=0),
    Setting("tinker", "", "Folder for the weights of training runs, which clients of Tinker's SDK make then; none "
            "given: there is no training."),
    Setting("microbatch_tokens", 8192, "Tokens, padding included, that such a run computes at once.", int, minimum=1),
    Setting("full_runs", 1, "Such runs at once that train all weights, which clients ask for by rank 0, each with 16 "
            "bytes a parameter; 0: adapters alone are trained.", int, minimum=0),
    Setting("full_samplers", 2, "Samplers of all weights that are kept at once, each a further copy of what decodes.",
            int, minimum=1),
    Setting("weight_updates", False, "Let requests replace the weights by those of a folder on this machine.", bool),
    Setting("adapter_updates", False, "Let requests load and unload adapters, of folders on this machine.", bool),
    Setting("max_requests", 256, "Requests that are answered at once; further ones get status 429.", int, minimum=1),
    Setting("max_waiting", 1024, "Completions that wait for a slot, or are asked for at once.", int, minimum=1),
    Setting("max_body_bytes", 4 * 2**20, "Largest body of a request.", int, minimum=1),
    Setting("timeout", 600.0, "Seconds for an answer.", float, above=0),
    Setting("drain", 60.0, "Seconds that answers have after SIGTERM or Ctrl-C.", float, minimum=0),
)  # fmt: skip
# How a run trains a network, which makes it no other one for those that sample from it.
OF_TRAINING = (
    "param_dtype", "remat", "attention", "fp32_head", "freeze_router", "router_aux_loss_coef", "scan_layers",
    "vision_training", "mlp_tile_tokens",
)  # fmt: skip


def serve(read: Callable[[], Model], flags: SimpleNamespace, api_key: str, lock: RunLock | None) -> None:
    """Serves the model that `read` gives until SIGTERM or Ctrl-C, as `FLAGS` say; `lock` is that of --tinker's folder.

    The caller keeps no model: its parameters are let go when those that decode are made of them. Raises ConfigError
    before it listens: a model without tokenizer, a length beyond its positions, an address in use. Must be called in
    the main thread.
    """
    # Imported here: other commands need no server.
    import uvicorn

    from jaxrl_llm.serving.adapters import ADAPTER_ROUTES
    from jaxrl_llm.serving.app import Limits, Server
    from jaxrl_llm.serving.connections import KEPT_ALIVE, Connection
    from jaxrl_llm.serving.endpoints import ENDPOINTS
    from jaxrl_llm.serving.queue import RequestQueue, compile_first
    from jaxrl_llm.serving.trainers import ROUTES
    from jaxrl_llm.tools.tinker.service import TrainingService

    model = read()
    check_tokenizer(model)
    positions = model.max_positions
    length = flags.max_length or min(positions or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if positions is not None and length > positions:
        raise ConfigError(f"--max_length is {length}, but {model.path} has positions for {positions}: give fewer")
    check_length(model.net.config.rope, length)
    model = merged(model)
    names = [flags.name or served_name(model.path or "model")]
    adapters = named_adapters(model, flags.lora, names[0])
    names += adapters
    engine = Engine(SamplingParams(), 1, length, flags.chunk, cache_dtype=flags.cache_dtype, compile_work=COMPILE_WORK,
                    speculative_tokens=flags.speculative_tokens, net=model.net, eos=())  # fmt: skip
    listener = bound_socket(flags.host, flags.port)
    adapts = bool(flags.tinker) or flags.adapter_updates
    kept = int(flags.prefix_cache_gb * 1e9)
    queue = RequestQueue(engine, model.params, flags.slots, model.mesh, adapters, kept, adapts)
    limits = Limits(length, flags.max_body_bytes, flags.max_requests, flags.max_waiting, flags.timeout)
    published = LocalCheckpoint()
    load = weight_loader(model, published)
    routes = [*ENDPOINTS, *ROUTES, *ADAPTER_ROUTES]
    if flags.tinker:
        path = model.path or names[0]  # by which clients find the tokenizer
        known = dict.fromkeys((str(Path(path).absolute()) if Path(path).is_dir() else path, path, names[0]))
        runs = Path(flags.tinker).expanduser().absolute()
        routes += TrainingService(
            model, queue, runs, tuple(known), flags.microbatch_tokens, flags.full_runs, flags.full_samplers,
            lock and lock.check,
        ).routes  # fmt: skip
    server = Server(
        queue, model.tokenizer, names, eos_ids(model), model.net.config.vocab_size, limits, api_key, routes,
        load if flags.weight_updates else None,
        functools.partial(load_adapter, dataclasses.replace(model, params={})) if flags.adapter_updates else None,
    )  # fmt: skip
    del model

    web = uvicorn.Config(
        server.app, http=Connection, log_level="warning", access_log=False, server_header=False, lifespan="off",
        timeout_keep_alive=KEPT_ALIVE,
        timeout_graceful_shutdown=int(flags.drain) + 2,  # for what ended answers write; who reads none of it is cut off
    )  # fmt: skip
    queue.start()
    with waiting("compiling", stderr_console()):
        compile_first(queue)
    listener.listen(2048)
    address, actual = listener.getsockname()[:2]
    ready = (
        f"{', '.join(names)}: {amount(flags.slots, 'slot')} of up to {length} tokens, at http://{address}:{actual}/v1"
    )
    try:
        asyncio.run(draining_server(web, server, queue, flags.drain, ready).serve(sockets=[listener]))
    finally:
        queue.stop()  # the rows have ended, or their answers have: a thread that still computes would abort the process
        published.clear()
    if queue.failure is not None:
        raise queue.failure


def named_adapters(model: Model, entries: Sequence[str], name: str) -> dict[str, Any]:
    """The adapters of `--lora` by their names; raises ConfigError for one that is no NAME=FOLDER, is there twice, or is
    called `name`, as the model is."""
    adapters: dict[str, Any] = {}
    for entry in entries:
        adapter, _, folder = entry.partition("=")
        if not adapter or not folder or adapter in (name, *adapters):
            raise ConfigError(f"--lora has {entry!r}; it takes NAME=FOLDER, each name once and none {name!r}")
        adapters[adapter] = load_adapter(model, folder)
    return adapters


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet; raises ConfigError where another has it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None
    return listener


def weight_loader(model: Model, published: LocalCheckpoint) -> Callable[[str], Params]:
    """A function that loads parameters from a folder, or of a version that is `published`, in the types and on the mesh
    of `model`, which it does not keep.

    It raises ConfigError for those of another network.
    """
    dtypes, config, mesh = [x.dtype for x in jax.tree.leaves(model.params)], model.net.config, model.mesh

    def load(path: str) -> Params:
        loaded = merged(load_named(published.take(path), config.dtype, mesh or make_mesh(devices=jax.devices()[:1])))
        if dataclasses.replace(loaded.net.config, **{name: getattr(config, name) for name in OF_TRAINING}) != config:
            raise ConfigError(f"{path} is another network than the one that is served")
        leaves, structure = jax.tree.flatten(loaded.params)
        del loaded  # each array goes when there is one of the served type
        for number, dtype in enumerate(dtypes):
            leaves[number] = leaves[number].astype(dtype)
        return structure.unflatten(leaves)

    return load


def draining_server(web: Any, server: Any, queue: Any, drain: float, ready: str) -> Any:
    """uvicorn's server of `web`, which prints `ready` when it listens, and on a signal takes no more requests and ends
    the answers under way after `drain` seconds; it ends where the `queue` has failed."""
    import uvicorn

    class Uvicorn(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """SIGTERM and SIGINT drain; a second one ends at once. The process then exits as any command does."""
            loop = asyncio.get_running_loop()

            def stop() -> None:
                self.force_exit = self.should_exit
                self.should_exit = server.draining = True
                loop.call_later(drain, server.end_answers)

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            stderr_console().print(
                ready, markup=False, highlight=False, soft_wrap=True
            )  # whoever reads it may end the server at once
            try:
                yield
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or queue.failure is not None

    return Uvicorn(web)


def served_name(path: str) -> str:
    """The name of a model in requests: the last part of its path, or the part before `hf`; of a run's checkpoint
    RUN/checkpoints/10 that of the run with the step, `RUN-10`.
    """
    if path.startswith("embedded:"):
        return path
    parts = [part for part in Path(path).absolute().parts if part not in ("hf", "/")]
    if len(parts) > 2 and parts[-2] == "checkpoints" and parts[-1].isdigit():
        return f"{parts[-3]}-{parts[-1]}"
    return parts[-1] if parts else "model"


def merged(model: Model) -> Model:
    """The model with its adapters in the matrices they belong to, and stacked as one that is trained whole; adapters on
    quantised matrices stay beside them."""
    config = model.net.config
    plain = dataclasses.replace(config, lora=None, layer_groups=(), frozen_leaves=(), qat="none", matmul_dtype="auto")
    if plain == config or (has_adapters(model.params) and config.quantized != "none"):
        return model
    params = restacked(merge(model.params, config.lora), config, plain)
    return dataclasses.replace(model, net=Net(plain), params=params)


@contextlib.contextmanager
def folder_of_runs(options: Mapping[str, Any]) -> Iterator[RunLock | None]:
    """Makes the folder of `--tinker` and holds its lock, as one server at a time does; nothing, and None, without one.

    Raises ConfigError for flags that do not go with it, a folder that cannot be written, and one that another server
    holds.
    """
    tinker, runs, samplers = (options[name] for name in ("tinker", "full_runs", "full_samplers"))
    usual = {setting.name: setting.default for setting in FLAGS}
    of_runs = ("microbatch_tokens", "full_runs", "full_samplers")
    if not tinker and (given := [name for name in of_runs if options[name] != usual[name]]):
        raise ConfigError(f"--{given[0]} is for the runs of --tinker=FOLDER, which is not given: give both, or neither")
    if not tinker:
        yield None
        return
    if "://" in tinker:
        raise ConfigError(f"--tinker is {tinker}; it takes a folder on this machine")
    if options["weight_updates"]:
        raise ConfigError("--tinker and --weight_updates are given: what runs adapt must stay as it is; give one")
    if samplers < runs:
        raise ConfigError(
            f"--full_samplers is {samplers}, below --full_runs, {runs}: each run of all weights samples from a copy of "
            "its own; give as many"
        )
    folder = Path(tinker).expanduser().absolute()
    try:  # now, and not when hours of training are to be saved
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--tinker is {tinker}, but no folder can be made there: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--tinker is {tinker}, a folder that this process may not write to")
    with RunLock(folder, "--tinker", "server") as lock:
        yield lock


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    words, flags = positional(argv, FLAGS)
    options = load_options([*(f"--model={word}" for word in words), *flags], __doc__ or "", FLAGS)
    processes.join()
    keep_compiled()
    path, dtype, tensor, trusts = (options.pop(name) for name in ("model", "dtype", "tensor", "trust_remote_code"))
    if not path:
        raise ConfigError("the model is missing; write jaxrl-llm serve MODEL, such as embedded:sort or RUN")
    missing = [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f'{" and ".join(missing)} are not installed: pip install "jaxrl_llm[serve]"')
    if jax.process_count() > 1:
        raise ConfigError("serve is for one process: start it once, with --tensor for several devices")
    if tensor > len(jax.devices()):
        raise ConfigError(f"--tensor is {tensor}, and this machine has {amount(len(jax.devices()), 'device')}")

    def read() -> Model:
        with waiting(f"loading {path}", stderr_console()):
            return load_named(path, dtype, make_mesh(tensor=tensor, devices=jax.devices()[:tensor]), trusts)

    with folder_of_runs(options) as lock:
        serve(read, SimpleNamespace(**options), os.environ.get(KEY_VARIABLE, ""), lock)
