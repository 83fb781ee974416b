"""Environments of the package verifiers (its `MultiTurnEnv`): `environment.name="verifiers(name='my-env')"`.

That was before verifiers 0.2; for its tasksets see verifiers_agent.py.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.protocol import EpisodeError, Step
from jaxrl_llm.environments.tool_calls import parse_tool_calls

NEEDS = "pip install 'verifiers<0.2'"
COLUMNS = ("answer", "task", "info", "example_id")


@functools.lru_cache(maxsize=8)
def load(name: str, options: str = "{}") -> Any:
    """The verifiers environment `name` with options (a JSON object): one for all rows, as it keeps no state of them.

    `load(name).get_dataset()` has the rows to train on. Raises EpisodeError when the package is missing, too new, or
    does not know it.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise EpisodeError(f"environment.name = verifiers needs the package verifiers: {NEEDS}")
    package = importlib.import_module("verifiers")
    if not hasattr(package, "MultiTurnEnv"):
        raise EpisodeError(
            f"verifiers {package.__version__} has no MultiTurnEnv any more: {NEEDS}; its tasksets are agents, "
            "environment.agent=\"verifiers(taskset='my-taskset')\""
        )
    try:
        environment = package.load_environment(name, **json.loads(options))
    except Exception as error:
        raise EpisodeError(f"verifiers cannot load {name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(environment, package.MultiTurnEnv):
        raise EpisodeError(f"the verifiers environment {name!r} is a {type(environment).__name__}, not a MultiTurnEnv")
    return environment


class Verifiers:
    """An episode in a verifiers environment. The data are its rows, with the columns prompt and answer, task, info.

    name: as `verifiers.load_environment` takes it; options: a JSON object of its arguments. The reward is the rubric's,
    of each row alone. Tool calls in the policy's text become `tool_calls` of its message, for environments with tools.
    """

    takes_raw = True

    def __init__(self, name: str, options: str = "{}"):
        self.environment = load(name, options)
        self.state: Any = None
        self.messages: Any = None

    async def reset(self, row: dict[str, Any]) -> Any:
        """Start an episode; returns the prompt where the environment changes it."""
        prompt = row["prompt"]
        columns = {"example_id": 0, "task": "default", "answer": "", "info": {}}
        columns |= {name: row[name] for name in COLUMNS if row.get(name) is not None}
        state = await self.environment.init_state({"prompt": prompt, **columns}, None, "policy", {})
        self.state, self.messages = await self.environment.setup_state(state), prompt
        return None if self.state["prompt"] == prompt else self.state["prompt"]

    async def step(self, text: str, raw: str) -> Step:
        """Give a turn to the environment; the episode is done when one of its stop conditions holds.

        `raw` is the text with special tokens.
        """
        state, turn = self.state, text
        if not isinstance(self.messages, str):
            turn = [_message(text, raw, getattr(self.environment, "oai_tools", None) or ())]
        trajectory_step = {
            "prompt": self.messages,
            "completion": turn,
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state["trajectory_id"],
            "extras": {},
        }
        await self.environment.add_trajectory_step(state, trajectory_step)
        if await self.environment.is_completed(state):
            return Step(None, done=True)
        before = len(self.messages) + len(turn)
        self.messages = await self.environment.get_prompt_messages(state)
        if state.get("final_env_response") is not None or await self.environment.is_completed(state):
            return Step(None, done=True)
        return Step(self.messages[before:])

    async def get_reward(self) -> float:
        """The score that the environment's rubric gives to the whole episode."""
        await self.environment.render_completion(self.state)
        await self.environment.rubric.score_rollout(self.state, score_sem=contextlib.nullcontext())
        return float(self.state["reward"])


def _message(text: str, raw: str, schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A turn as a message of the assistant, with its tool calls in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls := parse_tool_calls(raw, schemas):
        message["tool_calls"] = [
            {
                "id": c.id or f"call{i}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
            }
            for i, c in enumerate(calls)
        ]
    return message
