"""Attention to pools: those that an indexer chooses, by hand, in decoding, in packed rows and in a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoModelForCausalLM, Glm5NextTextConfig

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import glm5_next_text
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.pooled_latents import PooledLatentAttention, PromptPools
from jaxrl_llm.models.mixers.query_blocks import as_mask
from jaxrl_llm.models.mixers.sparse_attention import SharedSparseAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import segment_positions
from tests.models.decoding import logits_of, whole_rows_of_decoding
from tests.models.oracles import VARIANTS
from tests.models.short_run import trained_and_kept

CONFIG = ModelConfig(
    vocab_size=61, width=16, layers=3, heads=4, kv_heads=4, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3,
    query_rank=12, latent_size=6, latent_norm_eps=None, value_head_dim=5, rotary_fraction=0.0,
    unrotated_layers=(0, 1, 2), index_heads=8, index_head_dim=6, index_top=6, index_pool=3, shared_indexers=(1,),
    mixers=(PooledLatentAttention, SharedSparseAttention, PooledLatentAttention),
)  # fmt: skip


def random_mixer(config):
    """A mixer with learned numbers of the places in a pool."""
    mixer = PooledLatentAttention(config, nnx.Rngs(0))
    mixer.indexer.places[...] = jax.random.normal(jax.random.key(1), mixer.indexer.places.shape)
    return mixer


def chosen_by_hand(mixer, q, made_of, weights, own: int) -> np.ndarray:
    """Which tokens of a document the one at `own` attends to, whose query is q `[i,e]`, of their keys and gates."""
    c, places = mixer.config, np.asarray(mixer.indexer.places[...])
    size = c.index_pool
    rates = {}
    for pool in range((own + 1) // size):
        keys, gates = np.split(made_of[pool * size : (pool + 1) * size], 2, axis=-1)
        shares = np.exp(gates + places)
        key = (shares / shares.sum(0) * keys).sum(0)
        rates[pool] = sum(weight * max(x @ key, 0.0) for weight, x in zip(weights, q, strict=True))
    best = sorted(rates, key=lambda pool: -rates[pool])[: c.index_top // size]
    pools = np.arange(len(made_of)) // size
    kept = np.isin(pools, best)
    if (own + 1) % size:
        kept |= pools == own // size
    return kept & (np.arange(len(made_of)) <= own)


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 6))])
def test_the_best_pools_by_hand(size):
    """Of rows with padding on either side and two documents, of which one has an incomplete pool; and of next tokens
    behind prompts that end within a pool, or are shorter than one."""
    mixer = random_mixer(dataclasses.replace(CONFIG, index_pool=size))
    rng, heads = np.random.default_rng(size), (8, 6)
    segments = np.array([[0, 0, *[1] * 11, *[2] * 8, 0], [1] * 22, [0] * 22])
    q, keys, weights = (rng.normal(size=(3, 22, *x)).astype(np.float32) for x in (heads, (12,), (8,)))
    arrays = [jnp.asarray(x) for x in (q, keys, weights)]
    ids = jnp.asarray(segments)
    found = mixer._chosen_of_rows(*arrays, AttentionInputs(segment_positions(ids), ids, None))
    found = as_mask(found, 22)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        places = np.flatnonzero(segments[row] == number)
        for own, t in enumerate(places):
            expected = chosen_by_hand(mixer, q[row, t], keys[row, places], weights[row, t], own)
            np.testing.assert_array_equal(np.asarray(found)[row, t, places], expected)
            assert np.asarray(found)[row, t].sum() == expected.sum()
    assert not np.asarray(found)[2].any()

    prompts, length = np.array([[0, 0, 0, 1, 1], [1] * 5]), np.array([[4], [7]])
    ids = jnp.asarray(prompts)
    prompt_keys, row_keys, q, weights = (
        rng.normal(size=x).astype(np.float32) for x in ((2, 5, 12), (2, 1, 10, 12), (2, 1, 2, *heads), (2, 1, 2, 8))
    )
    pools, _ = mixer._pools_of_rows(
        jnp.asarray(prompt_keys), AttentionInputs(segment_positions(ids), ids, None), jnp.float32
    )
    latest = np.pad(prompt_keys, ((0, 0), (size - 1, 0), (0, 0)))[:, 5:]
    cache = PromptPools(jnp.zeros((2, 5, 6)), pools, jnp.asarray(latest))
    inputs = DecodeInputs(jnp.zeros((2, 2), int), ids > 0, jnp.asarray(length))
    found = mixer._chosen_of_next(jnp.asarray(q), cache, jnp.asarray(row_keys), jnp.asarray(weights), inputs)
    found = as_mask(found, 15)
    for group, step in np.ndindex(2, 2):
        real = np.concatenate([prompts[group] > 0, np.ones(10, bool)])
        made_of = np.concatenate([prompt_keys[group], row_keys[group, 0]])[real]
        own = prompts[group].sum() + length[group, 0] + step
        expected = chosen_by_hand(mixer, q[group, 0, step], made_of, weights[group, 0, step], own)
        np.testing.assert_array_equal(np.asarray(found)[group, 0, step, real], expected)
        assert np.asarray(found)[group, 0, step].sum() == expected.sum()


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 2, 6, 1])
def test_decoding_equals_whole_rows(size):
    """Tokens one by one and three at once, of prompts shorter and longer than what is chosen; packed rows too."""
    config = dataclasses.replace(CONFIG, index_pool=size)
    net, rng = Net(config), np.random.default_rng(2)
    params = jax.jit(net.init)(jax.random.key(0))
    # Tokens that are alike would be rated alike by the first layer, and by chance one or the other chosen for the next.
    documents = [rng.permutation(31)[:length] for length in (7, 10, 1)]
    continuations = 31 + np.stack([rng.permutation(30)[:6] for _ in range(6)]).reshape(3, 2, 6)
    whole_rows_of_decoding(net, params, documents, continuations, packs=(2, 0))


@pytest.mark.slow
def test_short_rows_are_not_rated():
    """They see everything, as in latent attention, and other rows do not."""
    net = Net(CONFIG)
    params = jax.jit(net.init)(jax.random.key(0))
    dense = dataclasses.replace(CONFIG, mixers=(LatentAttention,) * 3, shared_indexers=(), index_top=0, index_pool=0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 9)))
    stacks = (params["latent_layers"], params["shared_latent_layers"])
    without = {k: v for k, v in stacks[0]["latent"].items() if k != "indexer"}
    first = {**stacks[0], "latent": without}
    layers = jax.tree.map(lambda a, b: jnp.stack([a[0], b[0], a[1]]), first, stacks[1])
    plain = {k: v for k, v in params.items() if not k.endswith("latent_layers")} | {"latent_layers": layers}
    found, expected = (logits_of(n, p, tokens[:, :6], None) for n, p in ((net, params), (Net(dense), plain)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    found, expected = (logits_of(n, p, tokens, None) for n, p in ((net, params), (Net(dense), plain)))
    assert np.abs(found - expected)[:, 6:].max() > 0.01


@pytest.mark.slow
def test_a_run_keeps_the_indexer(root, tmp_path):
    """Weight decay leaves it as it is too, and the sampler's log-probs are the trainer's."""
    entries = VARIANTS["glm5_next_text"]().to_dict() | {"vocab_size": 320, "swiglu_limit": 2.0}
    AutoModelForCausalLM.from_config(Glm5NextTextConfig(**entries)).save_pretrained(tmp_path / "model")
    names, kept = trained_and_kept(root, tmp_path)
    assert kept == {name for name in names if "/indexer/" in name or name.endswith("/correction")}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim = 4 .* supported: 0"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False .* supported: True"),
        ({"index_topk": 7}, "index_topk = 7 .* multiples of index_kpool = 2"),
        ({"q_lora_rank": None}, "q_lora_rank = None"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 .* num_attention_heads = 4"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 .* from 2"),
        ({"linear_attn_config": {"gate_lower_bound": 1.0}}, "linear_lower_bound = 1.0 .* numbers below 0"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types = .* linear_attention or indexed_attention"),
        ({"indexer_types": ["full"] * 4}, "indexer_types = .* for each of the 5 layers"),
        ({"indexer_types": ["full"] * 4 + ["shared"]}, "indexer_types = .* but those behind one that is full"),
        ({"indexer_types": ["full", "shared", *["full"] * 3]}, "indexer_types = .* but those behind one that is full"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0 .* above 0"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters = 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_entries_that_are_refused(entries, message):
    whole = VARIANTS["glm5_next_text"]().to_dict() | {"architectures": None}
    with pytest.raises(ConfigError, match=message):
        glm5_next_text.to_config(whole | entries)


def test_entries_of_linear_attention_in_one_object_are_read():
    """As transformers reads them: they go over those beside them, and a gate that is safe has a bound."""
    whole = VARIANTS["glm5_next_text"]().to_dict() | {"architectures": None, "linear_lower_bound": None}
    given = {"head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4}
    for bound, expected in (({}, -5.0), ({"gate_lower_bound": -3.0}, -3.0), ({"safe_gate": False}, None)):
        entries = whole | {"linear_attn_config": given | bound}
        config = glm5_next_text.to_config(entries)
        theirs = Glm5NextTextConfig(**{name: x for name, x in entries.items() if name != "model_type"})
        assert (config.delta_key_dim, config.delta_value_heads, config.delta_conv) == (8, 2, 4)
        assert config.delta_floor == theirs.linear_lower_bound == expected
        assert glm5_next_text.to_config(glm5_next_text.from_config(config, entries)) == config
