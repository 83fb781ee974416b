"""Code of the user's that a run calls as it goes, and that may end it early: `Callback`, and `early_stopping`.

One step, with everything due: the update, `on_step`, the evaluation, `on_evaluate`, `on_checkpoint`, the save. After
the last step the model is exported, and `on_end` is called.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jaxrl_llm.config import ConfigDict, ConfigError, from_json, to_json
from jaxrl_llm.config.resolve import closest, resolve_with_options
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.models.model import Model

HOOKS = ("on_step", "on_evaluate", "on_checkpoint", "on_end")
STOP = "stop"


class CallbackError(ConfigError):
    """A callback that failed, or returned or keeps what it may not; the message names it, the hook and the step."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a callback sees of the run: the step, its metrics by name, and what the run is."""

    step: int
    metrics: Mapping[str, float]  # those of an evaluation are named eval/...
    config: ConfigDict  # a copy: changes have no effect
    folder: Path  # output_dir
    make_model: Callable[[], Model]

    def model(self) -> Model:
        """The model as it is now. The next step reuses the memory of its parameters: copy those that you keep.

        With several processes all must use it alike.
        """
        return self.make_model()


class Callback(Protocol):
    """What a callback may have; any part may be missing, or a hook be None.

    A hook that returns "stop" asks to end the run: this step is then its last, with evaluation, checkpoint and export
    as any last step has (asked in on_checkpoint, which is too late for that, the next step is). In on_end it has no
    effect. With several processes every process calls its own hooks, and what those of the first say counts.
    """

    on_step: Callable[[Moment], str | None] | None  # after each update
    on_evaluate: Callable[[Moment], str | None] | None  # after each evaluation, that of step 0 too
    on_checkpoint: Callable[[Moment], str | None] | None  # before the state of the step is saved
    on_end: Callable[[Moment], str | None] | None  # once the trained model is in the folder

    def get_state(self) -> Any:
        """What a run that goes on hands to `set_state`: anything that JSON writes. Called for each checkpoint."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes on where `get_state` was called."""
        ...


class EarlyStopping:
    """A callback that ends a run whose metric does not get better; see `early_stopping`."""

    def __init__(self, metric: str, patience: int, min_delta: float, mode: str):
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best: float | None = None
        self.waited = 0  # values in a row that were no better
        evaluated = metric.startswith("eval/")
        self.on_step = None if evaluated else self.look
        self.on_evaluate = self.look if evaluated else None

    def look(self, moment: Moment) -> str | None:
        """ "stop" when the metric has not got better for `patience` times."""
        if self.metric not in moment.metrics:
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
        """The best value so far, and how many came after it."""
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `get_state` was called."""
        self.best, self.waited = state["best"], state["waited"]


def early_stopping(metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "max") -> EarlyStopping:
    """A callback that ends the run once `metric` was `patience` times in a row no better than its best value so far.

    Better is greater (mode "max") or smaller ("min") by more than `min_delta`; a value that is not a number is not.
    A metric `eval/...` is looked at after every evaluation, the one before training too; any other after every step.
    Raises ConfigError for a patience below 1, a negative min_delta or another mode, and, at the first look, when there
    is no such metric.
    """
    if patience < 1 or min_delta < 0 or mode not in ("max", "min"):
        raise ConfigError(
            f"early_stopping has patience {patience}, min_delta {min_delta} and mode {mode!r}; patience is 1 or more, "
            "min_delta 0 or more, and the mode max or min"
        )
    return EarlyStopping(metric, patience, min_delta, mode)


BUILT_IN = {"early_stopping": early_stopping}


class Callbacks:
    """The callbacks of a run. `note` shows a line.

    `stopped` is the name of the one that has asked to end the run, None while it goes on, and `end` its last step then.
    """

    def __init__(self, named: Mapping[str, Any], config: ConfigDict, note: Callable[[str], None] = print):
        self.named = dict(named)
        self.stopped: str | None = None
        self.end = math.inf
        self.note = note
        self._config = from_json(to_json(config))
        self._folder = Path(config.output_dir)

    @property
    def every_step(self) -> bool:
        """True when a callback is to see each step before the next one begins."""
        return any(_hook(callback, "on_step") for callback in self.named.values())

    def __call__(self, hook: str, step: int, metrics: Mapping[str, float], model: Callable[[], Model]) -> None:
        """Calls the hook of every callback that has it, in order."""
        wanted = {name: found for name, callback in self.named.items() if (found := _hook(callback, hook))}
        if not wanted:
            return
        numbers = MappingProxyType({key: value for key, value in metrics.items() if key != "step"})
        moment = Moment(step, numbers, self._config, self._folder, model)
        asked: list[str] = []
        with all_or_none():
            for name, found in wanted.items():
                with _naming(name, hook, step):
                    if _answer(found(moment)):
                        asked.append(name)
        asked = gather(asked)[0]
        if asked and self.stopped is None and hook != "on_end":
            self.stopped, self.end = asked[0], step + 1 if hook == "on_checkpoint" else step
            self.note(f"{self.stopped} asked at step {step} to end the run")

    def get_state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps; raises CallbackError for a state that JSON does not write."""
        states: dict[str, Any] = {}
        with all_or_none():
            for name, callback in self.named.items():
                if hasattr(callback, "get_state"):
                    with _naming(name, "get_state", step):
                        states[name] = json.loads(json.dumps(callback.get_state()))
        return {"stopped": self.stopped, "end": None if self.stopped is None else self.end, "states": states}

    def set_state(self, kept: Mapping[str, Any], step: int, goes_on: bool) -> None:
        """Goes on where `get_state` was called; a callback that was not there then, or had other options, starts anew.

        A run that was ended by one that is still there stays ended if it `goes_on`, and does not start from it.
        """
        if goes_on and kept["stopped"] in self.named:
            self.stopped, self.end = kept["stopped"], kept["end"]
        with all_or_none():
            for name, callback in self.named.items():
                if name in kept["states"] and hasattr(callback, "set_state"):
                    with _naming(name, "set_state", step):
                        callback.set_state(kept["states"][name])


