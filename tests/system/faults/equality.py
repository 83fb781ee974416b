"""Comparison of the files of two runs, bit for bit and apart from clocks."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from jaxrl_llm.training.checkpoint.manager import ARRAYS

CLOCKS = {"tokens_per_second", "mfu", "step_time", "rollout/queue"}
OF_PROCESSES = ("time", "machine/", "producer/", "weights/")


def metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl without what a clock measured or another number of processes has."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(OF_PROCESSES) and k not in CLOCKS} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics, completions, last checkpoint and exported model of two runs are equal."""
    assert metrics(one / "metrics.jsonl") == metrics(other / "metrics.jsonl")
    tables = [sorted(path.name for path in (run / "completions").glob("*.parquet")) for run in (one, other)]
    assert tables[0] and tables[0] == tables[1]
    for name in tables[0]:
        assert pq.read_table(one / "completions" / name).equals(pq.read_table(other / "completions" / name)), name
    steps = [max(int(path.name) for path in (run / "checkpoints").iterdir()) for run in (one, other)]
    assert steps[0] == steps[1]
    folders = [run / "checkpoints" / str(steps[0]) for run in (one, other)]
    assert (folders[0] / "host/metadata").read_text() == (folders[1] / "host/metadata").read_text()
    trees = [[name for name in ("state", *ARRAYS) if (folder / name).is_dir()] for folder in folders]
    assert trees[0][0] == "state" and trees[0] == trees[1]
    for name in trees[0]:
        assert_same_tree(*(read(folder / name) for folder in folders))
    assert_same_tree(*(load_file(run / "hf/model.safetensors") for run in (one, other)))


def read(folder: Path):
    """The arrays of one part of a checkpoint, whatever devices and processes wrote them."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        there = reader.metadata(folder).item_metadata.tree
        numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there)
        return reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=numpy))


def assert_same_tree(one, other) -> None:
    """The trees have the same paths and the same bits."""
    leaves = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (one, other)]
    assert leaves[0].keys() == leaves[1].keys()
    for path, leaf in leaves[0].items():
        np.testing.assert_array_equal(leaf, leaves[1][path], err_msg=str(path))
