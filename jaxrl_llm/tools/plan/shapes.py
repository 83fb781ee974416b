"""The arrays of a run as shapes with their places on a mesh: nothing is read but config.json, nothing is allocated."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import over, placed
from jaxrl_llm.models import hf, peft
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.lora import has_adapters, split
from jaxrl_llm.models.model import base_and_adapter
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.objectives.value import HEAD
from jaxrl_llm.training.optimizers import build_optimizer
from jaxrl_llm.training.reference import ReferenceSpec, start_reference
from jaxrl_llm.training.setup.data import model_entries, register
from jaxrl_llm.training.setup.models import build_lora, critic_config, net_options
from jaxrl_llm.training.setup.objectives import needs_reference
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import (
    critic_optimizer_spec,
    critic_update_spec,
    is_own_teacher,
    reference_spec,
    self_reference,
)
from jaxrl_llm.training.update import Frozen, State, optimizer_shapes, split_critic


class TeacherShapes(NamedTuple):
    """A teacher that the run holds."""

    net: Net
    params: Params  # whole; they may be the policy's
    own: Params | None  # the part of them that nothing else holds


class Shapes(NamedTuple):
    """The arrays on the devices from the first step to the last."""

    net: Net
    critic: Net | None
    state: State
    frozen: Frozen
    reference: Params | None  # whole; it may share `frozen`
    own_reference: Params | None  # the part of it that nothing else holds
    teachers: dict[str, TeacherShapes]  # by the value of the column that names them, "" for that of teacher.path


def describe_net(config, dtype: str, on_cpu: bool, head: str | None = None) -> Net:
    """The net of the configuration, from config.json (and adapter_config.json) alone."""
    c, entries = config.model, model_entries(config)
    register(c.register)
    options = net_options(config, head, on_cpu)
    if config.lora.path is not None:
        options |= peft.read_config(config.lora.path).fields
    folder = hf.locate(c.path, config_only=True, revision=c.revision)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {c.path!r} has no config.json; a plan needs that one file")
    net = hf.load_net(folder, entries, **options | {"dtype": dtype, "param_dtype": c.param_dtype})
    family = family_of(hf.read_config(folder, entries))
    if config.lora.rank:
        net = net.with_lora(build_lora(config))
        return peft.with_modules(net, family, config.lora.modules_to_save, "lora.modules_to_save")
    return net if config.lora.path is None else peft.with_adapter_modules(net, family, config.lora.path)


def describe(config, mesh: Mesh, dtype: str, on_cpu: bool) -> Shapes:
    """The shapes of a run on `mesh`, computing in `dtype`."""
    net = describe_net(config, dtype, on_cpu)
    params = _trained_score_in_fp32(over(net.shapes(), mesh))
    if config.model.quantize != "none" and not has_adapters(params):
        raise ConfigError(
            f"model.quantize is {config.model.quantize}, and quantised matrices are not trained: set lora.rank"
        )
    frozen, trainable = split(params, net.config.frozen)
    critic, frozen_critic = None, {}
    state = _state(trainable, make_optimizer(config), config.optimizer.offload, mesh)
    if config.algorithm.name == "ppo":
        critic = describe_net(critic_config(config), dtype, on_cpu, head="score")
        critic_params = _trained_score_in_fp32(over(critic.shapes(), mesh))
        if config.critic.shared:
            head = {HEAD: critic_params[HEAD]}
            joint = _state({**trainable, **head}, make_optimizer(config), config.optimizer.offload, mesh)
            state = split_critic(joint, State(joint.step, head, ()))
        else:
            frozen_critic, trainable = split(critic_params, critic.config.frozen)
            settings = critic_update_spec(config)
            second = _state(trainable, build_optimizer(critic_optimizer_spec(config)), settings.offload, mesh)
            if settings.offload_params:
                second, frozen_critic = _offloaded(second), jax.tree.map(_on_host, frozen_critic)
            state = State(state.step, state.params, state.opt_state, second)
    reference, own_reference = _reference(config, net, params)
    if config.model.offload:
        head = _offloaded(state.critic) if state.critic and config.critic.shared else state.critic
        state, frozen = dataclasses.replace(_offloaded(state), critic=head), jax.tree.map(_on_host, frozen)
    teachers = _teachers(config, net, params, mesh, dtype)
    return Shapes(net, critic, state, Frozen(frozen, frozen_critic), reference, own_reference, teachers)


def _teachers(config, policy: Net, own: Params, mesh: Mesh, dtype: str) -> dict[str, TeacherShapes]:
    """The teachers of the run; one behind a server takes nothing here, and the policy as it is holds nothing more."""
    c, found = config.teacher, {}
    if is_own_teacher(config):
        if (settings := self_reference(config)) is None:
            return {"": TeacherShapes(policy, own, None)}
        return {"": TeacherShapes(policy, *_copied(settings, policy, own))}
    paths = {} if c.path is None else {"": c.path}
    paths |= {value: path for value, _, path in (entry.partition("=") for entry in c.others)}
    dtype = dtype if c.dtype == "auto" else c.dtype
    for value, path in paths.items():
        if split_options(path)[0] == "server":
            continue
        path, adapter = base_and_adapter(path, None)
        lora = None if adapter is None else peft.read_config(adapter).lora
        folder = hf.locate(path, config_only=True, revision=None if value else c.revision)
        types = {"dtype": dtype, "param_dtype": dtype, "quantize": c.quantize}
        net = hf.load_net(folder, head="lm", lora=lora, **types)
        if adapter is not None:
            net = peft.with_adapter_modules(net, family_of(hf.read_config(folder)), adapter)
        params = over(net.shapes(), mesh)
        params = jax.tree.map(_on_host, params) if c.offload else params
        found[value] = TeacherShapes(net, params, params)
    return found


def _trained_score_in_fp32(params: Params) -> Params:
    if not has_adapters(params) or HEAD not in params:
        return params
    score = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), params[HEAD])
    return {**params, HEAD: score}


def _state(params: Params, optimizer: optax.GradientTransformation, offload: bool, mesh: Mesh) -> State:
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return State(step, params, placed(*optimizer_shapes(params, optimizer, mesh, offload)))


def _reference(config, net: Net, params: Params) -> tuple[Params | None, Params | None]:
    """The reference policy, and the part of it that it does not share with the policy."""
    online = config.algorithm.name not in OFFLINE
    if not needs_reference(config) or (not online and config.data.precompute_reference):
        return None, None
    return _copied(reference_spec(config), net, params)


def _copied(spec: ReferenceSpec, net: Net, params: Params) -> tuple[Params, Params | None]:
    """A reference policy that is a copy, and the part of it that it does not share with the policy."""
    _, trainable = split(params, net.config.frozen)
    shapes = jax.eval_shape(lambda params: start_reference(spec, params, net.config.lora), params)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    reference = over(shapes, mesh)
    if spec.offload_reference:
        reference = jax.tree.map(lambda x: _on_host(x) if x.ndim else x, reference)
    if not has_adapters(params) or spec.adapters == "copy":
        return reference, reference
    return reference, trainable if spec.adapters == "start" else None


def _offloaded(state: State) -> State:
    return dataclasses.replace(state, params=jax.tree.map(_on_host, state.params))


def visiting(tree) -> Any:
    """The shapes on the devices, also of arrays that otherwise wait in the host's memory."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("device")), tree
    )


def _on_host(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host"))
