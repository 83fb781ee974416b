"""Reward models as graders: `model:<path>` in `rewards.functions`, for every online algorithm.

The path names a sequence classification model with one score: a Hugging Face folder or hub id, or the `hf` folder of a
reward_model run. It may be of another family than the policy and has its own tokenizer and chat template, or those that
options name.
"""

import copy
import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.data.collate import pad_rows
from jaxrl_llm.data.named_templates import with_chat_template
from jaxrl_llm.data.templates import chat_ids, forms_read, is_conversational, render_chat
from jaxrl_llm.data.tokenize import as_messages, joined, prompt_and_completion
from jaxrl_llm.distributed.sharding import has_host_memory, make_mesh, on_device, on_host, row_sharding
from jaxrl_llm.distributed.turns import turn
from jaxrl_llm.models import hf
from jaxrl_llm.models.logprobs import last_scores
from jaxrl_llm.models.model import Model, check_ids, copied_model, load_model
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.rewards.judge import text_of_content

PREFIX = "model:"
NARROWEST = 32  # rows are padded to this width or one of its doubles, so that few programs are compiled


class RewardModel:
    """A grader that gives the score of a reward model, at a path or in memory, for each prompt with its completion.

    Messages are rendered with the reward model's own chat template, texts are joined, and either is tokenized by its
    own tokenizer without adding special tokens; the score is that of the last token. A template that reads texts alone
    is given `<image>` for an image. With `add_eos` plain texts are rows as a reward_model run trains on: with the
    tokens that begin and end a text, prompt and completion tokenized apart. Rows of more than `max_length` tokens lose
    their beginning. `rows` are computed at a time, on this process's devices, which share the parameters. With
    `offload` these wait in the host's memory between calls.

    `tokenizer` is another one than the model's, for the same token ids: one in memory, or the folder, hub id or URL of
    one. `chat_template` is one that `data.chat_template` may be. Python code of a tokenizer's folder is run with
    `trust_remote_code` only.

    Raises ConfigError for a folder that holds no reward model, or none with a tokenizer, and for devices without host
    memory.
    """

    def __init__(
        self,
        path: str | Model,
        max_length: int | None = None,
        rows: int = 32,
        add_eos: bool = False,
        dtype: str = "auto",
        name: str | None = None,
        offload: bool = False,
        tokenizer: Any = None,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.name = name or ("reward_model" if isinstance(path, Model) else short_name(path))
        self.max_length, self.add_eos = max_length, add_eos
        self.mesh = make_mesh(data=1, fsdp=-1, devices=jax.local_devices())
        shards = self.mesh.shape["fsdp"]
        self.rows = -(-rows // shards) * shards
        find = functools.partial(hf.find_tokenizer, trust_remote_code=trust_remote_code)
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = find(os.fspath(tokenizer), setting=f"the tokenizer of reward model {self.name}")
        elif tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)  # what is remembered of the model's folder is set on it
        with jax.set_mesh(self.mesh):
            if isinstance(path, Model):
                model = copied_model(path, self.mesh, dtype, merge=True, head="score")
                if tokenizer is not None:
                    check_ids(tokenizer, model.net.config.vocab_size, model.generation, self.name)
                    model = dataclasses.replace(model, tokenizer=tokenizer)
            else:
                model = _load(path, dtype, self.mesh, tokenizer, trust_remote_code)
        if model.tokenizer is None:
            raise ConfigError(
                f"reward model {self.name} has no tokenizer: name the one that it was trained with, tokenizer='PATH'"
            )
        if chat_template is not None:
            setting = f"the chat_template of reward model {self.name}"
            own = with_chat_template(model.tokenizer, chat_template, functools.partial(find, setting=setting), setting)
            model = dataclasses.replace(model, tokenizer=own)
        self.model = offloaded(model) if offload else model

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        """The score of each prompt with its completion."""
        ids = [self._ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))  # rows of similar length waste little padding
        scores = np.zeros(len(ids))
        with jax.set_mesh(self.mesh), turn():
            params = on_device(self.model.params)
            for start in range(0, len(order), self.rows):
                chunk = order[start : start + self.rows]
                scores[chunk] = self._scores(params, [ids[row] for row in chunk])
        return scores.tolist()

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        tokenizer = self.model.tokenizer
        if is_conversational(prompt):
            reads_parts = forms_read(tokenizer).parts

            def in_text(message: Any) -> Any:
                parts = isinstance(message.get("content"), list)
                if not parts or (reads_parts and message["role"] != "assistant"):
                    return message
                return {**message, "content": text_of_content(message["content"])}

            prompt, completion = ([in_text(x) for x in messages] for messages in (prompt, as_messages(completion)))
            messages = joined(prompt, completion) if completion else prompt
            ids = chat_ids(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=False))
        elif self.add_eos:
            ids, _ = prompt_and_completion(tokenizer, prompt, completion, {})
        else:
            ids = chat_ids(tokenizer, prompt + completion)
        if not ids:
            raise ConfigError(f"reward model {self.name}: a prompt and its completion are empty, and have no score")
        return ids[-self.max_length :] if self.max_length else ids

    def _scores(self, params: Params, ids: list[list[int]]) -> np.ndarray:
        width = NARROWEST
        while width < len(ids[-1]):
            width *= 2
        full = ids + ids[-1:] * (self.rows - len(ids))  # the last row again, so that every call has the same shape
        tokens, segments, _ = pad_rows([(row, [0.0] * len(row)) for row in full], width)
        rows = jax.device_put((tokens, segments), row_sharding(self.mesh))
        return np.asarray(score_rows(self.model.net, params, *rows))[: len(ids)]


