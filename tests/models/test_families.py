"""Every family against transformers: logits, layouts, decoding, gradients, export."""

import copy
import dataclasses
import json
import math
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, HeliumConfig, OlmoHybridConfig

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import families
from jaxrl_llm.models.families import FAMILIES, family_of
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files.safetensors import stored_tensors
from jaxrl_llm.models.logprobs import last_scores
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.training.setup.data import register
from tests.models import oracles
from tests.models.conftest import QUICK, variants
from tests.models.decoding import padded
from tests.models.images import VISION
from tests.models.oracles import (
    NO_CLASSIFIER,
    VARIANTS,
    gradients,
    greedy,
    in_parameters,
    of_files,
    oracle_gradients,
    oracle_logits,
)

TOLERANCE = 2e-5
LENGTHS = (7, 12, 4)
LONGEST = ("qwen3_next", "gemma4_text", "llama4_text")  # to compile
QUICKEST = ("granite", "glm4", "gpt_oss")
DECODED_ALIKE = ("granite", "glm4")  # by the attention of the families below, which are decoded
IN_SHORT = (*QUICKEST, *(pytest.param(x, marks=pytest.mark.slow) for x in LONGEST))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 97, length) for length in LENGTHS]


def alone(oracle, documents):
    """The oracle's logits of each document by itself: [length, V] each."""
    return [oracle_logits(oracle, document[None])[0] for document in documents]


def is_dynamic(model):
    """True where rows of these tests are longer than those that are all rotated alike."""
    return (model.net.config.rope.changes_beyond or math.inf) < 36


@pytest.mark.parametrize("variant", IN_SHORT)
def test_a_family_in_short(variant, tmp_path, documents):
    """Logits, gradients and greedy text of left-padded rows: the quick proof of the families that have no other one."""
    oracle = oracles.make_oracle(variant)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    tokens, segments = padded(documents, "left")
    logits = np.asarray(model(tokens, segments))
    for row, expected in enumerate(alone(oracle, documents)):
        np.testing.assert_allclose(logits[row][segments[row] > 0], expected, atol=TOLERANCE)
    expected, found = oracle_gradients(oracle, tokens, segments), gradients(model, tokens, segments)
    tensors = stored_tensors(model.net, family_of(model.hf_config))
    assert {tensor.name for tensor in tensors} == set(expected)
    for tensor in tensors:
        np.testing.assert_allclose(
            in_parameters(tensor, found), of_files(tensor, expected), atol=1e-5, rtol=1e-4, err_msg=tensor.name
        )
    if variant not in DECODED_ALIKE:
        found = greedy(model, tokens, segments, 8)[:, 0]
        np.testing.assert_array_equal(found, oracles.oracle_greedy(oracle, tokens, segments, 8))


def test_every_family_has_a_variant():
    assert {make().model_type for make in (*VARIANTS.values(), *VISION.values())} == set(FAMILIES)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_oracle(oracle, model, documents, side):
    tokens, segments = padded(documents, side)
    logits = np.asarray(model(tokens, segments))
    assert logits.dtype == np.float32
    for row, expected in enumerate(alone(oracle, documents)):
        np.testing.assert_allclose(logits[row][segments[row] > 0], expected, atol=TOLERANCE)


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


def test_unrolled_layers_compute_the_same(model, documents):
    tokens, segments = padded(documents, "left")
    unrolled = dataclasses.replace(model, net=model.net.unrolled())
    np.testing.assert_allclose(
        np.asarray(unrolled(tokens, segments))[segments > 0],
        np.asarray(model(tokens, segments))[segments > 0],
        atol=5e-6,
    )


def test_greedy_decoding_equals_generate(oracle, model, documents):
    """Prompts shorter and longer than the window, continued through it."""
    tokens, segments = padded(documents, "left")
    if is_dynamic(model):
        with pytest.raises(ConfigError, match=r"rope_type \w+ rotates every token anew .* beyond 8 tokens"):
            greedy(model, tokens, segments, 24)
        return
    found = greedy(model, tokens, segments, 24, repeats=2)
    expected = oracles.oracle_greedy(oracle, tokens, segments, 24)
    np.testing.assert_array_equal(found[:, 0], expected)
    np.testing.assert_array_equal(found[:, 1], expected)


@pytest.mark.slow
def test_scanned_layers_decode_the_same(oracle, model, documents, monkeypatch):
    """What accelerators do: decode in a scan too."""
    if is_dynamic(model):
        pytest.skip("rows longer than the original length are not sampled")
    monkeypatch.setattr("jaxrl_llm.rollout.engine.Engine.decoder", property(lambda engine: engine.net))
    tokens, segments = padded(documents, "left")
    found = greedy(model, tokens, segments, 23)  # another length than above: nothing is compiled already
    np.testing.assert_array_equal(found[:, 0], oracles.oracle_greedy(oracle, tokens, segments, 23))


