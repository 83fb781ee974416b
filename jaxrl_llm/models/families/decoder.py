"""The common ground of families: the table of tensor names and the entries of config.json, in both directions.

Every family is a decoder with rotary positions and gated feed-forward layers; a family's own file holds only its
additions. Files of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) read alike.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import rotary
from jaxrl_llm.models.families.entries import number, positive, refuse, renamed
from jaxrl_llm.models.files import quantized
from jaxrl_llm.models.model_config import ModelConfig


class TensorName(NamedTuple):
    """One parameter: its path here, its tensor's name in the files, and whether the matrix is stored transposed.

    Parameters with the same tensor are ranges of its rows, in the order of the table, of its `columns`, or
    `interleaved`: each has every n-th number of its last dimension. A vector may be stored `as_row` of a matrix, and
    the matrices of experts as ranges of rows of one, `expert_rows`, in place of one array stacked over them. A table
    may be many tensors, `parts` of equal numbers of its rows, of which the last may have fewer. `integers` are
    numbers here.
    """

    path: str  # under `layers` the parameter is one array, stacked over layers
    # With {layer} where each layer has its own, {expert} where each expert has, {head} where each head, and {part}.
    tensor: str
    transpose: bool = False
    interleaved: bool = False
    columns: bool = False
    as_row: bool = False
    expert_rows: bool = False
    parts: int = 0
    integers: bool = False


def linear(path: str, tensor: str) -> tuple[TensorName, TensorName]:
    """The keys of a linear map: files hold `[out, in]`, kernels here are `[in, out]`."""
    return TensorName(f"{path}/kernel", f"{tensor}.weight", transpose=True), TensorName(
        f"{path}/bias", f"{tensor}.bias"
    )


def layer_norm(path: str, tensor: str) -> tuple[TensorName, TensorName]:
    """The keys of a layer norm, with a bias that an RMS norm lacks."""
    return TensorName(f"{path}/scale", f"{tensor}.weight"), TensorName(f"{path}/shift", f"{tensor}.bias")


def norms(path: str, start: str, words: Mapping[str, str]) -> tuple[TensorName, ...]:
    """The keys of RMS norms: the scale at `path`NAME, in the files `start`WORD.weight, of each pair of `words`."""
    return tuple(TensorName(f"{path}{name}/scale", f"{start}{word}.weight") for name, word in words.items())


def maps(path: str, block: str, words: Mapping[str, str]) -> tuple[TensorName, ...]:
    """The keys of the linear maps of a block: `path/NAME`, in the files `block.WORD`, of each pair of `words`."""
    return tuple(key for name, word in words.items() for key in linear(f"{path}/{name}", f"{block}.{word}"))


LAYER = "model.layers.{layer}."
QKVO = {name: f"{name}_proj" for name in "qkvo"}
GATED = {name: f"{name}_proj" for name in ("gate", "up", "down")}
ENDS = (
    TensorName("embed/weight", "model.embed_tokens.weight"),
    TensorName("norm/scale", "model.norm.weight"),
    TensorName("head/kernel", "lm_head.weight", transpose=True),
    *linear("score", "score"),
    *linear("score/hidden", "score.0"),  # of step heads with a hidden layer
    *linear("score/logits", "score.2"),
)
PRE_NORMS = norms(
    "layers/", LAYER, {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
)
ATTENTION = maps("layers/attention", f"{LAYER}self_attn", QKVO)
QK_NORMS = norms("layers/attention/", f"{LAYER}self_attn.", {"q_norm": "q_norm", "k_norm": "k_norm"})
FEED_FORWARD = maps("layers/mlp", f"{LAYER}mlp", GATED)
KEYS = (*ENDS, *PRE_NORMS, *ATTENTION, *FEED_FORWARD)


def experts(block: str, words: Mapping[str, str] = GATED, router: str = "gate") -> tuple[TensorName, ...]:
    """The keys of a mixture of experts, named `block.experts.{expert}.WORD.weight`, and of its `router`."""
    each = f"{LAYER}{block}.experts.{{expert}}"
    return (
        TensorName("layers/mlp/router/kernel", f"{LAYER}{block}.{router}.weight", transpose=True),
        *(TensorName(f"layers/mlp/experts/{x}/kernel", f"{each}.{word}.weight", True) for x, word in words.items()),
    )


def stacked_experts(block: str, router: str = "gate") -> tuple[TensorName, ...]:
    """The keys of a mixture of experts whose matrices the files hold stacked, gate and up in one tensor `[E,2F,D]`."""
    return (
        TensorName("layers/mlp/router/kernel", f"{LAYER}{block}.{router}.weight", transpose=True),
        TensorName("layers/mlp/experts/gate/kernel", f"{LAYER}{block}.experts.gate_up_proj", transpose=True),
        TensorName("layers/mlp/experts/up/kernel", f"{LAYER}{block}.experts.gate_up_proj", transpose=True),
        TensorName("layers/mlp/experts/down/kernel", f"{LAYER}{block}.experts.down_proj", transpose=True),
    )


def expert_tables(
    common: Iterable[TensorName], block: str = "mlp", words: Mapping[str, str] = GATED, stacked: str = ""
) -> tuple[tuple[TensorName, ...], tuple[tuple[TensorName, ...]]]:
    """KEYS and OTHER_KEYS of a family with `common` keys and those of experts, which transformers 5 writes stacked."""
    return (*common, *experts(block, words)), ((*common, *stacked_experts(stacked or block)),)


HEADS = {"lm": "ForCausalLM", "score": "ForSequenceClassification", "step": "ForTokenClassification"}
SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}
DTYPES = ("float32", "bfloat16", "float16")
# Fields of a ModelConfig that config.json says nothing about.
SETTINGS = (
    "dtype", "param_dtype", "fp32_head", "freeze_router", "attention", "remat", "lora", "quantize", "scan_layers",
    "vision_training", "layer_groups", "frozen_leaves", "qat", "quantize_experts", "mlp_tile_tokens",
    "matmul_dtype",
)  # fmt: skip


SILU = {"silu": "silu", "swish": "silu"}
# Of feed-forwards without a gate.
PLAIN = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", **SILU,
}  # fmt: skip
BIASES = ("attention_bias", "attention_output_bias", "mlp_bias")  # of all maps of layers
ATTENTION_BIAS = {"attention_output_bias": "attention_bias", "attention_bias": "attention_bias"}
EXPERTS = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
TYPES = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
LAYER_NORMS = {"norm_centred": True, "norm_bias": True}
# Entries that `from_config` writes, and that families with learned positions and without grouped queries do not have.
ROTARY_AND_GROUPED = (*rotary.ENTRIES, "num_key_value_heads", "head_dim")
IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def plain_name(activation: str, usual: str) -> str:
    """The name of an activation of PLAIN, the `usual` one of the family where it means that; raises ConfigError for
    another activation."""
    if activation not in PLAIN.values():
        refuse("hidden_act", activation, ", ".join(PLAIN))
    return next(name for name in (usual, *PLAIN) if PLAIN[name] == activation)


def with_own_names(hf: dict[str, Any], names: dict[str, str], without: Iterable[str] = ()) -> dict[str, Any]:
    """The entries of config.json under a family's own names, of which `names` gives the common ones, `without` some
    that it does not have."""
    own = {common: name for name, common in names.items()}
    return renamed({entry: value for entry, value in hf.items() if entry not in without}, own)


def reciprocal(x: float, given: float) -> float:
    """1 / x, as the `given` number where it is that, and not as another in its last digit."""
    return given if 1 / given == x else 1 / x


def settings(config: ModelConfig) -> dict[str, Any]:
    """The fields that config.json says nothing about, as overrides of `to_config`."""
    return {name: getattr(config, name) for name in SETTINGS}


def describing(families: Iterable[ModuleType], config: ModelConfig) -> ModuleType | None:
    """The first of the families whose config.json describes a net of this shape, None where none does."""
    for module in families:
        with contextlib.suppress(ConfigError):  # a family does not describe what it refuses
            if module.to_config(module.from_config(config, None), **settings(config)) == config:
                return module
    return None


def with_ffn(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with four times the width as the channels of feed-forwards, where they are null or left out."""
    return hf if hf.get("intermediate_size") else hf | {"intermediate_size": 4 * positive(hf, "hidden_size")}


