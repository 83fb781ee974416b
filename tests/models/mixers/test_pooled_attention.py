"""Attention to blocks that are rated by pooled keys: by hand, in decoding and in packed rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models.mixers.attention import Attention, AttentionArrays, KeyValues, ShiftedKeyValues
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.pooled_attention import PooledAttention
from jaxrl_llm.models.mixers.query_blocks import as_mask, tokens_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import attention_mask, segment_positions
from tests.models.decoding import whole_rows_of_decoding

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3,
    rotary_fraction=0.5, qk_norm="head", index_heads=5, index_head_dim=6, index_block=3, index_top=6,
    mixers=(Attention, PooledAttention, PooledAttention),
)  # fmt: skip
ARRAYS = AttentionArrays(np.array([1.0, 0.3], np.float32))


def rotated(x, position: int) -> np.ndarray:
    """x `[...,e]` with its first four numbers rotated."""
    angles = position * ARRAYS.inv_freq
    first, second = x[..., :2], x[..., 2:4]
    turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
    return np.concatenate([*turned, x[..., 4:]], axis=-1)


def seen_by_hand(mixer, x) -> np.ndarray:
    """Which tokens each of one document, of the hidden states x `[T,D]`, attends to: `[T,T]`."""
    c, size = mixer.config, mixer.config.index_block
    both = (x @ np.asarray(mixer.indexer.qk.kernel[...])).reshape(len(x), c.index_heads + 1, -1)

    def normed(x, norm):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * np.asarray(norm.scale[...])

    q, keys = normed(both[:, :-1], mixer.indexer.q_norm), both[:, -1]
    blocks = [keys[start : start + size].mean(0) for start in range(0, len(x) - size + 1, size)]
    blocks = [rotated(normed(k, mixer.indexer.k_norm), number * size) for number, k in enumerate(blocks)]
    found = np.tril(np.ones((len(x), len(x)), bool))
    for t, query in enumerate(q):
        scores = [np.maximum(rotated(query, t) @ k, 0).sum() for k in blocks[: (t + 1) // size]]
        for number in np.argsort(-np.array(scores))[c.index_top // size :]:
            found[t, number * size : (number + 1) * size] = False
    return found


def test_the_best_blocks_by_hand(monkeypatch):
    """Of rows with padding on either side and two documents; and of next tokens behind prompts that end within a block
    and at the end of one."""
    rng, mixer = np.random.default_rng(0), PooledAttention(CONFIG, nnx.Rngs(0))
    for norm in (mixer.indexer.q_norm, mixer.indexer.k_norm):
        assert norm.scale is not None
        norm.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, 6), jnp.float32)
    segments = np.array([[0, 0, *[1] * 11, *[2] * 9, 0, 0], [1] * 24])
    x = rng.normal(size=(2, 24, 16)).astype(np.float32)
    positions = segment_positions(jnp.asarray(segments))
    inputs = AttentionInputs(positions, jnp.asarray(segments), None)
    kept = KeyValues(jnp.zeros((2, 2, 5, 8)), jnp.zeros((2, 2, 5, 8)))
    monkeypatch.setattr(
        Attention, "prefill", lambda self, x, inputs, arrays, choosing: (choosing and choosing.keywords["choice"], kept)
    )
    monkeypatch.setattr(Attention, "decode", lambda self, x, inputs, prompt, cache, arrays, choosing: (choosing, cache))
    first = mixer.prefill(jnp.asarray(x), inputs, ARRAYS)[0]
    found = np.asarray(as_mask(tokens_of(first, jnp.arange(24), 3), 24))
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        own = segments[row] == segment
        np.testing.assert_array_equal(found[row][own][:, own], seen_by_hand(mixer, x[row, own]))
        assert not found[row][own][:, ~own].any()

    # Prompts of 4, 6 and 1 tokens, of which two rows each go on by 10.
    lengths, most = (4, 6, 1), 6
    mask = np.arange(most) >= most - np.array(lengths)[:, None]
    x = rng.normal(size=(3, 2, most + 10, 16)).astype(np.float32)
    x[:, 1, :most] = x[:, 0, :most]
    prompts = AttentionInputs(
        segment_positions(jnp.asarray(mask, int)), jnp.asarray(mask, int), attention_mask(mask * 1)
    )
    _, prompt = mixer.prefill(jnp.asarray(x[:, 0, :most]), prompts, ARRAYS)
    cache = jax.tree.map(lambda x: jnp.full_like(x, 7.0), mixer.empty_cache(prompt, 2, 8))
    for first in range(0, 10, 2):
        if first == 4:  # rows get more room on their way
            cache = mixer.grow_cache(cache, 10)
        new = jnp.asarray(x[:, :, most + first : most + first + 2].reshape(3, 4, 16))
        places = np.array(lengths)[:, None] + first + np.tile(np.arange(2), 2)
        inputs = DecodeInputs(jnp.asarray(places), jnp.asarray(mask), jnp.full((3, 2), first))
        choosing, cache = mixer.decode(new, inputs, prompt, cache, ARRAYS)
        for group, row in np.ndindex(3, 2):
            whole = seen_by_hand(mixer, x[group, row, most - lengths[group] :])
            for w in range(2):
                expected = whole[lengths[group] + first + w]
                if choosing is None:
                    assert expected[: lengths[group] + first + w + 1].all()
                    continue
                chosen = np.asarray(as_mask(choosing.keywords["chosen"], 16))[group, row, w, 0]
                in_prompt, in_row = np.split(chosen, [most])
                np.testing.assert_array_equal(in_prompt[mask[group]], expected[: lengths[group]])
                np.testing.assert_array_equal(in_row[: first + w + 1], expected[lengths[group] :][: first + w + 1])
                assert not in_row[first + w + 1 :].any() and not in_prompt[~mask[group]].any()


def test_positions_of_images_move_the_first_block_of_a_row():
    """A block that a prompt begins and its row ends is rotated to where its first token is in the prompt."""
    mixer, rng = PooledAttention(CONFIG, nnx.Rngs(0)), np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, 4, 16)), jnp.float32)
    segments, places = jnp.ones((1, 4), int), jnp.array([[[0, 0], [3, 5], [3, 6], [8, 9]]])
    mask = attention_mask(segments)
    inputs = AttentionInputs(segment_positions(segments), segments, mask, rotary=places, shift=jnp.array([5]))
    _, prompt = mixer.prefill(x, inputs, ARRAYS)
    assert isinstance(prompt.kept, ShiftedKeyValues)
    np.testing.assert_array_equal(prompt.first, [[8, 9]])
    np.testing.assert_array_equal(prompt.kept.shift, [5])


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_decoding_equals_whole_rows(block):
    """Tokens one by one and three at once, of prompts shorter and longer than what is chosen; packed documents too."""
    net, rng = Net(dataclasses.replace(CONFIG, index_block=block)), np.random.default_rng(2)
    params = jax.jit(net.init)(jax.random.key(0))
    documents = [rng.integers(0, 31, length) for length in (7, 10, 2)]
    whole_rows_of_decoding(net, params, documents, rng.integers(0, 31, (3, 2, 6)))