def test_gradients_equal_autograd_for_every_parameter(oracle, model, documents):
    if is_dynamic(model):  # transformers rotates a whole batch by its longest row
        documents = [documents[1]] * 3
    tokens, segments = padded(documents, "left")
    expected = oracle_gradients(oracle, tokens, segments)
    found = gradients(model, tokens, segments)
    tensors = stored_tensors(model.net, family_of(model.hf_config))
    assert {tensor.name for tensor in tensors} == set(expected)
    for tensor in tensors:
        reference = of_files(tensor, expected)
        seen = tensor.expert is None and not tensor.leaf.startswith("vision/")  # by rows without images
        used = seen or np.abs(reference).max() > 0  # few tokens may leave an expert out
        assert (np.abs(reference).max() > 0) != tensor.name.endswith(oracles.UNTRAINED) or not used, tensor.name
        np.testing.assert_allclose(
            in_parameters(tensor, found), reference, atol=1e-5, rtol=1e-4, err_msg=f"{tensor.name} {tensor.leaf}"
        )


def test_export_loads_in_transformers_and_comes_back_bit_exact(oracle, model, documents, tmp_path):
    save_hf(model, tmp_path / "out")
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
    assert type(again) is type(oracle) or again.config.model_type == oracles.ALIKE.get(oracle.config.model_type)
    tokens = documents[1][None]  # the longest
    np.testing.assert_array_equal(oracle_logits(again, tokens), oracle_logits(oracle, tokens))
    assert hf.load(tmp_path / "out")[0] == model.net


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_passed_over(variant, tmp_path):
    """DeepSeek and GLM publish one behind the model's last layer; without its entry it is a layer too many."""
    oracle = oracles.make_oracle(variant)
    oracle.save_pretrained(tmp_path)
    expected, config = hf.load(tmp_path)[1], json.loads((tmp_path / "config.json").read_text())
    beyond = f"model.layers.{oracle.config.num_hidden_layers}."
    extra = {f"{beyond}{name}.weight": np.ones((3, 3), np.float32) for name in ("eh_proj", "enorm", "mlp.gate")}
    save_file(load_file(tmp_path / "model.safetensors") | extra, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=f"config.json gives no place to: {beyond}eh_proj.weight"):
        hf.load(tmp_path)


