"""Rollouts from elsewhere: functions that sample in place of the engine, as TRL and axolotl call them.

| form | called with | returns |
|---|---|---|
| TRL | `f(prompts, trainer)` | `{"prompt_ids", "completion_ids", "logprobs"}`, N lists each; `env_mask` and columns |
| axolotl | `f(model, processing_class, prompts, generation_config)` | N texts |

Rows of a prompt are adjacent, `group_size` for each prompt. Texts are tokenised, and their log-probs are the policy's.
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import resolve, resolve_with_options
from jaxrl_llm.data.templates import chat_ids, is_conversational, render_prompt
from jaxrl_llm.environments.server import server

BUILT_IN = {"server": server}
REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
Generate = Callable[[Sequence[Sequence[int]], int], tuple[list[list[int]], list[list[float]]]]


class Written(NamedTuple):
    """The rows that a rollout function wrote: token ids, which of them are sampled, and their log-probs if known."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    sampled: list[list[int]]  # 1 on the policy's own tokens
    logprobs: list[list[float]] | None
    columns: dict[str, list[Any]]  # for rewards


class RolloutTrainer:
    """What a rollout function gets as `trainer`, and its `model`: the tokenizer, the settings and the engine.

    `generate(prompts, num_generations=None)` samples from the policy: prompts are text, messages or token ids, and it
    returns `prompt_ids`, `completion_ids` and `logprobs`, the rows of a prompt adjacent.
    """

    def __init__(self, generate: Generate, tokenizer: Any, settings: Mapping[str, Any], state: Any):
        self._generate = generate
        self.processing_class = tokenizer
        self.args = types.SimpleNamespace(**settings)
        self.num_generations = settings["num_generations"]
        self.state = state

    def generate(
        self, prompts: Any = None, num_generations: int | None = None, *, input_ids: Any = None, **options: Any
    ):
        """Completions of prompts, as a dictionary; of `input_ids`, as `transformers` has it: rows of whole sequences.

        Raises ConfigError for options: lengths and sampling are the configuration's (rollout.*).
        """
        options = {key: value for key, value in options.items() if key not in ("attention_mask", "generation_config")}
        if options:
            raise ConfigError(
                f"generate got {', '.join(options)}; how the policy is sampled is set in the configuration, "
                "under rollout"
            )
        if input_ids is not None:
            given = [[int(token) for token in row] for row in np.asarray(input_ids)]
            completions, _ = self._generate(given, 1)
            width = max(map(len, completions))
            pad = self.processing_class.pad_token_id or 0
            rows = [[*p, *c, *[pad] * (width - len(c))] for p, c in zip(given, completions, strict=True)]
            return np.asarray(rows, np.int32)
        count = self.num_generations if num_generations is None else num_generations
        ids = self.tokenize(prompts)
        completions, logprobs = self._generate(ids, count)
        repeated = [own for own in ids for _ in range(count)]
        return {"prompt_ids": repeated, "completion_ids": completions, "logprobs": logprobs}

    def tokenize(self, prompts: Sequence[Any]) -> list[list[int]]:
        """The token ids of prompts (text, messages, or ids already), as the engine has them."""
        return [
            render_prompt(self.processing_class, prompt) if _is_text(prompt) else [int(token) for token in prompt]
            for prompt in prompts
        ]


def load_rollout_function(spec: str | None) -> Callable[..., Any] | None:
    """The function of `environment.rollout_func`; raises ConfigError for a name or option that is wrong."""
    if spec is None:
        return None
    if not spec.endswith(")"):
        return resolve(spec, BUILT_IN)
    function, options = resolve_with_options(spec, BUILT_IN)
    return function(**options) if function is server else (lambda *given: function(*given, **options))


def call_rollout_function(
    function: Callable[..., Any], prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]], trainer: RolloutTrainer
) -> Written:
    """The rows that a function of either form wrote for prompts, checked.

    Raises ConfigError: the function raises, or does not return `num_generations` rows for each prompt, as said above.
    """
    count = trainer.num_generations
    texts = len(inspect.signature(function).parameters) > 2
    try:
        if texts:
            said = function(trainer, trainer.processing_class, list(prompts), trainer.args)
        else:
            said = function(list(prompts), trainer)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"environment.rollout_func raised {type(error).__name__}: {error}") from error
    rows = len(prompts) * count
    repeated = [list(own) for own in prompt_ids for _ in range(count)]
    return _texts(said, repeated, prompts, trainer, rows) if texts else _tokens(said, rows)


def _texts(
    said: Any, prompt_ids: list[list[int]], prompts: Sequence[Any], trainer: RolloutTrainer, rows: int
) -> Written:
    if not isinstance(said, Sequence) or len(said) != rows or not all(isinstance(text, str) for text in said):
        raise ConfigError(
            f"environment.rollout_func must return a list of {rows} texts, rollout.group_size for each prompt in "
            f"order; it returned {_shown(said)}"
        )
    tokenizer = trainer.processing_class
    ids = [[*chat_ids(tokenizer, text), tokenizer.eos_token_id] for text in said]
    return Written(prompt_ids, ids, [[1] * len(own) for own in ids], None, {})


def _tokens(said: Any, rows: int) -> Written:
    if not isinstance(said, Mapping) or not set(REQUIRED) <= said.keys():
        raise ConfigError(
            f"environment.rollout_func must return a dictionary with {', '.join(REQUIRED)}; it returned {_shown(said)}"
        )
    lists = {name: list(values) for name, values in said.items() if values is not None}
    for name, values in lists.items():
        if len(values) != rows:
            raise ConfigError(
                f"environment.rollout_func returned {len(values)} {name}, but there are {rows} rows: "
                "rollout.group_size for each prompt, in order"
            )
    ids = [[int(token) for token in own] for own in lists["completion_ids"]]
    logprobs = [[_number(value) for value in own] for own in lists["logprobs"]]
    sampled = [[int(one) for one in own] for own in lists.get("env_mask", [[1] * len(own) for own in ids])]
    for row, (own, scored, mask) in enumerate(zip(ids, logprobs, sampled, strict=True)):
        if not own or not len(own) == len(scored) == len(mask):
            raise ConfigError(
                f"environment.rollout_func: row {row} has {len(own)} completion_ids, {len(scored)} logprobs and "
                f"{len(mask)} in env_mask; give one of each for each token, and at least one token"
            )
    prompts = [[int(token) for token in own] for own in lists["prompt_ids"]]
    columns = {name: values for name, values in lists.items() if name not in (*REQUIRED, "env_mask")}
    return Written(prompts, ids, sampled, logprobs, columns)


def _number(value: Any) -> float:
    """A log-prob; the first of a list of them, as TRL has those of several likely tokens."""
    return float(value[0]) if isinstance(value, Sequence) else float(value)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or is_conversational(prompt)


def _shown(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
