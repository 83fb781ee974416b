"""Every family against transformers: logits, layouts, decoding, gradients, export."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxrl_llm.models import hf
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.models.weights import stored_tensors
from jaxrl_llm.sharding import path_name
from tests.models.decoding import decode_greedily, padded

TOLERANCE = 2e-5
LENGTHS = (7, 12, 4)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 97, length) for length in LENGTHS]


def oracle_logits(oracle, tokens, **arguments):
    with torch.no_grad():
        return oracle(torch.tensor(np.asarray(tokens)), **arguments).logits.numpy()


def alone(oracle, documents):
    """The oracle's logits of each document by itself: [length, V] each."""
    return [oracle_logits(oracle, document[None])[0] for document in documents]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_oracle(oracle, model, documents, side):
    tokens, segments = padded(documents, side)
    logits = np.asarray(model(tokens, segments))
    assert logits.dtype == np.float32
    for row, expected in enumerate(alone(oracle, documents)):
        np.testing.assert_allclose(logits[row][segments[row] > 0], expected, atol=TOLERANCE)
    mask = torch.tensor(segments)
    in_batch = oracle_logits(oracle, tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    np.testing.assert_allclose(logits[segments > 0], in_batch[segments > 0], atol=TOLERANCE)


def test_packed_documents_equal_their_own_runs(oracle, model, documents):
    """Padding before, between and after documents; the rows have the shape of the padded ones."""
    first, second, third = documents
    rows = [[second], [first, [5], third], [[5, 5], third, [5], third, [5]]]
    tokens = np.stack([np.concatenate(row) for row in rows])
    segments = np.array([[1] * 12, [2] * 7 + [0] + [1] * 4, [0] * 2 + [1] * 4 + [0] + [3] * 4 + [0]])
    logits = np.asarray(model(tokens, segments))
    seven, twelve, four = alone(oracle, documents)
    found = (logits[0], logits[1, :7], logits[1, 8:], logits[2, 2:6], logits[2, 7:11])
    for part, expected in zip(found, (twelve, seven, four, four, four), strict=True):
        np.testing.assert_allclose(part, expected, atol=TOLERANCE)


def test_greedy_decoding_equals_generate(oracle, model, documents):
    tokens, segments = padded(documents, "left")
    found = decode_greedily(model.net, model.params, tokens, segments, steps=24, repeats=2)
    with torch.no_grad():
        expected = oracle.generate(
            torch.tensor(tokens), attention_mask=torch.tensor(segments), max_new_tokens=24, do_sample=False
        ).numpy()[:, tokens.shape[1] :]
    np.testing.assert_array_equal(found[:, 0], expected)
    np.testing.assert_array_equal(found[:, 1], expected)


def test_gradients_equal_autograd_for_every_parameter(oracle, model, documents):
    tokens, segments = padded(documents, "left")
    mask = torch.tensor(segments)
    logits = oracle(
        torch.tensor(tokens), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    ).logits.log_softmax(-1)
    targets = torch.tensor(tokens)[:, 1:, None]
    weights = (mask[:, 1:] * mask[:, :-1]).float()
    oracle.zero_grad()
    (-(logits[:, :-1].gather(-1, targets)[..., 0] * weights).sum() / weights.sum()).backward()

    def loss(params):
        logps = jax.nn.log_softmax(model.net.bind(params)(jnp.asarray(tokens), jnp.asarray(segments)))
        picked = jnp.take_along_axis(logps[:, :-1], jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
        return -(picked * weights.numpy()).sum() / weights.sum().item()

    gradients = {
        path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(model.params))
    }
    expected = dict(oracle.named_parameters())
    tensors = stored_tensors(model.net, family_of(model.hf_config))
    assert {tensor.name for tensor in tensors} == set(expected)
    for tensor in tensors:
        gradient = np.asarray(gradients[tensor.leaf] if tensor.layer is None else gradients[tensor.leaf][tensor.layer])
        reference = expected[tensor.name].grad.numpy()
        assert np.abs(reference).max() > 0, tensor.name
        np.testing.assert_allclose(
            gradient.T if tensor.transpose else gradient, reference, atol=1e-5, rtol=1e-4, err_msg=tensor.name
        )


@pytest.mark.parametrize("max_shard_bytes", [5e9, 3000], ids=["one-file", "many-files"])
def test_export_loads_in_transformers_and_comes_back_bit_exact(oracle, model, documents, tmp_path, max_shard_bytes):
    save_hf(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 1 if max_shard_bytes == 5e9 else len(files) > 5
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    for (name, a), (_, b) in zip(oracle.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    tokens = documents[1][None]
    np.testing.assert_array_equal(oracle_logits(again, tokens), oracle_logits(oracle, tokens))
    net, params = hf.load(tmp_path / "out")
    assert net == model.net
    jax.tree.map(np.testing.assert_array_equal, params, model.params)
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert {name: exported[name] for name in model.hf_config} == model.hf_config


def test_export_without_a_config_describes_the_net(oracle, model, documents, tmp_path):
    """A net that came from no checkpoint: the family and config.json are worked out from its shape."""
    hf.save(model.net, model.params, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(oracle)
    np.testing.assert_array_equal(oracle_logits(again, documents[0][None]), oracle_logits(oracle, documents[0][None]))
    assert hf.load(tmp_path / "out")[0] == model.net


def test_transformers_shards_load(oracle, model, tmp_path):
    oracle.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], model.params)


def test_config_of_transformers_4_reads_alike(model):
    entries = dict(model.hf_config)
    rope = dict(entries.pop("rope_parameters"))
    entries["rope_theta"] = rope.pop("rope_theta")
    entries["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    entries["torch_dtype"] = entries.pop("dtype")
    family = family_of(entries)
    assert family.to_config(entries) == model.net.config
    older = family.to_config({**entries, "rope_theta": 12345.0})
    assert older == dataclasses.replace(model.net.config, rope_theta=12345.0)
