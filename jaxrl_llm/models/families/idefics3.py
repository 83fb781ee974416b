"""Idefics3 (arXiv 2408.12637): SigLIP tiles, squares of patches projected linearly, and a Llama that reads them."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.families.decoder import TensorName, linear
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "idefics3"
ARCHITECTURE = {"lm": "Idefics3ForConditionalGeneration", "score": "Idefics3ForSequenceClassification"}
TOWER = "model.vision_model."
LAYER = f"{TOWER}encoder.layers.{{layer}}."


def _norm(path: str, tensor: str) -> tuple[TensorName, TensorName]:
    return TensorName(f"{path}/scale", f"{tensor}.weight"), TensorName(f"{path}/shift", f"{tensor}.bias")


VISION_KEYS = (
    *linear("vision/encoder/patch", f"{TOWER}embeddings.patch_embedding"),
    TensorName("vision/encoder/position/weight", f"{TOWER}embeddings.position_embedding.weight"),
    *_norm("vision/encoder/layers/norm1", f"{LAYER}layer_norm1"),
    *linear("vision/encoder/layers/attention/q", f"{LAYER}self_attn.q_proj"),
    *linear("vision/encoder/layers/attention/k", f"{LAYER}self_attn.k_proj"),
    *linear("vision/encoder/layers/attention/v", f"{LAYER}self_attn.v_proj"),
    *linear("vision/encoder/layers/attention/out", f"{LAYER}self_attn.out_proj"),
    *_norm("vision/encoder/layers/norm2", f"{LAYER}layer_norm2"),
    *linear("vision/encoder/layers/mlp/fc1", f"{LAYER}mlp.fc1"),
    *linear("vision/encoder/layers/mlp/fc2", f"{LAYER}mlp.fc2"),
    *_norm("vision/encoder/norm", f"{TOWER}post_layernorm"),
    *linear("vision/projector/proj", "model.connector.modality_projection.proj"),
)
KEYS = (
    *(key._replace(tensor=key.tensor.replace("model.", "model.text_model.", 1)) for key in llama.KEYS),
    *VISION_KEYS,
)
# What entries mean that are left out.
DEFAULTS = {"image_token_id": 128257, "scale_factor": 2, "tie_word_embeddings": False}
TEXT = "llama"  # the model_type of the decoder
TEXT_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
# Fields of a SiglipConfig that are an integer each, and their entries.
SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "channels": "num_channels",
}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    return config_of(hf, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; raises ConfigError for one without vision."""
    return entries_of(config, base, ARCHITECTURE, MODEL_TYPE)


def config_of(hf: dict[str, Any], architecture: dict[str, str], overrides: dict[str, Any]) -> ModelConfig:
    """`to_config` of the families that have this shape."""
    hf = DEFAULTS | hf
    text = hf.get("text_config") or {}
    if text.get("model_type", TEXT) != TEXT:
        refuse("text_config.model_type", text["model_type"], TEXT)
    shared = ("architectures", "tie_word_embeddings", "quantization_config")
    text = {**TEXT_SIZES, **text, **{name: hf.get(name) for name in shared}}
    vision = VisionConfig(_siglip(hf.get("vision_config") or {}), positive(hf, "scale_factor"), hf["image_token_id"])
    if vision.encoder.side % vision.shuffle:
        refuse("scale_factor", vision.shuffle, f"divisors of the {vision.encoder.side} patches along a side of a tile")
    if not isinstance(vision.image_token, int) or not 0 <= vision.image_token < positive(text, "vocab_size"):
        refuse("image_token_id", vision.image_token, "ids of tokens")
    return decoder.to_config(text, architecture, {**llama.own_fields(text), "vision": vision}, overrides)


def _siglip(hf: dict[str, Any]) -> SiglipConfig:
    default = SiglipConfig()
    hf = {entry: getattr(default, field) for field, entry in SIZES.items()} | hf
    sizes = {field: positive(hf, entry) for field, entry in SIZES.items()}
    for entry, divisor in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
        if hf[entry] % hf[divisor]:
            refuse(f"vision_config.{entry}", hf[entry], f"multiples of {divisor} = {hf[divisor]}")
    activation = hf.get("hidden_act", "gelu_pytorch_tanh")
    if activation not in ACTIVATIONS:
        refuse("vision_config.hidden_act", activation, ", ".join(ACTIVATIONS))
    return SiglipConfig(
        **sizes,
        norm_eps=number("vision_config.layer_norm_eps", hf.get("layer_norm_eps", default.norm_eps)),
        activation=ACTIVATIONS[activation],
        init_scale=number("vision_config.initializer_range", hf.get("initializer_range", default.init_scale)),
    )


def entries_of(
    config: ModelConfig, base: dict[str, Any] | None, architecture: dict[str, str], model_type: str
) -> dict[str, Any]:
    """`from_config` of the families that have this shape."""
    vision = config.vision
    if vision is None:
        refuse("vision_config", None, "models with a vision part")
    base = base or {}
    text_base = base.get("text_config")
    text = llama.from_config(config, None if text_base is None else TEXT_SIZES | text_base)
    # Of these the whole model's are read, and its decoder's stay as they are.
    text = {name: x for name, x in text.items() if name not in ("architectures", "tie_word_embeddings")}
    text |= {name: x for name, x in (text_base or {}).items() if name not in text}
    names = {name: entry for entry, name in ACTIVATIONS.items()}
    encoder = {
        **(base.get("vision_config") or {"model_type": f"{model_type}_vision"}),
        **{entry: getattr(vision.encoder, field) for field, entry in SIZES.items()},
        "layer_norm_eps": vision.encoder.norm_eps,
        "hidden_act": names[vision.encoder.activation],
        "initializer_range": vision.encoder.init_scale,
    }
    return {
        **base,
        "model_type": model_type,
        "architectures": [architecture[config.head]],
        "image_token_id": vision.image_token,
        "scale_factor": vision.shuffle,
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": text,
        "vision_config": encoder,
    }