def unsaid_ffn(config: ModelConfig, base: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """The entry of channels, called `name` in files, as `base` has it where `with_ffn` gives the net's; else none."""
    if base is None or base.get(name) or config.ffn != 4 * config.width:
        return {}
    return {"intermediate_size": base.get(name)}


def masks_of(attention: str, config: ModelConfig) -> set[str]:
    """The names of the masks that older files hold of each layer's `attention`."""
    names = (f"{attention}.bias", f"{attention}.masked_bias")
    return {name.format(layer=layer) for layer in range(config.layers) for name in names}


def read_fields(hf: dict[str, Any], entries: Mapping[str, str]) -> dict[str, Any]:
    """The ModelConfig fields that are an entry each, of which `entries` gives the names.

    They are integers from 1, numbers from 0, or bools, which are false where the entry is left out. Raises ConfigError
    for other values, and for more experts of a token than there are.
    """
    fields: dict[str, Any] = {}
    for field, entry in entries.items():
        kind = TYPES[field]
        if kind is bool:
            fields[field] = bool(hf.get(entry, False))
        else:
            fields[field] = positive(hf, entry) if kind is int else number(entry, hf.get(entry))
    chosen = fields.get("experts_per_token", 0)
    if chosen > fields.get("experts", chosen):
        refuse(entries["experts_per_token"], chosen, f"up to {entries['experts']} = {fields['experts']}")
    return fields


def write_fields(config: ModelConfig, entries: Mapping[str, str]) -> dict[str, Any]:
    """The entries of config.json that `read_fields` reads."""
    return {entry: getattr(config, field) for field, entry in entries.items()}


def attention_biases(hf: dict[str, Any]) -> dict[str, bool]:
    """The ModelConfig fields where `attention_bias` is of queries, keys and values, and of the output too."""
    return read_fields(hf, ATTENTION_BIAS)


def to_config(
    hf: dict[str, Any],
    family: str | dict[str, str],
    own: dict[str, Any],
    overrides: dict[str, Any],
    *,
    activations: dict[str, str] = SILU,
    rope: dict[str, Any] | None = None,
) -> ModelConfig:
    """The ModelConfig of a config.json; `own` are the family's entries, `overrides` the caller's fields.

    `family` is what its architectures' names begin with, or the name of the architecture with each head. `activations`
    are the names of `hidden_act` that the family may have, `rope` are arguments of `rotary.read`.
    Raises ConfigError for an entry that is missing or that the network does not compute, and an unknown override.
    """
    quantized.check(quantized.entry_of(hf))
    if hf.get("use_bidirectional_attention"):
        refuse("use_bidirectional_attention", hf["use_bidirectional_attention"], "causal attention (null)")
    sizes = {field: positive(hf, entry) for field, entry in SIZES.items()}
    heads = sizes["heads"]
    kv_heads = heads if hf.get("num_key_value_heads") is None else positive(hf, "num_key_value_heads")
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"divisors of num_attention_heads = {heads}")
    if hf.get("head_dim") is None and sizes["width"] % heads:
        refuse("hidden_size", sizes["width"], f"multiples of num_attention_heads = {heads}, or an entry head_dim")
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or next(iter(activations))
    if activation not in activations:
        refuse("hidden_act", activation, ", ".join(activations))
    fields = {
        **sizes,
        "kv_heads": kv_heads,
        "head_dim": sizes["width"] // heads if hf.get("head_dim") is None else positive(hf, "head_dim"),
        "activation": activations[activation],
        "norm_eps": number("rms_norm_eps", hf.get("rms_norm_eps", 1e-6)),
        **rotary.read(hf, **rope or {}),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "init_scale": number("initializer_range", hf.get("initializer_range", 0.02)),
        "head": head_of(hf, family, overrides.get("head")),
        **own,
    }
    unrotated = len(fields.get("unrotated_layers", ())) == fields["layers"] or not fields.get("rotary_fraction", 1.0)
    if unrotated and fields["rope"].kind != "default":
        refuse("rope_type", fields["rope"].kind, "default, as no layer of this model has rotary positions")
    rotated = fields.get("rotary_head_dim") or int(fields["head_dim"] * fields.get("rotary_fraction", 1.0))
    if not unrotated and rotated % 2 and rotated == (fields.get("rotary_head_dim") or fields["head_dim"]):
        name = "qk_rope_head_dim" if fields.get("rotary_head_dim") else "head_dim"
        refuse(name, rotated, "even numbers, as dimensions are rotated two by two")
    longrope = {"short_factor": fields["rope"].short_factors, "long_factor": fields["rope"].long_factors}
    for entry, factors in longrope.items():
        if fields["rope"].kind == "longrope" and len(factors) != rotated // 2:
            refuse(f"{entry} of rope_type longrope", list(factors), f"{rotated // 2} numbers, one of each frequency")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"the model has no setting {name!r}; it has {', '.join(sorted(known))}.")
        if name in ("dtype", "param_dtype") and value not in DTYPES:
            raise ConfigError(f"{name} = {value!r} is not one of {', '.join(DTYPES)}.")
    return ModelConfig(**{**fields, **overrides})


