"""Throughput and latency of `jaxrl-llm serve` under many clients, and its ratio to the engine's own in the same run.

    python -m benchmarks.serving embedded:sort --requests=1000 --clients=64

Clients ask for texts of random length with random settings and seeds; one in ten leaves before its answer. Every
answer is then asked for again, alone, and must be the same. The engine's own number is one rollout of the same
prompts and lengths in as many slots; the queue's is the same requests without HTTP. Last, a step of training's
rollout, eight rows a prompt, by the engine and as requests of the queue.
"""

import argparse
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.models.model import Model, load_model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.grid import RowRequest, bucket
from jaxrl_llm.serving.handles import Handle, Tokens
from jaxrl_llm.serving.queue import RequestQueue

GROUP, ROUNDS = 8, 9  # rows of a prompt in a step of training; rollouts of which the median is taken
LEAVING = 10  # one client in so many leaves early
SETTINGS = ({}, {"temperature": 0}, {"temperature": 1.4}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05, "top_p": 0.95})


def requests_of(count: int, longest_prompt: int, longest: int, vocabulary: int) -> list[dict]:
    """Bodies of text completions: lengths of prompts and completions are geometric, as chats are."""
    draw = np.random.default_rng(0)
    bodies = []
    for _ in range(count):
        size, tokens = (1 + int(draw.geometric(3 / most)) % most for most in (longest_prompt, longest))
        prompt = draw.integers(1, vocabulary, size).tolist()
        bodies.append({"prompt": prompt, "max_tokens": tokens, "seed": int(draw.integers(2**31)), "ignore_eos": True,
                       "return_token_ids": True, **SETTINGS[draw.integers(len(SETTINGS))]})  # fmt: skip
    return bodies


def ask(address: str, body: dict, timeout: float = 600) -> list[int] | None:
    """The token ids of an answer; None when the time was over."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {read}")
        return read["choices"][0]["token_ids"]
    except TimeoutError:
        return None
    finally:
        connection.close()


def load(
    address: str, bodies: list[dict], clients: int, leaving: bool
) -> tuple[list[list[int] | None], list[float], float]:
    """Answers, seconds of each, and seconds of all."""
    seconds = [0.0] * len(bodies)

    def one(number: int) -> list[int] | None:
        start = time.perf_counter()
        leaves = leaving and number % LEAVING == LEAVING - 1
        ids = ask(address, bodies[number], 0.05 if leaves else 600)
        seconds[number] = time.perf_counter() - start
        return ids

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(one, range(len(bodies))))
    return answers, seconds, time.perf_counter() - start


def of_server(model: str, bodies: list[dict], options: argparse.Namespace) -> dict[str, float]:
    """Numbers of a server process under load."""
    command = [sys.executable, "-m", "jaxrl_llm", "serve", model, "--port=0", f"--slots={options.slots}",
               f"--max_length={options.prompt + options.longest}", f"--chunk={options.chunk}"]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    address = None
    for line in server.stderr:
        if found := re.search(r"at http://(\S+)/v1", line):
            address = found[1]
            break
    if address is None:
        raise RuntimeError(f"the server ended with {server.wait()}")
    threading.Thread(target=server.stderr.read, daemon=True).start()
    try:
        load(address, bodies, options.clients, leaving=True)  # compiles
        memory = [resident(server.pid)]
        answers, seconds, total = load(address, bodies, options.clients, leaving=False)
        memory.append(resident(server.pid))
        load(address, bodies, options.clients, leaving=True)
        memory.append(resident(server.pid))
        alone, _, _ = load(address, bodies, 1, leaving=False)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(120)
    different = sum(one != other for one, other in zip(answers, alone, strict=True))
    tokens = sum(len(ids) for ids in answers if ids is not None)
    p50, p95 = np.percentile(seconds, (50, 95))
    return {"exit": code, "tokens": tokens, "tokens_per_second": tokens / total, "p50": p50, "p95": p95,
            "different_alone": different, **{f"memory_mib_{i}": x for i, x in enumerate(memory)}}  # fmt: skip


def resident(process: int) -> float:
    """MiB that a process holds."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) / 1024


def row_request(body: dict) -> RowRequest:
    """A body as a row of the queue."""
    sampling = SamplingParams(**{name: body[name] for name in vars(SamplingParams()) if name in body})
    return RowRequest(body["prompt"], body["max_tokens"], sampling, (), body["seed"])


def clock() -> np.ndarray:
    """Seconds that have passed, and those that processors have computed for this process."""
    return np.asarray([time.perf_counter(), time.process_time()])


