"""Collectives, matmuls and the largest tensors of a compiled program, from its text; of one device.

XLA's own cost analysis counts the body of a loop once. Here everything in a loop counts as often as the loop trips,
which is read from the loop; `trips` are those of loops whose number is not known before (decoding, packed rows), the
outer ones first. A tuple among them has the trips of loops that follow one another in the same place.

Collectives are those that accelerators make of them. Compilers for these add up on each device what a loop adds up over
devices, and reduce it once behind the loop; the CPU's reduces at every turn. Where each device needs a slice of a sum,
they scatter it; the CPU's sends all of it to all. And CPUs send bfloat16 numbers as float32.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.mixers.context_attention import BLOCKS

SIZES = {"pred": 1, "token": 0, "opaque": 0}  # other types have their bits in their name
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Instructions that make no buffer of their own.
VIEWS = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "constant",
    "optimization-barrier",
    "copy-done",
    "async-done",
    "async-update",
)
# Instructions that give the same numbers in another place or order.
VIEWED = ("copy", "bitcast", "reshape", "transpose")
SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
NAMES = re.compile(r"%([\w.\-]+)")


Trips = tuple[float | tuple[float, ...], ...]


class Instruction(NamedTuple):
    """An instruction, a line of a computation: `%name = shape opcode(arguments), rest`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of the values that it reads."""
        return NAMES.findall(self.arguments)


class Collective(NamedTuple):
    """All collectives of one kind and group size: how many, their results' bytes, and what a device sends of them."""

    kind: str
    group: int
    count: float
    bytes: float
    sent: float


class Buffer(NamedTuple):
    """A buffer that a program makes: its bytes, its shape, and the operation that makes it, as `source` names it."""

    bytes: int
    shape: str
    source: str


