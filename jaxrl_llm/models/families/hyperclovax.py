"""HyperCLOVA X SEED Think: Granite with norms before and behind each part."""

from typing import Any

from jaxrl_llm.models.families import decoder, granite, llama
from jaxrl_llm.models.families.decoder import LAYER, norms
from jaxrl_llm.models.families.entries import number, positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "hyperclovax"
ARCHITECTURE = "HyperCLOVAX"
KEYS = (*decoder.KEYS, *norms("layers/", LAYER, {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}))
DEFAULTS = {"logits_scaling": 1.0, "use_post_norm": True}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    if hf.get("attention_multiplier") is None:
        size = hf.get("head_dim") or positive(hf, "hidden_size") // positive(hf, "num_attention_heads")
        hf["attention_multiplier"] = size**-0.5
    own = {
        **decoder.read_fields(hf, llama.FIELDS),
        **granite.multipliers(hf),
        "logit_divisor": 1 / number("logits_scaling", hf["logits_scaling"], above=0),
        "norms": "both" if hf["use_post_norm"] else "pre",
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **granite.multiplier_entries(config),
        "logits_scaling": decoder.reciprocal(config.logit_divisor, (DEFAULTS | (base or {}))["logits_scaling"]),
        "use_post_norm": config.norms == "both",
        **decoder.write_fields(config, llama.FIELDS),
    }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
