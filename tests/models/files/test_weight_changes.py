"""Changes of weights: what differs bit for bit, in few bytes, applied to what it was made of and to nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.files.weight_changes import THREADS, apply, as_bytes, changes


def arrays_of(seed: int) -> dict[str, np.ndarray]:
    """One of every kind, more than are taken at a time."""
    draw = np.random.default_rng(seed)
    found = {
        "few": np.linspace(-1, 1, 400).astype(jnp.bfloat16).reshape(20, 20),
        "none": np.full((3, 3), np.nan, np.float32),
        "int8": np.arange(100, dtype=np.int8),
        "scalar": np.float32(seed).reshape(()),
        "empty": np.zeros((0, 4), np.float16),
        "across": np.arange(12, dtype=np.float32).reshape(3, 4).T,  # of another order in memory
    }
    return found | {f"all {place}": draw.normal(size=50).astype(np.float32) for place in range(THREADS)}


def test_changes_give_the_arrays_bit_for_bit():
    """-0 is not 0, nan is the same nan, and what has not changed takes nothing."""
    old, new = arrays_of(0), arrays_of(1)
    new["few"][0, 0], old["few"][0, 0], new["few"][19, 19], new["int8"][7] = -0.0, 0.0, np.nan, -5
    new["across"] = new["across"].copy(order="F") + 1
    held = {name: as_bytes(x.copy(order="C")) for name, x in old.items()}
    before = {name: x.tobytes() for name, x in held.items()}
    found = {change.name: change for change in changes(new.items(), held)}
    assert list(found) == list(new)
    assert {name: found[name].changed for name in ("few", "none", "int8", "scalar", "empty", "across", "all 7")} == {
        "few": 2, "none": 0, "int8": 1, "scalar": 1, "empty": 0, "across": 12, "all 7": 50
    }  # fmt: skip
    assert [found[name].packed for name in ("none", "empty")] == [b"", b""] and 0 < len(found["few"].packed) < 60
    assert {name: x.tobytes() for name, x in held.items()} == before
    apply((x.name, memoryview(x.packed), x.checksum, held[x.name]) for x in found.values() if x.packed)
    assert {name: x.tobytes() for name, x in held.items()} == {name: x.tobytes() for name, x in new.items()}
    (change,) = changes([("few", old["few"])], held)
    with pytest.raises(ValueError, match="few has another checksum"):
        apply([("few", memoryview(change.packed), change.checksum, as_bytes(old["few"].copy()))])
