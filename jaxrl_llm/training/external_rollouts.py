"""Rollouts that a function writes in place of the engine, as the arrays that the engine would have returned."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.distributed.sharding import local_rows, row_shards, rows_to_global
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rewards.grader import TrainerState
from jaxrl_llm.rollout.engine import Engine, Rollout
from jaxrl_llm.training.online import Row, scored_logps
from jaxrl_llm.training.rollout_functions import RolloutTrainer, Written, call_rollout_function

WIDTH_MULTIPLE = 64  # of the prompts a function generates from: a conversation grows


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Calls a rollout function with the policy. temperature: of log-probs that it does not give."""

    function: Callable[..., Any]
    engine: Engine
    tokenizer: Any
    mesh: Mesh
    prompt_width: int
    temperature: float

    def __call__(self, params: Params, examples: Sequence[Row], key, state: TrainerState) -> tuple[Rollout, dict]:
        """The rows of this step, and the columns that the function returned besides.

        Raises ConfigError when it raises, or returns something else than the rows.
        """
        trainer = RolloutTrainer(self._generate(params, key), self.tokenizer, self._settings(), state)
        ids = [example["prompt_ids"] for example in examples]
        written = call_rollout_function(self.function, [example["prompt"] for example in examples], ids, trainer)
        rollout = self._arrays(written)
        if written.logprobs is None:
            rows = rollout.tokens.shape[0]
            inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=self.prompt_width)
            logps = scored_logps(self.engine.net, params, inputs, self.temperature, rows, row_shards(self.mesh))
            rollout = rollout._replace(sample_logps=logps * rollout.mask)
        return rollout, written.columns

    def _settings(self) -> dict[str, Any]:
        """The settings under TRL's and transformers' names."""
        engine = self.engine
        return {
            "num_generations": engine.group_size,
            "max_completion_length": engine.max_completion_length,
            "max_new_tokens": engine.max_completion_length,
            **dataclasses.asdict(engine.sampling),
        }

    def _generate(self, params: Params, key):
        calls = itertools.count()

        def generate(ids: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], list[list[float]]]:
            multiple = row_shards(self.mesh) // jax.process_count() or 1
            size = -(-len(ids) // multiple) * multiple
            width = -(-max(map(len, ids)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
            padded = pad_prompts([*ids, *[ids[-1]] * (size - len(ids))], width)
            prompts, segments = rows_to_global(padded, self.mesh)
            engine = dataclasses.replace(self.engine, group_size=count)
            rollout = engine.generate(params, prompts, segments, jax.random.fold_in(key, next(calls)))
            found = local_rows((rollout.tokens, rollout.sample_logps, rollout.lengths))
            rows = list(zip(*found, strict=True))[: len(ids) * count]
            tokens = [own[width : width + length].tolist() for own, _, length in rows]
            return tokens, [logps[width : width + length].tolist() for _, logps, length in rows]

        return generate

    def _arrays(self, written: Written) -> Rollout:
        width, room, rows = self.prompt_width, self.engine.max_completion_length, len(written.completion_ids)
        longest = max(map(len, written.prompt_ids))
        if longest > width or not all(written.prompt_ids):
            raise ConfigError(
                f"environment.rollout_func returned prompt_ids of {min(map(len, written.prompt_ids))} to {longest} "
                f"tokens, but they have 1 to rollout.max_prompt_length = {width}"
            )
        tokens, segments = pad_prompts(written.prompt_ids, width)
        body = np.zeros((4, rows, room), np.float32)  # tokens, segments, mask, log-probs
        lengths, finished = np.zeros(rows, np.int32), np.zeros(rows, bool)
        for row, ids in enumerate(written.completion_ids):
            n = lengths[row] = min(len(ids), room)
            body[0, row, :n], body[1, row, :n], body[2, row, :n] = ids[:n], 1, written.sampled[row][:n]
            if written.logprobs is not None:
                body[3, row, :n] = np.asarray(written.logprobs[row][:n]) * body[2, row, :n]
            finished[row] = n == len(ids) and ids[-1] in self.engine.eos
        if not np.isfinite(body[3]).all():
            raise ConfigError("environment.rollout_func returned logprobs that are not finite")
        none = np.zeros(tokens.shape, np.float32)
        return Rollout(
            *rows_to_global(
                (
                    np.concatenate([tokens, body[0].astype(np.int32)], 1),
                    np.concatenate([segments, body[1].astype(segments.dtype)], 1),
                    np.concatenate([none, body[2]], 1),
                    np.concatenate([none, body[3]], 1),
                    lengths,
                    finished,
                    lengths.astype(np.float32),
                ),
                self.mesh,
            )
        )
