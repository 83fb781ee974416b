"""`PartialRollouts`: completions that are sampled over several steps, so that the longest hold none up.

More prompts are in flight than a step trains on. A round samples up to `tokens` tokens more of every row in flight, by
the newest policy; rounds follow until enough groups are complete, and the step takes the first of those in the order of
the data. The others wait: their rows are kept, with the version and the log-prob of each token, and the next step goes
on behind them.

What is sampled is counted in tokens of a row, never by a clock, a slot or a chunk: a run has one result, whatever its
timing. Only `Arrivals` change policies, and end a round, between chunks. Group g of the data draws what it would draw
in a run without: from the keys of step g // B + 1, B prompts a step. A row's key is one for all of its tokens, so that
a policy that never changes samples the same.
"""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.distributed.sharding import local_rows, rows_to_global
from jaxrl_llm.distributed.turns import turn
from jaxrl_llm.models.net import Params
from jaxrl_llm.rollout.borders import Border
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.slots import Begun, Rollout, row_keys
from jaxrl_llm.training.images import prompt_images
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.arrivals import Arrivals
from jaxrl_llm.training.rollouts.experience import UNSAMPLED, Partial, rollout_of


@dataclasses.dataclass(frozen=True)
class PartialSpec:
    """The settings of partial rollouts."""

    prompts: int  # of a step
    in_flight: int  # prompts whose completions are sampled at once
    tokens: int  # the most that a round samples of a row


@dataclasses.dataclass
class Group:
    """The K completions of one prompt, as far as they are sampled."""

    number: int  # of the prompt, in the order of the data
    example: Row
    rows: Begun  # [K,...]
    versions: np.ndarray  # [K,C] training steps of the policy that sampled each token; UNSAMPLED
    steps: float = 0.0  # decode steps of slots, a row's equal share of each round

    @property
    def is_complete(self) -> bool:
        """True where every row has ended."""
        return bool((self.rows.finished | (self.rows.lengths == self.versions.shape[1])).all())


