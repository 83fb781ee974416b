"""The text part of models that also read images or sound, where the other parts are not read here.

Such a folder is read as one of the text part alone, which is a family of its own, and exported as that: transformers
and vLLM read the export as a model of text. The other parts stay where they are, in the folder that was read.
"""

from typing import Any

from jaxrl_llm.models.families.entries import refuse

# The model_types, and what their text parts may be. Those of READ are among them where they have no part for images.
WHOLES = {
    "apertus1p5": ("apertus1p5_text",),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "kimi_k25": ("deepseek_v3", "kimi_k2"),
    "llama4": ("llama4_text",),
    "step3p7": ("step3p5",),
}
ANY_TEXT = ("step3p7",)  # whose text part may have any model_type, which transformers does not read
READ = ("gemma4", "gemma4_unified", "kimi_k25")
SHARED = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# How names begin in files of the whole, and in those of its text part alone.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    **{name: name for name in ("model.embed_tokens.", "model.layers.", "model.norm.")},
}


def entries_of(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of config.json that a text part alone has, of one of the WHOLES; those of another model as they are.

    `text_part_of` is what it is the part of. Raises ConfigError for a text part of another family.
    """
    families = WHOLES.get(str(config.get("model_type")))
    if families is None or (config["model_type"] in READ and config.get("vision_config") is not None):
        return config
    text = config.get("text_config")
    if config["model_type"] in ANY_TEXT and isinstance(text, dict):
        text = text | {"model_type": families[0]}
    if not isinstance(text, dict) or text.get("model_type", families[0]) not in families:
        refuse("text_config", text, f"the entries of a {' or '.join(families)} model")
    own = {name: x for name, x in text.items() if name not in ("architectures", "_name_or_path")}
    shared = {name: config[name] for name in SHARED if config.get(name) is not None}
    return {"model_type": families[0], **own, **shared, "text_part_of": config["model_type"]}


class Renamed:
    """A file of tensors in which one goes by another name, sliced like a file of safetensors."""

    def __init__(self, file: Any, name: str):
        self.file, self.name = file, name

    def get_slice(self, name: str) -> Any:
        """The tensor, whatever it is called."""
        return self.file.get_slice(self.name)


def tensors_of(where: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name: of those of a whole model the ones of its text part, by the names of that."""
    found: dict[str, Any] = {}
    for name, file in where.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            found[PREFIXES[prefix] + name.removeprefix(prefix)] = Renamed(file, name)
    return found
