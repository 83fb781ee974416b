"""Endpoints that trainers expect of a rollout server besides OpenAI's: those of TRL and axolotl, and new weights.

TRL 1.16 samples by `/v1/completions`, earlier versions and axolotl by `/generate/` and `/chat/`. They push weights by
NCCL, which is refused here by name: weights come by files, `/update_weights_from_disk` as in SGLang.
"""

import dataclasses
import functools

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.answers import Answer
from jaxrl_llm.serving.app import Server
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError

# Fields of `/generate/` and `/chat/` that have another name in a completion.
REGEX = ("structured_outputs_regex", "guided_decoding_regex")
BY_NCCL = (
    "/init_communicator/",
    "/update_named_param/",
    "/batch_update_named_params/",
    "/close_communicator/",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
# Fields of SGLang's `/update_weights_from_disk` beside the path, at the values that it has here.
OF_UPDATE = {"load_format": "auto", "abort_all_requests": False, "flush_cache": True, "keep_pause": False,
             "is_async": False, "torch_empty_cache": False, "recapture_cuda_graph": False}  # fmt: skip


async def _sampled(server: Server, request: Request, chat: bool) -> Response:
    """The answer of TRL's own server: `prompt_ids`, `completion_ids` and their log-probs, rows of a prompt adjacent.

    With `logprobs` in the request they are lists of the likeliest, as TRL 1.0 to 1.15 read them, with the sampled token
    among them; without it one number a token, as earlier versions.
    """
    body = await server.body(request)
    nested = "logprobs" in body
    further = body.pop("generation_kwargs", None) or {}
    if not isinstance(further, dict):
        raise BadRequestError("generation_kwargs takes an object", param="generation_kwargs")
    body |= further
    if body.pop("images", None):
        raise BadRequestError("images is given; this endpoint takes text alone", param="images")
    for name in REGEX:
        if (pattern := body.pop(name, None)) is not None:
            body["guided_regex"] = pattern
    asked_logprobs = body.pop("logprobs", 0)
    name = "messages" if chat else "prompts"
    given = body.pop(name, None)
    if not isinstance(given, list) or not given:
        raise BadRequestError(f"{name} takes a list", param=name)
    if chat:
        logprobs = {"logprobs": asked_logprobs is not None, "top_logprobs": asked_logprobs}
        bodies = [{"messages": messages, **logprobs, **body} for messages in given]
    else:
        bodies = [{"prompt": given, "logprobs": asked_logprobs, **body}]
    if len(bodies) > server.limits.rows:
        raise BadRequestError(f"{name} has {len(bodies)} entries; up to {server.limits.rows} are taken", param=name)
    each = [await server.asked({"max_tokens": 16, **body}, chat) for body in bodies]
    if any(asked.pixels is not None for asked in each):
        raise BadRequestError("messages has images; this endpoint takes text alone", param=name)
    prompts, limits = ([x for asked in each for x in getattr(asked, name)] for name in ("prompts", "limits"))
    answer = Answer(server, dataclasses.replace(each[0], prompts=prompts, limits=limits, tools=()))
    try:
        await server.unless_left(request, answer.finished())
    finally:
        answer.close()
    choices, found = answer.choices, None
    if asked_logprobs is not None:
        found = [_likeliest(choice) if nested else [([], choice.logps)] for choice in choices]
    return JSONResponse(
        {
            "prompt_ids": prompts,
            "completion_ids": [choice.ids for choice in choices],
            "logprobs": found and [[logps for _, logps in row] if nested else row[0][1] for row in found],
            "logprob_token_ids": found and ([[ids for ids, _ in row] for row in found] if nested else None),
        }
    )


def _likeliest(choice: Choice) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs at each place, likeliest first, the sampled token among them."""
    rows = []
    for index, logp, (ids, logps) in zip(choice.ids, choice.logps, choice.top, strict=True):
        both = sorted({**dict(zip(ids, logps, strict=True)), index: logp}.items(), key=lambda pair: -pair[1])
        rows.append(([index for index, _ in both], [logp for _, logp in both]))
    return rows


async def generate(server: Server, request: Request) -> Response:
    """POST /generate/ of TRL's server: completions of texts or token ids."""
    return await _sampled(server, request, chat=False)


async def chat(server: Server, request: Request) -> Response:
    """POST /chat/ of TRL's server: completions of conversations."""
    return await _sampled(server, request, chat=True)


async def world_size(server: Server, request: Request) -> Response:
    """The number of workers that take weights: the server is one."""
    return JSONResponse({"world_size": 1})


async def server_info(server: Server, request: Request) -> Response:
    """Answer TRL's questions: there is no process group for weights, and log-probs are at a request's temperature."""
    model = {"logprobs_mode": "processed_logprobs"}
    config = {"weight_transfer_config": None, "max_model_len": server.limits.tokens, "model_config": model}
    return JSONResponse({"vllm_config": config, "weight_version": server.queue.counts.weight_version})


async def reset_prefix_cache(server: Server, request: Request) -> Response:
    """Forgets the texts that are kept; new weights do so by themselves."""
    await server.queue.called(server.queue.clear_prefixes)
    return JSONResponse({"success": True, "message": "no texts are kept"})


async def by_nccl(server: Server, request: Request) -> Response:
    """Always an error that says how weights come here."""
    raise BadRequestError(
        f"{request.scope['path']} is for weights by NCCL, which this server has not: save the model to a folder that "
        "both see, and POST its path to /update_weights_from_disk as model_path",
        501,
        "unsupported",
    )


async def update_weights(server: Server, request: Request) -> Response:
    """Replaces the weights by those of a folder, from the next chunk of steps on; answers when they are in place.

    Rows under way go on, with the caches of the earlier weights. A patch of other weights than those that are held is
    answered with status 409, and then all weights have to come. Raises BadRequestError for other fields, and where the
    server takes no weights.
    """
    body = await server.body(request)
    path = body.get("model_path")
    for name, value in body.items():
        if name != "model_path" and value is not None and value != OF_UPDATE.get(name):
            raise BadRequestError(
                f"{name} is {value!r:.100}, which an update here has not; it takes model_path", code="unsupported",
                param=name,
            )  # fmt: skip
    if server.load is None:
        raise BadRequestError("weights stay as they are: start the server with --weight_updates", 403, "unsupported")
    async with server.loading:  # one at a time, in the order in which they were asked for
        params = await server.loaded(server.load, path, "model_path")
        await server.queue.called(functools.partial(server.queue.replace, params))
        del params
        version = server.queue.counts.weight_version
    return JSONResponse({"success": True, "message": f"weights of {path}", "weight_version": version})


ROUTES = (
    ("/generate/", "POST", generate),
    ("/chat/", "POST", chat),
    ("/get_world_size", "GET", world_size),
    ("/server_info", "GET", server_info),
    ("/reset_prefix_cache", "POST", reset_prefix_cache),
    ("/update_weights_from_disk", "POST", update_weights),
    *((path, "POST", by_nccl) for path in BY_NCCL),
)
