"""The programs by which a step samples, compiled from shapes, and what they hold."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.sharding import bytes_on_device, over, rollout_mesh, row_shards, shardings
from jaxrl_llm.models.adapters.lora import combine, has_adapters, split
from jaxrl_llm.models.cast import copied_to_decode, decoding_params, in_precision
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout import assignment
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout.automata import NO_AUTOMATA
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.scheduler import Scheduler
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.tools.plan.compiler import Compiler
from jaxrl_llm.tools.plan.shapes import process_mesh, visiting
from jaxrl_llm.tools.plan.step import Step, rows_of_images, rows_shape
from jaxrl_llm.tools.plan.topology import Target
from jaxrl_llm.training.advantages import advantage_step
from jaxrl_llm.training.setup.memory import with_fitting_slots
from jaxrl_llm.training.setup.specs import advantage_spec, rollout_spec
from jaxrl_llm.training.setup.worker import check_correction


class Policies(NamedTuple):
    """The copies of the policy that batches are sampled from ahead of its updates, or on other devices: as shapes.

    Each is as `Engine.policy_copy` makes it.
    """

    own: Any  # the part of a copy that no other array is
    frozen: Any  # the rest of all of them, {} where it is the trainer's own
    waiting: int  # copies beside the one that is sampled from


class Sampling(NamedTuple):
    """The arrays that sampling holds beside training, as shapes: the parameters that decode, and the caches."""

    params: Any
    prompt_cache: Any
    row_cache: Any
    waiting_cache: Any  # of prompts that have no slot yet, where not all rows decode at once
    policies: Policies | None = None  # None where it is the policy in training that is sampled from


def compile_sampling(step: Step, compiler: Compiler, apart: bool = False) -> Sampling:
    """Compile the programs that sample; `apart`: the devices do nothing else.

    Of several processes that train too each samples its share by itself where it samples ahead.
    """
    config, mesh, params, width = step.config, step.mesh, step.params, step.widths[0]
    c, net, on = config.rollout, step.shapes.net, step.target
    engine = make_engine(config, net, scanned=not on.exact)
    ahead = c.staleness > 0 and not apart
    processes = mesh.size // process_mesh(mesh, on.host).size if ahead else 1
    mesh = mesh if processes == 1 else process_mesh(mesh, on.host)
    sampling_mesh = rollout_mesh(mesh, c.mesh, net.config.kv_heads, on.host)
    prompts = -(-(config.batch.prompts + c.partial_prompts) // processes)
    engine = dataclasses.replace(engine, slots=-(-engine.slots // processes))
    if c.memory_fraction is not None and (memory := on.device.memory):
        memory *= mesh.size if on.accelerator else 1  # CPUs share that of their machine
        share = c.memory_fraction
        engine = with_fitting_slots(engine, visiting(params), share, memory, prompts, width, sampling_mesh)
    policies, held, of_run = None, compiler.held, params
    if ahead or apart:
        mesh = mesh if processes == 1 else sampling_mesh
        policies = policies_of(config, engine, params, mesh, shared=ahead and processes == 1)
        held += (policies.waiting + 1) * bytes_on_device(policies.own) + bytes_on_device(policies.frozen)
        frozen = policies.frozen or split(params)[0]
        params, of_run = combine(over(frozen, mesh), policies.own), (frozen, policies.own)
    compiler = dataclasses.replace(compiler, held=held, devices=mesh.size)  # with the same list of programs
    places: Any = {"params": params, "mesh": mesh, "sampling_mesh": sampling_mesh, "of_run": of_run}
    places |= {"image_tokens": step.image_tokens}
    with jax.set_mesh(mesh):
        sampling = compile_rollout(compiler, "rollout", engine, prompts, width, **places)
        if compares_with_greedy(config):
            greedy = dataclasses.replace(engine, sampling=engine.sampling.greedy, group_size=1)
            compile_rollout(compiler, "greedy rollout", greedy, -(-config.batch.prompts // processes), width, **places)
    return sampling._replace(policies=policies)


def policies_of(config, engine: Engine, params: Any, mesh: Mesh, shared: bool) -> Policies:
    """Return the copies of the policy on `mesh` from which batches are sampled; `shared`: the trainer is there too.

    Each batch that is not sampled yet keeps one (`RolloutQueue`); where policies come in flight the newest is kept for
    all of them, and processes that only sample keep none.
    """
    c, (frozen, own) = config.rollout, split(params)
    if not has_adapters(params) and engine.decoder.config.quantized == "none":
        own = jax.eval_shape(functools.partial(copied_to_decode, decoder=engine.decoder), own)
    waiting = 0 if c.processes else 1 if c.update_in_flight else c.staleness
    return Policies(over(own, mesh), {} if shared else over(frozen, mesh), waiting)


def decodes_beside_updates(on: Target) -> bool:
    """True where a batch that is sampled ahead is decoded while another is trained on: several devices of a process
    take turns (`distributed.turns`)."""
    return process_mesh(on.mesh, on.host).size == 1


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
        number = jax.ShapeDtypeStruct((), jnp.int32)
        decode = (engine, sampled, grid_prompts, slots, number, number)
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
