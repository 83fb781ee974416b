"""Environments that run as OpenEnv servers: `environment.name="openenv(url='http://localhost:8000')"`."""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.environments.protocol import EpisodeError, Step

TEXT_FIELDS = ("text", "message", "content", "prompt", "observation", "echoed_message", "result")


class OpenEnv:
    """A session on an OpenEnv server; needs the package openenv-core.

    url: of the server. action: the field of an action that takes the policy's text. observation: the field of an
    observation that is shown to the policy; None is the first known one that holds text, or all of it as JSON.
    columns: those of the row that `reset` passes on. opening: the first observation is added to the prompt.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        columns: tuple[str, ...] = ("seed",),
        opening: bool = True,
    ):
        if importlib.util.find_spec("openenv") is None:
            raise EpisodeError("environment.name = openenv needs the package openenv-core: pip install openenv-core")
        client = importlib.import_module("openenv.core").GenericEnvClient(base_url=url)
        self.client, self.url = client.sync(), url
        self.action, self.observation, self.columns, self.opening = action, observation, columns, opening

    def reset(self, row: dict[str, Any]) -> Any:
        """Start an episode on the server; returns the row's prompt with the first observation, if that has text."""
        options = {name: row[name] for name in self.columns if row.get(name) is not None}
        opening = self._text(self.client.reset(**options).observation)
        if not opening or not self.opening:
            return None
        prompt = row["prompt"]
        return prompt + opening if isinstance(prompt, str) else [*prompt, {"role": "user", "content": opening}]

    def step(self, text: str) -> Step:
        """Send a turn as an action; returns the server's step result."""
        result = self.client.step({self.action: text})
        return Step(self._text(result.observation), float(result.reward or 0.0), bool(result.done))

    def close(self) -> None:
        """End the session."""
        self.client.close()

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return str(observation or "")
        if self.observation is not None:
            if self.observation not in observation:
                raise EpisodeError(
                    f"observations of {self.url} have no field {self.observation!r}; they have {', '.join(observation)}"
                )
            return str(observation[self.observation])
        texts = [observation[name] for name in TEXT_FIELDS if isinstance(observation.get(name), str)]
        return texts[0] if texts else json.dumps(dict(observation), default=str)
