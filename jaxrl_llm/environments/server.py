"""Sampling from a server of the OpenAI kind, such as vLLM's: `environment.rollout_func="server(url=..., model=...)"`.

The server samples with the weights it was started with: its policy stays while the trained one moves on, so that
`algorithm.importance_correction` has to weigh what comes from it.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrl_llm.environments.protocol import EpisodeError

REQUESTS_AT_ONCE = 16


def server(url: str, model: str, *, timeout: float = 120.0, api_key: str = "OPENAI_API_KEY") -> Callable[..., Any]:
    """A rollout function that asks `{url}/completions` for the completions of each prompt.

    url ends in /v1. timeout: seconds for each request. api_key: environment variable with the key, if there is one. The
    server must return token ids (`return_token_ids`, vLLM 0.10.2 or later) and log-probs.
    Raises EpisodeError when it does not answer in time, answers with an error, or leaves those out.
    """

    def ask(prompt: list[int], trainer: Any) -> list[dict[str, Any]]:
        args = trainer.args
        body = {
            "model": model, "prompt": prompt, "n": trainer.num_generations, "max_tokens": args.max_completion_length,
            "temperature": args.temperature, "top_p": args.top_p, "logprobs": 1, "return_token_ids": True,
            **({"top_k": args.top_k} if args.top_k else {}), **({"min_p": args.min_p} if args.min_p else {}),
        }  # fmt: skip
        choices = _post(f"{url.rstrip('/')}/completions", body, timeout, os.environ.get(api_key)).get("choices", [])
        if len(choices) != trainer.num_generations:
            raise EpisodeError(f"{url} returned {len(choices)} choices of the {trainer.num_generations} asked for")
        return choices

    def sample(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = trainer.tokenize(prompts)
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            found = list(pool.map(lambda prompt: ask(prompt, trainer), ids))
        choices = [choice for group in found for choice in group]
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(trainer.num_generations)],
            "completion_ids": [_field(choice, url, "token_ids") for choice in choices],
            "logprobs": [_field(choice.get("logprobs") or {}, url, "token_logprobs") for choice in choices],
        }

    return sample


def _post(url: str, body: dict[str, Any], timeout: float, key: str | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
        raise EpisodeError(f"{url} answered {error.code} {error.reason}: {said}") from error
    except json.JSONDecodeError as error:
        raise EpisodeError(f"{url} answered with something that is not JSON: {error}") from error
    except OSError as error:  # refused, unknown host, timed out
        raise EpisodeError(
            f"{url} did not answer within {timeout:g} seconds ({error}); start the server, or change url or timeout of "
            "environment.rollout_func"
        ) from error


def _field(holder: dict[str, Any], url: str, name: str) -> list[Any]:
    found = holder.get(name)
    if not isinstance(found, list):
        raise EpisodeError(
            f"{url} returned no {name}; training needs the token ids and log-probs of what was sampled: use a server "
            "that knows return_token_ids, such as vLLM 0.10.2 or later"
        )
    return found