def from_config(
    config: ModelConfig,
    base: dict[str, Any] | None,
    family: str | dict[str, str],
    model_type: str,
    own: dict[str, Any],
    rope: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    write: Callable[[ModelConfig], dict[str, Any]] = rotary.write,
) -> dict[str, Any]:
    """The config.json of a net: the entries of `base` (or defaults) with the net's shape over them.

    `rope` spells the meaning of rotary entries out, where the family reads them its own way, and `write` gives them.
    Without a `base`, rope and dtype entries are those of transformers 4, which version 5 reads as well, and ids
    of tokens are null: it would take the family's own, which may be outside the vocabulary.
    """
    defaults = {"hidden_act": "silu", "max_position_embeddings": 32768, "use_cache": True, **dict.fromkeys(IDS)}
    hf = dict(base) if base is not None else defaults
    hf |= write_fields(config, SIZES)
    if hf.get("head_dim", ...) is not None or config.head_dim * config.heads != config.width:
        hf["head_dim"] = config.head_dim
    hf |= {
        "model_type": model_type,
        "architectures": [architectures(family)[config.head]],
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_scale,
        **own,
    }
    read = None if base is None else rotary.read(rope(base), config.rope.theta, partial=True, by_type=True)
    if read is None or any(getattr(config, name) != value for name, value in read.items()):
        hf = {name: value for name, value in hf.items() if name not in rotary.ENTRIES} | write(config)
    count = {"lm": 0, "score": 1, "step": 2}[config.head]
    if count and len(hf.get("id2label") or ()) != count:  # else they have names of their own
        labels = [f"LABEL_{index}" for index in range(count)]  # transformers' own; 0 is wrong and 1 right
        hf["id2label"] = {str(index): label for index, label in enumerate(labels)}
        hf["label2id"] = {label: index for index, label in enumerate(labels)}
    return hf | {"num_labels": count} if count else hf


