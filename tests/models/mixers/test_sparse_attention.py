"""Sparse attention: the tokens that an indexer chooses, by hand, in decoding and in runs that keep the indexer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, DeepseekV32Config, GlmMoeDsaConfig

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.families import deepseek_v32, glm_moe_dsa
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.query_blocks import as_mask, best
from jaxrl_llm.models.mixers.sparse_attention import SharedSparseAttention, SparseLatentAttention, rated
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from tests.models.decoding import continued_logits, logits_of, padded
from tests.models.oracles import EXPERTS, SHAPE, SPARSE
from tests.models.short_run import trained_and_kept

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3,
    query_rank=12, latent_size=6, rotary_head_dim=4, value_head_dim=5, rope_interleaved=True, index_heads=8,
    index_head_dim=6, index_top=3, mixers=(SparseLatentAttention,) * 2,
)  # fmt: skip
SHARED = dataclasses.replace(
    CONFIG, layers=3, shared_indexers=(1,), mixers=(SparseLatentAttention, SharedSparseAttention, SparseLatentAttention)
)


def test_the_best_tokens_by_hand():
    """Of what is seen as many as `index_top`, also where scores are equal; all of it where that is less."""
    rng = np.random.default_rng(0)
    q, keys, weights = rng.normal(size=(1, 7, 8, 6)), rng.normal(size=(1, 7, 6)), rng.normal(size=(1, 7, 8))
    keys[0, 4] = keys[0, 2]
    scores = np.zeros((7, 7))
    for t, s, i in np.ndindex(7, 7, 8):
        scores[t, s] += weights[0, t, i] * max(q[0, t, i] @ keys[0, s], 0.0)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, keys, weights)]
    found = rated("nti,nsi->nts", *arrays)
    np.testing.assert_allclose(found[0], scores, atol=1e-5)
    seen = np.tril(np.ones((7, 7), bool))
    seen[:, 1] = False  # padding
    kept = np.asarray(as_mask(best(found, jnp.asarray(seen[None]), 3), 7)[0])
    for t in range(7):
        visible = np.flatnonzero(seen[t])
        assert kept[t].sum() == min(len(visible), 3) and not kept[t][~seen[t]].any()
        assert scores[t][kept[t]].sum() == pytest.approx(np.sort(scores[t][visible])[::-1][:3].sum(), abs=1e-5)


@pytest.mark.slow
def test_the_choice_has_no_gradient_and_is_not_made_of_short_rows():
    net = Net(CONFIG)
    params = jax.jit(net.init)(jax.random.key(0))
    dense = Net(dataclasses.replace(CONFIG, mixers=(LatentAttention,) * 2, index_heads=0, index_top=0))
    plain = jax.tree.map(lambda x: x, params)
    for stack in CONFIG.stacks:
        del plain[stack]["latent"]["indexer"]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 9)))
    np.testing.assert_array_equal(
        logits_of(net, params, tokens[:, :3], None), logits_of(dense, plain, tokens[:, :3], None)
    )
    found, expected = logits_of(net, params, tokens, None), logits_of(dense, plain, tokens, None)
    np.testing.assert_allclose(found[:, :3], expected[:, :3], atol=1e-5)
    assert np.abs(found - expected)[:, 3:].max() > 0.01
    gradient = jax.grad(lambda params: token_logps(net, params, Inputs(tokens, jnp.ones_like(tokens)))[0].sum())(params)
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(gradient)}
    for name, x in leaves.items():
        assert (np.abs(x).max() == 0) == ("/indexer/" in name), name
    of_indexer = {name for name in leaves if "/indexer/" in name}
    assert of_indexer == set(CONFIG.frozen) & set(leaves) and len(of_indexer) == 5


@pytest.mark.slow
def test_a_layer_without_an_indexer_attends_to_what_another_chose():
    """Its parameters are in a stack of their own, and a change of the indexer before it changes what it attends to."""
    net = Net(SHARED)
    params = jax.jit(net.init)(jax.random.key(0))
    assert set(params) >= {"latent_layers", "shared_latent_layers"}
    assert [run.chosen_by for run in SHARED.layer_runs] == [None, 0, None]
    assert "indexer" not in params["shared_latent_layers"]["latent"]
    assert {name.partition("/")[0] for name in SHARED.frozen} == {"latent_layers"}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (1, 9)))
    choices = []

    def recorded(self, x, inputs, arrays, chosen, prefill=LatentAttention.prefill):
        jax.debug.callback(choices.append, as_mask(chosen, 9), ordered=True)
        return prefill(self, x, inputs, arrays, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentAttention, "prefill", recorded)
        jax.jit(lambda params: net.bind(params)(tokens))(params)
    jax.effects_barrier()
    assert len(choices) == 3 and choices[0].sum(-1).max() == 3
    np.testing.assert_array_equal(choices[1], choices[0])
    assert (choices[2] != choices[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["own", "shared"])
def test_decoding_equals_whole_rows(config):
    """Tokens one by one and three at once, of prompts shorter and longer than what is chosen; packed rows too."""
    net, rng = Net(config), np.random.default_rng(2)
    params = jax.jit(net.init)(jax.random.key(0))
    tokens, segments = padded([rng.integers(0, 31, length) for length in (6, 9, 2)], "left")
    continuations = rng.integers(0, 31, (3, 2, 6))
    full = np.concatenate([np.repeat(tokens, 2, axis=0), continuations.reshape(6, 6)], axis=1)
    full_segments = np.concatenate([np.repeat(segments, 2, axis=0), np.ones((6, 6), int)], axis=1)
    expected = np.asarray(logits_of(net, params, full, full_segments))[:, -6:].reshape(3, 2, 6, -1)
    for at_once in (1, 3):
        found = continued_logits(net, params, tokens, segments, continuations, at_once)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    packed = np.concatenate([full[0][3:], full[2]])[None]
    layout = np.concatenate([np.ones(12, int), np.full(15, 2)])[None]
    found = logits_of(net, params, packed, layout)[0]
    np.testing.assert_allclose(found[6:12], expected[0, 0], atol=2e-5)
    np.testing.assert_allclose(found[-6:], expected[1, 0], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_run_keeps_the_indexer(family, root, tmp_path):
    """Weight decay leaves it as it is too, and the sampler's log-probs are the trainer's."""
    shape = SHAPE | {"vocab_size": 320, "num_key_value_heads": 4, "initializer_range": 0.1}
    experts = EXPERTS | {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    config = DeepseekV32Config(**shape, **experts, **SPARSE, first_k_dense_replace=1)
    if family == "glm_moe_dsa":
        config = GlmMoeDsaConfig(**shape, **experts, **SPARSE, first_k_dense_replace=1, index_topk_pattern="FS")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    names, kept = trained_and_kept(root, tmp_path)
    assert kept == {name for name in names if "/indexer/" in name or name.endswith("/correction")}


@pytest.mark.parametrize(
    ("family", "config", "entries", "message"),
    [
        (deepseek_v32, DeepseekV32Config, {"q_lora_rank": None}, "q_lora_rank = None"),
        (deepseek_v32, DeepseekV32Config, {"index_topk": 0}, "index_topk = 0"),
        (deepseek_v32, DeepseekV32Config, {"n_routed_experts": 8}, "n_group = 8 .* as 2 experts rate a group"),
        (deepseek_v32, DeepseekV32Config, {"index_head_dim": 2}, "index_head_dim = 2 .* numbers from qk_rope_head_dim"),
        (glm_moe_dsa, GlmMoeDsaConfig, {"indexer_types": ["shared", "full"]}, "indexer_types = .* full for the first"),
        (glm_moe_dsa, GlmMoeDsaConfig, {"indexer_types": ["full"]}, "indexer_types = .* for each of the 2 layers"),
        (glm_moe_dsa, GlmMoeDsaConfig, {"indexer_types": None, "index_topk_freq": "2"}, "index_topk_freq = '2'"),
    ],
)
def test_entries_that_are_refused(family, config, entries, message):
    whole = config(**SHAPE | {"num_key_value_heads": 4}, **SPARSE, first_k_dense_replace=1).to_dict()
    family.to_config(whole | {"architectures": None})
    with pytest.raises(ConfigError, match=message):
        family.to_config(whole | {"architectures": None} | entries)
