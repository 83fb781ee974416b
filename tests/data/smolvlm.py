"""The folder of a tiny SmolVLM without weights: tiles of 16 x 16 pixels and 4 tokens, a byte tokenizer, a template."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from jaxrl_llm.models.files.hf import EMBEDDED

TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TOKENS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", "<|im_start|>", *TAGS]
# That of SmolVLM-256M-Instruct: a content that is text, and not parts, is lost in it.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def smolvlm_folder(folder: Path) -> Path:
    """The folder, after config.json, tokenizer and image processor were written to it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS, "eos_token": "<end_of_utterance>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "tie_word_embeddings": False,
        **ids,
        "text_config": {
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "tie_word_embeddings": False, **ids,
        },
        "vision_config": {
            "model_type": "smolvlm_vision", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 16, "patch_size": 4,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}).save_pretrained(folder)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file of the image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