class Module:
    """A compiled program, parsed from `compiled.as_text()`."""

    def __init__(self, text: str, trips: Trips = ()):
        self.unknown = trips
        self._readers: dict[int, dict[str, list[Instruction]]] = {}
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._roots: dict[str, str] = {}
        self.entry = name = ""
        self.partitions = _number(r"num_partitions=(\d+)", text.partition("\n")[0], 1)
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if header:
                name = header[2]
                current = self.computations.setdefault(name, {})
                self.entry = name if header[1] else self.entry
            elif (found := _parsed(line)) is not None:
                current[found.name] = found
                if line.lstrip().startswith("ROOT "):
                    self._roots[name] = found.name

    def root(self, computation: str) -> Instruction:
        """The instruction whose value a computation returns."""
        return self.computations[computation][self._roots[computation]]

    @functools.cached_property
    def trips(self) -> dict[str, tuple[float, float]]:
        """The runs of each computation, those inside fusions too, and those of the loop that it is the body of."""
        found: dict[str, tuple[float, float]] = {}

        def visit(name: str, times: float, loops: float, unknown: Trips) -> None:
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + times, before[1] + loops
            following = 0  # loops of unknown length so far
            for x in self.computations[name].values():
                known = self._trip_count(x) if x.opcode == "while" else 1
                here = (unknown or (1.0,))[0]
                repeats = known or (here[min(following, len(here) - 1)] if isinstance(here, tuple) else here)
                following += not known
                for inner in called(x):
                    before_it = times if x.opcode == "while" else times * repeats
                    visit(inner, times * repeats, before_it, unknown if known else unknown[1:])

        visit(self.entry, 1.0, 1.0, self.unknown)
        return found

    def _trip_count(self, loop: Instruction) -> int | None:
        """The trips that XLA wrote beside the loop or its name has, or else the number that its counter is compared
        with."""
        known = _number(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.rest, 0)
        known = known or _number(rf'{BLOCKS}(\d+)/while"', loop.rest, 0)
        name = re.findall(r"condition=%?([\w.\-]+)", loop.rest)[0]
        last, given = self.root(name), []
        if last.opcode == "fusion":
            given, name = [self.computations[name][operand] for operand in last.operands], called(last)[0]
            last = self.root(name)
        if known or last.opcode != "compare" or "direction=LT" not in last.rest:
            return known or None
        limit = self.computations[name][last.operands[1]]
        if limit.opcode == "parameter" and given:
            limit = given[int(limit.arguments)]
        return int(limit.arguments) if limit.opcode == "constant" else None

    @functools.cached_property
    def buffers(self) -> set[str]:
        """The computations whose instructions have buffers: not those inside fusions and reductions."""
        seen, ahead = set(), [self.entry]
        while ahead:
            name = ahead.pop()
            if name in seen:
                continue
            seen.add(name)
            for instruction in self.computations[name].values():
                if instruction.opcode in ("while", "conditional", "call", "async-start"):
                    ahead += called(instruction)
        return seen

    def _all(self) -> Iterator[tuple[tuple[float, float], dict[str, Instruction], Instruction]]:
        for name, trips in self.trips.items():
            body = self.computations[name]
            for x in body.values():
                yield trips, body, x

    def collectives(self) -> list[Collective]:
        """The collectives of one run of the program, of one device, the heaviest first."""
        found: dict[tuple[str, int], list[float]] = {}
        for trips, body, x in self._all():
            if x.opcode.removesuffix("-start") not in COLLECTIVES:
                continue
            group = _group(x, self.partitions)
            for kind, times, size, read in self._exchanges(trips, body, x, group):
                total = found.setdefault((kind, group), [0.0, 0.0, 0.0])
                total[0] += times
                total[1] += times * size
                total[2] += times * _sent(kind, group, size, read)
        made = [Collective(kind, group, *total) for (kind, group), total in found.items() if group > 1]
        return sorted(made, key=lambda x: -x.sent)

    def _exchanges(
        self, trips: tuple[float, float], body: dict[str, Instruction], x: Instruction, group: int
    ) -> Iterator[tuple[str, float, float, float]]:
        """Yield the collectives that accelerators run in its place: (kind, runs, bytes of results, bytes read)."""
        kind, (times, loops) = x.opcode.removesuffix("-start"), trips
        sizes = [
            _bytes(body[name].shape) * (0.5 if self._widened(name, body) else 1.0)
            for name in x.operands
            if name in body
        ]
        if x.opcode != "all-reduce":
            size, read = _bytes(x.shape), sum(_bytes(body[name].shape) for name in x.operands if name in body)
            if x.opcode.endswith("-start") and kind != "all-reduce":
                size -= read  # the shape of other started ones holds their operands too
            narrow = sum(sizes) / max(read, 1)
            yield kind, times, narrow * size, narrow * read
            return
        shares: dict[tuple[str, float], float] = {}
        for size, names in zip(sizes, self._names_of_results(x, body), strict=True):
            users = [(name, user) for name in names for user in self.users(name, body)]
            sliced = bool(users) and all(self._sliced(user, name, (body,)) for name, user in users)
            added = len(users) == 1 and self._adds_up(*users[0], body)
            if users and all(self._narrows(user, name, body) for name, user in users):
                size *= 0.5
            share = ("reduce-scatter", times) if sliced else ("all-reduce", loops if added else times)
            shares[share] = shares.get(share, 0.0) + size
        for (kind, often), size in shares.items():
            yield kind, often, size / group if kind == "reduce-scatter" else size, size

    def users(self, name: str, body: dict[str, Instruction]) -> list[Instruction]:
        """The instructions that read a value."""
        if id(body) not in self._readers:
            readers = self._readers[id(body)] = {}
            for x in body.values():
                for operand in set(x.operands):
                    readers.setdefault(operand, []).append(x)
        return self._readers[id(body)].get(name, [])

    def _names_of_results(self, x: Instruction, body: dict[str, Instruction]) -> list[list[str]]:
        """Return the names of each result of a collective."""
        if len(x.operands) == 1:
            return [[x.name]]
        found: list[list[str]] = [[] for _ in x.operands]
        for part in self.users(x.name, body):
            found[_number(r"index=(\d+)", part.rest, 0)].append(part.name)
        return found

    def _inside(self, fusion: Instruction, name: str) -> tuple[dict[str, Instruction], list[str]]:
        """The body of a fusion, and the names of the value in it."""
        body = self.computations[called(fusion)[0]]
        places = {str(i) for i, operand in enumerate(fusion.operands) if operand == name}
        return body, [x.name for x in body.values() if x.opcode == "parameter" and x.arguments in places]

    def _sliced(
        self,
        user: Instruction,
        name: str,
        bodies: tuple[dict[str, Instruction], ...],
        fusions: tuple[Instruction, ...] = (),
    ) -> bool:
        """True where only a slice of the value is read; `bodies` and `fusions` are those around it."""
        if user.opcode == "dynamic-slice":
            return user.operands[0] == name
        if user.opcode == "fusion":
            body, names = self._inside(user, name)
            bodies, fusions = (*bodies, body), (*fusions, user)
        elif user.opcode in VIEWED or user.opcode == "convert":
            names = [user.name]
            while fusions and names[0] == list(bodies[-1])[-1]:  # what the fusion gives
                names, bodies, fusions = [fusions[-1].name], bodies[:-1], fusions[:-1]
        else:
            return False
        reads = [(each, x) for each in names for x in self.users(each, bodies[-1])]
        return bool(reads) and all(self._sliced(x, each, bodies, fusions) for each, x in reads)

    def _narrows(self, user: Instruction, name: str, body: dict[str, Instruction]) -> bool:
        """True where the value is read as bfloat16: CPUs add up float32, accelerators the type of the program."""
        if user.opcode == "fusion":
            body, names = self._inside(user, name)
            users = [(each, x) for each in names for x in self.users(each, body)]
            return bool(users) and all(self._narrows(x, each, body) for each, x in users)
        return user.opcode == "convert" and user.shape.startswith("bf16")

    def _adds_up(self, name: str, user: Instruction, body: dict[str, Instruction]) -> bool:
        """True where the value is only added to a total that the loop of this body carries."""
        last = list(body.values())[-1]
        if last.opcode != "tuple" or user.name not in last.operands:
            return False
        place = last.operands.index(user.name)
        totals = [body[other] for other in user.operands if other in body and other != name]
        carried = any(y.opcode == "get-tuple-element" and re.search(rf"index={place}\b", y.rest) for y in totals)
        inside = [self.root(inner).opcode for inner in called(user)]
        return carried and (user.opcode == "add" or inside == ["add"])

    def _widened(self, name: str, body: dict[str, Instruction]) -> bool:
        """True for bfloat16 numbers in float32: CPUs exchange them so, accelerators as bfloat16."""
        x = body.get(name)
        if x is None or not x.shape.startswith("f32"):
            return False
        if x.opcode == "fusion":
            inside = self.computations[called(x)[0]]
            return self._widened(list(inside)[-1], inside)
        if x.opcode == "convert":
            return body[x.operands[0]].shape.startswith("bf16")
        return x.opcode in VIEWED and self._widened(x.operands[0], body)

    def matmul_flops(self) -> float:
        """Floating-point operations of the matmuls of one run, of one device."""
        total = 0.0
        for (times, _), neighbours, x in self._all():
            if x.opcode != "dot" or x.operands[0] not in neighbours:
                continue
            left = _dims(neighbours[x.operands[0]].shape)
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
            over = [left[int(i)] for i in contracted[1].split(",") if i] if contracted else []
            total += times * 2.0 * np.prod(_dims(x.shape), dtype=float) * np.prod(over, dtype=float)
        return total

    def largest(self, count: int) -> list[Buffer]:
        """The largest buffers that the program makes, one of each shape and source."""
        found: dict[tuple[str, str], Buffer] = {}
        for name, computation in self.computations.items():
            for x in computation.values() if name in self.buffers else ():
                if x.opcode not in VIEWS and not x.shape.startswith("("):
                    shape = re.sub(r"\{.*", "", x.shape)
                    buffer = Buffer(_bytes(x.shape), shape, source(x))
                    found.setdefault((shape, buffer.source), buffer)
        return sorted(found.values(), key=lambda x: -x.bytes)[:count]


