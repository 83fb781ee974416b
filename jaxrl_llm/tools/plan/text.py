"""A plan as text."""

from collections.abc import Iterator, Sequence

from jaxrl_llm.config import batch_rows
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed.devices import named
from jaxrl_llm.tools.plan.advice import Advice
from jaxrl_llm.tools.plan.planned import HEADROOM, Plan, floors

BY_DEFAULT = 0.75  # of a GPU's memory, which JAX takes
UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def bytes_text(count: float) -> str:
    """Return bytes in words: 1.25 GB, in powers of 1000."""
    return _scaled(count, UNITS)


def number_text(count: float) -> str:
    """Return a large number in words: 8.03 B."""
    return _scaled(count, ("", "K", "M", "B", "T", "P"))


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:.3g} {units[-1]}"


def seconds_text(value: float) -> str:
    """Return a time in words."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows, indented, with their columns aligned: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join([first, *rest])}".rstrip()


def verdict(plan: Plan) -> str:
    """Return, in a sentence, whether the plan fits."""
    memory, peak = plan.target.device.memory, plan.peak.peak
    if not memory:
        return "the memory of this device is not known"
    least = max(x.peak - (0 if plan.target.exact else x.temporaries) for x in plan.programs)
    of = f"{bytes_text(peak)} of {bytes_text(memory)} on each device, in {plan.peak.name}"
    device = plan.target.device
    if device.gpu and memory == named(device.name).memory and peak > BY_DEFAULT * memory:  # not what JAX has taken here
        of += f"; of that JAX takes {bytes_text(BY_DEFAULT * memory)} unless the run sets XLA_CLIENT_MEM_FRACTION=0.92"
    if peak <= plan.capacity:
        return f"fits: {'' if plan.target.exact else 'at most '}{of}"
    if least > plan.capacity or plan.target.exact:
        return f"does not fit: {of} ({HEADROOM:.0%} are left free)"
    return f"may not fit: at most {of}, {bytes_text(least)} of them without temporaries"


def lines(plan: Plan, advised: Sequence[Advice] = ()) -> Iterator[str]:
    """Yield the lines of the report: the run, its memory, its programs and their time, the verdict, and what is
    `advised`."""
    yield from _head(plan)
    yield from _memory(plan)
    yield from _programs(plan)
    yield from _time(plan)
    yield ""
    yield verdict(plan)
    if plan.note:
        yield plan.note
    if advised:
        yield ""
        yield "what would change it, for each device:"
        rows = [("change", "saves", "peak", "known")]
        rows += [(x.change, bytes_text(x.saves), bytes_text(max(x.peak, 0)), x.how) for x in advised]
        yield from table(rows)


def _head(plan: Plan) -> Iterator[str]:
    config, target = plan.config, plan.target
    rows, (prompt, width) = batch_rows(config), plan.widths
    shape = " x ".join(f"{name} {size}" for name, size in target.mesh.shape.items())
    parameters, trained = number_text(plan.parameters), number_text(plan.trained)
    yield f"model     {config.model.path}: {parameters} parameters, {trained} trained"
    yield f"devices   {target.mesh.size} x {target.device.name}, mesh {shape}; compiled by the {target.compiler}"
    rest = f", {prompt} of them for the prompt" if prompt else ""
    at_once, tokens = plan.microbatch
    part = f"; {amount(at_once, 'row')} at a time" if at_once else ""
    if tokens:
        part = f"; packed, {number_text(tokens)} tokens at a time"
    yield f"step      {amount(rows, 'row')} of {width} tokens{rest}{part}"
    updates = config.batch.minibatches * config.algorithm.num_iterations
    epochs = amount(f"{config.num_epochs or 0:g}", "epoch")
    length = amount(config.total_steps, "step") if config.num_epochs is None else f"{epochs} in steps"
    yield f"run       {length} of {amount(updates, 'update')}, {config.algorithm.name}"


def _memory(plan: Plan) -> Iterator[str]:
    yield ""
    yield "memory of each device (exact, from shapes):"
    rows = [(name, bytes_text(count)) for name, count in plan.held.items()]
    rows.append(("all the time", bytes_text(sum(plan.held.values()))))
    rows += [(f"while sampling: {name}", bytes_text(count)) for name, count in plan.sampling.items()]
    rows += [(f"in the host's memory: {name}", bytes_text(count)) for name, count in plan.host.items()]
    yield from table(rows)


def _programs(plan: Plan) -> Iterator[str]:
    yield ""
    known = "exact" if plan.target.exact else "temporaries at most: they are those of the CPU compiler"
    yield f"programs of a step, on each device ({known}):"
    rows: list[tuple[str, ...]] = [
        ("program", "times", "resident", "arguments", "results", "temporaries", "peak", "FLOPs", "sends")
    ]
    for x in plan.programs:
        memory = (bytes_text(n) for n in (x.resident, x.arguments, x.results, x.temporaries, x.peak))
        rows.append((x.name, f"{x.times:g}", *memory, number_text(x.flops), bytes_text(x.sent)))
    yield from table(rows)
    heaviest = plan.peak
    yield ""
    yield f"the largest tensors that {heaviest.name} makes:"
    yield from table([(x.source, x.shape, bytes_text(x.bytes)) for x in heaviest.largest[:8]])
    sent = [(x, program) for program in plan.programs for x in program.collectives]
    if sent:
        yield ""
        yield "collectives of a step, from each device:"
        ordered = sorted(sent, key=lambda pair: -pair[0].sent * pair[1].times)[:8]
        yield from table(
            [
                (f"{x.kind} over {x.group}", p.name, f"{x.count * p.times:g} times", bytes_text(x.sent * p.times))
                for x, p in ordered
            ]
        )


def _time(plan: Plan) -> Iterator[str]:
    least = floors(plan)
    yield ""
    if least is None:
        yield f"time: no rates are known of {plan.target.device.name}"
        return
    steps = plan.config.total_steps
    all_steps = f", of {amount(steps, 'step')} {seconds_text(least.step * steps)}"
    of_all = all_steps if plan.config.num_epochs is None else ""
    yield f"least time of a step: {seconds_text(least.step)}{of_all}"
    yield from table(
        [
            ("matmuls at the peak rate", seconds_text(least.compute)),
            ("decoding's reads of memory", seconds_text(least.reading)),
            ("sending to other devices", seconds_text(least.sending)),
        ]
    )
    decode = next((x for x in plan.programs if x.name == "rollout: decode"), None)
    if decode is not None and decode.sent > decode.parameters_read + decode.caches_read:
        yield (
            f"  decoding sends {bytes_text(decode.sent)} for each token, more than it reads: another arrangement of "
            "the devices for sampling (rollout.mesh) keeps whole matrices, or parts that need not be gathered"
        )
