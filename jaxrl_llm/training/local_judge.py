"""Judges whose model the run loads: `judge(path=...)` and `pairwise_judge(path=...)` in `rewards.functions`.

The judge asks as it asks a server; `LocalEndpoint` answers, in the thread that waits for the rewards. All rows of a
batch ask first, then their prompts are answered together, and those whose replies could not be read ask again.
"""

import copy
import functools
import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.config.schema import SAMPLING_OPTIONS, sampling_option
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.detokenize import Detokenizer
from jaxrl_llm.data.named_templates import with_chat_template
from jaxrl_llm.data.templates import render_prompt
from jaxrl_llm.distributed.sharding import make_mesh, on_device, rollout_mesh, row_sharding, row_shards
from jaxrl_llm.distributed.turns import turn
from jaxrl_llm.models.families.rotary import max_positions
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import Model, check_positions, check_tokenizer, describe, load_model
from jaxrl_llm.models.rope import check_length
from jaxrl_llm.rewards.combined import CombinedGrader
from jaxrl_llm.rewards.endpoint import Answer, EndpointError
from jaxrl_llm.rewards.judge import JudgeSpec
from jaxrl_llm.rollout.engine import COMPILE_WORK, Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.reward_models import offloaded, row_width
from jaxrl_llm.training.setup.worker import eos_ids

Loaded = dict[Any, tuple[Model, Mesh]]  # by path and settings

DEFAULT_LENGTH = 4096  # as of `jaxrl_llm serve`
# The judge's `parameters`, by the names that servers have for them.
SAMPLING = tuple(sampling_option(name, getattr(SamplingParams().greedy, name)) for name in SAMPLING_OPTIONS)
OTHERS = (Setting("max_tokens", None, "", int, minimum=1), Setting("seed", 0, "", int, minimum=0))
PARAMETERS = {setting.name: setting for setting in (*SAMPLING, *OTHERS)}
LIMITS = (Setting("rows", 32, "", int, minimum=1), Setting("max_length", None, "", int, minimum=2))


class LocalJudge:
    """The grader of a `Judge` or `PairwiseJudge` with a path, whose model is loaded here and answers in this process.

    `loaded` are the models of other judges, by path and settings, which are shared. Not async: as a reward model it is
    called when sampling is over, in the thread that waits for the rewards, and starts no program beside others.
    Raises ConfigError for a path without a model, tokenizer or chat template, and for a setting that it cannot have.
    """

    def __init__(self, judge: Any, loaded: Loaded | None = None):
        self.judge, self.name = copy.copy(judge), judge.name
        vars(self.judge)["endpoint"] = LocalEndpoint(judge, {} if loaded is None else loaded)
        self.__signature__ = inspect.signature(judge)

    def __call__(self, *batch: Any, **arguments: Any) -> list[Any]:
        """The rewards that the judge gives for the batch."""
        call = self.judge(*batch, **arguments)
        try:
            call.send(None)
        except StopIteration as end:
            return end.value
        call.close()
        raise ConfigError(f"the judge {self.name!r} waits for something beside its model: give it the url of a server")


def with_local_model(grader: Any, loaded: Loaded) -> Any:
    """The grader, or where it is a judge with a path, the `LocalJudge` that loads its model.

    Raises ConfigError for a judge with a path that is part of another grader.
    """
    if isinstance(grader, JudgeSpec) and grader.path is not None:
        return LocalJudge(grader, loaded)
    for part in _parts(grader):
        if isinstance(part, JudgeSpec) and part.path is not None:
            raise ConfigError(
                f"the judge {part.name!r} has a path and is part of {grader.name!r}, whose graders run beside the "
                "devices' other work: name it in rewards.functions itself, with its weight in rewards.weights"
            )
    return grader


def _parts(grader: Any) -> Iterator[Any]:
    """The graders that a combined one adds up, at every depth."""
    for part in grader.originals if isinstance(grader, CombinedGrader) else ():
        yield part
        yield from _parts(part)


