"""Mistral Large 4: what its queries grow by, learned rotary frequencies, latents that layers share, and entries."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.families import family_of, mistral_large4_text
from jaxrl_llm.models.mixers.latent_attention import QueryGrowth
from jaxrl_llm.models.mixers.sparse_attention import SparseCache
from jaxrl_llm.models.net import Net
from tests.models.decoding import logits_of
from tests.models.oracles import VARIANTS

LAYERS = "the layer itself, or the latest layer before it"


def entries(variant="mistral_large4-text", **text):
    hf = copy.deepcopy(VARIANTS[variant]().to_dict())
    return hf | {"architectures": None, "text_config": hf["text_config"] | text}


def test_queries_grow_by_two_numbers_of_each_head():
    growth = QueryGrowth(2, "float32")
    q, positions = jnp.ones((1, 3, 2, 4)), jnp.array([[0, 5, 2]])
    np.testing.assert_array_equal(growth(q, positions), q)  # as it starts
    growth.scale[...], growth.shift[...] = jnp.array([0.5, -2.0]), jnp.array([1.0, 3.0])
    expected = [[0.5 * math.log(t + 1) + 1, -2 * math.log(t + 1) + 3] for t in (0, 5, 2)]
    np.testing.assert_allclose(growth(q, positions)[0, ..., 0], expected, rtol=1e-6)


@pytest.mark.slow
def test_frequencies_that_are_doubled_turn_as_doubled_positions_do():
    config = mistral_large4_text.to_config(entries("mistral_large4-plain")["text_config"])
    net, tokens = Net(config), np.random.default_rng(0).integers(0, 97, (1, 9))
    params = jax.jit(net.init)(jax.random.key(0))
    places = jnp.arange(9)[None]
    expected = net.bind(params)(tokens, np.ones_like(tokens), 2 * places)
    doubled = params | {"log_frequencies": jnp.full_like(params["log_frequencies"], math.log(2))}
    np.testing.assert_allclose(net.bind(doubled)(tokens, np.ones_like(tokens), places), expected, atol=1e-5)
    assert np.abs(logits_of(net, params, tokens, None) - expected).max() > 1e-3


def test_layers_that_read_the_latents_of_another_cache_none():
    net = Net(mistral_large4_text.to_config(entries()["text_config"]))
    tokens = jnp.ones((2, 7), jnp.int32)
    _, caches, _ = jax.eval_shape(lambda params: net.bind(params).prefill(tokens, tokens), net.shapes())
    rows = jax.eval_shape(lambda caches: net.empty_caches(caches, 3, 5), caches)

    def sizes(cache):
        return jax.tree.map(lambda x: x.shape[1:], cache)  # without the one layer of a run

    assert [sizes(cache) for cache in caches] == [
        SparseCache((2, 7, 20), (2, 7, 6)), (), SparseCache((2, 7, 16), (2, 7, 6)), SparseCache((), (2, 7, 6)), (),
        SparseCache((2, 7, 20), (2, 7, 6)),
    ]  # fmt: skip
    assert sizes(rows[0]) == SparseCache((2, 3, 5, 1, 20), (2, 3, 5, 1, 6)) and rows[1] == rows[4] == ()


def test_frequencies_and_routers_have_32_bits_whatever_the_others_have():
    config = family_of(hf := entries()).to_config(hf, param_dtype="bfloat16")
    leaves = jax.tree_util.tree_leaves_with_path(Net(config).shapes())
    wide = {path_name(path).partition("/")[2] or path_name(path) for path, x in leaves if x.dtype == jnp.float32}
    assert wide == {"log_frequencies", "mlp/router/kernel"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"kv_source_layers": [0, 0, 2, 0, 0, 5]}, f"kv_source_layers = .* {LAYERS}"),  # without rotary positions
        ({"kv_source_layers": [0, 1, 2, 0, 2, 1]}, f"kv_source_layers = .* {LAYERS}"),  # not the latest
        ({"kv_source_layers": [1, 1, 2, 3, 2, 5]}, f"kv_source_layers = .* {LAYERS}"),  # behind it
        ({"kv_source_layers": [0, 0, 2]}, "kv_source_layers = .* one of the layers for each of the 6"),
        ({"indexer_types": ["shared"] * 6}, "indexer_types = .* full for the first"),
        ({"no_rope_layers": [0] * 6, "kv_source_layers": None}, "no_rope_layers = .* lists with a 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic' .* default, linear"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types = .*'indexed_attention'"),
        ({"index_head_dim": 2}, "index_head_dim = 2 .* numbers from qk_rope_head_dim = 4"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping = 0 .* numbers above 0"),
    ],
)
def test_entries_that_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        family_of(hf := entries(**text)).to_config(hf)
