"""What a rollout function is given: the `RolloutTrainer`, and a tokenizer for code that was written for torch."""

import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import BatchEncoding

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.templates import is_conversational, render_prompt
from jaxrl_llm.training.rollouts.rounds import Sampled

Generate = Callable[[Sequence[Sequence[int]], int], Sampled]


class RolloutTrainer:
    """The `trainer` of a rollout function, or its `model`: the tokenizer, the settings and the engine.

    `generate(prompts, num_generations=None)` samples from the policy: prompts are text, messages or token ids, and it
    returns `prompt_ids`, `completion_ids` and `logprobs`, the rows of a prompt adjacent. The functions of several
    processes may call it for other prompts, and another number of times.
    """

    def __init__(
        self, generate: Generate, tokenizer: Any, settings: Mapping[str, Any], state: Any, save: Callable[..., Any]
    ):
        self._generate, self._save = generate, save
        self.processing_class = tokenizer
        self.args = types.SimpleNamespace(**settings)
        self.num_generations = settings["num_generations"]
        self.state = state
        self.device = "cpu"  # arrays are numpy's

    def generate(
        self,
        prompts: Any = None,
        num_generations: int | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        **options: Any,
    ):
        """Completions of prompts, as a dictionary; of `input_ids`, as `transformers` has it: rows of whole sequences.

        Where `attention_mask` is 0 the ids are padding, which stays in the rows. `max_new_tokens` cuts completions.
        Raises ConfigError for options: lengths and sampling are those of the configuration (rollout.*).
        """
        options = {key: value for key, value in options.items() if key != "generation_config"}
        if options:
            raise ConfigError(
                f"generate got {', '.join(options)}; how the policy is sampled is set in the configuration, "
                "under rollout"
            )
        if input_ids is not None:
            given = np.asarray(input_ids)
            shown = np.ones(given.shape, bool) if attention_mask is None else np.asarray(attention_mask) > 0
            prompt_ids = [row[own].tolist() for row, own in zip(given, shown, strict=True)]
            completions = [row[:max_new_tokens] for row in self._generate(prompt_ids, 1)[0]]
            width = max(map(len, completions))
            pad = self.processing_class.pad_token_id or 0
            rows = [[*p, *c, *[pad] * (width - len(c))] for p, c in zip(given.tolist(), completions, strict=True)]
            return np.asarray(rows, np.int32)
        count = self.num_generations if num_generations is None else num_generations
        ids = self.tokenize(prompts)
        completions, logprobs = ([row[:max_new_tokens] for row in rows] for rows in self._generate(ids, count))
        prompt_ids = [prompt for prompt in ids for _ in range(count)]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    def save_model(self, output_dir: str | os.PathLike[str], then: Callable[[], Any] | None = None) -> Any:
        """Writes the policy as a Hugging Face folder, in the place of an earlier one; once for all processes.

        Then one of the processes that ask for it calls `then`, and all of them return what it returned, which is
        anything that JSON writes. `then` may neither sample nor save; raises ConfigError where it does.
        """
        return self._save((os.fspath(output_dir),), then and (lambda path: then()))

    def publish_weights(
        self, folder: str, then: Callable[[str], Any], dtype: str = "", full_every: int = 1, full: bool = False
    ) -> Any:
        """Writes the policy for a server, in `dtype` or, without one, that of its parameters; returns what `then` does.

        `then` is called as in `save_model`, with the path that was written: `folder` itself, or a version in it where
        that is a URL or `full_every` is above 1. Then each `full_every`-th version, and a `full` one, holds all weights
        and the others what changed; see models/files/weight_versions.py. Raises ConfigError as `save_model` does.
        """
        return self._save((folder, dtype, full_every, full), then)

    def tokenize(self, prompts: Sequence[Any]) -> list[list[int]]:
        """The token ids of prompts (text, messages, or ids already), as the engine has them."""
        return [
            render_prompt(self.processing_class, prompt)
            if isinstance(prompt, str) or is_conversational(prompt)
            else [int(token) for token in prompt]
            for prompt in prompts
        ]


class Encoding(BatchEncoding):
    """Token ids in numpy arrays, which are where the policy takes them."""

    def to(self, device: Any, **_: Any) -> "Encoding":
        """The encoding itself, whatever the device: its arrays stay where the policy takes them."""
        del device
        return self


class TokenizerWithoutTorch:
    """A tokenizer as code that was written for torch calls it: the arrays that it returns are numpy's."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, return_tensors: str | None = None, **options: Any) -> Encoding:
        return Encoding(dict(self._tokenizer(*texts, return_tensors=return_tensors and "np", **options)))

    def apply_chat_template(self, messages: Any, *, return_tensors: str | None = None, **options: Any) -> Any:
        """The text of messages, or their ids; axolotl's page says `processing_class=False` for `tokenize=False`."""
        options = {"tokenize" if name == "processing_class" else name: value for name, value in options.items()}
        found = self._tokenizer.apply_chat_template(messages, return_tensors=return_tensors and "np", **options)
        return Encoding(dict(found)) if isinstance(found, BatchEncoding) else found
