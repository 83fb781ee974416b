"""What the families share: the table of tensor names and the entries of config.json, in both directions.

Every family is a pre-norm decoder with rotary positions and gated feed-forward layers; a family's own file says only
what it adds. Files of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) read alike.
"""

import dataclasses
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.transformer import ModelConfig, RopeScaling


class Key(NamedTuple):
    """One parameter: its path here, its tensor's name in the files, and whether the matrix is stored transposed."""

    path: str  # under `layers` the parameter is one array, stacked over layers
    tensor: str  # with {layer} where each layer has its own
    transpose: bool = False


def linear(path: str, tensor: str) -> tuple[Key, Key]:
    """The keys of a linear map: files hold `[out, in]`, kernels here are `[in, out]`."""
    return Key(f"{path}/kernel", f"{tensor}.weight", transpose=True), Key(f"{path}/bias", f"{tensor}.bias")


KEYS = (
    Key("embed/weight", "model.embed_tokens.weight"),
    Key("layers/input_norm/scale", "model.layers.{layer}.input_layernorm.weight"),
    *linear("layers/attention/q", "model.layers.{layer}.self_attn.q_proj"),
    *linear("layers/attention/k", "model.layers.{layer}.self_attn.k_proj"),
    *linear("layers/attention/v", "model.layers.{layer}.self_attn.v_proj"),
    *linear("layers/attention/o", "model.layers.{layer}.self_attn.o_proj"),
    Key("layers/post_attention_norm/scale", "model.layers.{layer}.post_attention_layernorm.weight"),
    *linear("layers/mlp/gate", "model.layers.{layer}.mlp.gate_proj"),
    *linear("layers/mlp/up", "model.layers.{layer}.mlp.up_proj"),
    *linear("layers/mlp/down", "model.layers.{layer}.mlp.down_proj"),
    Key("norm/scale", "model.norm.weight"),
    Key("head/kernel", "lm_head.weight", transpose=True),
    Key("score/kernel", "score.weight", transpose=True),
)

HEADS = {"lm": "ForCausalLM", "score": "ForSequenceClassification"}
SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}
DTYPES = ("float32", "bfloat16", "float16")


def refuse(feature: str, value: Any, supported: str):
    """Raises ConfigError for a checkpoint whose `feature` has a value that the network does not compute."""
    raise ConfigError(f"config.json: {feature} = {value!r} is not supported; supported: {supported}.")


def to_config(hf: dict[str, Any], family: str, own: dict[str, Any], overrides: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json; `own` are the family's entries, `overrides` the caller's fields.

    Raises ConfigError for an entry that is missing or that the network does not compute, and an unknown override.
    """
    _refuse_unsupported(hf)
    sizes = {field: _positive(hf, entry) for field, entry in SIZES.items()}
    heads = sizes["heads"]
    kv_heads = heads if hf.get("num_key_value_heads") is None else _positive(hf, "num_key_value_heads")
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"divisors of num_attention_heads = {heads}")
    if hf.get("head_dim") is None and sizes["width"] % heads:
        refuse("hidden_size", sizes["width"], f"multiples of num_attention_heads = {heads}, or an entry head_dim")
    theta, scaling = _rope(hf)
    fields = {
        **sizes,
        "kv_heads": kv_heads,
        "head_dim": sizes["width"] // heads if hf.get("head_dim") is None else _positive(hf, "head_dim"),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "init_scale": float(hf.get("initializer_range", 0.02)),
        "head": _head(hf, family, overrides.get("head")),
        **own,
    }
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"the model has no setting {name!r}; it has {', '.join(sorted(known))}.")
        if name in ("dtype", "param_dtype") and value not in DTYPES:
            raise ConfigError(f"{name} = {value!r} is not one of {', '.join(DTYPES)}.")
    return ModelConfig(**{**fields, **overrides})


def from_config(config: ModelConfig, base: dict[str, Any] | None, family: str, model_type: str, own: dict[str, Any]):
    """The config.json of a net: the entries of `base` (or defaults) with the net's shape over them.

    Without a `base`, rope and dtype entries are those of transformers 4, which version 5 reads as well.
    """
    hf = dict(base) if base is not None else {"hidden_act": "silu", "max_position_embeddings": 32768, "use_cache": True}
    hf |= {entry: getattr(config, field) for field, entry in SIZES.items()}
    hf |= {
        "model_type": model_type,
        "architectures": [family + HEADS[config.head]],
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_scale,
        **own,
    }
    if base is None or _rope(base) != (config.rope_theta, config.rope_scaling):
        hf.pop("rope_parameters", None)
        hf |= {"rope_theta": config.rope_theta, "rope_scaling": _rope_entries(config.rope_scaling)}
    if config.head == "score":
        hf |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return hf


def _refuse_unsupported(hf: dict[str, Any]) -> None:
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", hf["hidden_act"], "silu")
    if hf.get("quantization_config"):
        refuse("quantization_config", hf["quantization_config"], "unquantized float32, bfloat16 and float16 weights")
    if hf.get("use_sliding_window"):
        refuse("use_sliding_window", True, "full attention in every layer")
    other = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if other:
        refuse("layer_types", other, "full_attention in every layer")


def _positive(hf: dict[str, Any], entry: str) -> int:
    if entry not in hf:
        raise ConfigError(f"config.json has no entry {entry}, which the model's shape needs.")
    value = hf[entry]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(entry, value, "integers from 1")
    return value


def _head(hf: dict[str, Any], family: str, wanted: str | None) -> str:
    """The head of the checkpoint, or the `wanted` one."""
    if wanted is not None and wanted not in HEADS:
        raise ConfigError(f"head = {wanted!r} is not one of {', '.join(HEADS)}.")
    names = {family + suffix: head for head, suffix in HEADS.items()}
    architecture = (hf.get("architectures") or [family + HEADS["lm"]])[0]
    if architecture not in names:
        refuse("architectures", hf["architectures"], ", ".join(names))
    if names[architecture] == "score":
        labels = hf.get("num_labels") or len(hf.get("id2label") or (0, 1))
        if labels != 1:
            refuse("num_labels", labels, "1 (one score)")
    return wanted or names[architecture]


def _rope(hf: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions, from entries of transformers 4 or 5."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        refuse("rope_parameters", rope, "one set of parameters for all layers")
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        refuse("partial_rotary_factor", partial, "1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        refuse("rope_type", kind, "default, llama3")
    try:
        return theta, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigError(f"config.json: rope_type llama3 needs the entry {error}, which is missing.") from error


def _rope_entries(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
