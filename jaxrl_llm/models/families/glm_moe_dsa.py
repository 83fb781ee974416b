"""GLM-5 (arXiv 2602.15763): DeepSeek-V3.2 with experts that are not in groups, and neighbouring dimensions rotated
together in the indexer too."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v32
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsa"
KEYS, OTHER_KEYS = deepseek_v32.KEYS, deepseek_v32.OTHER_KEYS
DEFAULTS = {
    **deepseek_v32.DEFAULTS,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf, layers = DEFAULTS | hf, positive(hf, "num_hidden_layers")
    types, every = hf.get("indexer_types") or hf.get("index_topk_pattern"), hf.get("index_topk_freq") or 1
    if types and set(types) - {"F", "full"}:
        refuse("indexer_types", types, f"full in each of the {layers} layers: none that takes the tokens of another")
    if not types and number("index_topk_freq", every) > 1:
        refuse("index_topk_freq", every, "1: an indexer in each layer")
    return deepseek_v32.read(hf, ARCHITECTURE, overrides, {"index_interleaved": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, deepseek_v32.entries(config, base))
