"""From what the configuration or the user names to the environments of rows."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import closest, resolve, resolve_with_options
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.environments.episode import Episode, Row
from jaxrl_llm.environments.games import SortThenSmallest
from jaxrl_llm.environments.openenv import OpenEnv
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.environments.tools import Tool, by_name, name_of, public_methods, tool_schemas
from jaxrl_llm.environments.verifiers import Verifiers
from jaxrl_llm.environments.workers import Workers

BUILT_IN = {"sort_then_smallest": SortThenSmallest, "openenv": OpenEnv, "verifiers": Verifiers}
Factory = Callable[[], Any]
COLUMN = "environment"  # names the environment of a row where there are several


class Environments:
    """Makes an environment for each row, and keeps them for later rows: one row at a time has each.

    `factory` is a class or function without arguments, a dictionary of such (the row's column `environment` says
    which), or None where there are only tools. An object without `step` offers its public methods as tools.
    """

    def __init__(
        self,
        factory: Factory | Mapping[str, Factory] | None,
        tools: Sequence[Tool] = (),
        max_turns: int = 10,
        max_tool_calls: int | None = None,
        workers: int = 16,
        timeout: float | None = None,
        on_error: str = "end",
    ):
        self.routed = isinstance(factory, Mapping)
        self.factories: dict[str | None, Factory | None] = (
            {**factory} if isinstance(factory, Mapping) else {None: factory}
        )
        self.tools, self.max_turns, self.max_tool_calls = tuple(tools), max_turns, max_tool_calls
        self.workers, self.on_error = Workers(workers, timeout), on_error
        self.idle: dict[str | None, list[Any]] = defaultdict(list)
        self.schemas: dict[str | None, list[dict[str, Any]]] = {}
        for name, make in self.factories.items():
            environment = None if make is None else self._make(name, make)
            self.schemas[name] = tool_schemas(self._tools(environment).values())
            if environment is not None:
                self.idle[name].append(environment)

    def take(self, row: Row) -> Episode:
        """An environment for a row. Raises EpisodeError for one that does not exist, or cannot be made."""
        name = self.name(row)
        make, idle = self.factories[name], self.idle[name]
        environment = None if make is None else idle.pop() if idle else self._make(name, make)
        shown = "the tools" if environment is None else type(environment).__name__
        return Episode(environment, self._tools(environment), shown, self.max_turns, self.max_tool_calls)

    def give_back(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> None:
        """Keeps the environments of rows that are over; one that failed is closed, and another made when needed."""
        for row, episode in zip(rows, episodes, strict=True):
            if episode.failed:
                self._close(episode.environment)
            elif episode.environment is not None:
                self.idle[self.name(row)].append(episode.environment)

    def name(self, row: Row) -> str | None:
        """Which of several environments a row plays; None where there is one."""
        if not self.routed:
            return None
        name = row.get(COLUMN)
        if name not in self.factories:
            raise EpisodeError(
                f"the row's column environment is {name!r}; there are "
                f"{', '.join(map(str, self.factories))}; the closest is {closest(str(name), map(str, self.factories))}"
            )
        return name

    def close(self) -> None:
        """Calls `close()` of every environment that has one."""
        for idle in self.idle.values():
            for environment in idle:
                self._close(environment)
            idle.clear()
        self.workers.close()

    def _make(self, name: str | None, make: Factory) -> Any:
        shown = name or name_of(make)
        try:
            environment = make()
        except Exception as error:
            raise EpisodeError(f"making the environment {shown!r} raised {type(error).__name__}: {error}") from error
        if not callable(getattr(environment, "reset", None)):
            raise EpisodeError(
                f"the environment {shown!r} is a {type(environment).__name__}, which has no method "
                "reset; see docs/environments.md"
            )
        if not hasattr(environment, "step") and not public_methods(environment):
            raise EpisodeError(
                f"the environment {shown!r} has neither a method step nor other public methods to use as tools"
            )
        return environment

    def _tools(self, environment: Any) -> dict[str, Tool]:
        own = [] if environment is None or hasattr(environment, "step") else public_methods(environment)
        return by_name([*self.tools, *own])

    def _close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):  # the run is over, or the environment has failed already
                self.workers.all({0: close})


def load_environments(config, given: Any = None, tools: Sequence[Any] = ()) -> Environments | None:
    """The environments of the configuration, or of `given` (a factory, a dictionary of them, or a name); None for none.

    Raises ConfigError for a name or option that is wrong, and EpisodeError for what is no environment.
    """
    c = config.environment
    spec = c.name if given is None else given
    named = [_resolve(tool, {}) for tool in (*c.tools, *tools)]
    if spec is None and not named:
        return None
    if config.algorithm.name in OFFLINE:
        name = config.algorithm.name
        raise EpisodeError(f"there is an environment or a tool, but algorithm.name = {name!r} samples nothing")
    factory = None if spec is None else _resolve(spec, BUILT_IN)
    if isinstance(factory, Mapping):
        factory = {str(name): _resolve(each, BUILT_IN) for name, each in factory.items()}
    elif factory is not None and not callable(factory):
        raise EpisodeError(
            f"environment.name is {spec!r}, which is a {type(factory).__name__}; name a class or function"
        )
    return Environments(factory, named, c.max_turns, c.max_tool_calls, c.workers, c.timeout, c.on_error)


def _resolve(spec: Any, known: Mapping[str, Any]) -> Any:
    if not isinstance(spec, str):
        return spec
    if not spec.endswith(")"):
        return resolve(spec, known)
    function, options = resolve_with_options(spec, known)
    return functools.partial(function, **options) if options else function
