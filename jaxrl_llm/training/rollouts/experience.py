"""`Rollouts`, which a producer makes, with the bytes of them that a checkpoint holds; and `Experience`, to train on."""

import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Images
from jaxrl_llm.algorithms.turn_advantages import Turns
from jaxrl_llm.data import Row
from jaxrl_llm.distributed.processes import gather_bytes
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import local_rows, row_sharding, rows_to_global
from jaxrl_llm.rewards.runner import NOTHING_LOGGED, Logged
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.logging.reward_metrics import add_logs, table_value

UNSAMPLED = -1  # the version of a place without a token


class Partial(NamedTuple):
    """The policies that sampled the tokens of rows which went on over several of them."""

    versions: np.ndarray  # [rows of this process, C] training steps of the policy that sampled each token; UNSAMPLED
    waiting: int  # rows of other prompts that are begun, and go on in the next step
    rounds: int  # of sampling, for this step

    def metrics(self, step: int) -> dict[str, np.float32]:
        """The metrics of rows that are trained on after `step` training steps."""
        sampled = self.versions >= 0
        ages, newest = (step - self.versions)[sampled], self.versions.max(axis=1)
        several = (sampled & (self.versions != newest[:, None])).any(axis=1)
        changes = np.diff(np.where(sampled, self.versions, newest[:, None]), axis=1) > 0  # along a row they rise
        return {
            "rollout/age": np.float32(ages.mean()),
            "rollout/age_max": np.float32(ages.max()),
            "rollout/partial_rows": np.float32(several.mean()),
            "rollout/row_policies": np.float32(1 + changes.sum(axis=1).mean()),
            "rollout/policies": np.float32(len(np.unique(self.versions[sampled]))),
            "rollout/waiting_rows": np.float32(self.waiting),
            "rollout/rounds": np.float32(self.rounds),
        }


class Rollouts(NamedTuple):
    """Completions of some prompts with their rewards: arrays of all rows on the device, the rest of this process's."""

    rollout: Rollout
    examples: list[Row]
    prompts: list[Any]
    completions: list[Any]
    rewards: np.ndarray  # [rows of this process, F], NaN where a function does not apply
    logged: Logged = NOTHING_LOGGED  # by the reward functions
    version: int = 0  # training steps of the policy that sampled; of several, see `partial`, none is older
    resampled_groups: int | None = None  # None without dynamic sampling
    greedy: "Rollouts | None" = None  # a greedy completion of each example, for a rule that compares with it
    epochs: float | None = None  # of the data, once these prompts were drawn; None for streams
    turns: Turns | None = None  # of the rows of this process, where they are episodes
    images: Images | None = None  # of the prompts [B] or, of agents, of the rows [N], on the device
    parts: Turns | None = None  # of agents: each sub-agent in a row with its own reward, and the session behind them
    partial: Partial | None = None  # of rows that several policies may have sampled
    roles: list[list[str]] | None = None  # the names of the parts of each row
    environments: list[str] | None = None  # the name of the environment of each row, where there are several
    reference_scores: list[list[float]] | None = None  # of the prompt of each row, for a rule that reads them

    def table(
        self,
        group: RowGroup,
        reward_names: Sequence[str],
        fixed: Mapping[str, Any],
        advantages: np.ndarray | None = None,
    ) -> list[Row]:
        """A row for each completion, of all processes in the order of rows; each of them must call it.

        Of each `group` the leader gives its rows, and what reward functions logged of them. A row has the prompt, the
        completion, what is `fixed`, its rewards and its advantage of `advantages [rows of this process]` besides.
        """
        cells = {name: list(map(float, column)) for name, column in zip(reward_names, self.rewards.T, strict=True)}
        if advantages is not None:
            cells["advantage"] = list(map(float, advantages))
        cells |= {name: [table_value(x) for x in column] for name, column in self.logged.columns.items()}
        table = [
            {"prompt": prompt, "completion": completion, **fixed}
            | {name: column[row] for name, column in cells.items()}
            for row, (prompt, completion) in enumerate(zip(self.prompts, self.completions, strict=True))
        ]
        return [row for own in group.gather(table) for row in own]


KEPT = (  # in JSON
    "prompts", "completions", "version", "resampled_groups", "epochs", "roles", "environments", "reference_scores",
)  # fmt: skip


class Experience(NamedTuple):
    """One step's batch, its metrics (scalars, most of them on the device) and, online, a table of all completions."""

    batch: Batch
    metrics: dict[str, Any]
    table: list[Row]


