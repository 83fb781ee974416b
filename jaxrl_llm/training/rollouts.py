"""`Rollouts`: what a producer makes and a learner trains on, and the bytes of it that a checkpoint holds."""

import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.algorithms.turn_advantages import Turns
from jaxrl_llm.distributed.sharding import local_rows, row_sharding, rows_to_global
from jaxrl_llm.rewards.runner import NOTHING_LOGGED, Logged
from jaxrl_llm.rollout.engine import Rollout
from jaxrl_llm.training.logging.reward_metrics import table_value

Row = dict[str, Any]


class Rollouts(NamedTuple):
    """Completions of some prompts with their rewards: arrays of all rows on the device, the rest of this process's."""

    rollout: Rollout
    examples: list[Row]
    prompts: list[Any]
    completions: list[Any]
    rewards: np.ndarray  # [rows of this process, F], NaN where a function does not apply
    logged: Logged = NOTHING_LOGGED  # by the reward functions
    version: int = 0  # training steps of the policy that sampled
    resampled_groups: int | None = None  # None without dynamic sampling
    greedy: "Rollouts | None" = None  # a greedy completion of each example, for a rule that compares with it
    epochs: float | None = None  # of the data, once these prompts were drawn; None for streams
    turns: Turns | None = None  # of the rows of this process, where they are episodes
    images: Images | None = None  # of the prompts [B], on the device


def on_mesh(batch: Rollouts, mesh: Mesh) -> Rollouts:
    """The batch with its arrays on other devices, sharded by rows over `mesh`."""
    greedy = None if batch.greedy is None else on_mesh(batch.greedy, mesh)
    rollout, images = jax.device_put((batch.rollout, batch.images), row_sharding(mesh))
    return batch._replace(rollout=rollout, images=images, greedy=greedy)


def pack(batches: Sequence[Rollouts]) -> np.ndarray:
    """The batches as bytes `[n]` uint8: an npz file of arrays and of one JSON text, which runs no code when it is read.

    Examples are left out: nobody reads those of a batch that is made. Cells of the table of completions are kept as the
    table shows them.
    """
    arrays: dict[str, Any] = {}

    def texts_of(batch: Rollouts, name: str) -> dict[str, Any]:
        arrays.update({f"{name}/{key}": x for key, x in local_rows(batch.rollout)._asdict().items() if x is not None})
        arrays[f"{name}/rewards"] = batch.rewards
        if batch.turns is not None:
            arrays.update({f"{name}/turns/{key}": x for key, x in batch.turns._asdict().items()})
        if batch.images is not None:
            own = local_rows(batch.images)
            arrays.update({f"{name}/pixels": own.pixels, f"{name}/tiles": own.count})
            if own.grids is not None:
                arrays[f"{name}/grids"] = own.grids
        logged = batch.logged
        return {
            "prompts": batch.prompts,
            "completions": batch.completions,
            "metrics": {key: [float(x) for x in values] for key, values in logged.metrics.items()},
            "totals": {key: float(x) for key, x in logged.totals.items()},
            "columns": {key: [table_value(x) for x in values] for key, values in logged.columns.items()},
            "version": batch.version,
            "resampled_groups": batch.resampled_groups,
            "greedy": None if batch.greedy is None else texts_of(batch.greedy, f"{name}/greedy"),
            "epochs": batch.epochs,
        }

    texts = json.dumps([texts_of(batch, str(index)) for index, batch in enumerate(batches)])
    file = io.BytesIO()
    np.savez(file, texts=np.frombuffer(texts.encode(), np.uint8), **arrays)
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: np.ndarray, mesh: Mesh) -> list[Rollouts]:
    """The batches of `pack`, their rows sharded over `mesh`."""
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as file:
        arrays = dict(file)

    def batch_of(texts: dict[str, Any], name: str) -> Rollouts:
        rows = {key: arrays[f"{name}/{key}"] for key in Rollout._fields if f"{name}/{key}" in arrays}
        turns = {key: arrays[f"{name}/turns/{key}"] for key in Turns._fields if f"{name}/turns/{key}" in arrays}
        images = None
        if f"{name}/pixels" in arrays:
            own = Images(arrays[f"{name}/pixels"], arrays[f"{name}/tiles"], grids=arrays.get(f"{name}/grids"))
            images = rows_to_global(own, mesh)
        return Rollouts(
            rows_to_global(Rollout(**rows), mesh),
            [],
            rewards=arrays[f"{name}/rewards"],
            logged=Logged(texts["metrics"], texts["totals"], texts["columns"]),
            turns=Turns(**turns) if turns else None,
            images=images,
            greedy=None if texts["greedy"] is None else batch_of(texts["greedy"], f"{name}/greedy"),
            **{key: texts[key] for key in ("prompts", "completions", "version", "resampled_groups", "epochs")},
        )

    return [batch_of(texts, str(index)) for index, texts in enumerate(json.loads(arrays["texts"].tobytes()))]
