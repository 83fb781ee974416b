"""`Arrivals`: what comes to rollouts while they are under way, written down so that a run can be repeated.

A policy that is published while rows are sampled is taken at the border of a chunk of decode steps
(`rollout.update_in_flight`), and the sampling of a step ends at a border once enough prompts are complete
(`rollout.max_wait`). Which border that is depends on the clock, as nothing else of a run does. So each batch has a
line of JSON in `output_dir/arrivals.jsonl`, written before the batch is trained on:

    {"step": 7, "policies": [[0, 4], [12, 5]], "ends": []}

It began with the policy of 4 updates, and took that of 5 the 12th time that it was asked after: at the start of each
rollout of the batch, and at each border. A run that follows such lines asks no clock, and waits for the policies that
they name: the same arrivals give the same bits.
"""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.net import Params
from jaxrl_llm.rollout.borders import Border
from jaxrl_llm.training.checkpoint.outputs import writing
from jaxrl_llm.training.rollouts.experience import UNSAMPLED

RECORD = "arrivals.jsonl"


class Arrived(NamedTuple):
    """The arrivals at the rollouts of one batch, each with the number of its question, counted from 0."""

    policies: dict[int, int]  # training steps of the policy that was taken
    ends: list[int]  # where sampling ended early


class Arrivals:
    """Gives rollouts under way the newest policy, and ends them; between the learner's thread and the sampler's.

    path: of the record. followed: another run's, which this one follows as far as it goes. staleness: updates that a
    batch's first policy may be old. in_flight: policies are taken from `publish`; otherwise a batch has that of `begin`
    throughout. max_wait: seconds from the start of a batch after which its sampling may end early; None: it does not.

    Raises ConfigError for a record that cannot be followed.
    """

    def __init__(
        self, path: Path, staleness: int, in_flight: bool, max_wait: float | None = None, followed: Path | None = None
    ):
        self.in_flight = in_flight
        self._path, self._staleness, self._max_wait = path, staleness, max_wait
        self._followed = {} if followed is None else _lines(followed)
        for step, arrived in self._followed.items():
            if not self._fits(step, arrived):
                raise ConfigError(
                    f"rollout.arrivals is {followed}, in which step {step} has the policies {arrived.policies}, as no "
                    f"step has with rollout.staleness={staleness} and rollout.update_in_flight="
                    f"{str(in_flight).lower()}: set these as in the run that wrote it"
                )
        self._own: dict[int, Arrived] = {}  # lines of the record
        self._resumed = False
        self._changed = threading.Condition()
        self._held: dict[int, Params] = {}  # the newest policy, and those that are still to be followed
        self._at_rest = False  # no policy comes
        # Of the batch that is made.
        self._step = self._version = self._asked = 0
        self._line: Arrived | None = None  # that is followed
        self._arrived = Arrived({}, [])
        self._began = 0.0
        self._spans: list[tuple[int, np.ndarray]] = []  # of its newest rollout: version, lengths [N] where it came

    def resume(self) -> None:
        """Follow the record of the run itself: the run goes on from a checkpoint."""
        self._resumed = True
        if self._path.is_file():
            text = self._path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]  # a run that was killed may have left half a line
            if whole != text:
                self._path.write_bytes(whole)
            self._own = _lines(self._path)
            # Others are of settings that the run had before.
            self._followed |= {step: arrived for step, arrived in self._own.items() if self._fits(step, arrived)}

    def open(self) -> None:
        """Start the record, unless the run has resumed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._resumed:
            self._path.unlink(missing_ok=True)

    def publish(self, version: int, params: Params) -> None:
        """Have rollouts take the policy of `version` training steps, in arrays that no update donates."""
        with self._changed:
            lines = [self._line, *self._followed.values()]
            named = {number for line in lines if line is not None for number in line.policies.values()}
            self._held = {number: policy for number, policy in self._held.items() if number in named}
            self._held[version] = params
            self._changed.notify_all()

    def rest(self, at_rest: bool) -> None:
        """Say whether the learner waits for batches, so that no policy comes before they are made."""
        with self._changed:
            self._at_rest = at_rest
            self._changed.notify_all()

    def begin(self, step: int, version: int) -> None:
        """Start the batch of a step, of the policy of `version` training steps where none is in flight."""
        with self._changed:
            self._line = self._followed.pop(step, None)
        self._step, self._version, self._asked, self._arrived = step, version, 0, Arrived({}, [])
        self._began = time.monotonic()

    def end(self) -> None:
        """Write down what came to the batch."""
        if self._own.get(self._step) == self._arrived:
            return
        self._own[self._step] = self._arrived
        line = {"step": self._step, "policies": [*self._arrived.policies.items()], "ends": self._arrived.ends}
        with writing(self._path.parent), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def start(self, params: Params) -> Params:
        """The policy that a rollout of the batch begins with; `params` where none is in flight."""
        if self.in_flight:
            params = self._newest(always=True) or params
        self._spans = [(self._version, np.zeros(1, np.int32))]
        return params

    def border(self, lengths: np.ndarray, finished: np.ndarray, enough: bool = False) -> Border:
        """The decision at a border, `rollout.borders.OnBorder`; where there are `enough` rows, sampling may end."""
        del finished
        if enough and self._ends():
            self._arrived.ends.append(self._asked)
            self._asked += 1
            return Border(ends=True)
        params = self._newest()
        if params is not None:
            self._spans.append((self._version, lengths))
        return Border(params)

    def versions(self, lengths: np.ndarray, width: int) -> np.ndarray:
        """Training steps `[N, width]` of the policy of each token of the newest rollout, of rows of `lengths`."""
        places, found = np.arange(width), np.full((len(lengths), width), UNSAMPLED, np.int32)
        for version, start in self._spans:
            found = np.where((places >= start[:, None]) & (places < lengths[:, None]), version, found)
        return found

    def _ends(self) -> bool:
        if self._max_wait is None:
            return False
        if self._line is not None:
            return self._asked in self._line.ends
        return time.monotonic() - self._began >= self._max_wait

    def _newest(self, always: bool = False) -> Params | None:
        """The policy that comes to this question, or None where it is that of before, unless it is `always` wanted."""
        asked, self._asked = self._asked, self._asked + 1
        if not self.in_flight:
            return None
        with self._changed:
            version = self._version
            if self._line is not None:
                version = self._line.policies.get(asked, version)
                self._changed.wait_for(lambda: version in self._held or self._at_rest)
                if version not in self._held:  # the run that is followed did not rest here: it is left
                    self._line = None
            if self._line is None:
                version = max(self._held)
            fresh = version != self._version or asked == 0
            self._version = version
            if fresh:
                self._arrived.policies[asked] = version
            return self._held[version] if fresh or always else None

    def _fits(self, step: int, arrived: Arrived) -> bool:
        """True where the batch may have come about with these settings."""
        if not self.in_flight:
            return not arrived.policies
        asked, versions = [*arrived.policies], [*arrived.policies.values()]
        rises = all(a < b for numbers in (asked, versions) for a, b in pairwise(numbers))
        return asked[:1] == [0] and rises and max(0, step - 1 - self._staleness) <= versions[0] <= versions[-1] < step


def _lines(path: Path) -> dict[int, Arrived]:
    """The lines of a record, by their steps; of a step that was made anew the last one."""
    lines: dict[int, Arrived] = {}
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"rollout.arrivals is {path}, which cannot be read: {error.strerror}") from error
    for number, text in enumerate(texts, 1):
        try:
            line: dict[str, Any] = json.loads(text)
            lines[line["step"]] = Arrived(dict(line["policies"]), line["ends"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of {path} is {text[:80]!r}, which is no line of arrivals") from error
    return lines