class LocalEndpoint:
    """Answers a judge's messages with its own model, as an `Endpoint` does with those of a server.

    The model is spread over this process's devices, which no other process waits for.
    """

    def __init__(self, spec: JudgeSpec, loaded: Loaded):
        what, (values, options) = f"the judge {spec.name!r}", reply_options(spec)
        find = functools.partial(hf.find_tokenizer, trust_remote_code=spec.trust_remote_code)
        key = (spec.path, spec.dtype, spec.offload, spec.tokenizer, spec.trust_remote_code)
        if key not in loaded:
            loaded[key] = _load(spec, find)
        model, mesh = loaded[key]
        if spec.chat_template is not None:
            setting = f"the chat_template of {what}"
            find = functools.partial(find, setting=setting)
            model = replace(model, tokenizer=with_chat_template(model.tokenizer, spec.chat_template, find, setting))
        self.model, self.mesh = model, mesh
        self.options, self.seed, self.most = options, values["seed"], values["max_tokens"]
        self.length = row_length(spec, model.hf_config or {})
        check_positions(model, self.length, f"max_length of {what}")
        if self.most is not None and self.most >= self.length:
            raise ConfigError(
                f"{what} has max_tokens = {self.most}, but its rows have {self.length} tokens (max_length), prompt and "
                "reply together: give fewer"
            )
        self.rows = -(-spec.rows // row_shards(mesh)) * row_shards(mesh)
        # Rows are padded on the left to at most `length`, and completed by as many tokens as are asked for.
        check_length(model.net.config.rope, self.length + (self.most or self.length))
        self.engine = Engine(sampling_of(values), 1, self.most or self.length, compile_work=COMPILE_WORK,
                             net=model.net, eos=eos_ids(model))  # fmt: skip
        self.counts: Counter[str] = Counter()
        self._ids([{"role": "system", "content": spec.system}] * bool(spec.system) + [{"role": "user", "content": "?"}])

    async def ask(self, messages: list[dict[str, str]], memory: dict[str, Any], attempt: int = 0) -> Answer:
        """The reply to `messages`, computed once for equal messages with the same `memory`, a dictionary.

        `attempt` draws another one, save where the likeliest tokens are taken. Raises EndpointError for messages that
        leave no room for the reply.
        """
        name = json.dumps([messages, attempt if self.engine.sampling.temperature else 0])
        if name not in memory:
            ids = self._ids(messages)
            room = self.length - len(ids)
            if room < (self.most or 1):
                self.counts["failures"] += 1
                raise EndpointError(
                    f"the prompt has {len(ids)} tokens and its reply up to {self.most or 1}, but rows have "
                    f"{self.length} (max_length)"
                )
            memory[name] = Request(name, ids, self.most or room)
        return await memory[name]

    async def gather(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        """The results of coroutines that ask: those that wait are answered together, until all have ended."""
        results: dict[int, Any] = {}
        running = dict(enumerate(coroutines))
        try:
            while running:
                requests: list[Request] = []
                for number, coroutine in list(running.items()):
                    try:
                        requests.append(coroutine.send(None))
                    except StopIteration as end:
                        results[number] = end.value
                        del running[number]
                self._answer(sorted(dict.fromkeys(requests), key=lambda request: len(request.ids)))
        finally:
            for coroutine in running.values():  # where one of them, or an answer, has raised
                coroutine.close()
        return [results[number] for number in range(len(coroutines))]

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call of this."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        return render_prompt(self.model.tokenizer, messages, None, self.options)

    def _answer(self, requests: "Sequence[Request]") -> None:
        """Give each request its answer; they are in the order of their lengths, so that little is padded."""
        with jax.set_mesh(self.mesh), turn():
            params = on_device(self.model.params) if requests else {}
            for start in range(0, len(requests), self.rows):
                self._answer_rows(params, requests[start : start + self.rows])

    def _answer_rows(self, params: Any, requests: "Sequence[Request]") -> None:
        width = min(row_width(len(requests[-1].ids)), self.length)
        spare = self.rows - len(requests)  # copies of the last row, so that every call has the same shape
        padded = pad_prompts([*(request.ids for request in requests), *[requests[-1].ids] * spare], width)
        prompts, segments = jax.device_put(padded, row_sharding(self.mesh))
        limits = np.array([*(request.limit for request in requests), *[1] * spare], np.int32)
        # The same requests draw the same numbers, in a run that is resumed too.
        digest = hashlib.sha256("\n".join(request.name for request in requests).encode()).digest()
        key = jax.random.fold_in(jax.random.key(self.seed), int.from_bytes(digest[:4], "big"))
        rollout = self.engine.generate(params, prompts, segments, key, limits=limits)
        tokens, lengths, finished = (np.asarray(x) for x in (rollout.tokens, rollout.lengths, rollout.finished))
        for row, request in enumerate(requests):
            count = int(lengths[row])
            ids = tokens[row, width : width + count - finished[row]].tolist()  # the token that ends it is no text
            text = Detokenizer(self.model.tokenizer).add(ids, final=True)
            request.answer = Answer(text, len(request.ids), count, cached=False)
            self.counts.update(requests=1, prompt_tokens=len(request.ids), completion_tokens=count)


def reply_options(spec: JudgeSpec) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The values of `PARAMETERS` for a judge with a path, and what it gives its chat template.

    Raises ConfigError for a parameter that there is not, and a value or a limit that it does not take.
    """
    what = f"the judge {spec.name!r}"
    values = {name: setting.default for name, setting in PARAMETERS.items()} | dict(spec.parameters or {})
    options = values.pop("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"{what} has chat_template_kwargs = {options!r}; it takes a dictionary")
    if unknown := [name for name in values if name not in PARAMETERS]:
        raise ConfigError(
            f"{what} has the parameter {unknown[0]!r}; with a path there are {', '.join(PARAMETERS)} and "
            f"chat_template_kwargs; the closest is {closest(unknown[0], PARAMETERS)}"
        )
    for setting in (*PARAMETERS.values(), *LIMITS):
        value = values[setting.name] if setting.name in values else getattr(spec, setting.name)
        if not setting.accepts(value):
            raise ConfigError(f"{what} has {setting.name} = {value!r}; it takes {setting.allowed}")
    return values, options


def sampling_of(values: Mapping[str, Any]) -> SamplingParams:
    """The sampling settings of the replies of a judge with these `reply_options`."""
    return SamplingParams(**{setting.name: values[setting.name] for setting in SAMPLING})


def row_length(spec: JudgeSpec, hf_config: dict[str, Any]) -> int:
    """The most tokens of a prompt of the judge and its reply together, of a model with this config.json."""
    return spec.max_length or min(max_positions(hf_config) or DEFAULT_LENGTH, DEFAULT_LENGTH)


class Request:
    """A prompt's token ids and the most tokens of its reply; whoever awaits it gets the answer, once it is there."""

    def __init__(self, name: str, ids: list[int], limit: int):
        self.name, self.ids, self.limit = name, ids, limit
        self.answer: Answer | None = None

    def __await__(self) -> Generator["Request", None, Answer]:
        while self.answer is None:
            yield self
        return self.answer


def _load(spec: JudgeSpec, find: Any) -> tuple[Model, Mesh]:
    """The model of a judge and the mesh of this process's devices; in the host's memory where it is to wait there."""
    path, tokenizer = str(spec.path), spec.tokenizer
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = find(os.fspath(tokenizer), setting=f"the tokenizer of the judge {spec.name!r}")
    # Layers apart, as they decode: no batch takes them out of their stack first.
    options = {
        "dtype": spec.dtype, "head": "lm", "tokenizer": copy.deepcopy(tokenizer), "scan_layers": False,
        "trust_remote_code": spec.trust_remote_code,
    }  # fmt: skip
    mesh = make_mesh(data=1, fsdp=-1, devices=jax.local_devices())
    if mesh.size > 1:
        mesh = rollout_mesh(mesh, "auto", describe(path, **options).net.config.kv_heads)
    with jax.set_mesh(mesh):
        model = load_model(path, mesh=mesh, **options)
        check_tokenizer(model)
        return (offloaded(model) if spec.offload else model), mesh
