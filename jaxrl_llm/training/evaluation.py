"""Measuring a policy on held-out prompts by sampling it."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import row_shards
from jaxrl_llm.training.experience import Row, Sampler

KEY = 2**31 - 1  # folded into the run's key: evaluations never share numbers with a training step


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`eval/*` metrics of a policy on fixed examples: sampled at the training temperature, and greedy.

    A completion counts as correct when the first reward function gives it at least `correct_at`. Every evaluation
    draws the same random numbers, so that two of them differ by the policy only. Processes share the examples and
    get the same metrics.
    """

    sampled: Sampler
    greedy: Sampler
    examples: list[Row]
    prompts_at_once: int
    correct_at: float

    def __call__(self, params: Params, key) -> dict[str, float]:
        """`eval/reward`, `eval/accuracy` and `eval/pass@k` (sampled), `eval/greedy_accuracy`, completion lengths.

        k is every power of two up to the number of samples, and that number; see `pass_at_k`.
        """
        key = jax.random.fold_in(key, KEY)
        rewards, lengths, ended = self._run(self.sampled, params, key)
        greedy_rewards, _, _ = self._run(self.greedy, params, key)
        scores = np.asarray(combine_rewards(rewards, self.sampled.rewards.weights))
        samples = self.sampled.engine.group_size
        correct = (rewards[:, 0] >= self.correct_at).reshape(-1, samples)
        ks = [k for k in range(1, samples + 1) if k & (k - 1) == 0 or k == samples]
        return {
            "eval/reward": float(np.nanmean(scores)) if np.isfinite(scores).any() else float("nan"),
            "eval/accuracy": float(correct.mean()),
            "eval/greedy_accuracy": float((greedy_rewards[:, 0] >= self.correct_at).mean()),
            "eval/mean_length": float(lengths.mean()),
            "eval/clipped_ratio": float(1.0 - ended.mean()),
            **{f"eval/pass@{k}": pass_at_k(correct, k) for k in ks},
        }

    def _run(self, sampler: Sampler, params: Params, key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards, lengths and endings of all rows, some prompts at a time."""
        parts: list[tuple[Any, ...]] = []
        for start, count, own in full_batches(self.examples, self.prompts_at_once, row_shards(sampler.mesh)):
            out = sampler(params, own, jax.random.fold_in(key, start))
            found = (out.rewards, out.rollout.lengths, out.rollout.finished)
            rows = count * sampler.engine.group_size
            parts.append(tuple(x[:rows] for x in multihost_utils.process_allgather(found, tiled=True)))
        rewards, lengths, ended = (np.concatenate(part) for part in zip(*parts, strict=True))
        return rewards, lengths, ended


class Share(NamedTuple):
    """This process's part of one batch."""

    start: int  # position of the batch's first example among all
    count: int  # examples in the batch, without those that fill it up
    own: list[Any]


def full_batches(examples: Sequence[Any], at_once: int, multiple: int) -> Iterator[Share]:
    """This process's part of each batch of about `at_once` examples.

    All batches have the same size, which the row shards of the mesh (`multiple`) and the processes divide; the last one
    is filled up by repeating its last example.
    """
    processes, process = jax.process_count(), jax.process_index()
    multiple = math.lcm(multiple, processes)
    size = -(-max(min(at_once, len(examples)), 1) // multiple) * multiple
    part = size // processes
    for start in range(0, len(examples), size):
        batch = list(examples[start : start + size])
        filled = batch + [batch[-1]] * (size - len(batch))
        yield Share(start, len(batch), filled[process * part : (process + 1) * part])


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """The probability that one of k completions of a prompt is correct, averaged over prompts `correct [B, n]`.

    Unbiased from n >= k samples of which c are correct: 1 - C(n-c, k) / C(n, k). Source: arXiv 2107.03374.
    """
    n = correct.shape[1]
    by_count = np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])
    return float(by_count[correct.sum(axis=1)].mean())
