"""The text part of Mistral Large 4: sparse attention, by indexers that serve several layers, to latents that do too;
rotary frequencies with a learned factor each, and none in every fourth layer; queries that grow with the log of their
position by numbers of each head; and experts by a softmax in fp32. No family of its own: transformers has no class of
it with a head."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, deepseek_v32, glm_moe_dsa, layer_types, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import computed, dense_layers, mlp_types, number, positive, refuse
from jaxrl_llm.models.mixers.sparse_attention import (
    ReadingSharedSparseAttention,
    ReadingSparseAttention,
    SharedSparseAttention,
    SparseLatentAttention,
)
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mistral_large4_text"
ARCHITECTURE = "MistralLarge4"
# The mixer of a layer by whether its indexer is its own, and its latents are.
MIXERS = {
    (True, True): SparseLatentAttention,
    (True, False): ReadingSparseAttention,
    (False, True): SharedSparseAttention,
    (False, False): ReadingSharedSparseAttention,
}


def _keys(
    ends: tuple[TensorName, ...], layer: str, words: dict[str, str], gated: dict[str, str],
    experts: tuple[TensorName, ...],
) -> tuple[TensorName, ...]:  # fmt: skip
    """The table of files in which the names of a layer's parts begin with `layer`; `words` are those of other names,
    `gated` the maps of feed-forwards."""
    net = f"{layer}{words['attention']}"
    parts = {"layers/latent": net, "layers/latent/indexer": f"{net}.indexer"}
    growths = (
        TensorName(f"{path}/growth/{name}", f"{part}.{words[name]}")
        for path, part in parts.items()
        for name in ("scale", "shift")
    )
    return (
        *ends,
        *decoder.norms("layers/", layer, {x: words[x] for x in ("input_norm", "post_attention_norm")}),
        *decoder.maps("layers/latent", net, {x: words[x] for x in ("q", "kv_a", "kv_b", "o")}),
        *decoder.norms("layers/latent/", f"{net}.", {"kv_a_norm": words["kv_a_norm"]}),
        *growths,
        *decoder.maps("layers/latent/indexer", f"{net}.indexer", {"q": "wq_b", "k": "wk", "proj": "weights_proj"}),
        *decoder.layer_norm("layers/latent/indexer/q_norm", f"{net}.indexer.q_input_norm"),
        *decoder.layer_norm("layers/latent/indexer/k_norm", f"{net}.indexer.k_norm"),
        *decoder.maps("layers/mlp", f"{layer}{words['dense']}", gated),
        *decoder.maps("layers/mlp/shared", f"{layer}{words['shared']}", gated),
        *experts,
    )  # fmt: skip


KEYS = _keys(
    (*decoder.ENDS, TensorName("log_frequencies", "model.rotary_emb.alpha")),
    LAYER,
    {
        "attention": "self_attn", "scale": "softmax_scaling.scale", "shift": "softmax_scaling.bias",
        "input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "q": "q_proj",
        "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj", "o": "o_proj", "kv_a_norm": "kv_a_layernorm",
        "dense": "mlp", "shared": "mlp.shared_experts",
    },
    decoder.GATED,
    decoder.stacked_experts("mlp"),
)  # fmt: skip
WORDS = {"gate": "w1", "up": "w3", "down": "w2"}
# The names in Mistral's own files, which those of the whole have.
OWN_KEYS = _keys(
    (
        TensorName("embed/weight", "tok_embeddings.weight"),
        TensorName("norm/scale", "norm.weight"),
        TensorName("head/kernel", "output.weight", transpose=True),
        *decoder.linear("score", "score"),
        TensorName("log_frequencies", "lerope.alpha"),
    ),
    "layers.{layer}.",
    {
        "attention": "attention", "scale": "ssmax_scaling.s", "shift": "ssmax_scaling.b",
        "input_norm": "attention_norm", "post_attention_norm": "ffn_norm", "q": "wq", "kv_a": "wkv_a_with_mqa",
        "kv_b": "wkv_b", "o": "wo", "kv_a_norm": "kv_a_norm", "dense": "feed_forward", "shared": "shared_experts",
    },
    WORDS,
    (
        TensorName("layers/mlp/router/kernel", "layers.{layer}.gate.weight", transpose=True),
        *(
            TensorName(f"layers/mlp/experts/{x}/kernel", f"layers.{{layer}}.experts.{{expert}}.{word}.weight", True)
            for x, word in WORDS.items()
        ),
    ),
)  # fmt: skip
# The fields that are an entry each.
FIELDS = {name: entry for name, entry in deepseek_v3.LATENT_FIELDS.items() if name != "rope_interleaved"}
EXPERT_FIELDS = {name: entry for name, entry in deepseek_v3.EXPERT_FIELDS.items() if name != "normalize_top_k"}
DEFAULTS = {
    **deepseek_v3.DEFAULTS,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "moe_intermediate_size": 6144,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "final_logit_softcapping": 30.0,
}  # for entries that are left out
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
KINDS = ("default", "linear", "llama3", "yarn")  # whose frequencies are those of every row
# Of layers without rotary positions, whose heads have as many numbers all the same.
UNROTATED = (("rotary_head_dim", 0), ("rotary_fraction", 0.0))


def with_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with rotary parameters; raises ConfigError for those of the length of a row."""
    rope = rotary.parameters_of(hf) or ROPE
    if (kind := rotary.kind_of(rope)) not in KINDS:
        refuse("rope_type", kind, ", ".join(KINDS))
    return {name: value for name, value in hf.items() if name != "rope_scaling"} | {"rope_parameters": rope}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_rope(DEFAULTS | hf)
    layers = positive(hf, "num_hidden_layers")
    given = {entry: value for entry, value in hf.items() if value is not None}
    computed(given, {"layer_types": ["indexed_attention"] * layers, "norm_topk_prob": True, "q_lora_rank": None})
    unrotated = layer_types.read_unrotated(hf)
    shared = glm_moe_dsa.shared_indexers(hf)
    sources = _sources(hf, unrotated)
    sizes = decoder.read_fields(hf, deepseek_v32.SIZES)
    if sizes["index_head_dim"] < positive(hf, "qk_rope_head_dim"):
        refuse("index_head_dim", sizes["index_head_dim"], f"numbers from qk_rope_head_dim = {hf['qk_rope_head_dim']}")
    if len(unrotated) == layers:
        refuse("no_rope_layers", hf["no_rope_layers"], "lists with a 1 for one of the layers")
    own = {
        **sizes,
        "mixers": tuple(MIXERS[layer not in shared, sources[layer] == layer] for layer in range(layers)),
        "shared_indexers": shared,
        "latent_sources": () if sources == tuple(range(layers)) else sources,
        "latent_norm_eps": None,
        "rope_interleaved": True,
        "index_interleaved": True,
        "rope_learned": True,
        "unrotated_layers": unrotated,
        "unrotated_fields": UNROTATED if unrotated else (),
        "query_growth_learned": True,
        "logit_softcap": number("final_logit_softcapping", hf["final_logit_softcapping"], above=0),
        "dense_layers": dense_layers(hf, int(number("first_k_dense_replace", hf["first_k_dense_replace"]))),
        "router_sigmoid": False,
        "router_correction": False,
        "router_fp32": True,
        "normalize_top_k": True,
    }
    first = {"first_k_dense_replace": 0}  # which layers are dense is said above
    return deepseek_v3.read(hf | first, ARCHITECTURE, overrides, own)


