"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): attention and feed-forward side by side, behind a layer
norm each, and queries, keys and values of each head in one range of a tensor."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gpt_neox"
# The tensors of transformers' class for steps have other names than the table.
ARCHITECTURE = {"lm": "GPTNeoXForCausalLM", "score": "GPTNeoXForSequenceClassification", "step": ""}
LAYER = "gpt_neox.layers.{layer}."


def _keys(head: str) -> tuple[TensorName, ...]:
    """The table of names with a `head`."""
    return (
        TensorName("embed/weight", "gpt_neox.embed_in.weight"),
        *layer_norm("norm", "gpt_neox.final_layer_norm"),
        TensorName("head/kernel", f"{head}.weight", transpose=True),
        *linear("score", "score"),
        *layer_norm("layers/input_norm", f"{LAYER}input_layernorm"),
        *layer_norm("layers/post_attention_norm", f"{LAYER}post_attention_layernorm"),
        *maps("layers/attention", f"{LAYER}attention", {"qkv": "query_key_value", "o": "dense"}),
        *maps("layers/mlp", f"{LAYER}mlp", {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}),
    )


KEYS = _keys("embed_out")
MODULE_KEYS = _keys("lm_head")
OTHER_KEYS = (MODULE_KEYS,)
NAMES = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
DEFAULTS = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_parallel_residual": True,
    "attention_bias": True,
}  # for entries that are left out


def unused_tensors(config: ModelConfig) -> set[str]:
    """The masks that older files hold, and the head where there is another one."""
    head = {"embed_out.weight"} if config.head != "lm" or config.tie_embeddings else set()
    return decoder.masks_of(f"{LAYER}attention", config) | head


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {
        **decoder.LAYER_NORMS,
        **decoder.attention_biases(hf),
        "mlp_bias": True,
        "joint_qkv": "heads",
        "parallel_ffn": "own" if hf["use_parallel_residual"] else "",
        "ffn_gate": False,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN, rope={"partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "use_parallel_residual": bool(config.parallel_ffn)}
    without = ("num_key_value_heads", "head_dim")
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own, without)
