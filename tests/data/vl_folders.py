"""The folders of a tiny InternVL, GLM-V, Mistral 3, Gemma 4, LFM2-VL, LLaVAs, PaliGemma, Llama 3.2 Vision, EXAONE 4.5
and VideoLLaMA 3 without weights: 8 x 8 pixels a token, a byte tokenizer."""

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import AutoTokenizer
from transformers.models import gemma4_unified
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.files.hf import EMBEDDED

TEXT = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
GLM_TEXT = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}}
GLM_ENCODER = {
    "hidden_size": 24, "intermediate_size": 40, "depth": 2, "num_heads": 3, "patch_size": 4, "out_hidden_size": 32,
    "image_size": 16,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 3, "image_size": 16, "patch_size": 8,
}  # fmt: skip
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 4}
COHERE2 = {
    "model_type": "cohere2",
    **TEXT,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
PLACES = [[16, 32], [32, 16], [32, 32]]
# What differs between the families.
PARTS: dict[str, dict[str, Any]] = {
    "internvl": {
        "architectures": ["InternVLForConditionalGeneration"],
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": [16, 16], "patch_size": [4, 4],
        },
    },
    "glm4v": {
        "architectures": ["Glm4vForConditionalGeneration"],
        "text_config": {"model_type": "glm4v_text", **GLM_TEXT},
        "vision_config": GLM_ENCODER,
    },
    "glm4v_moe": {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "text_config": {
            "model_type": "glm4v_moe_text", **GLM_TEXT, "head_dim": 8, "partial_rotary_factor": 1.0,
            "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        },
        "vision_config": GLM_ENCODER,
    },
    "glm46v": {
        "architectures": ["Glm46VForConditionalGeneration"],
        "text_config": {"model_type": "glm4v_text", **GLM_TEXT},
        "vision_config": {"model_type": "glm4v_vision", **GLM_ENCODER},
    },
    "glm_ocr": {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "text_config": {"model_type": "glm_ocr_text", **GLM_TEXT},
        "vision_config": {name: x for name, x in GLM_ENCODER.items() if name != "image_size"},
    },
    "glm5_next": {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": {
            "model_type": "glm5_next_text", **TEXT, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
            "index_kpool": 2, "linear_num_heads": 2, "linear_head_dim": 8, "hc_mult": 2, "hc_sinkhorn_iters": 3,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {name: x for name, x in GLM_ENCODER.items() if name != "image_size"}
        | {"projection_intermediate_size": 28},
    },
    "exaone4_5": {
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "text_config": {
            "model_type": "exaone4", **TEXT, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "depth": 2, "num_heads": 4, "num_key_value_heads": 2,
            "patch_size": 4, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
    "video_llama_3": {
        "architectures": ["VideoLlama3ForConditionalGeneration"],
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "patch_size": 8,
        },
    },
    "gemma4_unified": {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_unified_text", **TEXT, "head_dim": 8, "global_head_dim": 8, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"], "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 64,
        },
    },
    "kimi_k25": {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "text_config": {
            "model_type": "deepseek_v3", **TEXT, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        },
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "patch_size": 4, "pos_emb_height": 5, "pos_emb_width": 5,
        },
        "projection_hidden_size": 24,
    },
    "lfm3_vl": {
        "architectures": ["Lfm3VlForConditionalGeneration"],
        "text_config": {
            "model_type": "lfm3", **TEXT, "head_dim": 8, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "patch_size": 4,
        },
        "projector_hidden_size": 28,
    },
    "lighton_ocr": {
        "architectures": ["LightOnOcrForConditionalGeneration"],
        "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 8},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "patch_size": 4, "image_size": 64,
        },
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "patch_size": 4, "image_size": 64,
        },
    },
    "gemma4": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text", **TEXT, "head_dim": 8, "global_head_dim": 8, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 288, "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 64, "use_clipped_linears": True,
        },
    },
    "lfm2_vl": {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"]},
        "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "patch_size": 4, "num_patches": 16, "vision_use_head": False,
        },
        "projector_hidden_size": 28,
    },
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama", **TEXT},
        "vision_config": CLIP,
    },
    "pixtral": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "patch_size": 8, "image_size": 64,
        },
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
    "llava_next": {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": CLIP, "image_grid_pinpoints": PLACES,
    },
    "llava_onevision": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"], "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_grid_pinpoints": PLACES, "vision_aspect_ratio": "anyres_max_2",
    },
    "paligemma": {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "text_config": {"model_type": "gemma2", **TEXT, "head_dim": 8, "sliding_window": 8},
        "vision_config": CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}, "projection_dim": 32,
    },
    "aya_vision": {
        "architectures": ["AyaVisionForConditionalGeneration"],
        "text_config": COHERE2, "alignment_intermediate_size": 20,
        "vision_config": SIGLIP,
    },
    "cohere2_vision": {
        "architectures": ["Cohere2VisionForConditionalGeneration"],
        "text_config": COHERE2, "alignment_intermediate_size": 20,
        "vision_config": SIGLIP,
    },
    "deepseek_vl": {
        "architectures": ["DeepseekVLForConditionalGeneration"], "text_config": {"model_type": "llama", **TEXT},
        "vision_config": SIGLIP | {"patch_size": 8},
    },
    "ovis2": {
        "architectures": ["Ovis2ForConditionalGeneration"], "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 16, "patch_size": 4, "hidden_stride": 2, "vocab_size": 30,
        },
        "hidden_size": 32, "vocab_size": 288,
    },
    "minimax_m3_vl": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {
            "model_type": "minimax_m3_vl_text", **TEXT, "head_dim": 8, "rotary_dim": 4, "num_local_experts": 4,
            "num_experts_per_tok": 2, "dense_intermediate_size": 48, "shared_intermediate_size": 16, "index_n_heads": 2,
            "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4,
        },
        "projector_hidden_size": 28,
    },
    "mllama": {
        "architectures": ["MllamaForConditionalGeneration"],
        "text_config": {
            "model_type": "mllama_text_model", **TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1],
        },
        "vision_config": {
            "model_type": "mllama_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_global_layers": 1, "attention_heads": 3, "image_size": 16, "patch_size": 4, "vision_output_dim": 48,
            "intermediate_layers_indices": [0],
        },
    },
}  # fmt: skip
PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "</s>"]
GLM_TOKENS = ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|endoftext|>", "<|user|>"]
GEMMA4_TOKENS = ["<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>"]
# The image token first, and among the others the one that ends texts.
TOKENS = {
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"],
    "glm4v": GLM_TOKENS,
    "glm4v_moe": GLM_TOKENS,
    "glm46v": GLM_TOKENS,
    "glm_ocr": GLM_TOKENS,
    "glm5_next": GLM_TOKENS,
    "exaone4_5": ["<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>", "[|endofturn|]"],
    "video_llama_3": ["<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"],
    "kimi_k25": [
        "<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|im_user|>", "<|im_assistant|>",
        "<|im_middle|>", "<|im_end|>",
    ],
    "lfm3_vl": ["<|image|>", "<|video|>", "<|image_start|>", "<|image_end|>", "<|im_start|>", "<|im_end|>"],
    "lighton_ocr": ["<|image_pad|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"],
    "mistral3": PIXTRAL_TOKENS,
    "pixtral": PIXTRAL_TOKENS,
    "gemma4": GEMMA4_TOKENS,
    "gemma4_unified": GEMMA4_TOKENS,
    "lfm2_vl": [
        "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column < 5),
        "<|im_start|>", "<|im_end|>",
    ],
    **{name: ["<image>", "<video>", "</s>"] for name in PARTS if name.startswith("llava")},
    "paligemma": ["<image>", "<bos>", "<eos>"],
    "aya_vision": ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|END_OF_TURN_TOKEN|>"],
    "cohere2_vision": [
        "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|END_OF_TURN_TOKEN|>",
    ],
    "deepseek_vl": ["<image_placeholder>", "</s>"],
    "ovis2": [
        "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<|im_start|>", "<|im_end|>",
    ],
    "minimax_m3_vl": ["]<]image[>[", "]<]start of image[>[", "]<]end of image[>[", "]<]video[>[", "[e~["],
    "mllama": ["<|image|>", "<|begin_of_text|>", "<|eot_id|>"],
}  # fmt: skip
ENDS = {
    "internvl": "<|im_end|>", "glm4v": "<|endoftext|>", "glm4v_moe": "<|endoftext|>", "mistral3": "</s>",
    "gemma4": "<turn|>", "lfm2_vl": "<|im_end|>", "llava": "</s>", "llava_next": "</s>", "llava_onevision": "</s>",
    "pixtral": "</s>", "paligemma": "<eos>", "mllama": "<|eot_id|>", "aya_vision": "<|END_OF_TURN_TOKEN|>",
    "cohere2_vision": "<|END_OF_TURN_TOKEN|>", "glm46v": "<|endoftext|>", "glm_ocr": "<|endoftext|>",
    "glm5_next": "<|endoftext|>",
    "exaone4_5": "[|endofturn|]", "video_llama_3": "<|im_end|>", "gemma4_unified": "<turn|>",
    "kimi_k25": "<|im_end|>", "lighton_ocr": "<|im_end|>", "lfm3_vl": "<|im_end|>",
    "deepseek_vl": "</s>", "minimax_m3_vl": "[e~[", "ovis2": "<|im_end|>",
}  # fmt: skip
# What the templates of the families write for an image, and around the messages of users and assistants.
IMAGE = {
    "internvl": "<IMG_CONTEXT>\\n", "glm4v": "<|begin_of_image|><|image|><|end_of_image|>", "mistral3": "[IMG]",
    "gemma4": "\\n\\n<|image|>\\n\\n", "lfm2_vl": "<image>",
    "exaone4_5": "<vision><|image_pad|></vision>\\n", "video_llama_3": "<|image_pad|>\\n",
    "kimi_k25": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n", "lighton_ocr": "<|image_pad|>",
    "lfm3_vl": "<|image_start|><|image|><|image_end|>",
    "llava": "<image>\\n", "mllama": "<|image|>", "aya_vision": "<image>", "cohere2_vision": "<|IMG_PATCH|>",
    "deepseek_vl": "<image_placeholder>\\n", "minimax_m3_vl": "]<]image[>[", "ovis2": "<image>\\n",
}  # fmt: skip
ROLES = {
    "internvl": ("<|im_start|>user\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "glm4v": ("<|user|>\\n", "", "<|assistant|>\\n"),
    "mistral3": ("[INST]", "[/INST]", ""),
    "gemma4": ("<|turn>user\\n", "<turn|>\\n", "<|turn>model\\n"),
    "lfm2_vl": ("<|im_start|>user\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "exaone4_5": ("[|user|]\\n", "[|endofturn|]\\n", "[|assistant|]\\n"),
    "video_llama_3": ("<|im_start|>user\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "kimi_k25": ("<|im_user|>user<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
    "lfm3_vl": ("<|im_start|>user\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "lighton_ocr": ("<|im_start|>user\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "llava": ("USER: ", " ", "ASSISTANT: "),
    "aya_vision": ("USER: ", "<|END_OF_TURN_TOKEN|>", "CHATBOT: "),
    "deepseek_vl": ("User: ", "\\n\\n", "Assistant: "),
    "ovis2": ("<|im_start|>user\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "minimax_m3_vl": ("]~b]user\\n", "[e~[\\n", "]~b]ai\\n"),
    "mllama": ("user\\n\\n", "<|eot_id|>", "assistant\\n\\n"),
}
# Of the image processors that transformers has for torchvision alone.
LFM2_VL = {
    "image_processor_type": "Lfm2VlImageProcessor",
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "tile_size": 16,
    "min_image_tokens": 2,
    "max_image_tokens": 6,
    "min_tiles": 2,
    "max_tiles": 4,
    "max_pixels_tolerance": 1.5,
}
COHERE2_VISION = {
    "image_processor_type": "Cohere2VisionImageProcessor",
    "size": {"height": 16, "width": 16},
    "patch_size": 2,
    "max_patches": 4,
}
KIMI = {
    "image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 4, "merge_size": 2, "max_patches": 24,
    "size": {"max_height": 8, "max_width": 8},
}  # fmt: skip
FILES = {"lfm2_vl": LFM2_VL, "cohere2_vision": COHERE2_VISION, "kimi_k25": KIMI}


def template(family: str) -> str:
    """A chat template in the manner of the family."""
    alike = {
        **dict.fromkeys(("glm4v_moe", "glm46v", "glm_ocr", "glm5_next"), "glm4v"), "llava_next": "llava",
        "llava_onevision": "llava", "pixtral": "mistral3", "gemma4_unified": "gemma4",
    }  # fmt: skip
    family = alike.get(family, family)
    user, end, assistant = ROLES["aya_vision" if family == "cohere2_vision" else family]
    return (
        "{% for message in messages %}{% if message['role'] == 'user' %}" + user + "{% else %}" + assistant
        + "{% endif %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}{% if content['type'] == 'image' %}" + IMAGE[family]
        + "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{% if message['role'] == 'user' %}" + end + "{% else %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + assistant + "{% endif %}"
    )  # fmt: skip


def processor_of(family: str) -> Any:
    """The image processor of the family, with small images."""
    if family in ("internvl", "aya_vision"):
        return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4)
    if family in ("mistral3", "pixtral", "lighton_ocr"):
        side = {"mistral3": 4, "pixtral": 8, "lighton_ocr": 8}[family]
        return PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": side, "width": side})
    tiles: dict[str, Any] = {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": PLACES}
    if family == "mllama":
        return MllamaImageProcessorPil(size=tiles["size"])
    if family == "paligemma":
        return SiglipImageProcessorPil(size=tiles["size"])
    if family == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=tiles["size"])
    if family == "llava_next":
        return LlavaNextImageProcessorPil(**tiles, crop_size=tiles["size"])
    if family == "llava_onevision":
        return LlavaOnevisionImageProcessorPil(**tiles)
    if family in ("gemma4", "gemma4_unified"):
        return Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=140)
    if family == "ovis2":
        return Ovis2ImageProcessorPil(size=tiles["size"], crop_to_patches=True, max_patches=4)
    if family == "deepseek_vl":
        return DeepseekVLImageProcessorPil(size=tiles["size"], min_size=2)
    if family in ("exaone4_5", "lfm3_vl", "minimax_m3_vl"):
        return Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 128, "longest_edge": 512})
    if family == "video_llama_3":
        return VideoLlama3ImageProcessorPil(patch_size=8, size={"shortest_edge": 128, "longest_edge": 512})
    if family == "glm5_next":
        return Glm5NextImageProcessorPil(patch_size=4, min_image_tokens=4, max_image_tokens=16)
    return Glm4vImageProcessorPil(patch_size=4, size={"shortest_edge": 256, "longest_edge": 1024})