def rollout_of(
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    lengths: np.ndarray,
    finished: np.ndarray,
    steps: np.ndarray,
    mesh: Mesh,
) -> Rollout:
    """The rollout, sharded by rows over `mesh`, of this process's rows: what an engine would have returned.

    `prompts` are tokens and segments `[n,P]`, and `completions` tokens, segments, mask and log-probs `[n,C]` behind.
    """
    no_prompt = np.zeros(prompts[0].shape, np.float32)
    names = ("tokens", "segments", "mask", "sample_logps")
    before = (*prompts, no_prompt, no_prompt)
    arrays = {name: np.concatenate(both, axis=1) for name, *both in zip(names, before, completions, strict=True)}
    return Rollout(**rows_to_global(arrays | {"lengths": lengths, "finished": finished, "steps": steps}, mesh))


def on_mesh(batch: Rollouts, mesh: Mesh) -> Rollouts:
    """The batch with its arrays on other devices, sharded by rows over `mesh`; of several processes, each gives its own
    rows."""
    greedy = None if batch.greedy is None else on_mesh(batch.greedy, mesh)
    arrays = batch.rollout, batch.images
    if mesh.is_multi_process:
        rollout, images = rows_to_global(local_rows(arrays), mesh)
    else:
        rollout, images = jax.device_put(arrays, row_sharding(mesh))
    return batch._replace(rollout=rollout, images=images, greedy=greedy)


def pack(batches: Sequence[Rollouts]) -> np.ndarray:
    """The batches as bytes `[n]` uint8: an npz file of arrays and of one JSON text, which runs no code when it is read.

    Examples are left out: their columns may hold what JSON does not. Only teacher.others and teacher.context read those
    of a batch that is made, which checks refuse beside a queue for that reason. Cells of the table of completions are
    kept as the table shows them.
    """
    arrays: dict[str, Any] = {}

    def texts_of(batch: Rollouts, name: str) -> dict[str, Any]:
        arrays.update({f"{name}/{key}": x for key, x in local_rows(batch.rollout)._asdict().items() if x is not None})
        arrays[f"{name}/rewards"] = batch.rewards
        for table in ("turns", "parts"):
            if (turns := getattr(batch, table)) is not None:
                arrays.update({f"{name}/{table}/{key}": x for key, x in turns._asdict().items()})
        if batch.images is not None:
            own = local_rows(batch.images)
            arrays.update({f"{name}/pixels": own.pixels, f"{name}/tiles": own.count})
            if own.grids is not None:
                arrays[f"{name}/grids"] = own.grids
        if batch.partial is not None:
            arrays.update({f"{name}/partial/{key}": x for key, x in batch.partial._asdict().items()})
        logged = batch.logged
        return {
            "metrics": {key: [float(x) for x in values] for key, values in logged.metrics.items()},
            "totals": {key: float(x) for key, x in logged.totals.items()},
            "columns": {key: [table_value(x) for x in values] for key, values in logged.columns.items()},
            "greedy": None if batch.greedy is None else texts_of(batch.greedy, f"{name}/greedy"),
            **{key: getattr(batch, key) for key in KEPT},
        }

    texts = json.dumps([texts_of(batch, str(index)) for index, batch in enumerate(batches)])
    file = io.BytesIO()
    np.savez(file, texts=np.frombuffer(texts.encode(), np.uint8), **arrays)
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: np.ndarray) -> list[Rollouts]:
    """The batches of `pack`, all their arrays on the host."""
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as file:
        arrays = dict(file)

    def batch_of(texts: dict[str, Any], name: str) -> Rollouts:
        rows = {key: arrays[f"{name}/{key}"] for key in Rollout._fields if f"{name}/{key}" in arrays}
        tables = {
            table: Turns(*(arrays[f"{name}/{table}/{key}"] for key in Turns._fields))
            for table in ("turns", "parts")
            if f"{name}/{table}/ends" in arrays
        }
        partial = None
        if f"{name}/partial/versions" in arrays:
            versions, *counts = (arrays[f"{name}/partial/{key}"] for key in Partial._fields)
            partial = Partial(versions, *map(int, counts))
        images = None
        if f"{name}/pixels" in arrays:
            images = Images(arrays[f"{name}/pixels"], arrays[f"{name}/tiles"], grids=arrays.get(f"{name}/grids"))
        return Rollouts(
            Rollout(**rows),
            [],
            rewards=arrays[f"{name}/rewards"],
            logged=Logged(texts["metrics"], texts["totals"], texts["columns"]),
            images=images,
            partial=partial,
            greedy=None if texts["greedy"] is None else batch_of(texts["greedy"], f"{name}/greedy"),
            **tables,
            **{key: texts[key] for key in KEPT if key in texts},  # a batch of an earlier version has fewer
        )

    return [batch_of(texts, str(index)) for index, texts in enumerate(json.loads(arrays["texts"].tobytes()))]