def seconds_in_queue(queue: RequestQueue, requests: list[RowRequest]) -> np.ndarray:
    """Seconds (`clock`) until all requests, which come at once, are answered."""
    left, done, lock = len(requests), threading.Event(), threading.Lock()

    def deliver(tokens: Tokens | BaseException) -> None:
        nonlocal left
        if isinstance(tokens, BaseException) or tokens.finish_reason is not None:
            with lock:
                left -= 1
                if not left:
                    done.set()

    start = clock()
    queue.submit([Handle(request, deliver) for request in requests])
    done.wait()
    return clock() - start


def seconds_in_engine(
    engine: Engine, model: Model, prompts: list[list[int]], width: int, limits: np.ndarray
) -> np.ndarray:
    """Seconds (`clock`) of one rollout, each row of which has as many tokens as `limits` says."""
    padded, segments = pad_prompts(prompts, bucket(width))
    start = clock()
    rollout = engine.generate(model.params, padded, segments, jax.random.key(0), limits=limits)
    np.testing.assert_array_equal(np.asarray(rollout.lengths), limits)
    return clock() - start


def of_requests(model: Model, bodies: list[dict], options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of the requests without HTTP, and of one rollout of them with one setting for all."""
    queue_engine = Engine(SamplingParams(), 1, options.prompt + options.longest, options.chunk, net=model.net, eos=())
    engine = Engine(SamplingParams(), 1, options.longest, net=model.net, eos=(), slots=options.slots)
    prompts, limits = [body["prompt"] for body in bodies], np.asarray([body["max_tokens"] for body in bodies])
    queue = RequestQueue(queue_engine, model.params, options.slots)
    queue.start()
    requests = [row_request(body) for body in bodies]
    for _ in range(2):  # the first compiles
        own = seconds_in_queue(queue, requests)[0]
        engines = seconds_in_engine(engine, model, prompts, options.prompt, limits)[0]
    queue.stop()
    return {"queue_tokens_per_second": limits.sum() / own, "engine_tokens_per_second": limits.sum() / engines}


def of_rollout(model: Model, bodies: list[dict], options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of a training step's rollout by the engine and as requests, in turns; medians, and of the ratios.

    As many prompts as fill the slots, GROUP rows of each, one setting; lengths are those of the first bodies. The ratio
    of computed seconds holds on a machine that does other work too.
    """
    bodies = bodies[: options.slots]
    prompts = [body["prompt"] for body in bodies[::GROUP]]
    limits = np.asarray([body["max_tokens"] for body in bodies])
    requests = [
        RowRequest(prompts[row // GROUP], int(limit), SamplingParams(), (), row) for row, limit in enumerate(limits)
    ]
    engine = Engine(SamplingParams(), GROUP, options.longest, net=model.net, eos=())
    queue = RequestQueue(
        dataclasses.replace(engine, group_size=1, max_completion_length=options.prompt + options.longest),
        model.params,
        options.slots,
    )
    queue.start()
    seconds = np.asarray([
        (seconds_in_queue(queue, requests), seconds_in_engine(engine, model, prompts, options.prompt, limits))
        for _ in range(ROUNDS)
    ])  # fmt: skip
    queue.stop()
    own, engines = seconds[2:, 0], seconds[2:, 1]  # the first compile
    ratio, computed = np.median(engines / own, axis=0)
    return {"rollout_in_queue_tokens_per_second": limits.sum() / np.median(own[:, 0]),
            "rollout_tokens_per_second": limits.sum() / np.median(engines[:, 0]),
            "rollout_ratio": ratio, "rollout_computed_ratio": computed}  # fmt: skip


def main(argv: list[str]) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in {
        "requests": 1000,
        "clients": 64,
        "slots": 32,
        "chunk": 8,
        "prompt": 128,
        "longest": 128,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    model = load_model(options.model)
    bodies = requests_of(options.requests, options.prompt, options.longest, min(model.net.config.vocab_size, 256))
    numbers: dict[str, float] = of_server(options.model, bodies, options)
    print(json.dumps({**numbers, **vars(options)}), flush=True)
    numbers |= of_requests(model, bodies, options)
    own = numbers["engine_tokens_per_second"]
    numbers["queue_ratio"] = numbers["queue_tokens_per_second"] / own
    numbers["server_ratio"] = numbers["tokens_per_second"] / own
    numbers |= of_rollout(model, bodies, options)
    print(json.dumps({name: round(float(x), 3) for name, x in numbers.items()} | {"cpus": os.cpu_count()}))


if __name__ == "__main__":
    main(sys.argv[1:])
