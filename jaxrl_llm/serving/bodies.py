"""Requests as typed values: the JSON bodies of OpenAI's chat and text completions, checked field by field.

Fields of vLLM that its clients send are known too. A field that is not known, or that asks for something that is not
there, is refused by its name: an answer that leaves out a wish would look as if it had followed it.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.config.schema import Setting, sampling_option
from jaxrl_llm.data.image_rows import ImageReader, ImageText, Tiles
from jaxrl_llm.data.images import ImageLimits
from jaxrl_llm.data.templates import render_prompt
from jaxrl_llm.rollout.constraints import bad_word_ids
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.grid import LONGEST_WORD, MOST_BIASES, MOST_ENDS, MOST_PROMPT_TOP, MOST_TOP, MOST_WORDS
from jaxrl_llm.serving.guides import guide_of
from jaxrl_llm.serving.prompts import chat_prompt, is_list, text_prompts
from jaxrl_llm.serving.thoughts import tell_effort, template_of

MOST_STOPS, LONGEST_STOP = 16, 1024  # stop strings of a request, and their characters
MOST_COUNT = 10**9  # of what is counted in int32
DEFAULT_TOKENS = 16  # of a text completion that says no max_tokens, as OpenAI has it

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("n", 1, "", int, minimum=1, maximum=128),
        sampling_option("temperature", 1.0),
        sampling_option("top_p", 1.0),
        sampling_option("top_k", 0, minimum=-1, maximum=MOST_COUNT),  # -1 is off too, as in vLLM
        sampling_option("min_p", 0.0),
        sampling_option("repetition_penalty", 1.0),
        sampling_option("frequency_penalty", 0.0),
        sampling_option("presence_penalty", 0.0),
        sampling_option("min_tokens", 0, minimum=0, maximum=MOST_COUNT),
        Setting("seed", None, "", int, minimum=-(2**63), maximum=2**63 - 1),
        Setting("max_tokens", None, "", int, minimum=0, maximum=MOST_COUNT),
        Setting("max_completion_tokens", None, "", int, minimum=1, maximum=MOST_COUNT),
        Setting("stream", False, "", bool),
        Setting("ignore_eos", False, "", bool),
        Setting("skip_special_tokens", True, "", bool),
        Setting("echo", False, "", bool),
        Setting("include_stop_str_in_output", False, "", bool),
        Setting("parallel_tool_calls", True, "", bool),
        Setting("separate_reasoning", False, "", bool),  # as SGLang names it
        Setting("return_token_ids", False, "", bool),
        Setting("return_tokens_as_token_ids", False, "", bool),
    )
}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SAMPLING = ("temperature", "top_p", "min_p", "min_tokens", *PENALTIES)
CHAT = {"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "logprobs", "top_logprobs",
        "separate_reasoning", "reasoning_effort", "add_generation_prompt", "continue_final_message"}  # fmt: skip
TEXT = {"prompt", "logprobs", "echo", "prompt_logprobs"}
GUIDES = {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
COMMON = {"model", "stop", "stop_token_ids", "stream_options", "logit_bias", "bad_words", *GUIDES, *SETTINGS}
COMMON -= {"echo", "parallel_tool_calls", "separate_reasoning"}
# They say who asks, and how the answer is billed, kept and sped up: no answer depends on them. So it is with
# spaces_between_special_tokens, of tokenizers written in Python, which trainers send.
WITHOUT_EFFECT = {"user", "metadata", "safety_identifier", "service_tier", "request_id", "priority", "prediction",
                  "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt",
                  "spaces_between_special_tokens"}  # fmt: skip
# The value of a field at which it asks for nothing; another one is refused.
NEUTRAL = {
    "detokenize": True,
    "length_penalty": 1,
    "best_of": 1,
    "suffix": "",
    "store": False,
    "use_beam_search": False,
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
    "modalities": ["text"],
    "verbosity": "medium",
    "allowed_token_ids": None,
    "web_search_options": None,
    "moderation": None,
    "audio": None,
    "chat_template": None,
    "functions": None,
    "function_call": None,
    "truncate_prompt_tokens": None,
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: its prompts as token ids, and how each is to be completed and shown."""

    prompts: list[list[int]]
    chat: bool
    model: str
    limits: list[int]  # the most tokens of a completion of each prompt; 0: the prompt is scored alone
    n: int
    sampling: SamplingParams
    seed: int | None
    ends: tuple[int, ...]
    stop: tuple[str, ...]
    logprobs: int | None  # of so many likeliest tokens beside the sampled one; None: no log-probs
    stream: bool
    include_usage: bool
    tools: tuple[Mapping[str, Any], ...]  # those that the answer may call
    skip_special_tokens: bool
    include_stop: bool
    return_token_ids: bool
    tokens_as_ids: bool
    texts: tuple[str | None, ...]  # of the prompts of a text completion; None: it came as token ids
    continues: bool  # the completion goes on with a text, or with the last message: it is no turn of its own
    parallel_calls: bool  # the answer may give more than one call
    apart: bool  # its thoughts are told apart from its text
    echo: bool  # the prompt stands before its completion
    prompt_logprobs: int | None  # so many likeliest tokens at each place of the prompt
    guide: tuple[str, str] | None  # a grammar that the answer follows (guides.py), and the field that asked
    tiles: Tiles | None  # of the images of the one prompt of a chat, as long as they are not decoded
    pixels: Sequence[np.ndarray] | None = None  # each [H,W,C] fp32, when they are


