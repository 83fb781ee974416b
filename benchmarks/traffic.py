"""Bytes that a compiled program moves in a device's memory, and the kernels it starts, counted from its text.

XLA's own analysis counts a loop once and a slice of an array as the array, and there is none for a device that is not
there. The rules here:

- A kernel (a fusion, or an instruction outside of one) reads its operands once and writes its results once.
- An operand of which a fusion reads slices or gathered rows alone counts as those.
- A result that is an operand with a part replaced counts as that part, and that operand is not read for it. XLA writes
  a copy where it cannot replace in place, and the copy counts.
- A loop counts as often as it trips (hlo.py). All branches of a conditional count.
- What lies in a TPU's own memory (`S(1)` and above in a layout) is no traffic.
- Operands and results of a custom call (a kernel of Pallas or cuDNN) count whole.

What a cache saves between kernels is not seen, nor what a kernel reads twice: a count of bytes, not of time.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm.tools.plan.hlo import COLLECTIVES, Instruction, Module, Trips, called, source

# Names for what is there already, and what only orders: no kernel, no bytes.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all", "domain",
    "add-dependency", "partition-id", "replica-id", "while", "conditional", "call", "async-done", "async-update",
}  # fmt: skip
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "annotate_device_placement")
SAME_BYTES = {"bitcast", "reshape", "bitcast-convert", "get-tuple-element"}
SAME_NUMBERS = SAME_BYTES | {"copy", "transpose", "convert"}
SLICES = {"slice", "dynamic-slice", "gather"}
ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](\{[^}]*\})?")


class Traffic(NamedTuple):
    """Bytes moved and kernels started by one run of a program, or of a part of it; `exchanged` is of collectives."""

    moved: float
    kernels: float
    exchanged: float

    def minus(self, other: "Traffic") -> "Traffic":
        """The difference of two counts."""
        return Traffic(*(mine - its for mine, its in zip(self, other, strict=True)))


def step_and_rest(text: str) -> tuple[Traffic, Traffic]:
    """The traffic of one turn of the loops whose number is not known (decode steps), and of all beside them.

    Such loops within a turn count as none: they bring on rows that refill a slot or had several tokens accepted.
    """
    rest = traffic(text, (0.0,))
    return traffic(text, (1.0, 0.0)).minus(rest), rest


def traffic(text: str, trips: Trips = ()) -> Traffic:
    """The traffic of one run of a compiled program; `trips` are those of loops of unknown length, outer ones first."""
    moved = kernels = exchanged = 0.0
    for move in moves(text, trips):
        moved, kernels = moved + move.times * move.bytes, kernels + move.times
        exchanged += move.times * move.exchanged
    return Traffic(moved, kernels, exchanged)


class Move(NamedTuple):
    """One instruction of a program that moves something: how often it runs, and the bytes of each time."""

    instruction: Instruction
    times: float
    bytes: float
    exchanged: float


def moves(text: str, trips: Trips = ()) -> Iterator[Move]:
    """What moves bytes in one run of a compiled program, in no order."""
    module = Module(text, trips)
    for name in module.buffers:
        body, times = module.computations[name], module.trips[name][0]
        for x in body.values():
            if x.opcode in FREE or x.opcode.endswith(("-start", "-update")) or _target(x) in FREE_CALLS:
                continue  # what starts counts where it is done, with a shape of its own
            if x.opcode.endswith("-done"):
                start = body[x.operands[0]]
                while start.opcode.endswith("-update"):
                    start = body[start.operands[0]]
                x = start._replace(shape=x.shape, opcode=start.opcode.removesuffix("-start"))
            exchanged = 0.0
            if x.opcode in COLLECTIVES:
                exchanged = max(sum(_size(body[operand].shape) for operand in x.operands), _size(x.shape))
            yield Move(x, times, sum(_moved(module, body, x)), exchanged)


def heaviest(text: str, trips: Trips, count: int) -> list[str]:
    """The instructions of one run that move most, a line each: GB, how often, what it makes, and of which operation."""
    found = sorted(moves(text, trips), key=lambda x: -x.times * x.bytes)[:count]
    return [
        f"{x.times * x.bytes / 1e9:9.3f} GB, {x.times:6g} x {x.instruction.name} {x.instruction.shape[:60]} "
        f"{source(x.instruction)[-80:]}"
        for x in found
        if x.times * x.bytes
    ]


def _moved(module: Module, body: dict[str, Instruction], x: Instruction) -> tuple[float, float]:
    """The bytes that an instruction reads and writes, once."""
    if x.opcode == "fusion":
        return _fused(module, body, x)
    sizes = [_size(body[name].shape) for name in x.operands]
    if x.opcode in SLICES:
        return bool(sizes[0]) * _whole(x.shape) + sum(sizes[1:]), _size(x.shape)
    if x.opcode == "dynamic-update-slice":
        return sum(sizes[1:]), bool(_size(x.shape)) * _whole(body[x.operands[1]].shape)
    if x.opcode == "scatter":
        arrays = (len(sizes) - 1) // 2
        return sum(sizes[arrays:]), bool(_size(x.shape)) * sum(sizes[arrays + 1 :])
    return sum(sizes), _size(x.shape)


def _fused(module: Module, body: dict[str, Instruction], x: Instruction) -> tuple[float, float]:
    name = called(x)[0]
    inside, root = module.computations[name], module.root(name)
    parameters = {int(y.arguments): y.name for y in inside.values() if y.opcode == "parameter"}
    reads: dict[str, float] = {}
    for place, operand in enumerate(x.operands):
        if size := _size(body[operand].shape):
            reads[operand] = min(size, reads.get(operand, 0.0) + _used(module, name, parameters[place]))
    results = [inside[part] for part in root.operands] if root.opcode == "tuple" else [root]
    arrays, written = _arrays(x.shape), 0.0
    if len(results) != len(arrays):  # one instruction with several results
        return sum(reads.values()), _size(x.shape)
    for result, (size, space) in zip(results, arrays, strict=True):
        replaced = _replaced(module, name, result)
        written += (size if replaced is None else min(size, replaced)) if space == 0 else 0.0
    return sum(reads.values()), written


def _used(module: Module, name: str, value: str, updated: bool = False, share: float = 1.0) -> float:
    """Bytes of an operand that a fusion reads of a value made of it. `updated`: a part was replaced on the way.

    `share` is the operand's size over the value's, which differ after a conversion.
    """
    body, root = module.computations[name], module.root(name)
    size = share * _whole(body[value].shape)
    total = 0.0 if updated or value != root.name else size
    for user in module.users(value, body):
        place = user.operands.index(value)
        if user.opcode == "tuple" and user.name == root.name:
            total += 0.0 if updated else size
        elif user.opcode in SLICES and place == 0:
            total += share * _whole(user.shape)
        elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
            total += _used(module, name, user.name, True, share)
        elif user.opcode in SAME_NUMBERS:
            scale = size / max(_whole(user.shape), 1e-9)
            total += _used(module, name, user.name, updated and user.opcode in SAME_BYTES, scale)
        elif user.opcode == "fusion":
            inner = called(user)[0]
            values = module.computations[inner].values()
            here = next(y.name for y in values if y.opcode == "parameter" and int(y.arguments) == place)
            total += _used(module, inner, here, updated, share)
        else:
            return size
    return min(total, size)


def _replaced(module: Module, name: str, x: Instruction) -> float | None:
    """Bytes written of a fusion's result that is an operand with a part replaced; None where it is not."""
    body = module.computations[name]
    if x.opcode in SAME_BYTES and x.operands:
        return _replaced(module, name, body[x.operands[0]])
    if x.opcode == "fusion":
        inner = called(x)[0]
        return _replaced(module, inner, module.root(inner))
    if x.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    arrays = 1 if x.opcode == "dynamic-update-slice" else (len(x.operands) - 1) // 2
    news = x.operands[1:2] if x.opcode == "dynamic-update-slice" else x.operands[arrays + 1 :]
    part, base = sum(_whole(body[new].shape) for new in news), body[x.operands[0]]
    while base.opcode in SAME_BYTES:
        base = body[base.operands[0]]
    before = 0.0 if base.opcode == "parameter" else _replaced(module, name, base)
    return None if before is None else part + before


def _target(x: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', x.rest)
    return found[1] if found else ""


def _arrays(shape: str) -> list[tuple[float, int]]:
    """Bytes and memory space of each array of a shape."""
    found = []
    for kind, dims, layout in ARRAY.findall(shape):
        count = math.prod(int(n) for n in dims.replace("<=", "").split(",") if n)
        bits = re.search(r"\d+", kind)
        space = re.search(r"S\((\d+)\)", layout) if ":T(" in layout or "S(" in layout else None
        each = 0 if kind in ("token", "opaque") else int(bits[0]) if bits else 8
        found.append((count * each / 8, int(space[1]) if space else 0))
    return found


def _size(shape: str) -> float:
    """Bytes of a shape in the device's memory."""
    return sum(size for size, space in _arrays(shape) if space == 0)


def _whole(shape: str) -> float:
    """Bytes of a shape, wherever it lies."""
    return sum(size for size, _ in _arrays(shape))
