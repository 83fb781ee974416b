"""PaliGemma (arXiv 2407.07726) and PaliGemma 2 (arXiv 2412.03555): SigLIP tiles, a linear map, and a Gemma or Gemma 2
in which the tokens of a prompt, its images included, see each other."""

from typing import Any

from jaxrl_llm.models.families import gemma, gemma2, llava, siglip
from jaxrl_llm.models.families.decoder import TensorName, linear
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "paligemma"
# What reads a completion to rate it does not know where its prompt ends: there are no such heads.
ARCHITECTURE = {"lm": "PaliGemmaForConditionalGeneration", "score": "", "step": ""}
TEXTS = {module.MODEL_TYPE: module for module in (gemma, gemma2)}


def _vision_keys(tower: str) -> tuple[TensorName, ...]:
    return (*siglip.keys(tower), *linear("vision/projector/proj", "multi_modal_projector.linear"))


# Of each decoder, as the norms of a Gemma's and of a Gemma 2's layers have one name for another place.
TABLES = {name: llava.tables(text.KEYS, _vision_keys) for name, text in TEXTS.items()}
KEYS, MODULE_KEYS, _ = TABLES["gemma"]
# The tokenizer has no chat template: images, the beginning of the text, the prompt and a line break, as the processor
# of transformers writes them, then the answer.
CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{% if message['content'] is not string %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}{% endfor %}{{ bos_token }}"
    "{% for message in messages %}{{ text(message['content']) }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)
# For entries that are left out.
DEFAULTS = {"image_token_index": 256_000, "projection_dim": 2048, "tie_word_embeddings": True}
# And of the decoder those of its own class, as in transformers: the heads of PaliGemma 2 3B are such.
TEXT_DEFAULTS = {
    "gemma": {
        "vocab_size": 256_000, "hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 24_576,
        "num_attention_heads": 16,
    },
    "gemma2": {
        "vocab_size": 256_000, "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216,
        "num_attention_heads": 8,
    },
}  # fmt: skip


def keys(config: ModelConfig) -> tuple[TensorName, ...]:
    return _tables(config)[0]


def module_keys(config: ModelConfig) -> tuple[TensorName, ...]:
    return _tables(config)[1]


def other_keys(config: ModelConfig) -> tuple[tuple[TensorName, ...], ...]:
    return _tables(config)[2]


def _tables(config: ModelConfig):
    return TABLES["gemma2" if config.norms == "both" else "gemma"]


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS, TEXT_DEFAULTS)
    if text.get("use_bidirectional_attention") not in (None, True):
        refuse("text_config.use_bidirectional_attention", text["use_bidirectional_attention"], "true, or null")
    # Of prompts, see below.
    text |= {"use_bidirectional_attention": None}
    if (width := positive(text, "hidden_size")) != hf["projection_dim"]:
        refuse("projection_dim", hf["projection_dim"], f"the hidden_size of the text_config, {width}")
    token = siglip.image_token(hf, "image_token_index", text)
    encoder = siglip.headless(hf)
    vision = VisionConfig(encoder, 1, token, projector="linear", bidirectional="prompt")
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    vision = siglip.vision_of(config)
    own = {
        "model_type": MODEL_TYPE,
        "projection_dim": config.width,
        "vision_config": siglip.headless_entries(vision, base),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, TEXT_DEFAULTS, "image_token_index")
