"""Model folders: what is read and written bit for bit, and what is refused by name."""

import dataclasses
import json
import logging
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.templates import plain_ids
from jaxrl_llm.models.files import hf, safetensors
from jaxrl_llm.models.model import check_positions, check_same_vocabulary, load_model, save_hf
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.runtime.preemption import Preempted
from tests.models.conftest import SHAPE, make_oracle


@pytest.fixture
def copy(llama_folder, tmp_path):
    """A model folder that the test may damage."""
    return shutil.copytree(llama_folder, tmp_path / "model")


def edit_config(folder, **entries):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in config.items() if value != "remove"}))


def edit_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


CONFIG_FAULTS = {
    "model_type": (
        {"model_type": "bert"},
        "model_type 'bert' is not supported; supported are llama, qwen2, qwen3, mistral, gemma",
    ),
    "what is known not to be computed": (
        {"model_type": "zaya"},
        r"model_type 'zaya' is not supported \(attention to convolved queries and keys\); supported are llama",
    ),
    "no text part": ({"model_type": "gemma3"}, "text_config = None is not supported"),
    "no model_type": ({"model_type": "remove"}, "model_type None"),
    "hidden_act": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: silu"),
    "rope type": (
        {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}},
        "rope_type = 'ntk' is not supported; supported: default, linear, dynamic, llama3, yarn",
    ),
    "old rope type": ({"rope_parameters": "remove", "rope_scaling": {"type": "su", "factor": 2.0}}, "'su'"),
    "linear without factor": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        "rope_type linear needs the entry 'factor'",
    ),
    "llama3 without factor": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0}},
        "llama3 needs the entry 'factor'",
    ),
    "yarn without length": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": "remove"},
        "yarn needs the entry 'original_max_position_embeddings'",
    ),
    "dynamic without length": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": "remove"},
        "dynamic needs the entry 'max_position_embeddings'",
    ),
    "rope type of phi3": (
        {"model_type": "phi3", "architectures": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_type = 'linear' .* default and longrope, in phi3 models",
    ),
    "longrope without factors": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "short_factor of rope_type longrope = None is not supported; supported: a list of numbers above 0",
    ),
    "longrope of other heads": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        r"short_factor of rope_type longrope = \[1.0\] is not supported; supported: \d+ numbers, one of each",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "too much rotary": (
        {"model_type": "phi3", "architectures": None, "rope_parameters": {"partial_rotary_factor": 1.5}},
        "partial_rotary_factor = 1.5",
    ),
    "rope per layer type": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one set of parameters"),
    "dynamic rope of a type of layers": (
        {
            "model_type": "gemma3_text",
            "architectures": None,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}},
            "head_dim": 8,
        },
        "rope_type = 'dynamic'",
    ),
    "no window": (
        {"model_type": "qwen2", "architectures": None, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window = None is not supported; supported: integers from 1",
    ),
    "too few layer types": (
        {"model_type": "qwen2", "architectures": None, "layer_types": ["full_attention"]},
        r"layer_types = \['full_attention'\] .* one type for each of the 2 layers",
    ),
    "unknown layer types": (
        {"model_type": "qwen3", "architectures": None, "layer_types": ["full_attention", "linear_attention"]},
        r"layer_types = \['linear_attention'\]",
    ),
    "layer types beside a window": (
        {"model_type": "mistral", "architectures": None, "layer_types": ["full_attention"] * 2},
        r"layer_types = \['full_attention'\] .* sliding_attention in every layer",
    ),
    "bidirectional": (
        {"model_type": "gemma", "architectures": None, "use_bidirectional_attention": True},
        "use_bidirectional_attention = True",
    ),
    "too many experts chosen": (
        {"model_type": "mixtral", "architectures": None, "num_experts_per_tok": 9},
        "num_experts_per_tok = 9 .* up to num_local_experts = 8",
    ),
    "router noise": (
        {"model_type": "mixtral", "architectures": None, "router_jitter_noise": 0.1},
        "router_jitter_noise = 0.1",
    ),
    "experts nowhere": (
        {
            "model_type": "qwen3_moe",
            "architectures": None,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0, 1],
        },
        r"mlp_only_layers = \[0, 1\]",
    ),
    "experts in no layer": (
        {"model_type": "llama4_text", "architectures": None, "moe_layers": []},
        r"moe_layers = \[\] is not supported; supported: lists with some of the layers",
    ),
    "more experts than there are": (
        {"model_type": "llama4_text", "architectures": None, "num_local_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok = 3 .* up to num_local_experts = 2",
    ),
    "windows in place of chunks": (
        {"model_type": "llama4_text", "architectures": None, "layer_types": ["sliding_attention"] * 2},
        r"layer_types = \['sliding_attention'\] .* full_attention and chunked_attention",
    ),
    "letters of layers": (
        {"model_type": "nemotron_h", "architectures": None, "hybrid_override_pattern": "MX"},
        r"hybrid_override_pattern = 'MX' .* letters M \* E -, one for each layer",
    ),
    "types of layers of another family": (
        {"model_type": "nemotron_h", "architectures": None, "layers_block_type": ["mamba", "conv"]},
        r"layers_block_type = \['conv'\] .* moe, mlp",
    ),
    "gelu beside Mamba-2": (
        {"model_type": "nemotron_h", "architectures": None, "mlp_hidden_act": "gelu", "layers_block_type": ["mlp"]},
        "mlp_hidden_act = 'gelu' is not supported; supported: relu2",
    ),
    "a router of softmax": (
        {"model_type": "afmoe", "architectures": None, "score_func": "softmax"},
        "score_func = 'softmax' is not supported; supported: sigmoid",
    ),
    "experts of another number in a layer": (
        {"model_type": "hunyuan_v1_moe", "architectures": None, "num_experts": [4, 8], "moe_topk": 2},
        r"num_experts = \[4, 8\] is not supported; supported: the same number in every layer",
    ),
    "more experts of Hunyuan than there are": (
        {"model_type": "hunyuan_v1_moe", "architectures": None, "num_experts": 4, "moe_topk": [5, 5]},
        "moe_topk = 5 .* up to num_experts = 4",
    ),
    "a head with a bias": (
        {"model_type": "ernie4_5_moe", "architectures": None, "use_bias": True},
        "use_bias = True is not supported; supported: false",
    ),
    "experts behind the last layer": (
        {"model_type": "ernie4_5_moe", "architectures": None, "moe_layer_start_index": 2},
        "moe_layer_start_index = 2 .* leave experts to some of the 2 layers",
    ),
    "experts from a layer of no number": (
        {"model_type": "ernie4_5_moe", "architectures": None, "moe_layer_start_index": "x"},
        "moe_layer_start_index = 'x' is not supported; supported: an integer",
    ),
    "layers of an encoder that are no list": (
        {"model_type": "qwen2_5_vl", "architectures": None, "vision_config": {"fullatt_block_indexes": 3}},
        "fullatt_block_indexes = 3 is not supported; supported: a list",
    ),
    "a decoder of another family": (
        {"model_type": "gemma3", "architectures": None, "text_config": {"model_type": "llama"}},
        r"text_config = \{'model_type': 'llama'\} is not supported; supported: the entries of a gemma3_text model",
    ),
    "a norm behind each part": (
        {"model_type": "apertus", "architectures": None, "hidden_act": "xielu", "post_norm": True},
        "post_norm = True is not supported; supported: False",
    ),
    "another activation than xIELU": (
        {"model_type": "apertus", "architectures": None, "hidden_act": "silu"},
        "hidden_act = 'silu' is not supported; supported: xielu",
    ),
    "dense layers alone": (
        {"model_type": "afmoe", "architectures": None, "num_dense_layers": 2},
        "num_dense_layers = 2 .* below num_hidden_layers = 2",
    ),
    "positions that no layer has": (
        {
            "model_type": "nemotron_h",
            "architectures": None,
            "hybrid_override_pattern": "M*",
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        "rope_type = 'linear' .* default, as no layer of this model has rotary positions",
    ),
    "types of layers of no kind": (
        {"model_type": "cohere2", "architectures": None, "layer_types": [1, "full_attention"]},
        r"layer_types = \[1, 'full_attention'\] is not supported; supported: a list of texts",
    ),
    "one limit of steps": (
        {
            "model_type": "nemotron_h",
            "architectures": None,
            "layers_block_type": ["mamba"],
            "time_step_limit": [0.0],
        },
        r"time_step_limit = \[0.0\] is not supported; supported: two numbers",
    ),
    "delta attention of no kind": (
        {"model_type": "kimi_linear", "architectures": None, "linear_attn_config": {"full_attn_layers": 3}},
        "linear_attn_config.full_attn_layers = 3 is not supported; supported: a list",
    ),
    "rotary latent attention": (
        {"model_type": "kimi_linear", "architectures": None, "mla_use_nope": False},
        "mla_use_nope = False is not supported; supported: True",
    ),
    "further layers of no kind": ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers = '1' .* an integer"),
    "no number of experts": ({"model_type": "qwen3_moe", "architectures": None}, "no entry num_experts"),
    "rope of no kind": ({"rope_parameters": 2.5}, "rope_parameters = 2.5 is not supported; supported: an object"),
    "rope of a layer": (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}},
        "rope_parameters of full_attention = 3",
    ),
    "one architecture": ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' .* a list"),
    "types of layers": ({"layer_types": True}, "layer_types = True is not supported; supported: a list"),
    "no size": ({"model_type": "gemma", "architectures": None, "hidden_size": -1}, "hidden_size = -1 .* from 1"),
    "model_type of no kind": (
        {"model_type": ["llama"]},
        r"model_type = \['llama'\] is not supported; supported: a text",
    ),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, "quant_method of quantization_config = 'hqq'"),
    "architecture": (
        {"architectures": ["LlamaForQuestionAnswering"]},
        "LlamaForQuestionAnswering.*LlamaForCausalLM",
    ),
    "many labels": ({"architectures": ["LlamaForSequenceClassification"]}, "num_labels = 2"),
    "missing entry": ({"intermediate_size": "remove"}, "no entry intermediate_size"),
    "wrong entry": ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two' .* integers from 1"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads = 3 .* divisors of num_attention_heads = 4"),
    "eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is not supported; supported: numbers from 0"),
    "eps as text": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6'"),
    "negative eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06"),
    "init": ({"initializer_range": float("inf")}, "initializer_range = inf"),
    **{
        f"theta {theta}": ({"rope_parameters": "remove", "rope_theta": theta}, f"rope_theta = {theta} .* above 1")
        for theta in (0, -1, 1, float("nan"), float("inf"))
    },
    "theta of parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta = 0.0"),
    "rope factor": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
        "factor = 0 is not supported; supported: numbers above 0",
    ),
    "original positions": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings = 0",
    ),
    "llama3 frequencies": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.5,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
        "low_freq_factor = 4.5 .* up to high_freq_factor = 4",
    ),
    "width": ({"head_dim": None, "hidden_size": 30}, "hidden_size = 30 .* multiples of num_attention_heads"),
}


