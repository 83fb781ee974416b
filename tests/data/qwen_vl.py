"""The folder of a tiny Qwen-VL without weights: images of any size, 8 x 8 pixels a token, a byte tokenizer."""

import functools
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from jaxrl_llm.models.files.hf import EMBEDDED
from tests.data.smolvlm import smolvlm_folder
from tests.data.vl_folders import PARTS as OTHERS
from tests.data.vl_folders import vl_folder

TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# That of Qwen2.5-VL-3B-Instruct, without videos.
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in "
    "content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}"
    "Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in "
    "content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
ENCODER = {
    "hidden_size": 24, "intermediate_size": 40, "depth": 2, "num_heads": 3, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DELTA_NETS = {
    "head_dim": 16, "linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}  # fmt: skip
# What differs between the families.
PARTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 2, 1]}},
        "vision_config": {
            "embed_dim": 24, "mlp_ratio": 2, "depth": 2, "num_heads": 3, "patch_size": 4, "hidden_size": 32,
        },
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 2, 1]}},
        "vision_config": ENCODER | {"window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": TEXT | {"head_dim": 8, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        "vision_config": ENCODER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": TEXT
        | {
            "head_dim": 8,
            "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
        "vision_config": ENCODER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": TEXT | DELTA_NETS,
        "vision_config": ENCODER | {"num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": TEXT
        | DELTA_NETS
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 20,
        },
        "vision_config": ENCODER | {"num_position_embeddings": 16},
    },
    "qwen4_exp": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "text_config": TEXT
        | DELTA_NETS
        | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 20, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1],
            "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 2, "indexer_n_heads": 12,
            "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4,
        },
        "vision_config": ENCODER | {"num_position_embeddings": 16},
    },
}  # fmt: skip


def qwen_vl_folder(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """The folder, after config.json, tokenizer and image processor were written to it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) < TEXT["vocab_size"]
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    config = {
        "model_type": family,
        "tie_word_embeddings": False,
        **ids,
        **dict(zip(names, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True)),
        **PARTS[family],
    }
    config["text_config"] = {"model_type": f"{family}_text", **config["text_config"], **ids}
    (folder / "config.json").write_text(json.dumps(config))
    # As the folders of transformers 4 name their bounds.
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": 128, "max_pixels": 512,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


# The folders of tiny models that read images, by family.
FOLDERS = {
    "smolvlm": smolvlm_folder,
    **{family: functools.partial(qwen_vl_folder, family=family) for family in PARTS},
    **{family: functools.partial(vl_folder, family=family) for family in OTHERS},
}
