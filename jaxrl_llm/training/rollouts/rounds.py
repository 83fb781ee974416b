"""`Rounds`: what the rollout functions of several processes ask for, sampled and saved by all of them together."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.distributed.processes import all_or_none, gather

Sampled = tuple[list[list[int]], list[list[float]]]  # token ids and log-probs of completions


class Rounds:
    """The programs that rollout functions ask for, which all processes do together.

    Each process calls the function for its own prompts, but sampling and writing the weights are programs of all
    processes. So these go in rounds: each says what its function asks for, and all do it. A process whose function has
    returned takes part, with rows that nobody reads, until every function has.

    sample: `(prompts, size, width, count, number)` gives the completions of this process's prompts, `count` of each, in
    a program with `size` prompts of `width` tokens in each process; number: of the program, from 0. save: writes the
    policy as its arguments say, the first of which is a folder, and returns where it is.
    """

    def __init__(self, sample: Callable[..., list[Sampled]], save: Callable[..., str]):
        self._sample, self._save = sample, save
        self._number, self._lock = 0, threading.Lock()  # functions may ask in threads
        self._inside: int | None = None  # the thread that is in the round
        self._broken: Exception | None = None  # the error that ended the rounds of several processes

    def generate(self, ids: Sequence[Sequence[int]], count: int) -> Sampled:
        """Token ids and log-probs of `count` completions of each prompt, those of a prompt adjacent."""
        if not ids:
            return [], []
        _, groups = self._round((len(ids), max(map(len, ids)), count), ids)
        # In the round there were as many of each prompt as the process asked for that wanted most.
        tokens, logps = zip(*groups, strict=True)
        return [row for group in tokens for row in group[:count]], [row for group in logps for row in group[:count]]

    def save(self, arguments: tuple[Any, ...], then: Callable[[str], Any] | None = None) -> Any:
        """Writes the policy; returns what `then` does with its path, in the first process that asks for the same."""
        return self._round(arguments, then=then)[1]

    @contextlib.contextmanager
    def until_all_return(self) -> Iterator[None]:
        """Guards the function's call, and ends when those of all processes have; what one raises is raised in all."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self._broken is not None:  # whatever the function made of it
            raise self._broken
        while self._round(None, failure=error)[0]:
            pass

    def _round(
        self,
        own: tuple[Any, ...] | None,
        ids: Sequence[Sequence[int]] = (),
        then: Callable[[str], Any] | None = None,
        failure: Exception | None = None,
    ) -> tuple[bool, Any]:
        """Take part in a round; returns whether any process asked for something, and the result for this one: the
        completions of each prompt, or what `then` returned."""
        if self._inside == threading.get_ident():  # it has the lock, and would wait for itself
            raise ConfigError(
                "generate or save_model was called within save_model, by what its `then` calls: call it after "
                "save_model has returned"
            )
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                self._inside = threading.get_ident()
                with all_or_none():
                    if failure is not None:
                        raise failure
                asked, result = [one and tuple(one) for one in gather(own)], None
                for arguments in dict.fromkeys(one for one in asked if one and isinstance(one[0], str)):
                    path = self._save(*arguments)
                    first = asked.index(arguments)
                    with all_or_none():
                        answer = then(path) if then is not None and jax.process_index() == first else None
                    answers = gather(answer)
                    result = answers[first] if arguments == own else result
                if sizes := [one for one in asked if one and not isinstance(one[0], str)]:
                    groups = self._sample(ids, *map(max, zip(*sizes, strict=True)), self._number)
                    result = groups if ids else result
                    self._number += 1
            except Exception as error:
                if jax.process_count() > 1:
                    self._broken = error
                raise
            finally:
                self._inside = None
            return any(one is not None for one in asked), result
