"""A step as shapes: its configuration on the devices of a target, rows with their images, the batch of an update."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch, Images, Inputs, Scalars
from jaxrl_llm.config import batch_rows
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import row_sharding, row_shards
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.row_images import room_for
from jaxrl_llm.tools.plan.shapes import Shapes, TeacherShapes, visiting
from jaxrl_llm.tools.plan.topology import Target
from jaxrl_llm.training.passes import images_of_rows
from jaxrl_llm.training.setup.objectives import kl_in_loss, needs_reference
from jaxrl_llm.training.setup.specs import data_kind, learner_spec, offline_spec, old_logps_of, teacher_spec
from jaxrl_llm.training.update import merge_frozen


@dataclasses.dataclass(frozen=True)
class Step:
    """A step to plan: a configuration, its arrays on the devices of a target, and rows of `widths` (prompt, total)
    tokens.

    `image_tokens` are those of a prompt's images, or of a row's where rows are given.
    """

    config: Any
    shapes: Shapes
    target: Target
    widths: tuple[int, int]
    image_tokens: int = 0

    @property
    def mesh(self) -> Mesh:
        """The devices, or those that stand in for them."""
        return self.target.mesh

    @property
    def online(self) -> bool:
        """True where rows are sampled."""
        return self.config.algorithm.name not in OFFLINE

    @property
    def params(self) -> Any:
        """The parameters of the model, trained and frozen."""
        return merge_frozen(self.shapes.state, self.shapes.frozen).params


def rows_shape(mesh: Mesh, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of rows, sharded by rows."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(mesh))


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
        fields |= of_kind.get(data_kind(config), {})
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
