"""Measuring a policy on held-out prompts by sampling it."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import row_shards
from jaxrl_llm.training.experience import Row, Sampler

KEY = 2**31 - 1  # folded into the run's key: evaluations never share numbers with a training step


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`eval/*` metrics of a policy on fixed examples: sampled at the training temperature, and greedy.

    A completion counts as correct when the first reward function gives it at least `correct_at`. Every evaluation
    draws the same random numbers, so that two of them differ by the policy only.
    """

    sampled: Sampler
    greedy: Sampler
    examples: list[Row]
    prompts_at_once: int
    correct_at: float

    def __call__(self, params: Params, key) -> dict[str, float]:
        """`eval/reward`, `eval/accuracy` and `eval/pass@k` (sampled), `eval/greedy_accuracy`, completion lengths."""
        key = jax.random.fold_in(key, KEY)
        rewards, lengths, ended = self._run(self.sampled, params, key)
        greedy_rewards, _, _ = self._run(self.greedy, params, key)
        scores = np.asarray(combine_rewards(rewards, self.sampled.rewards.weights))
        k = self.sampled.engine.group_size
        metrics = {
            "eval/reward": float(np.nanmean(scores)) if np.isfinite(scores).any() else float("nan"),
            "eval/accuracy": self._accuracy(rewards, 1),
            "eval/greedy_accuracy": self._accuracy(greedy_rewards, 1),
            "eval/mean_length": float(lengths.mean()),
            "eval/clipped_ratio": float(1.0 - ended.mean()),
        }
        if k > 1:
            metrics[f"eval/pass@{k}"] = self._accuracy(rewards, k)
        return metrics

    def _accuracy(self, rewards: np.ndarray, group: int) -> float:
        """The share of groups of completions with a correct one among them."""
        return float((rewards[:, 0].reshape(-1, group) >= self.correct_at).any(axis=1).mean())

    def _run(self, sampler: Sampler, params: Params, key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards, lengths and endings of all rows, some prompts at a time; the last batch is filled up."""
        size = -(-min(self.prompts_at_once, len(self.examples)) // row_shards(sampler.mesh)) * row_shards(sampler.mesh)
        parts: list[tuple[Any, ...]] = []
        for start in range(0, len(self.examples), size):
            examples = self.examples[start : start + size]
            rows = len(examples) * sampler.engine.group_size
            filled = examples + [self.examples[-1]] * (size - len(examples))
            out = sampler(params, filled, jax.random.fold_in(key, start))
            parts.append(
                (out.rewards[:rows], np.asarray(out.rollout.lengths)[:rows], np.asarray(out.rollout.finished)[:rows])
            )
        rewards, lengths, ended = (np.concatenate(part) for part in zip(*parts, strict=True))
        return rewards, lengths, ended
