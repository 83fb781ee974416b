"""Llama 3.2 Vision (arXiv 2407.21783, section 7; the model_type is `mllama`): a Llama with layers whose attention reads
the tiles of images, which are no tokens, and an encoder that sees the tiles of an image together."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import decoder, llava, siglip
from jaxrl_llm.models.families.decoder import LAYER, TensorName, layer_norm, linear, maps, norms
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.cross_attention import CrossAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.tiled import TiledConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "mllama"
ARCHITECTURE = {"lm": "MllamaForConditionalGeneration", "score": "", "step": ""}  # transformers has no other
TEXT_KEYS = (
    *decoder.KEYS,
    *maps("layers/cross", f"{LAYER}cross_attn", decoder.QKVO),
    *norms("layers/cross/", f"{LAYER}cross_attn.", {"q_norm": "q_norm", "k_norm": "k_norm"}),
    TensorName("layers/cross/attention_gate", f"{LAYER}cross_attn_attn_gate"),
    TensorName("layers/cross/mlp_gate", f"{LAYER}cross_attn_mlp_gate"),
)
ENCODER, TOWER = "vision/encoder/", "vision_model."


def _layers(stack: str, tensors: str) -> tuple[TensorName, ...]:
    """The keys of a stack of the encoder's layers."""
    here, layer = f"{ENCODER}{stack}/", f"{TOWER}{tensors}.layers.{{layer}}."
    return (
        *layer_norm(f"{here}norm1", f"{layer}input_layernorm"),
        *maps(f"{here}attention", f"{layer}self_attn", decoder.QKVO),
        TensorName(f"{here}gate1", f"{layer}gate_attn"),
        *layer_norm(f"{here}norm2", f"{layer}post_attention_layernorm"),
        *maps(f"{here}mlp", f"{layer}mlp", {"fc1": "fc1", "fc2": "fc2"}),
        TensorName(f"{here}gate2", f"{layer}gate_ffn"),
    )


