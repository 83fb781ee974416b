"""GPT-2 (OpenAI, 2019): learned positions, layer norms, and linear maps that files hold as they are multiplied."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear
from jaxrl_llm.models.families.entries import positive, renamed, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gpt2"
# The tensors of transformers' class for steps have other names than the table.
ARCHITECTURE = {"lm": "GPT2LMHeadModel", "score": "GPT2ForSequenceClassification", "step": ""}


def around(root: str) -> tuple[TensorName, ...]:
    """The keys of all but attention and feed-forwards, of files whose names begin with `root`."""
    layer = f"{root}h.{{layer}}."
    return (
        TensorName("embed/weight", f"{root}wte.weight"),
        TensorName("positions/weight", f"{root}wpe.weight"),
        *layer_norm("norm", f"{root}ln_f"),
        TensorName("head/kernel", "lm_head.weight", transpose=True),
        *linear("score", "score"),
        *layer_norm("layers/input_norm", f"{layer}ln_1"),
        *layer_norm("layers/post_attention_norm", f"{layer}ln_2"),
    )


def _keys(root: str) -> tuple[TensorName, ...]:
    """The table of files whose names begin with `root`."""
    layer = f"{root}h.{{layer}}."

    def conv1d(path: str, tensor: str) -> tuple[TensorName, TensorName]:
        return TensorName(f"{path}/kernel", f"{layer}{tensor}.weight"), TensorName(
            f"{path}/bias", f"{layer}{tensor}.bias"
        )

    return (
        *around(root),
        *conv1d("layers/attention/qkv", "attn.c_attn"),
        *conv1d("layers/attention/o", "attn.c_proj"),
        *conv1d("layers/mlp/up", "mlp.c_fc"),
        *conv1d("layers/mlp/down", "mlp.c_proj"),
    )


KEYS = _keys("transformer.")
OTHER_KEYS = (_keys(""),)  # of OpenAI's own files
NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "n_positions": 1024,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}  # for entries that are left out


def unused_tensors(config: ModelConfig) -> set[str]:
    """The masks that older files hold."""
    return {name for root in ("", "transformer.") for name in decoder.masks_of(f"{root}h.{{layer}}.attn", config)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(DEFAULTS | renamed(hf, NAMES), ARCHITECTURE, overrides)


def read(
    hf: dict[str, Any], family: dict[str, str], overrides: dict[str, Any], fields: dict[str, Any] | None = None
) -> ModelConfig:
    """The ModelConfig of a `family` with the shape of GPT-2, all of whose entries are there under their common names;
    `fields` are those in which it differs."""
    unset(hf, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    own = {
        **decoder.LAYER_NORMS,
        "learned_positions": positive(hf, "n_positions"),
        "rotary_fraction": 0.0,
        **dict.fromkeys(decoder.BIASES, True),
        "joint_qkv": "blocks",
        "query_scale": None if hf["scale_attn_weights"] else 1.0,
        "ffn_gate": False,
        "lora_names": (("o", "c_proj"), ("down", "c_proj")),
        **(fields or {}),
    }
    return decoder.to_config(decoder.with_ffn(hf), family, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return write(config, base, DEFAULTS, ARCHITECTURE, MODEL_TYPE, {})


def write(
    config: ModelConfig,
    base: dict[str, Any] | None,
    defaults: dict[str, Any],
    family: dict[str, str],
    model_type: str,
    own: dict[str, Any],
) -> dict[str, Any]:
    """The config.json of a net of a `family` with the shape of GPT-2: `base` changed, with the `own` entries."""
    own = {"n_positions": config.learned_positions, "scale_attn_weights": config.query_scale is None, **own}
    own |= decoder.unsaid_ffn(config, base, "n_inner")
    without = (*decoder.ROTARY_AND_GROUPED, *(("max_position_embeddings",) if base is None else ()))
    return decoder.from_own_names(config, base, NAMES, defaults, family, model_type, own, without)
