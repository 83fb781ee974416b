"""EXAONE 3.0 and 3.5 (arXiv 2408.03541, 2412.04862): Llama's shape under names of its own."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.families.decoder import TensorName, maps
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "exaone"
ARCHITECTURE = "Exaone"  # and "Llama", whose classes transformers has for it
LAYER = "transformer.h.{layer}."
KEYS = (
    TensorName("embed/weight", "transformer.wte.weight"),
    TensorName("norm/scale", "transformer.ln_f.weight"),
    *decoder.ENDS[2:],
    TensorName("layers/input_norm/scale", f"{LAYER}ln_1.weight"),
    TensorName("layers/post_attention_norm/scale", f"{LAYER}ln_2.weight"),
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
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | renamed(hf, NAMES)
    return decoder.to_config(
        hf,
        decoder.class_of(hf, ARCHITECTURE, llama.ARCHITECTURE),
        llama.own_fields(hf),
        overrides,
        rope={"theta": 500_000.0},
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    names = {name: common for name, common in NAMES.items() if base is None or name in base}
    common = None if base is None else renamed(base, names)
    hf = decoder.from_config(config, common, decoder.class_of(base, ARCHITECTURE, llama.ARCHITECTURE), MODEL_TYPE, own)
    return decoder.with_own_names(hf, names)
