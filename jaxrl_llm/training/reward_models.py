"""Reward models as graders: `model:<path>` and `prm:<path>` in `rewards.functions`, for every online algorithm.

The path of the first names a sequence classification model with one score, that of the second a process reward model, a
token classification model with two labels or a language model that writes one of two tokens: a Hugging Face folder or
hub id, or the `hf` folder of a reward_model or process_reward_model run. It may be of another family than the policy
and has its own tokenizer and chat template, or those that options name.
"""

import copy
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.data.collate import pad_rows
from jaxrl_llm.data.conversations import as_messages, joined, prompt_and_completion, with_steps
from jaxrl_llm.data.named_templates import with_chat_template
from jaxrl_llm.data.templates import chat_ids, forms_read, is_conversational, render_chat, render_prompt
from jaxrl_llm.distributed.sharding import has_host_memory, make_mesh, on_device, on_host, row_sharding
from jaxrl_llm.distributed.turns import turn
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.families.qwen2 import PROCESS_REWARD_MODEL
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.logprobs import last_scores, next_logits, step_logits
from jaxrl_llm.models.model import Model, check_ids, copied_model, load_model
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.rewards.signatures import text_of, text_of_content

AGGREGATIONS: dict[str, Callable[[np.ndarray], float]] = {
    "min": np.min, "product": np.prod, "mean": np.mean, "last": lambda steps: steps[-1], "sum": np.sum,
}  # fmt: skip
STEP_TOKENS = {PROCESS_REWARD_MODEL: "<extra_0>"}  # of architectures that read one behind each step
# What labels of right and of wrong steps are called.
RIGHT = frozenset(("right", "correct", "good", "positive", "pos", "true", "yes", "+", "1"))
WRONG = frozenset(("wrong", "incorrect", "bad", "negative", "neg", "false", "no", "-", "0"))
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

    prefix, kind, head = "model:", "reward_model", "score"
    architecture, config = "SequenceClassification", "configs/reward_model.py"  # that it is known by, that trains one

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
        self.name = name or (self.kind if isinstance(path, Model) else short_name(path))
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
                if path.net.config.head == "lm" != self.head:  # which would get a new head, and its scores be chance
                    raise ConfigError(
                        f"{path.path or 'the model'} in memory has no {self.head} head: give one of a {self.kind} run"
                    )
                model = copied_model(path, self.mesh, dtype, merge=True, head=self.head)
                if tokenizer is not None:
                    check_ids(tokenizer, model.net.config.embeddings, model.generation, self.name)
                    model = dataclasses.replace(model, tokenizer=tokenizer)
            else:
                model = load_model(
                    path, dtype, mesh=self.mesh, head=self.head, tokenizer=tokenizer,
                    trust_remote_code=trust_remote_code,
                )  # fmt: skip
                if self.head != "lm":  # which no other architecture is read with
                    self._check_architecture(path, model)
        if model.net.config.sees_prompts:
            raise ConfigError(
                f"reward model {self.name}: the tokens of a prompt see each other in {model.path or 'the model'}, but "
                "rows are scored as text whose tokens see those before them alone: name another model"
            )
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
        return [float(score) for score in self._computed(score_rows, ids)]

    def _computed(self, program: Callable[..., jax.Array], ids: list[list[int]]) -> list[Any]:
        """The results of the jitted `program(net, params, tokens, segments)` for each row.

        Raises ConfigError for a row beyond the positions that the model has learned.
        """
        longest, most = max(map(len, ids), default=0), self.model.net.config.position_limit
        if most is not None and longest > most:
            raise ConfigError(
                f"reward model {self.name}: a prompt and its completion have {longest} tokens, but it has learned "
                f"{most} positions: set its max_length to {most}, or use another one"
            )
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))  # rows of similar length waste little padding
        found: list[Any] = [None] * len(ids)
        with jax.set_mesh(self.mesh), turn():
            params = on_device(self.model.params)
            for start in range(0, len(order), self.rows):
                chunk = order[start : start + self.rows]
                rows = [ids[row] for row in chunk]
                full = rows + rows[-1:] * (self.rows - len(rows))  # the last row again, for calls of the same shape
                tokens, segments, _ = pad_rows([(row, [0.0] * len(row)) for row in full], row_width(len(rows[-1])))
                inputs = jax.device_put((tokens, segments), row_sharding(self.mesh))
                results = np.asarray(program(self.model.net, params, *inputs))
                for row, result in zip(chunk, results, strict=False):
                    found[row] = result
        return found

    def _messages(self, prompt: Any, completion: Any) -> tuple[list[Any], list[Any]]:
        """A conversation's prompt and its completion, with the contents that the chat template reads."""
        reads_parts = forms_read(self.model.tokenizer).parts

        def in_text(message: Any) -> Any:
            parts = isinstance(message.get("content"), list)
            if not parts or (reads_parts and message["role"] != "assistant"):
                return message
            return {**message, "content": text_of_content(message["content"])}

        return [in_text(x) for x in prompt], [in_text(x) for x in as_messages(completion)]

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        tokenizer = self.model.tokenizer
        if is_conversational(prompt):
            prompt, completion = self._messages(prompt, completion)
            messages = joined(prompt, completion) if completion else prompt
            ids = chat_ids(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=False))
        elif self.add_eos:
            ids, _ = prompt_and_completion(tokenizer, prompt, completion, {})
        else:
            ids = chat_ids(tokenizer, prompt + completion)
        if not ids:
            raise ConfigError(f"reward model {self.name}: a prompt and its completion are empty, and have no score")
        return ids[-self.max_length :] if self.max_length else ids

    def _check_architecture(self, path: str, model: Model) -> None:
        found = (model.hf_config or {}).get("architectures") or ()
        if peft.is_adapter(path) and peft.read_config(path).head == self.head:
            return  # which brings the head that its base, a language model, lacks
        if not any(self.architecture in name or name in STEP_TOKENS for name in found):
            raise ConfigError(
                f"{self.prefix}{path} is no {self.kind.replace('_', ' ')}: its config.json names "
                f"{', '.join(found) or 'no architecture'}; a {self.head} head comes with a ...For{self.architecture}; "
                f"train one with {self.config}"
            )


