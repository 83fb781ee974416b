"""The devices of a run: the mesh that trains, that of devices which only sample, and the rows of their shards."""

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError, batch_rows, rows_together
from jaxrl_llm.config.schema import OFFLINE, ONLINE_PREFERENCE
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.sharding import make_mesh, rollout_mesh, row_shards
from jaxrl_llm.training.setup import specs


def build_mesh(config) -> Mesh:
    """The mesh of the configuration, over the devices that do not only sample. Raises ConfigError without one."""
    c, devices = config.mesh, jax.devices()
    if count := sampling_devices(config):
        if jax.process_count() > 1 or count >= len(devices):
            raise ConfigError(
                f"rollout.devices is {count}, of {amount(len(devices), 'device')} in "
                f"{amount(jax.process_count(), 'process', 'processes')}, but it takes fewer than there are, of one "
                "process: set it to 0, and all devices sample and train"
            )
        devices = devices[:-count]
    return make_mesh(c.data, c.fsdp, c.tensor, c.context, c.expert, devices)


def sampling_part(config, mesh: Mesh, kv_heads: int) -> OwnPart:
    """The part of the devices that samples the batches of training: those that only sample, those of this process where
    each samples apart, or else `mesh`, that of training."""
    if samples_apart(config):
        return OwnPart.of(mesh, kv_heads, config.rollout.mesh)
    if count := sampling_devices(config):
        mesh = rollout_mesh(make_mesh(devices=jax.devices()[-count:]), config.rollout.mesh, kv_heads)
    return OwnPart(mesh, lambda params: params)


def samples_apart(config) -> bool:
    """True where a thread of each of several processes samples by itself, beside the updates of all."""
    several = jax.process_count() > 1 and not config.rollout.processes
    return several and config.rollout.staleness > 0


def sampling_devices(config) -> int:
    """The number of devices that only sample, and have no part in the mesh that trains: rollout.devices."""
    return 0 if config.algorithm.name in OFFLINE else config.rollout.devices


def shard_rows(config, mesh: Mesh) -> int:
    """Rows of a minibatch in each row shard of the mesh."""
    return batch_rows(config) // config.batch.minibatches // row_shards(mesh)


def rows_of_shards(config, mesh: Mesh) -> int:
    """The least number of rows that all row shards of the mesh share: one for each or, of given data and of pairs, the
    rows that no micro-batch splits."""
    name = config.algorithm.name
    return row_shards(mesh) * (rows_together(config) if name in OFFLINE else 2 if name == ONLINE_PREFERENCE else 1)


def check_rows(config, rows: int, mesh: Mesh) -> None:
    """Raises ConfigError unless every micro-batch divides into the mesh's row shards."""
    if config.algorithm.aggregation == "microbatch_token" and row_shards(mesh) > 1:
        raise ConfigError(
            "algorithm.aggregation = 'microbatch_token' is of adjacent rows, but a micro-batch takes rows of each of "
            f"the {row_shards(mesh)} shards of the mesh; use token, or mesh.data = mesh.fsdp = 1"
        )
    batch, multiple = specs.batch_spec(config), rows_of_shards(config, mesh)
    for name, size in (("microbatch_rows", batch.microbatch_rows or rows // batch.minibatches),
                       ("logps_microbatch_rows", batch.logps_microbatch_rows)):  # fmt: skip
        if size % multiple:
            raise ConfigError(
                f"a micro-batch of {amount(size, 'row')} does not divide into mesh.data x mesh.fsdp x mesh.expert = "
                f"{row_shards(mesh)} parts{' of whole pairs' if multiple > row_shards(mesh) else ''}; change "
                f"batch.prompts, rollout.group_size, batch.minibatches, batch.{name} or the mesh"
            )
