"""The first stage of A*-PO: completions of every prompt by the reference, sampled and scored before the first step."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.algorithms.random_streams import REFERENCE_SAMPLES
from jaxrl_llm.config.files import replaced
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data.scored_prompts import SCORES, ScoredPrompts
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import on_device, row_shards, rows_to_global
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.advantages import AdvantageStep
from jaxrl_llm.training.evaluation.run import full_batches
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.reference import Reference
from jaxrl_llm.training.rollouts.worker import RolloutWorker

FILE = "reference_scores.jsonl"
NOTE_SECONDS = 60.0  # between lines of how far it is


@dataclass(frozen=True)
class FirstStage:
    """Samples the completions of the reference, or without one of the policy as the run starts, and their scores.

    Scores are shaped like those of training (`AdvantageStep.shaped`). Row i of all draws its random numbers from the
    seed and i alone, so that the scores are the same whatever `prompts_at_once`, devices and processes. They are
    written to `folder` as a data set, the rows with their scores, where JSON holds the rows.
    """

    worker: RolloutWorker
    prompts: ScoredPrompts
    advantages: AdvantageStep
    reference: Reference | None
    prompts_at_once: int
    seed: int
    folder: Path

    def __call__(self, params: Params, note: Callable[[str], None]) -> None:
        """Give the prompts their scores, unless they are known; `note` shows lines of progress and the result."""
        prompts, worker = self.prompts, self.worker
        if prompts.known:
            return
        if self.reference is not None:
            params = on_device(self.reference.params)
        n, group, weights = worker.engine.group_size, RowGroup.of(worker.mesh), worker.rewards.weights
        note(f"first stage: the reference completes each of {len(prompts.examples)} prompts {amount(n, 'time')}")
        key, found = jax.random.fold_in(jax.random.key(self.seed), REFERENCE_SAMPLES), []
        began = noted = time.monotonic()
        batches = full_batches(prompts.examples, self.prompts_at_once, row_shards(worker.mesh), group)
        for start, count, own, counted in batches:
            out = worker(params, own, key, start * n, counted=counted)
            raw = combine_rewards(rows_to_global(out.rewards, worker.mesh), weights)
            scores = multihost_utils.process_allgather(self.advantages.shaped(raw, out.rollout), tiled=True)
            found.append(scores[: count * n])
            now, done, total = time.monotonic(), start + count, len(prompts.examples)
            if now - noted >= NOTE_SECONDS and done < total:
                left = (now - began) * (total - done) / done
                minutes = amount(f"{left / 60:.0f}", "minute")
                note(f"first stage: {done} of {total} prompts, about {minutes} left")
                noted = now
        scores = np.concatenate(found).reshape(-1, n)
        prompts.give(scores)
        solved = f", without {amount(prompts.left_out, 'prompt')} that none of them solved" if prompts.left_out else ""
        note(f"first stage: their mean score is {np.nanmean(scores):.4g}{solved}{self._written(scores)}")

    def _written(self, scores: np.ndarray) -> str:
        """Write the rows with their scores, in the first process, and return in words where they are now, or why they
        are not."""
        if jax.process_index():
            return ""
        path, left = self.folder / FILE, ("prompt_ids", PIXELS)
        try:
            with replaced(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
                for row, own in zip(self.prompts.examples, scores.tolist(), strict=True):
                    columns = {name: value for name, value in row.items() if name not in left}
                    columns[SCORES] = [None if math.isnan(score) else score for score in own]
                    file.write(json.dumps(columns, ensure_ascii=False) + "\n")
        except (OSError, TypeError, ValueError) as error:  # a full disk, or rows of what JSON does not hold
            return f"; they could not be written to {path}: {error}"
        return f"; {path} has the rows with their scores"


def assume_scores(source: Any) -> int:
    """Take a score of 1 for each prompt whose scores are not known, for steps that are measured and not trained on;
    returns the number of these prompts."""
    prompts = source.producer.pipeline if isinstance(source, OnlineSource) else None
    if not isinstance(prompts, ScoredPrompts) or prompts.known:
        return 0
    prompts.give(np.ones((len(prompts.examples), 1)))
    return len(prompts.examples)