def _sources(hf: dict[str, Any], unrotated: tuple[int, ...]) -> tuple[int, ...]:
    """The layer whose latents each layer reads. Raises ConfigError for one that transformers would not read: those of
    the latest layer before it that others read too, rotary positions or none as it has itself."""
    layers = positive(hf, "num_hidden_layers")
    sources = range(layers) if hf.get("kv_source_layers") is None else hf["kv_source_layers"]
    if len(sources) != layers or not all(source in range(layers) for source in sources):
        refuse("kv_source_layers", sources, f"one of the layers for each of the {layers}")
    read = {source for layer, source in enumerate(sources) if source != layer}
    latest: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        kind = layer in unrotated
        if source != layer and latest.get(kind) != source:
            known = "with rotary positions or without as it, of which others read"
            refuse("kv_source_layers", sources, f"the layer itself, or the latest layer before it, {known}")
        if layer in read and source == layer:
            latest[kind] = layer
    return tuple(sources)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary entries of a ModelConfig."""
    if config.local_rope is not None:
        refuse("rope_parameters", "a set for each type of layer", "one set of parameters for all layers")
    given = rotary.write(config)
    return {
        "rope_parameters": {"rope_type": "default", **(given["rope_scaling"] or {}), "rope_theta": given["rope_theta"]}
    }


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **deepseek_v3.entries(config, base),
        **decoder.write_fields(config, deepseek_v32.SIZES),
        "final_logit_softcapping": config.logit_softcap,
    }
    for entry in ("rope_interleave", "norm_topk_prob", "q_lora_rank", "num_nextn_predict_layers"):
        own.pop(entry, None)
    del own["first_k_dense_replace"]
    if base is None:
        shared = config.shared_indexers
        own |= layer_types.write_unrotated(config) | {
            "mlp_layer_types": mlp_types(config),
            "indexer_types": ["shared" if layer in shared else "full" for layer in range(config.layers)],
            "kv_source_layers": list(config.latent_sources or range(config.layers)),
        }
    return decoder.from_config(
        config, base, ARCHITECTURE, MODEL_TYPE, own,
        rope=lambda base: with_rope(DEFAULTS | base), write=write_rope,
    )  # fmt: skip