def from_own_names(
    config: ModelConfig,
    base: dict[str, Any] | None,
    names: dict[str, str],
    defaults: dict[str, Any],
    family: str | dict[str, str],
    model_type: str,
    own: dict[str, Any],
    without: Iterable[str] = (),
) -> dict[str, Any]:
    """`from_config` of a family that has its own `names` for common entries, and `without` some of these.

    `defaults` are those of entries that are left out, under the common names: what is in them is written where there is
    no `base`.
    """
    common = None if base is None else renamed(base, names)
    if base is None and (usual := defaults.get("hidden_act")):
        own = own | {"hidden_act": plain_name(config.activation, usual)}
    hf = from_config(config, common, family, model_type, own, rope=lambda base: defaults | base)
    if base is None and "partial_rotary_factor" in defaults:
        hf["partial_rotary_factor"] = config.rotary_fraction
    return with_own_names(hf, names, without)


def class_of(hf: dict[str, Any] | None, family: str, other: str) -> str:
    """The word that the architectures of a config.json begin with: the name of the `family`, or that of the `other`
    one, whose classes transformers has for it."""
    named = ((hf or {}).get("architectures") or [family])[0]
    return other if named.startswith(other) else family


def architectures(family: str | dict[str, str]) -> dict[str, str]:
    """The name of the architecture with each head, of a family's ARCHITECTURE; those of two labels are named alike.

    A head that is not supported has the name "".
    """
    if isinstance(family, str):
        return {head: family + suffix for head, suffix in HEADS.items()}
    return {**family, "step": family.get("step", family["score"].replace(HEADS["score"], HEADS["step"]))}


def head_of(hf: dict[str, Any], family: str | dict[str, str], wanted: str | None) -> str:
    """The head of the checkpoint, or the `wanted` one; raises ConfigError for an architecture of another family."""
    if wanted is not None and wanted not in HEADS:
        raise ConfigError(f"head = {wanted!r} is not one of {', '.join(HEADS)}.")
    names = {name: head for head, name in architectures(family).items() if name}
    if wanted is not None and wanted not in names.values():
        raise ConfigError(f"models of this type have no head {wanted!r} here; they have {', '.join(names.values())}.")
    architecture = (hf.get("architectures") or list(names))[0]
    if architecture not in names:
        refuse("architectures", hf["architectures"], ", ".join(names))
    own = names[architecture]
    if own != "lm":
        count, meaning = {"score": (1, "one score"), "step": (2, "wrong and right")}[own]
        labels = hf.get("num_labels") or len(hf.get("id2label") or (0, 1))
        if labels != count:
            refuse("num_labels", labels, f"{count} ({meaning})")
        if wanted not in (None, own):
            raise ConfigError(
                f"architectures = {hf['architectures']!r} has the head {own}, and {wanted} is asked for: it "
                f"scores, as the reward {'prm' if own == 'step' else 'model'}:PATH, and writes no text; a new head is "
                "put on a language model"
            )
        if not hf.get("token_classification_bias", True):
            refuse("token_classification_bias", False, "true")
    return wanted or own
