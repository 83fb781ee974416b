"""VideoLLaMA 3 (arXiv 2501.13106): a SigLIP with rotary positions, which reads images of any size, a token for each
patch by two linear maps, and a Qwen2.5; videos are not read."""

from typing import Any

from jaxrl_llm.models.families import lfm2_vl, llava, qwen2, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import maps
from jaxrl_llm.models.families.entries import entries_of_sizes, number, positive
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "video_llama_3"
ARCHITECTURE = {"lm": "VideoLlama3ForConditionalGeneration", "score": "VideoLlama3ForSequenceClassification"}
TEXTS = {qwen2.MODEL_TYPE: qwen2}
KEYS = llava.as_modules(
    qwen2.KEYS,
    (
        *(key for key in siglip.keys("vision_model.") if "/position/" not in key.path),
        *maps("vision/encoder/merger", "projector.readout", {"fc1": "0", "fc2": "2"}),
    ),
)
DEFAULTS = {"image_token_id": 151_655}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text |= {"tie_word_embeddings": llava.tied(hf)}
    encoder = _encoder(hf, positive(text, "hidden_size"))
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides)


def _encoder(hf: dict[str, Any], width: int) -> PatchRowsConfig:
    """The encoder of a config.json whose decoder has this width; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    sizes = qwen_vl.rotary_sizes(entries, lfm2_vl.SIZES)
    rope = entries.get("rope_parameters") or {}
    return PatchRowsConfig(
        **sizes,
        frames=0,
        merge=1,
        norm="layer",
        norm_eps=number("vision_config.layer_norm_eps", entries.get("layer_norm_eps", 1e-6)),
        last_norm=True,
        gated=False,
        activation=siglip.read_activation(entries),
        attention_adapter="out",
        patch_bias=True,
        rotary_base=number("vision_config.rope_theta", rope.get("rope_theta", 10000.0), above=1),
        merger="two_maps",
        merger_ffn=width,
        merger_bias=True,
        merger_norm="",
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": f"{MODEL_TYPE}_vision", **qwen_vl.axial(encoder)}),
            **entries_of_sizes(encoder, lfm2_vl.SIZES),
            "layer_norm_eps": encoder.norm_eps,
            "hidden_act": siglip.activation_entry(encoder.activation),
            "initializer_range": encoder.init_scale,
        },
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
