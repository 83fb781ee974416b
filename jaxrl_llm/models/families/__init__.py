"""Model families: one file per Hugging Face `model_type`, with its config and its tensor names in both directions.

A family is a module with `MODEL_TYPE`, `ARCHITECTURE`, `KEYS` and two functions, which no file describes again:

- `to_config(hf, **overrides)` is the ModelConfig of the entries `hf` of a config.json, with other fields as `overrides`
  say. It raises ConfigError for what the network does not compute.
- `from_config(config, base)` are the entries of config.json for a net, over those of `base`, the one it was loaded
  from, or None. It raises ConfigError for a net that the family does not have, as one without a vision part.

Where checkpoints have other tensor names too, the tables of `OTHER_KEYS` are read as well, and never written.
`MODULE_KEYS` is the table of the names in transformers' class, where files have others: PEFT knows modules by them.
Where these tables differ from net to net, `keys(config)`, `other_keys(config)` and `module_keys(config)` give them.
`constants(config)` are the integers, by name, that files hold beside parameters and that follow from the config.
`unused_tensors(config)` are the names of tensors that files may have and that are not read, and UNREAD how the names of
those of whole parts begin. `CHAT_TEMPLATE` is that of tokenizers that have none, where the family has one of its own.
"""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families.decoder import describing
from jaxrl_llm.models.families.entries import check_kinds
from jaxrl_llm.models.model_config import ModelConfig

# The files of families. A net without a config.json is exported as the first one that describes it.
NAMES = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi3 qwen3_moe mixtral smollm3 olmo2 olmo3 granite glm glm4 "
    "olmoe qwen2_moe gpt_oss deepseek_v3 qwen3_next gemma4_text qwen3_5_text qwen3_5_moe_text llama4_text idefics3 "
    "smolvlm gemma3 qwen2_5_vl qwen3_vl qwen3_5 qwen3_5_moe qwen3_vl_moe qwen2_vl glm4_moe glm4_moe_lite minimax_m2 "
    "exaone4 ernie4_5 seed_oss lfm2 lfm2_moe ministral3 granitemoehybrid internvl glm4v glm4v_moe mistral3 nemotron_h "
    "afmoe kimi_linear olmo_hybrid falcon_h1 dots1 hunyuan_v1_dense arcee cohere2 gemma4 lfm2_vl apertus ernie4_5_moe "
    "granitemoe hunyuan_v1_moe llava_1_5 llava_next llava_onevision gemma3n_text paligemma mllama aya_vision "
    "cohere2_vision gpt2 gpt_neox opt phi stablelm starcoder2 cohere olmo exaone falcon nemotron jais2 cwm ministral "
    "flex_olmo granitemoeshared solar_open deepseek_v2 lfm3 nanochat vaultgemma gemma4_unified_text exaone_moe "
    "granite_swa granitemoe_swa youtu internlm3 hyperclovax iquestcoder sarvam_moe sarvam_mla deepseek_v32 "
    "glm_moe_dsa glm46v glm_ocr exaone4_5 video_llama_3 gemma4_unified "
    "mistral4 hy_v3 mellum cohere2_moe phimoe mimo_v2_flash laguna minicpm3 "
    "apertus1p5_text bailing_hybrid kolibri1 minimax_m3_vl_text kimi_k25 lighton_ocr lfm3_vl deepseek_vl minimax_m3_vl "
    "ovis2 gptj gpt_neo gpt_bigcode bamba bloom mpt mamba falcon_mamba mamba2 dbrx idefics2 jamba mistral_large4 "
    "longcat_flash qwen4_exp_text qwen4_exp deepseek_v4 step3p5 glm5_next_text glm5_next hy_v4 "
)
MODULES = [importlib.import_module(f"{__name__}.{name}") for name in NAMES.split()]
FAMILIES: dict[str, ModuleType] = {module.MODEL_TYPE: module for module in MODULES}
ALIKE = {"kimi_k2": FAMILIES["deepseek_v3"]}  # model_types of another family's form, as which they are exported
# What other model_types have that is not computed here.
NOT_COMPUTED = {
    "zaya": "attention to convolved queries and keys",
    "hrm_text": "layers that are passed several times",
    "minimax": "lightning attention",
    "deepseek_vl_hybrid": "a second encoder of images, SAM's",
    "granite4_vision": "images that Q-Formers of windows read",
}


def register(module: ModuleType) -> None:
    """Adds a family of the user's own; raises ConfigError for a module without what a family needs."""
    missing = [
        name for name in ("MODEL_TYPE", "ARCHITECTURE", "KEYS", "to_config", "from_config") if not hasattr(module, name)
    ]
    if missing:
        raise ConfigError(
            f"{module.__file__} has MODEL_TYPE, as a family of models has, but no {', '.join(missing)}; see "
            "jaxrl_llm/models/families/llama.py"
        )
    FAMILIES[module.MODEL_TYPE] = module


def family_of(hf: dict[str, Any]) -> ModuleType:
    """The family module of a config.json; raises ConfigError for an unsupported model_type, or nonsense in entries."""
    check_kinds(hf)
    model_type = hf.get("model_type")
    known = FAMILIES | ALIKE
    if model_type not in known:
        reason = NOT_COMPUTED.get(str(model_type))
        raise ConfigError(
            f"model_type {model_type!r} is not supported{f' ({reason})' if reason else ''}; supported are "
            f"{', '.join(known)}, and a family of your own, whose file model.register names (docs/models.md)."
        )
    return known[model_type]


def family_for(config: ModelConfig) -> ModuleType:
    """The first family whose config.json describes a net of this shape; raises ConfigError where none does."""
    if (module := describing(FAMILIES.values(), config)) is not None:
        return module
    plain = {field.name: field.default for field in dataclasses.fields(config)}
    parts = [f"{name}={value!r}" for name, default in plain.items() if (value := getattr(config, name)) != default]
    raise ConfigError(f"no family of {', '.join(FAMILIES)} describes a model with {', '.join(parts)} together.")
