"""LLaVA and PaliGemma as they are published: entries that config.json leaves out, and names of tensors."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlavaConfig, LlavaNextConfig, LlavaOnevisionConfig, PaliGemmaConfig

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.model import load_model
from tests.models.images import VISION, make_vision_oracle

CLASSES = {x.model_type: x for x in (LlavaConfig, LlavaNextConfig, LlavaOnevisionConfig, PaliGemmaConfig)}
SIGLIP = {
    "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
CLIP = {
    "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
}  # fmt: skip
# As files of the hub have them, but for entries that say nothing about the network.
PUBLISHED = {
    "llava-1.5-7b-hf": {
        "model_type": "llava", "image_token_index": 32_000, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32_064}, "vision_config": CLIP,
        "vision_feature_select_strategy": "default",
    },
    "llava-v1.6-mistral-7b-hf": {
        "model_type": "llava_next", "image_token_index": 32_000, "vision_feature_layer": -2, "vision_config": CLIP,
        "text_config": {
            "model_type": "mistral", "intermediate_size": 14_336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32_064,
        },
    },
    "llava-onevision-qwen2-0.5b-ov-hf": {  # 27 patches of 14 pixels a side, and 6 pixels that no patch has
        "model_type": "llava_onevision", "image_token_index": 151_646, "vision_config": SIGLIP,
        "text_config": {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True,
            "vocab_size": 152_000,
        },
        "tie_word_embeddings": False, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
    "paligemma2-3b-pt-224": {  # whose heads are those of any Gemma 2
        "model_type": "paligemma", "image_token_index": 257_152, "projection_dim": 2304,
        "text_config": {"model_type": "gemma2", "hidden_size": 2304, "num_key_value_heads": 4, "vocab_size": 257_216},
        "vision_config": {name: x for name, x in SIGLIP.items() if name != "image_size"} | {"num_hidden_layers": 27},
    },
    # What files of transformers leave out is what a class has, whatever it is part of.
    "a SigLIP of the usual shape": {
        "model_type": "llava", "text_config": {"model_type": "qwen2"}, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False},
    },
    "a CLIP of the usual shape": {"model_type": "llava_next", "image_token_index": 31_999, "text_config": {},
                                  "vision_config": {"model_type": "clip_vision_model"}},
    "a Qwen2 of the usual shape": {"model_type": "llava_onevision", "text_config": {},
                                   "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
    "a Gemma of the usual shape": {
        "model_type": "paligemma", "text_config": {"model_type": "gemma"}, "projection_dim": 3072,
        "image_token_index": 255_999, "vision_config": {"vision_use_head": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_entries_that_are_left_out_are_those_of_transformers(name):
    hf = PUBLISHED[name]
    theirs, family = CLASSES[hf["model_type"]](**hf), family_of(hf)
    config, text, encoder = family.to_config(hf), theirs.text_config, theirs.vision_config
    entries = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    found = [config.vocab_size, config.width, config.layers, config.ffn, config.heads, config.kv_heads]
    assert found == [getattr(text, entry) for entry in (*entries, "num_key_value_heads")]
    assert (config.tie_embeddings, config.norm_eps) == (theirs.tie_word_embeddings, text.rms_norm_eps)
    own = config.vision.encoder
    found = [own.image_size, own.patch_size, own.width, own.layers, own.ffn, own.heads, own.norm_eps]
    entries = ("image_size", "patch_size", *entries[1:], "layer_norm_eps")
    assert found == [getattr(encoder, entry) for entry in entries]
    assert {"gelu_tanh": "gelu_pytorch_tanh"}.get(own.activation, own.activation) == encoder.hidden_act
    assert config.vision.image_token == theirs.image_token_id
    assert all(family.to_config(family.from_config(config, base)) == config for base in (hf, None))


def test_an_encoder_that_config_json_leaves_out_is_refused():
    hf = {name: x for name, x in PUBLISHED["llava-1.5-7b-hf"].items() if name != "vision_config"}
    with pytest.raises(ConfigError, match=r"vision_config.model_type = None .* clip_vision_model, .*, pixtral"):
        family_of(hf).to_config(hf)


@pytest.mark.parametrize("family", ["llava_next", "paligemma"])
def test_all_names_of_tensors_are_read(tmp_path, family):
    """As published files name them, before and since version 5 of transformers, also beside buffers of old files."""
    oracle = make_vision_oracle(family, VISION[family]())
    oracle.save_pretrained(tmp_path)
    expected = load_model(tmp_path).params
    tensors = {name: x.detach().numpy() for name, x in oracle.named_parameters()}
    before = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    before["model.vision_tower.vision_model.embeddings.position_ids"] = np.arange(9)[None]
    for names in (tensors, before):
        save_file(names, tmp_path / "model.safetensors")
        jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, expected)
