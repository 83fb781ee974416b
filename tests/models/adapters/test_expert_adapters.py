"""Adapters of experts: by hand, against PEFT's stacked parameters in both directions, merged, and what is refused."""

import dataclasses
import functools
import json
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import families
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig, parse_targets
from jaxrl_llm.models.adapters.peft_experts import MISREAD
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns, with_patterns
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.models.families import mixtral, nemotron_h
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.model import Model, add_adapters, has_peft_adapter, load_model, save_adapter, save_hf
from jaxrl_llm.models.moe import Experts, dense, grouped
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.trained import Trained
from tests.models.adapters.test_lora import TOKENS, in_peft, shaken
from tests.models.conftest import make_oracle, variants
from tests.models.images import make_vision_oracle
from tests.models.test_moe import CONFIG, routed

SHAPE = LoraConfig(rank=3, alpha=6.0, targets=parse_targets(["q", "experts"]), rslora=True)
NET = Net(CONFIG).with_lora(SHAPE)
# One for each way that transformers' classes have experts: [E,2f,D], [E,D,2f] interleaved, and [E,D,2f] unsaid.
FAMILIES = variants(
    ["qwen3_moe", "gpt_oss", "llama4_text", "mixtral", "granitemoehybrid", "gemma4_text-experts", "deepseek_v3",
     "glm4_moe", "qwen3_5_moe_text", "qwen3_next", "minimax_m2", "lfm2_moe", "olmoe", "qwen2_moe", "glm4_moe_lite",
     "afmoe", "dots1", "kimi_linear", "qwen4_exp_text"],
    ["gpt_oss"],
)  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def logits(net, params, tokens, segments=None):
    return net.bind(params)(tokens, segments)


def moved(params, seed: int = 1):
    """The parameters with random numbers added to the adapters, so that they matter."""
    draw = np.random.default_rng(seed)
    adapters = lora.adapters_of(params)
    return lora.combine(params, jax.tree.map(lambda x: x + 0.1 * draw.normal(size=x.shape).astype("f"), adapters))


@pytest.fixture(scope="module")
def params():
    return moved(jax.jit(NET.init)(jax.random.key(0)))


