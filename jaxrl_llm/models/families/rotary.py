"""The entries of config.json about rotary positions, of transformers 4 and 5, in both directions."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families.entries import check_kinds, number, refuse
from jaxrl_llm.models.rope import KINDS, Rope

ENTRIES = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
MOST = "max_position_embeddings"
TYPES = ("full_attention", "sliding_attention")
BLOCKS = ("rope_scaling", "rope_parameters")
APART = ("rope_theta", "partial_rotary_factor")  # which files of transformers 4 have beside the scaling
READ = (
    *APART, "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim", "llama_4_scaling_beta",
    "short_factor", "long_factor", MOST,
)  # fmt: skip
READ_BESIDE = {"hunyuan_v1_dense": ("alpha",), "hunyuan_v1_moe": ("alpha",)}  # by single families


def parameters_of(hf: dict[str, Any]) -> dict[str, Any]:
    """The block of rotary parameters, empty where there is none: as in transformers 5 `rope_scaling` if it is there.

    Families that have a set for each type of layer put `rope_scaling` into these themselves.
    """
    parameters = hf.get("rope_parameters") or {}
    return parameters if _sets(parameters) else hf.get("rope_scaling") or parameters


def _sets(parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters by type of layer, empty where all layers share theirs."""
    return {name: value for name, value in parameters.items() if isinstance(value, dict)}


