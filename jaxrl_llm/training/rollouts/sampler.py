"""A process that only samples: it makes its share of the batches by the policies that the learners write."""

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import ConfigError, with_correction
from jaxrl_llm.config.schema import OF_A_START
from jaxrl_llm.config.user_code import contained
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.processes import AgreedError
from jaxrl_llm.distributed.sharding import placed
from jaxrl_llm.models.adapters.lora import combine, split
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.rollouts.experience import pack, share_of
from jaxrl_llm.training.rollouts.rollout_files import (
    JOBS,
    LEARNER,
    LOST_CODE,
    POLL_SECONDS,
    START,
    Heartbeat,
    HeartbeatReader,
    Rendezvous,
    policy_params,
    read_facts,
    read_policy,
    write_file,
)
from jaxrl_llm.training.runtime.preemption import Notices
from jaxrl_llm.training.runtime.watchdog import Watchdog
from jaxrl_llm.training.setup.sources import build_producer, rendezvous_of

# Settings that learners compute, beside those of a single start.
COMPUTED = ("total_steps", "optimizer.learning_rate", *OF_A_START)


def sample(config) -> None:
    """Make the batches of this process until the learners end; returns when they are done.

    Raises AgreedError with the learners' exit code when they failed, and with LOST_CODE when they show no sign of life,
    ConfigError when they have other settings, and whatever sampling raises, of which the learners are told.
    """
    config, index, rendezvous = with_correction(config), processes.sampler(), rendezvous_of(config)
    keep_compiled(config.compilation_cache)
    # A preemption is the learners' to answer: they save, for which they wait for the batches of this process.
    sign = Heartbeat(rendezvous.folder / f"sampler_{index}.json", rendezvous.silence_seconds)
    with contained(), Notices(), sign:
        _sample(config, index or 0, rendezvous, sign)


class NewestPolicy:
    """The policy that was read last, of the files that the learners write.

    `start` are the parameters that this process has loaded: those whose names are `frozen` stay, and the others say on
    which devices and in which types a policy is placed.
    """

    def __init__(self, start: Params, frozen: tuple[str, ...]):
        self._frozen, trained = split(start, frozen)
        self._like = placed(trained, jax.tree.map(lambda x: x.sharding, trained))  # shapes: no policy is held yet
        self._path, self._arrays = "", dict[str, np.ndarray]()  # the file, and its arrays on the host
        self.params: Params = {}
        self.pipeline: dict[str, Any] = {}  # the position in the data of its first batch

    def read(self, path: Path) -> None:
        """Take up the policy of a file, unless it is the one that is held."""
        if str(path) == self._path:
            return
        header, self._arrays = read_policy(path, self._path, self._arrays)
        self._path, self.params, self.pipeline = str(path), {}, header["pipeline"]  # one goes before the next comes
        self.params = combine(self._frozen, policy_params(self._arrays, self._like))


def _sample(config, index: int, rendezvous: Rendezvous, sign: Heartbeat) -> None:
    learners = HeartbeatReader(rendezvous.folder / LEARNER, rendezvous)
    producer, setup = build_producer(config)
    worker, watch, environments = producer.worker, setup.stopwatch, setup.environments
    root = jax.random.key(config.seed)
    facts: dict[str, Any] = processes.agreed_facts(config)
    start, newest = dict[str, Any](), 0  # of the learners, and the step that was made last for it
    with jax.set_mesh(worker.mesh), Watchdog(config.watch.hang_seconds, watch, rendezvous.folder):
        policy = NewestPolicy(worker.copy_policy(setup.model.params), setup.model.net.config.frozen)
        del setup  # with the parameters that were loaded
        try:
            while True:
                now = read_facts(rendezvous.folder / START)
                alive = learners.look()
                if not alive and not (now and _end_of(rendezvous, now)):
                    said = learners.facts.get("error")
                    raise AgreedError(
                        f"the learners show no sign of life in {rendezvous.folder}: they were killed, their machine is "
                        "lost, or they do not reach that folder"
                        + (f"; the last that were there ended with {said}" if said else "")
                        + ". Start the run again, which goes on from its newest checkpoint",
                        LOST_CODE,
                    )
                # What an earlier run has left is none: its learners are not those that are seen alive.
                if now != start and now and learners.seen and now["learner"] == learners.facts["process"]:
                    start, newest = now, 0
                    _check_settings(facts, start, rendezvous)
                # Without an end of their queue learners have failed, or were preempted, before they opened it.
                failed = learners.facts if learners.seen and "error" in learners.facts else {}
                if end := _end_of(rendezvous, start if alive else now) or failed:
                    if end["code"]:
                        raise AgreedError(f"the learners have ended: {end['error']}", end["code"])
                    return
                find = partial(_job, rendezvous.folder / start.get("folder", ""), index, rendezvous.samplers, newest)
                if (job := find()) is None:
                    with watch("wait"):
                        time.sleep(POLL_SECONDS)
                    continue
                path, step = job
                version, first = (int(x) for x in path.name.split("_")[1:3])
                file, made = path.with_name(f"batch_{step:08d}"), {"folder": path.parent.name, "made": step}
                there = file.exists()  # of the process before this one
                if not there and find() != job:
                    continue  # it was taken meanwhile
                try:
                    if not there:
                        policy.read(path)
                        position = policy.pipeline["position"] + (step - first) * config.batch.prompts
                        producer.pipeline.set_state({**policy.pipeline, "position": position})
                        rollouts = producer.produce(policy.params, version, step, jax.random.fold_in(root, step))
                        seconds = {k.replace("time/", "producer/"): x for k, x in watch.take().items()}
                        shares = [share_of(rollouts, number, start["shares"]) for number in range(start["shares"])]
                        parts = [pack([share]).tobytes() for share in shares]
                        write_file(file, {"version": version, "seconds": seconds}, parts, rendezvous.silence_seconds)
                    with contextlib.suppress(OSError):  # a disk that is full for a moment: the next sign tells it too
                        sign.update(**made)
                except FileNotFoundError:
                    # Learners that end, or start anew, take the files away, that which is being written here too.
                    if path.parent.exists() and not _end_of(rendezvous, start):
                        raise
                newest = step
        finally:
            worker.rewards.close()
            if environments is not None:
                environments.close()


def _end_of(rendezvous: Rendezvous, start: dict[str, Any]) -> dict[str, Any]:
    return read_facts(rendezvous.folder / start["folder"] / JOBS).get("end", {}) if start else {}


def _check_settings(own: dict[str, Any], start: dict[str, Any], rendezvous: Rendezvous) -> None:
    theirs = start["settings"]
    differ = [x for x in {**theirs, **own} if x not in COMPUTED and theirs.get(x) != own.get(x)]
    if differ:
        shown = "; ".join(f"{x} is {own.get(x)!r} here, {theirs.get(x)!r} there" for x in differ[:8])
        raise ConfigError(
            f"this process is set up differently from the learners, which have written {rendezvous.folder / START}: "
            f"{shown}. {processes.START_ALIKE}"
        )


def _job(folder: Path, index: int, samplers: int, newest: int) -> tuple[Path, int] | None:
    """The policy's file and the step of this process's next batch, or None where the learners ask for none."""
    jobs = read_facts(folder / JOBS)
    asked = []
    for name in jobs.get("policies", []):
        _, first, last = map(int, name.split("_")[1:])
        steps = range(max(first, newest + 1, jobs["taken"] + 1), last + 1)
        asked += [(step, folder / name) for step in steps if step % samplers == index]
    return min(asked)[::-1] if asked else None