def parse_json(data: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises BadRequestError."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise BadRequestError(f"the body is a JSON {type(body).__name__}; it must be an object")
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # as no answer could repeat it
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"the body has text that is no Unicode: half of a surrogate pair, {error.reason}"
        ) from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    return body


@functools.lru_cache(8)
def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """The ids of the special tokens; some tokenizers have thousands, each of them an object that it makes anew."""
    return {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


@functools.lru_cache(8)
def _image_reader(tokenizer: Any, limits: ImageLimits) -> ImageReader:
    """The reader of a model's images, which reads the files of its processor once."""
    return ImageReader(tokenizer, limits=limits)


def parse(
    body: Mapping[str, Any], chat: bool, tokenizer: Any, models: Sequence[str], eos: tuple[int, ...], longest: int,
    vocabulary: int, most_rows: int, render: Callable[..., list[int]] | None = None,
    images: ImageLimits = ImageLimits(),  # noqa: B008 (immutable)
) -> Asked:  # fmt: skip
    """The checked request of a body. Raises BadRequestError, which names the field, or RecursionError.

    longest: the most tokens of a prompt and its completion; vocabulary: token ids are below it; most_rows: completions
    of a request; images: bounds of those. `render(prompt, tools, options)` makes token ids of a text, or of messages,
    in place of `render_prompt`.
    """

    def rendered(prompt: Any, tools: Any = None, options: Any = None, images: ImageText | None = None) -> list[int]:
        return render_prompt(tokenizer, prompt, tools, options, None if images is None else images.expand)

    reader = _image_reader(tokenizer, images) if getattr(tokenizer, "image_folder", None) is not None else None
    render = render or rendered
    _check_fields(body, chat)
    model = body.get("model") or models[0]
    if model not in models:
        raise BadRequestError(
            f"there is no model {model!r:.100}; this server has {', '.join(models)}", 404, "model_not_found", "model"
        )
    values = {name: setting.default for name, setting in SETTINGS.items()}
    for name, setting in SETTINGS.items():
        if (value := body.get(name)) is not None:
            if not setting.accepts(value):
                raise BadRequestError(f"{name} is {value!r:.100}, but it takes {setting.allowed}", param=name)
            values[name] = value
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping) or not all(
        name in ("include_usage", "include_obfuscation") and isinstance(value, bool) for name, value in options.items()
    ):
        raise BadRequestError(
            f"stream_options is {options!r:.100}; it takes include_usage, which is true or false",
            param="stream_options",
        )
    stop, ends = _stops(body, tokenizer, vocabulary, () if values["ignore_eos"] else eos)
    tools: list[dict[str, Any]] = []
    texts: list[str | None] = []
    prompt_logprobs = tiles = None
    continues = True
    if chat:
        tools = _callable_tools(body)
        if (effort := body.get("reasoning_effort")) is not None:
            body = dict(body)
            tell_effort(body, effort, template_of(tokenizer), "reasoning_effort", effort)
        prompt, tiles = chat_prompt(body, tokenizer, render, reader, longest)
        continues = body["messages"][-1]["role"] == "assistant"
        for name, given in {"add_generation_prompt": not continues, "continue_final_message": continues}.items():
            if (value := body.get(name)) not in (None, given):
                raise BadRequestError(
                    f"{name} is {value!r:.100}, but an answer goes on with a last message of the assistant, and is a "
                    "turn of its own behind any other: leave it out",
                    code="unsupported",
                    param=name,
                )
        prompts = [prompt]
        logprobs = _top_logprobs(body)
    else:
        texts, prompts = text_prompts(body, vocabulary, render, reader, max(most_rows // values["n"], 1), longest)
        logprobs, prompt_logprobs = _count(body, "logprobs", MOST_TOP), _count(body, "prompt_logprobs", MOST_PROMPT_TOP)
        if values["stream"] and (values["echo"] or prompt_logprobs is not None):
            raise BadRequestError("echo and prompt_logprobs are not for streams", code="unsupported", param="stream")
    guide = guide_of(body, tools, tokenizer)
    sampling = SamplingParams(
        top_k=max(values["top_k"], 0), logit_bias=_biases(body, vocabulary), bad_words=_bad_words(body, tokenizer),
        **{name: values[name] for name in SAMPLING},
    )  # fmt: skip
    asked_tokens = values["max_completion_tokens"] or values["max_tokens"]
    if asked_tokens == 0 and prompt_logprobs is None and not (values["echo"] and not chat):
        raise BadRequestError(
            "max_tokens is 0, for which there is nothing to answer without echo or prompt_logprobs of a text "
            "completion: ask for 1 or more",
            param="max_tokens",
        )
    limits = [_limit(prompt, chat, asked_tokens, values["min_tokens"], longest) for prompt in prompts]
    return Asked(
        prompts=prompts, chat=chat, model=model, limits=limits, n=values["n"], sampling=sampling, seed=values["seed"],
        ends=ends, stop=stop, logprobs=logprobs, stream=values["stream"],
        include_usage=bool(options.get("include_usage")), tools=tuple(tools),
        skip_special_tokens=values["skip_special_tokens"], include_stop=values["include_stop_str_in_output"],
        return_token_ids=values["return_token_ids"], tokens_as_ids=values["return_tokens_as_token_ids"],
        texts=tuple(texts), continues=continues, parallel_calls=values["parallel_tool_calls"],
        apart=values["separate_reasoning"] and guide is None,  # an answer of a form begins with that
        echo=values["echo"], prompt_logprobs=prompt_logprobs, guide=guide, tiles=tiles,
    )  # fmt: skip


def _check_fields(body: Mapping[str, Any], chat: bool) -> None:
    """Refuses fields that do not exist, and those that this server has not, unless they ask for nothing."""
    known = COMMON | (CHAT if chat else TEXT)
    neutral = NEUTRAL | {"add_special_tokens": not chat}  # a chat template writes them itself
    for name, value in body.items():
        if name in known or name in WITHOUT_EFFECT or value is None:
            continue
        if name not in neutral:
            raise BadRequestError(
                f"there is no field {name!r:.100}; the closest is {closest(name[:100], known)}", param=name[:100]
            )
        if value != neutral[name] and not (name == "best_of" and value == body.get("n", 1)):
            raise BadRequestError(
                f"{name} is {value!r:.100}, but this server has no {name}: leave it out", code="unsupported", param=name
            )


def _stops(
    body: Mapping[str, Any], tokenizer: Any, vocabulary: int, eos: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts that end a row, and the ids: the model's own `eos` and those of the request."""
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not is_list(stop, str) or len(stop) > MOST_STOPS or "" in stop:
        raise BadRequestError(f"stop takes a text or up to {MOST_STOPS} texts, none of them empty", param="stop")
    if (longest := max(map(len, stop), default=0)) > LONGEST_STOP:
        raise BadRequestError(f"stop has a text of {longest} characters; up to {LONGEST_STOP} are taken", param="stop")
    ends = body.get("stop_token_ids") or []
    if not is_list(ends, int) or not all(0 <= index < vocabulary for index in ends):
        raise BadRequestError(f"stop_token_ids takes a list of ids below {vocabulary}", param="stop_token_ids")
    # A special token writes nothing that a stop string could be found in: one that is named ends the row by its id.
    named = (special for text in stop if (special := _special_tokens(tokenizer).get(text)) is not None)
    ends = tuple(dict.fromkeys((*ends, *named, *eos)))
    if len(ends) > MOST_ENDS:
        raise BadRequestError(
            f"a row ends with up to {MOST_ENDS} ids, the model's own among them; there are {len(ends)}",
            param="stop_token_ids",
        )
    return tuple(stop), ends


def _limit(prompt: Sequence[int], chat: bool, asked: int | None, least: int, longest: int) -> int:
    """The most tokens of the completion of a prompt: as `asked`, which is `least` or more and fits behind it."""
    room = longest - len(prompt)
    if not prompt:
        raise BadRequestError("the prompt has no tokens", param="messages" if chat else "prompt")
    limit = max(room if chat else min(room, DEFAULT_TOKENS), 1) if asked is None else asked
    if limit > room:
        raise BadRequestError(
            f"this model's rows have {longest} tokens; the prompt has {len(prompt)}, and {limit} are asked for as its "
            "completion",
            code="context_length_exceeded",
            param="messages" if chat else "prompt",
        )
    if least > limit:
        raise BadRequestError(
            f"min_tokens is {least}, more than the {limit} tokens of the completion", param="min_tokens"
        )
    return limit


def _count(body: Mapping[str, Any], name: str, most: int) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most):
        raise BadRequestError(f"{name} is {value!r:.100}; it takes a number from 0 to {most}", param=name)
    return value


def _biases(body: Mapping[str, Any], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """`logit_bias`: an object of token ids, as texts of JSON are, and what is added to their logits."""
    given: Any = body.get("logit_bias") or {}
    found: dict[int, float] = {}
    for token, bias in given.items() if isinstance(given, Mapping) else [("", 0)]:
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= 100
        if not is_number or not re.fullmatch("[0-9]{1,9}", token) or int(token) >= vocabulary:
            raise BadRequestError(
                f"logit_bias takes an object of token ids below {vocabulary} and numbers from -100 to 100, not "
                f"{given!r:.100}",
                param="logit_bias",
            )
        found[int(token)] = float(bias)
    if len(found) > MOST_BIASES:
        raise BadRequestError(f"logit_bias has {len(found)} tokens; up to {MOST_BIASES} are taken", param="logit_bias")
    return tuple(found.items())


def _bad_words(body: Mapping[str, Any], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `bad_words`, as `constraints.bad_word_ids` reads them."""
    words = body.get("bad_words") or []
    if not is_list(words, str) or len(words) > MOST_WORDS:
        raise BadRequestError(f"bad_words takes a list of up to {MOST_WORDS} texts", param="bad_words")
    try:
        found = bad_word_ids("bad_words", words, tokenizer)
    except ConfigError as error:
        raise BadRequestError(str(error), param="bad_words") from None
    if len(found) > MOST_WORDS or any(len(word) > LONGEST_WORD for word in found):
        raise BadRequestError(
            f"bad_words are up to {MOST_WORDS} sequences of up to {LONGEST_WORD} tokens", param="bad_words"
        )
    return found


def _callable_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that the answer may call: all, the named one, or none."""
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    functions = [tool.get("function") for tool in tools] if is_list(tools, dict) else [None]
    if not all(isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions):
        raise BadRequestError('tools takes a list of {"type": "function", "function": {"name": ...}}', param="tools")
    names = [tool["function"].get("name") for tool in tools]
    for name, tool in zip(names, tools, strict=True):
        if not isinstance(parameters := tool["function"].get("parameters") or {}, Mapping):
            raise BadRequestError(
                f"tools has the parameters {parameters!r:.100} of {name!r:.100}; they are an object, a JSON schema",
                param="tools",
            )
    if isinstance(choice, Mapping):
        function = choice.get("function")
        named = function.get("name") if choice.get("type") == "function" and isinstance(function, Mapping) else None
        if named is None or named not in names:
            raise BadRequestError(f"tool_choice is {choice!r:.100}, which names none of the tools", param="tool_choice")
        return [tool for tool in tools if tool["function"].get("name") == named]
    if choice not in (None, "auto", "none", "required") or (choice == "required" and not tools):
        raise BadRequestError(
            f"tool_choice is {choice!r:.100}; it takes auto, none, and where there are tools required or one of them",
            param="tool_choice",
        )
    return [] if choice == "none" else tools


def _top_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted, top = body.get("logprobs"), _count(body, "top_logprobs", MOST_TOP)
    if wanted is not None and not isinstance(wanted, bool):
        raise BadRequestError(f"logprobs is {wanted!r:.100}; in a chat it takes true or false", param="logprobs")
    if top and not wanted:
        raise BadRequestError("top_logprobs is given without logprobs=true", param="top_logprobs")
    return (top or 0) if wanted else None
