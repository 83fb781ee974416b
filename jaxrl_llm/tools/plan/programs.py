"""The programs of a training step, compiled from shapes, and what each needs of one device."""

import dataclasses
import time
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import batch_rows
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import on_device, row_shards
from jaxrl_llm.tools.plan import hlo
from jaxrl_llm.tools.plan.layouts import Laid, Turns, lay_out
from jaxrl_llm.tools.plan.rollout import Rollout, compile_rollout, make_engine, results
from jaxrl_llm.tools.plan.shapes import Shapes, bytes_on_device, rows_shape, update_batch
from jaxrl_llm.tools.plan.traced import traced_flops
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.objectives.value import critic_params, value_regression
from jaxrl_llm.training.online import scored_logps, values_before
from jaxrl_llm.training.optimizers import build_optimizer, learning_rate_schedule
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.setup.objectives import critic_spec, objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import critic_optimizer_spec, offline_spec, old_logps_of, update_spec
from jaxrl_llm.training.update import make_update, merge_frozen, optimizer_step


class Measured(NamedTuple):
    """One compiled program. Bytes are of one device; `times` is how often a step runs it."""

    name: str
    times: float
    beside: int  # held meanwhile, and no argument of it
    arguments: int
    results: int  # new ones: those that take the place of a donated argument are not counted
    temporaries: int
    flops: float  # of the traced program, an equal share for each device
    compiled_flops: float  # of the products in the compiled program of one device
    collectives: list[hlo.Collective]
    largest: list[hlo.Tensor]
    seconds: float  # to compile

    @property
    def peak(self) -> int:
        """The most that a device holds while the program runs."""
        return self.beside + self.arguments + self.results + self.temporaries

    @property
    def sent(self) -> float:
        """Bytes that a device sends to others in one run."""
        return sum(x.sent for x in self.collectives)


# The CPU's compiler computes in float32. Where nothing is gathered in a loop over layers, moving what does not change
# out of it leaves float32 copies of all parameters, keys and values.
IN_LAYERS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@dataclasses.dataclass
class Compiler:
    """Compiles programs one by one; `held` bytes are on every device all the time.

    `simulated`: by the CPU's compiler, for other devices.
    """

    held: int
    devices: int
    simulated: bool = False
    found: list[Measured] = dataclasses.field(default_factory=list)

    def add(self, name: str, function, arguments: tuple, times: float = 1.0, held: tuple = (), of_run: Any = (),
            turns: Turns = (), copied: Any = ()) -> Any:  # fmt: skip
        """The shapes of the results of one more program.

        `held` are trees that are there meanwhile and not among the arguments, `of_run` those of the arguments that are
        always there; `turns` are those of loops whose number the compiler does not know. `copied` is what the device's
        compiler may copy and this one does not.
        """
        began = time.perf_counter()
        traced = function.trace(*arguments)
        options = IN_LAYERS if self.simulated and name.startswith("rollout") else None
        compiled = traced.lower().compile(compiler_options=options)
        memory = compiled.memory_analysis()
        module = hlo.Module(compiled.as_text(), turns)
        own = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None]
        beside = self.held - bytes_on_device(of_run) + bytes_on_device(held)
        self.found.append(
            Measured(
                name=name,
                times=times,
                beside=beside,
                arguments=bytes_on_device(own),
                results=max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
                temporaries=memory.temp_size_in_bytes + (bytes_on_device(copied) if self.simulated else 0),
                flops=traced_flops(traced.jaxpr, turns) / self.devices,
                compiled_flops=module.product_flops(),
                collectives=module.collectives(),
                largest=module.largest(12),
                seconds=time.perf_counter() - began,
            )
        )
        return results(function, arguments, compiled)


def held_bytes(shapes: Shapes) -> int:
    """Bytes on a device from the first step to the last."""
    return bytes_on_device((shapes.state, shapes.frozen, shapes.own_reference))


