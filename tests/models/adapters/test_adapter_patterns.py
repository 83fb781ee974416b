"""Adapters of some modules and of ranks of their own, against PEFT: logits, gradients, merged matrices, folders."""

import json

import jax
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters.lora import LoraConfig, parse_targets
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns, with_patterns
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.model import add_adapters, load_adapter, load_model, save_adapter, save_hf
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import dequantize
from tests.models.adapters.test_lora import TOKENS, gradients_beside, in_peft, shaken
from tests.models.conftest import make_oracle
from tests.models.oracles import VARIANTS

TARGETS = ["q_proj", "v_proj", "down_proj", "up_proj"]
PATTERNS = AdapterPatterns(
    exclude_modules=("layers.1.mlp.up_proj", "lm_head"),
    rank_pattern=("layers.0.self_attn.q_proj=2", "q_proj=5"),
    alpha_pattern=("down_proj=12", r"layers\.[01]\.self_attn\.v_proj=3"),
)


def theirs(patterns: AdapterPatterns, rank: int, alpha: int, targets=TARGETS):
    """PEFT's configuration of the same adapters."""

    def table(entries, kind):
        pairs = (entry.rpartition("=") for entry in entries)
        return {name: kind(number) for name, _, number in pairs}

    return peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM",
        layers_to_transform=list(patterns.layers_to_transform) or None,
        exclude_modules=list(patterns.exclude_modules) or None,
        rank_pattern=table(patterns.rank_pattern, int), alpha_pattern=table(patterns.alpha_pattern, float),
    )  # fmt: skip


def shapes_of(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


@pytest.mark.slow
def test_adapters_of_single_modules_are_those_of_peft(llama_folder, tmp_path):
    """Their modules and shapes, and what is computed, learned and merged."""
    shape = LoraConfig(3, 6.0, targets=parse_targets(TARGETS))
    model = shaken(add_adapters(load_model(llama_folder), shape, jax.random.key(0), (), PATTERNS))
    save_adapter(model, tmp_path / "adapter")
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(llama_folder), theirs(PATTERNS, 3, 6))
    made.save_pretrained(tmp_path / "peft")
    written, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "peft"))
    assert shapes_of(written) == shapes_of(expected)

    oracle = in_peft(llama_folder, tmp_path / "adapter")
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_("lora_" in name)
    gradients, compared = gradients_beside(oracle, model), 0
    stacks = {layer: (name, own.index(layer)) for name, own in model.net.config.stacks.items() for layer in own}
    for name, parameter in oracle.named_parameters():
        if parameter.grad is None:
            continue
        _, _, _, _, layer, part, module, matrix, *_ = name.split(".")
        stack, index = stacks[int(layer)]
        part = {"self_attn": "attention", "mlp": "mlp"}[part]
        own = gradients[stack][part][module.removesuffix("_proj")][f"lora_{matrix[-1].lower()}"][index]
        np.testing.assert_allclose(own, parameter.grad.numpy().T, atol=1e-4, rtol=1e-4, err_msg=name)
        compared += 1
    assert compared == 2 * 7  # A and B of four maps in one layer and three in the other

    again = load_model(llama_folder, adapter=tmp_path / "adapter")
    assert again.net == model.net
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    save_hf(model, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in oracle.merge_and_unload().state_dict().items():
        np.testing.assert_allclose(ours[name], value.detach(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("patterns", "groups"),
    [
        (AdapterPatterns(layers_to_transform=(1,)), (0, 1)),
        (AdapterPatterns(rank_pattern=("q_proj=1", "v_proj=2"), alpha_pattern=("self_attn.q_proj=3",)), ()),
        pytest.param(AdapterPatterns(exclude_modules=("down_proj", "up_proj")), (), marks=pytest.mark.slow),
    ],
)
def test_folders_of_peft_load(llama_folder, tmp_path, patterns, groups):
    """Layers are told apart where their adapters differ, and only there."""
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(llama_folder), theirs(patterns, 3, 6)).eval()
    made.save_pretrained(tmp_path)
    model = load_model(llama_folder, adapter=tmp_path)
    assert model.net.config.layer_groups == groups
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), made(torch.tensor(TOKENS)).logits.numpy(), atol=1e-4)
    shape = LoraConfig(3, 6.0, targets=parse_targets(TARGETS))
    assert add_adapters(load_model(llama_folder), shape, jax.random.key(0), (), patterns).net == model.net
    base = load_model(llama_folder)
    if groups:
        with pytest.raises(ConfigError, match=r"has adapters that differ from layer to layer, which"):
            load_adapter(base, tmp_path)
    else:
        assert load_adapter(base, tmp_path)[0] == model.net.config.lora


def test_maps_that_are_one_tensor_in_the_files(tmp_path):
    """phi3's qkv_proj is three maps, which a name means together."""
    make_oracle("phi3").save_pretrained(tmp_path)
    patterns = AdapterPatterns(layers_to_transform=(0,), rank_pattern=("qkv_proj=2",))
    model = add_adapters(load_model(tmp_path), LoraConfig(4), jax.random.key(0), (), patterns)
    assert model.net.config.lora is not None
    first, second = model.net.config.lora.groups
    assert {each.target: each.rank for each in first} == {
        "q": 2, "k": 2, "v": 2, "o": 4, "gate": 4, "up": 4, "down": 4
    }  # fmt: skip
    assert second == ()


