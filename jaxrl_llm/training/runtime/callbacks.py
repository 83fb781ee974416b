"""User callbacks, which see a run as it goes and may end, save or evaluate it: `Callback`, and `EarlyStopping`.

Before the first step comes `on_begin`. One step, with everything due: `on_step_begin`, the update, `on_step`, the
evaluation, `on_evaluate`, `on_checkpoint`, the save, `on_save`. After the last step the model is exported, and `on_end`
is called.
"""

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jaxrl_llm.config import ConfigError, from_json
from jaxrl_llm.config.entries import best_mode
from jaxrl_llm.config.resolve import closest, naming, resolve_with_options
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.models.model import Model
from jaxrl_llm.training.runtime.moment import EVALUATE, SAVE, STOP, Moment
from jaxrl_llm.training.runtime.trainer_callbacks import TrainerCallbackHooks, is_trainer_callback

HOOKS = ("on_begin", "on_step_begin", "on_step", "on_evaluate", "on_checkpoint", "on_save", "on_end")
LATE = ("on_begin", "on_step_begin", "on_checkpoint", "on_save")  # hooks that can end the run with the next step only
ANSWERS = {"on_step": (STOP, SAVE, EVALUATE), "on_evaluate": (STOP, SAVE)}  # of the other hooks STOP alone

Answer = str | list[str] | None


class CallbackError(ConfigError):
    """A callback that raised, or gave an invalid answer or state; the message names it, the hook and the step."""


class Callback(Protocol):
    """The hooks and methods of a callback, all optional; a hook may also be None.

    A hook that returns "stop" ends the run: this step is then the last, with evaluation, checkpoint and export as any
    last step has. In on_begin, on_step_begin, on_checkpoint and on_save it is the next step that is the last; in on_end
    it has no effect. "save" (of on_step and on_evaluate) and "evaluate" (of on_step) have this step saved or evaluated,
    whether it is due or not; before training on_evaluate saves nothing. Several are returned as a list.
    With several processes every process calls its own hooks, and the answers of process 0 count.
    """

    on_begin: Callable[[Moment], Answer] | None  # before the first step of this start
    on_step_begin: Callable[[Moment], Answer] | None  # before each step; the moment is of the step before it
    on_step: Callable[[Moment], Answer] | None  # after each update
    on_evaluate: Callable[[Moment], Answer] | None  # after each evaluation, that of step 0 too
    on_checkpoint: Callable[[Moment], Answer] | None  # before the state of the step is saved
    on_save: Callable[[Moment], Answer] | None  # once the state of the step is saved
    on_end: Callable[[Moment], Answer] | None  # once the trained model is in the folder

    def get_state(self) -> Any:
        """The state that a resumed run passes to `set_state`: anything that JSON writes. It is called for each
        checkpoint."""
        ...

    def set_state(self, state: Any) -> None:
        """Continues from the state that `get_state` returned."""
        ...


