"""The plan of a run of which some devices, or processes, only sample: each half, and the split that balances them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from jaxrl_llm.config import ConfigError, batch_rows
from jaxrl_llm.distributed.devices import named
from jaxrl_llm.distributed.sharding import make_mesh, rollout_mesh, row_groups
from jaxrl_llm.tools.plan.planned import POLICY, Plan, floors, make_plan
from jaxrl_llm.tools.plan.text import bytes_text, lines, seconds_text, table
from jaxrl_llm.tools.plan.topology import stand_ins, target_of
from jaxrl_llm.training.setup.mesh import check_rows, sampling_devices


class Split(NamedTuple):
    """The plans of both halves; `samplers` of the second are at work at once, each on a batch of its own."""

    training: Plan
    sampling: Plan
    samplers: int
    in_files: bool  # policies go over in files, and not from device to device


class Balance(NamedTuple):
    """Least seconds of a step of each half, and the number of its devices."""

    training_devices: int
    sampling_devices: int
    training: float
    sampling: float


def make_split(config, name: str, count: int, simulate: bool = False, image_tokens: int = 0) -> Split:
    """The plans of both halves of a run on `count` devices called `name`, those that only sample among them.

    `image_tokens` as in `make_plan`. Raises ConfigError as that, for processes among which the devices cannot be
    divided, and for what training refuses on as many hosts: devices that only sample, or a process, on several of them,
    and as `row_groups` does.
    """
    samplers, in_files, host = 1, not sampling_devices(config), named(name).host(count)
    if in_files:
        samplers, processes = config.rollout.processes, config.processes.count
        if processes is None or processes <= samplers or count % processes:
            raise ConfigError(
                f"rollout.processes is {samplers}, but --devices={count} are not those of processes.count={processes} "
                "processes: set it to the number of all processes of the run, which have as many devices each"
            )
        each = count // processes
        if each > host:
            raise ConfigError(
                f"processes.count is {processes}, of {each} devices each with --devices={count}, but a host of {name} "
                f"has {host}: set it to {-(-count // host)} or more, and rollout.processes to those that only sample"
            )
    else:
        each = sampling_devices(config)
        if each >= count:
            raise ConfigError(f"rollout.devices is {each}, but it takes fewer than --devices={count}")
        if count > host:
            raise ConfigError(
                f"rollout.devices is {each}, but it is of one process, and --devices={count} of {name} are of "
                f"{-(-count // host)} hosts of {host}: set it to 0, processes.count={-(-count // host)} and "
                f"rollout.processes={-(-each // host)}"
            )
    devices, c = stand_ins(config, name, count), config.mesh
    training_mesh = make_mesh(c.data, c.fsdp, c.tensor, c.context, c.expert, devices[: count - samplers * each])
    row_groups(training_mesh, each if in_files else host)
    sampling_mesh = rollout_mesh(make_mesh(devices=devices[-each:]), config.rollout.mesh)
    training, sampling = (
        make_plan(config, target_of(mesh, name, simulate), only=half, image_tokens=image_tokens)
        for half, mesh in (("training", training_mesh), ("sampling", sampling_mesh))
    )
    return Split(training, sampling, samplers, in_files)


def least_seconds(plan: Plan, factor: float = 1.0) -> float:
    """Least seconds of a half's step on `factor` times fewer devices than planned (`floors`), whose rates are known."""
    found = floors(plan, factor)
    assert found is not None
    return found.step


def balances(split: Split) -> list[Balance]:
    """The halves' seconds for each split of the same devices that rows divide over, by the devices that sample."""
    config, training, sampling = split.training.config, split.training.target.mesh, split.sampling.target.mesh
    count = training.size + split.samplers * sampling.size
    # Devices are added by whole copies of the policy that they hold parts of, or by whole processes.
    unit = sampling.size if split.in_files else sampling.size // sampling.shape["data"]
    whole = training.size // (training.shape["data"] * training.shape["fsdp"])
    found = []
    for devices in range(unit, count, unit):
        left = count - devices
        if left % whole:
            continue
        sizes = dict(training.shape) | {"data": left // whole, "fsdp": 1}
        mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        try:
            check_rows(config, batch_rows(config), mesh)
        except ConfigError:
            continue
        if split.in_files:
            sampled = least_seconds(split.sampling) / (devices // unit)
        else:
            sampled = least_seconds(split.sampling, sampling.size / devices)
        found.append(Balance(left, devices, least_seconds(split.training, training.size / left), sampled))
    return found


def split_lines(split: Split) -> Iterator[str]:
    """Yield the lines of the report: both halves, and their balance."""
    training, sampling = split.training, split.sampling
    yield f"== the devices that train: {training.target.mesh.size} =="
    yield from lines(training)
    yield ""
    of = f"{split.samplers} times {sampling.target.mesh.size}" if split.in_files else f"{sampling.target.mesh.size}"
    yield f"== the devices that only sample: {of} =="
    yield from lines(sampling)
    yield ""
    yield "== both halves =="
    policy, device = sampling.sampling[POLICY], training.target.device
    if split.in_files:
        most = bytes_text(policy * sampling.target.mesh.size)
        yield f"each policy is a file of at most {most}: what has changed in it"
    if not device.flops:
        yield f"time: no rates are known of {device.name}"
        return
    if not split.in_files:
        rate = device.rate(training.target.mesh.size + sampling.target.mesh.size)
        least = seconds_text(policy / rate)
        yield f"each policy sends {bytes_text(policy)} to each device that samples: at least {least}"
    ways = balances(split)
    own = next(x for x in ways if x.training_devices == training.target.mesh.size)
    best = min(ways, key=lambda x: max(x.training, x.sampling))
    rows: list[tuple[str, ...]] = [("least time of a step", "training", "sampling", "a step")]
    for text, way in (("as planned", own), ("balanced", best)):
        apart = f"{text}, {way.training_devices} train and {way.sampling_devices} sample"
        rows.append((apart, *map(seconds_text, (way.training, way.sampling, max(way.training, way.sampling)))))
    count = own.training_devices + own.sampling_devices
    turns = (
        least_seconds(training, own.training_devices / count),
        least_seconds(sampling, sampling.target.mesh.size / count),
    )
    rows.append((f"in turns, all {count}", *map(seconds_text, (*turns, sum(turns)))))
    yield from table(rows)
    key = "rollout.processes" if split.in_files else "rollout.devices"
    unit = sampling.target.mesh.size if split.in_files else 1
    if best != own:
        yield f"  set {key}={best.sampling_devices // unit} for the balance"
