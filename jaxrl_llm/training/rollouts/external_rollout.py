"""External rollouts: a function of the user's samples in place of the engine, as in TRL and axolotl.

| form | called with | returns |
|---|---|---|
| TRL | `f(prompts, trainer)` | `{"prompt_ids", "completion_ids", "logprobs"}`, N lists each; `env_mask` and columns |
| axolotl | `f(model, processing_class, prompts, generation_config)` | N texts |

Rows of a prompt are adjacent, `group_size` for each prompt. axolotl's form gets each prompt so often, as a dictionary:
`{"messages": [...]}`, or `{"prompt": text}`. Texts are tokenised, and their log-probs are the policy's.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config.copying import copied
from jaxrl_llm.config.resolve import ConfigError, naming, resolve, resolve_with_options
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.conversations import ended
from jaxrl_llm.data.templates import continued_ids, is_conversational
from jaxrl_llm.distributed.sharding import local_rows, row_shards, rows_to_global
from jaxrl_llm.environments.server import server
from jaxrl_llm.models.net import Params
from jaxrl_llm.rewards.signatures import shorten
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.rollouts.experience import rollout_of
from jaxrl_llm.training.rollouts.rollout_trainer import RolloutTrainer, TokenizerWithoutTorch
from jaxrl_llm.training.rollouts.rounds import Rounds, Sampled

BUILT_IN = {"server": server}
REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
ROUNDED = 1e-3  # what rounding may leave of a log-prob of 0
WIDTH_MULTIPLE = 64  # of the prompts a function generates from: they grow with every turn, and each width is compiled


class ExternalRows(NamedTuple):
    """The rows of a rollout function: N lists of token ids, of their loss mask, and of log-probs if it knows them."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    mask: list[list[int]]  # 1 on the policy's own tokens
    logprobs: list[list[float]] | None
    columns: dict[str, list[Any]]  # for rewards
    segments: list[list[int]] | None = None  # of the completions' tokens, 1 for what goes on behind the prompt