@pytest.mark.slow
def test_new_ones_change_nothing_bit_for_bit():
    base, new = (jax.jit(net.init)(jax.random.key(0)) for net in (Net(CONFIG), NET))
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(new), base)
    np.testing.assert_array_equal(logits(NET, new, TOKENS % 31), logits(Net(CONFIG), base, TOKENS % 31))
    experts = new["layers"]["mlp"]["experts"]
    shapes = {name: {x: experts[name][x].shape for x in ("lora_a", "lora_b")} for name in ("gate_up", "down")}
    assert shapes == {
        "gate_up": {"lora_a": (2, 4, 8, 3), "lora_b": (2, 4, 3, 12)},
        "down": {"lora_a": (2, 4, 6, 3), "lora_b": (2, 4, 3, 8)},
    }
    assert 0.9 < np.abs(experts["gate_up"]["lora_a"]).max() * 8**0.5 <= 1.0  # PEFT's: uniform up to 1/sqrt(in)
    assert 0.9 < np.abs(experts["down"]["lora_a"]).max() * 6**0.5 <= 1.0


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (dense, {}),
        (dense, {"router_on_inputs": True}),
        (dense, {"expert_bias": True}),
        (grouped, {}),
        pytest.param(grouped, {"router_on_inputs": True}, marks=pytest.mark.slow),
        pytest.param(grouped, {"expert_bias": True}, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_they_compute_what_the_merged_matrices_do(way, options):
    """Outputs, and gradients: with G that of a merged matrix, scale G B^T is A's and scale A^T G is B's."""
    config = dataclasses.replace(CONFIG, lora=SHAPE, **options)
    graph, state = nnx.split(Experts(config, nnx.Rngs(0)))
    plain = nnx.split(Experts(dataclasses.replace(config, lora=None), nnx.Rngs(0)))[0]
    params = nnx.to_pure_dict(state)
    params = lora.combine(params, moved({"experts": params})["experts"])
    merged = lora.merge(params, SHAPE)
    by_hand = np.asarray(params["down"]["kernel"]) + 6 / 3**0.5 * np.einsum(
        "eir,ero->eio", params["down"]["lora_a"], params["down"]["lora_b"]
    )
    np.testing.assert_allclose(merged["down"]["kernel"], by_hand, atol=1e-6)
    x, weights, chosen = routed(7)

    def loss(params, graph):
        out = nnx.merge(graph, params).compute(way, x, weights, jnp.asarray(chosen))
        return (out * jnp.cos(jnp.arange(8))).sum(), out

    (_, out), found = jax.jit(jax.value_and_grad(functools.partial(loss, graph=graph), has_aux=True))(params)
    (_, expected), whole = jax.jit(jax.value_and_grad(functools.partial(loss, graph=plain), has_aux=True))(merged)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    both = np.concatenate([whole["gate"]["kernel"], whole["up"]["kernel"]], axis=-1)
    for name, gradient in (("gate_up", both), ("down", np.asarray(whole["down"]["kernel"]))):
        a, b = (np.asarray(params[name][x]) for x in ("lora_a", "lora_b"))
        np.testing.assert_allclose(found[name]["lora_a"], SHAPE.scale * gradient @ b.mT, atol=1e-5)
        np.testing.assert_allclose(found[name]["lora_b"], SHAPE.scale * a.mT @ gradient, atol=1e-5)


@pytest.mark.parametrize("way", [dense, grouped])
def test_no_matrix_is_merged_or_has_a_gradient_in_training(way):
    graph, state = nnx.split(Experts(dataclasses.replace(CONFIG, lora=SHAPE), nnx.Rngs(0)))
    frozen, adapters = lora.split(nnx.to_pure_dict(state))
    x, weights, chosen = routed(7)

    def loss(params):
        return nnx.merge(graph, params).compute(way, x, weights, jnp.asarray(chosen)).sum()

    def made(gradient, trainable) -> list[str]:
        """The sums and products whose results have the shape of the experts' matrices, [4,8,6] or [4,6,8]."""
        operations = r"f32\[4,(?:8,6|6,8)\] = (dot|add|mul|dynamic_update_slice)"
        return re.findall(operations, str(jax.make_jaxpr(gradient)(trainable)))

    assert made(jax.grad(loss), lora.combine(frozen, adapters))
    assert not made(jax.grad(lambda adapters: loss(lora.combine(frozen, adapters))), adapters)


@pytest.mark.slow
def test_merged_unrolled_and_padded_they_are_the_same(params):
    expected = logits(NET, params, TOKENS % 31)
    merged = lora.merge(params, SHAPE)
    assert jax.tree.structure(merged) == jax.tree.structure(Net(CONFIG).shapes())
    for other in ((NET, merged), (NET.unrolled(), params)):
        np.testing.assert_allclose(logits(*other, TOKENS % 31), expected, atol=1e-5)
    assert np.abs(logits(NET, lora.without_adapters(params), TOKENS % 31) - expected).max() > 0.1
    padded = np.pad(TOKENS % 31, ((0, 0), (3, 2)), constant_values=7)
    segments = np.pad(np.ones_like(TOKENS), ((0, 0), (3, 2)))
    np.testing.assert_allclose(logits(NET, params, padded, segments)[:, 3:-2], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_beside_quantised_matrices_the_sampler_has_experts_merged(kind):
    """The adapters of the other matrices stay beside them; a sampler in 8 bits of a plain policy has all merged."""
    net = Net(dataclasses.replace(CONFIG, quantize=kind, quantize_experts="none", lora=SHAPE))
    params = moved(jax.jit(net.init)(jax.random.key(0)))
    sampler = decoding_params(params, net)
    assert not lora.has_adapters_of(sampler, experts=True) and lora.has_adapters(sampler)
    np.testing.assert_allclose(logits(net, sampler, TOKENS % 31), logits(net, params, TOKENS % 31), atol=1e-5)
    plain = moved(jax.jit(NET.init)(jax.random.key(0)))
    assert not lora.has_adapters(decoding_params(plain, net))


@pytest.mark.parametrize("variant", FAMILIES)
def test_folders_are_those_of_peft(variant, tmp_path):
    """Logits, gradients, the merged matrices, and the folder read back; of both parameters, which PEFT nests, beside
    linear maps: one of attention, and those of dense layers and shared experts, which have the experts' names."""
    make_oracle(variant).save_pretrained(tmp_path / "base")
    base = load_model(tmp_path / "base")
    maps = ["q"] if variant == "granitemoehybrid" else ["q", "gate", "up", "down"]  # where two are one tensor
    shape = dataclasses.replace(SHAPE, targets=parse_targets([*maps, "experts"]))
    model = shaken(add_adapters(base, shape, jax.random.key(0)))
    save_adapter(model, tmp_path / "adapter")
    again = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    found = again.net.config.lora
    assert found is not None and dataclasses.replace(found, targets=shape.targets) == shape  # some have no map q
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)

    oracle = in_peft(tmp_path / "base", tmp_path / "adapter", attn_implementation="eager")
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_("lora_" in name)
    tokens = torch.tensor(TOKENS)
    expected = oracle(tokens).logits
    np.testing.assert_allclose(model(TOKENS), expected.detach().numpy(), atol=2e-5)
    assert np.abs(model(TOKENS) - base(TOKENS)).max() > 0.1
    torch.log_softmax(expected, -1)[:, :-1].gather(-1, tokens[:, 1:, None]).sum().backward()
    frozen, trainable = lora.split(model.params)

    def loss(trainable):
        inputs = Inputs(TOKENS, np.ones_like(TOKENS))
        return token_logps(model.net, lora.combine(frozen, trainable), inputs)[0].sum()

    # As PEFT's tensors: the gradients written as an adapter.
    gradients = dataclasses.replace(model, params=lora.combine(frozen, jax.jit(jax.grad(loss))(trainable)))
    save_adapter(gradients, tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): x.grad for name, x in oracle.named_parameters() if x.grad is not None}
    assert ours.keys() == theirs.keys() and any("experts.base_layer" in name for name in ours)
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], gradient.numpy(), atol=1e-4, rtol=1e-4, err_msg=name)

    save_hf(model, tmp_path / "merged")
    whole = oracle.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in whole.items():
        np.testing.assert_allclose(merged[name], value.detach(), atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["laguna", "mistral_large4-text", "deepseek_v4"])
