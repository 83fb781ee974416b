"""Compiling one program from shapes, and its bytes, floating-point operations and collectives on one device."""

import dataclasses
import math
import re
import time
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxrl_llm.distributed.sharding import bytes_on_device, placed
from jaxrl_llm.models.mixers.context_attention import BLOCKS
from jaxrl_llm.tools.plan import hlo

Trips = tuple[float, ...]  # of loops whose number the compiler does not know, the outer ones first


class ProgramStats(NamedTuple):
    """The cost of one compiled program; bytes are of one device, and a step runs it `times` times."""

    name: str
    times: float
    resident: int  # bytes on the device while it runs that are no argument of it
    arguments: int
    results: int  # new ones: without those that take the place of a donated argument
    temporaries: int
    flops: float  # of the traced program, an equal share for each device
    compiled_flops: float  # of the matmuls in the compiled program of one device
    collectives: list[hlo.Collective]
    largest: list[hlo.Buffer]
    seconds: float  # to compile
    trips: Trips  # of its loops of unknown length
    text: str  # the optimized program
    parameters_read: int = 0  # bytes that one run reads, where it decodes
    caches_read: int = 0

    @property
    def peak(self) -> int:
        """The most that a device holds while the program runs."""
        return self.resident + self.arguments + self.results + self.temporaries

    @property
    def sent(self) -> float:
        """Bytes that a device sends to others in one run."""
        return sum(x.sent for x in self.collectives)


# The matmuls of a block of queries and a block of keys, of jax's flash kernels of GPUs.
FLASH = {"mha_forward": 2, "mha_backward": 7}
# The kernels and loops of models.grouped_matmul, which compute what is asked for.
GROUPED = ("grouped_matmul", "grouped_matmul_of_codes", "grouped_outer", "looped_matmul", "looped_outer")
# The CPU's compiler computes in float32. Where nothing is gathered in a loop over layers, moving what does not change
# out of it leaves float32 copies of all parameters, keys and values.
IN_LAYERS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@dataclasses.dataclass
class Compiler:
    """Compiles programs one by one; `held` bytes are on every device all the time.

    `simulated`: by the CPU's compiler, for other devices. `options` are the compiler's. `converted` are the bytes of
    the largest matrices of a layer's experts in 4 bits as numbers: accelerators convert them at once, CPUs one by one.
    """

    held: int
    devices: int
    simulated: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    programs: list[ProgramStats] = dataclasses.field(default_factory=list)
    converted: int = 0

    def add(
        self,
        name: str,
        function,
        arguments: tuple,
        times: float = 1.0,
        held: tuple = (),
        of_run: Any = (),
        trips: Trips = (),
        copied: Any = (),
        reads: tuple[Any, Any] = ((), ()),
    ) -> Any:
        """Compile one more program and return the shapes of its results.

        `held` are trees on the device meanwhile that are not among the arguments, `of_run` those of the arguments that
        are always there. `copied` are arrays that the device's compiler may copy and this one does not. `reads` are
        the parameters and caches that decoding reads.
        """
        began = time.perf_counter()
        traced = function.trace(*arguments)
        options = self.options | (IN_LAYERS if self.simulated and ": " in name else {})
        compiled = traced.lower().compile(compiler_options=options or None)
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        module = hlo.Module(text, trips)
        unseen = bytes_on_device(copied) + (0 if name.endswith((": cast", ": assign")) else self.converted)
        leaves = (x for x in jax.tree.leaves(arguments) if isinstance(x, jax.ShapeDtypeStruct))
        arrays = [x for x in leaves if x.sharding is not None]
        stats = ProgramStats(
            name=name,
            times=times,
            resident=self.held - bytes_on_device(of_run) + bytes_on_device(held),
            arguments=bytes_on_device(arrays),
            results=max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
            temporaries=memory.temp_size_in_bytes + (unseen if self.simulated else 0),
            flops=traced_flops(traced.jaxpr, trips) / self.devices,
            compiled_flops=module.matmul_flops(),
            collectives=module.collectives(),
            largest=module.largest(12),
            seconds=time.perf_counter() - began,
            trips=trips,
            text=text,
            parameters_read=bytes_on_device(reads[0]),
            caches_read=bytes_on_device(reads[1]),
        )
        self.programs.append(stats)
        return placed(function.eval_shape(*arguments), compiled.output_shardings)


def traced_flops(jaxpr, trips: Trips = ()) -> float:
    """Return the operations of all matmuls in a (closed) jaxpr, on all devices together; in a loop once for each trip.

    A loop of unknown length that `trips` leaves out counts once; of branches the heaviest counts. The kernels here,
    Pallas' and cuDNN's, are of causal attention and skip half of their blocks. Operations on numbers in 8 bits count
    half, as matrix units compute twice as many of them.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_flops(equation, trips) for equation in jaxpr.eqns)


def _flops(equation, trips: Trips) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, out = equation.invars[0].aval, equation.outvars[0].aval.shape
        rate = 2 if left.dtype.itemsize == 1 else 1
        return 2.0 * math.prod(out) * math.prod(left.shape[i] for i in contracted) / rate
    if name.startswith("ragged_dot") or (name in ("pallas_call", "jit", "pjit") and params["name"] in GROUPED):
        # Rows `[m,k]` with one matrix each of g, `[m,n]` or parts `[s,m,n]` of that sum, or of rows `[m,k]` and `[m,n]`
        # the gradient of the matrices. Of experts that devices share each has rows for all, and computes its own.
        left, right, out = (x.aval.shape for x in (*equation.invars[:2], equation.outvars[0]))
        shared = equation.invars[0].aval.sharding.mesh.shape.get("expert", 1)
        return 2.0 * math.prod(left) * (right if len(right) == 2 else out)[-1] / shared
    named = re.search(rf"{BLOCKS}(\d+)", str(equation.source_info.name_stack)) if name == "while" else None
    within = trips[1:] if name == "while" and not named else trips
    inside = [traced_flops(x, within) for value in params.values() for x in _jaxprs(value)]
    if name == "scan":
        return params["length"] * sum(inside)
    if name == "while":
        return (float(named[1]) if named else (trips or (1.0,))[0]) * sum(inside)
    if name == "pallas_call" and params["name"] in FLASH:  # it loops up to the last token that a block sees
        query, key = (x.aval.shape for x in equation.invars[:2])
        return FLASH[params["name"]] * math.prod(query) * float(key[1])
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid) * sum(inside) / 2
    if name.startswith("dot_product_attention"):  # cuDNN's: two matmuls forward, five backward
        query, key = (x.aval.shape for x in equation.invars[:2])
        return (5 if "bwd" in name else 2) * math.prod(query) * float(key[1 if params["layout"] == 0 else 2])
    if name == "cond":
        return max(inside)
    if name == "shard_map":
        axes = next(params[key] for key in ("newly_manual_axes", "manual_axes") if key in params)  # as jax calls them
        return sum(inside) * math.prod(params["mesh"].shape[axis] for axis in axes)
    return sum(inside)


def _jaxprs(value):
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)
