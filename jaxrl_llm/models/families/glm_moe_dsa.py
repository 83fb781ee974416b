"""GLM-5 (arXiv 2602.15763): DeepSeek-V3.2 with experts that are not in groups, and neighbouring dimensions rotated
together in the indexer too, which may serve several layers (arXiv 2603.12201)."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v32
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.mixers.sparse_attention import SharedSparseAttention, SparseLatentAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsa"
KEYS, OTHER_KEYS = deepseek_v32.KEYS, deepseek_v32.OTHER_KEYS
TYPES = {"F": "full", "S": "shared"}  # of indexers, in index_topk_pattern and indexer_types
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


def indexer_types(hf: dict[str, Any]) -> list[str]:
    """The type of each layer's indexer, full or shared; raises ConfigError for other types, and a list of another
    length."""
    hf = {"index_topk_freq": 1, "index_skip_topk_offset": 2} | hf
    layers = positive(hf, "num_hidden_layers")
    every, first = (int(number(entry, hf[entry])) for entry in ("index_topk_freq", "index_skip_topk_offset"))
    types = hf.get("indexer_types") or hf.get("index_topk_pattern")
    types = types or ["shared" if max(layer - first + 1, 0) % max(every, 1) else "full" for layer in range(layers)]
    types = [TYPES.get(kind, kind) for kind in types]
    if len(types) != layers or set(types) - {*TYPES.values()}:
        refuse("indexer_types", types, f"full or shared for each of the {layers} layers, and full for the first")
    return types


def shared_indexers(hf: dict[str, Any]) -> tuple[int, ...]:
    """The layers that attend to what another layer's indexer chooses; raises ConfigError as `indexer_types`, and where
    the first is one."""
    types = indexer_types(hf)
    if types[0] != "full":
        refuse("indexer_types", types, f"full or shared for each of the {len(types)} layers, and full for the first")
    return tuple(layer for layer, kind in enumerate(types) if kind == "shared")


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    shared, layers = shared_indexers(hf), range(positive(hf, "num_hidden_layers"))
    fields = {
        "index_interleaved": True,
        "shared_indexers": shared,
        "mixers": tuple(SharedSparseAttention if layer in shared else SparseLatentAttention for layer in layers),
    }
    return deepseek_v32.read(hf, ARCHITECTURE, overrides, fields)


def entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `to_config` reads."""
    own = deepseek_v32.entries(config, base)
    if base is None:
        shared = config.shared_indexers
        own["indexer_types"] = ["shared" if layer in shared else "full" for layer in range(config.layers)]
    return own


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, entries(config, base))