def test_peft_finds_every_adapter(variant, tmp_path):
    """Of modules whose names it changes as it reads a folder, and beside modules whose names end alike."""
    make_oracle(variant).save_pretrained(tmp_path / "base")
    shape = dataclasses.replace(SHAPE, targets=parse_targets(["all-linear", "experts"]))
    model = shaken(add_adapters(load_model(tmp_path / "base"), shape, jax.random.key(0)))
    save_adapter(model, tmp_path / "adapter")
    again = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        kind = AutoModelForImageTextToText if variant.startswith("mistral") else AutoModelForCausalLM
        oracle = in_peft(tmp_path / "base", tmp_path / "adapter", kind)
    save_hf(model, tmp_path / "merged")
    merged = kind.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in oracle.merge_and_unload().state_dict().items():
        np.testing.assert_allclose(merged[name], value.detach(), atol=1e-5, err_msg=name)


def test_families_whose_maps_peft_takes_for_those_of_experts():
    """Those that it reads as a qwen2_moe, of which it takes gate_proj and the like in target_modules for experts'."""
    taken = {name for name, kind in _MODEL_TO_CONVERSION_PATTERN.items() if kind == "qwen2_moe"}
    assert taken & families.FAMILIES.keys() == set(MISREAD)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"])
def test_folders_of_models_that_read_images(variant, tmp_path):
    """Beside an encoder, where attention's maps are named by a pattern, and shared experts each by its weight; on rows
    of text."""
    make_vision_oracle(variant).save_pretrained(tmp_path / "base")
    shape = dataclasses.replace(SHAPE, targets=parse_targets(["q", "gate", "up", "down", "experts"]))
    model = shaken(add_adapters(load_model(tmp_path / "base"), shape, jax.random.key(0)))
    save_adapter(model, tmp_path / "adapter")
    again = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    kind: Any = AutoModelForImageTextToText
    oracle = in_peft(tmp_path / "base", tmp_path / "adapter", kind, attn_implementation="eager")
    with torch.no_grad():
        expected = oracle(torch.tensor(TOKENS % 80)).logits.numpy()
    np.testing.assert_allclose(model(TOKENS % 80), expected, atol=2e-5)