def test_a_form_of_another_name_is_read_and_exported_as_its_family(tmp_path):
    """Kimi-K2's folders are DeepSeek-V3's in form, but for the code that they bring."""
    make_oracle("deepseek_v3").save_pretrained(tmp_path / "model")
    expected = load_model(tmp_path / "model")
    edit_config(tmp_path / "model", model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.Config"})
    model = load_model(tmp_path / "model")
    assert model.net == expected.net
    save_hf(model, tmp_path / "out")
    entries = json.loads((tmp_path / "out/config.json").read_text())
    assert entries["model_type"] == "deepseek_v3" and "auto_map" not in entries
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "out")[1], expected.params)


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_unsupported_config_is_refused_before_weights_are_read(copy, fault):
    entries, message = CONFIG_FAULTS[fault]
    edit_config(copy, **entries)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        hf.load(copy)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rematerialize": True}, "no setting 'rematerialize'; it has .*remat"),
        ({"dtype": "int8"}, "dtype = 'int8' is not one of float32"),
        ({"head": "classifier"}, "head = 'classifier' is not one of lm, score, step"),
    ],
)
def test_unknown_overrides_are_refused(llama_folder, overrides, message):
    with pytest.raises(ConfigError, match=message):
        hf.load(llama_folder, **overrides)


