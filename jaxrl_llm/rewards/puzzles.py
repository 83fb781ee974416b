"""The verifier of reasoning-gym tasks (`data.path="task:reasoning_gym(leg_counting)"`)."""

import functools
import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.signatures import RewardError, text_of


def reasoning_gym_score(completions: Sequence[Any], reasoning_gym: Sequence[str], **columns: Any) -> list[float]:
    """The score, 0 to 1, that the task's own verifier gives the answer.

    The answer is the content of the last `<answer>...</answer>`, or the whole completion. The column `reasoning_gym`
    names the entry that it answers. It needs the package reasoning-gym.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RewardError("reasoning_gym_score needs the package reasoning-gym: pip install reasoning-gym")
    scores = []
    for completion, reference in zip(completions, reasoning_gym, strict=True):
        entry = json.loads(reference)
        dataset = _dataset(json.dumps(entry["config"], sort_keys=True))
        text = text_of(completion)
        end = text.rfind("</answer>")
        start = text.rfind("<answer>", 0, max(end, 0))
        answer = (text[start + len("<answer>") : end] if start >= 0 else text).strip()
        scores.append(float(dataset.score_answer(answer, dataset[entry["index"]])))
    return scores


@functools.lru_cache(maxsize=64)
def _dataset(config: str) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(**json.loads(config))
