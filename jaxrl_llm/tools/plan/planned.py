"""The plan of a run: the arrays it holds, the needs of its programs, and the least time of a step."""

import math
import re
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config import ConfigDict, ConfigError, batch_rows, with_correction
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import bytes_on_device, make_mesh
from jaxrl_llm.models.kernels.eight_bit_matmul import check_matmul_dtype
from jaxrl_llm.models.kernels.fused_attention import check_attention
from jaxrl_llm.tools.plan.compiler import ProgramStats
from jaxrl_llm.tools.plan.graders import compile_graders
from jaxrl_llm.tools.plan.programs import Microbatch, compile_step, held_bytes
from jaxrl_llm.tools.plan.shapes import Shapes, describe
from jaxrl_llm.tools.plan.step import Step
from jaxrl_llm.tools.plan.topology import Target, target_of, traced_as_on
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.setup.mesh import check_rows, sampling_devices

PARAMETERS = "the sampler's parameters"
POLICY = "a copy of the policy"
FROZEN = "the sampler's frozen parameters"
WAITING = "policies of batches that wait"
GRADERS = "reward models and judges"
HEADROOM = 0.1  # of a device's memory that a plan leaves free: fragments, and what the runtime keeps for itself


class Floors(NamedTuple):
    """Seconds that one step takes at least, at the rates of the data sheet."""

    compute: float  # all matmuls at the peak rate
    reading: float  # what decoding reads from memory, for each token
    sending: float  # what a device sends to others
    step: float  # the sum over programs of the longest of the three


class Plan(NamedTuple):
    """The plan of a run on a target: its programs, and the bytes that it holds on each device."""

    config: ConfigDict
    target: Target
    widths: tuple[int, int]  # tokens of a prompt and of a row
    parameters: int  # numbers, not bytes, of the policy
    trained: int
    held: dict[str, int]  # from the first step to the last
    host: dict[str, int]  # in the host's memory
    sampling: dict[str, int]  # while completions are sampled
    programs: list[ProgramStats]
    microbatch: Microbatch
    note: str = ""
    image_tokens: int = 0  # of the images of a prompt, or of a row where rows are given

    @property
    def peak(self) -> ProgramStats:
        """The program of which a device holds the most bytes."""
        return max(self.programs, key=lambda x: x.peak)

    @property
    def capacity(self) -> float:
        """Bytes of a device that may be used."""
        return (1 - HEADROOM) * self.target.device.memory

    @property
    def is_tight(self) -> bool:
        """True where the memory of a device is known, and the plan may not fit it."""
        return bool(self.target.device.memory) and self.peak.peak > self.capacity

    @property
    def tokens(self) -> int:
        """Tokens of the rows of a step, padding included."""
        return batch_rows(self.config) * self.widths[1]


def make_plan(
    config,
    target_: Target,
    widths: tuple[int, int] | None = None,
    only: str = "",
    packer: Packer | None = None,
    image_tokens: int = 0,
) -> Plan:
    """Return the plan of a configuration, with rows of `widths` (prompt, total) tokens, or else the longest it allows.

    `packer` is that of a run; without one rows are packed as full-length ones are. `only` compiles one phase,
    "rollout", "logps" or "update", or one half of a split run, "training" or "sampling". `image_tokens` are those of
    the images of a prompt, or of a row where rows are given. Where the TPU compiler refuses a program that does not
    fit, the plan is that of simulated devices and says so. Raises ConfigError as training would, and for the whole of a
    split run.
    """
    config = with_correction(config)
    if not only and is_split(config):
        key = "devices" if sampling_devices(config) else "processes"
        raise ConfigError(
            f"rollout.{key} is {config.rollout[key]}: this is a plan of devices that do all. "
            "`python -m jaxrl_llm plan` plans both halves"
        )
    if only != "sampling":
        check_rows(config, batch_rows(config), target_.mesh)
    if config.optimizer.learning_rate == "auto":  # no size and no time depends on the number
        config = config.copy_and_resolve_references()
        config.optimizer.learning_rate = 1e-4
    if widths is None:
        c = config.rollout
        online = c.max_prompt_length, c.max_prompt_length + c.max_completion_length
        widths = (0, config.data.max_length) if config.algorithm.name in OFFLINE else online
    try:
        return _compiled(config, target_, widths, only, packer, image_tokens)
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used [\d.]+\w of [\d.]+\w hbm", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or target_.compiler != "TPU compiler":
            raise
        note = f"the TPU compiler refuses a program: {used[0] if used else 'it does not fit'}"
        stand_ins = make_mesh(**target_.mesh.shape, devices=jax.devices()[: target_.mesh.size])
        simulated = target_of(stand_ins, target_.device.name, simulate=True)
        plan = _compiled(config, simulated, widths, only, packer, image_tokens)
        return plan._replace(note="; ".join(filter(None, (note, plan.note))))


def is_split(config) -> bool:
    """True where some devices or processes of the run only sample."""
    return bool(sampling_devices(config)) or (config.algorithm.name not in OFFLINE and config.rollout.processes > 0)


