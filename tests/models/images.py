"""Tiny random models with vision, made by transformers, and rows with images for them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Idefics3Config,
    SmolVLMConfig,
)

from jaxrl_llm.algorithms.batch import Images
from tests.models.oracles import SHAPE, VARIANTS, VOCAB

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
VISION = {
    "idefics3": lambda: Idefics3Config(**PARTS, scale_factor=2),
    "smolvlm": lambda: SmolVLMConfig(**PARTS, scale_factor=2, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3Config(
        text_config=VARIANTS["gemma3_text"]().to_dict(),
        vision_config={**ENCODER, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=TILE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    ),
}


class Document(NamedTuple):
    """Token ids, and the tiles `[tiles, H, W, C]` that its image tokens stand for."""

    tokens: np.ndarray
    pixels: np.ndarray


def make_vision_oracle(family: str):
    """A random model in which biases and norms are random too, so that none can be left out unnoticed."""
    torch.manual_seed(0)
    oracle = AutoModelForImageTextToText.from_config(VISION[family](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif not parameter.any():  # Gemma 3's projector starts from zeros
                parameter.normal_(std=ENCODER["initializer_range"])
    return oracle


def image_documents(tiles=(2, 1, 0)) -> list[Document]:
    """Documents of different lengths, with so many tiles each."""
    rng = np.random.default_rng(1)
    documents = []
    for number, count in enumerate(tiles):
        parts = [rng.integers(0, IMAGE_TOKEN, 3 + number)]
        for _ in range(count):
            parts += [np.full(TILE_TOKENS, IMAGE_TOKEN), rng.integers(0, IMAGE_TOKEN, 2)]
        pixels = rng.normal(size=(count, *TILE)).astype(np.float32)
        documents.append(Document(np.concatenate([*parts, rng.integers(0, IMAGE_TOKEN, 4)]), pixels))
    assert max(document.tokens.max() for document in documents) < VOCAB
    return documents


def padded_images(documents, side: str = "left") -> tuple[np.ndarray, np.ndarray, Images]:
    """Tokens and segments of the documents, padded with image tokens, and their images, padded with noise."""
    width, most = max(len(document.tokens) for document in documents), max(len(x.pixels) for x in documents)
    tokens = np.full((len(documents), width), IMAGE_TOKEN)
    segments = np.zeros_like(tokens)
    pixels = np.random.default_rng(2).normal(size=(len(documents), most, *TILE)).astype(np.float32)
    for row, (ids, tiles) in enumerate(documents):
        place = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        tokens[row, place], segments[row, place], pixels[row, : len(tiles)] = ids, 1, tiles
    return tokens, segments, Images(pixels, np.array([len(document.pixels) for document in documents], np.int32))


def as_torch(oracle, document: Document) -> dict[str, torch.Tensor]:
    """The arguments of transformers for a document as a row."""
    ids = torch.tensor(document.tokens)[None]
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pixels = torch.tensor(document.pixels.transpose(0, 3, 1, 2))
    if oracle.config.model_type == "gemma3":
        found["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    else:
        pixels = pixels[None]
    return found | ({"pixel_values": pixels} if len(document.pixels) else {})