def packed_queue(batches: Sequence[Rollouts], group: RowGroup) -> dict[str, Any]:
    """The batches of a queue as the tree of arrays that a checkpoint holds, by name: of several row groups the bytes of
    each, one after another. All processes must call it."""
    if not batches:
        return {}
    shares = gather_bytes(pack(batches))[:: group.size]
    return {"queue": {"bytes": np.concatenate(shares), "sizes": np.array(list(map(len, shares)))}}


def unpacked_queue(arrays: Mapping[str, Any]) -> list[Rollouts]:
    """The batches of a `packed_queue`, of all row groups, on the host, or none without one."""
    return [_whole(shares) for shares in _queue_shares(arrays)]


def placed_queue(arrays: Mapping[str, Any], mesh: Mesh) -> list[Rollouts]:
    """The batches of a `packed_queue` with their rows sharded over `mesh`. Each row group gets its own share, with what
    it logged; where the number of groups has changed, all get equal shares."""
    group = RowGroup.of(mesh)
    return [
        placed_share(shares[group.index], mesh)._replace(logged=shares[group.index].logged)
        if len(shares) == group.count
        else placed(_whole(shares), mesh)
        for shares in _queue_shares(arrays)
    ]


def _queue_shares(arrays: Mapping[str, Any]) -> list[list[Rollouts]]:
    """The shares of the row groups, on the host, of each batch of a `packed_queue`."""
    if "queue" not in arrays:
        return []
    packed = np.asarray(arrays["queue"]["bytes"])
    ends = np.cumsum(arrays["queue"].get("sizes", [len(packed)]))  # checkpoints of earlier versions have one share
    return [list(shares) for shares in zip(*map(unpack, np.split(packed, ends[:-1])), strict=True)]


def _whole(shares: Sequence[Rollouts]) -> Rollouts:
    """The batch of the shares of several row groups, each of which has logged what it graded."""
    whole, logs = joined(shares), functools.reduce(add_logs, (share.logged for share in shares))
    return whole._replace(logged=whole.logged._replace(metrics=logs.metrics, totals=logs.totals))


# The fields of `Rollouts` that have an entry for each row: lists, and trees of arrays.
ON_HOST = ("prompts", "completions", "rewards", "turns", "parts", "roles", "environments", "reference_scores")


def of_rows(function: Callable[..., Any], batches: Sequence[Rollouts], fields: Sequence[str]) -> dict[str, Any]:
    """These fields, with `function` of the lists and arrays that the batches have there; what is None stays None."""
    return {
        name: jax.tree.map(function, *(getattr(x, name) for x in batches), is_leaf=lambda x: isinstance(x, list))
        for name in fields
    }


def _by_rows(function: Callable[..., Any], batches: Sequence[Rollouts]) -> Rollouts:
    """The first of the batches, on the host, with what `function` makes of the rows of all batches in place of its own
    rows."""
    first, found = batches[0], of_rows(function, batches, ("rollout", "images", *ON_HOST))
    columns = {name: function(*(x.logged.columns[name] for x in batches)) for name in first.logged.columns}
    if first.partial is not None:
        versions = function(*(x.partial.versions for x in batches if x.partial is not None))
        found["partial"] = first.partial._replace(versions=versions)
    if first.greedy is not None:
        found["greedy"] = _by_rows(function, [x.greedy for x in batches if x.greedy is not None])
    return first._replace(logged=first.logged._replace(columns=columns), **found)


def share_of(batch: Rollouts, index: int, count: int) -> Rollouts:
    """One of `count` equal shares of the rows of a batch whose arrays are on the host."""

    def own(x: Any) -> Any:
        size = len(x) // count
        return x[index * size : (index + 1) * size]

    return _by_rows(own, [batch])


def joined(shares: Sequence[Rollouts]) -> Rollouts:
    """One batch of the shares of a batch, on the host, with their rows in order."""
    if len(shares) == 1:
        return shares[0]
    return _by_rows(lambda *own: [*chain(*own)] if isinstance(own[0], list) else np.concatenate(own), shares)


def placed(batch: Rollouts, mesh: Mesh) -> Rollouts:
    """The batch of `unpack` with its rows sharded over `mesh`; of the rest, what belongs to the rows of this process.

    What was logged as numbers, which are added up over processes, is the first one's.
    """
    group = RowGroup.of(mesh)
    return placed_share(share_of(batch, group.index, group.count), mesh)


def placed_share(batch: Rollouts, mesh: Mesh) -> Rollouts:
    """As `placed`, of the share of the batch that is of this process's rows."""
    rollout, images = rows_to_global((batch.rollout, batch.images), mesh)
    logged = batch.logged if jax.process_index() == 0 else Logged({}, {}, batch.logged.columns)
    greedy = None if batch.greedy is None else placed_share(batch.greedy, mesh)
    return batch._replace(rollout=rollout, images=images, logged=logged, greedy=greedy)
