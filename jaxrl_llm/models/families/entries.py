"""Reading single entries of config.json, and refusing what the network does not compute."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxrl_llm.config import ConfigError

# Entries that are no number, and numbers that are counted with before anything looks at them; null is allowed for all.
KINDS = {
    ((list, tuple), "a list"): (
        "architectures", "layer_types", "mlp_layer_types", "mlp_only_layers", "no_rope_layers", "moe_layers",
        "full_attn_idxs", "layers_block_type", "time_step_limit", "activation_sparsity_pattern",
        "fullatt_block_indexes", "deepstack_visual_indexes", "indexer_types", "mrope_section",
        "supported_aspect_ratios", "kv_source_layers", "compress_ratios", "swiglu_limits", "swiglu_limits_shared",
        "partial_rotary_factors",
    ),
    (dict, "an object"): (
        "rope_parameters", "rope_scaling", "per_layer_config", "quantization_config", "text_config", "vision_config",
        "linear_attn_config", "compress_rates", "attention_other_setting",
    ),
    (str, "a text"): (
        "model_type", "hidden_act", "hidden_activation", "activation", "activation_function", "hybrid_override_pattern",
        "norm_type", "shared_expert_combination_strategy",
    ),
    (int, "an integer"): (
        "first_k_dense_replace", "decoder_sparse_step", "moe_layer_start_index", "moe_layer_end_index",
        "num_nextn_predict_layers",
    ),
}  # fmt: skip
OF_TEXTS = ("architectures", "layer_types", "mlp_layer_types", "layers_block_type")  # lists of them


def sizes_of(entries: Mapping[str, Any], sizes: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Fields that are an integer from 1 each, of `sizes`: their entries, and what these are where they are left out."""
    return {field: positive({entry: size, **entries}, entry) for field, (entry, size) in sizes.items()}


def entries_of_sizes(part: Any, sizes: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """The entries of the fields in `sizes`, as `sizes_of` reads them, of a part of a network."""
    return {entry: getattr(part, field) for field, (entry, _) in sizes.items()}


def check_kinds(hf: dict[str, Any]) -> None:
    """Raises ConfigError for an entry of config.json, or of a part in it, that is of another kind than KINDS says."""
    for (kind, name), entries in KINDS.items():
        for entry in entries:
            value = hf.get(entry)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                refuse(entry, value, name)
    for entry in OF_TEXTS:
        if not all(isinstance(item, str) for item in hf.get(entry) or ()):
            refuse(entry, hf[entry], "a list of texts")
    for layers, parameters in (hf.get("rope_parameters") or {}).items():
        if layers.endswith("_attention") and not isinstance(parameters, dict):
            refuse(f"rope_parameters of {layers}", parameters, "an object")
    for part in ("text_config", "vision_config", "rope_parameters", "rope_scaling"):
        if hf.get(part):
            check_kinds(hf[part])


def computed(hf: Mapping[str, Any], values: Mapping[str, Any], part: str = "") -> None:
    """Raises ConfigError for an entry of another value than its only one that is computed; `part` begins its name."""
    for entry, value in values.items():
        if hf.get(entry, value) != value:
            refuse(f"{part}{entry}", hf[entry], f"{value}")


def unset(hf: Mapping[str, Any], *entries: str) -> None:
    """Raises ConfigError for an entry that says more than false, null or 0."""
    for entry in entries:
        if hf.get(entry):
            refuse(entry, hf[entry], "false")


def first_layers(hf: dict[str, Any], entry: str) -> tuple[int, ...]:
    """The first layers, as many as the entry says; raises ConfigError where they are all."""
    layers, count = positive(hf, "num_hidden_layers"), int(number(entry, 0 if hf[entry] is None else hf[entry]))
    if count >= layers:
        refuse(entry, count, f"numbers below num_hidden_layers = {layers}")
    return tuple(range(count))


def dense_before_sparse(hf: dict[str, Any], first: int) -> int:
    """The number of layers that are dense before those with experts: as `mlp_layer_types` says or, without it, the
    `first` ones.

    Raises ConfigError for other orders of them.
    """
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("mlp_layer_types")
    if types is None:
        return min(first, layers)
    dense = types.index("sparse") if "sparse" in types else layers
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        refuse("mlp_layer_types", types, f"dense layers before sparse ones, {layers} together")
    return dense


def dense_layers(hf: dict[str, Any], first: int) -> tuple[int, ...]:
    """The layers without experts: those that `mlp_layer_types` names or, without it, the `first` ones.

    Raises ConfigError for other types, a list of another length, and one that leaves no layer its experts.
    """
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in range(layers)]
    if len(types) != layers or set(types) - {"dense", "sparse"} or "sparse" not in types:
        refuse("mlp_layer_types", types, f"dense or sparse for each of the {layers} layers, and sparse for one")
    return tuple(layer for layer, kind in enumerate(types) if kind == "dense")


def mlp_types(config) -> list[str]:
    """The `mlp_layer_types` of a ModelConfig."""
    return ["sparse" if kind.experts else "dense" for kind in config.layer_configs]


def mixers_of(hf: dict[str, Any], mixers: Mapping[str, type], kind: Callable[[int], str]) -> tuple[type, ...]:
    """The mixer of each layer by its type, one of the names in `mixers`: that of `layer_types` or, without it, its
    `kind`. Raises ConfigError for other types, and a list of another length."""
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("layer_types") or [kind(layer) for layer in range(layers)]
    if len(types) != layers or set(types) - set(mixers):
        refuse("layer_types", types, f"{' or '.join(mixers)} for each of the {layers} layers")
    return tuple(mixers[kind] for kind in types)


def mixer_types(config, mixers: Mapping[str, type]) -> list[str]:
    """The `layer_types` of a ModelConfig whose layers have these `mixers`; raises ConfigError for others."""
    names = {mixer: name for name, mixer in mixers.items()}
    if others := {kind.mixer.__name__ for kind in config.layer_configs if kind.mixer not in names}:
        refuse("layer_types", sorted(others), f"layers of {' and '.join(mixers)}")
    return [names[kind.mixer] for kind in config.layer_configs]


def renamed(hf: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The entries, those that `names` has under the names there."""
    return {names.get(entry, entry): value for entry, value in hf.items()}


def refuse(feature: str, value: Any, supported: str) -> NoReturn:
    """Raises ConfigError for a checkpoint whose `feature` has a value that the network does not compute."""
    raise ConfigError(f"config.json: {feature} = {value!r} is not supported; supported: {supported}.")


def number(entry: str, value: Any, above: float | None = None) -> float:
    """The value of the entry, a finite number of 0 or more, or `above` that; raises ConfigError for anything else."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or (value < 0 if above is None else value <= above):
        refuse(entry, value, "numbers from 0" if above is None else f"numbers above {above:g}")
    return float(value)


def positive(hf: dict[str, Any], entry: str) -> int:
    """The entry, an integer from 1; raises ConfigError for anything else."""
    if entry not in hf:
        raise ConfigError(f"config.json has no entry {entry}, which the model's shape needs.")
    value = hf[entry]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(entry, value, "integers from 1")
    return value
