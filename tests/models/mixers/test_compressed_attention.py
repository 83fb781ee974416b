"""Attention to compressed tokens: entries by hand, decoding, packed rows, rows of several blocks, and a run."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoModelForCausalLM, DeepseekV4Config

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.mixers import compressed_attention
from jaxrl_llm.models.mixers.compressed_attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    WindowAttention,
)
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.rope import Rope
from jaxrl_llm.models.transformer import segment_positions
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.decoding import continued_logits, decode, logits_of, padded, prefill, row_caches
from tests.models.oracles import VARIANTS
from tests.models.short_run import trained_and_kept

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=3, heads=4, kv_heads=1, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3,
    rope=Rope(1000.0), local_rope=Rope(100.0), rotary_fraction=0.5, query_rank=12, output_groups=2, output_rank=6,
    sliding_window=4, sliding_layers=(0,), attention_sinks=True, heavy_ratio=5, sparse_ratio=2, index_heads=8,
    index_head_dim=6, index_top=2, mixers=(WindowAttention, HeavilyCompressedAttention, CompressedSparseAttention),
)  # fmt: skip
LENGTHS = (6, 9, 2, 1, 0)  # of prompts: within a window and at its end, shorter than it, and none at all


def normed(x, scale):
    return x / np.sqrt((x * x).mean() + CONFIG.norm_eps) * scale


def turned(x, position: int, inv_freq):
    """x `[d]` with its last dimensions rotated, two neighbours each."""
    x, size = x.copy(), 2 * len(inv_freq)
    pairs = x[-size:].reshape(-1, 2) @ np.array([1, 1j]) * np.exp(1j * position * inv_freq)
    x[-size:] = np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1)
    return x


@pytest.mark.parametrize(
    "kind", [pytest.param(HeavilyCompressedAttention, marks=pytest.mark.slow), CompressedSparseAttention]
)
def test_entries_by_hand(kind):
    """Of two documents with padding around them, of which the second one ends within a window."""
    mixer, rng = kind(CONFIG, nnx.Rngs(0)), np.random.default_rng(0)
    part = mixer.compressor
    ratio, spans, size = part.ratio, part.spans, CONFIG.head_dim
    part.position_bias[...] = jnp.asarray(rng.normal(size=part.position_bias.shape), jnp.float32)
    part.norm.scale[...] = jnp.asarray(rng.normal(size=size), jnp.float32)
    segments = np.array([[0, *[1] * 7, *[2] * 12, 0, 0]])
    made_of = rng.normal(size=(1, segments.shape[1], 2 * spans * size)).astype(np.float32)
    of_each = [jnp.asarray(made_of[..., : 2 * spans * own.size]) for own in mixer.compressors]
    arrays = kind.layer_arrays(CONFIG, CONFIG.layer_configs[1])
    places = segment_positions(jnp.asarray(segments)), jnp.asarray(segments)
    found = mixer._entries_of_rows(of_each, *places, arrays)
    expected = []
    for document in (1, 2):
        kv, scores = np.split(made_of[0][segments[0] == document], 2, axis=-1)
        for window in range(len(kv) // ratio):
            numbers, weights = [], []
            for span in range(spans):
                for offset in range(ratio):
                    token = (window - spans + 1 + span) * ratio + offset
                    if token >= 0:
                        own = slice(span * size, (span + 1) * size)
                        numbers.append(kv[token, own])
                        weights.append(np.exp(scores[token, own] + np.asarray(part.position_bias[...])[offset, own]))
            entry = (np.array(numbers) * np.array(weights)).sum(0) / np.array(weights).sum(0)
            entry = turned(normed(entry, np.asarray(part.norm.scale[...])), window * ratio, arrays.inv_freq)
            expected.append((document, window, entry))
    count = len(expected)
    assert found.segments[0].tolist() == [0] * (segments.shape[1] // ratio - count) + [x[0] for x in expected]
    assert found.windows[0, -count:].tolist() == [x[1] for x in expected]
    np.testing.assert_allclose(found.values[0][0, -count:], [x[2] for x in expected], atol=1e-5)


@pytest.fixture(scope="module")
def params():
    """Parameters whose biases and sinks are random too."""
    rng = np.random.default_rng(5)

    def shaken(path, x):
        return x + rng.normal(size=x.shape).astype(np.float32) * (x.ndim < 3) * 0.3

    return jax.tree_util.tree_map_with_path(shaken, jax.jit(Net(CONFIG).init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def continued(params):
    """Prompts, two continuations of each, and the logits of whole rows at these."""
    rng = np.random.default_rng(2)
    tokens, segments = padded([rng.integers(0, 31, length) for length in LENGTHS], "left")
    continuations = rng.integers(0, 31, (len(LENGTHS), 2, 12))
    whole = np.concatenate([np.repeat(tokens, 2, 0), continuations.reshape(-1, 12)], axis=1)
    ids = np.concatenate([np.repeat(segments, 2, 0), np.ones((len(whole), 12), int)], axis=1)
    logits = np.asarray(logits_of(Net(CONFIG), params, whole, ids))
    return tokens, segments, continuations, whole, ids, logits


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3, 12])
def test_decoding_equals_whole_rows(params, continued, at_once):
    """Tokens one by one, and several that complete windows of both kinds."""
    tokens, segments, continuations, *_, logits = continued
    found = continued_logits(Net(CONFIG), params, tokens, segments, continuations, at_once)
    np.testing.assert_allclose(found, logits[:, -12:].reshape(found.shape), atol=2e-5)


@pytest.mark.slow
def test_prompts_shorter_than_an_entry_take_turns(params):
    """In fewer slots than there are rows."""
    prompts = np.random.default_rng(4).integers(0, 31, (2, 3))
    engine = Engine(SamplingParams(temperature=0.0), 2, 6, chunk=2, net=Net(CONFIG), eos=())
    found = [
        np.asarray(own.generate(params, jnp.asarray(prompts), jnp.ones((2, 3), int), jax.random.key(0)).tokens)
        for own in (engine, dataclasses.replace(engine, slots=2))
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_tokens_that_are_taken_back_leave_nothing(params, continued):
    """A step may begin anywhere behind the first token of the one before, as where speculative tokens are wrong."""
    net = Net(CONFIG)
    tokens, segments, continuations, *_, logits = continued
    expected = logits[:, -12:].reshape(len(tokens), 2, 12, -1)
    wrong = (continuations + 1) % 31
    _, prompt = prefill(net, params, tokens, segments)
    rows = row_caches(net, prompt, 2, 16)
    for number in range(0, 9):
        proposed = np.concatenate([continuations[..., number : number + 1], wrong[..., number : number + 3]], axis=-1)
        found, rows = decode(net, params, proposed, segments, prompt, rows, number)
        np.testing.assert_allclose(found[:, :, 0], expected[:, :, number], atol=2e-5)


@pytest.mark.slow
def test_caches_that_grow_keep_their_entries(params, continued):
    net = Net(CONFIG)
    tokens, segments, continuations, *_, logits = continued
    _, prompt = prefill(net, params, tokens, segments)
    rows = row_caches(net, prompt, 2, 4)
    for number in range(12):
        if number in (4, 8):
            rows = tuple(mixer.grow_cache(cache, number + 4) for mixer, cache in net.with_mixers(rows))
        found, rows = decode(net, params, continuations[..., number : number + 1], segments, prompt, rows, number)
        np.testing.assert_allclose(
            found[:, :, 0], logits[:, -12 + number].reshape(len(tokens), 2, -1), atol=2e-5, err_msg=str(number)
        )


@pytest.mark.slow
def test_documents_of_a_row_equal_their_own_runs(params, continued):
    """Padding is between them, and on the other side."""
    *_, whole, ids, logits = continued
    net, (first, second) = Net(CONFIG), (2, 4)
    documents = [whole[row][ids[row] > 0] for row in (first, second)]
    packed = np.concatenate([documents[0], [5, 5], documents[1], [5]])
    layout = np.concatenate([np.full(len(documents[0]), 2), [0, 0], np.full(len(documents[1]), 1), [0]])
    found = np.asarray(logits_of(net, params, packed[None], layout[None]))[0]
    for segment, row in ((2, first), (1, second)):
        np.testing.assert_allclose(found[layout == segment], logits[row][ids[row] > 0], atol=2e-5)


@pytest.mark.slow
def test_rows_shorter_than_a_window(params):
    """They have no entries, and compute what they do in longer ones."""
    net, tokens = Net(CONFIG), np.random.default_rng(4).integers(0, 31, (2, 9))
    expected = np.asarray(logits_of(net, params, tokens, None))
    for length in (1, 3):
        found = logits_of(net, params, tokens[:, :length], None)
        np.testing.assert_allclose(found, expected[:, :length], atol=2e-5)
        prefill(net, params, tokens[:, :length], np.ones((2, length), int))


@pytest.mark.slow
def test_rows_of_several_blocks(params, monkeypatch):
    """The last one is not full; logits and gradients are those of one block."""
    net, rng = Net(CONFIG), np.random.default_rng(3)
    tokens, segments = jnp.asarray(rng.integers(0, 31, (2, 40))), np.ones((2, 40), int)
    segments[0, :7], segments[1, 21:] = 0, 2

    def loss(params):
        logits = jnp.where((segments != 0)[..., None], net.bind(params)(tokens, jnp.asarray(segments)), 0.0)
        return jnp.sin(logits).sum(), logits

    found = []
    for size in (6, 64):
        monkeypatch.setattr(compressed_attention, "SMALLEST_BLOCK", size)
        found.append(jax.jit(jax.value_and_grad(lambda params: loss(params), has_aux=True))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3), *found)


@pytest.mark.slow
def test_a_run_keeps_indexers_and_tables(root, tmp_path):
    """Weight decay leaves them as they are too, the sampler's log-probs are the trainer's, and the export is read."""
    entries = VARIANTS["deepseek_v4"]().to_dict() | {"vocab_size": 320, "swiglu_limit": 2.0}
    oracle = AutoModelForCausalLM.from_config(DeepseekV4Config(**entries))
    for name, buffer in oracle.named_buffers():
        if name.endswith("tid2eid"):
            buffer.random_(oracle.config.n_routed_experts)
    oracle.save_pretrained(tmp_path / "model")
    names, kept = trained_and_kept(root, tmp_path)
    assert kept == {name for name in names if "/indexer/" in name or name.endswith(("/correction", "/table"))}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf", output_loading_info=True)
    assert not any(again[1].values()) and again[0].config.model_type == "deepseek_v4"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 .* supported: 1"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 .* supported: 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False .* supported: True"),
        ({"o_groups": 5}, "o_groups = 5 .* divisors of num_attention_heads . head_dim = 48"),
        ({"compress_rates": {"heavily_compressed_attention": 1}}, "heavily_compressed_attention of compress_rates = 1"),
        ({"compress_rates": [4, 128]}, r"compress_rates = \[4, 128\] .* an object"),
        ({"index_head_dim": 2}, "index_head_dim = 2 .* numbers from the 4 that are rotated"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' .* sqrtsoftplus, sigmoid"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types = .* sliding_attention or compressed_sparse_attention"),
        ({"layer_types": None, "compress_ratios": [0, 8, 4, 128]}, "compress_ratios = .* lists of 0, 4, 128"),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types = .* each of the 4 layers"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types = .* hash_moe or moe"),
    ],
)
def test_entries_that_are_refused(entries, message):
    whole = VARIANTS["deepseek_v4"]().to_dict() | {"architectures": None}
    with pytest.raises(ConfigError, match=message):
        family_of(whole | entries).to_config(whole | entries)


def test_entries_of_the_files_on_the_hub():
    """Older names, with a layer more, which predicts further tokens; transformers reads them alike."""
    whole = VARIANTS["deepseek_v4"]().to_dict() | {"architectures": None}
    newer = {"layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"}
    older = {name: value for name, value in whole.items() if name not in newer} | {
        "compress_ratios": [128, 0, 4, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 6, "compress_rate_hca": 16,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32},
    }  # fmt: skip
    read = DeepseekV4Config(**{name: x for name, x in copy.deepcopy(older).items() if name != "model_type"}).to_dict()
    found = family_of(older).to_config(older)
    assert found == family_of(read).to_config(read | {"architectures": None})
    assert found.hash_layers == (0,) and found.sliding_layers == (1,) and found.rotated_size == 6
    assert (found.heavy_ratio, found.sparse_ratio, found.rope.attention_factor) == (16, 4, 1.0)
    exported = family_of(older).from_config(found, older)
    assert {name: exported[name] for name in older if name != "architectures"} == {
        name: x for name, x in older.items() if name != "architectures"
    }
