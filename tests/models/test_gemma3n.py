"""Gemma 3n's own entries and edges; tests/models/test_families.py compares what it computes with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import gemma3n_text
from jaxrl_llm.models.layers import FeedForward
from tests.models.oracles import VARIANTS

# config.json of the text part of google/gemma-3n-E2B-it, but for entries that say nothing about the network.
E2B = {
    "model_type": "gemma3n_text", "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144, "hidden_size": 2048,
    "hidden_size_per_layer_input": 256, "intermediate_size": [8192] * 30, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": None, "attention_bias": False, "sliding_window": 512, "num_kv_shared_layers": 10,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "final_logit_softcapping": 30.0,
    "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4,
    "laurel_rank": 64, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "initializer_range": 0.02,
}  # fmt: skip


def test_a_published_model():
    config = gemma3n_text.to_config(E2B)
    assert {name: len(layers) for name, layers in config.stacks.items()} == {
        "layers": 10, "sparse_layers": 10, "shared_layers": 10,
    }  # fmt: skip
    kinds = config.layer_configs
    assert [config.of(kind).ffn_sparsity for kind in kinds] == E2B["activation_sparsity_pattern"]
    assert kinds[24].shares == 19 and kinds[23].shares == 18 and kinds[24].window is None
    assert (config.altup_streams, config.laurel_rank, config.per_layer_vocab) == (4, 64, 262_144)
    written = gemma3n_text.from_config(config, E2B)
    assert written == written | E2B and gemma3n_text.to_config(written) == config
    defaults = {name: x for name, x in E2B.items() if name not in ("activation_sparsity_pattern", "layer_types")}
    assert gemma3n_text.to_config(defaults) == config


def test_rows_of_padding_alone_have_gradients():
    """Their embeddings may be 0, and so all gates of a token, whose standard deviation is compared with."""
    config = gemma3n_text.to_config(VARIANTS["gemma3n_text"]().to_dict())
    mlp = FeedForward(config.of(config.layer_configs[0]), nnx.Rngs(0))
    assert mlp.cutoff is not None
    graph, params = nnx.split(mlp)
    x = jnp.stack([jnp.zeros(config.width), jnp.linspace(-1.0, 1.0, config.width)])
    gradients = jax.grad(lambda params, x: nnx.merge(graph, params)(x).sum(), argnums=(0, 1))(params, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert np.abs(gradients[1][1]).max() > 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"altup_active_idx": 1}, r"altup_active_idx = 1 is not supported; supported: 0"),
        ({"altup_correct_scale": False}, r"altup_correct_scale = False .* True"),
        ({"altup_num_inputs": 1}, r"altup_num_inputs = 1 .* integers from 2"),
        ({"intermediate_size": [48, 48, 48, 48, 64]}, r"intermediate_size = .* one number for all of the 5 layers"),
        ({"activation_sparsity_pattern": [0.5, 0.6, 0.0, 0.0, 0.0]}, r"activation_sparsity_pattern = .* one share"),
        ({"activation_sparsity_pattern": [0.5]}, r"activation_sparsity_pattern = .* each of the 5 layers"),
        ({"num_kv_shared_layers": 4}, r"num_kv_shared_layers = 4 .* leave a layer of each type"),
    ],
    ids=str,
)
def test_other_networks_are_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        gemma3n_text.to_config(VARIANTS["gemma3n_text"]().to_dict() | entries)
