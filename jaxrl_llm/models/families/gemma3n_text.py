"""Gemma 3n, text models: streams of hidden states and low-rank residuals (models/altup.py), per-layer embeddings, last
layers that read the keys and values of earlier ones, and first layers whose feed-forwards use few channels.

Images and sound are not read: a folder of the type `gemma3n` is read as its text part (models/files/text_part.py).
"""

from typing import Any

from jaxrl_llm.models.families import decoder, gemma, gemma2, gemma3_text, gemma4_text, layer_types
from jaxrl_llm.models.families.decoder import LAYER, TensorName, maps
from jaxrl_llm.models.families.entries import computed, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gemma3n_text"
ARCHITECTURE = "Gemma3n"
ALTUP = {"modality": "modality_router", "prediction": "prediction_coefs", "correction": "correction_coefs"}
KEYS = (
    *gemma2.KEYS,
    *decoder.QK_NORMS,
    *gemma4_text.PER_LAYER,
    TensorName("layers/altup/norm/scale", f"{LAYER}altup.router_norm.weight"),
    *maps("layers/altup", f"{LAYER}altup", ALTUP),
    TensorName("layers/altup/scale", f"{LAYER}altup.correct_output_scale"),
    *maps("layers/laurel", f"{LAYER}laurel", {"left": "linear_left", "right": "linear_right"}),
    TensorName("layers/laurel/norm/scale", f"{LAYER}laurel.post_laurel_norm.weight"),
    TensorName("streams/spread/kernel", "model.altup_projections.{layer}.weight", transpose=True),
    TensorName("streams/gather/kernel", "model.altup_unembed_projections.{layer}.weight", transpose=True),
)
# For entries that are left out.
DEFAULTS = {
    **gemma.DEFAULTS,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
COMPUTED = {"altup_active_idx": 0, "altup_correct_scale": True}  # the only values that are
EVERY = 5  # of so many layers the last has full attention
SPARSE, SPARSITY = 10, 0.95  # the first layers, where there are more, and the share of their channels that are 0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = gemma3_text.with_ropes(DEFAULTS | hf)
    computed(hf, COMPUTED)
    layers, sizes = positive(hf, "num_hidden_layers"), hf.get("intermediate_size")
    if isinstance(sizes, list | tuple):
        if len(sizes) != layers or len(set(sizes)) != 1:
            refuse("intermediate_size", sizes, f"one number for all of the {layers} layers")
        hf |= {"intermediate_size": sizes[0]}
    if (streams := positive(hf, "altup_num_inputs")) < 2:
        refuse("altup_num_inputs", streams, "integers from 2")
    windows = layer_types.read(hf, lambda layer: (layer + 1) % EVERY != 0)
    own = {
        **gemma4_text.common(hf, windows),
        **_sparsity(hf),
        "per_layer_width": positive(hf, "hidden_size_per_layer_input"),
        "per_layer_vocab": positive(hf, "vocab_size_per_layer_input"),
        "altup_streams": streams,
        "laurel_rank": positive(hf, "laurel_rank"),
    }
    rope = {"by_type": True}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=gemma2.ACTIVATIONS, rope=rope)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    pattern = [config.ffn_sparsity if layer in config.sparse_layers else 0.0 for layer in range(config.layers)]
    own: dict[str, Any] = {
        **layer_types.write(config, base),
        "attention_bias": config.attention_bias,
        "final_logit_softcapping": config.logit_softcap,
        "intermediate_size": [config.ffn] * config.layers,
        "activation_sparsity_pattern": pattern,
    }
    if base is None:
        own |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "num_kv_shared_layers": config.shared_layers,
            "hidden_size_per_layer_input": config.per_layer_width,
            "vocab_size_per_layer_input": config.per_layer_vocab,
            "altup_num_inputs": config.altup_streams,
            "laurel_rank": config.laurel_rank,
        }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=gemma3_text.with_ropes)


unused_tensors = gemma4_text.unused_tensors  # keys and values of the layers that share those of others


def _sparsity(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of the layers whose feed-forwards use few channels."""
    layers = positive(hf, "num_hidden_layers")
    pattern = hf.get("activation_sparsity_pattern")
    if pattern is None:
        pattern = [SPARSITY * (layers > SPARSE and layer < SPARSE) for layer in range(layers)]
    shares = {x for x in pattern if x} if isinstance(pattern, list | tuple) else {None}
    if len(pattern) != layers or len(shares) > 1 or not all(isinstance(x, float) and 0 < x < 1 for x in shares):
        refuse("activation_sparsity_pattern", pattern, f"0 or one share below 1 for each of the {layers} layers")
    if not shares:
        return {}
    return {"ffn_sparsity": shares.pop(), "sparse_layers": tuple(layer for layer in range(layers) if pattern[layer])}