def pop(name):
    return lambda tensors: tensors.pop(name)


def put(name, array):
    return lambda tensors: tensors.update({name: array})


UP = "model.layers.1.mlp.up_proj.weight"
TENSOR_FAULTS = {
    "missing": (pop(UP), f"lacks tensors that the model needs: {UP}"),
    "missing head": (pop("lm_head.weight"), "lacks .* lm_head.weight"),
    "unexpected": (
        put("model.layers.2.mlp.up_proj.weight", np.zeros((48, 32), np.float32)),
        "layers.2.mlp.up_proj.weight",
    ),
    "bias": (put("model.layers.0.mlp.up_proj.bias", np.zeros(48, np.float32)), "gives no place to: .*up_proj.bias"),
    "shape": (put(UP, np.zeros((32, 48), np.float32)), rf"{UP} has shape \(32, 48\), but config.json says \(48, 32\)"),
    "dtype": (put(UP, np.zeros((48, 32), np.int8)), f"{UP} has dtype I8, supported are F64, F32"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_are_named(copy, fault):
    change, message = TENSOR_FAULTS[fault]
    edit_tensors(copy, change)
    with pytest.raises(ConfigError, match=message):
        hf.load(copy)


def test_known_buffers_are_ignored(copy, llama_folder):
    edit_tensors(copy, put("model.layers.0.self_attn.rotary_emb.inv_freq", np.zeros(4, np.float32)))
    assert equal(hf.load(copy)[1], hf.load(llama_folder)[1])


def test_a_tied_head_on_disk_is_ignored(tmp_path):
    make_oracle("llama3").save_pretrained(tmp_path)
    before = hf.load(tmp_path)[1]
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert equal(hf.load(tmp_path)[1], before)


def test_a_head_that_is_not_the_embedding_cannot_be_tied(copy, tmp_path):
    edit_config(copy, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"says tie_word_embeddings, but the files hold a lm_head\.weight with other"):
        hf.load(copy)
    hf.load(copy, head="score")  # which reads no head of tokens


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named(copy, name, value, param_dtype):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[-1] = value

    edit_tensors(copy, spoil)
    with pytest.raises(ConfigError, match=rf"tensor {name} has 1 numbers of \d+ that are not finite \({value}"):
        hf.load(copy, param_dtype=param_dtype)


def test_large_weights_are_finite():
    for dtype in (np.float32, np.float64, jnp.bfloat16, np.float16):
        most = np.full((3, 70_000), jnp.finfo(dtype).max, dtype)  # whose sum overflows
        assert safetensors.all_finite(most) and safetensors.all_finite(-most) and safetensors.all_finite(most[:, ::2].T)
        most[-1, -1] = np.inf
        assert not safetensors.all_finite(most)
    assert safetensors.all_finite(np.zeros((0, 4), np.float32)) and safetensors.all_finite(np.zeros(0, jnp.bfloat16))


def test_truncated_file_is_named(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated"):
        hf.load(copy)


def test_damaged_shards_are_named(copy):
    model = load_model(copy)
    save_hf(model, copy, max_shard_bytes=20_000, overwrite=True)
    shards = sorted(copy.glob("model-*.safetensors"))
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(model.params))
    shutil.copy(shards[0], copy / "spare")
    shards[0].unlink()
    with pytest.raises(ConfigError, match=f"{shards[0].name} is missing"):
        hf.load(copy)
    shutil.copy(shards[1], shards[0])
    with pytest.raises(ConfigError, match=r"index\.json names tensors that no file holds: .*embed_tokens"):
        hf.load(copy)
    for text in ('{"metadata": {}}', '{"weight_map": {"model.norm.weight": 1}}'):
        (copy / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConfigError, match=r"index\.json has no weight_map"):
            hf.load(copy)


def test_a_file_of_all_tensors_goes_before_an_index(copy):
    """As in transformers: the shards that the index names may be those of an earlier model."""
    expected = hf.load(copy)[1]
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    AutoModelForCausalLM.from_pretrained(copy)
    jax.tree.map(np.testing.assert_array_equal, hf.load(copy)[1], expected)


def test_folders_without_a_model_are_refused(copy, tmp_path):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickle files \(pytorch_model\.bin\) are not read"):
        hf.load(copy)
    (copy / "model_world_size_2_rank_0.pt").touch()
    with pytest.raises(ConfigError, match=r"a checkpoint of verl, whose shards verl merges: .*model_merger merge"):
        hf.load(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        hf.load(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, but holds a list"):
        hf.load(copy)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        hf.load(tmp_path)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_files_widen_exactly_and_come_back(copy, tmp_path, stored):
    exact = hf.load(copy)[1]
    rounded = jax.tree.map(lambda x: x.astype(stored), exact)
    net, wide = hf.load(copy)
    hf.save(net, wide, tmp_path / "half", hf_config=hf.read_config(copy), dtype=stored)
    assert {x.dtype.name for x in load_file(tmp_path / "half/model.safetensors").values()} == {stored}
    assert hf.read_config(tmp_path / "half")["dtype"] == stored
    half_net, half = hf.load(tmp_path / "half", param_dtype=stored)
    assert equal(half, rounded)
    assert equal(hf.load(tmp_path / "half")[1], jax.tree.map(lambda x: x.astype("float32"), rounded))
    hf.save(half_net, half, tmp_path / "again")
    assert equal(hf.load(tmp_path / "again", param_dtype=stored)[1], rounded)


def test_files_of_half_precision_load_in_torch(copy, tmp_path):
    hf.save(*hf.load(copy, param_dtype="bfloat16"), tmp_path / "half")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "half", num_labels=1, dtype="auto")
    assert again.model.embed_tokens.weight.dtype == torch.bfloat16


class FailingTokenizer:
    """Stands for any failure in the middle of an export, such as a full disk."""

    def save_pretrained(self, folder):
        assert os.listdir(folder)  # some of the export is written  # noqa: PTH208
        raise OSError("No space left on device")


@pytest.mark.parametrize("before", [True, False], ids=["over an export", "new"])
def test_a_failed_export_leaves_what_was_there(llama_folder, tmp_path, before):
    net, params = hf.load(llama_folder)
    target = tmp_path / "exports" / "model"
    if before:
        hf.save(net, params, target)
    other = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(OSError, match="No space left"):
        hf.save(net, other, target, tokenizer=FailingTokenizer())
    assert [file.name for file in target.parent.iterdir()] == (["model"] if before else [])
    if before:
        assert equal(hf.load(target)[1], params)


def stopped(net, params, target):
    """An export that fails half-way."""
    with pytest.raises(OSError, match="No space left"):
        hf.save(net, params, target, tokenizer=FailingTokenizer())


def test_what_a_killed_export_left_is_put_right(llama_folder, tmp_path):
    """Of the same process id, as in containers, and of others; other hidden folders stay."""
    net, params = hf.load(llama_folder)
    target = tmp_path / "hf"
    for name in (f".hf.partial-{os.getpid()}", ".hf.partial-7", ".hf.earlier-8", ".hf.partial", ".other.partial-7"):
        shutil.copytree(llama_folder, tmp_path / name)
    shutil.copytree(llama_folder, tmp_path / f".hf.earlier-{os.getpid()}")  # the newest
    stopped(net, params, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hf.partial", ".other.partial-7", "hf"]
    assert equal(hf.load(target)[1], params)
    (tmp_path / f".hf.partial-{os.getpid()}").mkdir()
    other = jax.tree.map(lambda x: x + 1, params)
    hf.save(net, other, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hf.partial", ".other.partial-7", "hf"]
    assert equal(hf.load(target)[1], other)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Preempted(1, "now"), OSError("No space left")], ids=str)
def test_an_interruption_between_the_renames_leaves_the_earlier_export(llama_folder, tmp_path, monkeypatch, interrupt):
    net, params = hf.load(llama_folder)
    hf.save(net, params, tmp_path / "hf")
    rename = Path.rename

    def interrupted(path, target):
        if ".partial-" in path.name:
            raise interrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit, OSError)):
        hf.save(net, jax.tree.map(lambda x: x + 1, params), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert equal(hf.load(tmp_path / "hf")[1], params)


def test_code_that_is_not_exported_is_not_named(copy, tmp_path):
    """auto_map names Python files of the folder that was read; without it transformers takes its own class."""
    edit_config(copy, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    model = load_model(copy)
    save_hf(model, tmp_path / "exported")
    assert "auto_map" not in hf.read_config(tmp_path / "exported")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert type(again).__name__ == "LlamaForCausalLM"


def test_an_export_replaces_an_earlier_one_and_nothing_else(llama_folder, tmp_path):
    net, params = hf.load(llama_folder)
    hf.save(net, params, tmp_path / "model", max_shard_bytes=20_000)
    hf.save(net, params, tmp_path / "model")
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    (tmp_path / "home").mkdir()
    hf.save(net, params, tmp_path / "home")
    (tmp_path / "home" / "work").mkdir()
    with pytest.raises(ConfigError, match="holds other files than an exported model's"):
        hf.save(net, params, tmp_path / "home")
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=r"choose a new folder|is a file"):
            hf.save(net, params, target)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_net_that_no_family_can_hold_is_refused(llama_folder, tmp_path):
    config = hf.load(llama_folder)[0].config
    fields = {
        name: getattr(config, name)
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn")
    }
    net = Net(ModelConfig(**fields, qk_norm="head", mlp_bias=True))
    with pytest.raises(ConfigError, match=r"no family of llama, .* with .*mlp_bias=True, qk_norm='head' together"):
        hf.save(net, {}, tmp_path / "out")
    net = Net(ModelConfig(**fields, attention_bias=True))
    with pytest.raises(ConfigError, match=r"a llama config\.json cannot describe this model"):
        hf.save(net, {}, tmp_path / "out", hf_config=hf.read_config(llama_folder))
    with pytest.raises(ConfigError, match="dtype = 'int4' is not one of"):
        hf.save(net, {}, tmp_path / "out", dtype="int4")
    assert not (tmp_path / "out").exists()


def make_tokenizer():
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "two", "plus", "three"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    return fast


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_generic_tokenizer_is_the_one_of_transformers(copy, tokenizer_class):
    """It is loaded without `AutoTokenizer`, whose import takes seconds where torch is installed."""
    make_tokenizer().save_pretrained(copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = hf.load_tokenizer(copy), AutoTokenizer.from_pretrained(copy)
    assert hf._is_generic_tokenizer(copy)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.init_kwargs == theirs.init_kwargs and ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


def test_a_text_beyond_model_max_length_is_no_warning(copy, caplog, monkeypatch):
    """What is too long for the model is refused by its positions, not by what its tokenizer says of it."""
    make_tokenizer().save_pretrained(copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text()) | {"model_max_length": 2}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(AutoTokenizer.from_pretrained(copy)("two one two")["input_ids"]) > 2
    assert "longer than the specified maximum sequence length" in caplog.text
    caplog.clear()
    assert len(hf.load_tokenizer(copy)("two one two")["input_ids"]) > 2 and not caplog.text


@pytest.mark.slow
def test_the_embedded_model_loads_without_torch_and_datasets(run_python):
    code = (
        "import sys, jaxrl_llm.train, jaxrl_llm\n"
        "jaxrl_llm.load_model('embedded:sort')\n"
        "print(*({'torch', 'accelerate', 'datasets', 'pandas'} & set(sys.modules)))"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("own", [4, [4, 5], None])
def test_the_end_of_another_template_is_saved_before_the_models_own(copy, tmp_path, own):
    """As a run saves whose chat template has another end of text than the model had."""
    tokenizer = make_tokenizer()
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": own, "temperature": 0.6}))
    edit_config(copy, eos_token_id=own)
    save_hf(dataclasses.replace(load_model(copy), tokenizer=tokenizer), tmp_path / "out")
    again, end = load_model(tmp_path / "out"), tokenizer.eos_token_id
    assert again.generation == {
        "eos_token_id": end if own is None else [end, 4, *([5] if own != 4 else [])],
        "temperature": 0.6,
    }
    assert again.hf_config["eos_token_id"] == end == again.tokenizer.eos_token_id


def test_tokenizer_template_and_generation_config_come_back(copy, tmp_path):
    make_tokenizer().save_pretrained(copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    edit_config(copy, max_position_embeddings=77, my_own_entry="kept")
    model = load_model(copy)
    save_hf(model, tmp_path / "out")
    again = load_model(tmp_path / "out")
    assert again.generation == {"eos_token_id": [1, 2], "temperature": 0.6}
    assert again.hf_config["my_own_entry"] == "kept"
    assert again.hf_config["max_position_embeddings"] == 77
    assert again.tokenizer.encode("two plus three four") == [3, 4, 5, 2]
    chat = [{"role": "user", "content": "two plus"}]
    assert again.tokenizer.apply_chat_template(chat, tokenize=False) == "two plus<eos>"
    assert again.net == model.net


def test_every_token_has_an_embedding(copy):
    size = SHAPE["vocab_size"]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(size - len(tokenizer))])
    tokenizer.save_pretrained(copy)
    load_model(copy)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(copy)
    model = load_model(copy)  # a special token that nothing names does no harm, unless a text has it
    assert plain_ids(model.tokenizer, "two")
    with pytest.raises(
        ConfigError, match=f"a text contains <image>, token {size}, for which the model has no embedding"
    ):
        plain_ids(model.tokenizer, "two <image>")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, size]}))
    with pytest.raises(ConfigError, match=rf"embedding has {size} rows .* ids up to {size}: eos_token_id = {size}"):
        load_model(copy)
    (copy / "generation_config.json").unlink()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(copy)
    with pytest.raises(ConfigError, match=rf"ids up to {size + 1}: '<image>' {size}, 'more' {size + 1}\."):
        load_model(copy)


