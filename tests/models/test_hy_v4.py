"""Hunyuan 4's own entries and names; tests/models/test_families.py compares what it computes with transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.families import hy_v4
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.net import Net
from tests.models.oracles import VARIANTS, VOCAB, make_oracle

# Of tencent/Hy4-preview, but for entries that say nothing about the network.
PREVIEW = {
    "model_type": "hy_v4", "vocab_size": 120_832, "hidden_size": 6144, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 8,
    "n_routed_experts": 256, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "hc_mult": 4,
    "hc_magnitude": 2.0, "hc_eps": 1e-6, "swiglu_limit": 10.0, "enable_ihc": True, "gating_type": "elementwise",
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
}  # fmt: skip


def test_a_published_model():
    """Its number of key/value heads is that of no part of the network; an export keeps it."""
    config = hy_v4.to_config(PREVIEW)
    assert (config.kv_heads, config.head_dim, config.dense_layers) == (64, 256, (0,))
    full = [layer for layer in range(78) if layer not in config.shared_indexers]
    assert full[:4] == [0, 1, 5, 9] and len(full) == 21
    written = hy_v4.from_config(config, PREVIEW)
    assert written == written | PREVIEW and hy_v4.to_config(written) == config
    sizes = jax.tree.map(lambda x: x.size, Net(config).shapes())
    assert sum(jax.tree.leaves(sizes)) == 769_907_408_797


@pytest.mark.parametrize("table", hy_v4.OTHER_KEYS, ids=["modules", "written"])
def test_names_of_other_files(table, tmp_path):
    """Those of transformers' class and those that it writes; layers that predict further tokens are passed over."""
    net = Net(hy_v4.to_config(VARIANTS["hy_v4"]().to_dict() | {"architectures": None}))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), net.shapes())
    hf.save(net, params, tmp_path)
    names = {
        own.tensor.format(layer=layer): other.tensor.format(layer=layer)
        for own, other in zip(hy_v4.KEYS, table, strict=True)
        for layer in range(net.config.layers)
    }
    arrays = {names[name]: x for name, x in load_file(tmp_path / "model.safetensors").items()}
    arrays["model.mtp_layers.0.eh_proj.weight"] = np.ones((2, 2), np.float32)
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], params)


@pytest.mark.slow
def test_neighbours_that_are_rotated_together(tmp_path):
    """As with two halves, where the dimensions of queries and keys are in that order."""
    make_oracle("hy_v4").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    size = model.net.config.rotated_size
    heads = {"q_b/kernel": model.net.config.heads, "indexer/q/kernel": model.net.config.index_heads}
    others = ("kv_a/kernel", "indexer/k/kernel", "indexer/k_norm/scale", "indexer/k_norm/shift")
    order = np.arange(size).reshape(2, -1).T.reshape(-1)

    def in_order(path, x):
        name = "/".join(path_name(path).split("/")[2:])
        if name not in heads and name not in others:
            return x
        by_head = np.array(x).reshape(*x.shape[:-1], heads.get(name, 1), -1)
        by_head[..., -size:] = by_head[..., -size:][..., order]
        return jnp.asarray(by_head.reshape(x.shape))

    params = jax.tree_util.tree_map_with_path(in_order, model.params)
    entries = json.loads((tmp_path / "config.json").read_text()) | {"rope_interleave": True}
    config = hy_v4.to_config(entries)
    assert hy_v4.from_config(config, None)["rope_interleave"] is True
    other = dataclasses.replace(model, net=Net(config), params=params)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 12))
    np.testing.assert_allclose(other(tokens), model(tokens), atol=1e-5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hc_mult": 0}, "hc_mult = 0 .* integers from 1"),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0 .* numbers above 0"),
        ({"enable_ihc": False}, "enable_ihc = False .* True"),
        ({"gating_type": "headwise"}, "gating_type = 'headwise' .* elementwise"),
        ({"indexer_types": ["shared"] * 4}, "indexer_types = .* full for the first"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types = .* sparse for one"),
        ({"q_lora_rank": None}, "q_lora_rank = None"),
    ],
)
def test_what_is_not_computed_is_refused(entries, message):
    whole = VARIANTS["hy_v4"]().to_dict() | {"architectures": None}
    with pytest.raises(ConfigError, match=message):
        hy_v4.to_config(whole | entries)