@pytest.mark.parametrize("oracle", QUICK, indirect=True)
def test_files_of_many_shards(oracle, model, tmp_path):
    """Those of transformers are read, and it reads ours: which tensor is in which file depends on no family."""
    oracle.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    save_hf(model, tmp_path / "ours", max_shard_bytes=3000)
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        assert (folder / "model.safetensors.index.json").is_file() and len([*folder.glob("*.safetensors")]) > 5
        jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], model.params)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, a), (_, b) in zip(oracle.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def as_transformers_4_writes(entries):
    """config.json with the entries that transformers 4 has in place of those of version 5."""
    rope = entries.pop("rope_parameters")
    if entries["model_type"] == "olmo3":
        rope = rope["full_attention"]
    elif "sliding_attention" in rope:
        entries["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    entries["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        entries["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    entries["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    entries["torch_dtype"] = entries.pop("dtype")
    if entries["model_type"] in ("gemma2", "gemma3_text"):
        del entries["layer_types"]
    if entries["model_type"].startswith("gemma"):
        del entries["tie_word_embeddings"]  # it is left out where true
    if entries["model_type"] in ("qwen2_moe", "qwen3_moe") and "num_local_experts" in entries:
        entries["num_experts"] = entries.pop("num_local_experts")
    return entries


# It came with version 5, has no rotary positions, or a base that is not config.json's.
OTHER_ROTARY = (
    "gemma4", "nemotron_h", "kimi_linear", "olmo_hybrid", "hunyuan_v1_dense-alpha", "gpt2", "opt", "lfm3", "gptj",
    "granite_swa", "granitemoe_swa", "mellum", "mimo_v2_flash", "laguna",
    "gpt_neo", "gpt_bigcode", "bloom", "mpt", "bamba-biases", "mamba", "falcon_mamba", "dbrx", "jamba",
    "mistral_large4", "deepseek_v4", "step3p5", "glm5_next",
)  # fmt: skip


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith(OTHER_ROTARY)])
def test_config_of_transformers_4_reads_alike(variant):
    new = VARIANTS[variant]().to_dict() | {"dtype": "float32"}
    family = family_of(new)
    config = family.to_config(dict(new))
    entries = as_transformers_4_writes(dict(new))
    assert family.to_config(entries) == config
    older = family.to_config({**entries, "rope_theta": 12345.0})
    changed = dataclasses.replace(config, rope=config.rope._replace(theta=12345.0))
    if variant == "olmo3":  # the base is that of both types of layers
        changed = dataclasses.replace(changed, local_rope=config.local_rope._replace(theta=12345.0))
    assert older == changed


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_describes_itself(variant):
    """With and without the entries it was read from, every entry is kept or written again."""
    entries = VARIANTS[variant]().to_dict() | {"architectures": None}
    family = family_of(entries)
    config = family.to_config(entries)
    for base in (entries, None):
        assert family.to_config(family.from_config(config, base)) == config
    for field, value in (("sliding_window", 3), ("norm_eps", 0.5), ("router_aux_loss_coef", 0.5)):
        has_no_entry = field == "norm_eps" and family.MODEL_TYPE in ("opt", "olmo", "dbrx")
        if getattr(config, field) and not has_no_entry:
            changed = dataclasses.replace(config, **{field: value})
            assert family.to_config(family.from_config(changed, entries)) == changed


@pytest.mark.parametrize("variant", ["cwm", "mimo_v2_flash", "gemma2", "exaone4-full", "smollm3", "qwen2"])
def test_a_net_without_windows_is_described_as_transformers_reads_it(variant):
    """Without the entries that it was read from; some of its classes have no null for the size of windows."""
    made = VARIANTS[variant]()
    entries = made.to_dict() | {"architectures": None, "layer_types": ["full_attention"] * made.num_hidden_layers}
    config = family_of(entries).to_config(entries)
    assert not config.sliding_layers
    written = family_of(entries).from_config(config, None)
    read = type(made)(**{name: x for name, x in written.items() if name != "model_type"}).to_dict()
    assert family_of(written).to_config(written) == family_of(read).to_config(read) == config


PUBLISHED: dict[str, dict[str, Any]] = {  # entries of files on the hub, in place of those of transformers 5
    "phi3-long": {
        "rope_parameters": None, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.5, 6.0]},
    },
    "nemotron_h": {"layers_block_type": None, "hybrid_override_pattern": "ME*-ME", "time_step_limit": [0.0, math.inf]},
    "afmoe": {
        "layer_types": None, "score_func": "sigmoid", "route_norm": True, "n_group": 1, "num_expert_groups": 1,
    },
    "kimi_linear": {
        "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "head_dim": 72,
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 3,
        },
    },
    "olmo_hybrid": {"layer_types": None, "full_attention_interval": 2},
    "cohere2": {"layer_types": None, "sliding_window_pattern": 2},
    "falcon_h1": {"mamba_d_head": "auto"},
    "hunyuan_v1_moe": {"num_experts": [4, 4], "moe_topk": [2, 2]},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "gpt2": {"n_ctx": 64},
    "gpt_neox": {"rope_parameters": None, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "exaone": {
        "num_hidden_layers": None, "num_layers": 2, "rms_norm_eps": None, "layer_norm_epsilon": 1e-5,
        "hidden_act": None, "activation_function": "silu",
    },
    "dbrx-plain": {"rope_parameters": None},
    "hy_v4": {"num_key_value_heads": 2, "enable_ihc": True, "gating_type": "elementwise"},
    "falcon-grouped": {"num_ln_in_parallel_attn": None},
}  # fmt: skip


@pytest.mark.parametrize("variant", PUBLISHED)
def test_entries_of_published_files_read_alike(variant):
    """And they are kept as they are in an export."""
    entries = VARIANTS[variant]().to_dict() | {"architectures": None}
    published = {name: x for name, x in (entries | PUBLISHED[variant]).items() if x is not None}
    family = family_of(entries)
    config = family.to_config(entries)
    assert family.to_config(published) == config
    exported = family.from_config(config, published)
    assert {name: exported[name] for name in PUBLISHED[variant] if name in published} == {
        name: x for name, x in PUBLISHED[variant].items() if x is not None
    }
    assert family.to_config(exported) == config