class EarlyStopping:
    """A callback that ends the run once `metric` was `patience` times in a row no better than its best value so far.

    Better is greater (mode "max") or smaller ("min") by more than `min_delta`; "auto" is min for losses and the like,
    by the end of the name. A value that is not a number is not better. A metric `eval/...` is read after every
    evaluation, the one before training too; any other after every step.
    Raises ConfigError for a patience below 1, a negative min_delta or another mode, and, at the first reading, when
    there is no such metric; later readings without it count for nothing.
    """

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "auto"):
        if patience < 1 or min_delta < 0 or mode not in ("auto", "max", "min"):
            raise ConfigError(
                f"early_stopping has patience {patience}, min_delta {min_delta} and mode {mode!r}; patience is 1 or "
                "more, min_delta 0 or more, and the mode auto, max or min"
            )
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.mode = best_mode(metric, mode)
        self.best: float | None = None
        self.waited = 0  # values in a row that did not improve on the best
        evaluated = metric.startswith("eval/")
        self.on_step = None if evaluated else self.look
        self.on_evaluate = self.look if evaluated else None

    def look(self, moment: Moment) -> str | None:
        """Returns "stop" once the metric has not improved for `patience` values in a row.

        Raises ConfigError for a metric that is not logged.
        """
        if self.metric not in moment.metrics:
            if self.best is not None or self.waited:
                return None  # some metrics are of some steps alone
            names = sorted(name for name in moment.metrics if name.startswith("eval/") or self.on_step)
            raise ConfigError(
                f"there is no metric {self.metric!r}; the closest is {closest(self.metric, names)}, of "
                f"{', '.join(names)}"
            )
        value = moment.metrics[self.metric]
        gain = math.inf if self.best is None else (value - self.best) * (1 if self.mode == "max" else -1)
        if not math.isnan(value) and gain > self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return STOP if self.waited >= self.patience else None

    def get_state(self) -> dict[str, Any]:
        """The best value so far, and the number of values after it."""
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from the state that `get_state` returned."""
        self.best, self.waited = state["best"], state["waited"]


early_stopping = EarlyStopping  # its name in configurations, and among the callbacks of `train`
BUILT_IN = {"early_stopping": early_stopping}


class Callbacks:
    """The callbacks of a run, by name. `note` shows a line, on the console of the run once it has one.

    `record` is the run's configuration as JSON, of which callbacks get a copy; `evaluates` says whether there is
    anything to evaluate. `stopped` is the name of the callback that has asked to end the run, None while it goes on,
    and `end` the last step then.
    """

    def __init__(self, named: Mapping[str, Any], record: str, folder: Path, evaluates: bool = True):
        self.named = dict(named)
        self.evaluates = evaluates
        self.stopped: str | None = None
        self.end = math.inf
        self.note: Callable[[str], None] = print
        self._config = from_json(record)
        self._folder = folder

    @property
    def every_step(self) -> bool:
        """True when a callback must see each step before the next one begins."""
        return any(_hook(callback, hook) for callback in self.named.values() for hook in ("on_step_begin", "on_step"))

    def __call__(self, hook: str, step: int, metrics: Mapping[str, float], model: Callable[[], Model]) -> set[str]:
        """Calls the hook of every callback that has it, in order; returns what they answered."""
        hooks = {name: method for name, callback in self.named.items() if (method := _hook(callback, hook))}
        if not hooks:
            return set()
        numbers = MappingProxyType({key: value for key, value in metrics.items() if key != "step"})
        moment = Moment(step, numbers, self._config, self._folder, model)
        answers, known = [], ANSWERS.get(hook, (STOP,))  # those given, each with the name of its callback
        with all_or_none():
            for name, method in hooks.items():
                with _naming(name, hook, step, self.named[name]):
                    given = method(moment)
                    for answer in given if isinstance(given, list) else [] if given is None else [given]:
                        if answer not in known:
                            words = " or ".join(f'"{word}"' for word in known)
                            raise ConfigError(f"it returned {given!r}; {hook} returns nothing, or {words}")
                        if answer == EVALUATE and not self.evaluates:
                            raise ConfigError(
                                "it asked for an evaluation, but there is nothing to evaluate: give data.eval_path or "
                                "an eval_dataset, and an eval.every that is not negative"
                            )
                        answers.append((answer, name))
        answers = gather(answers)[0]  # the same for all processes: they end, save and evaluate at the same step
        stopping = [name for answer, name in answers if answer == STOP]
        if stopping and self.stopped is None and hook != "on_end":
            self.stopped, self.end = stopping[0], step + (hook in LATE)
            self.note(f"{self.stopped} asked at step {step} to end the run")
        return {answer for answer, _ in answers}

    def get_state(self, step: int) -> dict[str, Any]:
        """The states of all callbacks, for a checkpoint; raises CallbackError for one that JSON cannot write."""
        states: dict[str, Any] = {}
        with all_or_none():
            for name, callback in self.named.items():
                if hasattr(callback, "get_state"):
                    with _naming(name, "get_state", step):
                        states[name] = json.loads(json.dumps(callback.get_state()))
        return {"stopped": self.stopped, "end": None if self.stopped is None else self.end, "states": states}

    def recall(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Tells callbacks of transformers the metrics of the steps that earlier starts have made, as its own state."""
        for callback in self.named.values():
            if isinstance(callback, TrainerCallbackHooks):
                callback.recall(lines)

    def set_state(self, kept: Mapping[str, Any], step: int, goes_on: bool) -> None:
        """Continues from the state that `get_state` returned; a callback that is new, or has new options, starts anew.

        A run that `goes_on` and was ended by one of its callbacks stays ended; a run that only starts from that
        checkpoint does not end.
        """
        if goes_on and kept["stopped"] in self.named:
            self.stopped, self.end = kept["stopped"], kept["end"]
        with all_or_none():
            for name, callback in self.named.items():
                if name in kept["states"] and hasattr(callback, "set_state"):
                    with _naming(name, "set_state", step):
                        callback.set_state(kept["states"][name])


def load_callbacks(specs: Iterable[Any]) -> dict[str, Any]:
    """The callbacks of `specs` (`name(option=value)`, or objects), each under its own name, in order.

    An object, or what a class makes, may be a TrainerCallback of transformers.

    Raises ConfigError for an unknown name or option, and for an object without any hook.
    """
    named: dict[str, Any] = {}
    for spec in specs:
        callback = _load(spec) if isinstance(spec, str | type) else spec
        name = spec if isinstance(spec, str) else type(callback).__name__
        callback = TrainerCallbackHooks(callback) if is_trainer_callback(callback) else callback
        if not any(_hook(callback, hook) for hook in HOOKS):
            raise ConfigError(
                f"the callback {name} has none of the methods {', '.join(HOOKS)}: it would never be called"
            )
        numbered = (name if count == 1 else f"{name} {count}" for count in range(1, len(named) + 2))
        named[next(free for free in numbered if free not in named)] = callback
    return named


def _load(spec: str | type) -> Any:
    with naming("callbacks"):
        name, make, options = (
            (spec.__name__, spec, {}) if isinstance(spec, type) else (spec, *resolve_with_options(spec, BUILT_IN))
        )
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        written = f"{name.partition('(')[0]}(name=value, ...)"
        raise ConfigError(f"the callback {name!r}: {error}; write {written}") from None
    try:
        with contained():
            return make(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise CallbackError(f"the callback {name!r} cannot be made: {error_text(error)}") from error


def _hook(callback: Any, name: str) -> Callable[[Moment], Any] | None:
    method = getattr(callback, name, None)
    if method is not None and not callable(method):
        raise ConfigError(f"{name} of the callback {type(callback).__name__} is {method!r}, which cannot be called")
    return method


@contextlib.contextmanager
def _naming(name: str, hook: str, step: int, callback: Any = None):
    """Turns the errors of a callback into CallbackError, with its name, the hook (transformers' own) and the step."""
    try:
        with contained():
            yield
    except Exception as error:
        called = callback.calling or hook if isinstance(callback, TrainerCallbackHooks) else hook
        text = str(error) if isinstance(error, ConfigError) else error_text(error)
        raise CallbackError(f"the callback {name}, {called} at step {step}: {text}") from error