def vl_folder(folder: Path, family: str) -> Path:
    """The folder, after config.json, tokenizer and image processor were written to it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    if family == "mllama":  # whose image token is behind the vocabulary
        tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>", "eos_token": ENDS[family]})
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS[family], "eos_token": ENDS[family]})
    if family == "paligemma":  # which has no template
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = None if family == "paligemma" else template(family)
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) < TEXT["vocab_size"]
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    by_index = (
        "mistral3",
        "pixtral",
        "mllama",
        "aya_vision",
        "paligemma",
        "llava",
        "llava_next",
        "llava_onevision",
        "minimax_m3_vl",
    )
    entry = "image_token_index" if family in by_index else "image_token_id"
    token = {entry: tokenizer.convert_tokens_to_ids(TOKENS[family][0])}
    config = {"model_type": family, "tie_word_embeddings": False, **ids, **token, **PARTS[family]}
    config["text_config"] = {**config["text_config"], **ids}
    if family == "mllama":
        config["text_config"] |= {"vocab_size": config["image_token_index"], "bos_token_id": tokenizer.bos_token_id}
    if family in ("gemma4", "gemma4_unified"):
        ends = dict(zip(("boi_token_id", "eoi_token_id"), TOKENS[family][1:3], strict=True))
        config |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in ends.items()}
        config |= {"video_token_id": None, "audio_token_id": None}
    if family == "lfm3_vl":
        others = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
        config |= dict(zip(others, tokenizer.convert_tokens_to_ids(TOKENS[family][1:4]), strict=True))
    if family == "ovis2":
        config["visual_indicator_token_ids"] = tokenizer.convert_tokens_to_ids(TOKENS[family][1:6])
    (folder / "config.json").write_text(json.dumps(config))
    if family in FILES:
        (folder / "preprocessor_config.json").write_text(json.dumps(FILES[family]))
        return folder
    processor_of(family).save_pretrained(folder)
    if family == "internvl":
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    return folder


def with_open_gates(model):
    """The model, in which the layers of a Llama 3.2 Vision that read images add something: random ones start shut."""

    def leaf(path, x):
        return x + 0.5 if path_name(path).endswith("gate") else x

    if (model.hf_config or {}).get("model_type") != "mllama":
        return model
    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(leaf, model.params))


def as_transformers(folder: Path, images: list, ids: np.ndarray) -> dict[str, Any]:
    """What the model of the family in transformers reads of images, beside token ids `[1,T]`."""
    import torch

    config = json.loads((folder / "config.json").read_text())
    family = "pixtral" if config["vision_config"].get("model_type") == "pixtral" else config["model_type"]
    if family == "cohere2_vision":
        from jaxrl_llm.data import image_processors

        own = image_processors.load(folder, AutoTokenizer.from_pretrained(folder))
        assert own is not None
        return {"pixel_values": torch.tensor(own.pixels(images)).permute(0, 3, 1, 2)}
    if family in ("internvl", "aya_vision"):
        made = GotOcr2ImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt", crop_to_patches=True)
        return {"pixel_values": made["pixel_values"]}
    if family == "kimi_k25":
        from jaxrl_llm.data import image_processors
        from tests.models.images import row_by_row

        own = image_processors.load(folder, AutoTokenizer.from_pretrained(folder))
        assert own is not None
        patches, grids = zip(*(row_by_row(torch.tensor(image)) for image in own.pixels(images)), strict=True)
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    if family in ("pixtral", "lighton_ocr"):  # that of Mistral 3 too
        made = PixtralImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt", patch_size=8)
        return {"pixel_values": made["pixel_values"], "image_sizes": torch.as_tensor(made["image_sizes"])}
    if "llava" in family:
        made = processor_of(family)([images] if family == "llava_onevision" else images, return_tensors="pt")
        return dict(made)
    if family == "mllama":
        made = dict(processor_of(family)([images], return_tensors="pt"))
        spans = get_cross_attention_token_mask(ids[0].tolist(), config["image_token_index"])
        seen = convert_sparse_cross_attention_mask_to_dense([spans], made.pop("num_tiles"), 4, ids.shape[1])
        return {**made, "cross_attention_mask": torch.tensor(seen)}
    if family == "paligemma":  # no token is in a prompt
        made = processor_of(family)(images, return_tensors="pt")
        return {**made, "token_type_ids": torch.ones(ids.shape, dtype=torch.int)}
    if family in ("deepseek_vl", "ovis2"):
        made = type(processor_of(family)).from_pretrained(folder)(images, return_tensors="pt")
        return {"pixel_values": made["pixel_values"]}
    if family in ("exaone4_5", "video_llama_3", "lfm3_vl", "minimax_m3_vl", "glm5_next"):
        return dict(type(processor_of(family)).from_pretrained(folder)(images, return_tensors="pt"))
    types = torch.tensor(ids == config["image_token_id"]).int()
    if family == "lfm2_vl":
        from jaxrl_llm.data import image_processors
        from tests.models.images import rows_of_patches

        own = image_processors.load(folder, AutoTokenizer.from_pretrained(folder))
        assert own is not None
        return rows_of_patches(family, torch.tensor(ids), own.pixels(images))
    if family in ("gemma4", "gemma4_unified"):
        made = Gemma4ImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")
        values, places = made["pixel_values"], made["image_position_ids"]
        if family == "gemma4_unified":
            merged = [merged_patches(x[y[:, 0] >= 0], y[y[:, 0] >= 0]) for x, y in zip(values, places, strict=True)]
            values, places = (torch.nn.utils.rnn.pad_sequence(x, True, -1) for x in zip(*merged, strict=True))
        return {"pixel_values": values, "image_position_ids": places, "mm_token_type_ids": types}
    made = Glm4vImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")
    return {**made, "mm_token_type_ids": types}


def merged_patches(patches, places) -> tuple[Any, Any]:
    """The patches `[L/4,48 x 4]` of Gemma 4 12B, of 2 x 2 of those of Gemma 4 each, and their places, by the function
    of its image processor, whose file needs torchvision as a whole."""
    import torch

    file = Path(gemma4_unified.__path__[0]) / "image_processing_gemma4_unified.py"
    source = ast.parse(file.read_text())
    source.body = [x for x in source.body if isinstance(x, ast.FunctionDef) and x.name == "patches_merge"]
    names: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(source, file.name, "exec"), names)
    values, found = names["patches_merge"](patches[None], places[None], len(patches) // 4)
    return values[0], found[0]
