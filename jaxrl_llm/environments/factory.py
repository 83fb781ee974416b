"""Environments by name, class or function: made when a row needs one, and kept for later rows."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxrl_llm.config.resolve import closest, naming, resolve_with_options
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.environments.agents import Agents, AgentSpec
from jaxrl_llm.environments.call_pool import CallPool
from jaxrl_llm.environments.episode import Episode, Row
from jaxrl_llm.environments.games import SmallestOfEach, SortThenSmallest
from jaxrl_llm.environments.openenv import OpenEnv
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.environments.tools import Tool, by_name, name_of, public_methods, tool_schemas
from jaxrl_llm.environments.verifiers import Verifiers

BUILT_IN = {
    "sort_then_smallest": SortThenSmallest,
    "smallest_of_each": SmallestOfEach,
    "openenv": OpenEnv,
    "verifiers": Verifiers,
}
Factory = Callable[[], Any]
MISSING = object()  # in the place of an environment that is not there yet
CLOSE_SECONDS = 10.0  # for an environment that has failed to close, where environment.timeout is not less
COLUMN = "environment"  # names the environment of a row where there are several


@dataclass(frozen=True)
class EnvironmentSpec:
    """The settings of `environment.*` that multi-turn rollouts need.

    environment: a class or function without arguments, a dictionary of such (the row's column `environment` names one),
    or a name of either; None where there are only tools. tools: functions or names of them. timeout: seconds for each
    call; workers: calls at once. on_error: end (the episode) or stop (the run). reward_scales: what the rewards of some
    of several environments are multiplied by. with_options: the names of those with options of the algorithm.
    """

    environment: str | Factory | Mapping[str, str | Factory] | None = None
    tools: Sequence[str | Tool] = ()
    max_turns: int = 10
    max_tool_calls: int | None = None
    workers: int = 16
    timeout: float | None = None
    on_error: str = "end"
    reward_scales: Mapping[str, float] = field(default_factory=dict)
    with_options: Sequence[str] = ()


class Environments:
    """The environments and tools of a spec: an environment plays one episode at a time, and is kept for later rows.

    An object without `step` offers its public methods as tools. schemas: of the tools that each environment shows, by
    its name. Raises ConfigError for a wrong name or option, and EpisodeError for an object that is no environment or
    tool.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec, self.on_error = spec, spec.on_error
        self.tools = tuple(_resolve("tools", tool, {}) for tool in spec.tools)
        environment = None if spec.environment is None else _resolve("name", spec.environment, BUILT_IN)
        self.routed = isinstance(environment, Mapping)
        self.factories: dict[str | None, Factory | None] = {None: environment}
        if isinstance(environment, Mapping):
            self.factories = {str(key): _resolve("name", factory, BUILT_IN) for key, factory in environment.items()}
            if not environment:
                raise EpisodeError("the environments are an empty dictionary: name at least one")
        elif environment is not None and not callable(environment):
            shown = f"is {spec.environment!r}, which is" if isinstance(spec.environment, str) else "is"
            raise EpisodeError(
                f"the environment {shown} a {type(environment).__name__}, but each episode has one of its own: give "
                "the class, or a function that makes one"
            )
        settings = {
            "reward_scale": (spec.reward_scales, "rewards.weights"),
            "options": (spec.with_options, "algorithm.advantage and algorithm.beta"),
        }
        for setting, (of_some, of_all) in settings.items():
            if unknown := [name for name in of_some if name not in self.factories]:
                there = f"there is one environment, which has no name: set {of_all}"
                if self.routed:
                    names = [str(name) for name in self.factories]
                    there = f"there are {', '.join(names)}; the closest is {closest(unknown[0], names)}"
                raise EpisodeError(f"environment.{setting} names {unknown[0]!r}, but {there}")
        self.pool = CallPool(spec.workers, spec.timeout)
        self.lost_batches = 0  # in a row, of which all episodes failed
        self.idle: dict[str | None, list[Any]] = defaultdict(list)
        self.made: dict[int, Any] = {}  # by identity, those that are not closed, also while an episode has them
        self.schemas: dict[str | None, list[dict[str, Any]]] = {}
        try:
            # Made now, so that mistakes show before anything is sampled.
            for name, made in zip(self.factories, self._make([*self.factories]), strict=True):
                self.schemas[name] = tool_schemas(self._tools(made).values())
                if made is not None:
                    self.idle[name].append(made)
        except BaseException:
            self.close()
            raise

    def acquire(self, rows: Sequence[Row]) -> list[Episode]:
        """Episodes for rows; of the environments that are missing `workers` are made at once.

        Raises EpisodeError for an environment that does not exist, or cannot be made within `timeout` seconds.
        """
        names, environments = [self.name(row) for row in rows], list[Any]()
        for name in names:
            try:
                environments.append(self.idle[name].pop())  # at once, as agents ask from several threads
            except IndexError:
                environments.append(MISSING)
        new = iter(self._make([name for name, x in zip(names, environments, strict=True) if x is MISSING]))
        episodes, limits = [], (self.spec.max_turns, self.spec.max_tool_calls)
        for name, environment in zip(names, environments, strict=True):
            environment = next(new) if environment is MISSING else environment
            title = "the tools" if environment is None else type(environment).__name__
            episodes.append(Episode(environment, self._tools(environment), title, *limits, self.schemas[name]))
        return episodes

    def release(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> None:
        """Keep the environments of episodes that are over; those that failed are closed instead.

        A `close` that takes more than CLOSE_SECONDS, as one that asks a dead server may, is not waited for.
        """
        for row, episode in zip(rows, episodes, strict=True):
            if not episode.failed and episode.environment is not None:
                self.idle[self.name(row)].append(episode.environment)
        self._close([episode.environment for episode in episodes if episode.failed], CLOSE_SECONDS)

    def name(self, row: Row) -> str | None:
        """The name of a row's environment among several; None where there is one.

        Raises EpisodeError for a name that is none of them.
        """
        if not self.routed:
            return None
        name = row.get(COLUMN)
        if name not in self.factories:
            raise EpisodeError(
                f"the row's column environment is {name!r}; there are "
                f"{', '.join(map(str, self.factories))}; the closest is {closest(str(name), map(str, self.factories))}"
            )
        return name

    def scaled(self, row: Row, reward: float | None) -> float | None:
        """The reward of a row's episode on the scale of its environment."""
        scale = self.spec.reward_scales.get(self.name(row) or "", 1.0)
        return None if reward is None else scale * reward

    def close(self) -> None:
        """Call `close()` of every environment that has one.

        Those of episodes that are not over, of a run that ends within a rollout, have CLOSE_SECONDS: a call that hangs
        may hold them.
        """
        idle = {id(environment): environment for own in self.idle.values() for environment in own}
        playing = [environment for key, environment in self.made.items() if key not in idle]
        self._close(list(idle.values()))
        self._close(playing, CLOSE_SECONDS)
        self.idle.clear()
        self.pool.close()

    def _make(self, names: Sequence[str | None]) -> list[Any]:
        """New environments by name; None where there are only tools."""
        calls = {
            number: partial(self._new, name) for number, name in enumerate(names) if self.factories[name] is not None
        }
        results = CallPool(self.spec.workers, self.spec.timeout).run(calls)  # its own: agents ask from several threads
        for number, result in sorted(results.items()):
            if result.timed_out:
                title = names[number] or name_of(self.factories[names[number]])
                raise EpisodeError(
                    f"making the environment {title!r} took more than environment.timeout = {self.spec.timeout:g} s: "
                    "raise it, or do what takes long once for all of them"
                )
            if result.error is not None:
                raise result.error
        return [results[number].result if number in results else None for number in range(len(names))]

    def _new(self, name: str | None) -> Any:
        factory = self.factories[name]
        assert factory is not None
        title = name or name_of(factory)
        try:
            with contained():
                environment = factory()
        except Exception as error:
            raise EpisodeError(f"making the environment {title!r} raised {error_text(error)}") from error
        if not callable(getattr(environment, "reset", None)):
            raise EpisodeError(
                f"the environment {title!r} is a {type(environment).__name__}, which has no method reset; see "
                "docs/environments.md"
            )
        if not hasattr(environment, "step") and not public_methods(environment):
            raise EpisodeError(
                f"the environment {title!r} has neither a method step nor other public methods to use as tools"
            )
        if hasattr(environment, "step"):
            turn = ("text", "raw") if getattr(environment, "takes_raw", False) else ("text",)
            for method, given in {"reset": ("row",), "step": turn}.items():
                try:
                    inspect.signature(getattr(environment, method)).bind(*given)
                except TypeError as error:
                    raise EpisodeError(
                        f"the environment {title!r} has a method {method} that cannot be called with "
                        f"{' and '.join(given)} ({error}): write {method}(self, {', '.join(given)})"
                    ) from error
                except ValueError:  # of a method that is written in C
                    pass
        self.made[id(environment)] = environment
        return environment

    def _tools(self, environment: Any) -> dict[str, Tool]:
        methods = [] if environment is None or hasattr(environment, "step") else public_methods(environment)
        return by_name([*self.tools, *methods])

    def _close(self, environments: Sequence[Any], seconds: float = math.inf) -> None:
        """Call `close()` of the environments that have one, as many at once as other calls, each for so long at most.

        Errors do not matter: the run is over, or the environments have failed already.
        """
        for environment in environments:
            self.made.pop(id(environment), None)
        closes = [close for environment in environments if callable(close := getattr(environment, "close", None))]
        calls = {number: partial(self.pool.call, close, seconds) for number, close in enumerate(closes)}
        CallPool(self.spec.workers, None).run(calls)  # one of its own: others may run in ours, or hang there


def load_environments(spec: EnvironmentSpec | AgentSpec) -> Environments | Agents | None:
    """The environments or agents of a spec, None where it has neither an environment nor tools; errors as theirs."""
    if isinstance(spec, AgentSpec):
        return Agents(spec)
    return None if spec.environment is None and not spec.tools else Environments(spec)


def _resolve(key: str, name: Any, known: Mapping[str, Any]) -> Any:
    """The object of a name in `environment.key`, with its options bound; anything but a name is returned as it is."""
    if not isinstance(name, str):
        return name
    with naming(f"environment.{key}"):
        function, options = resolve_with_options(name, known)
    return partial(function, **options) if options else function