def with_reward_models(specs: Any) -> Any:
    """The reward specifications (one, or nested lists of them) with a `RewardModel` for each reward model.

    That is `model:<path>`, with options in brackets, `model:runs/reward_model/hf(add_eos=True, max_length=512)`; a bare
    hub id, `owner/name`, or folder with a config.json, as in TRL; or a Model in memory. Raises ConfigError for a path
    without a reward model.
    """
    if isinstance(specs, Model):
        return RewardModel(specs)
    if isinstance(specs, str):
        if (named := path_and_options(specs)) is None:
            return specs
        path, options = named
        try:
            return RewardModel(path, **options)
        except ConfigError as error:
            if specs.startswith(PREFIX):
                raise
            raise ConfigError(f"the reward {specs!r} was read as a reward model, model:{path}: {error}") from error
        except TypeError as error:
            raise ConfigError(
                f"the options of {specs!r}: {error}; there are max_length, rows, add_eos, dtype, name, offload, "
                "tokenizer, chat_template and trust_remote_code"
            ) from error
    if isinstance(specs, list | tuple):
        return [with_reward_models(spec) for spec in specs]
    return specs


def path_and_options(spec: str) -> tuple[str, dict[str, Any]] | None:
    """The path and the options of the reward model that a reward names; None for another reward."""
    path, options = split_options(spec.removeprefix(PREFIX))
    return (path, options) if spec.startswith(PREFIX) or _is_bare_path(path) else None


def offloaded(model: Model) -> Model:
    """The model with its parameters in the host's memory. Raises ConfigError for devices without such."""
    if not has_host_memory():
        raise ConfigError(
            f"offload is true, but the memory of a {jax.default_backend()} here has no part in the host's "
            "(pinned_host): leave it out"
        )
    return dataclasses.replace(model, params=on_host(model.params))


def _is_bare_path(path: str) -> bool:
    """True for a hub id and for the folder of a model, which no function is named like."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) and not path.endswith(".py")) or (
        os.sep in path and (Path(path).expanduser() / "config.json").is_file()
    )


def _load(path: str, dtype: str, mesh, tokenizer: Any, trust_remote_code: bool) -> Model:
    model = load_model(path, dtype, mesh=mesh, head="score", tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    architecture = ", ".join((model.hf_config or {}).get("architectures") or ())
    if "SequenceClassification" not in architecture:
        raise ConfigError(
            f"{PREFIX}{path} is no reward model: its config.json names {architecture or 'no architecture'}; a score "
            "head comes with a ...ForSequenceClassification; train one with configs/reward_model.py"
        )
    return model


def short_name(path: str) -> str:
    """The last informative name of a path: reward_model for `runs/reward_model/hf`."""
    names = [name for name in path.replace(":", "/").split("/") if name not in ("", ".", "hf")]
    return names[-1] if names else path


@functools.partial(jax.jit, static_argnums=0)
def score_rows(net: Net, params: Params, tokens, segments) -> jax.Array:
    """The scores `[N]` of rows `[N,T]`."""
    return last_scores(net, params, Inputs(tokens, segments))
