"""Gemma 4's text models beyond what every family is tested for: layers that share keys and values, files, refusals."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import peft
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.families import gemma4_text
from jaxrl_llm.models.model import add_adapters, load_model, save_adapter, save_hf
from tests.models.decoding import continued_logits, padded
from tests.models.oracles import VARIANTS, VOCAB, gradients, make_oracle, oracle_gradients, oracle_logits

TOLERANCE = 2e-4  # half an ulp of the parameters moves single tokens by up to 7e-5, in float64 too
DOCUMENTS = [np.random.default_rng(2).integers(0, VOCAB, length) for length in (9, 6)]


@pytest.fixture(scope="module")
def oracle():
    return make_oracle("gemma4_text")


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma4")
    oracle.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def test_layers_read_the_latest_of_their_kind(model):
    """Layers 3 and 4 read those of layer 1, not 0; layers whose keys are read are runs of their own."""
    shares = [kind.shares for kind in model.net.config.layer_configs]
    assert shares == [None, None, None, 1, 1, 2]
    assert [run.layers for run in model.net.config.layer_runs] == [(0,), (1,), (2,), (3, 4), (5,)]
    assert model.params["shared_layers"]["attention"].keys() == {"q", "q_norm", "o"}


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_decoding_gives_the_logits_of_whole_rows(oracle, model, at_once):
    """Also several tokens at a time, in caches that hold what earlier rows left there."""
    tokens, segments = padded(DOCUMENTS, "left")
    continuations = np.random.default_rng(3).integers(0, VOCAB, (2, 2, 6))
    found = continued_logits(model.net, model.params, tokens, segments, continuations, at_once)
    for row, document in enumerate(DOCUMENTS):
        for repeat in range(2):
            whole = np.concatenate([document, continuations[row, repeat]])
            expected = oracle_logits(oracle, whole[None])[0, len(document) :]
            np.testing.assert_allclose(found[row, repeat], expected, atol=TOLERANCE)


def test_rows_of_a_group_share_their_prompt(oracle, model):
    prompt, first, second = np.split(np.random.default_rng(4).integers(0, VOCAB, 18), [7, 12])
    tokens = np.concatenate([prompt, first, second])[None]
    segments = np.array([[1] * 7 + [2] * 5 + [3] * 6])
    positions = np.array([[*range(7), *range(7, 12), *range(7, 13)]])
    inputs = Inputs(tokens, segments, positions, prefix_segments=np.where(segments > 1, 1, segments))

    @jax.jit
    def run(params, inputs):
        bound = model.net.bind(params)
        return bound.logits(bound.hidden(inputs))

    found = np.asarray(run(model.params, inputs))[0]
    for completion, part in ((first, found[7:12]), (second, found[12:])):
        expected = oracle_logits(oracle, np.concatenate([prompt, completion])[None])[0, 7:]
        np.testing.assert_allclose(part, expected, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["block", "dots"])
def test_gradients_reach_shared_keys_through_recomputed_layers(oracle, folder, remat):
    tokens, segments = padded(DOCUMENTS, "left")
    model = load_model(folder, remat=remat)
    found = gradients(model, tokens, segments)["layers/attention/k/kernel"]
    expected = oracle_gradients(oracle, tokens, segments)
    for layer in (0, 1):
        reference = expected[f"model.layers.{layer}.self_attn.k_proj.weight"]
        np.testing.assert_allclose(found[layer].T, reference, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_adapters_are_those_of_peft(folder, model, tmp_path):
    adapted = add_adapters(model, LoraConfig(rank=3), jax.random.key(0))
    shaken = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.1 if path[-1].key == "lora_b" else x, adapted.params
    )
    adapted = dataclasses.replace(adapted, params=shaken)
    save_adapter(adapted, tmp_path / "adapter")
    other = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    tokens = DOCUMENTS[0][None]
    found = np.asarray(adapted(tokens))
    assert np.abs(found - np.asarray(model(tokens))).max() > 0.1
    np.testing.assert_allclose(found, oracle_logits(other, tokens), atol=1e-4)
    again = load_model(folder, adapter=tmp_path / "adapter")
    np.testing.assert_array_equal(again(tokens), found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_matrices_are_the_numbers_that_are_exported(folder, model, tmp_path, kind):
    quantised = load_model(folder, quantize=kind)
    save_hf(quantised, tmp_path / "out")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = DOCUMENTS[0][None]
    found = np.asarray(quantised(tokens))
    assert np.abs(found - np.asarray(model(tokens))).max() > 1e-3
    np.testing.assert_allclose(found, oracle_logits(other, tokens), atol=1e-4)


def test_keys_and_values_that_nothing_reads_may_be_in_files(folder, model, tmp_path):
    """Google's checkpoints have them, and transformers leaves them out."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    spare = {f"model.layers.3.self_attn.{part}.weight": np.zeros((16, 32), np.float32) for part in ("k_proj", "v_proj")}
    save_file(tensors | spare, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, model.params)
    save_file(tensors | {"model.layers.3.mlp.k_proj.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gives no place to: model.layers.3.mlp.k_proj"):
        load_model(tmp_path)


def test_entries_of_the_hub_mean_those_of_transformers():
    """Files on the hub have one entry for all layers of full attention; transformers 5.24 writes one for each."""
    for variant in ("gemma4_text", "gemma4_text-dense"):
        written = json.loads(VARIANTS[variant]().to_json_string())
        each = written.pop("per_layer_config")
        full = next(iter(each.values()))
        hub = written | {"global_head_dim": full["head_dim"]}
        hub |= {"num_global_key_value_heads": full.get("num_key_value_heads")}
        config = gemma4_text.to_config(hub)
        for digits in (1, 2):  # transformers writes as many as the last layer has
            numbered = {f"{int(layer):0{digits}}": entries for layer, entries in each.items()}
            assert gemma4_text.to_config(written | {"per_layer_config": numbered}) == config


def test_text_is_causal_where_images_see_themselves(folder, model, tmp_path):
    """Published files say so in the text part, and an export still does."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    entries = json.loads((tmp_path / "config.json").read_text()) | {"use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    found = load_model(tmp_path)
    assert found.net.config == model.net.config
    np.testing.assert_allclose(found(DOCUMENTS[0][None]), oracle_logits(oracle, DOCUMENTS[0][None]), atol=TOLERANCE)
    exported = gemma4_text.from_config(found.net.config, found.hf_config)
    assert exported["use_bidirectional_attention"] == "vision"


FAULTS = {
    "all layers share": ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6"),
    "no full layer to share with": ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 .* each type"),
    "layers differ": ({"per_layer_config": {"2": {"head_dim": 16}, "5": {"head_dim": 8}}}, "per_layer_config"),
    "other entries": ({"per_layer_config": {str(i): {"sliding_window": 3} for i in (2, 5)}}, "sliding_window"),
    "few per-layer embeddings": (
        {"vocab_size_per_layer_input": 96},
        "vocab_size_per_layer_input = 96 .* from vocab_size",
    ),
    "one rope": ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters .* for each of full_attention"),
    "a third of a head": (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}}},
        "partial_rotary_factor = 0.3",
    ),
    "experts without a number": ({"enable_moe_block": True, "num_experts": None}, "num_experts = None"),
    "more experts than there are": (
        {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8},
        "top_k_experts = 3 .* up to num_experts = 2",
    ),
    "both directions": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
    "another way": ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_computed_is_refused(fault):
    entries, message = FAULTS[fault]
    with pytest.raises(ConfigError, match=message):
        gemma4_text.to_config(VARIANTS["gemma4_text"]().to_dict() | entries)


@pytest.mark.slow
def test_a_frozen_router_keeps_its_scales_too(tmp_path):
    make_oracle("gemma4_text-experts").save_pretrained(tmp_path)
    model = load_model(tmp_path, freeze_router=True)
    found = gradients(model, *padded(DOCUMENTS, "left"))
    moved = {path for path, x in found.items() if np.abs(x).max() > 0}
    router = {"router/kernel", "router_scale", "weight_scale"}
    assert found.keys() - moved == {
        f"{stack}/{name}"
        for stack in ("layers", "full_layers")
        for name in ("out_scale", *(f"mlp/{part}" for part in router))
    }
