"""A run's demands on device memory, settled before it starts: slots, micro-batches, and lengths that do not fit."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.checks.values import reference_adapters
from jaxrl_llm.config.schema import OFFLINE, SCHEDULE_FREE
from jaxrl_llm.distributed.devices import cpu
from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.distributed.sharding import bytes_on_device, over, placed, row_shards
from jaxrl_llm.models.adapters.lora import has_adapters, split
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Params
from jaxrl_llm.rollout.engine import Engine, prefill
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.training.packing.planner import tokens_in
from jaxrl_llm.training.setup.objectives import needs_reference
from jaxrl_llm.training.setup.specs import critic_update_spec
from jaxrl_llm.training.update import optimizer_shapes


def device_memory(mesh: Mesh) -> float:
    """The memory of the mesh's devices in bytes, as if all processes had what this one has; infinite where they do not
    tell."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if devices[0].platform == "cpu":  # they share that of their machine
        here = cpu().memory
    else:
        here = float(sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in devices))
    return here * mesh.devices.size / len(devices)


def check_memory(config, model: Model, engine: Engine, width: int, mesh: Mesh, shares: int) -> None:
    """Raises ConfigError where one row's keys and values, or the tokens of all rows, exceed the memory of `mesh`, which
    has one of `shares` equal shares of the rows.

    A bound from below, by far: it is for lengths that can be nothing but mistakes.
    """
    net, length = model.net.config, width + engine.max_completion_length
    rows = (config.batch.prompts + config.rollout.partial_prompts) * engine.group_size // shares
    layers = sum(kind.window is None and kind.mixer is Attention for kind in net.layer_configs)
    needed = 2 * layers * net.kv_heads * net.head_dim * length + 4 * rows * length  # bytes, of a byte a number
    if needed > (memory := device_memory(mesh)):
        raise ConfigError(
            f"rollout.max_completion_length is {engine.max_completion_length}, with which the rows alone take "
            f"{needed / 1e9:.0f} GB, more than the {memory / 1e9:.0f} GB of the devices: use shorter rows, or fewer"
        )


def microbatch_room(
    config,
    model: Model,
    critic: Model | None,
    optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation | None,
    mesh: Mesh,
) -> float | None:
    """Bytes that a run leaves free on each device, for micro-batches, or None where devices do not tell, as CPUs.

    They are what is left beside parameters, gradients and where they are taken, the states of the optimizers, a
    reference that is a copy, and an average. Teachers and reward models are not counted: a micro-batch takes no more
    than a share of what is left.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    memory = 0 if jax.default_backend() == "cpu" else min(gather(min(limits)))
    if not memory:
        return None
    held = 0.0
    scored_before = config.algorithm.name in OFFLINE and config.data.precompute_reference
    if needs_reference(config) and not config.algorithm.offload_reference and not scored_before:
        shared = has_adapters(model.params) and reference_adapters(config) == "base"
        held += 0 if shared else bytes_on_device(model.params)
    if config.average.every and not config.average.offload:
        averaged = model.params if has_adapters(model.params) else split(model.params, model.net.config.frozen)[1]
        held += gradient_bytes(averaged) + 2 * bytes_on_device(averaged)
    updated = [(model, optimizer, config.optimizer.offload)]
    if critic is not None and critic_optimizer is not None:
        updated.append((critic, critic_optimizer, critic_update_spec(config).offload))
    for part, its, offload in updated:
        trained = split(part.params, part.net.config.frozen)[1]
        state = placed(*optimizer_shapes(trained, its, mesh, offload))
        held += bytes_on_device(part.params) + update_bytes(config, trained) + bytes_on_device(state)
    return max(float(memory - held), 0.0)


def gradient_bytes(params: Any) -> int:
    """Bytes of the float32 gradients of parameters on one device."""
    return bytes_on_device(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding), params)
    )


def update_bytes(config, params: Any) -> int:
    """Bytes on one device of the gradients of parameters, and of other parameters at which they may be taken."""
    return gradient_bytes(params) * (2 if config.optimizer.name == SCHEDULE_FREE else 1)


def fitting_rows(room: float | None, net: ModelConfig, rows: int, width: int, multiple: int, shards: int) -> int:
    """Rows of a micro-batch of `rows` rows of `width` tokens that are not packed: the most that there is room for.

    They divide `rows` and are a multiple of `multiple`, the rows of all shards that stay together. 0, which is all
    rows, where the room is not known, or where micro-batches are no matter of memory alone: the evenness of a router is
    asked of each by itself.
    """
    if room is None or (net.experts and net.router_aux_loss_coef):
        return 0
    fit = tokens_in(room, net, gradients=True)
    sizes = [size for size in range(multiple, rows + 1, multiple) if rows % size == 0]
    return max([size for size in sizes if size // shards * width <= fit] or sizes[:1])


def with_fitting_slots(
    engine: Engine, params: Params, share: float, memory: float, prompts: int, width: int, mesh: Mesh
) -> Engine:
    """The engine with no more slots than keep what sampling holds within a `share` of `memory`, that of all devices.

    It holds the parameters in the type that samples, and keys and values of `prompts` prompts of `width` tokens and of
    the slots, at their longest; of one image a prompt too, where images are no tokens. Raises ConfigError where not one
    slot for each row shard of `mesh` fits.
    """
    count, longest, vision = prompts * engine.group_size, engine.max_completion_length, engine.net.config.vision
    array, images = jax.ShapeDtypeStruct, None
    if vision is not None and vision.is_read_apart:
        pixels, tiles = array((prompts, 1, *vision.tile_shape), np.float32), array((prompts,), np.int32)
        images = Images(pixels, tiles, grids=array((prompts, 1, vision.numbers), np.int32))
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(partial(decoding_params, decoder=engine.decoder), params)
        tokens = array((prompts, width), np.int32)
        keys = jax.eval_shape(lambda: row_keys(jax.random.key(0), np.uint32(0), count))
        cached = jax.eval_shape(partial(prefill, engine), shapes, tokens, tokens, keys, images=images)[0].cache
        rows = jax.eval_shape(lambda cached: engine.decoder.empty_caches(cached, 1, longest), cached)
    weights, shards = bytes_on_device(over(shapes, mesh)) * mesh.size, row_shards(mesh)
    cached, row = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (cached, rows))
    row /= prompts
    fitting = int(min((share * memory - weights - cached) / row, count)) // shards * shards
    if fitting < shards:
        least = (weights + cached + shards * row) / memory
        raise ConfigError(
            f"rollout.memory_fraction is {share}, of {memory / 1e9:.3g} GB, but the sampler's parameters are "
            f"{weights / 1e9:.3g} GB, the keys and values of {prompts} prompts {cached / 1e9:.3g} GB and those of one "
            f"row {row / 1e9:.3g} GB: set it to {min(math.ceil(100 * least) / 100, 1)} or more"
            f"{', or take shorter rows or fewer prompts' if least > 1 else ''}"
        )
    return replace(engine, slots=min(engine.slots or count, fitting))
