"""Whole rows in blocks of queries: the same as by one mask, and no array of a row's tokens by its tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.models.flops import matmul_parameters, row_flops
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.mixers import compressed_attention, latent_attention, query_blocks
from jaxrl_llm.models.mixers.attention import attend
from jaxrl_llm.models.mixers.block_attention import BlockAttention
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs
from jaxrl_llm.models.mixers.pooled_attention import PooledAttention
from jaxrl_llm.models.mixers.pooled_latents import PooledLatentAttention
from jaxrl_llm.models.mixers.query_blocks import NONE, Places, as_mask, best, over_queries
from jaxrl_llm.models.mixers.sparse_attention import SharedSparseAttention, SparseLatentAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import attention_mask, segment_positions
from tests.models.decoding import decode, whole_rows_of_decoding
from tests.models.mixers.test_compressed_attention import CONFIG as COMPRESSED

SHAPE = {
    "vocab_size": 31, "width": 16, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 24, "init_scale": 0.4,
    "norm_eps": 1e-3,
}  # fmt: skip
LATENT = ModelConfig(
    **SHAPE, layers=3, query_rank=12, latent_size=6, rotary_head_dim=4, value_head_dim=5, index_heads=8,
    index_head_dim=6, index_top=3, shared_indexers=(1,), attention_sinks=True,
    mixers=(SparseLatentAttention, SharedSparseAttention, SparseLatentAttention),
)  # fmt: skip
POOLS = dataclasses.replace(
    LATENT, index_top=6, index_pool=3, mixers=(PooledLatentAttention, SharedSparseAttention, PooledLatentAttention)
)
GROUPED = ModelConfig(
    **SHAPE | {"kv_heads": 2}, layers=2, rotary_fraction=0.5, qk_norm="head", index_heads=2, index_head_dim=6,
    index_block=3, index_top=6, index_local=1, attention_sinks=True, mixers=(BlockAttention,) * 2,
)  # fmt: skip
MEANS = dataclasses.replace(GROUPED, mixers=(PooledAttention,) * 2)
CONFIGS = {"latents": LATENT, "pools": POOLS, "blocks": GROUPED, "mean keys": MEANS, "entries": COMPRESSED}
MODULES = (query_blocks, latent_attention, compressed_attention)  # that ask whether copies pay


def rows(length: int, documents: int = 2):
    """Tokens and segments `[2,T]`: documents with padding around them, and one that fills a row."""
    rng = np.random.default_rng(0)
    ids = np.ones((2, length), int)
    ids[0] = np.minimum(np.arange(length) * (documents + 1) // length + 1, documents)
    ids[0, :3], ids[0, -5:] = 0, 0
    return jnp.asarray(rng.integers(0, 31, (2, length))), jnp.asarray(ids)


def logits_and_gradients(net, params, tokens, segments):
    def loss(params):
        logits = jnp.where((segments != 0)[..., None], net.bind(params)(tokens, segments), 0.0)
        return jnp.sin(logits).sum(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, gradients


def arrays_of(jaxpr, found=None):
    """The shapes of all arrays of a program, those within loops, branches and what is computed again included."""
    found = set() if found is None else found
    for equation in jaxpr.eqns:
        found.update(tuple(x.aval.shape) for x in (*equation.invars, *equation.outvars) if hasattr(x.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            arrays_of(inner, found)
    return found


def test_what_queries_of_a_block_see():
    """As the mask of whole rows says it, prefixes of a group too, with blocks that do not divide the row."""
    segments = jnp.array([[0, 1, 1, 2, 2, 3, 3, 3, 0, 4, 4]])
    prefixes = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]])
    inputs = AttentionInputs(segment_positions(segments), segments, None, prefixes=prefixes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_blocks, "SMALLEST_BLOCK", 2)
        ends = []

        def see(block, end):
            ends.append(end)
            return jnp.pad(block.see(inputs, end), ((0, 0), (0, 0), (0, 11 - end)))

        found = over_queries(see, Places.of(inputs), 1)
    assert sorted(set(ends)) == [3, 6, 9, 11]
    np.testing.assert_array_equal(found, attention_mask(segments, prefixes))


def test_the_best_of_equal_ones_are_the_first():
    scores, seen = jnp.array([[1.0, 2.0, 2.0, 2.0], [1.0, 2.0, 0.0, 5.0]]), jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]]) > 0
    assert best(scores, seen, 2).tolist() == [[1, 2], [0, NONE]]
    assert best(scores, seen, 5).tolist() == [[1, 2, 3, 0, NONE], [0, *[NONE] * 4]]
    assert as_mask(best(scores, seen, 2), 4).tolist() == [[False, True, True, False], [True, False, False, False]]


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_to_a_choice(heads, monkeypatch):
    """That of all heads, or of each key/value head, by masks of blocks and by copies: outputs, and gradients that are
    sums over all who have chosen a key."""
    rng, length = np.random.default_rng(0), 21
    shapes = ((2, length, 2, 2, 8), (2, length, 2, 8), (2, length, 2, 6), (2, 2))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    ids = jnp.asarray([[0] * 2 + [1] * 8 + [2] * 9 + [0] * 2, [1] * length])
    inputs = AttentionInputs(segment_positions(ids), ids, attention_mask(ids))
    scores = jnp.asarray(rng.normal(size=(2, length, heads, length)))
    choice = best(scores, jnp.broadcast_to(inputs.mask[:, :, None], scores.shape), 4)

    def of(attending):
        def loss(arrays):
            q, k, v, sinks = arrays
            out = jnp.where((ids != 0)[..., None, None, None], attending(GROUPED, q, k, v, inputs, sinks=sinks), 0.0)
            return jnp.sin(out).sum(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)

    mask = as_mask(choice.swapaxes(1, 2), length)
    by_mask = inputs._replace(mask=mask if heads > 1 else mask[:, 0], by_mask=True)
    expected = of(lambda config, q, k, v, _, sinks: attend(config, q, k, v, by_mask, None, sinks))
    monkeypatch.setattr(query_blocks, "BLOCK_BYTES", 1)  # blocks of eight
    for copies in (0, 4):
        tokens = functools.partial(query_blocks.attend_to_choice, choice=choice, copies=copies)
        found = of(functools.partial(tokens, tokens=lambda _, choice: choice.swapaxes(1, 2)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("alone", [False, True], ids=["mask", "copies"])
def test_blocks_equal_one_mask(name, alone, monkeypatch):
    """Logits and gradients, of blocks that do not divide the row, by their masks and by copies of what is chosen."""
    net = Net(CONFIGS[name])
    params = jax.jit(net.init)(jax.random.key(0))
    tokens, segments = rows(45)
    with monkeypatch.context() as patch:

        def by_one_mask(config, q, k, v, inputs, choice, tokens, copies, sinks=None):
            mask = as_mask(tokens(Places.of(inputs), choice), 45)
            mask = mask if mask.shape[1] > 1 else mask[:, 0]
            return attend(config, q, k, v, inputs._replace(mask=mask, by_mask=True), None, sinks)

        for module in MODULES:
            patch.setattr(module, "attend_to_choice", by_one_mask, raising=module is not compressed_attention)
            patch.setattr(module, "copies_pay", lambda *_: False)
        expected = logits_and_gradients(net, params, tokens, segments)
    for module in MODULES:
        monkeypatch.setattr(module, "copies_pay", lambda *_: alone)
    monkeypatch.setattr(query_blocks, "BLOCK_BYTES", 1)  # blocks of eight
    found = logits_and_gradients(net, params, tokens, segments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS][:4])
@pytest.mark.parametrize("pay", [False, True], ids=["mask", "copies"])
def test_decoding_equals_whole_rows(name, pay, monkeypatch):
    """Of prompts shorter and longer than what is chosen, by masks of all that is stored and by copies of the choice."""
    net, rng = Net(CONFIGS[name]), np.random.default_rng(2)
    params = jax.jit(net.init)(jax.random.key(0))
    for module in MODULES[:2]:
        monkeypatch.setattr(module, "copies_pay_next", lambda *_: pay)
    decode.clear_cache()
    documents = [rng.permutation(15)[:length] for length in (7, 10, 2)]
    continuations = 15 + np.stack([rng.permutation(16)[:6] for _ in range(6)]).reshape(3, 2, 6)
    whole_rows_of_decoding(net, params, documents, continuations)
    decode.clear_cache()


@pytest.mark.parametrize(
    "name", ["latents", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "latents")]
)
@pytest.mark.parametrize("program", ["gradients", "log-probs of groups", "prompts"])
def test_no_array_has_a_row_twice(name, program):
    """Of 512 tokens."""
    net, length = Net(dataclasses.replace(CONFIGS[name], remat="block")), 512
    tokens, segments = rows(length)
    prefixes = jnp.where(segments == 2, 1, 0) if net.config.shares_prefixes else None

    def loss(params, prefixes=None):
        return token_logps(net, params, Inputs(tokens, segments, prefix_segments=prefixes))[0].sum()

    traced = {
        "gradients": jax.grad(loss),
        "log-probs of groups": functools.partial(loss, prefixes=prefixes),
        "prompts": lambda params: net.bind(params).prefill(tokens, segments),
    }[program]
    assert not [shape for shape in arrays_of(jax.make_jaxpr(traced)(net.shapes()).jaxpr) if shape.count(length) > 1]


def test_arrays_within_loops_are_found():
    def masks(segments):
        return jax.lax.map(jax.checkpoint(lambda row: attention_mask(row[None]).sum()), segments)

    assert (1, 512, 512) in arrays_of(jax.make_jaxpr(masks)(rows(512)[1]).jaxpr)


def test_flops_by_hand():
    """Of documents of 5 and 2 tokens: tokens attend to 15 of the 18 that they see, and the layers with an indexer rate
    all 18, in the forward pass alone. Rows of `index_top` tokens are not rated."""
    net = Net(LATENT)
    dense = Net(dataclasses.replace(LATENT, mixers=(LatentAttention,) * 3, shared_indexers=(), index_top=0))
    ids, (frozen, trained) = jnp.array([[1] * 5 + [2] * 2]), matmul_parameters(net)
    plain, of_maps = (2 * sum(matmul_parameters(x)) for x in (dense, net))
    of_pair, rating = 3 * 2 * 4 * (8 + 5), 2 * 2 * 8 * 6
    forward, backward = (float(x[0]) for x in row_flops(net, ids))
    assert forward == of_maps * 7 + of_pair * 15 + rating * 18
    assert backward == (2 * frozen + 4 * trained) * 7 + 2 * of_pair * 15
    assert float(row_flops(dense, ids).forward[0]) == plain * 7 + of_pair * 18
    assert float(row_flops(net, ids[:, :3]).forward[0]) == of_maps * 3 + of_pair * 6


def test_tokens_of_pools_and_blocks_by_hand():
    """A token of a pool that it does not complete attends to that one too, and of blocks one is always its own."""
    places = jnp.arange(11)
    assert PooledLatentAttention.attended(POOLS, places).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8]
    assert PooledAttention.attended(MEANS, places).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8]
    assert BlockAttention.attended(GROUPED, places).tolist() == [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5]
    assert PooledLatentAttention.rating(POOLS, 11, 66) == 2 * 8 * 6 * 22
