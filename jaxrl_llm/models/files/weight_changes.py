"""Changes of weights: what arrays have become, as what differs from what they were, bit for bit.

A step of reinforcement learning moves few weights by so much that another number of 16 bits is nearer to them, about
one in a hundred (PULSE, arXiv:2602.03839). So a change holds the bytes of an array XOR those that it had before, nearly
all of them zero, compressed, and the checksum of the new ones, by which a change of other bytes is found out.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow
import xxhash

ENCODING = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}
THREADS = 8  # that compare, compress and sum up arrays, which all let other threads run


class Change(NamedTuple):
    """The new numbers of an array: its bytes, and how they differ from those before."""

    name: str
    new: np.ndarray
    packed: bytes | None  # empty where nothing differs, None where the array is to be had whole
    checksum: str  # of `new`, where `packed` has something
    numbers: int
    changed: int  # of the numbers


def changes(
    arrays: Iterable[tuple[str, np.ndarray]], held: Mapping[str, np.ndarray], most: float = 1.0
) -> Iterator[Change]:
    """The changes of arrays since they had the bytes `held`; few arrays are taken at a time.

    An array that is not among those, or of which a larger share than `most` of the numbers changed, is to be had whole.
    """

    def change(item: tuple[str, np.ndarray]) -> Change:
        name, array = item
        new, packed, checksum, changed = as_bytes(np.ascontiguousarray(array)), None, "", array.size
        if name in held:
            difference = new ^ held[name]
            changed = int(np.count_nonzero(difference.view(f"u{array.dtype.itemsize}")))
            if not changed:
                packed = b""
            elif changed <= most * array.size:
                packed = pyarrow.compress(difference, "zstd", asbytes=True)
                checksum = xxhash.xxh3_128_hexdigest(new.data)
        return Change(name, new, packed, checksum, array.size, changed)

    arrays = iter(arrays)
    with ThreadPoolExecutor(THREADS) as pool:
        while some := list(itertools.islice(arrays, THREADS)):  # all would be the model once more
            yield from pool.map(change, some)


def apply(found: Iterable[tuple[str, bytes | memoryview, str, np.ndarray]]) -> None:
    """Turns bytes of arrays into those that they became: the name, the change and the checksum of each, and its bytes.

    Raises ValueError where they become others.
    """

    def applied(item: tuple[str, bytes | memoryview, str, np.ndarray]) -> None:
        name, packed, checksum, held = item
        held ^= np.frombuffer(pyarrow.decompress(packed, held.size, "zstd"), np.uint8)
        if xxhash.xxh3_128_hexdigest(held.data) != checksum:
            raise ValueError(f"{name} has another checksum")

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(applied, found):
            pass


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes `[n]` of an array, not copied where they follow each other."""
    return array.reshape(-1).view(np.uint8)
