"""Attention to blocks: those that an indexer chooses, by hand, in decoding, in packed rows and in a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoModelForCausalLM, MiniMaxM3VLTextConfig

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import minimax_m3_vl_text
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.block_attention import BlockAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.query_blocks import as_mask, tokens_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import segment_positions
from tests.models.decoding import whole_rows_of_decoding
from tests.models.oracles import VARIANTS
from tests.models.short_run import trained_and_kept

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3,
    rotary_fraction=0.5, qk_norm="head", index_heads=2, index_head_dim=6, index_block=3, index_top=6, index_local=1,
    mixers=(Attention, BlockAttention, BlockAttention),
)  # fmt: skip


def chosen_by_hand(c, scores, positions, own: int) -> np.ndarray:
    """Which tokens at `positions`, of one document, the token at `own` attends to by their scores; -1 is padding."""
    kept = np.zeros(len(scores), bool)
    seen = (positions >= 0) & (positions <= own)
    numbers = sorted(set(positions[seen] // c.index_block))
    rates = {
        number: np.inf if own // c.index_block - number < c.index_local
        else scores[seen & (positions // c.index_block == number)].max()
        for number in numbers
    }  # fmt: skip
    for number in sorted(numbers, key=lambda number: -rates[number])[: c.index_top // c.index_block]:
        kept |= seen & (positions // c.index_block == number)
    return kept


@pytest.mark.parametrize("local", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_the_best_blocks_by_hand(local):
    """Of rows with padding on either side and two documents, of which one has an incomplete block; and of next tokens
    behind a prompt that ends within a block."""
    config = dataclasses.replace(CONFIG, index_local=local)
    rng, mixer = np.random.default_rng(local), BlockAttention(config, nnx.Rngs(0))
    segments = np.array([[0, 0, *[1] * 11, *[2] * 8, 0], [1] * 22])
    q, keys = rng.normal(size=(2, 22, 2, 6)).astype(np.float32), rng.normal(size=(2, 22, 6)).astype(np.float32)
    positions = np.asarray(segment_positions(jnp.asarray(segments)))
    inputs = AttentionInputs(jnp.asarray(positions), jnp.asarray(segments), None)
    first = mixer._chosen_of_rows(jnp.asarray(q), jnp.asarray(keys), inputs).swapaxes(1, 2)
    found = np.asarray(as_mask(tokens_of(first, jnp.arange(22), 3), 22))
    for row, head, t in np.ndindex(2, 2, 22):
        if segments[row, t]:
            places = np.where(segments[row] == segments[row, t], positions[row], -1)
            expected = chosen_by_hand(config, keys[row] @ q[row, t, head], places, positions[row, t])
            np.testing.assert_array_equal(found[row, head, t], expected)

    prompts, length = np.array([[0, 0, 0, 1, 1], [1] * 5]), np.array([[4], [7]])  # tokens of 5 and 12 before the next
    q, row_keys = rng.normal(size=(2, 1, 2, 2, 6)), rng.normal(size=(2, 1, 10, 6))
    prompt_keys = rng.normal(size=(2, 5, 6))
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, prompt_keys, row_keys))
    decoded = DecodeInputs(jnp.zeros((2, 2), int), jnp.asarray(prompts > 0), jnp.asarray(length))
    found = np.asarray(as_mask(mixer._chosen_of_next(*arrays, decoded), 15))
    for group, next_token, head in np.ndindex(2, 2, 2):
        before = prompts[group].sum()
        places = np.concatenate([np.cumsum(prompts[group]) - 1, before + np.arange(10)])
        places[:5][prompts[group] == 0] = -1
        scores = np.concatenate([prompt_keys[group], row_keys[group, 0]]) @ q[group, 0, next_token, head]
        own = before + length[group, 0] + next_token
        np.testing.assert_array_equal(found[group, 0, next_token, head], chosen_by_hand(config, scores, places, own))


@pytest.mark.slow
def test_decoding_equals_whole_rows():
    """Tokens one by one and three at once, of prompts shorter and longer than what is chosen; packed documents too."""
    net, rng = Net(CONFIG), np.random.default_rng(2)
    params = jax.jit(net.init)(jax.random.key(0))
    assert set(params) >= {"layers", "blocks_layers"} and "indexer" not in params["layers"]["attention"]
    documents = [rng.integers(0, 31, length) for length in (7, 10, 2)]
    whole_rows_of_decoding(net, params, documents, rng.integers(0, 31, (3, 2, 6)))


@pytest.mark.slow
def test_a_run_keeps_the_indexer(root, tmp_path):
    """Weight decay leaves it as it is too, the sampler's log-probs are the trainer's, and the export is read back."""
    entries = VARIANTS["minimax_m3_vl_text"]().to_dict() | {"vocab_size": 320, "swiglu_limit": 2.0}
    AutoModelForCausalLM.from_config(MiniMaxM3VLTextConfig(**entries)).save_pretrained(tmp_path / "model")
    names, kept = trained_and_kept(root, tmp_path)
    assert kept == {name for name in names if "/indexer/" in name or name.endswith("/correction")}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf", output_loading_info=True)
    assert not any(again[1].values()) and again[0].config.model_type == "minimax_m3_vl_text"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"index_n_heads": 4}, "index_n_heads = 4 .* num_key_value_heads = 2"),
        ({"index_local_blocks": 4}, "index_local_blocks = 4 .* index_topk_blocks = 3"),
        ({"index_head_dim": 6}, "index_head_dim = 6 .* numbers from the 8 that are rotated"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = .* full_attention or minimax_m3_sparse"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types = .* sparse for one"),
    ],
)
def test_entries_that_are_refused(entries, message):
    whole = VARIANTS["minimax_m3_vl_text"]().to_dict() | {"architectures": None}
    with pytest.raises(ConfigError, match=message):
        minimax_m3_vl_text.to_config(whole | entries)