class ProcessRewardModel(RewardModel):
    """A grader that makes one number of a process reward model's ratings of the steps of each completion.

    Steps are the parts of a completion between `separator`s that are more than white space; of several messages, those
    of the last one. The model reads the prompt and the steps, `step_token` behind each, in place of the separator, as
    it was trained to: by default the separator itself, and `<extra_0>` for Qwen2.5-Math-PRM. At the last token of that
    it gives the probability that the step is right. The names of its two labels in config.json say which means that
    (see `right_label`). `aggregation` makes one number of those of a completion: min (arXiv 2312.08935), product
    (2305.20050), mean, last or sum. A completion without steps has 0.

    With `labels`, the tokens of right and wrong, the model is a language model that writes one of them behind a step:
    of the logits z where it would, the probability is `exp(z_right) / (exp(z_right) + exp(z_wrong))`. Then the text
    stays as it is, with `step_token` before each separator and at its end (Math-Shepherd, arXiv 2312.08935). With
    `turns` each step is a turn of the user, the first behind the prompt and a space, and the assistant's answer to it
    the label of right (RLHFlow's models, arXiv 2405.07863): a `step_token` is not read.

    Prompts are rendered and tokenized as a process_reward_model run does, with the model's own tokenizer and chat
    template. Rows of more than `max_length` tokens lose their end, and the steps that end there. Other options, and
    what it raises, are as in `RewardModel`; and ConfigError for labels that are not a token each, and for those of a
    token classification model that do not say which is right.
    """

    prefix, kind, head = "prm:", "process_reward_model", "step"
    architecture = "TokenClassification"
    config = "configs/prm.py, or name the tokens by which a language model rates, labels=('+', '-')"

    def __init__(
        self,
        path: str | Model,
        separator: str = "\n",
        step_token: str | None = None,
        aggregation: str = "min",
        labels: tuple[str, str] | None = None,
        turns: bool = False,
        **options: Any,
    ):
        if aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"{self.prefix}{path}: aggregation is {aggregation!r}, but it is one of {', '.join(AGGREGATIONS)}"
            )
        if not separator:
            raise ConfigError(f"{self.prefix}{path}: separator is empty, but it is the text between steps")
        if labels is not None:
            if isinstance(labels, str) or len(labels) != 2 or not all(isinstance(label, str) for label in labels):
                raise ConfigError(
                    f"{self.prefix}{path}: labels is {labels!r}, but it takes two texts, a token of right and one of "
                    "wrong, ('+', '-')"
                )
            self.head = "lm"
        elif turns:
            raise ConfigError(f"{self.prefix}{path}: turns is true, but labels is None: set labels=('+', '-')")
        if "add_eos" in options:  # steps have ends of their own
            raise TypeError("unexpected keyword argument 'add_eos'")
        super().__init__(path, **options)
        self.labels, self.turns = labels, turns
        if labels is None:
            self._program = functools.partial(right_rows, right_label(self.model.hf_config or {}, self.name))
        else:
            ids = [self.model.tokenizer(label, add_special_tokens=False)["input_ids"] for label in labels]
            if any(len(own) != 1 for own in ids) or ids[0] == ids[1]:
                raise ConfigError(
                    f"{self.prefix}{path}: labels is {labels!r}, of the tokens {ids}, but it takes a token of right "
                    "and one of wrong"
                )
            self._label_ids = tuple(own[0] for own in ids)
            self._program = functools.partial(label_rows, self._label_ids)
        named = (STEP_TOKENS.get(name) for name in (self.model.hf_config or {}).get("architectures") or ())
        self.separator, self.aggregation = separator, aggregation
        self.step_token = step_token or next(filter(None, named), separator)

    @property
    def gives_steps(self) -> bool:
        """True where the reward is a sum over steps, so that each has its part of it (see `StepCredit`)."""
        return self.aggregation in ("sum", "mean")

    def __call__(
        self, prompts: list[Any], completions: list[Any], log_extra: Callable[..., None] | None = None
    ) -> list[float]:
        """The aggregated probabilities of the steps of each completion; logs where steps end, and their parts."""
        combine, rated = AGGREGATIONS[self.aggregation], self.steps(prompts, completions)
        if log_extra is not None:
            log_extra(f"{self.name}/steps", [self._parts(*row) for row in zip(completions, rated, strict=True)])
        return [float(combine(steps)) if len(steps) else 0.0 for steps in rated]

    def steps(self, prompts: list[Any], completions: list[Any]) -> list[np.ndarray]:
        """The probability that each step of each completion is right."""
        rows = [self._row(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        found = iter(self._computed(self._program, [ids for ids, ends in rows if ends]))
        return [next(found)[ends] if ends else np.zeros(0, np.float32) for _, ends in rows]

    def _parts(self, completion: Any, rated: np.ndarray) -> list[tuple[int, float]]:
        """(letters, reward) of each step: the letters of the completion up to its end, with what separates it."""
        if not len(rated):
            return []
        text = text_of(completion)
        share = len(rated) if self.aggregation == "mean" else 1
        # Of a row that lost its end there are more steps than were rated.
        return [(end, float(right) / share) for (_, end), right in zip(self._split(text), rated, strict=False)]

    def _split(self, text: str) -> list[tuple[str, int]]:
        """The steps of a text, and the letters up to the end of each, with what separates it."""
        parts = text.split(self.separator)
        ends = itertools.accumulate(len(part) + len(self.separator) for part in parts)
        return [(part, end) for part, end in zip(parts, ends, strict=True) if part.strip()]

    def _row(self, prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
        """The token ids of a prompt and its steps, and where each of them ends."""
        if is_conversational(prompt):
            prompt, messages = self._messages(prompt, completion)
            if messages and messages[-1]["role"] == "assistant":
                *before, last = messages
                prompt, completion = joined(prompt, before) if before else prompt, last.get("content") or ""
            else:
                completion = ""  # of an episode that failed, or ended with an observation
        steps, tokenizer = [step for step, _ in self._split(completion)], self.model.tokenizer
        if self.turns:
            ids, ends = self._row_of_turns(prompt, steps)
        else:
            between = "" if self.labels is None else self.separator
            ids, ends = with_steps(tokenizer, render_prompt(tokenizer, prompt), steps, self.step_token, between)
        length = self.max_length or len(ids)
        return ids[:length], [end for end in ends if end < length]

    def _row_of_turns(self, prompt: Any, steps: list[str]) -> tuple[list[int], list[int]]:
        """The token ids of a conversation of steps that are all told right, and the places before these answers."""
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if said[-1]["role"] != "user":
            raise ConfigError(
                f"reward model {self.name}: turns is true, but a prompt ends with {said[-1]}: end it with the user's "
                "turn, which the first step is put behind"
            )
        first, ids, ends = f"{text_of_content(said.pop()['content'])} ", list[int](), list[int]()
        assert self.labels is not None
        tokenizer, right = self.model.tokenizer, self.labels[0]
        for step in steps:
            said.append({"role": "user", "content": first + step.strip()})
            before, first = ids, ""
            ids = chat_ids(tokenizer, render_chat(tokenizer, said, add_generation_prompt=True))
            if before and ids[: len(before) + 1] != [*before, self._label_ids[0]]:
                raise ConfigError(
                    f"reward model {self.name}: turns is true, but its chat template does not write {right!r} at once "
                    "behind what opens the assistant's turn"
                )
            ends.append(len(ids) - 1)
            said.append({"role": "assistant", "content": right})
        return ids, ends


KINDS: tuple[type[RewardModel], ...] = (RewardModel, ProcessRewardModel)


def with_reward_models(specs: Any) -> Any:
    """The reward specifications (one, or nested lists of them) with a grader of `KINDS` for each reward model.

    A reward model is named `model:<path>` or `prm:<path>`, with options in brackets, `model:runs/reward_model/hf(
    add_eos=True, max_length=512)`; as in TRL, by a bare hub id, `owner/name`, or a folder with a config.json; or it is
    a Model in memory. Raises ConfigError for a path without a reward model.
    """
    if isinstance(specs, Model):
        return next((kind for kind in KINDS if kind.head == specs.net.config.head), RewardModel)(specs)
    if isinstance(specs, str):
        if (named := path_and_options(specs)) is None:
            return specs
        kind, path, options = named
        try:
            return kind(path, **options)
        except ConfigError as error:
            if specs.startswith(kind.prefix):
                raise
            raise ConfigError(f"the reward {specs!r} was read as a reward model, model:{path}: {error}") from error
        except TypeError as error:
            own = "separator, step_token, aggregation, labels, turns" if kind is ProcessRewardModel else "add_eos"
            raise ConfigError(
                f"the options of {specs!r}: {error}; there are max_length, rows, {own}, dtype, name, offload, "
                "tokenizer, chat_template and trust_remote_code"
            ) from error
    if isinstance(specs, list | tuple):
        return [with_reward_models(spec) for spec in specs]
    return specs


def path_and_options(spec: str) -> tuple[type[RewardModel], str, dict[str, Any]] | None:
    """The kind, the path and the options of the reward model that a reward names, or None for another reward."""
    named = next((kind for kind in KINDS if spec.startswith(kind.prefix)), None)
    path, options = split_options(spec.removeprefix("" if named is None else named.prefix))
    # No function is named like a hub id, or like the folder of a model.
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) and not path.endswith(".py")
    if named is None and not is_hub_id and not (os.sep in path and (Path(path).expanduser() / "config.json").is_file()):
        return None
    return named or RewardModel, path, options


def right_label(hf: Mapping[str, Any], name: str) -> int:
    """The label that a token classification model of two labels gives to right steps, by their names in its config.json
    `hf` (id2label, label2id): 1 where they are not named, or as transformers does (LABEL_0, LABEL_1), as in TRL.

    Raises ConfigError, with the `name` of the model, where not one of them says right and the other wrong.
    """
    if not any(ProcessRewardModel.architecture in own for own in hf.get("architectures") or ()):
        return 1
    named = {int(number): str(label) for number, label in (hf.get("id2label") or {}).items()}
    numbers = {str(label): int(number) for label, number in (hf.get("label2id") or {}).items()}
    named = named or {number: label for label, number in numbers.items()}
    if named in ({}, {0: "LABEL_0", 1: "LABEL_1"}):
        return 1
    words = {number: {label.casefold(), *re.split(r"[\W_]+", label.casefold())} for number, label in named.items()}
    says = {(bool(own & RIGHT), bool(own & WRONG), "not" in own): number for number, own in words.items()}
    agree = not numbers or numbers == {label: number for number, label in named.items()}
    if says.keys() != {(True, False, False), (False, True, False)} or not agree:
        raise ConfigError(
            f"reward model {name}: the names of its labels do not say which is right (id2label {named}, label2id "
            f"{numbers}): call one right and one wrong in both entries of its config.json"
        )
    return says[True, False, False]


def offloaded(model: Model) -> Model:
    """The model with its parameters in the host's memory. Raises ConfigError for devices without such."""
    if not has_host_memory():
        raise ConfigError(
            f"offload is true, but the memory of a {jax.default_backend()} here has no part in the host's "
            "(pinned_host): leave it out"
        )
    return dataclasses.replace(model, params=on_host(model.params))


def row_width(longest: int) -> int:
    """The width of rows of which the longest has so many tokens: NARROWEST, or the first of its doubles that does."""
    return NARROWEST << ((longest - 1) // NARROWEST).bit_length()


def short_name(path: str) -> str:
    """The last informative name of a path: reward_model for `runs/reward_model/hf`."""
    names = [name for name in path.replace(":", "/").split("/") if name not in ("", ".", "hf")]
    return names[-1] if names else path


@functools.partial(jax.jit, static_argnums=0)
def score_rows(net: Net, params: Params, tokens, segments) -> jax.Array:
    """The scores `[N]` of rows `[N,T]`."""
    return last_scores(net, params, Inputs(tokens, segments))


@functools.partial(jax.jit, static_argnums=(0, 1))
def right_rows(label: int, net: Net, params: Params, tokens, segments) -> jax.Array:
    """The probabilities `[N,T]` that a step which ends at a token of rows `[N,T]` is right, which has that label."""
    return jax.nn.softmax(step_logits(net, params, Inputs(tokens, segments)))[..., label]


@functools.partial(jax.jit, static_argnums=(0, 1))
def label_rows(labels: tuple[int, int], net: Net, params: Params, tokens, segments) -> jax.Array:
    """The probabilities `[N,T]` of the first of two tokens, `labels`, against the second, behind each token."""
    return jax.nn.softmax(next_logits(net, params, Inputs(tokens, segments), labels))[..., 0]
