"""Copies of what users' functions get: they may change it, and nobody else sees that."""

import copy
from typing import Any

import numpy as np

PLAIN = frozenset((str, int, float, bool, type(None), bytes))


def copied(value: Any) -> Any:
    """A copy of lists, dictionaries, tuples, sets and arrays at every depth; other objects (an environment) as is."""
    if type(value) is list:  # token ids are long: lists of plain values alone are copied at once
        return value.copy() if PLAIN.issuperset(map(type, value)) else [copied(each) for each in value]
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(copied(each) for each in value)
    if isinstance(value, (list, dict, set, bytearray, np.ndarray)):
        return copy.deepcopy(value)
    return value
