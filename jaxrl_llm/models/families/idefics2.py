"""Idefics2 (arXiv 2405.02246): SigLIP images of any shape, a perceiver, and a Mistral that reads its latents."""

from typing import Any

from jaxrl_llm.models.families import decoder, llava, mistral, siglip
from jaxrl_llm.models.families.decoder import TensorName, maps, norms
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse, sizes_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.perceiver import PerceiverConfig
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "idefics2"
ARCHITECTURE = {"lm": "Idefics2ForConditionalGeneration", "score": "Idefics2ForSequenceClassification"}
CONNECTOR = "model.connector."
RESAMPLER = f"{CONNECTOR}perceiver_resampler."
LAYER = f"{RESAMPLER}layers.{{layer}}."
NORMS = {
    "latent_norm": "input_latents_norm", "patch_norm": "input_context_norm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
KEYS = (
    *(key._replace(tensor=key.tensor.replace("model.", "model.text_model.", 1)) for key in mistral.KEYS),
    *siglip.keys("model.vision_model."),
    *maps("vision/projector", f"{CONNECTOR}modality_projection", decoder.GATED),
    TensorName("vision/projector/latents", f"{RESAMPLER}latents"),
    *norms("vision/projector/layers/", LAYER, NORMS),
    *maps("vision/projector/layers/attention", f"{LAYER}self_attn", decoder.QKVO),
    *maps("vision/projector/layers/mlp", f"{LAYER}mlp", decoder.GATED),
    TensorName("vision/projector/norm/scale", f"{RESAMPLER}norm.weight"),
)
# For entries that are left out.
DEFAULTS = {"image_token_id": 32_001, "tie_word_embeddings": False}
TEXTS = {mistral.MODEL_TYPE: mistral}
TEXT_DEFAULTS = {
    mistral.MODEL_TYPE: {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}  # fmt: skip
ENCODER = SiglipConfig(width=768, heads=12, partly_filled=True)
# Fields of a PerceiverConfig that are an integer each: their entries, and what these are where they are left out.
SIZES = {
    "latents": ("resampler_n_latents", 64),
    "layers": ("resampler_depth", 3),
    "heads": ("resampler_n_heads", 16),
    "kv_heads": ("num_key_value_heads", 4),
    "head_dim": ("resampler_head_dim", 96),
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    text = hf.get("text_config") or {"rms_norm_eps": 1e-5}
    family, text = llava.text_of(hf | {"text_config": text}, TEXTS, TEXT_DEFAULTS)
    vision = VisionConfig(
        siglip.read(hf.get("vision_config") or {}, ENCODER),
        merge=1,
        image_token=siglip.image_token(hf, "image_token_id", text),
        projector="perceiver",
        projector_ffn=positive(text, "intermediate_size"),
        perceiver=_perceiver(hf.get("perceiver_config") or {}, text),
    )
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def _perceiver(hf: dict[str, Any], text: dict[str, Any]) -> PerceiverConfig:
    """The perceiver of a `perceiver_config`; raises ConfigError for another network."""
    computed(hf, {"hidden_act": "silu"}, "perceiver_config: ")
    sizes = sizes_of(hf, SIZES)
    if sizes["heads"] % sizes["kv_heads"]:
        refuse("perceiver_config: num_key_value_heads", sizes["kv_heads"], f"divisors of {sizes['heads']}")
    # Of another width than the decoder's transformers takes all of it to be left out.
    own = hf.get("hidden_size", 4096) == text["hidden_size"]
    eps = (hf if own else text).get("rms_norm_eps", 1e-6)
    return PerceiverConfig(**sizes, norm_eps=number("perceiver_config: rms_norm_eps", eps))


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    vision = siglip.vision_of(config)
    if vision.perceiver is None:
        refuse("perceiver_config", None, "models whose images a perceiver reads")
    given = base or {}
    sizes = {"hidden_size": config.width, "rms_norm_eps": vision.perceiver.norm_eps}
    perceiver = given.get("perceiver_config") or {"model_type": "idefics2_perceiver"}
    own = {
        "model_type": MODEL_TYPE,
        "perceiver_config": perceiver | sizes | entries_of_sizes(vision.perceiver, SIZES),
        "vision_config": (given.get("vision_config") or {"model_type": "idefics2_vision"}) | siglip.write(vision),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, TEXT_DEFAULTS)