def _compiled(
    config, target_: Target, widths: tuple[int, int], only: str, packer: Packer | None, image_tokens: int
) -> Plan:
    notes = []
    if config.model.attention not in ("auto", "xla") and not target_.exact:
        kind = config.model.attention
        notes.append(f"planned with model.attention=xla, which needs more: simulated devices have no {kind}")
        config = config.copy_and_resolve_references()
        config.model.attention = "xla"
    with jax.set_mesh(target_.mesh), traced_as_on(target_):
        shapes = describe_for(config, target_)
        reads, longest = shapes.net.config.vision is not None, widths[0] or widths[1]
        if image_tokens and not reads:
            raise ConfigError(f"images of {image_tokens} tokens are planned with, but the model reads text alone")
        if image_tokens > longest:
            raise ConfigError(f"images of {image_tokens} tokens do not fit prompts or rows of {longest}; raise these")
        if reads and not image_tokens:
            notes.append(
                "planned without images: what encodes those of rows, and holds them, comes on top (`plan "
                "--image_tokens=N` counts those of N tokens a prompt)"
            )
        step = Step(config, shapes, target_, widths, image_tokens)
        programs, sampling, microbatch = compile_step(step, only, packer)
        held, host = _held(shapes)
        if only == "sampling":
            held, host = {GRADERS: held[GRADERS]}, {GRADERS: host[GRADERS]}
        policy = 0
        if sampling is not None and (policies := sampling.policies) is not None:
            policy = bytes_on_device(policies.own)
            held |= {FROZEN: bytes_on_device(policies.frozen), WAITING: policies.waiting * policy}
        if shapes.graders and only in ("", "sampling"):
            programs += compile_graders(step, sum(held.values()) + policy)
    held_by_sampling = {}
    if sampling is not None:
        held_by_sampling = {
            POLICY: policy,
            PARAMETERS: bytes_on_device(sampling.params),
            "keys and values of prompts": bytes_on_device((sampling.prompt_cache, sampling.waiting_cache)),
            "keys and values of completions": bytes_on_device(sampling.row_cache),
        }
    return Plan(
        config=config,
        target=target_,
        widths=widths,
        parameters=tree_size(shapes.net.plain.shapes()),
        trained=tree_size(shapes.state.params),
        held={name: size for name, size in held.items() if size},
        host={name: size for name, size in host.items() if size},
        sampling={name: size for name, size in held_by_sampling.items() if size},
        programs=programs,
        microbatch=microbatch,
        note="; ".join(notes),
        image_tokens=image_tokens,
    )


def _held(shapes: Shapes) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes that a run holds from its first step to its last, by what they are: on a device, and in its host's
    memory."""
    state, frozen, reference = shapes.state, shapes.frozen, shapes.own_reference
    held = {
        "parameters, trained": bytes_on_device(state.params),
        "parameters, frozen": bytes_on_device(frozen.params),
        "optimizer": bytes_on_device((state.opt_state, state.step)),
        "reference": bytes_on_device(reference),
        "average": bytes_on_device(shapes.average),
        "replay buffer": bytes_on_device(shapes.replay),
        "critic, with optimizer": bytes_on_device((state.critic, frozen.critic)),
        "teachers": bytes_on_device([teacher.own for teacher in shapes.teachers.values()]),
        GRADERS: bytes_on_device([grader.own for grader in shapes.graders]),
    }
    assert sum(held.values()) == held_bytes(shapes)
    host = {
        "optimizer": bytes_on_device(state, host=True),
        "reference": bytes_on_device(reference, host=True),
        "average": bytes_on_device(shapes.average, host=True),
        "teachers": bytes_on_device([teacher.own for teacher in shapes.teachers.values()], host=True),
        GRADERS: bytes_on_device([grader.own for grader in shapes.graders], host=True),
    }
    return held, host


def tree_size(tree) -> int:
    """Return the numbers in a tree of arrays or shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def describe_for(config, target_: Target, mesh: Any = None) -> Shapes:
    """Return the shapes of a run as the target computes it, on its own mesh or another; ConfigError as in training."""
    dtype = target_.dtype if config.model.dtype == "auto" else config.model.dtype
    shapes = describe(config, mesh or target_.mesh, dtype, not target_.accelerator, target_.host)
    check_attention(shapes.net.config, target_.mesh.devices.flat[0].platform)
    check_matmul_dtype(shapes.net.config, target_.device.name, target_.device.has_fp8)
    return shapes


def floors(plan: Plan, factor: float = 1.0) -> Floors | None:
    """The least time of a step; None for a device whose rates are not known.

    Decoding reads the sampler's parameters and all keys and values at every token, here at their longest. On `factor`
    times fewer devices than planned (more, below 1) each has `factor` times the matmuls, keys and values; the
    parameters that it reads and the bytes that it sends stay the same.
    """
    device = plan.target.device
    if not device.flops:
        return None
    compute = reading = sending = step = 0.0
    for program in plan.programs:
        read = program.parameters_read + program.caches_read * factor
        sent = program.sent / device.rate(plan.target.mesh.size)
        parts = (program.flops * factor / device.flops, read / device.bandwidth, sent)
        compute, reading, sending = (
            total + program.times * part for total, part in zip((compute, reading, sending), parts, strict=True)
        )
        step += program.times * max(parts)
    return Floors(compute, reading, sending, step)
