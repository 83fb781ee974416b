"""OPT (arXiv 2205.01068) and Galactica (arXiv 2211.09085): learned positions from row 2 on, and layer norms; the
embedding of OPT-350M is narrower than the model, and its layers norm the sums that they make."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import positive, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "opt"
ARCHITECTURE = "OPT"
FIRST = 2  # the row of the first position; those before it are of padding


def _keys(root: str) -> tuple[TensorName, ...]:
    """The table of files whose names begin with `root`."""
    layer = f"{root}.layers.{{layer}}."
    return (
        TensorName("embed/weight", f"{root}.embed_tokens.weight"),
        TensorName("positions/weight", f"{root}.embed_positions.weight"),
        *linear("project_in", f"{root}.project_in"),
        *linear("project_out", f"{root}.project_out"),
        *layer_norm("norm", f"{root}.final_layer_norm"),
        *decoder.ENDS[2:],
        *layer_norm("layers/input_norm", f"{layer}self_attn_layer_norm"),
        *layer_norm("layers/attention_out_norm", f"{layer}self_attn_layer_norm"),
        *layer_norm("layers/post_attention_norm", f"{layer}final_layer_norm"),
        *layer_norm("layers/mlp_out_norm", f"{layer}final_layer_norm"),
        *maps("layers/attention", f"{layer}self_attn", decoder.QKVO | {"o": "out_proj"}),
        *linear("layers/mlp/up", f"{layer}fc1"),
        *linear("layers/mlp/down", f"{layer}fc2"),
    )


KEYS = _keys("model.decoder")
OTHER_KEYS = (_keys("decoder"),)  # of older files
NAMES = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act", "init_std": "initializer_range"}
DEFAULTS = {
    "hidden_act": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    before, biases, width = bool(hf["do_layer_norm_before"]), bool(hf["enable_bias"]), positive(hf, "hidden_size")
    embed_width = width if hf.get("word_embed_proj_dim") is None else positive(hf, "word_embed_proj_dim")
    own = {
        **decoder.LAYER_NORMS,
        "norm_scale": bool(hf["layer_norm_elementwise_affine"]),
        "norm_eps": 1e-5,
        "norms": "pre" if before else "sum",
        "final_norm": before and not hf.get("_remove_final_layer_norm"),
        "embed_width": 0 if embed_width == width else embed_width,
        "learned_positions": positive(hf, "max_position_embeddings") + FIRST,
        "first_position": FIRST,
        "rotary_fraction": 0.0,
        **dict.fromkeys(decoder.BIASES, biases),
        "ffn_gate": False,
        "lora_names": (("o", "out"), ("up", "fc1"), ("down", "fc2")),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    before = config.norms == "pre"
    own = {
        "max_position_embeddings": config.learned_positions - FIRST,
        "word_embed_proj_dim": config.embed_width or config.width,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.final_norm,
        "enable_bias": config.attention_bias,
        "layer_norm_elementwise_affine": config.norm_scale,
    }
    without = (*decoder.ROTARY_AND_GROUPED, "rms_norm_eps")
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own, without)