class PartialRollouts:
    """The groups in flight and those that wait to be; `take` samples until a step has its own.

    key: of the run, of which a step's is the one that its number is folded into. width: of prompts.
    """

    def __init__(
        self,
        spec: PartialSpec,
        engine: Engine,
        pipeline: Pipeline,
        key: Any,
        mesh: Mesh,
        width: int,
        stopwatch: Stopwatch,
        arrivals: Arrivals | None = None,
    ):
        self.spec, self.engine, self.pipeline = spec, engine, pipeline
        # On the host: the key lies on the devices that train, and rows may be sampled on others.
        self._key, self._impl = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
        self.mesh, self.width, self.stopwatch, self.arrivals = mesh, width, stopwatch, arrivals
        self._groups: list[Group] = []  # in the order of the data

    def take(self, params: Params, version: int) -> tuple[list[Row], Rollout, Partial]:
        """The examples and the rows of a step, all of them complete. What is left to sample is sampled by the policy of
        `version` training steps."""
        spec, rounds = self.spec, 0
        with self.stopwatch("rollout"), turn():
            while len(self._groups) < spec.in_flight:
                self._draw()
            while sum(group.is_complete for group in self._groups[: spec.in_flight]) < spec.prompts:
                self._sample(params, self._groups[: spec.in_flight], version)
                rounds += 1
            taken = [group for group in self._groups[: spec.in_flight] if group.is_complete][: spec.prompts]
            numbers = {group.number for group in taken}
            self._groups = [group for group in self._groups if group.number not in numbers]
            waiting = sum(
                int(((x.rows.lengths > 0) & ~x.rows.finished & (x.rows.lengths < x.versions.shape[1])).sum())
                for x in self._groups
            )
            partial = Partial(np.concatenate([group.versions for group in taken]), waiting, rounds)
            return [group.example for group in taken], self._rollout(taken), partial

    def _draw(self) -> None:
        """Add the prompts of one batch of the data, of which nothing is sampled yet."""
        first, k = self.pipeline.position, self.engine.group_size
        step = jax.random.fold_in(self._run_key(), first // self.spec.prompts + 1)
        keys = jax.random.key_data(row_keys(step, np.uint32(0), self.spec.prompts * k))
        keys = np.asarray(keys).reshape(self.spec.prompts, k, -1)
        shape = (k, self.engine.max_completion_length)
        for index, example in enumerate(next(self.pipeline)):
            nothing, no_tokens = np.zeros(k, np.int32), np.zeros(shape, np.int32)
            rows = Begun(keys[index], no_tokens, np.zeros(shape, np.float32), nothing, np.zeros(k, bool))
            self._groups.append(Group(first + index, example, rows, np.full(shape, UNSAMPLED, np.int32)))

    def _run_key(self) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(self._key), impl=self._impl)

    def _sample(self, params: Params, groups: Sequence[Group], version: int) -> None:
        """One round: up to `tokens` tokens more of every row; fewer where it ends once enough groups are complete."""
        k, longest, arrivals = self.engine.group_size, self.engine.max_completion_length, self.arrivals
        examples = [group.example for group in groups]
        begun = Begun(*(np.concatenate(parts) for parts in zip(*(group.rows for group in groups), strict=True)))
        tokens, segments = rows_to_global(
            pad_prompts([example["prompt_ids"] for example in examples], self.width), self.mesh
        )
        images = prompt_images(examples, self.engine.net.config.vision)

        def on_border(lengths: np.ndarray, finished: np.ndarray) -> Border:
            assert arrivals is not None
            complete = (finished | (lengths == longest)).reshape(-1, k).all(axis=1)
            return arrivals.border(lengths, finished, enough=complete.sum() >= self.spec.prompts)

        rollout = self.engine.generate(
            params if arrivals is None else arrivals.start(params),
            tokens,
            segments,
            self._run_key(),  # not drawn from: rows have their own
            limits=np.minimum(begun.lengths + self.spec.tokens, longest),
            images=rows_to_global(images, self.mesh),
            begun=begun,
            on_border=None if arrivals is None else on_border,
        )
        places = np.arange(longest)
        found = local_rows((rollout.tokens, rollout.sample_logps, rollout.lengths, rollout.finished, rollout.steps))
        versions = np.full((len(groups) * k, longest), version, np.int32)
        if arrivals is not None:
            versions = arrivals.versions(found[2], longest)
        for index, group in enumerate(groups):
            tokens, logps, lengths, finished, steps = (np.array(x[index * k : (index + 1) * k]) for x in found)
            before, after = group.rows.lengths[:, None], lengths[:, None]
            fresh = (places >= before) & (places < after)
            group.versions = np.where(fresh, versions[index * k : (index + 1) * k], group.versions)
            group.rows = Begun(group.rows.keys, tokens[:, self.width :], logps[:, self.width :], lengths, finished)
            group.steps += float(steps.mean())

    def _rollout(self, groups: Sequence[Group]) -> Rollout:
        """The rows of groups that are complete, as an engine returns them."""
        k = self.engine.group_size
        of_prompts = pad_prompts([group.example["prompt_ids"] for group in groups], self.width)
        prompts = tuple(np.repeat(x, k, axis=0) for x in of_prompts)
        rows = Begun(*(np.concatenate(parts) for parts in zip(*(group.rows for group in groups), strict=True)))
        present = np.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
        completions = rows.tokens, present.astype(prompts[1].dtype), present.astype(np.float32), rows.logps
        steps = np.repeat(np.array([group.steps for group in groups], np.float32), k)
        return rollout_of(prompts, completions, rows.lengths, rows.finished, steps, self.mesh)

    def get_arrays(self) -> dict[str, Any]:
        """The groups as the tree of arrays that a checkpoint holds, by name.

        Of the prompts it has their numbers: the data has the rest.
        """
        if not self._groups:
            return {}
        arrays: dict[str, Any] = {
            f"rows/{name}": np.stack([getattr(group.rows, name) for group in self._groups]) for name in Begun._fields
        }
        arrays["versions"] = np.stack([group.versions for group in self._groups])
        arrays["steps"] = np.array([group.steps for group in self._groups])
        arrays["numbers"] = np.array([group.number for group in self._groups])
        file = io.BytesIO()
        np.savez(file, **arrays)
        return {"partial": {"bytes": np.frombuffer(file.getvalue(), np.uint8)}}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Take up the groups that `arrays` hold, of the data of the pipeline.

        Raises ConfigError where they are of other numbers of completions and tokens than the settings.
        """
        self._groups = []
        if "partial" not in arrays:
            return
        with np.load(io.BytesIO(np.asarray(arrays["partial"]["bytes"]).tobytes()), allow_pickle=False) as file:
            saved = dict(file)
        shape = saved["versions"].shape[1:]
        if shape != (wanted := (self.engine.group_size, self.engine.max_completion_length)):
            raise ConfigError(
                f"the checkpoint holds half-finished completions, {shape[0]} of a prompt with room for {shape[1]} "
                f"tokens, but rollout.group_size is {wanted[0]} and rollout.max_completion_length {wanted[1]}: go on "
                "with those, or start a new output_dir"
            )
        for index, number in enumerate(saved["numbers"].tolist()):
            rows = Begun(*(saved[f"rows/{name}"][index] for name in Begun._fields))
            versions, steps = saved["versions"][index], float(saved["steps"][index])
            self._groups.append(Group(number, self.pipeline.example(number), rows, versions, steps))