def _parsed(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line)
    if match is None:
        return None
    name, text = match[1], match[2]
    end = _closing(text) if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    opcode, _, text = text.partition("(")
    end = _closing("(" + text) - 2
    return Instruction(name, shape, opcode, text[:end], text[end + 1 :])


def _closing(text: str) -> int:
    """The position after the bracket that closes the one that `text` starts with."""
    depth = 0
    for position, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return position + 1
    return len(text)


def called(x: Instruction) -> list[str]:
    """The computations that an instruction calls."""
    found = re.findall(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", x.rest)
    branches = re.search(r"(?:branch_computations|called_computations)=\{([^}]*)\}", x.rest)
    return found + (NAMES.findall(branches[1]) if branches else [])


def _group(x: Instruction, partitions: int) -> int:
    """Devices that take part in one collective.

    Groups are listed (`{{0,1},{2,3}}`), counted (`[2,4]<=[8]`), or axes of a mesh, or parts of them
    (`mesh['a'=8,'b'=2] {'a':(2)4}`: 4 of the 8).
    """
    if (axes := re.search(r"replica_groups=@?mesh[\w.]*\[([^\]]*)\][^{]*\{([^}]*)\}", x.rest)) is not None:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes[2])
        return int(np.prod([int(part or sizes[name]) for name, part in parts]))
    if (iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", x.rest)) is not None:
        return int(iota[2])
    if (given := re.search(r"replica_groups=\{\{([\d,]*)\}", x.rest)) is not None:
        return given[1].count(",") + 1
    if "permute" in x.opcode:
        return 2 if re.search(r"source_target_pairs=\{\{", x.rest) else 1
    return partitions


def _sent(kind: str, group: int, size: float, read: float) -> float:
    """Bytes that a device sends in a ring: an all-reduce is a reduce-scatter and an all-gather."""
    part = (group - 1) / group
    return {
        "all-gather": part * size,
        "all-reduce": 2 * part * size,
        "reduce-scatter": part * read,
        "all-to-all": part * size,
        "ragged-all-to-all": part * size,
        "collective-permute": size,
    }[kind]


def _dims(shape: str) -> list[int]:
    match = SHAPE.search(shape)
    return [int(n) for n in match[2].split(",") if n] if match else []


def _bytes(shape: str) -> int:
    """Bytes of a shape `f32[8,16]{1,0}` or of all parts of a tuple."""
    total = 0
    for kind, dims in SHAPE.findall(re.sub(r"\{[^}]*\}", "", shape)):
        bits = _number(r"[a-z](\d+)", kind, 0)
        count = int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64))
        total += count * SIZES[kind] if kind in SIZES else -(-count * bits // 8)
    return total


def _number(pattern: str, text: str, otherwise: int) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else otherwise


def source(x: Instruction) -> str:
    """Return the operation of the program that made a buffer, in short."""
    name = re.search(r'op_name="([^"]*)"', x.rest)
    if name is None:
        return x.opcode
    parts = [part for part in name[1].split("/") if part not in ("while", "body", "closed_call", "cond", "checkpoint")]
    return "/".join(re.sub(r"\b(jit|pjit|jvp|transpose|rematted_computation)\b", r"\1", part) for part in parts[-3:])
