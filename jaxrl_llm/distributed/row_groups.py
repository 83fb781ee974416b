"""Row groups: the processes that hold the same rows of a mesh, where `tensor` or `context` spans several of them.

Each process of a group reads the rows itself: data, order and random numbers are the same in all. What need not be (a
user's reward functions, judges, clocks) is done by the first process of the group alone, its leader, which hands the
results to the others; what leaves the devices is counted and recorded by leaders. Without such an axis every process is
a group of its own, and its leader.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl_llm.distributed.processes import AgreedError, gather
from jaxrl_llm.distributed.sharding import row_groups


class RowGroup(NamedTuple):
    """The row group of this process, which has the equal share `index` of all rows, of `count` shares."""

    index: int
    count: int
    size: int  # processes of each group

    @classmethod
    def of(cls, mesh: Mesh) -> "RowGroup":
        """The group of this process on a mesh of all processes; on one of its own devices it has all rows, alone."""
        if not mesh.is_multi_process:
            return cls(0, 1, 1)
        count = row_groups(mesh)
        size = jax.process_count() // count
        return cls(jax.process_index() // size, count, size)

    @property
    def leads(self) -> bool:
        """True for the first process of the group."""
        return jax.process_index() % self.size == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all leaders (anything JSON writes), in the order of their rows. All processes must call it."""
        return gather(value if self.leads else None)[:: self.size]

    def shared(self, value: Any) -> Any:
        """The leader's value (anything JSON writes) on every process of its group. All processes must call it."""
        return value if self.size == 1 else self.gather(value)[self.index]

    def shared_array(self, x: np.ndarray) -> np.ndarray:
        """The leader's array of 32-bit numbers on every process of its group; others give one of the same shape and
        type. All processes must call it."""
        return x if self.size == 1 else np.asarray(multihost_utils.process_allgather(x)[self.index * self.size])

    def check_same(self, *arrays: np.ndarray) -> None:
        """Raises AgreedError, in all processes, unless those of each group have the same arrays of rows."""
        if self.size == 1:
            return
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()
        found = gather(digest)
        for process, other in enumerate(found):
            leader = process // self.size * self.size
            if other != found[leader]:
                raise AgreedError(
                    f"processes {leader} and {process} hold the same rows of the mesh, but have read different data: "
                    "let the function of data.format make a row's text of that row alone, without chance or clock, and "
                    "give all processes the same files; or make mesh.context x mesh.tensor no larger than the devices "
                    "of one process"
                )
