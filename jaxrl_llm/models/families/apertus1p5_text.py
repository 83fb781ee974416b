"""The text part of Apertus 1.5: Apertus with codes of images and sound behind its words, which are read as tokens, and
which its head does not predict.

The parts that make codes of images and sound are not read: a folder of the type `apertus1p5` is read as its text part
(models/files/text_part.py).
"""

from typing import Any

from jaxrl_llm.models.families import apertus
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "apertus1p5_text"
ARCHITECTURE = "Apertus1p5Text"
KEYS = apertus.KEYS
HEAD = "output_vocab_size"  # rows of the head, where it has fewer than the embedding


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    rows = positive(hf, "vocab_size")
    head = rows if hf.get(HEAD) is None else positive(hf, HEAD)
    if head > rows:
        refuse(HEAD, head, f"up to vocab_size = {rows}")
    if head < rows and hf.get("tie_word_embeddings"):
        refuse("tie_word_embeddings", True, f"false, as the embedding has more rows than the head ({HEAD} = {head})")
    return apertus.read(hf, ARCHITECTURE, overrides, {"vocab_size": head, "unpredicted": rows - head})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    head = config.vocab_size if config.unpredicted else None
    own = {"vocab_size": config.embeddings, HEAD: head}
    return apertus.write(config, base, ARCHITECTURE, MODEL_TYPE, own)