@pytest.mark.parametrize("target", ["gate_up_proj", pytest.param("down_proj", marks=pytest.mark.slow)])
def test_a_folder_that_peft_wrote_loads(target, tmp_path):
    """Of one parameter alone, beside no module and beside those of attention."""
    make_oracle("mixtral").save_pretrained(tmp_path / "base")
    modules = [] if target == "gate_up_proj" else ["q_proj"]
    shape = {"r": 2, "lora_alpha": 3, "target_modules": modules, "target_parameters": [f"mlp.experts.{target}"]}
    made = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(**shape, init_lora_weights=False, task_type="CAUSAL_LM"),
    ).eval()
    made.save_pretrained(tmp_path / "adapter")
    model = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert model.net.config.lora == LoraConfig(2, 3.0, targets=parse_targets([*modules, f"experts.{target}"]))
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), made(torch.tensor(TOKENS)).logits.numpy(), atol=2e-5)
    save_adapter(model, tmp_path / "again")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(("names", "found"), [
    (["experts"], lora.EXPERTS),
    (["mlp.experts.down_proj", "q"], ("q", "experts.down_proj")),
    (["experts.gate_up_proj", "all-linear"], (*lora.TARGETS, "experts.gate_up_proj")),
    (["all-linear"], lora.TARGETS),
])  # fmt: skip
def test_targets(names, found):
    assert parse_targets(names) == found


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"layers_to_transform": (0,)}, r"lora.layers_to_transform is 0, but .*experts.down_proj are experts or of a"),
        ({"alpha_pattern": ("q_proj=2",)}, r"lora.alpha_pattern is q_proj=2, .* of one rank and alpha: leave it empty"),
    ],
)
def test_of_experts_alone_no_layer_has_others(patterns, message):
    net = Net(CONFIG).with_lora(LoraConfig(rank=3, targets=parse_targets(["experts"])))
    with pytest.raises(ConfigError, match=message):
        with_patterns(net, mixtral, AdapterPatterns(**patterns))


def test_what_they_do_not_have_is_refused(llama_folder, tmp_path):
    targets = parse_targets(["experts"])
    with pytest.raises(ConfigError, match=r"lora.dora is true, but .*gate_up_proj, experts.down_proj\) have none, as"):
        LoraConfig(2, targets=targets, dora=True)
    with pytest.raises(ConfigError, match=r"lora.dropout is 0.1, but adapters of experts .*: set it to 0, or leave"):
        LoraConfig(2, dropout=0.1, targets=targets)
    with pytest.raises(ConfigError, match=r"lora.targets names experts, but this model is no mixture of experts"):
        add_adapters(load_model(llama_folder), LoraConfig(2, targets=targets), jax.random.key(0))
    ungated = Model(Net(dataclasses.replace(CONFIG, ffn_gate=False)), {}, hf_config={"model_type": "nemotron_h"})
    with pytest.raises(ConfigError, match=r"lora.targets names experts, but this model's have no gate, as adapters"):
        add_adapters(ungated, LoraConfig(2, targets=targets), jax.random.key(0))
    with pytest.raises(ConfigError, match=r"this model's have no gate"):  # as a plan has it
        Trained(lora=LoraConfig(2, targets=targets)).grouped(ungated.net, nemotron_h)
    for name in ("layers.1.mlp.experts.down_proj", "experts.up_proj"):
        with pytest.raises(ConfigError, match=r"lora.targets names .*experts.gate_up_proj, experts.*closest is"):
            parse_targets([name])


def test_a_family_without_stacked_matrices_has_no_folder(monkeypatch, tmp_path):
    """Of the user's own, whose files have the matrices of each expert alone: PEFT has no adapters of that shape."""
    make_oracle("mixtral").save_pretrained(tmp_path / "base")
    model = add_adapters(load_model(tmp_path / "base"), SHAPE, jax.random.key(0))
    assert has_peft_adapter(model)
    monkeypatch.delattr(mixtral, "OTHER_KEYS")
    assert not has_peft_adapter(model)
    with pytest.raises(ConfigError, match=r"a mixtral keeps layers/mlp/experts/"):
        save_adapter(model, tmp_path / "adapter")


FAULTS = {
    "router": ({"target_parameters": ["mlp.gate.weight"]}, r"target_parameters names 'mlp.gate.weight', but param"),
    "bias": ({"target_parameters": ["q_proj.bias"]}, r"target_parameters names 'q_proj.bias', but param"),
    "rank": ({"r": 4}, r"lora_A.weight has shape \(12, .*, but this model and r = 4 need \(16, "),
    "none": ({"target_parameters": None}, "has adapters of base_layer, experts; there can be .*, experts.down_proj"),
    "one of two": ({"target_parameters": ["experts.down_proj"]}, "holds tensors that the model has no place for"),
    "one layer": ({}, "lacks tensors that the model needs: .*layers.0.mlp.experts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_folders_that_are_more_or_less_are_refused(fault, tmp_path):
    changes, message = FAULTS[fault]
    make_oracle("mixtral").save_pretrained(tmp_path / "base")
    shape = dataclasses.replace(SHAPE, targets=parse_targets(["experts"]))
    save_adapter(add_adapters(load_model(tmp_path / "base"), shape, jax.random.key(0)), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    entries = json.loads(file.read_text())
    assert entries["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    file.write_text(json.dumps(entries | changes))
    if fault == "one layer":
        tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        kept = {name: x for name, x in tensors.items() if "layers.0.mlp" not in name}
        save_file(kept, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "base", adapter=tmp_path / "adapter")
