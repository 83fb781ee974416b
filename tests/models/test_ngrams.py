"""Embeddings of n-grams: their rows by integers of Python, what stands before them, decoding, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen4ExpTextConfig

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import qwen4_exp_text
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.models.files.new_tokens import with_tokens
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.ngrams import NGramConfig, shifted, table_rows
from tests.models import oracles
from tests.models.decoding import continued_logits, logits_of, padded, whole_rows_of_decoding
from tests.models.short_run import trained_and_kept

NGRAMS = NGramConfig((1, 4), eos=5, width=24, size=4, heads=2, rows=20_000_000)


def test_rows_by_integers_of_python():
    """Of ids up to the largest, whose products have 63 bits, and tables of the size that checkpoints have."""
    rng, vocabulary = np.random.default_rng(0), 248_320
    tokens = [rng.integers(0, vocabulary, (2, 3)) for _ in range(4)]
    tokens[0][0, 0] = tokens[1][0, 0] = vocabulary - 1
    for index in (0, 1):
        primes, multipliers = NGRAMS.primes(index), NGRAMS.multipliers(index, vocabulary)
        assert all(m % 2 and m < 2**63 // vocabulary for m in multipliers)
        found = np.asarray(table_rows([jnp.asarray(x) for x in tokens], NGRAMS, index, vocabulary))
        for at in np.ndindex(2, 3):
            mixed, expected, start = 0, [], 0
            for n, (ids, multiplier) in enumerate(zip(tokens, multipliers, strict=True), 1):
                mixed ^= int(ids[at]) * multiplier
                for prime in primes[(n - 2) * 2 : (n - 1) * 2] if n > 1 else ():
                    expected.append(start + mixed % prime)
                    start += prime
            np.testing.assert_array_equal(found[at], expected)
    assert len({*NGRAMS.primes(0), *NGRAMS.primes(1)}) == 12
    assert NGRAMS.primes(0)[:3] == (20_000_003, 20_000_023, 20_000_033)


def test_tokens_up_to_the_last_end_of_text_are_ends():
    """But for the token itself, which may be one."""
    history = jnp.array([[7, 5, 8, 5], [7, 5, 8, 9], [5, 6, 8, 9], [6, 7, 5, 8]])  # own tokens last
    found = shifted([history[:, i] - 5 for i in range(4)], 5)
    np.testing.assert_array_equal(jnp.stack(found, 1), [[5, 8, 5, 5], [9, 8, 5, 5], [9, 8, 6, 5], [8, 5, 5, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ngrams")
    oracles.make_oracle("qwen4_exp_text").save_pretrained(path)
    return path


@pytest.mark.slow
def test_decoding_equals_whole_rows(folder):
    """Tokens one by one and three at once, of prompts shorter than an n-gram too, in 16 bits what they are in 32."""
    model, rng = load_model(folder), np.random.default_rng(2)
    net, params = model.net, model.params
    documents = [rng.integers(28, 33, length) for length in (7, 10, 1)]  # with ends of text among them
    tokens, segments = padded(documents, "left")
    continuations = rng.integers(28, 33, (3, 2, 6))
    whole, ids = whole_rows_of_decoding(net, params, documents, continuations)
    half = Net(dataclasses.replace(net.config, dtype="bfloat16"))
    assert np.isfinite(logits_of(half, params, whole, np.zeros_like(ids))).all()  # of padding alone too
    rows = np.asarray(logits_of(half, params, whole, ids))[:, tokens.shape[1] :].reshape(3, 2, 6, -1)
    found = continued_logits(half, params, tokens, segments, continuations)
    assert np.abs(found - rows).mean() < 0.1 * np.abs(rows).mean()


def test_files_hold_what_the_hashes_are_made_of(folder, tmp_path):
    """They come back in an export, tables in as many tensors as before; others than config.json says are refused."""
    net, params = hf.load(folder)
    hf.save(net, params, tmp_path / "out", hf_config=json.loads((folder / "config.json").read_text()))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert sum(".shard_" in name for name in after) == 2 * 3
    for name, x in before.items():
        np.testing.assert_array_equal(x, after[name], err_msg=name)
        assert x.dtype == after[name].dtype
    name = "model.layers.3.ple.ple_embedding.layer_multipliers"
    save_file(after | {name: after[name] + 2}, tmp_path / "out/model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} has other numbers than follow from config.json"):
        hf.load(tmp_path / "out")


def test_tables_in_one_tensor_are_read_too(folder, tmp_path):
    """As transformers' class has them."""
    _, params = hf.load(folder)
    found = load_file(folder / "model.safetensors")
    for layer in (0, 3):
        start = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding."
        found[f"{start}weight"] = np.concatenate([found.pop(f"{start}shard_{part}.weight") for part in range(3)])
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], params)


def wide_folder(path, vocabulary: int):
    """A folder of such a model with more tokens."""
    entries = oracles.VARIANTS["qwen4_exp_text"]().to_dict() | {"vocab_size": vocabulary}
    AutoModelForCausalLM.from_config(Qwen4ExpTextConfig(**entries)).save_pretrained(path)
    return path


def test_new_tokens_would_move_rows(tmp_path):
    """Where the vocabulary would grow, and not where it has rows left."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    for spare in (0, 1):
        folder = wide_folder(tmp_path / str(spare), max(tokenizer.get_vocab().values()) + 1 + spare)
        tokenizer.save_pretrained(folder)
        if spare:
            assert with_tokens(load_model(folder), ["<new>"]).net == load_model(folder).net
            continue
        with pytest.raises(ConfigError, match=r"embeddings of n-grams, whose rows follow from the size of the vocab"):
            with_tokens(load_model(folder), ["<new>"])


@pytest.mark.slow
def test_a_run_keeps_the_indexer(root, tmp_path):
    """The sampler's log-probs are the trainer's, and the export is read back with the end of text of its hashes."""
    wide_folder(tmp_path / "model", 320)
    names, kept = trained_and_kept(root, tmp_path)
    assert kept == {name for name in names if "/indexer/" in name}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf", output_loading_info=True)
    assert not any(again[1].values()) and again[0].config.eos_token_id[0] == 30


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hc_count": 1}, "hc_count = 1 .* integers from 2"),
        ({"output_gate_type": "relu"}, "output_gate_type = 'relu' .* silu and sigmoid"),
        ({"ple_layer_ids": [2]}, r"ple_layer_ids = \[2\] .* layers of linear_attention"),
        ({"ple_layer_ids": [6]}, r"ple_layer_ids = \[6\] .* from 1 to num_hidden_layers = 5"),
        ({"ple_embed_dim": 22}, "ple_embed_dim = 22 .* multiples of the 4 tables"),
        ({"ngram_size": 1}, "ngram_size = 1 .* integers from 2"),
        ({"ngram_vocab_size_base": 2**30}, "ngram_vocab_size_base = 1073741824 .* 4 tables of less than 2.31 rows"),
        ({"eos_token_id": None}, "eos_token_id = None .* the token at which n-grams end"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 .* 1"),
        ({"indexer_budget": 5}, "indexer_budget = 5 .* multiples of indexer_compress_ratio = 2"),
        ({"indexer_head_dim": 6}, "indexer_head_dim = 6 .* numbers from the 8 that are rotated"),
        ({"indexer_n_heads": None}, "indexer_n_heads = None .* integers from 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type = 'dynamic'"),
    ],
)
def test_entries_that_are_refused(entries, message):
    whole = oracles.VARIANTS["qwen4_exp_text"]().to_dict() | {"architectures": None}
    with pytest.raises(ConfigError, match=message):
        qwen4_exp_text.to_config(whole | entries)
