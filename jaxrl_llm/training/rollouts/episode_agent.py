"""The agent that plays environments: `environment.agent="episodes"`.

It asks its session as any agent does, and answers with what environment and tools return: text, or messages with
images, which rows of the engine's own episodes have no room for.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl_llm.algorithms.turn_advantages import state_key
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.http_client import HttpClient, json_headers
from jaxrl_llm.data.images import ImageLimits, data_url, read_image
from jaxrl_llm.data.templates import template_options
from jaxrl_llm.environments.episode import Episode
from jaxrl_llm.environments.factory import Environments, EnvironmentSpec
from jaxrl_llm.environments.protocol import EpisodeError, is_image_part, is_messages, with_parts
from jaxrl_llm.training.images import IMAGES

NO_ROOM = ("context_length_exceeded", "budget_exceeded")  # codes of the endpoint: the row has no room for a turn
ANY_LENGTH = 10**9  # tokens of a turn, which its session bounds
LARGEST = 2**28  # bytes of a reply


class EpisodeAgent:
    """A function that plays the episode of a task, for several threads at once.

    limits: of the images that environments and tools return. The environments are there once they are opened, which
    `Agents` does.
    """

    environments: Environments

    def __init__(self, spec: EnvironmentSpec, limits: ImageLimits):
        self.spec, self.limits = spec, limits
        self.client = HttpClient(spec.workers)

    def open_environments(self) -> None:
        """Make the environments; raises ConfigError and EpisodeError as `Environments`."""
        self.environments = Environments(self.spec)

    def __call__(
        self, base_url: str, api_key: str, reward_url: str, timeout: float, task: dict[str, Any]
    ) -> float | None:
        """The reward of the episode, on the scale of its environment, after those of its turns were posted.

        It is None where `get_reward` gives none. Raises EpisodeError: a call of the environment that raises or is late,
        a prompt or an observation that cannot be shown, or a request that the session refuses.
        """
        (episode,) = self.environments.acquire([task])

        def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
            content = json.dumps(body).encode()
            return json.loads(self.client.post(url, content, json_headers(api_key), timeout, LARGEST).data)

        def called(method: str, call: Callable[[], Any]) -> Any:
            result = self.environments.pool.call(call)
            if result.failure is not None:
                raise EpisodeError(f"{episode.name}.{method} {result.failure}") from result.error
            return result.result

        try:
            opening = called("reset", partial(episode.reset, task))
            prompt, body = self._first_request(episode, task, opening)
            chat = is_messages(prompt)
            while episode.stop_reason is None:
                path, asked = ("chat/completions", "messages") if chat else ("completions", "prompt")
                reply = post(f"{base_url}/{path}", {**body, asked: prompt})
                if (error := reply.get("error")) is not None:
                    if not episode.turns or error.get("code") not in NO_ROOM:
                        raise EpisodeError(f"turn {episode.turns} of {episode.name}: {error['message']}")
                    episode.stop_reason = "length"
                    break
                choice = reply["choices"][0]
                text = choice["message"]["content"] if chat else choice["text"]
                episode.turns += 1
                if choice["finish_reason"] == "length":  # nobody answers it
                    episode.turn_rewards.append(0.0)
                    episode.stop_reason = "length"
                    break
                result = called("step", partial(episode.respond, text, text))
                episode.record(result)
                observation = result.step.observation
                episode.states.append(result.step.state)
                if episode.stop_reason is not None:
                    break
                if chat:
                    added = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
                    prompt = [*prompt, {"role": "assistant", "content": text}, *self._sent(episode.name, added)]
                elif isinstance(observation, str):
                    prompt += text + observation
                else:
                    raise EpisodeError(
                        f"the prompt is plain text, but the observation of {episode.name} is {observation!r:.200}; "
                        "answer with text, or give prompts that are lists of messages"
                    )
            if hasattr(episode.environment, "get_reward"):
                episode.set_reward(called("get_reward", episode.environment.get_reward))
            rewarded = zip(episode.turn_rewards, episode.states, strict=False) if episode.reward is not None else ()
            for turn, (reward, state) in enumerate(rewarded):
                own = self.environments.scaled(task, reward)
                post(reward_url, {"reward": own, "turn": turn, "state": json.loads(state_key(state))})
        except BaseException as error:
            episode.fail(f"{type(error).__name__}: {error}")  # so that its environment is closed
            raise
        finally:
            self.environments.release([task], [episode])
        return self.environments.scaled(task, episode.reward)

    def _first_request(self, episode: Episode, task: dict[str, Any], opening: Any) -> tuple[Any, dict[str, Any]]:
        """The prompt of an episode, with the `opening` of its environment, and what its requests have besides.

        Raises EpisodeError for tools or images beside a prompt that is plain text.
        """
        prompt = episode.opening_prompt(task["prompt"], opening)
        options, shown = template_options(task), self.environments.schemas[self.environments.name(task)]
        tools, body = [*(options["tools"] or []), *shown], {"max_tokens": ANY_LENGTH}
        if not is_messages(prompt):
            if shown or task.get(IMAGES):
                raise EpisodeError(
                    f"the chat template shows tools and images, but the prompt {prompt!r:.200} is plain text: give "
                    "prompts that are lists of messages"
                )
            return prompt, body
        body |= {"chat_template_kwargs": options["template_kwargs"]}
        # Calls stay in the text, where they are looked for as in episodes of the engine.
        body |= {"tools": tools, "tool_choice": "none"} if tools else {}
        # With the special tokens, which may be their marks.
        reads_calls = episode.tools or getattr(episode.environment, "takes_raw", False)
        body |= {"skip_special_tokens": False} if reads_calls else {}
        return prompt if opening is None else self._sent(episode.name, prompt), body

    def close(self) -> None:
        """End the environments, and the connections to the endpoint."""
        self.environments.close()
        self.client.close()

    def _sent(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of the environment `name`, images as data: URLs. Raises EpisodeError for one that is broken."""

        def part(given: Any) -> Any:
            if not is_image_part(given):
                return given
            try:
                return {"type": "image_url", "image_url": {"url": data_url(read_image(given, self.limits))}}
            except ConfigError as error:
                raise EpisodeError(f"{name} shows an image that cannot be read: {error}") from error

        return with_parts(messages, lambda content: list(map(part, content)))