# Entries whose absence is meant to be read otherwise: see below, and `llava.TIED_BY_FILES`.
READ_OTHERWISE = {
    "olmo_hybrid": ("rope_parameters",), "olmo_hybrid-rotary": ("rope_parameters",),
    "internvl": ("tie_word_embeddings",), "mistral3": ("tie_word_embeddings",),
    **dict.fromkeys(("kimi_k25", "deepseek_vl", "ovis2"), ("tie_word_embeddings",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, *VISION])
def test_entries_that_are_left_out_mean_what_they_do_in_transformers(variant):
    """One after another, those of decoder and encoder too; what either refuses then is passed over."""
    config = (VARIANTS | VISION)[variant]()

    whole, compared = config.to_dict() | {"architectures": None}, 0
    parts = {"": whole} | {name: whole[name] for name in ("text_config", "vision_config") if whole.get(name)}
    for part, entries in parts.items():
        for entry in entries.keys() - {*parts, "model_type", *READ_OTHERWISE.get(variant, ())}:
            given = copy.deepcopy(whole)
            del (given[part] if part else given)[entry]
            try:
                theirs = type(config)(**copy.deepcopy({x: given[x] for x in given if x != "model_type"})).to_dict()
                expected, found = (family_of(x).to_config(x) for x in (theirs | {"architectures": None}, given))
            except Exception:
                continue
            assert found == expected, (part, entry)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("given", [{}, {"rope_parameters": None}, {"rope_theta": None}], ids=str)
def test_a_model_without_rotary_positions_is_none_in_transformers_too(given):
    """Olmo-Hybrid-Think-SFT-7B has null for the whole block, in whose place transformers takes a base of 10000."""
    entries = {x: value for x, value in VARIANTS["olmo_hybrid"]().to_dict().items() if x != "rope_parameters"} | given
    family = family_of(entries)
    config = family.to_config(entries)
    assert config.unrotated_layers == (0, 1, 2)
    assert OlmoHybridConfig(**entries | family.from_config(config, entries)).rope_parameters["rope_theta"] is None


def test_qwen3_5_reads_no_entries_of_other_mixtures():
    """As in transformers, where every layer has experts and their weights always add up to 1."""
    entries = VARIANTS["qwen3_5_moe_text"]().to_dict()
    others = {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2}
    family = family_of(entries)
    config = family.to_config(entries | others)
    assert config == family.to_config(entries)
    assert config.normalize_top_k and not config.dense_layers


@pytest.mark.parametrize(
    "variant", variants([name for name in oracles.FAMILIES if name not in NO_CLASSIFIER], quick=("gemma2",))
)
def test_score_head_equals_a_sequence_classifier(variant, tmp_path, documents):
    """Both ways: a reward model of transformers is read, and ours is written as one."""
    config = VARIANTS[variant]()
    config.num_labels = 1
    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(tmp_path / "oracle")
    model = load_model(tmp_path / "oracle")
    tokens, segments = padded(documents, "left")
    found = jax.jit(lambda p: last_scores(model.net, p, Inputs(tokens, segments)))(model.params)
    expected = [oracle_logits(oracle, document[None])[0, 0] for document in documents]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    save_hf(model, tmp_path / "out")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    written, original = again.state_dict(), oracle.state_dict()
    assert written.keys() == original.keys() and all(torch.equal(written[name], original[name]) for name in original)


def test_entries_that_name_the_family_are_those_that_weights_are_read_by(tmp_path):
    folder, known = shutil.copytree(hf.EMBEDDED / "sort", tmp_path / "model"), load_model("embedded:sort")
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"model_type": "mine"}))
    model = load_model(folder, tokenizer=known.tokenizer, entries={"model_type": "llama"})
    jax.tree.map(np.testing.assert_array_equal, model.params, known.params)


def test_the_family_in_the_documentation(tmp_path, root, documents, monkeypatch):
    """It is the file that docs/models.md shows, and is no family of the package."""
    monkeypatch.setattr(families, "FAMILIES", dict(FAMILIES))
    (tmp_path / "helium.py").write_text(
        re.search(r"```python\n(.*?)```", (root / "docs/models.md").read_text(), re.DOTALL).group(1)
    )
    config = HeliumConfig(**oracles.SHAPE, head_dim=8)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="model_type 'helium' is not supported"):
        load_model(tmp_path / "model")
    register((str(tmp_path / "helium.py"),))
    model = load_model(tmp_path / "model")
    tokens = documents[1][None]
    np.testing.assert_allclose(model(tokens), oracle_logits(oracle, tokens), atol=TOLERANCE)
    save_hf(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    np.testing.assert_array_equal(oracle_logits(again, tokens), oracle_logits(oracle, tokens))


@pytest.mark.slow
def test_all_families_on_eight_devices(root, run_python):
    """In a process of its own, since the number of devices is fixed when JAX starts."""
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{root}/tests/models/mesh_families.py", devices=8, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
