"""CombinedGrader: several graders as one reward, their weighted sum."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config.background import in_thread
from jaxrl_llm.config.user_code import contained
from jaxrl_llm.rewards.call import SERVICES, Call, mean_extras, read_results
from jaxrl_llm.rewards.signatures import RewardError, RowGrader, accepted, as_grader, reward_names


class CombinedGrader:
    """A grader that gives `sum_i weight_i * score_i` over the `graders` that apply to a completion.

    `graders` are rewards of any kind, CombinedGraders among them; `weights` is one number for each, ones unless given.
    A completion to which none applies gets None. The mean score of each grader is logged as `<name>/<grader>`.
    `setup` and `close` call those of the graders that have one. Raises RewardError: no graders, or weights that do not
    fit.
    """

    def __init__(self, graders: Sequence[Any], weights: Sequence[float] | None = None, name: str = "combined"):
        self.graders = [as_grader(grader) for grader in graders]
        self.originals = list(graders)
        self.name = name
        self.is_set_up = False
        self.weights = [1.0] * len(self.graders) if weights is None else [float(weight) for weight in weights]
        if not self.graders or len(self.weights) != len(self.graders) or not np.isfinite(self.weights).all():
            raise RewardError(
                f"CombinedGrader {name!r} has {len(self.graders)} graders and the weights {self.weights}; give one or "
                "more graders, and one finite weight for each, or none for all ones"
            )

    async def setup(self) -> None:
        """Call `setup()` of every grader that has one, once until `close`."""
        if not self.is_set_up:
            self.is_set_up = True
            for grader in self.originals:
                await call_if_present(grader, "setup")

    async def close(self) -> None:
        """Call `close()` of every grader that has one, also where that of another raises."""
        self.is_set_up = False
        async with contextlib.AsyncExitStack() as stack:
            for grader in reversed(self.originals):
                stack.push_async_callback(call_if_present, grader, "close")

    async def __call__(
        self,
        prompts: Any,
        completions: Any,
        completion_ids: Any,
        log_metric: Any = None,
        log_total: Any = None,
        prompt_numbers: Sequence[int] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The weighted sums; the graders run at the same time, those that are not async in threads."""
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        arguments |= {name: values for name, values in columns.items() if isinstance(values, list)}
        services = {name: value for name, value in columns.items() if name not in arguments}
        services |= {} if log_metric is None else {"log_metric": log_metric, "log_total": log_total}

        def apart(function: Callable[[], Any]) -> asyncio.Future[Any]:
            # Not asyncio.to_thread, whose threads are few and keep the process alive: a grader may hang.
            return asyncio.wrap_future(in_thread(functools.partial(contextvars.copy_context().run, function), "reward"))

        async def results_of(call: Call) -> Any:
            if not isinstance(call.function, RowGrader):
                return await (call() if call.is_async else apart(call))
            if call.is_async:
                return await asyncio.gather(*map(call.run, call.keys))
            return await apart(lambda: [call.run(row) for row in call.keys])

        calls = [
            Call(name, grader, accepted(name, grader, arguments, SERVICES), services, prompt_numbers=prompt_numbers)
            for name, grader in zip(reward_names(self.graders), self.graders, strict=True)
        ]
        batches = await asyncio.gather(*map(results_of, calls))
        total, applies = np.zeros(len(prompts)), np.zeros(len(prompts), bool)
        for call, results, weight in zip(calls, batches, self.weights, strict=True):
            scores, extras = read_results(call.name, results, len(prompts))
            if log_metric is not None and np.isfinite(scores).any():
                log_metric(f"rewards/{self.name}/{call.name}", float(np.nanmean(scores)))
                for key, value in mean_extras(call.name, extras).items():
                    log_metric(key, value)
            total += weight * np.nan_to_num(scores)
            applies |= np.isfinite(scores)
        return [float(value) if known else None for value, known in zip(total, applies, strict=True)]


async def call_if_present(grader: Any, method: str) -> None:
    """Call `grader.<method>()`, async or not, when there is one."""
    function = getattr(grader, method, None)
    if callable(function):
        with contained():
            outcome = function()
            if inspect.isawaitable(outcome):
                await outcome
