"""EXAONE 3.0 and 3.5 (arXiv 2408.03541, 2412.04862): Llama's shape under names of its own."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.families.decoder import TensorName, maps, norms
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "exaone"
ARCHITECTURE = "Exaone"  # and "Llama", whose classes transformers has for it
LAYER = "transformer.h.{layer}."
KEYS = (
    TensorName("embed/weight", "transformer.wte.weight"),
    TensorName("norm/scale", "transformer.ln_f.weight"),
    *decoder.ENDS[2:],
    *norms("layers/", LAYER, {"input_norm": "ln_1", "post_attention_norm": "ln_2"}),
    *maps("layers/attention", f"{LAYER}attn.attention", decoder.QKVO | {"o": "out_proj"}),
    *maps("layers/mlp", f"{LAYER}mlp", {"gate": "c_fc_0", "up": "c_fc_1", "down": "c_proj"}),
)
MODULE_KEYS = decoder.KEYS
OTHER_KEYS = (MODULE_KEYS,)
NAMES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    family, own = decoder.class_of(hf, ARCHITECTURE, llama.ARCHITECTURE), decoder.read_fields(hf, llama.FIELDS)
    return decoder.to_config(hf, family, own, overrides, rope={"theta": 500_000.0})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    names = {name: common for name, common in NAMES.items() if base is None or name in base}
    family = decoder.class_of(base, ARCHITECTURE, llama.ARCHITECTURE)
    own = decoder.write_fields(config, llama.FIELDS)
    return decoder.from_own_names(config, base, names, {}, family, MODEL_TYPE, own)
