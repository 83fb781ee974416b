"""BLOOM (arXiv 2211.05100): scores that fall with distance (ALiBi) in place of positions, embeddings behind a norm."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import positive, renamed, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "bloom"
# The tensors of transformers' class for steps have other names than the table.
ARCHITECTURE = {"lm": "BloomForCausalLM", "score": "BloomForSequenceClassification", "step": ""}


def _keys(root: str) -> tuple[TensorName, ...]:
    """The table of files whose names begin with `root`."""
    layer = f"{root}h.{{layer}}."
    return (
        TensorName("embed/weight", f"{root}word_embeddings.weight"),
        *layer_norm("embed_norm", f"{root}word_embeddings_layernorm"),
        *layer_norm("norm", f"{root}ln_f"),
        TensorName("head/kernel", "lm_head.weight", transpose=True),
        *linear("score", "score"),
        *layer_norm("layers/input_norm", f"{layer}input_layernorm"),
        *layer_norm("layers/post_attention_norm", f"{layer}post_attention_layernorm"),
        *maps("layers/attention", f"{layer}self_attention", {"qkv": "query_key_value", "o": "dense"}),
        *maps("layers/mlp", f"{layer}mlp", {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}),
    )


KEYS = _keys("transformer.")
OTHER_KEYS = (_keys(""),)  # of BigScience's own files
NAMES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps"}
DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}  # for entries that are left out
SLOPES = 8.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    hf |= {"hidden_size": hf["n_embed"]} if "n_embed" in hf else {}  # of BigScience's own files
    unset(hf, "apply_residual_connection_post_layernorm")
    own = {
        **decoder.LAYER_NORMS,
        "embed_norm": "norm",
        "alibi": SLOPES,
        "rotary_fraction": 0.0,
        **dict.fromkeys(decoder.BIASES, True),
        "joint_qkv": "heads",
        "ffn_gate": False,
    }
    hf |= {"intermediate_size": 4 * positive(hf, "hidden_size")}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations={"gelu_pytorch_tanh": "gelu_tanh"})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {} if base is None or "n_embed" not in base else {"n_embed": config.width}
    without = (*decoder.ROTARY_AND_GROUPED, "intermediate_size")
    without = (*without, "hidden_act", "max_position_embeddings") if base is None else without
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own, without)
