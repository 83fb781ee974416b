"""The programs of the sampling engine, from shapes: cast, prefill and a chunk of decode steps at its longest."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.sharding import rollout_mesh, row_shards, shardings
from jaxrl_llm.models.cast import in_precision
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.scheduler import Scheduler
from jaxrl_llm.tools.plan.shapes import placed, rows_shape
from jaxrl_llm.training.setup.specs import check_correction, rollout_spec


class Rollout(NamedTuple):
    """Shapes that sampling holds, and its programs: (name, jitted function, arguments, keyword arguments)."""

    params: Any
    prompt_cache: Any
    row_cache: Any
    waiting_cache: Any  # of the prompts that are not in the grid, where not all rows decode at once
    waves: float  # grids one after another that all rows take


class ScannedEngine(Engine):
    """An engine whose decoder scans its layers, as it does on accelerators; this process runs on CPU."""

    @property
    def decoder(self):
        return in_precision(self.net, self.weights_dtype)


def make_engine(config, net, scanned: bool) -> Engine:
    """The engine of the configuration; no token ends a row. Raises ConfigError as training would."""
    engine = (ScannedEngine if scanned else Engine).of(rollout_spec(config), net, (0,))
    check_correction(config, engine)
    return engine


def compile_rollout(config, engine: Engine, params, mesh: Mesh, prompt_width: int,
                    add: Callable[..., Any]) -> Rollout:  # fmt: skip
    """What sampling holds. Programs go to `add(name, function, arguments, held)`, which gives their results' shapes.

    `held` are the trees that stay in memory beside the arguments.
    """
    own, decoder = rollout_mesh(mesh, config.rollout.mesh), engine.decoder
    if own == mesh:
        sampled = add("rollout: cast", engines.decoding_params, (params, decoder), held=())
    else:
        cast = functools.partial(engines.decoding_params, decoder=decoder)
        places = shardings(jax.eval_shape(cast, params), own)
        sampled = add("rollout: cast", jax.jit(cast, out_shardings=places), (params,), held=())
    with jax.set_mesh(own):
        return _sampling(config, engine, sampled, own, prompt_width, add)


def _sampling(config, engine: Engine, sampled, mesh: Mesh, prompt_width: int, add: Callable[..., Any]) -> Rollout:
    """What sampling holds on the mesh that samples."""
    k, shards, longest = config.rollout.group_size, row_shards(mesh), config.rollout.max_completion_length
    prompts = -(-config.batch.prompts // shards) * shards
    ints = rows_shape(mesh, (prompts, prompt_width), jnp.int32)
    keys = jax.eval_shape(lambda: engines.row_keys(jax.random.key(0), jnp.uint32(0), prompts * k))
    keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    bank, rows = add("rollout: prefill", engines.prefill, (engine, sampled, ints, ints, keys), held=())
    local = prompts // shards
    scheduler = Scheduler(local, k, shards, min(engine.slots // shards or local * k, local * k))
    seat = (engine, bank, rows, keys, None, scheduler.grid, None, longest)
    places, slots = add("rollout: seat", engines.assign, seat, held=(sampled,))
    everyone = scheduler.grid.slots == prompts * k
    waiting = None if everyone else bank.cache
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    add("rollout: decode", engines.decode_chunk, (engine, sampled, places, slots, steps), held=(waiting,))
    return Rollout(sampled, places.cache, slots.cache, waiting, prompts * k / scheduler.grid.slots)


def results(function, arguments, compiled) -> Any:
    """The shapes of a program's results, with the places that it leaves them in."""
    return placed(function.eval_shape(*arguments), compiled.output_shardings)