VISION_KEYS = (
    *linear(f"{ENCODER}patch", f"{TOWER}patch_embedding"),
    TensorName(f"{ENCODER}class_token", f"{TOWER}class_embedding"),
    TensorName(f"{ENCODER}position", f"{TOWER}gated_positional_embedding.embedding"),
    TensorName(f"{ENCODER}places/weight", f"{TOWER}gated_positional_embedding.tile_embedding.weight"),
    TensorName(f"{ENCODER}places/gate", f"{TOWER}gated_positional_embedding.gate"),
    TensorName(f"{ENCODER}before/weight", f"{TOWER}pre_tile_positional_embedding.embedding.weight"),
    TensorName(f"{ENCODER}before/gate", f"{TOWER}pre_tile_positional_embedding.gate"),
    *layer_norm(f"{ENCODER}first_norm", f"{TOWER}layernorm_pre"),
    *_layers("layers", "transformer"),
    *layer_norm(f"{ENCODER}norm", f"{TOWER}layernorm_post"),
    TensorName(f"{ENCODER}behind/weight", f"{TOWER}post_tile_positional_embedding.embedding.weight"),
    TensorName(f"{ENCODER}behind/gate", f"{TOWER}post_tile_positional_embedding.gate"),
    *_layers("global_layers", "global_transformer"),
    *linear("vision/projector/proj", "multi_modal_projector"),
)
KEYS = llava.on_the_hub(TEXT_KEYS, VISION_KEYS)
MODULE_KEYS = llava.as_modules(TEXT_KEYS, VISION_KEYS)
OTHER_KEYS = (MODULE_KEYS,)
MORE_TOKENS = 8  # rows of the embedding behind the vocabulary, of which the image token's is the first
# For entries that are left out.
TEXT_DEFAULTS = {
    "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "rms_norm_eps": 1e-5,
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}  # fmt: skip
THETA = 500_000.0
DEFAULT = TiledConfig()
# The shapes of grids of up to 4 tiles.
RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
# Fields of a TiledConfig that have other names than a SigLIP's, or that one of these does not have.
SIZES = {"heads": "attention_heads", "global_layers": "num_global_layers", "tiles": "max_num_tiles"}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = hf.get("text_config") or {}
    if text.get("model_type", "mllama_text_model") != "mllama_text_model":
        refuse("text_config.model_type", text["model_type"], "mllama_text_model")
    shared = ("architectures", "quantization_config")
    text = TEXT_DEFAULTS | text | {name: hf.get(name) for name in shared}
    if text.get("tie_word_embeddings"):
        refuse("text_config.tie_word_embeddings", True, "false, as the embedding has more rows than the head")
    layers, reading = positive(text, "num_hidden_layers"), text["cross_attention_layers"]
    if not isinstance(reading, list) or not reading or set(reading) - set(range(layers)):
        refuse("text_config.cross_attention_layers", reading, f"a list of layers, of 0 to {layers - 1}")
    token = hf.get("image_token_index", 128_256)
    if not isinstance(token, int) or not 0 <= token < positive(text, "vocab_size") + MORE_TOKENS:
        refuse("image_token_index", token, "ids of tokens")
    own = {
        "mixers": tuple(CrossAttention if layer in reading else Attention for layer in range(layers)),
        "unpredicted": MORE_TOKENS,
        "vision": VisionConfig(_encoder(hf.get("vision_config") or {}), 1, token, projector="linear"),
        "tie_embeddings": False,
    }
    return decoder.to_config(text, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def _encoder(hf: dict[str, Any]) -> TiledConfig:
    own = {entry: getattr(DEFAULT, field) for field, entry in SIZES.items()} | hf
    ratios, reading = hf.get("supported_aspect_ratios") or RATIOS, hf.get("intermediate_layers_indices")
    reading = list(DEFAULT.read_layers) if reading is None else reading
    sizes = {field: positive(own, entry) for field, entry in SIZES.items()}
    names = {"num_attention_heads": own["attention_heads"], "layer_norm_eps": own.get("norm_eps", DEFAULT.norm_eps)}
    sides = {entry: own[entry] for entry in ("image_size", "patch_size") if entry in own}
    for entry, side in sides.items():
        if isinstance(side, list | tuple) and len(set(side)) != 1:
            refuse(f"vision_config.{entry}", side, "squares")
        sides[entry] = side[0] if isinstance(side, list | tuple) else side
    read = siglip.read({**own, **names, **sides}, DEFAULT)
    if not isinstance(reading, list) or sorted(set(reading)) != reading or set(reading) - set(range(read.layers)):
        refuse("vision_config.intermediate_layers_indices", reading, f"ascending layers, of 0 to {read.layers - 1}")
    grids = [list(ratio) for ratio in ratios]
    if grids != shapes(sizes["tiles"]):
        refuse("vision_config.supported_aspect_ratios", ratios, f"{shapes(sizes['tiles'])} with max_num_tiles")
    encoder = dataclasses.replace(read, **sizes, ratios=len(ratios), read_layers=tuple(reading))
    assert isinstance(encoder, TiledConfig)
    if hf.get("vision_output_dim", encoder.features_width) != encoder.features_width:
        refuse("vision_config.vision_output_dim", hf["vision_output_dim"], f"{encoder.features_width}")
    return encoder


def shapes(tiles: int) -> list[list[int]]:
    """The shapes of grids of so many tiles at most, in the order of their numbers, from 1."""
    return [[high, wide] for high in range(1, tiles + 1) for wide in range(1, tiles // high + 1)]


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; raises ConfigError for one without such a vision part."""
    vision = config.vision
    if vision is None or not isinstance(vision.encoder, TiledConfig):
        refuse("vision_config", None, "models whose encoder is that of Llama 3.2 Vision")
    base, encoder = base or {}, vision.encoder
    given = base.get("text_config")
    reading = [layer for layer, kind in enumerate(config.layer_configs) if kind.mixer is CrossAttention]
    # transformers takes no null for this one.
    own = {"cross_attention_layers": reading} | ({"bos_token_id": 0} if given is None else {})
    text = decoder.from_config(
        config, None if given is None else TEXT_DEFAULTS | given, ARCHITECTURE, "mllama_text_model", own,
        rope=lambda text: {"rope_theta": THETA} | text,
    )  # fmt: skip
    head = text.pop("architectures")
    text |= {name: x for name, x in (given or {}).items() if name == "architectures"}
    written = siglip.write(vision)
    sizes = {entry: getattr(encoder, field) for field, entry in SIZES.items()}
    renamed = {"norm_eps": written.pop("layer_norm_eps")}
    del written["num_attention_heads"]
    sides = {name: x for name, x in (base.get("vision_config") or {}).items() if name in ("image_size", "patch_size")}
    return {
        **base,
        "model_type": MODEL_TYPE,
        "architectures": head,
        "image_token_index": vision.image_token,
        "text_config": text,
        "vision_config": {
            **(base.get("vision_config") or {"model_type": "mllama_vision_model"}),
            **written, **sizes, **renamed, **sides,
            "supported_aspect_ratios": shapes(encoder.tiles),
            "intermediate_layers_indices": list(encoder.read_layers),
            "vision_output_dim": encoder.features_width,
        },
    }  # fmt: skip
