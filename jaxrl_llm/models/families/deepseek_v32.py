"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 whose attention is to the tokens that an indexer chooses."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.families.decoder import LAYER
from jaxrl_llm.models.families.entries import dense_before_sparse, mlp_types, positive, refuse, unset
from jaxrl_llm.models.mixers.sparse_attention import SparseLatentAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "deepseek_v32"
ARCHITECTURE = "DeepseekV32"
INDEXER, NET = "layers/latent/indexer", f"{LAYER}self_attn.indexer"
INDEXER_KEYS = (
    *decoder.maps(INDEXER, NET, {"q": "wq_b", "k": "wk", "proj": "weights_proj"}),
    *decoder.layer_norm(f"{INDEXER}/k_norm", f"{NET}.k_norm"),
)
KEYS, OTHER_KEYS = (*deepseek_v3.KEYS, *INDEXER_KEYS), ((*deepseek_v3.OTHER_KEYS[0], *INDEXER_KEYS),)
SIZES = {"index_heads": "index_n_heads", "index_head_dim": "index_head_dim", "index_top": "index_topk"}
DEFAULTS = {
    **deepseek_v3.DEFAULTS,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(DEFAULTS | hf, ARCHITECTURE, overrides, {"index_interleaved": False})


def read(hf: dict[str, Any], family: str, overrides: dict[str, Any], fields: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a `family` with the shape of DeepSeek-V3.2, of entries with their defaults; `fields` are those
    in which it differs."""
    unset(hf, "mlp_bias")
    if hf["q_lora_rank"] is None:
        refuse("q_lora_rank", None, "integers from 1, beside an indexer")
    sizes = decoder.read_fields(hf, SIZES)
    if sizes["index_head_dim"] < positive(hf, "qk_rope_head_dim"):
        refuse("index_head_dim", sizes["index_head_dim"], f"numbers from qk_rope_head_dim = {hf['qk_rope_head_dim']}")
    own = sizes | {"mixers": (SparseLatentAttention,) * positive(hf, "num_hidden_layers"), "rope_interleaved": True}
    dense = dense_before_sparse(hf, hf["first_k_dense_replace"] or 0)
    return deepseek_v3.read(hf | {"first_k_dense_replace": dense}, family, overrides, own | fields)


def entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `read` reads."""
    own = deepseek_v3.entries(config, base) | decoder.write_fields(config, SIZES)
    del own["rope_interleave"]
    return own | ({"mlp_layer_types": mlp_types(config)} if base is None else {})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, entries(config, base))
