"""Sampling from a server of the OpenAI kind, such as vLLM's: `environment.rollout_func="server(url=..., model=...)"`.

Without `weights` the server samples with those it was started with: its policy stays while the trained one moves on, so
`algorithm.importance_correction` has to weigh its rows.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.http_client import (
    HttpClient,
    LostError,
    Reply,
    RequestError,
    UnreachableError,
    http_address,
    json_headers,
)
from jaxrl_llm.environments.protocol import EpisodeError

log = logging.getLogger(__name__)

CONCURRENT_REQUESTS = 16
TRIES = 3  # of a rollout whose server goes away
PROCESSED = "processed_logprobs"  # vLLM's mode of log-probs at the temperature of the request; raw ones are at 1
COMING_UP = (502, 503, 504)  # a proxy's answers for a server that is not there yet
# Fields, by vLLM's names, that are sent where they ask for something: servers that know fewer serve runs without them.
CONSTRAINTS = ("logit_bias", "bad_words", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "structured_outputs")
SGLANG = {"regex": "regex", "json": "json_schema", "grammar": "ebnf"}  # its names of the kinds of structured outputs
WRONG_BASE = 409  # the status of a server that holds other weights than a patch is of
DTYPES = ("float32", "bfloat16", "float16")
BYTES_PER_TOKEN = 4096  # of a reply, at most: a token's id and text, its log-prob, and those of others


class GoneError(EpisodeError):
    """A server that had answered is not there any more: it has ended, or is started anew."""


class RefusedError(Exception):
    """An answer with the status that says: not these weights."""


def server(
    url: str,
    model: str,
    *,
    timeout: float = 120.0,
    wait_for_server: float = 240.0,
    api_key: str = "OPENAI_API_KEY",
    weights: str = "",
    weights_dtype: str = "",
    full_every: int = 1,
    local_checkpoint: str = "",
    vllm: bool = False,
    processed_logprobs: bool = False,
) -> Callable[..., Any]:
    """A rollout function of TRL's form that asks `{url}/completions` for the completions of each prompt.

    url ends in /v1. timeout: seconds for each request, to the reply's last byte. wait_for_server: seconds within which
    the server comes up, from the first request on. One that goes away is waited for as long, gets the weights again,
    and samples all of the rollout anew, as its weights may be those it was started with. api_key:
    environment variable with the key, if there is one. weights: a folder that the server sees too, in which it gets the
    policy before each rollout, by /update_weights_from_disk (`jaxrl-llm serve --weight_updates`, SGLang); where its
    answers name the version of their weights, those of another are refused. weights_dtype: their type there, the
    run's own where it is left out. full_every: above 1 `weights` is a folder, or a URL, of versions, of which each
    `full_every`-th and the first hold all weights, and the others what changed since the one before; where the server
    refuses one of these, all weights follow. local_checkpoint: a folder of the server's own in which it brings them
    together (/pull_weights, SGLang). vllm: it is vLLM, started on the folder `weights` with VLLM_SERVER_DEV_MODE=1, and
    reads it again (/collective_rpc, /reset_prefix_cache). processed_logprobs: its log-probs are at the temperature of
    the request (vLLM's `--logprobs-mode processed_logprobs`), where it does not say so itself.

    The server must return token ids (`return_token_ids`, vLLM 0.10.2 or later) and log-probs, at the temperature of the
    trainer's. Raises EpisodeError when it is not there or does not answer in time, answers with an error, leaves those
    out, or says that they are at another temperature, or nothing of it, where the temperature is not 1; and where it
    cannot keep to what the run samples by.
    """
    http_address("url of server(...)", url)
    if vllm and not weights:
        raise ConfigError("server(vllm=True) has no weights; it takes the folder that vLLM was started on")
    if not weights and (weights_dtype or full_every != 1 or local_checkpoint):
        raise ConfigError(
            "server(...) has no weights to send, but weights_dtype, full_every or local_checkpoint: give weights, a "
            "folder that the server sees too, or leave these out"
        )
    if weights_dtype not in ("", *DTYPES):
        raise ConfigError(f"server(weights_dtype={weights_dtype!r}) is not one of {', '.join(DTYPES)}")
    if full_every < 1:
        raise ConfigError(f"server(full_every={full_every}) must be at least 1, which sends all weights each time")
    if full_every > 1 and weights_dtype not in DTYPES[1:]:
        raise ConfigError(
            f"server(full_every={full_every}) sends the weights that change, and in float32 nearly all do in each "
            "step: add weights_dtype='bfloat16', the type that servers compute in"
        )
    if vllm and (full_every > 1 or "://" in weights):
        raise ConfigError(
            f"server(vllm=True) reads the folder it was started on, not the versions in {weights} that a URL or "
            f"full_every={full_every} asks for: give a folder and leave full_every out"
        )
    if local_checkpoint and (full_every == 1 or "://" in weights):
        raise ConfigError(
            f"server(local_checkpoint=...) is for versions of weights in a folder, but weights is {weights} and "
            f"full_every is {full_every}: set it above 1, and give no URL"
        )
    spec = ServerSpec(
        url, model, timeout, wait_for_server, api_key, weights, weights_dtype, full_every, local_checkpoint, vllm,
        processed_logprobs,
    )  # fmt: skip
    is_up, first = threading.Event(), threading.Lock()

    def sample(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = trainer.tokenize(prompts)
        for tries in range(1, TRIES + 1):
            try:
                # Left in this order: what still runs after an error, or Ctrl-C, is not waited for.
                with (
                    ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool,
                    contextlib.closing(Requests(spec, is_up, first)) as requests,
                ):
                    check_temperature(requests, trainer.args.temperature)
                    fields = constraints(requests, trainer.args)
                    version = push(requests, trainer) if weights else None
                    futures = [pool.submit(choices, requests, version, fields, trainer, prompt) for prompt in ids]
                    for future in as_completed(futures):  # the first error, whichever prompt has it
                        future.result()
                break
            except GoneError as error:
                if tries == TRIES:
                    raise EpisodeError(f"{error}, in {TRIES} tries of a rollout: look at the server's log") from error
                log.warning("%s; it is waited for, and samples the rollout anew", error)
                is_up.clear()
        rows = [choice for future in futures for choice in future.result()]
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(trainer.num_generations)],
            "completion_ids": [_values(url, choice, "token_ids") for choice in rows],
            "logprobs": [_values(url, choice.get("logprobs") or {}, "token_logprobs") for choice in rows],
        }

    return sample


@dataclass(frozen=True)
class ServerSpec:
    """The options of `server`: the address, the model and the time limits of a server that samples, and how it gets
    weights."""

    url: str
    model: str
    timeout: float
    wait_for_server: float
    api_key: str
    weights: str
    weights_dtype: str
    full_every: int
    local_checkpoint: str
    vllm: bool
    processed_logprobs: bool

    def below(self, name: str) -> str:
        """The address of an endpoint of the OpenAI API, `{url}/{name}`."""
        address = urlsplit(self.url)
        return address._replace(path=f"{address.path.rstrip('/')}/{name}").geturl()

    def beside(self, name: str, query: str = "") -> str:
        """The address of an endpoint that is the server's own, beside /v1."""
        address = urlsplit(self.url)
        root = address.path.rstrip("/").removesuffix("/v1")
        return address._replace(path=f"{root}/{name}", query=query).geturl()


class Requests:
    """The requests of one rollout, which several threads may make, to a server that may be coming up or go away.

    `is_up` is set once it has answered; before, the thread that holds `first` alone asks.
    """

    def __init__(self, spec: ServerSpec, is_up: threading.Event, first: threading.Lock):
        self.spec, self.is_up, self.first = spec, is_up, first
        self.client, self.headers = HttpClient(CONCURRENT_REQUESTS), json_headers(os.environ.get(spec.api_key))

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def reply(self, address: str, content: bytes | None = None, largest: int = 2**20) -> Reply:
        """The reply to a POST of `content`, or to a GET without any, of up to `largest` bytes.

        Until the server answers, the request is repeated for up to `wait_for_server` seconds. Raises EpisodeError where
        it does not come up, or does not answer in time, and GoneError where it had answered and is not there any more.
        """
        spec, is_up = self.spec, self.is_up
        with contextlib.nullcontext() if is_up.is_set() else self.first:
            deadline = time.monotonic() + spec.wait_for_server
            while True:
                try:
                    if content is None:
                        reply = self.client.get(address, self.headers, spec.timeout, largest)
                    else:
                        reply = self.client.post(address, content, self.headers, spec.timeout, largest)
                except UnreachableError as error:
                    if not is_up.is_set() and time.monotonic() >= deadline:
                        raise EpisodeError(
                            f"{address} was not there within {spec.wait_for_server:g} seconds ({error}); start the "
                            "server, or change url or wait_for_server of environment.rollout_func"
                        ) from error
                    reason = str(error)
                except LostError as error:
                    raise GoneError(f"{address} did not answer to the end ({error})") from error
                except RequestError as error:  # timed out, too large
                    raise EpisodeError(
                        f"{address} did not answer within {spec.timeout:g} seconds ({error}); start the server, or "
                        "change url or timeout of environment.rollout_func"
                    ) from error
                else:
                    if reply.status not in COMING_UP or (not is_up.is_set() and time.monotonic() >= deadline):
                        is_up.set()
                        return reply
                    reason = f"{reply.status} {reply.reason}"
                if is_up.is_set():
                    raise GoneError(f"{address} is not there any more ({reason})")
                left = max(deadline - time.monotonic(), 0)
                log.warning("%s is not up (%s); %.0f s left", spec.url, reason, left)
                time.sleep(min(2.0, left))

    def accepted(self, address: str, body: dict[str, Any], largest: int = 2**20, refusal: int = 0) -> bytes:
        """The bytes of the reply to a JSON body; raises RefusedError for the status `refusal`, EpisodeError for any
        other that is no success."""
        reply = self.reply(address, json.dumps(body).encode(), largest)
        if not reply.ok:
            text = f"{address} answered {reply.status} {reply.reason}: {reply.data[:300].decode('utf-8', 'replace')}"
            raise (RefusedError if reply.status == refusal else EpisodeError)(text)
        return reply.data

    def answer(self, address: str, body: dict[str, Any], largest: int = 2**20, refusal: int = 0) -> dict[str, Any]:
        """The JSON object of the reply to a JSON body; raises as `accepted`, and EpisodeError for other content."""
        data = self.accepted(address, body, largest, refusal)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EpisodeError(f"{address} answered with something that is not JSON: {error}") from error


def check_temperature(requests: Requests, temperature: float) -> None:
    """Raises EpisodeError unless the log-probs of samples at a temperature are at that temperature, as ours are."""
    if temperature in (0, 1):  # those of every server are at 1
        return
    spec = requests.spec
    address = spec.beside("server_info", "config_format=json")
    reply = requests.reply(address, largest=2**24)
    try:  # vLLM says it with VLLM_SERVER_DEV_MODE=1, and `jaxrl-llm serve` always
        mode = json.loads(reply.data)["vllm_config"]["model_config"]["logprobs_mode"]
    except (ValueError, RecursionError, LookupError, TypeError):
        mode = PROCESSED if spec.processed_logprobs else None
    if mode == PROCESSED:
        return
    fault, say_so = f"{spec.url} gives {mode}, which are no log-probs at the temperature of a request", ""
    if mode is None:
        fault = f"{address} answered {reply.status} without the temperature of the server's log-probs"
        say_so = " and add processed_logprobs=True to server(...)"
    raise EpisodeError(
        f"{fault}, but the trainer's are at rollout.temperature = {temperature:g}: start vLLM with "
        f"--logprobs-mode {PROCESSED}{say_so}, or set rollout.temperature to 1"
    )


def push(requests: Requests, trainer: Any) -> int | None:
    """Give the server the policy's weights; returns their version, None where the server names none.

    Raises GoneError for weights that are no longer there, and EpisodeError for ones that the server does not take.
    """
    spec = requests.spec

    def take(path: str) -> dict[str, Any]:
        """The answer of the server that has taken the weights at `path`, or why it refused a patch, or that it is gone:
        one process asks, and all of them try again."""
        try:
            if spec.vllm:
                requests.accepted(spec.beside("collective_rpc"), {"method": "reload_weights"})
                requests.accepted(spec.beside("reset_prefix_cache"), {})
                return {}
            if spec.local_checkpoint:
                source, _, name = path.rpartition("/")
                body = {
                    "local_checkpoint_dir": spec.local_checkpoint,
                    "source_dir": source,
                    "target_version": int(name.removeprefix("weight_v")),
                }
                requests.accepted(spec.beside("pull_weights"), body, refusal=400)
                path = spec.local_checkpoint
            update = spec.beside("update_weights_from_disk")
            answer = requests.answer(update, {"model_path": path}, refusal=WRONG_BASE)
        except RefusedError as error:
            return {"refused": str(error)}
        except GoneError as error:
            return {"gone": str(error)}
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EpisodeError(f"{update} did not take the weights in {path}: {str(answer)[:300]}")
        return answer

    folder = spec.weights if "://" in spec.weights else os.path.abspath(spec.weights)  # noqa: PTH100
    answer = trainer.publish_weights(folder, take, spec.weights_dtype, spec.full_every)
    if "refused" in answer and spec.full_every > 1:  # such as by a server that was started anew
        log.warning("%s; all weights follow", answer["refused"])
        answer = trainer.publish_weights(folder, take, spec.weights_dtype, spec.full_every, full=True)
    if "gone" in answer:
        raise GoneError(answer["gone"])
    if "refused" in answer:
        raise EpisodeError(answer["refused"])
    return answer.get("weight_version")


def constraints(requests: Requests, args: Any) -> dict[str, Any]:
    """The fields of a request for those of CONSTRAINTS that the run samples by, under the server's names of them.

    Raises EpisodeError for what SGLang does not know: it would pass over it.
    """
    url, fields = requests.spec.url, {name: value for name in CONSTRAINTS if (value := vars(args).get(name))}
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(args.logit_bias)
    if not fields.keys() & {"bad_words", "structured_outputs"}:
        return fields
    try:
        models = json.loads(requests.reply(requests.spec.below("models"), largest=2**24).data)
        owner = models["data"][0]["owned_by"]
    except (ValueError, RecursionError, LookupError, TypeError):
        owner = None
    if owner != "sglang":
        return fields
    if "bad_words" in fields:
        raise EpisodeError(
            f"{url} is SGLang's, which knows no bad_words: leave rollout.bad_words out, or forbid single tokens by "
            "rollout.logit_bias"
        )
    ((kind, value),) = fields.pop("structured_outputs").items()
    if kind == "grammar":
        raise EpisodeError(
            f"{url} is SGLang's, which does not read the syntax of rollout.structured_grammar: write it as "
            "rollout.structured_regex, structured_json or structured_choice"
        )
    if kind == "choice":  # as vLLM writes them for the same libraries
        kind, value = "grammar", "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    return fields | {SGLANG[kind]: value}


def choices(
    requests: Requests, version: int | None, fields: dict[str, Any], trainer: Any, prompt: list[int]
) -> list[dict[str, Any]]:
    """The completions of a prompt, sampled under the constraints in `fields` and with weights of `version`.

    Raises EpisodeError for fewer or more of them than were asked for, and for those of other weights.
    """
    spec, args, endpoint = requests.spec, trainer.args, requests.spec.below("completions")
    body = {
        "model": spec.model,
        "prompt": prompt,
        "n": trainer.num_generations,
        "max_tokens": args.max_completion_length,
        # At their defaults too: vLLM takes what is left out from the generation_config.json of its model.
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "frequency_penalty": args.frequency_penalty,
        "presence_penalty": args.presence_penalty,
        **fields,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = requests.answer(
        endpoint, body, 2**20 + BYTES_PER_TOKEN * trainer.num_generations * args.max_completion_length
    )
    found = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(choice, dict) for choice in found):
        raise EpisodeError(f"{endpoint} answered without a list of choices: {str(answer)[:300]!r}")
    versions = {answer.get(name, version) for name in ("weight_version", "newest_weight_version")} - {version}
    if version is not None and versions:
        raise EpisodeError(
            f"{endpoint} sampled with version {versions.pop()} of its weights, but those of the policy are version "
            f"{version}: let nobody else push weights to it"
        )
    if len(found) != trainer.num_generations:
        raise EpisodeError(f"{spec.url} returned {len(found)} choices of the {trainer.num_generations} asked for")
    return found


def _values(url: str, holder: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(holder.get(name), list):
        raise EpisodeError(
            f"{url} returned no {name}; training needs the token ids and log-probs of the samples: use a server that "
            "knows return_token_ids, such as vLLM 0.10.2 or later"
        )
    return holder[name]
