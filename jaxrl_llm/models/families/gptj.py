"""GPT-J (Wang and Komatsuzaki, 2021): attention and feed-forward side by side behind one layer norm, and the first
dimensions of each head rotated, neighbours together."""

from typing import Any

from jaxrl_llm.models.families import decoder, gpt2
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import positive, refuse, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gptj"
# Transformers has no class for steps.
ARCHITECTURE = {"lm": "GPTJForCausalLM", "score": "GPTJForSequenceClassification", "step": ""}
LAYER = "transformer.h.{layer}."
KEYS = (
    TensorName("embed/weight", "transformer.wte.weight"),
    *layer_norm("norm", "transformer.ln_f"),
    *linear("head", "lm_head"),
    *linear("score", "score"),
    *layer_norm("layers/input_norm", f"{LAYER}ln_1"),
    *maps("layers/attention", f"{LAYER}attn", decoder.QKVO | {"o": "out_proj"}),
    *maps("layers/mlp", f"{LAYER}mlp", {"up": "fc_in", "down": "fc_out"}),
)
DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "rotary_dim": 64}  # for entries that are left out


def unused_tensors(config: ModelConfig) -> set[str]:
    """The masks that older files hold, and the bias of the head where there is another one."""
    return decoder.masks_of(f"{LAYER}attn", config) | ({"lm_head.bias"} if config.head != "lm" else set())


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = decoder.with_ffn(DEFAULTS | renamed(hf, gpt2.NAMES))
    width, heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
    if hf.get("tie_word_embeddings"):
        refuse("tie_word_embeddings", True, "false")
    rotated = positive(hf, "rotary_dim")
    if rotated % 2 or rotated > width // heads:
        refuse("rotary_dim", rotated, f"even numbers up to n_embd / n_head = {width // heads}")
    own = {
        **decoder.LAYER_NORMS,
        "mlp_bias": True,
        "head_bias": True,
        "rope_interleaved": True,
        "rotary_head_dim": rotated,
        "parallel_ffn": "shared",
        "ffn_gate": False,
        "lora_names": (("o", "out"),),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"rotary_dim": config.rotated_size, **decoder.unsaid_ffn(config, base, "n_inner")}
    if base is None:
        own["n_positions"] = 2048
    without = (*decoder.ROTARY_AND_GROUPED, *(("max_position_embeddings",) if base is None else ()))
    return decoder.from_own_names(config, base, gpt2.NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own, without)