@dataclass(frozen=True)
class ExternalRollout:
    """Calls a rollout function with the policy, in place of `Engine.generate`.

    policy_logps: `(params, inputs) -> [N,T]`, the log-probs of the policy for rows whose function returns none. save:
    writes parameters for functions that hand the policy to a server, and returns where they are; its further arguments
    are those of `RolloutTrainer.publish_weights`. constraints: what completions keep to besides `engine.sampling`,
    under the names of vLLM, for functions that do not sample with the engine.
    """

    function: Callable[..., Any]
    engine: Engine
    tokenizer: Any
    mesh: Mesh
    prompt_width: int
    policy_logps: Callable[[Params, Inputs], Any]
    save: Callable[..., str]
    metrics: Callable[[], Mapping[str, float]] = dict  # of the newest weights that were published
    constraints: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, params: Params, examples: Sequence[Mapping[str, Any]], key, state: Any
    ) -> tuple[Rollout, dict[str, list[Any]]]:
        """The rows of this step, and the columns for rewards that the function returned.

        state: `trainer.state`. Raises ConfigError when the function raises, or returns anything but rows.
        """
        settings = {  # under the names of TRL, transformers and vLLM
            "num_generations": self.engine.group_size,
            "max_completion_length": self.engine.max_completion_length,
            "max_new_tokens": self.engine.max_completion_length,
            **asdict(self.engine.sampling),
            **self.constraints,
        }
        rounds = Rounds(partial(self._sample, params, key), partial(self.save, params))
        trainer = RolloutTrainer(rounds.generate, self.tokenizer, settings, state, rounds.save)
        ids = [example["prompt_ids"] for example in examples]
        with rounds.until_all_return():
            rows = call_rollout_function(self.function, [example["prompt"] for example in examples], ids, trainer)
            rollout = self._rollout(rows)
        if rows.logprobs is None:
            inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=self.prompt_width)
            rollout = rollout._replace(sample_logps=self.policy_logps(params, inputs) * rollout.mask)
        return rollout, rows.columns

    def _sample(
        self, params: Params, key, ids: Sequence[Sequence[int]], size: int, width: int, count: int, number: int
    ) -> list[Sampled]:
        """`sample` of Rounds; each program draws its own random numbers."""
        # Prompts must divide into the row shards of this process: the last one fills up, its rows are dropped.
        multiple = row_shards(self.mesh) // jax.process_count() or 1
        size, width = -(-size // multiple) * multiple, -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        padded = pad_prompts([*ids, *[ids[-1] if ids else [0]] * (size - len(ids))], width)
        prompts, segments = rows_to_global(padded, self.mesh)
        engine = replace(self.engine, group_size=count)
        rollout = engine.generate(params, prompts, segments, jax.random.fold_in(key, number))
        tokens, logps, lengths = local_rows((rollout.tokens, rollout.sample_logps, rollout.lengths))
        tokens, logps = (
            [row[width : width + length].tolist() for row, length in zip(rows, lengths, strict=True)]
            for rows in (tokens, logps)
        )
        starts = range(0, len(ids) * count, count)
        return [(tokens[start : start + count], logps[start : start + count]) for start in starts]

    def _rollout(self, rows: ExternalRows) -> Rollout:
        """The arrays that the engine would have returned. A completion that is too long is truncated."""
        width, longest = self.prompt_width, max(map(len, rows.prompt_ids))
        if longest > width or not all(rows.prompt_ids):
            raise ConfigError(
                f"environment.rollout_func returned prompt_ids of {min(map(len, rows.prompt_ids))} to {longest} "
                f"tokens, but they have 1 to rollout.max_prompt_length = {width}"
            )
        vocab = self.engine.net.config.vocab_size
        for name, each in (("prompt_ids", rows.prompt_ids), ("completion_ids", rows.completion_ids)):
            for row, ids in enumerate(each):
                if (token := next((token for token in ids if not 0 <= token < vocab), None)) is not None:
                    raise ConfigError(
                        f"environment.rollout_func returned token {token} in {name} of row {row}, but the model's "
                        f"tokens are 0 to {vocab - 1}"
                    )
        if rows.logprobs is not None and not all(np.isfinite(logps).all() for logps in rows.logprobs):
            raise ConfigError("environment.rollout_func returned logprobs that are not finite")
        ends = zip(rows.completion_ids, rows.mask, strict=True)
        finished = [ids[-1] in self.engine.eos or self._ends_in_stop(ids, mask) for ids, mask in ends]
        return as_rollout(rows, finished, width, self.engine.max_completion_length, self.mesh)

    def _ends_in_stop(self, ids: Sequence[int], mask: Sequence[int]) -> bool:
        """True where the last token completes a stop string, found as the engine finds it."""
        automaton, state, found = self.engine.automata.stop, 0, False
        if automaton is None:
            return False
        for token, own in zip(ids, mask, strict=True):
            transition = int(automaton.next[state, automaton.classes[token]])
            found = bool(own) and transition < 0
            state = max(transition, ~transition) if own else 0
        return found


def as_rollout(rows: ExternalRows, finished: Sequence[bool], width: int, limit: int, mesh: Mesh) -> Rollout:
    """The arrays that the engine would have returned, with prompts of `width` tokens.

    A completion of more than `limit` tokens is truncated, and then has not finished.
    """
    count = len(rows.completion_ids)
    prompts = pad_prompts(rows.prompt_ids, width)
    tokens, segments = np.zeros((count, limit), np.int32), np.zeros((count, limit), prompts[1].dtype)
    mask, logps = np.zeros((2, count, limit), np.float32)
    lengths, has_finished = np.zeros(count, np.int32), np.zeros(count, bool)
    for row, ids in enumerate(rows.completion_ids):
        n = lengths[row] = min(len(ids), limit)
        tokens[row, :n], mask[row, :n] = ids[:n], rows.mask[row][:n]
        segments[row, :n] = 1 if rows.segments is None else rows.segments[row][:n]
        if rows.logprobs is not None:
            logps[row, :n] = np.asarray(rows.logprobs[row][:n]) * mask[row, :n]
        has_finished[row] = n == len(ids) and finished[row]
    steps = lengths.astype(np.float32)
    return rollout_of(prompts, (tokens, segments, mask, logps), lengths, has_finished, steps, mesh)


def load_rollout_function(name: str | None) -> Callable[..., Any] | None:
    """The function of `environment.rollout_func`; raises ConfigError for a name or option that is wrong."""
    if name is None:
        return None
    with naming("environment.rollout_func"):
        if not name.endswith(")"):
            return resolve(name, BUILT_IN)
        function, options = resolve_with_options(name, BUILT_IN)
    # `server(...)` makes a rollout function; a user's function takes its options beside the arguments of a rollout.
    return function(**options) if function is server else partial(function, **options)


def returns_texts(function: Callable[..., Any]) -> bool:
    """True for a function of axolotl's form, which needs three arguments or four; TRL's needs two."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.kind in positional and x.default is x.empty for x in parameters) > 2


def call_rollout_function(
    function: Callable[..., Any], prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]], trainer: RolloutTrainer
) -> ExternalRows:
    """The checked rows that a function of either form returns for prompts.

    Raises ConfigError: the function raises, or does not return `num_generations` rows for each prompt in the form of
    the module's table.
    """
    count = trainer.num_generations
    rows, is_axolotl = len(prompts) * count, returns_texts(function)
    try:
        with contained():
            if is_axolotl:
                given = [
                    {"messages" if is_conversational(prompt) else "prompt": copied(prompt)}
                    for prompt in prompts
                    for _ in range(count)
                ]
                returned = function(trainer, TokenizerWithoutTorch(trainer.processing_class), given, trainer.args)
            else:
                returned = function(copied(list(prompts)), trainer)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"environment.rollout_func raised {error_text(error)}") from error
    if is_axolotl:
        asked = [list(prompt) for prompt in prompt_ids for _ in range(count)]
        ids = _tokenized_texts(returned, trainer.processing_class, asked)
        return ExternalRows(asked, ids, [[1] * len(row) for row in ids], None, {})
    return _checked_rows(returned, rows)


def _tokenized_texts(texts: Any, tokenizer: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
    rows = len(prompt_ids)
    if not isinstance(texts, Sequence) or len(texts) != rows or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"environment.rollout_func must return a list of {rows} texts, one for each prompt that it got; it "
            f"returned {shorten(texts)}"
        )
    return [
        ended(tokenizer, continued_ids(tokenizer, prompt, text), text)
        for prompt, text in zip(prompt_ids, texts, strict=True)
    ]


def _checked_rows(returned: Any, rows: int) -> ExternalRows:
    if not isinstance(returned, Mapping) or any(returned.get(name) is None for name in REQUIRED):
        raise ConfigError(
            f"environment.rollout_func must return a dictionary with {', '.join(REQUIRED)}; it returned "
            f"{shorten(returned)}"
        )
    try:
        lists = {name: list(values) for name, values in returned.items() if values is not None}
    except TypeError as error:
        raise ConfigError(
            f"environment.rollout_func must return lists with an entry for each row; it returned {shorten(returned)}"
        ) from error

    def read(name: str, number: Callable[[Any], Any]) -> list[list[Any]]:
        try:
            return [[number(value) for value in row] for row in lists[name]]
        except (TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"environment.rollout_func returned {shorten(lists[name])} as {name}, which are no lists of numbers, "
                f"one for each row: {error}"
            ) from error

    for name, values in lists.items():
        if len(values) != rows:
            raise ConfigError(
                f"environment.rollout_func returned {len(values)} {name}, but there are {rows} rows: "
                "rollout.group_size for each prompt, in order"
            )
    prompt_ids, ids = read("prompt_ids", int), read("completion_ids", int)
    # TRL has lists of the log-probs of several likely tokens; the first is that of the sampled one.
    logprobs = read("logprobs", lambda value: float(value[0] if isinstance(value, Sequence) else value))
    mask = read("env_mask", float) if "env_mask" in lists else [[1] * len(row) for row in ids]
    for row, lengths in enumerate(zip(map(len, ids), map(len, logprobs), map(len, mask), strict=True)):
        if not lengths[0] or len(set(lengths)) > 1:
            raise ConfigError(
                f"environment.rollout_func: row {row} has {lengths[0]} completion_ids, {lengths[1]} logprobs and "
                f"{lengths[2]} in env_mask; give one of each for each token, and at least one token"
            )
        if other := set(mask[row]) - {0, 1}:
            raise ConfigError(
                f"environment.rollout_func returned {min(other):g} in env_mask of row {row}; it takes 1 for tokens of "
                "the policy and 0 for others"
            )
        own = [logp for logp, is_own in zip(logprobs[row], mask[row], strict=True) if is_own]
        if ROUNDED < (highest := max(own, default=0.0)) < math.inf:
            raise ConfigError(
                f"environment.rollout_func returned {highest:g} in logprobs of row {row}; log-probs are at most 0, the "
                "natural logarithm of a token's probability"
            )
    columns = {name: values for name, values in lists.items() if name not in (*REQUIRED, "env_mask")}
    return ExternalRows(prompt_ids, ids, [list(map(int, row)) for row in mask], logprobs, columns)
