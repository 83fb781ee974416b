"""The programs of a training step as a run makes them: sampling, log-probs, values, update; compiled from shapes.

All that the plan takes from the engine, the batch and the objectives is here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch, Images, Inputs, PackedLayout, Scalars
from jaxrl_llm.config import batch_rows, rows_together
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import (
    bytes_on_device,
    path_name,
    rollout_mesh,
    row_sharding,
    row_shards,
    shardings,
)
from jaxrl_llm.models.cast import decoding_params, in_precision
from jaxrl_llm.models.chunked_softmax import columns_at_once
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import BYTES
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.row_images import room_for
from jaxrl_llm.rollout import assignment
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout.automata import NO_AUTOMATA
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.scheduler import Scheduler
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.tools.plan.compiler import Compiler, ProgramStats, Trips
from jaxrl_llm.tools.plan.shapes import Shapes, TeacherShapes, visiting
from jaxrl_llm.training.advantages import advantage_step
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.objectives.value import critic_params, value_regression
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
from jaxrl_llm.training.setup.memory import update_bytes, with_fitting_slots
from jaxrl_llm.training.setup.mesh import shard_rows
from jaxrl_llm.training.setup.objectives import critic_spec, kl_in_loss, needs_reference, objective_of
from jaxrl_llm.training.setup.run import critic_alone, make_optimizer, sized_critic_updates, sized_updates
from jaxrl_llm.training.setup.specs import (
    advantage_spec,
    algorithm_of,
    batch_spec,
    context_width,
    critic_optimizer_spec,
    cross_tokenizer_widths,
    learner_spec,
    offline_spec,
    old_logps_of,
    packing_spec,
    rollout_spec,
    teacher_spec,
)
from jaxrl_llm.training.setup.worker import check_correction
from jaxrl_llm.training.teachers.cross_tokenizer import at_ends
from jaxrl_llm.training.update import UpdateSpec, make_update, merge_frozen, optimizer_step, unchanged


class Layouts(NamedTuple):
    """The packed layouts of a step, and the trips of its loops; None where rows are not packed."""

    update: PackedLayout | None = None
    observed: PackedLayout | None = None  # of the rows that WPO's and AOT's other pass reads
    forward: PackedLayout | None = None  # of all rows, without gradients
    update_trips: Trips = ()
    forward_trips: Trips = ()
    sizes: Sizes | None = None  # of the update


@dataclasses.dataclass(frozen=True)
class Step:
    """What is planned: a configuration, its arrays on a mesh, and rows of `widths` (prompt, total) tokens.

    `image_tokens` are those of a prompt's images, or of a row's where rows are given.
    """

    config: Any
    shapes: Shapes
    mesh: Mesh
    widths: tuple[int, int]
    image_tokens: int = 0

    @property
    def online(self) -> bool:
        """True where rows are sampled."""
        return self.config.algorithm.name not in OFFLINE

    @property
    def params(self) -> Any:
        """The parameters of the model, trained and frozen."""
        return merge_frozen(self.shapes.state, self.shapes.frozen).params


class Sampling(NamedTuple):
    """The arrays that sampling holds, as shapes."""

    params: Any
    prompt_cache: Any
    row_cache: Any
    waiting_cache: Any  # of prompts that have no slot yet, where not all rows decode at once


class Microbatch(NamedTuple):
    """The size of a micro-batch over all devices: rows or, where rows are packed, packed tokens."""

    rows: int
    tokens: int  # 0: rows are not packed


def held_bytes(shapes: Shapes, only: str = "") -> int:
    """Return the bytes on a device from the first step to the last; `only` as `compile_step` takes it."""
    teachers = [teacher.own for teacher in shapes.teachers.values()]
    graders = [grader.own for grader in shapes.graders]
    if only == "sampling":
        return bytes_on_device(graders)
    return bytes_on_device((shapes.state, shapes.frozen, shapes.own_reference, teachers, shapes.average, graders))


def converted_bytes(net: Net, mesh: Mesh) -> int:
    """Return the bytes on a device of the largest matrices of a layer's experts as numbers, 0 unless they have 4 bits:
    those of 8 are multiplied with as they are."""
    c = net.config
    if c.expert_quantize == "none" or c.expert_quantize in BYTES:
        return 0
    kernels = jax.tree_util.tree_leaves_with_path(net.plain.shapes())
    numbers = (math.prod(x.shape[1:]) for path, x in kernels if "/experts/" in path_name(path))
    return max(numbers) * jnp.dtype(c.dtype).itemsize // (mesh.shape["expert"] * mesh.shape["tensor"])


def compile_step(
    step: Step,
    accelerator: bool,
    only: str = "",
    packer: Packer | None = None,
    options: dict[str, Any] | None = None,
    memory: float | None = None,
    host: int | None = None,
) -> tuple[list[ProgramStats], Sampling | None, Microbatch]:
    """Return the programs of a step, what sampling holds, and the micro-batches of an update.

    `only` names one phase, "rollout", "logps" or "update", or one half of a split run, "training", or "sampling", whose
    devices hold nothing but what scores completions. Neither evaluation nor scoring is among them. `packer` is that of
    a run, `options` are the compiler's, `memory` are the bytes of a device that a run may use, where they are known,
    and `host` the devices of one host where CPUs stand in for accelerators.
    """
    config, shapes, mesh = step.config, step.shapes, step.mesh
    simulated = accelerator and mesh.devices.flat[0].platform == "cpu"
    nets = (shapes.net, shapes.critic, *(teacher.net for teacher in shapes.teachers.values()))
    converted = max(converted_bytes(net, mesh) for net in nets if net is not None)
    compiler = Compiler(held_bytes(shapes, only), mesh.size, simulated, options or {}, converted=converted)
    sampling = None
    if step.online and only in ("", "rollout", "sampling"):
        total = (memory or 0.0) * (1 if mesh.devices.flat[0].platform == "cpu" and not accelerator else mesh.size)
        sampling = compile_sampling(step, compiler, simulated, total, host)
        if only == "sampling":
            programs = [x for x in compiler.programs if not x.name.endswith(": cast")]
            return programs, sampling, Microbatch(0, 0)  # parameters come in the type that decodes
    objective, room = objective_of(config, shapes.net), None
    if accelerator and memory:
        room = max(memory - held_bytes(shapes) - update_bytes(config, shapes.state.params), 0.0)

    def layouts_of(config, packer: Packer | None) -> Layouts:
        return make_layouts(config, shapes.net, mesh, objective, step.widths, accelerator, packer, room)

    layouts = layouts_of(config, packer)
    if only in ("", "logps", "training"):
        compile_logps(step, layouts, compiler)
    updates, sizes = sized_updates(config, shapes.net.config, room, step.widths[1], mesh), layouts.sizes
    if only in ("", "update", "training"):
        compile_updates(step, compiler, objective, updates, layouts, packer, layouts_of)
    tokens = 0 if sizes is None else sizes.packed_rows * sizes.length * row_shards(mesh)
    rows = updates.microbatch_rows or batch_rows(config) // config.batch.minibatches
    return compiler.programs, sampling, Microbatch(rows, tokens)


def compile_sampling(step: Step, compiler: Compiler, simulated: bool, memory: float, host: int | None) -> Sampling:
    """Compile the programs that sample, on devices of so much memory together, 0 where it is not known."""
    config, mesh, width = step.config, step.mesh, step.widths[0]
    engine = make_engine(config, step.shapes.net, simulated)
    sampling_mesh = rollout_mesh(mesh, config.rollout.mesh, step.shapes.net.config.kv_heads, host)
    prompts, params = config.batch.prompts + config.rollout.partial_prompts, step.params
    if config.rollout.memory_fraction is not None and memory:
        share = config.rollout.memory_fraction
        engine = with_fitting_slots(engine, visiting(params), share, memory, prompts, width, sampling_mesh)
    places: Any = {"params": params, "mesh": mesh, "sampling_mesh": sampling_mesh, "of_run": params}
    places |= {"image_tokens": step.image_tokens}
    sampling = compile_rollout(compiler, "rollout", engine, prompts, width, **places)
    if compares_with_greedy(config):
        greedy = dataclasses.replace(engine, sampling=engine.sampling.greedy, group_size=1)
        compile_rollout(compiler, "greedy rollout", greedy, config.batch.prompts, width, **places)
    return sampling


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
    config, shapes, mesh, update_critic = step.config, step.shapes, step.mesh, None
    if shapes.critic is not None and not config.critic.shared:
        spec = sized_critic_updates(config, updates)
        regression = value_regression(critic_spec(config), shapes.critic)
        update_critic = optimizer_step(regression, build_optimizer(critic_optimizer_spec(config)), spec, mesh)
    alone = critic_alone(config, update_critic)
    if alone is not None and alone.apart:
        update_critic = unchanged

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

    update = make_update(objective, make_optimizer(config), updates, mesh, update_critic, shapes.critic is not None)
    add("update", update, step, layouts, config.algorithm.num_iterations)
    if alone is not None and alone.passes:
        own = config.copy_and_resolve_references()
        own.batch.minibatches = alone.minibatches
        if alone.minibatches != config.batch.minibatches:
            layouts = layouts_of(own, packer and packer.of_rows(batch_rows(own) // alone.minibatches))
        add("update of the critic", alone.update, dataclasses.replace(step, config=own), layouts, alone.passes)


def compares_with_greedy(config) -> bool:
    """True where each prompt has a greedy completion besides, whose score its others are compared with."""
    return advantage_step(advantage_spec(config), ()).asks_for("greedy_scores")


class ScannedEngine(Engine):
    """An engine whose decoder scans its layers: simulated devices compile it sooner, for the same memory."""

    @property
    def decoder(self):
        return in_precision(self.net, self.weights_dtype).scanned()


def make_engine(config, net: Net, scanned: bool) -> Engine:
    """Return the engine of the configuration; no token ends a row. Raises ConfigError as training would."""
    engine = (ScannedEngine if scanned else Engine)(**vars(rollout_spec(config)), net=net, eos=(0,))
    check_correction(config, engine)
    return engine


def compile_rollout(
    compiler: Compiler,
    name: str,
    engine: Engine,
    prompts: int,
    prompt_width: int,
    params,
    mesh: Mesh,
    sampling_mesh: Mesh,
    calls: float = 1.0,
    of_run: Any = (),
    image_tokens: int = 0,
) -> Sampling:
    """Compile the programs of an engine (cast, prefill, assign, decode); return what sampling holds.

    A step makes so many `calls` with so many prompts. `params` are on `mesh`; `of_run` of them are always there.
    """
    k, longest = engine.group_size, engine.max_completion_length
    on_devices = visiting(params)
    cast, arguments = decoding_params, (on_devices, engine.decoder)
    if sampling_mesh != mesh:
        cast, arguments = functools.partial(decoding_params, decoder=engine.decoder), (on_devices,)
        cast = jax.jit(cast, out_shardings=shardings(jax.eval_shape(cast, on_devices), sampling_mesh))
    sampled = compiler.add(f"{name}: cast", cast, arguments, times=calls, of_run=of_run)
    with jax.set_mesh(sampling_mesh):
        shards = row_shards(sampling_mesh)
        prompts = -(-prompts // shards) * shards
        ints = rows_shape(sampling_mesh, (prompts, prompt_width), jnp.int32)
        keys = jax.eval_shape(lambda: row_keys(jax.random.key(0), jnp.uint32(0), prompts * k))
        keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=NamedSharding(sampling_mesh, PartitionSpec()))
        images = rows_of_images(engine.net, sampling_mesh, prompts, image_tokens) if image_tokens else None
        arguments = (engine, sampled, ints, ints, keys, NO_AUTOMATA, None, images)
        all_prompts, rows = compiler.add(f"{name}: prefill", engines.prefill, arguments, times=calls)
        local = prompts // shards
        grid = Scheduler(local, k, shards, engine.shard_slots(shards, local * k)).grid
        assign = (engine.decoder, all_prompts, rows, keys, grid, longest)
        grid_prompts, slots = compiler.add(f"{name}: assign", assignment.assign, assign, times=calls, held=(sampled,))
        waiting = None if grid.slots == prompts * k else all_prompts.cache
        decode = (engine, sampled, grid_prompts, slots, jax.ShapeDtypeStruct((), jnp.int32))
        # While accelerators decode, they may hold the keys and values of completions in a second layout.
        compiler.add(
            f"{name}: decode",
            engines.decode_chunk,
            decode,
            # The grids of slots, one after another, that all rows take.
            times=calls * longest * prompts * k / grid.slots,
            held=(waiting,),
            copied=slots.cache,
            reads=(sampled, (grid_prompts.cache, waiting, slots.cache)),
        )
    return Sampling(sampled, grid_prompts.cache, slots.cache, waiting)


def compile_logps(step: Step, layouts: Layouts, compiler: Compiler) -> None:
    """Compile the passes before the update: what encodes images once, log-probs of policy, reference and teachers, and
    the critic's values."""
    config, shapes, mesh, widths = step.config, step.shapes, step.mesh, step.widths
    online, params, rows = step.online, step.params, batch_rows(config)
    if step.image_tokens and online:
        compiler.add("images", images_of_rows, images_call(step, rows), of_run=params)
    images = images_shape(step, rows)
    ints = rows_shape(mesh, (rows, widths[1]), jnp.int32)
    microbatch, shards = batch_spec(config).forward_rows, row_shards(mesh)
    first, temperature = (widths[0], config.rollout.temperature or 1.0) if online else (0, 1.0)
    inputs = Inputs(ints, ints, images=images, layout=layouts.forward, prompt_width=first)
    arguments, trips = (inputs, temperature, microbatch, shards), layouts.forward_trips
    if online and advantage_step(advantage_spec(config), ()).asks_for("logit_norms"):
        compiler.add("log-probs", scored_norms, (shapes.net, visiting(params), *arguments), of_run=params, trips=trips)
    elif (online and old_logps_of(config) == "trainer") or offline_spec(config, widths[1]).running_mean:
        compiler.add("log-probs", scored_logps, (shapes.net, visiting(params), *arguments), of_run=params, trips=trips)
    if shapes.reference is not None:
        reference = visiting(shapes.reference)
        on_devices = shapes.reference if not config.algorithm.offload_reference else ()
        if online and config.algorithm.kl == "full":
            arguments_, program = (inputs, microbatch, shards), scored_distributions
        else:
            arguments_, program = arguments, scored_logps
        compiler.add("reference", program, (shapes.net, reference, *arguments_), of_run=on_devices, trips=trips)
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
    for value, (net, params, _) in shapes.teachers.items():
        program, settings = scored_logps, (spec.temperature,)
        if spec.divergence and spec.top_k:
            vocab = min(shapes.net.config.vocab_size, net.config.vocab_size)
            program, settings = scored_top, (spec.temperature, spec.top_k, vocab)
        elif spec.divergence:
            program, settings = scored_distributions, ()
        arguments = (net, visiting(params), inputs, *settings, microbatch, shards)
        on_devices = () if spec.offload else params
        compiler.add(f"teacher {value}".strip(), program, arguments, of_run=on_devices, trips=trips)
        if config.teacher.form == "uld":
            own, whole = net.config, NamedSharding(mesh, PartitionSpec())
            hidden = rows_shape(mesh, (*ints.shape, own.width), own.dtype)
            head = jax.ShapeDtypeStruct((own.width, own.vocab_size), own.dtype, sharding=whole)
            last = rows_shape(mesh, (rows, widths[1]), jnp.int32)
            arguments = (hidden, head, ints, ints, last, first, spec.temperature, own.logit_softcap)
            compiler.add("the teacher's spans", at_ends, arguments, of_run=on_devices, trips=())


