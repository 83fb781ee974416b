"""Tiny random models with vision, made by transformers, and rows with images for them."""

import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Cohere2VisionConfig,
    DeepseekVLConfig,
    Exaone4_5_Config,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm5NextConfig,
    Glm46VConfig,
    GlmOcrConfig,
    Idefics2Config,
    Idefics3Config,
    InternVLConfig,
    Kimi_K25Config,
    Lfm2VlConfig,
    Lfm3VlConfig,
    LightOnOcrConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    MiniMaxM3VLConfig,
    Mistral3Config,
    MistralLarge4Config,
    MllamaConfig,
    Ovis2Config,
    PaliGemmaConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen4ExpConfig,
    SmolVLMConfig,
    VideoLlama3Config,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from jaxrl_llm.algorithms.batch import Images, Inputs
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig, patch_rows
from jaxrl_llm.models.vision.row_images import count_tiles
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.oracles import EXPERTS, SHAPE, UNTRAINED, VARIANTS, VOCAB, added_gradients, in_files

IMAGE_TOKEN = 90  # no document has it as text
TILE = (24, 24, 3)
TILE_TOKENS = 9  # 6 x 6 patches, 2 x 2 of which are a token
ENCODER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": TILE[0],
    "patch_size": 4,
    "initializer_range": 0.15,
}
PARTS: dict[str, Any] = {
    "text_config": {**SHAPE, "model_type": "llama", "rope_theta": 10000.0},
    "vision_config": ENCODER,
    "image_token_id": IMAGE_TOKEN,
}
TILE_ENCODER = ENCODER | {"attention_bias": True, "layer_scale_init_value": 0.4}  # of InternVL
# Two layers with windows of 2 x 2 tokens, and one in which patches see their image.
ROW_ENCODER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "depth": 3,
    "num_heads": 3,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": SHAPE["hidden_size"],
    "initializer_range": 0.15,
}
# Of Qwen2-VL: patches see their image in all layers, and `hidden_size` is the decoder's.
PLAIN_ENCODER: dict[str, Any] = {
    "embed_dim": 24,
    "mlp_ratio": 2,
    "depth": 3,
    "num_heads": 3,
    "patch_size": 4,
    "hidden_size": SHAPE["hidden_size"],
    "initializer_range": 0.15,
}
# Four layers, of which the first and the third are added to the decoder's, and 5 x 5 learned positions.
DEEP_ENCODER: dict[str, Any] = {
    **{name: x for name, x in ROW_ENCODER.items() if name not in ("window_size", "fullatt_block_indexes")},
    "depth": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
# With features added behind its layers.
DEEP_TEXT = {
    **SHAPE,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
# Half of a head's dimensions are rotated.
PARTIAL_MROPE = {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
# Of Qwen3.5: nothing of it is added to the decoder's layers.
SHALLOW_ENCODER = {name: x for name, x in DEEP_ENCODER.items() if name != "deepstack_visual_indexes"}
# Of GLM-4.1V: the feed-forward has `out_hidden_size` channels, the merger others; 5 x 5 learned positions.
GLM_ENCODER = {name: x for name, x in DEEP_ENCODER.items() if "_indexes" not in name and "num_pos" not in name} | {
    "depth": 2, "image_size": 20,
}  # fmt: skip
GLM_ROPE = MROPE | {"partial_rotary_factor": 0.5}
PIXTRAL = {name: x for name, x in ENCODER.items() if name != "image_size"} | {
    "model_type": "pixtral", "hidden_act": "silu",
}  # fmt: skip
# Of Gemma 4: 2 x 2 patches are a token, and 12 columns and rows have positions.
GEMMA4_ENCODER: dict[str, Any] = {
    **{name: x for name, x in ENCODER.items() if name != "image_size"}, "num_key_value_heads": 3, "head_dim": 8,
    "global_head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 12,
    "rms_norm_eps": 0.1,  # as in GEMMA4
}  # fmt: skip
GEMMA4_TOKENS = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": 91, "audio_token_id": 94, "boi_token_id": 92, "eoi_token_id": 93,
}  # fmt: skip
SIGLIP2 = {name: x for name, x in ENCODER.items() if name != "image_size"} | {
    "model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 25,
}  # fmt: skip
# Three layers, of which the last is read of in SigLIP alone, as is no norm behind them: 3 x 3 patches a tile, and
# 3 pixels that no patch has.
CLIP = ENCODER | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "patch_size": 7}
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
# Images whose tiles are put together: what becomes of their height and width in tiles of 24 x 24 pixels, by hand.
PLACES = [[24, 48], [48, 24], [48, 48]]
NUMBERS = {
    "llava_next": {(10, 48): (1, 2, 1, 6, 1, 6), (48, 30): (2, 2, 6, 4, 6, 4), (24, 20): (1, 2, 3, 2, 3, 2)},
    "llava_onevision": {(10, 48): (1, 2, 1, 6, 1, 6), (48, 30): (2, 2, 6, 4, 5, 3), (24, 20): (1, 2, 3, 2, 3, 2)},
}
COHERE2 = VARIANTS["cohere2"]().to_dict()
# Of Llama 3.2 Vision: an image is one token, behind the vocabulary; numbers of the shapes of grids, and their tiles.
MLLAMA_TEXT = SHAPE | {
    "vocab_size": IMAGE_TOKEN, "num_hidden_layers": 5, "cross_attention_layers": [1, 3, 4], "bos_token_id": 0,
}  # fmt: skip
MLLAMA_ENCODER = {name: x for name, x in ENCODER.items() if name != "num_attention_heads"} | {
    "attention_heads": 3, "num_hidden_layers": 4, "num_global_layers": 2, "intermediate_layers_indices": [1, 2],
    "vision_output_dim": 3 * ENCODER["hidden_size"],
}  # fmt: skip
GRIDS = [(2, 2), (1, 1), (7, 3)]
ANY_SIZE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "glm4v",
    "glm4v_moe", "glm46v", "glm_ocr", "exaone4_5", "mistral3", "gemma4", "gemma4_unified", "lfm2_vl", "pixtral",
    "video_llama_3", "kimi_k25", "lighton_ocr", "lfm3_vl", "minimax_m3_vl", "ovis2", "mistral_large4", "glm5_next",
)  # fmt: skip
UNMERGED = ("pixtral", "gemma4_unified", "video_llama_3")  # of these, those whose patches are tokens
STILL = (
    "mistral3",
    "gemma4",
    "lfm2_vl",
    "kimi_k25",
    "lighton_ocr",
    "ovis2",
    "mistral_large4",
    *UNMERGED,
)  # and those whose patches have no frames
TOKENS = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
MARKS = [91, 92, 93, 94, 95]  # of Ovis2
SIZES = [(24, 40), (16, 24), (8, 32)]  # of images of any size: 15, 6 and 4 tokens
FILLED = [(24, 16), (11, 24), (24, 24), (8, 5)]  # of the tiles of Idefics2, of whose patches not all are whole
VISION = {
    "idefics2": lambda: Idefics2Config(
        text_config={**SHAPE, "model_type": "mistral", "sliding_window": None},
        vision_config=ENCODER,
        perceiver_config={
            "hidden_size": SHAPE["hidden_size"],
            "resampler_n_latents": TILE_TOKENS,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 6,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-3,
        },
        image_token_id=IMAGE_TOKEN,
    ),
    "idefics3": lambda: Idefics3Config(**PARTS, scale_factor=2),
    "smolvlm": lambda: SmolVLMConfig(**PARTS, scale_factor=2, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3Config(
        text_config=VARIANTS["gemma3_text"]().to_dict(),
        vision_config={**ENCODER, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=TILE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    ),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config={**SHAPE, "rope_parameters": MROPE},
        vision_config=PLAIN_ENCODER,
        **TOKENS,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**SHAPE, "rope_parameters": MROPE},
        vision_config=ROW_ENCODER,
        **TOKENS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=DEEP_TEXT,
        vision_config=DEEP_ENCODER,
        **TOKENS,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={
            **DEEP_TEXT,
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        },
        vision_config=DEEP_ENCODER,
        **TOKENS,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config=VARIANTS["qwen3_5_text"]().to_dict() | {"rope_parameters": PARTIAL_MROPE},
        vision_config=SHALLOW_ENCODER,
        **TOKENS,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config=VARIANTS["qwen3_5_moe_text"]().to_dict() | {"rope_parameters": PARTIAL_MROPE},
        vision_config=SHALLOW_ENCODER,
        **TOKENS,
    ),
    "qwen4_exp": lambda: Qwen4ExpConfig(
        text_config=VARIANTS["qwen4_exp_text"]().to_dict() | {"rope_parameters": PARTIAL_MROPE},
        vision_config=SHALLOW_ENCODER,
        **TOKENS,
    ),
    "internvl": lambda: InternVLConfig(
        text_config={**SHAPE, "model_type": "qwen2"},
        vision_config=TILE_ENCODER,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=TILE_TOKENS,
        tie_word_embeddings=False,
    ),
    "glm4v": lambda: Glm4vConfig(
        text_config={**SHAPE, "num_attention_heads": 2, "rope_parameters": GLM_ROPE},
        vision_config=GLM_ENCODER,
        **TOKENS,
    ),
    "glm4v_moe": lambda: Glm4vMoeConfig(
        text_config={
            **SHAPE,
            **EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_parameters": GLM_ROPE,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "routed_scaling_factor": 1.5,
        },
        vision_config=GLM_ENCODER,
        **TOKENS,
    ),
    "glm46v": lambda: Glm46VConfig(
        text_config={**SHAPE, "num_attention_heads": 2, "rope_parameters": GLM_ROPE, "model_type": "glm4v_text"},
        vision_config=GLM_ENCODER | {"model_type": "glm4v_vision"},
        **TOKENS,
    ),
    "glm5_next": lambda: Glm5NextConfig(
        text_config={  # of fewer layers, which amplify rounding errors less
            **VARIANTS["glm5_next_text"]().to_dict(),
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
        },
        vision_config={name: x for name, x in GLM_ENCODER.items() if name != "image_size"}
        | {"projection_intermediate_size": 28, "swiglu_limit": 0.7},
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        **{f"{kind}_{end}_token_id": 92 for kind in ("image", "video") for end in ("start", "end")},
    ),
    "glm_ocr": lambda: GlmOcrConfig(
        text_config={**SHAPE, "head_dim": 16, "rope_parameters": GLM_ROPE},
        vision_config={name: x for name, x in GLM_ENCODER.items() if name != "image_size"},
        **TOKENS,
    ),
    "exaone4_5": lambda: Exaone4_5_Config(
        text_config=VARIANTS["exaone4"]().to_dict(),
        vision_config=ROW_ENCODER | {"hidden_size": 32, "num_heads": 4, "num_key_value_heads": 2},
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
    ),
    "video_llama_3": lambda: VideoLlama3Config(
        text_config={**SHAPE, "model_type": "qwen2"},
        vision_config={name: x for name, x in ENCODER.items() if name != "image_size"} | {"patch_size": 8},
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
    ),
    "kimi_k25": lambda: Kimi_K25Config(
        text_config=VARIANTS["deepseek_v3"]().to_dict(),
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "patch_size": 4,
            "pos_emb_height": 5,
            "pos_emb_width": 5,
            "initializer_range": 0.15,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        projection_hidden_size=24,
        tie_word_embeddings=False,
    ),
    "lfm3_vl": lambda: Lfm3VlConfig(
        text_config=VARIANTS["lfm3"]().to_dict() | {"norm_eps": 0.01},  # of a smaller one errors are amplified
        vision_config={
            "hidden_size": 48,  # another one than the decoder's
            "intermediate_size": 40,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "patch_size": 4,
            "initializer_range": 0.15,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        projector_hidden_size=28,
    ),
    "lighton_ocr": lambda: LightOnOcrConfig(
        text_config={**SHAPE, "model_type": "qwen3", "head_dim": 16},
        vision_config=PIXTRAL,
        image_token_id=IMAGE_TOKEN,
    ),
    "gemma4_unified": lambda: Gemma4UnifiedConfig(
        text_config=VARIANTS["gemma4_unified_text"]().to_dict()
        | {"pad_token_id": 7, "use_bidirectional_attention": "vision"},
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 24,
            "output_proj_dims": 24,
            "mm_posemb_size": 12,
            "rms_norm_eps": 0.1,
            "initializer_range": 0.15,
        },
        **GEMMA4_TOKENS,
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=VARIANTS["gemma4_text"]().to_dict() | {"pad_token_id": 7, "use_bidirectional_attention": "vision"},
        vision_config=GEMMA4_ENCODER | {"use_clipped_linears": True, "standardize": True},
        **GEMMA4_TOKENS,
    ),
    "lfm2_vl": lambda: Lfm2VlConfig(
        text_config=VARIANTS["lfm2"]().to_dict(),
        vision_config=SIGLIP2,
        image_token_id=IMAGE_TOKEN,
        projector_hidden_size=28,
        tie_word_embeddings=False,
    ),
    "llava": lambda: LlavaConfig(
        text_config={**SHAPE, "model_type": "llama"}, vision_config=CLIP, image_token_index=IMAGE_TOKEN
    ),
    "pixtral": lambda: LlavaConfig(
        text_config={**SHAPE, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
        vision_config=PIXTRAL | {"patch_size": 8},
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava_next": lambda: LlavaNextConfig(
        text_config={**SHAPE, "model_type": "mistral", "sliding_window": None},
        vision_config=CLIP,
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=PLACES,
    ),
    "llava_onevision": lambda: LlavaOnevisionConfig(
        text_config={**SHAPE, "model_type": "qwen2"},
        vision_config=SIGLIP,
        image_token_index=IMAGE_TOKEN,
        video_token_index=91,
        image_grid_pinpoints=PLACES,
        vision_aspect_ratio="anyres_max_2",
    ),
    "paligemma": lambda: PaliGemmaConfig(
        text_config={**SHAPE, "model_type": "gemma", "head_dim": 16},
        vision_config=SIGLIP,
        image_token_index=IMAGE_TOKEN,
        projection_dim=SHAPE["hidden_size"],
    ),
    "aya_vision": lambda: AyaVisionConfig(
        text_config=COHERE2,
        vision_config=ENCODER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=IMAGE_TOKEN,
        alignment_intermediate_size=20,
        adapter_layer_norm_eps=1e-3,
    ),
    "cohere2_vision": lambda: Cohere2VisionConfig(
        text_config=COHERE2,
        vision_config=ENCODER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_id=IMAGE_TOKEN,
        alignment_intermediate_size=20,
    ),
    "deepseek_vl": lambda: DeepseekVLConfig(
        text_config={**SHAPE, "model_type": "llama"},
        vision_config=ENCODER
        | {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 8, "hidden_act": "gelu"},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
    "minimax_m3_vl": lambda: MiniMaxM3VLConfig(
        text_config=VARIANTS["minimax_m3_vl_text"]().to_dict(),
        vision_config={name: x for name, x in ENCODER.items() if name != "image_size"}
        | {"hidden_size": 42},  # of whose heads' 14 dimensions 12 are rotated
        image_token_index=IMAGE_TOKEN,
        video_token_index=91,
        projector_hidden_size=28,
    ),
    "ovis2": lambda: Ovis2Config(
        text_config={**SHAPE, "model_type": "qwen2"},
        vision_config=ENCODER | {"hidden_stride": 2, "vocab_size": 30},
        image_token_id=IMAGE_TOKEN,
        visual_indicator_token_ids=MARKS,
        hidden_size=SHAPE["hidden_size"],
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    ),
    "mllama": lambda: MllamaConfig(
        text_config=MLLAMA_TEXT, vision_config=MLLAMA_ENCODER, image_token_index=IMAGE_TOKEN
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=VARIANTS["ministral3"]().to_dict(),
        vision_config=PIXTRAL,
        image_token_index=IMAGE_TOKEN,
        multimodal_projector_bias=True,
        tie_word_embeddings=False,
    ),
    "mistral_large4": lambda: MistralLarge4Config(
        text_config=VARIANTS["mistral_large4-text"]().text_config.to_dict(),
        vision_config=PIXTRAL,
        image_token_index=IMAGE_TOKEN,
    ),
}


class Document(NamedTuple):
    """Token ids, and the tiles `[tiles, H, W, C]`, or images of any size or in tiles that are put together, that its
    image tokens stand for."""

    tokens: np.ndarray
    pixels: Any
    rows: PatchRowsConfig = PatchRowsConfig(patch_size=4)  # how images of any size are patches


def make_vision_oracle(family: str, config: Any = None):
    """A random model in which biases and norms are random too, so that none can be left out unnoticed."""
    torch.manual_seed(0)
    config = VISION[family]() if config is None else config
    oracle = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    oracle.generation_config.eos_token_id = None  # texts go on behind the token at which n-grams end
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name or "lambda" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            # From zeros or ones.
            elif not parameter.any() or name.endswith(("embedding_table", "pos_embedding", "latents")):
                parameter.normal_(std=ENCODER["initializer_range"])
            elif name.endswith("embedding_projection.weight"):
                parameter.mul_(4)  # of small ones the gradients are large, and so are their rounding errors
        for name, buffer in oracle.named_buffers():
            if name.endswith(("_min", "_max")):  # which some numbers are beyond
                buffer.copy_((0.8 + 0.4 * torch.rand(())) * (1 if name.endswith("_max") else -1))
            elif name.endswith(UNTRAINED):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return as_published(oracle)


def as_published(oracle):
    """The model, without what transformers computes in another way than those who published the weights, and vLLM.

    Logits of Aya Vision and Command A Vision are not scaled in it, as those of their decoders are. Images of Gemma 4
    12B are seen in both directions by layers with a window alone, as its `generate` has it. Kimi K2.5 that samples the
    token of images goes on with the embedding of token 0. In Llama 3.2 Vision
    tokens that see no image read all images of their row, those behind them too, and what pads its images; Meta's own
    code multiplies what is read by 0.
    """
    if oracle.config.model_type in ("aya_vision", "cohere2_vision"):
        oracle.lm_head.register_forward_hook(lambda head, x, out: out * oracle.config.text_config.logit_scale)
    if oracle.config.model_type == "kimi_k25":

        def with_embeddings(_, args, given):
            if given.get("pixel_values") is None:
                given = given | {"inputs_embeds": oracle.get_input_embeddings()(given["input_ids"]), "input_ids": None}
            return args, given

        oracle.model.register_forward_pre_hook(with_embeddings, with_kwargs=True)
    if oracle.config.model_type == "gemma4_unified":

        def with_masks(_, args, given):
            types, mask = given.get("mm_token_type_ids"), given.get("attention_mask")
            if types is not None and not isinstance(mask, dict):
                shape = torch.zeros(*types.shape, 1)
                found = oracle.create_masks_for_generate(oracle.config, shape, mask, None, None, types)
                given = given | {"attention_mask": found}
            return args, given

        oracle.model.register_forward_pre_hook(with_masks, with_kwargs=True)
    if oracle.config.model_type != "mllama":
        return oracle
    seen = {}

    def remember(_, args, kwargs):
        seen["mask"] = kwargs["full_text_row_masked_out_mask"]

    for layer in oracle.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(remember, with_kwargs=True)
            layer.cross_attn.register_forward_hook(lambda module, args, out: (seen["mask"][:, 0] * out[0], *out[1:]))
    return oracle


def image_documents(tiles=(2, 1, 0), family: str = "") -> list[Document]:
    """Documents of different lengths, with so many tiles each."""
    rng = np.random.default_rng(1)
    documents = []
    sizes = itertools.cycle(SIZES if family in ANY_SIZE and family != "ovis2" else NUMBERS.get(family, [TILE[:2]]))
    grids, filled = itertools.cycle(GRIDS), itertools.cycle(FILLED)
    for number, count in enumerate(tiles):
        parts, pixels = [rng.integers(0, IMAGE_TOKEN, 3 + number)], []
        for _ in range(count):
            high, wide = size = next(sizes)
            amount = high * wide // 64
            if family == "mllama":
                tiles, amount = np.zeros((1, 4 * TILE[0], *TILE[1:]), np.float32), 1
                numbers = next(grids)
                rows = numbers[1] * TILE[0]
                tiles[:, :rows] = rng.normal(size=(1, rows, *TILE[1:]))
                pixels.append((tiles, numbers))
            elif family in NUMBERS:
                numbers = NUMBERS[family][size]
                amount = TILE_TOKENS + numbers[4] * (numbers[5] + 1)
                pixels.append((rng.normal(size=(1 + numbers[0] * numbers[1], *TILE)).astype(np.float32), numbers))
            else:
                pixels.append(rng.normal(size=(high, wide, 3)).astype(np.float32))
                if family == "idefics2":
                    own = next(filled)
                    pixels[-1][own[0] :] = pixels[-1][:, own[1] :] = np.nan
            image = np.full(amount, IMAGE_TOKEN)
            image = np.concatenate([MARKS[:1], image, MARKS[1:2], MARKS[4:]]) if family == "ovis2" else image
            parts += [image, rng.integers(0, IMAGE_TOKEN, 2)]
        if family not in (*ANY_SIZE, *NUMBERS, "mllama"):
            pixels = np.array(pixels, np.float32).reshape(count, *TILE)
        rows = PatchRowsConfig(patch_size=4, frames=0 if family in STILL else 2)
        rows = PatchRowsConfig(patch_size=8, frames=0, merge=1) if family in UNMERGED else rows
        documents.append(Document(np.concatenate([*parts, rng.integers(0, IMAGE_TOKEN, 4)]), pixels, rows))
    assert max(document.tokens.max() for document in documents) < VOCAB
    return documents


def padded_images(documents, side: str = "left") -> tuple[np.ndarray, np.ndarray, Images]:
    """Tokens and segments of the documents, padded with image tokens, and their images, padded with noise."""
    width = max(len(document.tokens) for document in documents)
    tokens = np.full((len(documents), width), IMAGE_TOKEN)
    segments = np.zeros_like(tokens)
    for row, (ids, *_) in enumerate(documents):
        place = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        tokens[row, place], segments[row, place] = ids, 1
    return tokens, segments, padded_pixels([document.pixels for document in documents], documents[0].rows)


def joined(parts):
    """The pixels of documents as those of one."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [image for part in parts for image in part]


def padded_pixels(rows, config: PatchRowsConfig) -> Images:
    """The images of rows with these pixels, padded with noise."""
    rng = np.random.default_rng(2)
    count = np.array(count_tiles(rows), np.int32)
    most = count.max()
    if pairs := [image for pixels in rows for image in pixels if isinstance(image, tuple)]:
        shape, numbers = pairs[0][0].shape[1:], len(pairs[0][1])
        tiles = rng.normal(size=(len(rows), most + 1, *shape)).astype(np.float32)
        grids = rng.integers(1, 9, (len(rows), most + 1, numbers)).astype(np.int32)
        for row, images in enumerate(rows):
            for number, (own, numbers) in enumerate(images):
                start = sum(len(image) for image, _ in images[:number])
                tiles[row, start : start + len(own)], grids[row, number] = own, numbers
        return Images(tiles, count, grids=grids)
    if any(isinstance(pixels, np.ndarray) for pixels in rows):
        tiles = rng.normal(size=(len(rows), most, *TILE)).astype(np.float32)
        for row, own in enumerate(rows):
            tiles[row, : len(own)] = own
        return Images(tiles, count)
    made = [patch_rows(pixels, config) for pixels in rows]
    patches = rng.normal(size=(len(rows), 8 + max(len(x) for x, _ in made), config.patch_numbers)).astype(np.float32)
    grids = rng.integers(1, 9, (len(rows), most + 1, 2)).astype(np.int32)
    for row, (own, grid) in enumerate(made):
        patches[row, : len(own)], grids[row, : len(grid)] = own, grid
    return Images(patches, count, grids=grids)


def variant_of(oracle) -> str:
    """The name in VISION of an oracle's configuration."""
    kind = oracle.config.model_type
    return "pixtral" if kind == "llava" and oracle.config.vision_config.model_type == "pixtral" else kind


def as_torch(oracle, document: Document) -> dict[str, torch.Tensor]:
    """The arguments of transformers for a document as a row."""
    ids = torch.tensor(document.tokens)[None]
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if variant_of(oracle) in ("mistral3", "mistral_large4", "pixtral", "lighton_ocr"):
        sizes = torch.tensor([image.shape[:2] for image in document.pixels])
        if not len(sizes):
            return found
        pixels = torch.zeros(len(sizes), 3, *sizes.max(0).values.tolist())
        for image, row in zip(document.pixels, pixels, strict=True):
            row[:, : image.shape[0], : image.shape[1]] = torch.tensor(image).permute(2, 0, 1)
        return found | {"pixel_values": pixels, "image_sizes": sizes}
    if oracle.config.model_type == "mllama":
        if not document.pixels:
            return found
        ids, counts = zip(*(numbers for _, numbers in document.pixels), strict=True)
        pixels = torch.tensor(np.concatenate([tiles for tiles, _ in document.pixels]))
        filled = torch.arange(4) < torch.tensor(counts)[:, None]
        spans = get_cross_attention_token_mask(document.tokens.tolist(), IMAGE_TOKEN)
        seen = convert_sparse_cross_attention_mask_to_dense([spans], [counts], 4, len(document.tokens))
        return found | {
            "pixel_values": pixels.reshape(1, len(pixels), 4, *TILE).permute(0, 1, 2, 5, 3, 4),
            "aspect_ratio_ids": torch.tensor([ids]), "aspect_ratio_mask": filled[None].int(),
            "cross_attention_mask": torch.tensor(seen),
        }  # fmt: skip
    if oracle.config.model_type in NUMBERS:
        if not len(document.pixels):
            return found
        size_of = {numbers: size for size, numbers in NUMBERS[oracle.config.model_type].items()}
        most = max(len(tiles) for tiles, _ in document.pixels)
        pixels = torch.zeros(len(document.pixels), most, 3, *TILE[:2])
        for row, (tiles, _) in zip(pixels, document.pixels, strict=True):
            row[: len(tiles)] = torch.tensor(tiles).permute(0, 3, 1, 2)
        return found | {
            "pixel_values": pixels, "image_sizes": torch.tensor([size_of[numbers] for _, numbers in document.pixels]),
        }  # fmt: skip
    if (family := oracle.config.model_type) in ("gemma4", "gemma4_unified", "lfm2_vl"):
        return found | rows_of_patches(family, ids, document.pixels, 8 if family in UNMERGED else 4)
    if family == "kimi_k25":
        made = [row_by_row(torch.tensor(image)) for image in document.pixels]
        if not made:
            return found
        patches, grids = zip(*made, strict=True)
        return found | {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    if family == "video_llama_3":
        made = [qwen_patches(torch.tensor(image), 8, merge=1, frames=1) for image in document.pixels]
        if not made:
            return found
        patches, grids = zip(*made, strict=True)
        sizes = torch.ones(len(made), dtype=torch.long)
        return found | {
            "pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids), "image_merge_sizes": sizes,
        }  # fmt: skip
    if family == "ovis2":
        pixels = torch.tensor(np.array(document.pixels)).movedim(-1, 1) if len(document.pixels) else None
        return found | ({} if pixels is None else {"pixel_values": pixels})
    if oracle.config.model_type in ANY_SIZE:
        if family not in ("exaone4_5", "lfm3_vl", "minimax_m3_vl"):  # whose positions have one axis
            found["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        made = [qwen_patches(torch.tensor(image)) for image in document.pixels]
        if not made:
            return found
        patches, grids = zip(*made, strict=True)
        return found | {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    pixels = torch.tensor(document.pixels.transpose(0, 3, 1, 2))
    if oracle.config.model_type == "gemma3":
        found["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    elif oracle.config.model_type == "paligemma":  # no token is in a prompt
        found["token_type_ids"] = torch.ones_like(ids)
    elif oracle.config.model_type not in ("internvl", "llava", "aya_vision", "cohere2_vision", "deepseek_vl"):
        pixels = pixels[None]
    if family == "idefics2" and len(document.pixels):
        found["pixel_attention_mask"] = (~pixels.isnan().any(2)).long()
        pixels = pixels.nan_to_num()
    return found | ({"pixel_values": pixels} if len(document.pixels) else {})


def rows_of_patches(family: str, ids: torch.Tensor, images, patch: int = 4) -> dict[str, torch.Tensor]:
    """The patches of images, row by row and padded to those of the largest, with their places or grids."""
    types = {} if family == "lfm2_vl" else {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
    if not len(images):
        return types
    grids = [(image.shape[0] // patch, image.shape[1] // patch) for image in images]
    most = max(high * wide for high, wide in grids) + 4
    pixels, places = torch.zeros(len(images), most, 3 * patch**2), torch.full((len(images), most, 2), -1)
    for number, (image, (high, wide)) in enumerate(zip(images, grids, strict=True)):
        x = torch.tensor(image).reshape(high, patch, wide, patch, 3).transpose(1, 2)
        pixels[number, : high * wide] = x.reshape(high * wide, -1)
        y, x = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
        places[number, : high * wide] = torch.stack([x, y], dim=-1).reshape(-1, 2)
    if family != "lfm2_vl":
        return {**types, "pixel_values": pixels, "image_position_ids": places}
    mask = (places[..., 0] >= 0).int()
    return {"pixel_values": pixels, "spatial_shapes": torch.tensor(grids), "pixel_attention_mask": mask}


def row_by_row(image: torch.Tensor, patch: int = 4):
    """The patches `[P,C,4,4]` and the grid of an image `[H,W,C]` as Kimi K2.5's image processor makes them."""
    high, wide = image.shape[0] // patch, image.shape[1] // patch
    x = image.permute(2, 0, 1).reshape(3, high, patch, wide, patch).permute(1, 3, 0, 2, 4)
    return x.reshape(high * wide, 3, patch, patch), (1, high, wide)


def qwen_patches(image: torch.Tensor, patch: int = 4, merge: int = 2, frames: int = 2):
    """The patches and the grid of an image `[H,W,C]` as Qwen2-VL's image processor makes them."""
    frame = image.permute(2, 0, 1)[None].repeat(frames, 1, 1, 1)
    high, wide = image.shape[0] // patch, image.shape[1] // patch
    x = frame.reshape(1, frames, 3, high // merge, merge, patch, wide // merge, merge, patch)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return x.reshape(high * wide, -1), (1, high, wide)


def logits_alone(oracle, document: Document) -> np.ndarray:
    """The oracle's logits `[T,V]` of a document."""
    with torch.no_grad():
        return oracle(**as_torch(oracle, document)).logits[0].numpy()


def oracle_image_gradients(oracle, documents) -> dict[str, np.ndarray]:
    """Gradients by autograd of minus the log-probs of documents, on average over these, by the names of files."""
    oracle.zero_grad()
    total = torch.zeros(())
    for document in documents:
        logps = oracle(**as_torch(oracle, document)).logits[0, :-1].log_softmax(-1)
        targets = torch.tensor(document.tokens).clamp(max=logps.shape[-1] - 1)  # as those are that have no logit
        total = total - logps.gather(-1, targets[1:, None]).sum()
    (total / len(documents)).backward()
    untrained = {name: np.zeros(x.shape) for name, x in oracle.named_buffers() if name.endswith(UNTRAINED)}
    # Those of an encoder's layers that are not read have none.
    grads = {name: x.grad.numpy() if x.grad is not None else np.zeros(x.shape) for name, x in oracle.named_parameters()}
    grads = _fused(oracle, grads | untrained)
    # Compared by the names of modules, which those of Mistral's own files are far from.
    return grads if oracle.config.model_type == "mistral_large4" else in_files(oracle, grads)


def _fused(oracle, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays, in which queries, keys and values of Kimi K2.5's encoder are one, and pairs of dimensions that turn
    together neighbours, as in its files and those of Mistral Large 4."""
    if oracle.config.model_type == "mistral_large4":
        turned = re.compile(r"vision_tower\..*\.[qk]_proj\.")
        halves = (oracle.config.vision_config.num_attention_heads, 2, -1)
        return {
            name: x.reshape(*halves, x.shape[-1]).swapaxes(1, 2).reshape(x.shape) if turned.search(name) else x
            for name, x in arrays.items()
        }
    if oracle.config.model_type != "kimi_k25":
        return arrays
    own = {name: x for name, x in arrays.items() if ".vision_tower." in name and "_proj." in name}
    found = {name: x for name, x in arrays.items() if name not in own}
    for name in own:
        if ".q_proj." in name:
            q, k, v = (own[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
            halves = (oracle.config.vision_config.num_attention_heads, 2, -1, *q.shape[1:])
            q, k = (x.reshape(halves).swapaxes(1, 2).reshape(x.shape) for x in (q, k))
            found[name.replace("attn.q_proj", "wqkv")] = np.concatenate([q, k, v])
    return found


def image_gradients(model, documents) -> dict[str, np.ndarray]:
    """Gradients of the same loss of left-padded rows, by the path of the parameter."""
    tokens, segments, images = padded_images(documents)
    inputs = Inputs(jnp.asarray(tokens), jnp.asarray(segments), images=jax.tree.map(jnp.asarray, images))

    def loss(params):
        return -token_logps(model.net, params, inputs)[0].sum() / len(documents), None

    found = jax.tree_util.tree_leaves_with_path(added_gradients(loss, model.params)[1])
    return {path_name(path): np.asarray(x) for path, x in found}


def image_greedy(model, documents, steps: int) -> np.ndarray:
    """Tokens `[B,2,steps]` of the sampling engine at temperature 0, behind left-padded documents."""
    tokens, segments, images = jax.tree.map(jnp.asarray, padded_images(documents))
    engine = Engine(SamplingParams(temperature=0.0), 2, steps, net=model.net, eos=(-1,), chunk=3)
    rollout = engine.generate(model.params, tokens, segments, jax.random.key(0), images=images)
    return np.asarray(rollout.tokens)[:, tokens.shape[1] :].reshape(len(documents), 2, steps)


def oracle_image_greedy(oracle, documents, steps: int) -> np.ndarray:
    """Tokens `[B,steps]` that the oracle continues each document with."""

    def prompt(document):
        given = as_torch(oracle, document)
        if oracle.config.model_type == "paligemma":  # all of it is one
            given["token_type_ids"] = torch.zeros_like(given["input_ids"])
        return given

    with torch.no_grad():
        found = [oracle.generate(**prompt(x), max_new_tokens=steps, do_sample=False)[0] for x in documents]
    return np.stack([own[len(x.tokens) :].numpy() for own, x in zip(found, documents, strict=True)])
