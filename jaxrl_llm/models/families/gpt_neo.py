"""GPT-Neo (EleutherAI, 2021): learned positions, layer norms, scores that nothing scales, and a window in every other
layer."""

from typing import Any

from jaxrl_llm.models.families import decoder, gpt2, layer_types
from jaxrl_llm.models.families.decoder import maps
from jaxrl_llm.models.families.entries import positive, refuse, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gpt_neo"
# The tensors of transformers' class for steps have other names than the table.
ARCHITECTURE = {"lm": "GPTNeoForCausalLM", "score": "GPTNeoForSequenceClassification", "step": ""}
LAYER = "transformer.h.{layer}."
KEYS = (
    *gpt2.around("transformer."),
    *maps("layers/attention", f"{LAYER}attn.attention", decoder.QKVO | {"o": "out_proj"}),
    *maps("layers/mlp", f"{LAYER}mlp", {"up": "c_fc", "down": "c_proj"}),
)
NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "window_size": 256,
    "attention_types": [[["global", "local"], 12]],
    "tie_word_embeddings": True,
}  # for entries that are left out
TYPES = {"global": layer_types.FULL, "local": layer_types.SLIDING}


def unused_tensors(config: ModelConfig) -> set[str]:
    """The masks that older files hold."""
    return decoder.masks_of(f"{LAYER}attn.attention", config)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = decoder.with_ffn(DEFAULTS | renamed(hf, NAMES))
    entry = "attention_layers" if hf.get("attention_layers") else "attention_types"
    try:
        types = [kind for kinds, times in hf["attention_types"] for _ in range(times) for kind in kinds]
        types = [TYPES[kind] for kind in hf.get("attention_layers") or types]
    except (TypeError, ValueError, KeyError):
        form = "" if entry == "attention_layers" else "lists of [types, times], the types "
        refuse(entry, hf[entry], f"{form}global and local")
    own = {
        **decoder.LAYER_NORMS,
        "learned_positions": positive(hf, "max_position_embeddings"),
        "rotary_fraction": 0.0,
        "attention_output_bias": True,
        "mlp_bias": True,
        "query_scale": 1.0,
        **layer_types.read(hf | {"layer_types": types}, lambda _: False, size="window_size"),
        "ffn_gate": False,
        "lora_names": (("o", "out"), ("down", "c_proj")),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    types = ["local" if layer in config.sliding_layers else "global" for layer in range(config.layers)]
    own: dict[str, Any] = {"max_position_embeddings": config.learned_positions}
    if config.sliding_layers:
        own["window_size"] = config.sliding_window
    if base is None:
        own |= {"attention_types": [[types, 1]], "attention_layers": types}
    own |= decoder.unsaid_ffn(config, base, "intermediate_size")
    return decoder.from_own_names(
        config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own, decoder.ROTARY_AND_GROUPED
    )
