"""The arrays of a run as shapes with their places on a mesh: nothing is read but config.json, nothing is allocated."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import resolve, split_options
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import make_mesh, over, placed
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.adapters.lora import has_adapters, merge, split
from jaxrl_llm.models.adapters.peft_patterns import with_patterns
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import base_and_adapter
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.rewards.built_in import BUILT_IN
from jaxrl_llm.rewards.judge import JudgeSpec
from jaxrl_llm.training.local_judge import reply_options, row_length
from jaxrl_llm.training.objectives.value import HEAD
from jaxrl_llm.training.optimizers import build_optimizer
from jaxrl_llm.training.reference import ReferenceSpec, start_reference
from jaxrl_llm.training.reward_models import path_and_options, short_name
from jaxrl_llm.training.rollouts.replay import Replay, empty_replay
from jaxrl_llm.training.setup.data import model_entries, register
from jaxrl_llm.training.setup.models import (
    adapter_patterns,
    build_lora,
    check_quantized,
    critic_config,
    net_options,
    trained_parts,
)
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
    """The network and the parameters of a teacher that the run holds, as shapes."""

    net: Net
    params: Params  # whole; they may be the policy's
    own: Params | None  # the part of them that nothing else holds


class GraderShapes(NamedTuple):
    """A model that scores completions for a reward: a reward model or, with a `judge`, that of a judge."""

    name: str
    net: Net
    params: Params  # whole, over the devices of one process
    own: Params | None  # the same, unless another judge has them
    offload: bool  # they wait in the host's memory between batches
    rows: int  # that are scored at a time
    width: int  # the most tokens of a row or, of a judge, of a prompt
    judge: JudgeSpec | None = None
    reply: int = 0  # the most tokens of one


class Shapes(NamedTuple):
    """The arrays on the devices from the first step to the last."""

    net: Net
    critic: Net | None
    state: State
    frozen: Frozen
    reference: Params | None  # whole; it may share `frozen`
    own_reference: Params | None  # the part of it that nothing else holds
    teachers: dict[str, TeacherShapes]  # by the value of the column that names them, "" for that of teacher.path
    graders: tuple[GraderShapes, ...]
    average: tuple[Params, ...]  # the moving average, what it began with, and the averaged parameters; empty: none
    replay: Replay | None


def describe_net(config, dtype: str, on_cpu: bool, head: str | None = None) -> Net:
    """The net of the configuration, from config.json (and adapter_config.json) alone.

    Raises ConfigError for a folder without config.json.
    """
    c, entries = config.model, model_entries(config)
    register(c.register)
    options = net_options(config, head, on_cpu)
    if config.lora.path is not None:
        options |= peft.read_config(config.lora.path).fields
    folder = hf.locate(c.path, config_only=True, revision=c.revision)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {c.path!r} has no config.json; a plan needs that one file")
    family = family_of(hf.read_config(folder, entries))
    net = hf.load_net(folder, entries, **options | {"dtype": dtype, "param_dtype": c.param_dtype})
    net = trained_parts(config).grouped(net, family)
    if config.lora.rank:
        net = with_patterns(net.with_lora(build_lora(config)), family, adapter_patterns(config))
        return peft.with_modules(net, family, config.lora.modules_to_save, "lora.modules_to_save")
    return net if config.lora.path is None else peft.with_adapter_modules(net, family, config.lora.path)


def describe(config, mesh: Mesh, dtype: str, on_cpu: bool, host: int | None = None) -> Shapes:
    """The shapes of a run on `mesh`, computing in `dtype`; `host` as `process_mesh` takes it."""
    net = describe_net(config, dtype, on_cpu)
    params = _trained_score_in_fp32(over(net.shapes(), mesh))
    check_quantized(net, params)
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
                second, frozen_critic = _offloaded(second), _on_host(frozen_critic)
            state = State(state.step, state.params, state.opt_state, second)
    reference, own_reference = _reference(config, net, params)
    if config.model.offload:
        head = _offloaded(state.critic) if state.critic and config.critic.shared else state.critic
        state, frozen = dataclasses.replace(_offloaded(state), critic=head), _on_host(frozen)
    teachers = _teachers(config, net, params, mesh, dtype)
    graders = _graders(config, process_mesh(mesh, host), "float32" if on_cpu else "bfloat16")
    average = _average(config, net, params)
    frozen = Frozen(frozen, frozen_critic)
    return Shapes(
        net, critic, state, frozen, reference, own_reference, teachers, graders, average, _replay(config, mesh)
    )


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
        types = {"dtype": dtype, "param_dtype": dtype, "quantize": c.quantize}
        net, _ = net_at(path, None if value else c.revision, head="lm", **types)
        params = over(net.shapes(), mesh)
        params = _on_host(params) if c.offload else params
        found[value] = TeacherShapes(net, params, params)
    return found


def net_at(path: str, revision: str | None = None, **overrides) -> tuple[Net, dict[str, Any]]:
    """The net of a model, or of an adapter with its model, and its config.json, which is all that is read of it."""
    path, adapter, revision = base_and_adapter(path, revision=revision)
    lora = None if adapter is None else peft.read_config(adapter).lora
    folder = hf.locate(path, config_only=True, revision=revision)
    net, read = hf.load_net(folder, lora=lora, **overrides), hf.read_config(folder)
    return net if adapter is None else peft.with_adapter_modules(net, family_of(read), adapter), read


def process_mesh(mesh: Any, host: int | None) -> Any:
    """The mesh of one process's devices, over which it spreads what it scores completions with.

    `host` is their number where CPUs stand in for accelerators, None where the devices of the mesh say it.
    """
    if isinstance(mesh, AbstractMesh):
        sizes = dict.fromkeys(mesh.shape, 1) | {"fsdp": min(mesh.size, host or mesh.size)}
        return AbstractMesh(tuple(sizes.values()), tuple(sizes))
    devices = list(mesh.devices.flat)
    near = [device for device in devices if device.process_index == devices[0].process_index]
    return make_mesh(data=1, fsdp=-1, devices=near[:host])


def _graders(config, mesh: Any, dtype: str) -> tuple[GraderShapes, ...]:
    """The reward models, and the judges with a path, among the rewards that the configuration names."""
    found: list[GraderShapes] = []
    judges: set[Any] = set()
    c = config.rollout
    for spec in config.rewards.functions if config.algorithm.name not in OFFLINE else ():
        if (named := path_and_options(spec)) is not None:
            kind, path, options = named
            types = dict.fromkeys(("dtype", "param_dtype"), _known(options.get("dtype", "auto"), dtype))
            net, _ = net_at(path, head="lm" if options.get("labels") else kind.head, **types)
            width = min(c.max_prompt_length + c.max_completion_length, options.get("max_length") or math.inf)
            name = f"reward model {options.get('name') or short_name(path)}"
            offload, rows = options.get("offload", False), options.get("rows", 32)
            params = over(net.shapes(), mesh)
            own = _on_host(params) if offload else params
            found.append(GraderShapes(name, net, params, own, offload, rows, int(width)))
        elif (judge := _judge_of(spec)) is not None:
            values, _ = reply_options(judge)
            types = dict.fromkeys(("dtype", "param_dtype"), _known(judge.dtype, dtype))
            net, read = net_at(str(judge.path), head="lm", scan_layers=False, **types)
            params, width = over(net.shapes(), mesh), row_length(judge, read)
            key = judge.path, judge.dtype, judge.offload, judge.tokenizer, judge.trust_remote_code
            own = None if key in judges else _on_host(params) if judge.offload else params
            judges.add(key)
            reply = values["max_tokens"] or width
            name = f"judge {judge.name}"
            found.append(GraderShapes(name, net, params, own, judge.offload, judge.rows, width, judge, reply))
    return tuple(found)


def _known(dtype: str, auto: str) -> str:
    return auto if dtype == "auto" else dtype


def _judge_of(spec: str) -> JudgeSpec | None:
    """The judge with a path that a reward names; None for another reward."""
    name, options = split_options(spec)
    found = None if name.endswith(".py") else resolve(name, BUILT_IN)
    if isinstance(found, type) and issubclass(found, JudgeSpec):
        found = found(**options)
    return found if isinstance(found, JudgeSpec) and found.path is not None else None


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
    if not has_adapters(params) or spec.adapters == "copy":
        reference = _on_host(reference) if spec.offload_reference else reference
        return reference, reference
    return reference, trainable if spec.adapters == "start" else None


def _average(config, net: Net, params: Params) -> tuple[Params, ...]:
    """The parameters that the average of the policy holds; see `training.average`."""
    if not config.average.every:
        return ()
    averaged = split(params, net.config.frozen)[1]
    if has_adapters(params):
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        averaged = over(jax.eval_shape(lambda params: merge(params, net.config.lora), params), mesh)
    ema = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), averaged)
    trees = (ema, averaged, averaged)
    return _on_host(trees) if config.average.offload else trees


def _replay(config, mesh: Any) -> Replay | None:
    """The groups of earlier steps that a run keeps, on every device; None where it keeps none."""
    c, groups = config.rollout, config.algorithm.replay_groups
    if config.algorithm.name in OFFLINE or not groups:
        return None
    widths = c.max_prompt_length + c.max_completion_length, c.max_prompt_length
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(lambda: empty_replay(groups, c.group_size, *widths, mesh))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)


def _offloaded(state: State) -> State:
    return dataclasses.replace(state, params=_on_host(state.params))


def visiting(tree) -> Any:
    """The shapes on the devices, also of arrays that otherwise wait in the host's memory."""
    return placed(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), tree))


def _on_host(tree) -> Any:
    """The shapes in the host's memory, but for scalars (`distributed.sharding.on_host`)."""
    places = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host") if x.ndim else x.sharding, tree)
    return placed(tree, places)
