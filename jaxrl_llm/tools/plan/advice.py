"""Changes that make a plan fit, and the bytes that each saves: computed from shapes, or compiled."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import AbstractMesh

from jaxrl_llm.config import assign, rows_together, validate
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.distributed.sharding import row_shards
from jaxrl_llm.tools.plan.planned import FROZEN, WAITING, Plan, describe_for, make_plan
from jaxrl_llm.tools.plan.programs import held_bytes
from jaxrl_llm.tools.plan.sampling import decodes_beside_updates


class Advice(NamedTuple):
    """A change of settings, and what it saves: bytes of one device."""

    change: str
    saves: float
    peak: float  # of the whole step then
    how: str  # from shapes (exact; temporaries may shrink too), or compiled


def advice(plan: Plan, compiled: bool) -> list[Advice]:
    """Return changes that save memory, the largest saving first; `compiled` tries those that need compiling too."""
    changes = [_held(plan, change, values, mesh) for change, values, mesh in _changes(plan)]
    changes += _slots(plan)
    steps, waiting = plan.config.rollout.staleness, plan.held.get(WAITING, 0)
    if waiting and steps > 1 and not plan.config.rollout.update_in_flight:
        saves = waiting - waiting // steps
        changes.append(Advice(_flags({"rollout.staleness": 1}), saves, plan.peak.peak - saves, "from shapes"))
    if compiled:
        changes += [_recompiled(plan, change, values) for change, values in _recompiling(plan)]
    return sorted((x for x in changes if x is not None and x.saves > 0), key=lambda x: -x.saves)


def changed(config, values: dict[str, object]):
    """Return a copy of the configuration with some keys changed."""
    config = config.copy_and_resolve_references()
    for name, value in values.items():
        assign(config, name, value)
    return config


def _flags(values: dict[str, object]) -> str:
    return " ".join(f"--config.{name}={str(value).lower()}" for name, value in values.items())


def _changes(plan: Plan) -> Iterator[tuple[str, dict[str, object], AbstractMesh | None]]:
    """Yield changes whose saving follows from shapes alone: (in words, keys, another mesh)."""
    config, mesh = plan.config, plan.target.mesh
    simple: list[dict[str, object]] = [{"optimizer.moment_dtype": name} for name in ("bfloat16", "float8")]
    simple.append({"model.param_dtype": "bfloat16"})
    if not (config.lora.rank or config.lora.path):
        simple += [{"lora.rank": 16}, {"lora.rank": 16, "model.param_dtype": "bfloat16"}]
        simple.append({"lora.rank": 16, "model.quantize": "nf4"})
    elif config.model.quantize == "none":
        simple.append({"model.quantize": "nf4"})
    if plan.held.get("reference"):
        simple.append({"algorithm.offload_reference": True})
    if plan.held.get("average"):
        simple.append({"average.offload": True})
    for values in simple:
        yield _flags(values), values, None
    sizes = dict(mesh.shape)
    if sizes["data"] > 1:
        moved = sizes | {"data": 1, "fsdp": sizes["fsdp"] * sizes["data"]}
        keys: dict[str, object] = {"mesh.fsdp": moved["fsdp"]}
        keys |= {} if config.mesh.data == -1 else {"mesh.data": 1}
        yield _flags(keys), {}, AbstractMesh(tuple(moved.values()), tuple(moved))
    twice = sizes | {"fsdp": sizes["fsdp"] * 2}
    count = 2 * mesh.size
    text = f"--devices={count} {_flags({'mesh.fsdp': twice['fsdp']})}"
    yield text, {}, AbstractMesh(tuple(twice.values()), tuple(twice))


def _held(plan: Plan, change: str, values: dict[str, object], mesh: AbstractMesh | None) -> Advice | None:
    """Return what a change saves of the arrays that are held all the time; None where it is not allowed."""
    try:
        config = changed(plan.config, values)
        validate(config)
        held = held_bytes(describe_for(config, plan.target, mesh))
    except ConfigError:
        return None  # a change that this configuration does not allow is no advice
    saves = sum(size for name, size in plan.held.items() if name not in (FROZEN, WAITING)) - held
    return Advice(change, saves, plan.peak.peak - saves, "from shapes")


def _slots(plan: Plan) -> list[Advice]:
    """Half as many completions at once: half the keys and values of completions."""
    c, caches = plan.config.rollout, plan.sampling.get("keys and values of completions", 0)
    slots = c.slots or (plan.config.batch.prompts + c.partial_prompts) * c.group_size
    if not caches or c.memory_fraction is not None or slots // 2 < row_shards(plan.target.mesh):
        return []  # with a fraction there are no more slots than fit into it
    saves, beside = caches // 2, c.staleness and decodes_beside_updates(plan.target)

    def saved(program: str) -> int:
        holds = program in ("rollout: decode", "rollout: assign") or (beside and not program.startswith("rollout"))
        return saves if holds else 0

    peak = max(x.peak - saved(x.name) for x in plan.programs)
    return [Advice(_flags({"rollout.slots": slots // 2}), plan.peak.peak - peak or saves, peak, "from shapes")]


def _recompiling(plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    config, mesh = plan.config, plan.target.mesh
    remat: dict[str, object] = {"model.remat": "block"}
    (rows, tokens), shards = plan.microbatch, row_shards(mesh)
    together = rows_together(config) if config.algorithm.name in OFFLINE else 1
    if tokens:
        half: dict[str, object] = {"batch.microbatch_tokens": tokens // 2}
        halves = tokens // 2 >= plan.widths[1] * shards
    else:
        half = {"batch.microbatch_rows": rows // 2}
        halves = rows % 2 == 0 and (rows // 2) % (shards * together) == 0
    is_default = config.model.remat in ("auto", "none")
    if is_default:
        yield _flags(remat), remat
    if halves:
        yield _flags(half), half
    if halves and is_default:
        yield _flags(remat | half), remat | half


def _recompiled(plan: Plan, change: str, values: dict[str, object]) -> Advice:
    """Return what a change saves of the update, which is compiled again."""
    planned = make_plan(
        changed(plan.config, values), plan.target, plan.widths, only="update", image_tokens=plan.image_tokens
    )
    before = next(x for x in plan.programs if x.name == "update")
    after = planned.programs[0]._replace(resident=before.resident)  # what samples is not planned again
    others = [x.peak for x in plan.programs if x.name != "update"]
    return Advice(change, before.peak - after.peak, max([after.peak, *others]), "compiled")