def test_a_model_that_reads_the_ids_of_another_has_its_vocabulary(copy, llama_folder, tmp_path):
    other = shutil.copytree(copy, tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(copy)
    tokenizer.save_pretrained(other)
    check_same_vocabulary(load_model(copy), load_model(other), "critic")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})  # it has an embedding there too
    tokenizer.save_pretrained(copy)
    check_same_vocabulary(load_model(copy), load_model(other), "critic")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"two"', '"2"'))
    with pytest.raises(
        ConfigError, match=r"critic .*other reads the token ids of .*: id 3 is 'two' there and '2' here"
    ):
        check_same_vocabulary(load_model(copy), load_model(other), "critic")


def test_rows_longer_than_the_positions(copy):
    edit_config(copy, max_position_embeddings=64)
    model = load_model(copy)
    check_positions(model, 64, "this")
    with pytest.raises(ConfigError, match=r"up to 65 tokens \(this\), but .* has positions for 64"):
        check_positions(model, 65, "this")
    edit_config(copy, rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    check_positions(load_model(copy), 256, "this")
    edit_config(copy, max_position_embeddings="remove", rope_parameters="remove")
    check_positions(load_model(copy), 10**9, "this")
    edit_config(copy, model_max_length=64)  # as Kimi Linear has it
    with pytest.raises(ConfigError, match=r"has positions for 64 \(max_position_embeddings .* model_max_length or"):
        check_positions(load_model(copy), 65, "this")


def test_tokenizer_faults_are_named(copy):
    assert load_model(copy).tokenizer is None
    with pytest.raises(ConfigError, match="has no tokenizer"):
        hf.load_tokenizer(copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"the tokenizer in {copy} cannot be read"):
        hf.load_tokenizer(copy)


@pytest.mark.slow
def test_loading_and_saving_need_no_torch(copy, run_python):
    make_tokenizer().save_pretrained(copy)
    code = f"""
import sys
sys.modules["torch"] = None
from jaxrl_llm.models.model import load_model, save_hf
model = load_model({str(copy)!r})
assert model([[3, 4, 5]]).shape == (1, 3, 97)
assert model.tokenizer.encode("two") == [3]
save_hf(model, "out")
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_dtype_auto_is_float32_on_cpu(llama_folder):
    model = load_model(llama_folder)
    assert (model.net.config.dtype, model.net.config.param_dtype) == ("float32", "float32")
    model = load_model(llama_folder, dtype="bfloat16", remat="block")
    assert (model.net.config.dtype, model.net.config.param_dtype) == ("bfloat16", "bfloat16")
    assert model.net.config.remat == "block"
    assert model([[1, 2]]).dtype == jnp.float32


def test_locate(tmp_path, monkeypatch):
    assert hf.locate(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="there is no embedded model embedded:nothing; there are: "):
        hf.locate("embedded:nothing")
    with pytest.raises(ConfigError, match="no such folder, and it is neither a Hugging Face hub id"):
        hf.locate("./not/a/model")
    (tmp_path / "Qwen3-0.6B" / "hf").mkdir(parents=True)
    for path in ("Qwen3-06B", "qwen3-0.6B/hf", "Qwen3-0.6B/hff"):
        near = tmp_path / "Qwen3-0.6B" / ("hf" if path.endswith("hff") else "")
        with pytest.raises(ConfigError, match=re.escape(f"there is no such folder (the closest is {near}), and it is")):
            hf.locate(tmp_path / path)
    for path in ("/no/such", "runs/none/hf", "./not"):
        with pytest.raises(ConfigError, match=r"model\.path = .*there is no such folder, and it is neither"):
            hf.find_tokenizer(path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="'nobody/nothing': there is no such folder here, and the Hugging Face hub"):
        hf.locate("nobody/nothing")


@pytest.mark.slow
def test_a_mistyped_path_is_refused_soon_where_the_hub_is_out_of_reach(run_python):
    """transformers asks six times for one file, in over twenty seconds, and for one file after the other."""
    code = """
import os, time
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import hf
import huggingface_hub, transformers
began = time.monotonic()
try:
    hf.find_tokenizer("runs/grpo2")
except ConfigError as error:
    print(error)
assert time.monotonic() - began < 15
"""
    result = run_python("-c", code)
    assert not result.returncode, result.stderr
    assert "model.path = 'runs/grpo2': there is no such folder here, and the Hugging Face hub did not" in result.stdout


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | {"pad_token_id": 0}, num_labels=1)
    path = tmp_path_factory.mktemp("scorer")
    scorer = AutoModelForSequenceClassification.from_config(config).eval()
    scorer.save_pretrained(path)
    return scorer, path


def test_a_reward_model_scores_like_the_oracle_and_comes_back(scorer, tmp_path):
    oracle, folder = scorer
    model = load_model(folder)
    assert model.net.config.head == "score"
    tokens = np.random.default_rng(0).integers(1, 97, (3, 8))
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens)).logits[:, 0].numpy()
    np.testing.assert_allclose(model(tokens)[:, -1], expected, atol=2e-5)
    for config in (model.hf_config, None):
        hf.save(model.net, model.params, tmp_path / "out", hf_config=config)
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        assert again.config.num_labels == 1
        for (name, a), (_, b) in zip(oracle.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("variant", ["llama", "qwen2"], ids=["untied", "tied"])
def test_a_language_model_gets_a_new_score_head(tmp_path, variant):
    make_oracle(variant).save_pretrained(tmp_path)
    net, params = hf.load(tmp_path, head="score", seed=1)
    language = hf.load(tmp_path)[1]
    assert equal(params["layers"], language["layers"])
    assert "head" not in params
    score = params["score"]["kernel"]
    assert score.shape == (32, 1)
    assert float(score.std()) == pytest.approx(net.config.init_scale, rel=0.4)
    assert equal(score, hf.load(tmp_path, head="score", seed=1)[1]["score"]["kernel"])
    assert not equal(score, hf.load(tmp_path, head="score", seed=2)[1]["score"]["kernel"])


def test_a_reward_model_is_no_language_model(scorer):
    with pytest.raises(ConfigError, match=r"has the head score, and lm is asked for: .* the reward model:PATH"):
        hf.load(scorer[1], head="lm")