def compile_step(config, shapes: Shapes, mesh: Mesh, widths: tuple[int, int], scanned: bool, only: str = "",
                 packer: Packer | None = None) -> tuple[list[Measured], Rollout | None]:  # fmt: skip
    """The programs of a step with rows of `widths` (prompt, all) tokens, and what sampling holds.

    `only` names one phase: "rollout", "logps" or "update". Evaluation is not among them. `packer` is that of a run.
    """
    simulated = scanned and mesh.devices.flat[0].platform == "cpu"
    compiler, rollout = Compiler(held_bytes(shapes), mesh.size, simulated), None
    online = config.algorithm.name not in OFFLINE
    params = merge_frozen(shapes.state, shapes.frozen).params
    if online and only in ("", "rollout"):
        rollout = _rollout(config, shapes, params, mesh, widths[0], scanned, compiler)
    objective = objective_of(config, shapes.net)
    laid = lay_out(config, shapes.net, mesh, objective, widths, scanned, packer)
    if only in ("", "logps"):
        _logps(config, shapes, params, mesh, widths, laid, compiler)
    if only in ("", "update"):
        batch = update_batch(config, mesh, widths[1], widths[0] if online else 0)
        batch = batch.with_layout(laid.own, laid.observed)
        update = make_plan_update(config, shapes, mesh, objective)
        others = config.batch.minibatches * config.algorithm.num_iterations
        arguments = (shapes.state, batch, shapes.frozen)
        rest = (batch,) * (config.batch.minibatches if config.batch.minibatches > 1 else 0)
        of_run = (shapes.state, shapes.frozen)
        compiler.add("update", update, arguments, others, held=rest, of_run=of_run, turns=laid.turns)
    return compiler.found, rollout


def make_plan_update(config, shapes: Shapes, mesh: Mesh, objective: Objective):
    """The jitted update of the configuration, as `build` makes it."""
    update_critic = None
    if shapes.critic is not None and not config.critic.shared:
        own = critic_optimizer_spec(config)
        settings = replace(update_spec(config), schedule=learning_rate_schedule(own))
        regression = value_regression(critic_spec(config), shapes.critic)
        update_critic = optimizer_step(regression, build_optimizer(own), settings, mesh)
    has_critic = shapes.critic is not None
    return make_update(objective, make_optimizer(config), update_spec(config), mesh, update_critic, has_critic)


def _rollout(config, shapes: Shapes, params, mesh: Mesh, width: int, scanned: bool, compiler: Compiler) -> Rollout:
    def add(name: str, function, arguments: tuple, held: tuple) -> Any:
        # While accelerators decode, they may hold the keys and values of completions in a second layout.
        copied = arguments[3].cache if name == "rollout: decode" else ()
        return compiler.add(name, function, arguments, 1.0, held, params if name == "rollout: cast" else (), (), copied)

    engine = make_engine(config, shapes.net, scanned)
    rollout = compile_rollout(config, engine, params, mesh, width, add)
    steps = config.rollout.max_completion_length * rollout.waves
    compiler.found[:] = [x._replace(times=steps) if x.name == "rollout: decode" else x for x in compiler.found]
    return rollout


def _logps(config, shapes: Shapes, params, mesh: Mesh, widths: tuple[int, int], laid: Laid,
           compiler: Compiler) -> None:  # fmt: skip
    """The log-probs of policy and reference and the critic's values, before the update."""
    online = config.algorithm.name not in OFFLINE
    rows = batch_rows(config)
    ints = rows_shape(mesh, (rows, widths[1]), jnp.int32)
    part, shards = config.batch.microbatch_rows or rows // config.batch.minibatches, row_shards(mesh)
    first, temperature = (widths[0], config.rollout.temperature) if online else (0, 1.0)
    inputs = Inputs(ints, ints, layout=laid.passing, prompt_width=first)
    scoring = (inputs, temperature, part, shards)
    turns = laid.passing_turns
    if (online and old_logps_of(config) == "trainer") or offline_spec(config, widths[1]).running_mean:
        compiler.add("log-probs", scored_logps, (shapes.net, params, *scoring), of_run=params, turns=turns)
    if shapes.reference is not None:
        moved = jax.eval_shape(on_device, shapes.reference)
        reference = jax.tree.map(_on_device, moved, shapes.reference)
        there = shapes.reference if not config.algorithm.offload_reference else ()
        compiler.add("reference", scored_logps, (shapes.net, reference, *scoring), of_run=there, turns=turns)
    if shapes.critic is not None:
        own = critic_params(critic_spec(config), merge_frozen(shapes.state, shapes.frozen))
        arguments = (shapes.critic, own, inputs, part, shards)
        compiler.add("values", values_before, arguments, of_run=own, turns=turns)


def _on_device(x, placed):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed.sharding.with_memory_kind("device"))
