"""The programs of a training step as a run makes them: sampling, log-probs, values, update; compiled from shapes.

All that the plan takes from the engine, the batch and the objectives is here, in sampling.py and in step.py.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Inputs, PackedLayout
from jaxrl_llm.config import batch_rows, rows_together
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import bytes_on_device, path_name, row_shards
from jaxrl_llm.models.chunked_softmax import columns_at_once
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import BYTES
from jaxrl_llm.tools.plan.compiler import Compiler, ProgramStats, Trips
from jaxrl_llm.tools.plan.sampling import Sampling, compile_sampling, decodes_beside_updates
from jaxrl_llm.tools.plan.shapes import Shapes, visiting
from jaxrl_llm.tools.plan.step import Step, images_call, images_shape, rows_shape, update_batch
from jaxrl_llm.training.advantages import advantage_step
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.objectives.value import critic_params
from jaxrl_llm.training.optimizers import build_optimizer
from jaxrl_llm.training.packing import planner
from jaxrl_llm.training.packing.layout import Sizes, plan
from jaxrl_llm.training.packing.planner import Packer, TypicalRows, make_packer
from jaxrl_llm.training.passes import (
    images_of_rows,
    scored_distributions,
    scored_logps,
    scored_norms,
    scored_top,
    values_before,
)
from jaxrl_llm.training.setup.memory import update_bytes
from jaxrl_llm.training.setup.mesh import shard_rows
from jaxrl_llm.training.setup.objectives import critic_spec, objective_of
from jaxrl_llm.training.setup.run import build_updates, make_optimizer, sized_batch
from jaxrl_llm.training.setup.specs import (
    advantage_spec,
    context_width,
    critic_optimizer_spec,
    cross_tokenizer_widths,
    offline_spec,
    old_logps_of,
    packing_spec,
    teacher_spec,
    update_spec,
)
from jaxrl_llm.training.teachers.cross_tokenizer import at_ends
from jaxrl_llm.training.update import UpdateSpec, merge_frozen


class Layouts(NamedTuple):
    """The packed layouts of a step, and the trips of its loops; None where rows are not packed."""

    update: PackedLayout | None = None
    observed: PackedLayout | None = None  # of the rows that WPO's and AOT's other pass reads
    forward: PackedLayout | None = None  # of all rows, without gradients
    update_trips: Trips = ()
    forward_trips: Trips = ()
    sizes: Sizes | None = None  # of the update


class Microbatch(NamedTuple):
    """The size of a micro-batch over all devices: rows or, where rows are packed, packed tokens."""

    rows: int
    tokens: int  # 0: rows are not packed


def compile_step(
    step: Step, only: str = "", packer: Packer | None = None
) -> tuple[list[ProgramStats], Sampling | None, Microbatch]:
    """Return the programs of a step, what sampling holds, and the micro-batches of an update.

    `only` names one phase, "rollout", "logps" or "update", or one half of a split run, "training", or "sampling", whose
    devices hold nothing but what scores completions. Neither evaluation nor scoring is among them. `packer` is that of
    a run.
    """
    config, shapes, mesh, on = step.config, step.shapes, step.mesh, step.target
    nets = (shapes.net, shapes.critic, *(teacher.net for teacher in shapes.teachers.values()))
    converted = max(converted_bytes(net, mesh) for net in nets if net is not None)
    held, sampling = held_bytes(shapes, only), None
    compiler = Compiler(held, mesh.size, not on.exact, dict(on.options), converted=converted)
    if step.online and only in ("", "rollout", "sampling"):
        sampling = compile_sampling(step, compiler, apart=only == "sampling")
        if only == "sampling":
            return compiler.programs, sampling, Microbatch(0, 0)
        if (policies := sampling.policies) is not None:
            compiler.held += policies.waiting * bytes_on_device(policies.own) + bytes_on_device(policies.frozen)
            if decodes_beside_updates(on):
                in_flight = policies.own if config.rollout.update_in_flight else ()  # while a newer one is there
                compiler.held += bytes_on_device((sampling[:4], in_flight))
    objective, room = objective_of(config, shapes.net), None
    if on.accelerator and on.device.memory:
        room = max(on.device.memory - held_bytes(shapes) - update_bytes(config, shapes.state.params), 0.0)

    def layouts_of(config, packer: Packer | None) -> Layouts:
        return make_layouts(config, shapes.net, mesh, objective, step.widths, on.accelerator, packer, room)

    layouts, batch = layouts_of(config, packer), sized_batch(config, shapes.net.config, room, mesh, step.widths[1])
    if only in ("", "logps", "training"):
        compile_logps(step, layouts, compiler, batch.forward_rows)
    updates, sizes = dataclasses.replace(update_spec(config), microbatch_rows=batch.microbatch_rows), layouts.sizes
    if only in ("", "update", "training"):
        compile_updates(step, compiler, objective, updates, layouts, packer, layouts_of)
    tokens = 0 if sizes is None else sizes.packed_rows * sizes.length * row_shards(mesh)
    rows = batch.microbatch_rows or batch.rows // batch.minibatches
    return compiler.programs, sampling, Microbatch(rows, tokens)


def held_bytes(shapes: Shapes, only: str = "") -> int:
    """Return the bytes on a device from the first step to the last; `only` as `compile_step` takes it."""
    teachers = [teacher.own for teacher in shapes.teachers.values()]
    graders = [grader.own for grader in shapes.graders]
    if only == "sampling":
        return bytes_on_device(graders)
    kept = shapes.state, shapes.frozen, shapes.own_reference, teachers, shapes.average, graders, shapes.replay
    return bytes_on_device(kept)


def converted_bytes(net: Net, mesh: Mesh) -> int:
    """Return the bytes on a device of the largest matrices of a layer's experts as numbers, 0 unless they have 4 bits:
    those of 8 are multiplied with as they are."""
    c = net.config
    if c.expert_quantize == "none" or c.expert_quantize in BYTES:
        return 0
    kernels = jax.tree_util.tree_leaves_with_path(net.plain.shapes())
    numbers = (math.prod(x.shape[1:]) for path, x in kernels if "/experts/" in path_name(path))
    return max(numbers) * jnp.dtype(c.dtype).itemsize // (mesh.shape["expert"] * mesh.shape["tensor"])


def compile_logps(step: Step, layouts: Layouts, compiler: Compiler, microbatch: int) -> None:
    """Compile the passes before the update, `microbatch` rows at a time unless they are packed: what encodes images
    once, log-probs of policy, reference and teachers, and the critic's values."""
    config, shapes, mesh, widths = step.config, step.shapes, step.mesh, step.widths
    online, params, rows = step.online, step.params, batch_rows(config)
    if step.image_tokens and online:
        compiler.add("images", images_of_rows, images_call(step, rows), of_run=params)
    images = images_shape(step, rows)
    ints = rows_shape(mesh, (rows, widths[1]), jnp.int32)
    shards = row_shards(mesh)
    first, temperature = (widths[0], config.rollout.temperature or 1.0) if online else (0, 1.0)
    inputs = Inputs(ints, ints, images=images, layout=layouts.forward, prompt_width=first)
    arguments, trips = (inputs, temperature, microbatch, shards), layouts.forward_trips

    def there(params, own):
        """The parameters that are always on the devices: what an offloaded policy shares with others is not."""
        return own if config.model.offload else params

    if online and advantage_step(advantage_spec(config), ()).asks_for("logit_norms"):
        compiler.add("log-probs", scored_norms, (shapes.net, visiting(params), *arguments), of_run=params, trips=trips)
    elif (online and old_logps_of(config) == "trainer") or offline_spec(config, widths[1]).running_mean:
        compiler.add("log-probs", scored_logps, (shapes.net, visiting(params), *arguments), of_run=params, trips=trips)
    if shapes.reference is not None:
        program, settings = scored_logps, arguments
        if online and config.algorithm.kl == "full":
            program, settings = scored_distributions, (inputs, microbatch, shards)
        reference = visiting(shapes.reference)
        of_run = there(shapes.reference, shapes.own_reference)
        compiler.add("reference", program, (shapes.net, reference, *settings), of_run=of_run, trips=trips)
    if shapes.critic is not None:
        critic = critic_params(critic_spec(config), merge_frozen(shapes.state, shapes.frozen))
        arguments = (shapes.critic, visiting(critic), inputs, microbatch, shards)
        compiler.add("values", values_before, arguments, of_run=critic, trips=trips)
    spec = teacher_spec(config)
    if config.teacher.context != "none":  # rows of its own, whose packing is not known before
        first = context_width(config, widths[0])
        ints = rows_shape(mesh, (rows, first + widths[1] - widths[0]), jnp.int32)
        inputs, trips = Inputs(ints, ints, prompt_width=first), ()
    elif config.teacher.form == "uld":
        parts = (first, widths[1] - first) if online else (widths[1], widths[1])
        first, longest = cross_tokenizer_widths(config, *parts)
        ints = rows_shape(mesh, (rows, first + longest), jnp.int32)
        inputs, trips = Inputs(ints, ints, prompt_width=first), ()
    for value, (net, params, alone) in shapes.teachers.items():
        program, settings = scored_logps, (spec.temperature,)
        if spec.divergence and spec.top_k:
            vocab = min(shapes.net.config.vocab_size, net.config.vocab_size)
            program, settings = scored_top, (spec.temperature, spec.top_k, vocab)
        elif spec.divergence:
            program, settings = scored_distributions, ()
        arguments = (net, visiting(params), inputs, *settings, microbatch, shards)
        compiler.add(f"teacher {value}".strip(), program, arguments, of_run=there(params, alone), trips=trips)
        if config.teacher.form == "uld":
            own, whole = net.config, NamedSharding(mesh, PartitionSpec())
            hidden = rows_shape(mesh, (*ints.shape, own.width), own.dtype)
            head = jax.ShapeDtypeStruct((own.width, own.vocab_size), own.dtype, sharding=whole)
            last = rows_shape(mesh, (rows, widths[1]), jnp.int32)
            arguments = (hidden, head, ints, ints, last, first, spec.temperature, own.logit_softcap)
            compiler.add("the teacher's spans", at_ends, arguments)


