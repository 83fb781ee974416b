"""Sampling from a server of the OpenAI kind, such as vLLM's: `environment.rollout_func="server(url=..., model=...)"`.

The server samples with the weights it was started with: its policy stays while the trained one moves on, so
`algorithm.importance_correction` has to weigh its rows.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from jaxrl_llm.environments.protocol import EpisodeError

CONCURRENT_REQUESTS = 16


def server(url: str, model: str, *, timeout: float = 120.0, api_key: str = "OPENAI_API_KEY") -> Callable[..., Any]:
    """A rollout function of TRL's form that asks `{url}/completions` for the completions of each prompt.

    url ends in /v1. timeout: seconds for each request. api_key: environment variable with the key, if there is one. The
    server must return token ids (`return_token_ids`, vLLM 0.10.2 or later) and log-probs.
    Raises EpisodeError when it does not answer in time, answers with an error, or leaves those out.
    """
    endpoint = f"{url.rstrip('/')}/completions"

    def choices(client: httpx.Client, prompt: list[int], trainer: Any) -> list[dict[str, Any]]:
        args = trainer.args
        body = {
            "model": model,
            "prompt": prompt,
            "n": trainer.num_generations,
            "max_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "logprobs": 1,
            "return_token_ids": True,
            **({"top_k": args.top_k} if args.top_k else {}),
            **({"min_p": args.min_p} if args.min_p else {}),
        }
        try:
            response = client.post(endpoint, json=body)
        except (httpx.RequestError, httpx.InvalidURL) as error:  # refused, unknown host, timed out
            raise EpisodeError(
                f"{endpoint} did not answer within {timeout:g} seconds ({type(error).__name__}: {error}); start the "
                "server, or change url or timeout of environment.rollout_func"
            ) from error
        if not response.is_success:
            raise EpisodeError(
                f"{endpoint} answered {response.status_code} {response.reason_phrase}: {response.text[:300]}"
            )
        try:
            answers = response.json().get("choices", [])
        except ValueError as error:
            raise EpisodeError(f"{endpoint} answered with something that is not JSON: {error}") from error
        if len(answers) != trainer.num_generations:
            raise EpisodeError(f"{url} returned {len(answers)} choices of the {trainer.num_generations} asked for")
        return answers

    def values(holder: dict[str, Any], name: str) -> list[Any]:
        if not isinstance(holder.get(name), list):
            raise EpisodeError(
                f"{url} returned no {name}; training needs the token ids and log-probs of the samples: use a server "
                "that knows return_token_ids, such as vLLM 0.10.2 or later"
            )
        return holder[name]

    def sample(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids, key = trainer.tokenize(prompts), os.environ.get(api_key)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(timeout=timeout, headers=headers) as client, ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            groups = list(pool.map(lambda prompt: choices(client, prompt, trainer), ids))
        rows = [choice for group in groups for choice in group]
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(trainer.num_generations)],
            "completion_ids": [values(choice, "token_ids") for choice in rows],
            "logprobs": [values(choice.get("logprobs") or {}, "token_logprobs") for choice in rows],
        }

    return sample