@pytest.mark.slow
def test_maps_of_one_name_in_a_layer(tmp_path):
    """Attention and feed-forward of an afmoe each have a gate_proj."""
    make_oracle("afmoe").save_pretrained(tmp_path)
    patterns = AdapterPatterns(exclude_modules=("layers.1.self_attn.gate_proj",), rank_pattern=("mlp.gate_proj=2",))
    shape = LoraConfig(3, targets=parse_targets(["gate_proj"]))
    model = add_adapters(load_model(tmp_path), shape, jax.random.key(0), (), patterns)
    save_adapter(model, tmp_path / "adapter")
    ranks = {
        name.removeprefix("base_model.model.model.layers.").removesuffix(".lora_A.weight"): len(a)
        for name, a in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items()
        if name.endswith("lora_A.weight")
    }
    attention = {f"{layer}.self_attn.gate_proj": 3 for layer in (0, 2, 3)}
    shared = {f"{layer}.mlp.shared_experts.gate_proj": 3 for layer in (1, 2, 3)}
    assert ranks == attention | {"0.mlp.gate_proj": 2} | shared
    again = load_model(tmp_path, adapter=tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_maps_of_one_name_in_a_mixer():
    """The attention of a DeepSeek-V4 and the compressor in it each have a kv_proj."""
    entries = VARIANTS["deepseek_v4"]().to_dict() | {"architectures": None}
    family = family_of(entries)
    net = Net(family.to_config(entries)).with_lora(LoraConfig(3, targets=("kv",)))

    def ranks(**patterns):
        leaves = jax.tree_util.tree_leaves_with_path(with_patterns(net, family, AdapterPatterns(**patterns)).shapes())
        found = {path_name(path).partition("/")[2]: x.shape[-1] for path, x in leaves if path[-1].key == "lora_a"}
        return {name.removesuffix("/lora_a"): rank for name, rank in found.items() if "compressed" in name}

    kinds = ("compressed_sparse", "heavily_compressed")
    own, of_entries = ([f"{kind}/{part}kv" for kind in kinds] for part in ("", "compressor/"))
    assert ranks(exclude_modules=("self_attn.kv_proj",)) == dict.fromkeys(of_entries, 3)
    assert ranks(rank_pattern=("compressor.kv_proj=2",)) == dict.fromkeys(own, 3) | dict.fromkeys(of_entries, 2)


@pytest.mark.slow
def test_beside_quantised_matrices(llama_folder, tmp_path):
    """Those without an adapter are written as they are stored."""
    base, patterns = load_model(llama_folder, quantize="int8"), AdapterPatterns(layers_to_transform=(1,))
    model = shaken(add_adapters(base, LoraConfig(3, targets=("q",)), jax.random.key(0), (), patterns))
    save_hf(model, tmp_path)
    written, stored = (x.params["layers"]["attention"]["q"]["kernel"] for x in (load_model(tmp_path), base))
    expected = dequantize(stored, "int8", jax.numpy.float32)
    np.testing.assert_allclose(written[0], expected[0], atol=1e-6)
    assert np.abs(written[1] - expected[1]).max() > 1e-2


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"layers_to_transform": (2,)}, "lora.layers_to_transform has 2, but the layers of this model are 0 to 1"),
        ({"exclude_modules": ("proj",)}, r"lora.exclude_modules has 'proj', but the name of no module ends so"),
        ({"rank_pattern": ("k_proj=2",)}, r"lora.rank_pattern has 'k_proj', but the name of no module with an"),
        ({"rank_pattern": ("q_proj",)}, "lora.rank_pattern has 'q_proj', but it takes NAME=NUMBER"),
        ({"rank_pattern": ("q_proj=0",)}, "lora.rank_pattern has 'q_proj=0', but it takes NAME=NUMBER"),
        ({"alpha_pattern": ("q_proj=nan",)}, "lora.alpha_pattern has 'q_proj=nan', but it takes NAME=NUMBER"),
        ({"alpha_pattern": ("(=1",)}, "which is no regular expression"),
        ({"exclude_modules": tuple(TARGETS)}, "no module is left of lora.targets"),
    ],
)
def test_patterns_that_fit_nothing_are_refused(llama_folder, patterns, message):
    shape = LoraConfig(3, targets=parse_targets(TARGETS))
    with pytest.raises(ConfigError, match=message):
        add_adapters(load_model(llama_folder), shape, jax.random.key(0), (), AdapterPatterns(**patterns))


def test_settings_of_adapter_config(llama_folder, tmp_path):
    """What PEFT does not read otherwise: the names of modules, and the ranks that differ."""
    shape = LoraConfig(3, 6.0, targets=parse_targets(["q_proj"]))
    patterns = AdapterPatterns(rank_pattern=("layers.1.self_attn.q_proj=5",))
    save_adapter(add_adapters(load_model(llama_folder), shape, jax.random.key(0), (), patterns), tmp_path / "a")
    entries = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert entries["target_modules"] == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert (entries["r"], entries["rank_pattern"]) == (3, {"model.layers.1.self_attn.q_proj": 5})
    assert entries["alpha_pattern"] == {}