def load_callbacks(config: ConfigDict, given: Iterable[Any] = ()) -> dict[str, Any]:
    """The callbacks of `config.callbacks`, and then those that are `given`, each under a name of its own.

    Raises ConfigError for a name or options that lead to none, and for an object without any hook.
    """
    found: dict[str, Any] = {}
    for spec in (*config.callbacks, *given):
        callback = _made(spec) if isinstance(spec, str) else spec
        name = spec if isinstance(spec, str) else type(spec).__name__
        if not any(_hook(callback, hook) for hook in HOOKS):
            raise ConfigError(
                f"the callback {name} has none of the methods {', '.join(HOOKS)}: it would never be called"
            )
        names = (name if count == 1 else f"{name} {count}" for count in range(1, len(found) + 2))
        found[next(free for free in names if free not in found)] = callback
    return found


def _made(spec: str) -> Any:
    make, options = resolve_with_options(spec, BUILT_IN)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ConfigError(f"the callback {spec!r}: {error}; write {spec.partition('(')[0]}(name=value, ...)") from None
    try:
        return make(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise CallbackError(f"the callback {spec!r} cannot be made: {_words(error)}") from error


def _hook(callback: Any, name: str) -> Callable[[Moment], Any] | None:
    found = getattr(callback, name, None)
    if found is not None and not callable(found):
        raise ConfigError(f"{name} of the callback {type(callback).__name__} is {found!r}, which cannot be called")
    return found


def _answer(value: Any) -> bool:
    if value is not None and value != STOP:
        raise ConfigError(f'it returned {value!r}; a hook returns "stop" to end the run, or nothing')
    return value == STOP


@contextlib.contextmanager
def _naming(name: str, hook: str, step: int):
    """Errors of a callback as CallbackError, with its name, the hook and the step."""
    try:
        yield
    except ConfigError as error:
        raise CallbackError(f"the callback {name}, {hook} at step {step}: {error}") from error
    except Exception as error:
        raise CallbackError(f"the callback {name}, {hook} at step {step}: {_words(error)}") from error


def _words(error: Exception) -> str:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename != __file__]
    said = f"{type(error).__name__}: {error}"
    return f"{said} ({where[-1]})" if where else said