def compile_updates(
    step: Step,
    compiler: Compiler,
    objective: Objective,
    updates: UpdateSpec,
    layouts: Layouts,
    packer: Packer | None,
    layouts_of: Callable[[Any, Packer | None], Layouts],
) -> None:
    """Compile the update, and that of the critic where it has minibatches or passes of its own, and so layouts."""
    config, shapes = step.config, step.shapes
    apart = shapes.critic is not None and not config.critic.shared
    critic_optimizer = build_optimizer(critic_optimizer_spec(config)) if apart else None
    optimizer = make_optimizer(config)
    update, alone = build_updates(config, objective, optimizer, shapes.critic, critic_optimizer, updates, step.mesh)

    def add(name: str, update, step: Step, layouts: Layouts, passes: int) -> None:
        count = step.config.batch.minibatches
        batch = update_batch(step, shapes.teachers.get(""))
        images = images_shape(step, batch_rows(step.config) // count)
        batch = batch.replace(inputs=batch.inputs.replace(images=images))
        batch = batch.with_layout(layouts.update, layouts.observed)
        compiler.add(
            name,
            update,
            (shapes.state, batch, shapes.frozen),
            times=count * passes,
            held=(batch,) * (count if count > 1 else 0),  # the others wait beside it
            of_run=(shapes.state, shapes.frozen),
            trips=layouts.update_trips,
        )

    add("update", update, step, layouts, config.algorithm.num_iterations)
    if alone is not None and alone.passes:
        own = config.copy_and_resolve_references()
        own.batch.minibatches = alone.minibatches
        if alone.minibatches != config.batch.minibatches:
            layouts = layouts_of(own, packer and packer.of_rows(batch_rows(own) // alone.minibatches))
        add("update of the critic", alone.update, dataclasses.replace(step, config=own), layouts, alone.passes)


def make_layouts(
    config,
    net: Net,
    mesh: Mesh,
    objective: Objective,
    widths: tuple[int, int],
    accelerator: bool,
    packer: Packer | None = None,
    room: float | None = None,
) -> Layouts:
    """Return the layouts of rows of `widths` (prompt, total) tokens, by `packer` or the one that a run would have.

    `room` are the bytes that the run leaves free on a device, None where it does not know.
    """
    rows, shards, (prompt, width) = shard_rows(config, mesh), row_shards(mesh), widths
    online = config.algorithm.name not in OFFLINE

    def sample_of(rows: int) -> TypicalRows:
        """Return rows of full length; those of a prompt share its tokens and no more."""
        columns, numbers = np.arange(width), np.arange(rows)[:, None]
        group = rows_together(config) if online else 1
        tokens = np.where(columns < prompt, numbers // group, numbers).astype(np.int32)
        mask = np.broadcast_to((columns >= prompt).astype(np.float32), tokens.shape)
        return TypicalRows(tokens, np.ones_like(tokens), mask, prompt)

    def layout_of(sample: TypicalRows, mask, sizes: Sizes) -> tuple[PackedLayout, Trips]:
        """Return the shapes of a layout, every shard like the one of the sample, and the trips of its loops."""
        layout = plan(sample.tokens, sample.segments, mask, sizes)
        chunks = float(max(layout.num_read.max() / columns_at_once(shards, net.config.vocab_size), 1.0))
        trips = (float(layout.num_microbatches[0]), chunks) if layout.row_idx.shape[1] > 1 else (chunks,)
        return jax.tree.map(lambda x: rows_shape(mesh, (shards, *np.shape(x)[1:]), jnp.int32), layout), trips

    sample = sample_of(rows)
    if packer is None:
        measured, group_size = sample, config.rollout.group_size
        if online:
            measured = planner.typical_rollouts(rows, group_size, prompt, width - prompt)
        platform = mesh.devices.flat[0].platform
        backend = "accelerator" if accelerator and platform == "cpu" else platform  # which CPUs may simulate
        packer = make_packer(packing_spec(config), net.config, mesh, objective.positions, measured, backend, room)
    if packer.sizes is None:
        return Layouts()
    mask, observed = sample.segments if packer.positions.unmasked else sample.mask, None
    if packer.positions.alternate:
        chosen = np.arange(len(mask))[:, None] % 2 == 0
        observed, _ = layout_of(sample, mask * ~chosen, packer.sizes)
        mask = mask * chosen
    update, trips = layout_of(sample, mask, packer.sizes)
    rows = batch_rows(config) // shards
    sample = sample_of(rows)
    forward, forward_trips = layout_of(sample, sample.mask, packer.passing_sizes(rows))
    return Layouts(update, observed, forward, trips, forward_trips, packer.sizes)