def rows_of_images(net: Net, mesh: Mesh, rows: int, tokens: int) -> Images:
    """Return the images of rows as shapes, of so many tokens in each row."""
    vision = net.config.vision
    assert vision is not None
    tiles = 1 if isinstance(vision.encoder, PatchRowsConfig) else -(-tokens // vision.tile_tokens)
    return room_for(vision, rows, tiles, tokens, functools.partial(rows_shape, mesh))


def images_call(step: Step, rows: int) -> tuple:
    """Return the arguments of `images_of_rows` in a step of so many rows, whose prompts have images."""
    net, size = step.shapes.net, step.config.rollout.group_size
    encode = "vision" in net.config.frozen and step.shapes.critic is None
    images = rows_of_images(net, step.mesh, rows // size, step.image_tokens)
    return net, visiting(step.params), images, size, encode, row_shards(step.mesh)


def images_shape(step: Step, rows: int) -> Images | None:
    """Return the images of the rows of a batch as shapes, None without any: of prompts that are sampled those that are
    encoded once, where what encodes them is frozen."""
    if not step.image_tokens:
        return None
    if not step.online:
        return rows_of_images(step.shapes.net, step.mesh, rows, step.image_tokens)
    made = images_of_rows.eval_shape(*images_call(step, rows))
    return jax.tree.map(lambda x: rows_shape(step.mesh, x.shape, x.dtype), made)


def rows_shape(mesh: Mesh, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of rows, sharded by rows."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(mesh))


def update_batch(step: Step, teacher: TeacherShapes | None = None) -> Batch:
    """Return the batch of one update as shapes, with the fields that the configured objective reads."""
    config, net, mesh, (prompt_width, width) = step.config, step.shapes.net, step.mesh, step.widths
    rows = batch_rows(config) // config.batch.minibatches
    algorithm = config.algorithm
    ints: dict[str, Any] = {name: rows_shape(mesh, (rows, width), jnp.int32) for name in ("tokens", "segments")}
    tokens, single = rows_shape(mesh, (rows, width), jnp.float32), rows_shape(mesh, (rows,), jnp.float32)
    seeds = rows_shape(mesh, (rows,), jnp.uint32)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    fields: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    if step.online:
        fields = dict.fromkeys(("sample_logps", "advantages"), tokens)
        fields |= {"observed": tokens} if algorithm.observation_coef else {}
        fields |= {"positive": single} if algorithm.positive_nll_coef else {}
        kind = old_logps_of(config)
        fields |= {"proximal_share" if kind == "interpolated" else "old_logps": tokens} if kind != "policy" else {}
        in_loss = kl_in_loss(config)
        if in_loss:
            if algorithm.kl == "full":
                size, dtype = net.config.outer_width + net.config.head_bias, net.config.dtype
                fields |= {"ref_hidden": rows_shape(mesh, (rows, width, size), dtype)}
                head = NamedSharding(mesh, PartitionSpec())
                scalars |= {"ref_head": jax.ShapeDtypeStruct((size, net.config.vocab_size), dtype, sharding=head)}
            else:
                fields |= {"ref_logps": tokens}
        own = learner_spec(config)
        fields |= {"kl_weight": single} if own.kl_weights and in_loss else {}
        fields |= {"loss_weight": single} if own.loss_weights else {}
        fields |= dict.fromkeys(("values", "returns") if algorithm.name == "ppo" else (), tokens)
        fields |= {"seeds": seeds} if own.draws_seeds else {}
        scalars |= {"kl_coef": number} if algorithm.kl_controller == "adaptive" and "ref_logps" in fields else {}
        scalars |= {"entropy_coef": number} if algorithm.entropy_controller == "adaptive" else {}
        scalars |= {"token_count": number} if algorithm.aggregation == "rollout_token" else {}
    elif algorithm.name == "sft":
        ints |= {"positions": ints["tokens"]} if config.data.packing else {}
        fields = {"seeds": seeds} if algorithm.neftune_alpha else {}
    else:
        fields = {"ref_logps": tokens} if needs_reference(config) else {}
        fields |= {"seeds": seeds} if algorithm.neftune_alpha else {}
        of_kind = {"labels": {"labels": single}, "steps": {"step_labels": tokens}}
        fields |= of_kind.get(algorithm_of(config).data, {})
        scalars |= {"reward_shift": number} if offline_spec(config, width).running_mean else {}
    if config.teacher.path is not None and config.teacher.form != "advantage":
        if k := teacher_spec(config).top_k:
            fields |= {"teacher_ids": rows_shape(mesh, (rows, width, k), jnp.int32)}
            fields |= {"teacher_top_logps": rows_shape(mesh, (rows, width, k), jnp.float32)}
        elif teacher is not None:
            own = teacher.net.config
            fields |= {"teacher_hidden": rows_shape(mesh, (rows, width, own.width), own.dtype)}
            shape = (own.width, own.vocab_size)
            scalars |= {"teacher_head": jax.ShapeDtypeStruct(shape, own.dtype, sharding=number.sharding)}
            scalars |= {} if own.logit_softcap is None else {"teacher_softcap": number}
        fields |= {"taught": single} if config.teacher.context != "none" else {}
        if config.teacher.form == "uld":
            fields |= {"teacher_ends": ints["tokens"], "teacher_prefix_logps": tokens}
            matches = jax.ShapeDtypeStruct((net.config.vocab_size,), jnp.int32, sharding=number.sharding)
            scalars |= {"teacher_matches": matches} if config.teacher.uld_hybrid else {}
    inputs = Inputs(**ints, prompt_width=prompt_width if step.online else 0)
    return Batch(inputs, mask=tokens, scalars=Scalars(**scalars), **fields)


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