def sets_of(hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The `rope_parameters` by type of layer, empty where there are none; raises ConfigError for others."""
    parameters = hf.get("rope_parameters") or {}
    sets = _sets(parameters)
    if parameters and not sets:
        refuse("rope_parameters", parameters, f"one set of parameters for each of {', '.join(TYPES)}")
    return sets


def with_default(default: dict[str, Any], hf: dict[str, Any], unless: Iterable[str] = BLOCKS) -> dict[str, Any]:
    """The entries, with the `default` rotary parameters where they have none of the entries `unless`."""
    return hf if any(hf.get(entry) for entry in unless) else {**hf, "rope_parameters": default}


def with_default_sets(default: dict[str, Any], hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with the `default` rotary parameters of both types of layers where they have none."""
    return hf | {"rope_parameters": sets_of(hf) or default}


def both_sets(hf: dict[str, Any], full: float, local: float) -> dict[str, dict[str, Any]]:
    """The `rope_parameters` by type of layer, with bases where they have none; raises ConfigError as `sets_of`.

    Files of transformers 4 scale the layers without a window.
    """
    given = sets_of(hf)
    bases = zip(TYPES, (full, local), strict=True)
    sets = {name: {"rope_theta": base} | given.get(name, {}) for name, base in bases}
    return sets | {"full_attention": sets["full_attention"] | (hf.get("rope_scaling") or {})}


def overridden(hf: dict[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of config.json with `entries` in place of those of the same names.

    Rotary ones are written into the block that the model has, whose base stays under another scaling. Raises
    ConfigError for one that would change nothing, as the model has a set for each type of layer.
    """
    changed = [name for name in ENTRIES if name in entries]
    found = {**hf, **entries}
    if not changed:
        return found
    check_kinds(hf)
    check_kinds(found)
    own = parameters_of(hf)
    if _sets(own) and changed != ["rope_parameters"]:
        raise ConfigError(
            f"model.overrides: {changed[-1]} changes nothing in this model, whose rope_parameters are a set for each "
            f"type of layer: give all of them, with your change, as rope_parameters={own!r}"
        )
    if not own or _sets(own):
        return found
    block, place = own, "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    if given := [name for name in BLOCKS if name in entries]:
        block = {name: own[name] for name in APART if name in own} | (entries[given[0]] or {"rope_type": "default"})
        place = "rope_parameters" if given == ["rope_parameters"] else place
    moved = {name: entries[name] for name in APART if name in entries and name in block}
    return {name: x for name, x in found.items() if name not in (*BLOCKS, *moved)} | {place: block | moved}


def read(hf: dict[str, Any], theta: float = 10000.0, partial: bool = False, by_type: bool = False) -> dict[str, Any]:
    """The ModelConfig fields of the rotary positions; `theta` is the family's base, where config.json has none.

    Some families rotate some dimensions of each head (`partial`), some differently by type of layer (`by_type`).
    Raises ConfigError for a scaling that is not computed, or one with an entry missing.
    """
    parameters = parameters_of(hf)
    per_type = _sets(parameters)
    base = theta if hf.get("rope_theta") is None else number("rope_theta", hf["rope_theta"], above=1)
    if not per_type:
        if parameters is hf.get("rope_scaling") and hf.get("rope_parameters"):
            used = {"rope_theta": base, "partial_rotary_factor": hf.get("partial_rotary_factor") or 1.0} | parameters
            lost = {name: hf["rope_parameters"].get(name) or used[name] for name in APART if name not in parameters}
            if any(used[name] != value for name, value in lost.items()):
                refuse("rope_scaling", parameters, f"with {lost} in it, as rope_parameters is not read beside it")
        fraction = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
        fraction = None if kind_of(parameters) == "proportional" else fraction
        return {"rope": _rope(parameters, hf, base), "rotary_fraction": _fraction(fraction, partial)}
    if not by_type:
        refuse("rope_parameters", parameters, "one set of parameters for all layers")
    if unknown := sorted(set(per_type) - set(TYPES)):
        refuse("rope_parameters", unknown, " and ".join(TYPES))
    full, local = (_rope(per_type.get(name, {}), hf, base) for name in TYPES)
    for typed in per_type.values():
        if kind_of(typed) != "proportional":
            _fraction(typed.get("partial_rotary_factor"), partial)
    if changes := [rope.kind for rope in (local, full) if rope.changes_beyond is not None]:
        refuse("rope_type", changes[0], f"{changes[0]} with one set of parameters for all layers")
    return {"rope": full, "local_rope": None if local == full else local}


def max_positions(hf: dict[str, Any]) -> int | None:
    """The longest rows that a config.json is made for, its scaling included; None where it does not say."""
    hf = hf.get("text_config") or hf
    # Of Command R, whose other entry is smaller, and Kimi Linear; of GPT-2; and of MPT.
    most = hf.get("model_max_length") or hf.get(MOST) or hf.get("n_positions") or hf.get("max_seq_len")
    if most is None:
        return None
    most = number(MOST, most, above=0)
    given = parameters_of(hf)
    ropes = [given, *_sets(given).values()]
    stretched = [
        (rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or most)
        for rope in ropes
        if kind_of(rope) != "default"
    ]
    return int(max([most, *stretched]))


def unread(hf: dict[str, Any]) -> list[str]:
    """A line for each number among the rotary parameters of a config.json that is not used, factors of 1 excepted."""
    hf = hf.get("text_config") or hf
    given, read = parameters_of(hf), (*READ, *READ_BESIDE.get(str(hf.get("model_type")), ()))
    numbers = {
        name: value
        for parameters in (given, *_sets(given).values())
        for name, value in parameters.items()
        if name not in read and isinstance(value, int | float) and not isinstance(value, bool) and value != 1
    }
    in_vllm = {"attn_factor": "; vLLM multiplies the cosines and sines of yarn by it, and so computes another model"}
    unused = "among the rotary parameters is not used, as in transformers"
    return [f"config.json: {name} = {value:g} {unused}{in_vllm.get(name, '')}" for name, value in numbers.items()]


def write(config) -> dict[str, Any]:
    """The entries of transformers 5 (or 4, where all layers are alike) for the rotary positions of a ModelConfig."""
    if config.local_rope is not None:
        return write_sets(config)
    entries: dict[str, Any] = {"rope_theta": config.rope.theta, "rope_scaling": None}
    if config.rope.kind != "default":
        entries["rope_scaling"] = _scaling(config.rope)
    if config.rope.kind == "dynamic":
        entries["max_position_embeddings"] = config.rope.original_max_positions
    if config.rotary_fraction != 1.0:
        entries["partial_rotary_factor"] = config.rotary_fraction
    return entries


def write_sets(config) -> dict[str, Any]:
    """The entries of a ModelConfig with a set of parameters for each type of layer, also where all layers are alike."""
    found = {}
    for name, rope in zip(TYPES, (config.rope, config.local_rope or config.rope), strict=True):
        own = dict(config.full_fields) if name == TYPES[0] else {}
        fraction = own.get("rotary_fraction", config.rotary_fraction)
        partial = {} if fraction == 1.0 else {"partial_rotary_factor": fraction}
        found[name] = {"rope_theta": rope.theta, **_scaling(rope), **partial}
    return {"rope_parameters": found}


def fractions_of(hf: dict[str, Any]) -> tuple[float, float]:
    """The part of each head that is rotated, of the TYPES of layers in `rope_parameters`."""
    full, local = (_fraction(sets_of(hf).get(name, {}).get("partial_rotary_factor"), True) for name in TYPES)
    return full, local


def _fraction(value, partial: bool) -> float:
    fraction = 1.0 if value is None else number("partial_rotary_factor", value)
    if fraction != 1.0 and not (partial and 0 < fraction < 1):
        refuse("partial_rotary_factor", value, "numbers above 0, up to 1" if partial else "1.0")
    return fraction


def kind_of(parameters: dict[str, Any]) -> str:
    """The `rope_type` by which one set of parameters scales positions, `default` for not at all."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def _rope(parameters: dict[str, Any], hf: dict[str, Any], theta: float) -> Rope:
    """The rotary positions that a set of parameters of config.json describes, of base `theta` unless it has its own."""
    kind = kind_of(parameters)
    if kind not in KINDS:
        refuse("rope_type", kind, ", ".join(KINDS))
    if parameters.get("rope_theta") is not None:
        theta = number("rope_theta", parameters["rope_theta"], above=1)
    if kind == "default":
        return Rope(theta)

    def scaling(entry: str, default: float | None = None) -> float:
        value = parameters.get(entry)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json: rope_type {kind} needs the entry {entry!r}, which is missing.")
        return number(entry, value, above=0)

    name = "original_max_position_embeddings"
    original = hf.get(name) if parameters.get(name) is None else parameters[name]
    original = None if original is None else int(number(name, original, above=0))
    if kind == "linear":
        return Rope(theta, kind, scaling("factor"))
    if kind == "proportional":
        fraction = _fraction(parameters.get("partial_rotary_factor"), True)
        return Rope(theta, kind, scaling("factor", 1.0), fraction=fraction)
    most = None if hf.get(MOST) is None else int(number(MOST, hf[MOST], above=0))
    if kind == "dynamic":
        if most is None:
            raise ConfigError("config.json: rope_type dynamic needs the entry 'max_position_embeddings'.")
        return Rope(theta, kind, scaling("factor"), most)
    if original is None and most is None:
        raise ConfigError(
            f"config.json: rope_type {kind} needs the entry 'original_max_position_embeddings', which is missing."
        )
    original = original or most or 0
    if kind == "llama3":
        factors = (scaling("factor"), original, scaling("low_freq_factor"), scaling("high_freq_factor"))
        if factors[2] > factors[3]:
            refuse("low_freq_factor", factors[2], f"numbers up to high_freq_factor = {factors[3]:g}")
        return Rope(theta, kind, *factors)
    factor = scaling("factor", None if most is None else most / original)
    if kind == "longrope":
        short, long = (_factors(parameters, name) for name in ("short_factor", "long_factor"))
        stretch = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        stretch = scaling("attention_factor", stretch)
        return Rope(theta, kind, factor, original, attention_factor=stretch, short_factors=short, long_factors=long)
    return Rope(
        theta,
        kind,
        factor,
        original,
        beta_fast=scaling("beta_fast", 32.0),
        beta_slow=scaling("beta_slow", 1.0),
        attention_factor=_attention_factor(parameters, factor),
        truncate=bool(parameters.get("truncate", True)),
        mscale_all_dim=number("mscale_all_dim", parameters.get("mscale_all_dim") or 0.0),
    )


def _factors(parameters: dict[str, Any], entry: str) -> tuple[float, ...]:
    """The numbers of longrope's frequencies; raises ConfigError for anything else than a list of numbers above 0."""
    given = parameters.get(entry)
    if not isinstance(given, list | tuple) or not given:
        refuse(f"{entry} of rope_type longrope", given, "a list of numbers above 0, one of each frequency")
    return tuple(number(f"{entry} of rope_type longrope", x, above=0) for x in given)


def _attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """The factor of cosines and sines under yarn: `attention_factor`, or worked out from `mscale` or the factor."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return number("attention_factor", parameters["attention_factor"], above=0)
    top, bottom = (number(entry, parameters.get(entry) or 0.0) for entry in ("mscale", "mscale_all_dim"))
    return scale(top) / scale(bottom) if top and bottom else scale(1.0)


def _scaling(rope: Rope) -> dict[str, Any]:
    entries: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        entries["factor"] = rope.factor
    if rope.kind == "proportional":
        entries["partial_rotary_factor"] = rope.fraction
    if rope.kind in ("llama3", "yarn", "longrope"):
        entries["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        entries |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "longrope":
        entries |= {"attention_factor": rope.attention_factor}
        entries |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "truncate")
        entries |= {name: getattr(rope, name) for name in names}
        entries |= {"mscale_all_dim": rope.mscale_all_dim} if rope.mscale_all_dim else {}
    return entries
