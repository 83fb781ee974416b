"""LoRA against PEFT and torch autograd, adapter folders in both directions, quantised matrices, score heads."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft import trained_tensors
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.kernels.stored_matmul import frozen_matmul
from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.logprobs import last_scores, token_logps
from jaxrl_llm.models.model import add_adapters, has_peft_adapter, load_model, save_adapter, save_hf
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.quantize import NF4, dequantize, quantize
from tests.models.conftest import VOCAB, make_oracle, variants

TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 7))
SHAPE = LoraConfig(rank=3, alpha=6.0, targets=("q", "v", "o", "gate", "down"), rslora=True)


@pytest.fixture(scope="module")
def base(llama_folder):
    return load_model(llama_folder)


def shaken(model, seed: int = 1):
    """The model with random numbers added to its adapters and its score head, so that they matter."""
    draw = np.random.default_rng(seed)
    _, trainable = lora.split(model.params)
    moved = jax.tree.map(lambda x: x + 0.1 * draw.normal(size=x.shape).astype(np.float32), trainable)
    return dataclasses.replace(model, params=lora.combine(model.params, moved))


@pytest.fixture(scope="module")
def adapted(base):
    return shaken(add_adapters(base, SHAPE, jax.random.key(0)))


@pytest.fixture(scope="module")
def adapter(adapted, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "folder"
    save_adapter(adapted, path)
    return path


def in_peft(folder, adapter, kind=AutoModelForCausalLM, **options):
    return peft.PeftModel.from_pretrained(kind.from_pretrained(folder, **options), adapter).eval()


def gradients_beside(oracle, model):
    """Those of the log-probs of TOKENS by what is trained, which PEFT's model of the same logits has then too."""
    tokens = torch.tensor(TOKENS)
    logits = oracle(tokens).logits
    np.testing.assert_allclose(model(TOKENS), logits.detach().numpy(), atol=1e-4)
    torch.log_softmax(logits, -1)[:, :-1].gather(-1, tokens[:, 1:, None]).sum().backward()
    frozen, trainable = lora.split(model.params)

    def loss(trainable):
        inputs = Inputs(TOKENS, np.ones_like(TOKENS))
        return token_logps(model.net, lora.combine(frozen, trainable), inputs)[0].sum()

    return jax.jit(jax.grad(loss))(trainable)


def test_new_adapters_change_nothing_bit_for_bit(base):
    model = add_adapters(base, SHAPE, jax.random.key(0))
    assert jax.tree.leaves(lora.adapters_of(model.params))
    np.testing.assert_array_equal(model(TOKENS), base(TOKENS))
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(model.params), base.params)
    a = model.params["layers"]["attention"]["q"]["lora_a"]
    assert a.shape == (2, 32, 3)
    assert 0.9 < np.abs(a).max() * 32**0.5 <= 1.0  # PEFT's: uniform up to 1/sqrt(in)


def test_without_the_adapters_it_is_the_base_model(base, adapted):
    assert np.abs(adapted(TOKENS) - base(TOKENS)).max() > 0.1
    off = dataclasses.replace(adapted, params=lora.split(adapted.params)[0])
    np.testing.assert_array_equal(off(TOKENS), base(TOKENS))


def test_split_and_combine_are_inverse(adapted):
    frozen, trainable = lora.split(adapted.params)
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(trainable)} == {"lora_a", "lora_b"}
    whole = lora.combine(frozen, trainable)
    assert jax.tree.structure(whole) == jax.tree.structure(adapted.params)
    assert all(x is y for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(adapted.params), strict=True))
    assert lora.split(frozen) == ({}, frozen)


def test_peft_gives_the_same_logits_and_gradients(llama_folder, adapter, adapted):
    oracle = in_peft(llama_folder, adapter)
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_("lora_" in name)
    tokens = torch.tensor(TOKENS)
    logits = oracle(tokens).logits
    np.testing.assert_allclose(adapted(TOKENS), logits.detach().numpy(), atol=1e-4)
    logps = torch.log_softmax(logits, -1)[:, :-1].gather(-1, tokens[:, 1:, None])
    (logps * torch.linspace(0.5, 2.0, 6)[None, :, None]).sum().backward()

    frozen, trainable = lora.split(adapted.params)
    weights = jnp.concatenate([jnp.zeros(1), jnp.linspace(0.5, 2.0, 6)])

    def loss(trainable):
        params = lora.combine(frozen, trainable)
        return (token_logps(adapted.net, params, Inputs(TOKENS, np.ones_like(TOKENS)))[0] * weights).sum()

    gradients = jax.jit(jax.grad(loss))(trainable)["layers"]
    compared = 0
    for name, parameter in oracle.named_parameters():
        if parameter.grad is None:
            continue
        _, _, _, _, layer, part, module, matrix, *_ = name.split(".")
        part = {"self_attn": "attention", "mlp": "mlp"}[part]
        own = gradients[part][module.removesuffix("_proj")][f"lora_{matrix[-1].lower()}"][int(layer)]
        np.testing.assert_allclose(own, parameter.grad.numpy().T, atol=1e-4, rtol=1e-4, err_msg=name)
        compared += 1
    assert compared == 2 * 2 * 5  # layers, A and B, targets


@pytest.mark.parametrize(
    "variant",
    variants(
        ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2-biases", "lfm3", "granitemoehybrid",
         "nemotron_h", "falcon_h1", "kimi_linear", "olmo_hybrid", "bailing_hybrid", "bamba",
         "falcon_mamba", "mamba2", "jamba-dense", "qwen4_exp_text", "glm5_next_text"]
    ),
)  # fmt: skip
def test_other_mixers_have_the_adapters_of_peft(tmp_path, variant):
    """Delta nets, short convolutions and Mamba, on every map of theirs, beside matrices as they are and quantised."""
    make_oracle(variant).save_pretrained(tmp_path / "base")
    mixers = set(lora.TARGETS) - {"gate", "up", "down"}
    shape = dataclasses.replace(SHAPE, targets=tuple(name for name in lora.TARGETS if name in mixers))
    for kind in ("none", "int8"):
        model = load_model(tmp_path / "base", quantize=kind)
        model = shaken(add_adapters(model, shape, jax.random.key(0)))
        save_hf(model, tmp_path / kind)
        np.testing.assert_allclose(load_model(tmp_path / kind)(TOKENS), model(TOKENS), atol=1e-4)
        save_adapter(model, tmp_path / f"{kind}-adapter")
        base = tmp_path / ("base" if kind == "none" else "dequantised")
        if kind == "int8":
            save_hf(load_model(tmp_path / "base", quantize=kind), base)
        oracle = in_peft(base, tmp_path / f"{kind}-adapter", attn_implementation="eager")
        adapted = {name.split(".")[-2] for name, _ in oracle.named_modules() if name.endswith(".lora_A")}
        names = ("lfm2-biases", "lfm3", "granitemoehybrid", "nemotron_h", "falcon_h1", "bamba", "falcon_mamba")
        projections = {name: {"in_proj"} for name in (*names, "mamba2", "jamba-dense")}
        projections |= {name: set() for name in ("kimi_linear", "olmo_hybrid", "bailing_hybrid", "glm5_next_text")}
        projections["qwen3_next"] = {"in_proj_qkvz", "in_proj_ba"}
        expected = projections.get(variant, {f"in_proj_{name}" for name in ("qkv", "z", "b", "a")})
        assert {name for name in adapted if "in_proj" in name} == expected
        assert ("g_proj" in adapted) == (variant in ("lfm3", "olmo_hybrid", "bailing_hybrid"))
        assert ("x_proj" in adapted) == (variant in ("falcon_mamba", "jamba-dense"))
        with torch.no_grad():
            np.testing.assert_allclose(model(TOKENS), oracle(torch.tensor(TOKENS)).logits.numpy(), atol=1e-4)


def test_a_name_means_every_module_that_peft_finds_by_it(tmp_path):
    """LFM2 calls the output maps of attention and of convolutions alike."""
    make_oracle("lfm2").save_pretrained(tmp_path)
    shape = LoraConfig(2, targets=lora.parse_targets(["out_proj", "w1"]))
    model = add_adapters(load_model(tmp_path), shape, jax.random.key(0))
    found = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(lora.adapters_of(model.params))}
    maps = {"conv_layers/conv/out", "conv_layers/mlp/gate", "layers/attention/o", "layers/mlp/gate"}
    assert found == {f"{name}/{leaf}" for name in maps for leaf in ("lora_a", "lora_b")}


def test_dora_is_that_of_peft(llama_folder, base, tmp_path):
    """Logits, gradients of A, B and the magnitudes, the merged matrices, and folders in both directions."""
    shape = dataclasses.replace(SHAPE, dora=True)
    new = add_adapters(base, shape, jax.random.key(0))
    np.testing.assert_allclose(new(TOKENS), base(TOKENS), atol=1e-5)  # factors of 1
    model = shaken(new)
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_dora"] is True
    again = load_model(llama_folder, adapter=tmp_path / "adapter")
    assert again.net.config.lora == shape
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)

    oracle = in_peft(llama_folder, tmp_path / "adapter")
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_("lora_" in name)
    gradients = gradients_beside(oracle, model)["layers"]
    kinds = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "lora_m"}
    compared = 0
    for name, parameter in oracle.named_parameters():
        if parameter.grad is None:
            continue
        _, _, _, _, layer, part, module, matrix, *_ = name.split(".")
        part = {"self_attn": "attention", "mlp": "mlp"}[part]
        own = gradients[part][module.removesuffix("_proj")][kinds[matrix]][int(layer)]
        np.testing.assert_allclose(own, parameter.grad.numpy().T, atol=1e-4, rtol=1e-4, err_msg=name)
        compared += 1
    assert compared == 2 * 3 * 5  # layers; A, B and magnitudes; targets

    save_hf(model, tmp_path / "merged")
    theirs = oracle.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value.detach(), atol=1e-5, err_msg=name)


def test_dora_that_peft_wrote_loads(llama_folder, tmp_path):
    shape = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"], "use_dora": True}
    made = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(llama_folder),
        peft.LoraConfig(**shape, init_lora_weights=False, task_type="CAUSAL_LM"),
    ).eval()
    made.save_pretrained(tmp_path / "adapter")
    model = load_model(llama_folder, adapter=tmp_path / "adapter")
    assert model.net.config.lora == LoraConfig(2, 3.0, 0.0, ("q", "up"), dora=True)
    with pytest.raises(ConfigError, match=r"is a DoRA, which .* and quantize is nf4 \(model"):
        load_model(llama_folder, adapter=tmp_path / "adapter", quantize="nf4")
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), made(torch.tensor(TOKENS)).logits.numpy(), atol=1e-4)


MODULES = {
    "embed_tokens": "embed/weight", "lm_head": "head/kernel", "model.norm": "norm/scale",
    "input_layernorm": "layers/input_norm/scale", "k_proj": "layers/attention/k/kernel",
}  # fmt: skip


def test_modules_trained_whole_are_those_of_peft(llama_folder, base, tmp_path):
    """Logits, gradients, the merged matrices, and folders in both directions; embedding, head, norms, a linear map."""
    new = add_adapters(base, SHAPE, jax.random.key(0), MODULES)
    assert new.net.config.lora.saved == tuple(sorted(MODULES.values()))
    np.testing.assert_array_equal(new(TOKENS), base(TOKENS))
    model = shaken(new)
    frozen, _ = lora.split(model.params)
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(frozen), base.params)
    off = dataclasses.replace(model, params=lora.without_adapters(model.params))
    np.testing.assert_array_equal(off(TOKENS), base(TOKENS))  # a reference policy is the model before both
    save_adapter(model, tmp_path / "adapter")
    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(entries["modules_to_save"]) == sorted(MODULES)
    again = load_model(llama_folder, adapter=tmp_path / "adapter")
    assert again.net.config.lora == new.net.config.lora
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)

    oracle = in_peft(llama_folder, tmp_path / "adapter")
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
    gradients = gradients_beside(oracle, model)["saved"]
    compared = 0
    for name, parameter in oracle.named_parameters():
        if "modules_to_save" not in name:
            continue
        before, _, rest = name.partition(".modules_to_save")
        own = gradients
        for part in next(path for name, path in MODULES.items() if before.endswith(name)).split("/"):
            own = own[part]
        own = own[int(before.split(".")[4])] if ".layers." in before else own
        own = own.T if before.endswith(("lm_head", "k_proj")) else own
        np.testing.assert_allclose(own, parameter.grad.numpy(), atol=1e-4, rtol=1e-4, err_msg=rest)
        compared += 1
    assert compared == 3 + 2 * 2

    save_hf(model, tmp_path / "merged")
    theirs = oracle.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value.detach(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", [pytest.param("all", marks=pytest.mark.slow), "lora_only"])
def test_biases_trained_beside_adapters_are_those_of_peft(tmp_path, kind):
    """Which they are, logits, gradients, the merged model, and folders in both directions."""
    folder = tmp_path / "model"
    make_oracle("phi").save_pretrained(folder)
    model = load_model(folder)
    shape = LoraConfig(3, targets=("q", "v"), bias=kind)
    model = shaken(add_adapters(model, shape, jax.random.key(0)))
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["bias"] == kind
    again = load_model(folder, adapter=tmp_path / "adapter")
    assert again.net.config.lora == model.net.config.lora
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)

    theirs = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], bias=kind)
    fresh = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), theirs)
    wanted = {name for name, x in fresh.named_parameters() if x.requires_grad and "lora_" not in name}
    found = {name for name in load_file(tmp_path / "adapter/adapter_model.safetensors") if "lora_" not in name}
    assert found == wanted and wanted
    oracle = in_peft(folder, tmp_path / "adapter")
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(name in wanted)
    gradients = gradients_beside(oracle, model)["saved"]
    own = {f"saved/{path_name(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(gradients)}
    expected = dict(oracle.named_parameters())
    for path, tensors in trained_tensors(model.net, family_of(model.hf_config)).items():
        for number, name in enumerate(tensors.names if path in own else ()):
            x = own[path][number] if tensors.stacked else own[path]
            np.testing.assert_allclose(x, expected[f"base_model.model.{name}"].grad, atol=1e-4, rtol=1e-4, err_msg=name)
    oracle.save_pretrained(tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, load_model(folder, adapter=tmp_path / "theirs").params, model.params)
    save_hf(model, tmp_path / "merged")
    merged = oracle.merge_and_unload().state_dict()
    for name, x in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict().items():
        np.testing.assert_allclose(x, merged[name].detach(), atol=1e-5, err_msg=name)


def test_biases_of_a_model_without_any_are_refused(base):
    with pytest.raises(ConfigError, match=r"lora.bias is lora_only, but this model has no biases of such maps"):
        add_adapters(base, dataclasses.replace(SHAPE, bias="lora_only"), jax.random.key(0))


def test_an_adapter_names_the_revision_of_its_model(llama_folder, adapter, tmp_path, monkeypatch):
    folder, asked = shutil.copytree(adapter, tmp_path / "adapter"), set()
    entries = json.loads((folder / "adapter_config.json").read_text())
    named = {"base_model_name_or_path": "owner/name", "revision": "v2"}
    (folder / "adapter_config.json").write_text(json.dumps(entries | named))
    monkeypatch.setattr(hf, "_download", lambda name, patterns, revision: asked.add(revision) or llama_folder)
    model = load_model(folder)
    assert asked == {"v2"}
    save_adapter(model, tmp_path / "again")
    assert json.loads((tmp_path / "again/adapter_config.json").read_text())["revision"] == "v2"
    asked.clear()
    load_model(folder, revision="v3")
    assert asked == {"v3"}


@pytest.mark.parametrize("named", [["embed_tokens"], ["lm_head"]])
def test_an_embedding_that_is_the_head_stays_so(llama_folder, tmp_path, named):
    """Either name is both, as with PEFT's ensure_weight_tying; a folder that trained them apart is refused."""
    folder = tmp_path / "tied"
    config = AutoConfig.from_pretrained(llama_folder, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = shaken(add_adapters(load_model(folder), SHAPE, jax.random.key(0), named))
    assert model.net.config.lora.saved == ("embed/weight",)
    save_adapter(model, tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, load_model(folder, adapter=tmp_path / "adapter").params, model.params)
    oracle = in_peft(folder, tmp_path / "adapter")
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), oracle(torch.tensor(TOKENS)).logits.numpy(), atol=1e-4)
    oracle.save_pretrained(tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, load_model(folder, adapter=tmp_path / "theirs").params, model.params)

    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) | {"ensure_weight_tying": False}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match="without ensure_weight_tying trained an embedding apart from the head"):
        load_model(folder, adapter=tmp_path / "adapter")


def test_a_tied_embedding_of_another_name_is_tied_by_the_name_of_the_head(tmp_path):
    """PEFT ties `embed_tokens` and `lm_head` alone: `wte` is one by itself, in spite of ensure_weight_tying."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(GPT2Config(**sizes)).save_pretrained(folder)
    model = shaken(add_adapters(load_model(folder), LoraConfig(2, targets=("up",)), jax.random.key(0), ["wte"]))
    save_adapter(model, tmp_path / "adapter")
    oracle = in_peft(folder, tmp_path / "adapter")
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), oracle(torch.tensor(TOKENS)).logits.numpy(), atol=1e-4)
    oracle.save_pretrained(tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, load_model(folder, adapter=tmp_path / "theirs").params, model.params)

    apart = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["wte"], ensure_weight_tying=True)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), apart).save_pretrained(tmp_path / "apart")
    with pytest.raises(ConfigError, match=r"holds no lm_head that is its embedding: PEFT.*apart from the head"):
        load_model(folder, adapter=tmp_path / "apart")


def test_the_end_of_a_name_is_that_of_every_module_with_it(base):
    saved = add_adapters(base, SHAPE, jax.random.key(0), ["norm"]).net.config.lora.saved
    assert saved == ("layers/input_norm/scale", "layers/post_attention_norm/scale", "norm/scale")


@pytest.mark.parametrize("name", ["q_proj", "proj", "mlp", "lm_heads", "score"])
def test_modules_that_cannot_be_trained_whole_are_refused(base, name):
    with pytest.raises(ConfigError, match=rf"lora.modules_to_save names '{name}', but .*embed_tokens, .*closest is"):
        add_adapters(base, SHAPE, jax.random.key(0), [name])


def test_dropout_of_dora_drops_what_its_adapter_adds(base):
    """As in PEFT: y + (f - 1) drop(x) W + f scale drop(x) A B; at factors f of 1 and B of 0 nothing is left of it."""
    shape = dataclasses.replace(SHAPE, dora=True, dropout=0.5)
    model = add_adapters(base, shape, jax.random.key(0))
    dropped = dataclasses.replace(model, params=lora.with_dropout(model.params, jax.random.key(1)))
    np.testing.assert_allclose(dropped(TOKENS), base(TOKENS), atol=1e-4)
    moved = shaken(model)
    dropped = dataclasses.replace(moved, params=lora.with_dropout(moved.params, jax.random.key(1)))
    assert np.abs(dropped(TOKENS) - moved(TOKENS)).max() > 0.01


def test_lengths_of_dora_that_differ_by_less_than_bfloat16_tells_apart():
    """Columns that are 1.2 % longer give outputs as much larger: bfloat16 has no number between 1.0078 and 1.0156."""
    shape = LoraConfig(2, targets=("q",), dora=True)
    config = ModelConfig(vocab_size=8, width=64, layers=1, heads=1, kv_heads=1, head_dim=64, ffn=64, lora=shape)
    linear = Linear(64, 256, config, nnx.Rngs(0), name="q")
    x = jnp.array(np.random.default_rng(0).normal(size=(256, 64)), jnp.bfloat16)
    before = np.array(linear(x), np.float32)
    linear.lora_m[...] = 1.012 * linear.lora_m[...]
    after = np.array(linear(x), np.float32)
    np.testing.assert_allclose((after * before).sum() / (before * before).sum(), 1.012, atol=1e-3)


def test_an_adapter_folder_loads_back(llama_folder, adapter, adapted):
    for model in (load_model(llama_folder, adapter=adapter), load_model(adapter)):  # the folder names its base
        assert model.net.config.lora == SHAPE
        jax.tree.map(np.testing.assert_array_equal, model.params, adapted.params)


def test_an_adapter_that_peft_wrote_loads(llama_folder, tmp_path):
    made = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(llama_folder),
        peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
    ).eval()
    made.save_pretrained(tmp_path / "adapter")
    model = load_model(llama_folder, adapter=tmp_path / "adapter")
    assert model.net.config.lora == LoraConfig(2, 3.0, targets=("q", "k", "v", "o", "gate", "up", "down"))
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), made(torch.tensor(TOKENS)).logits.numpy(), atol=1e-4)


def test_merged_is_the_same_and_loads_everywhere(adapted, tmp_path):
    merged = dataclasses.replace(adapted, params=lora.merge(adapted.params, SHAPE))
    assert not lora.has_adapters(merged.params)
    np.testing.assert_allclose(merged(TOKENS), adapted(TOKENS), atol=1e-4)
    save_hf(adapted, tmp_path / "merged")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "merged").params, merged.params)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(adapted(TOKENS), logits.numpy(), atol=1e-4)


def test_dropout_needs_keys_and_keeps_the_mean():
    x = jnp.ones((400, 50))
    config = LoraConfig(1, 1.0, dropout=0.25)
    key = jax.random.key_data(jax.random.key(0))
    dropped = lora.delta(x, jnp.eye(50), jnp.eye(50), config, key)
    np.testing.assert_allclose(np.unique(dropped), [0.0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(dropped.mean(), 1.0, atol=0.02)
    np.testing.assert_array_equal(lora.delta(x, jnp.eye(50), jnp.eye(50), config), x)


def test_dropout_differs_by_key_layer_and_map(adapted):
    net = adapted.net.with_lora(dataclasses.replace(SHAPE, dropout=0.5))
    with_keys = [lora.with_dropout(adapted.params, jax.random.key(seed)) for seed in (0, 0, 1)]
    apply = jax.jit(lambda params: net.bind(params)(jnp.asarray(TOKENS)))
    first, again, other = (apply(params) for params in with_keys)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2
    np.testing.assert_array_equal(apply(adapted.params), jax.jit(adapted.net.bind(adapted.params))(jnp.asarray(TOKENS)))
    found = lora.adapters_of(with_keys[0]), jax.tree_util.tree_leaves_with_path(with_keys[0])
    keys = [np.asarray(x) for path, x in found[1] if path[-1].key == "lora_key"]
    assert len({tuple(key) for layers in keys for key in layers}) == 2 * 5


@pytest.mark.parametrize(("names", "found"), [
    (["all-linear"], lora.TARGETS), (["v_proj", "q"], ("q", "v")), (["down_proj", "down"], ("down",)),
])  # fmt: skip
def test_targets(names, found):
    assert lora.parse_targets(names) == found


def test_unknown_targets_are_refused():
    with pytest.raises(ConfigError, match=r"lora.targets names 'query'.*all-linear, q, .*the closest is"):
        lora.parse_targets(["query"])
    with pytest.raises(ConfigError, match=r"lora.targets is empty"):
        lora.parse_targets([])


FAULTS = {
    "dora": ({"use_dora": True}, "lacks tensors that the model needs: .*lora_magnitude_vector"),
    "ranks": ({"rank_pattern": {"o_proj": 8}}, r"o_proj.lora_A.weight has shape \(3, 32\), but .* need \(8, 32\)"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    "kasa": ({"kasa_config": {"beta": 1e-4}}, "kasa_config = .* is not supported; supported: None. Merge the adapter"),
    "not lora": ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    "rank": ({"r": 4}, r"o_proj.lora_A.weight has shape \(3, 32\), but .* r = 4 need \(4, 32\)"),
    "no rank": ({"r": 0}, "r = 0 is not the rank"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha = '16' is not a number"),
    "rank pattern": ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern = .* is not ranks by names"),
    "alpha pattern": ({"alpha_pattern": {"(": 2}}, "alpha_pattern = .* is not numbers by names"),
    "modules": ({"modules_to_save": "embed_tokens"}, "modules_to_save = 'embed_tokens' is not a list of names"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_adapters_that_are_more_or_less_are_refused(llama_folder, adapter, tmp_path, fault):
    changes, message = FAULTS[fault]
    entries = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(entries))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=message):
        load_model(llama_folder, adapter=tmp_path)


def test_damaged_adapters_are_refused(llama_folder, adapter, base, tmp_path):
    with pytest.raises(ConfigError, match=r"has no adapter_config.json"):
        load_model(llama_folder, adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no adapter_model.safetensors"):
        load_model(llama_folder, adapter=tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    lost = tensors.pop("base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks tensors .*layers.1.self_attn.v_proj.lora_B.weight"):
        load_model(llama_folder, adapter=tmp_path)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    save_file(tensors | {name: lost, "base_model.model.lm_head.weight": lost}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"no place for: base_model.model.lm_head.weight"):
        load_model(llama_folder, adapter=tmp_path)
    with pytest.raises(ConfigError, match=r"the model has no adapters"):
        save_adapter(base, tmp_path / "none")


def test_an_adapter_never_takes_the_place_of_other_files(adapted, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds other files"):
        save_adapter(adapted, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    save_adapter(adapted, tmp_path / "new")
    save_adapter(adapted, tmp_path / "new")  # an earlier one is replaced
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_quantised_matrices(kind):
    kernel = np.random.default_rng(0).normal(0, 0.02, (3, 128, 10)).astype(np.float32)
    stored = jax.jit(quantize, static_argnums=1)(kernel, kind)
    found = np.asarray(dequantize(stored, kind, jnp.float32))
    assert sum(x.nbytes for x in stored.values()) == {"int8": 3 * (128 + 4) * 10}.get(kind, 3 * (64 + 2 * 4) * 10)
    size = np.abs(kernel).max(1, keepdims=True) if kind == "int8" else np.abs(kernel.reshape(3, 2, 64, 10)).max(2)
    levels = {"int8": np.arange(-127, 128) / 127, "int4": np.arange(-8, 8) / 7.5, "nf4": NF4}[kind]
    size = np.repeat(size, 128 // size.shape[1], axis=1)
    nearest = levels[np.abs(kernel[..., None] / size[..., None] - levels).argmin(-1)] * size
    np.testing.assert_allclose(np.abs(found - kernel), np.abs(nearest - kernel), atol=1e-7)  # two may be as near
    np.testing.assert_array_equal(dequantize(quantize(jnp.zeros((64, 2)), kind), kind, jnp.float32), 0.0)


def test_quantised_by_hand():
    stored = quantize(jnp.array([[2.0], [-2.0], [0.3], [0.0]]), "nf4")
    # Levels 15, 0, 9 (0.1609 is nearest to 0.15), 7; the first of two inputs in the low half.
    np.testing.assert_array_equal(stored["codes"], [[15 + 16 * 0], [9 + 16 * 7]])
    np.testing.assert_allclose(
        dequantize(stored, "nf4", jnp.float32)[:, 0], [2.0, -2.0, 2 * 0.16093020141124725, 0.0], rtol=1e-6
    )
    with pytest.raises(ConfigError, match=r"even number of inputs, not 3"):
        quantize(jnp.ones((3, 2)), "int4")


def test_the_backward_pass_of_a_frozen_matrix():
    draw = np.random.default_rng(0)
    x, kernel, g = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((5, 64), (64, 3), (5, 3)))
    for kind, stored in (("none", kernel), ("int8", quantize(kernel, "int8"))):
        dense = kernel if kind == "none" else dequantize(stored, kind, jnp.float32)
        y, back = jax.vjp(lambda x, stored=stored, kind=kind: frozen_matmul(x, stored, kind), x)
        np.testing.assert_allclose(y, x @ dense, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(back(g)[0], g @ dense.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_quantised_model_takes_adapters_and_exports_numbers(llama_folder, base, tmp_path, kind):
    model = load_model(llama_folder, quantize=kind)
    error = np.abs(model(TOKENS) - base(TOKENS)).max() / np.abs(base(TOKENS)).max()
    assert 0 < error < {"int8": 0.05, "nf4": 0.6}[kind]
    added = add_adapters(model, SHAPE, jax.random.key(0))
    np.testing.assert_array_equal(added(TOKENS), model(TOKENS))
    trained = shaken(added)
    save_hf(trained, tmp_path / "merged")
    np.testing.assert_allclose(load_model(tmp_path / "merged")(TOKENS), trained(TOKENS), atol=1e-4)
    with pytest.raises(ConfigError, match=r"quantize = 'int3' is not one of"):
        load_model(llama_folder, quantize="int3")


@pytest.fixture(scope="module")
def scorer_folder(llama_folder, tmp_path_factory):
    """A reward model as transformers writes it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("scorer")
    model = AutoModelForSequenceClassification.from_pretrained(llama_folder, num_labels=1, pad_token_id=0)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_are_those_of_transformers(scorer_folder, side):
    tokens, segments = TOKENS.copy(), np.ones_like(TOKENS)
    pads = slice(0, 3) if side == "left" else slice(4, 7)
    tokens[1, pads], segments[1, pads] = 0, 0
    oracle = AutoModelForSequenceClassification.from_pretrained(scorer_folder).eval()
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens), attention_mask=torch.tensor(segments)).logits[:, 0].numpy()
    model = load_model(scorer_folder)
    found = jax.jit(last_scores, static_argnums=0)(
        model.net, model.params, Inputs(jnp.asarray(tokens), jnp.asarray(segments))
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_adapter_of_a_reward_model_brings_its_score_head(scorer_folder, tmp_path):
    model = shaken(add_adapters(load_model(scorer_folder), SHAPE, jax.random.key(0)))
    assert set(lora.split(model.params)[1]) == {"layers", "score"}
    save_adapter(model, tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "adapter").params, model.params)
    oracle = in_peft(scorer_folder, tmp_path / "adapter", AutoModelForSequenceClassification)
    with torch.no_grad():
        expected = oracle(torch.tensor(TOKENS)).logits[:, 0].numpy()
    np.testing.assert_allclose(model(TOKENS)[:, -1], expected, atol=1e-4)


@pytest.mark.slow
def test_maps_that_are_one_tensor_in_the_files_train_but_have_no_peft_folder(tmp_path):
    config = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 40, "hidden_size": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = load_model(tmp_path, init_key=jax.random.key(0))
    model = shaken(add_adapters(whole, LoraConfig(2), jax.random.key(1)))
    assert not has_peft_adapter(model)
    with pytest.raises(ConfigError, match=r"a phi3 keeps .*qkv_proj as one tensor of several"):
        save_adapter(model, tmp_path / "adapter")
    save_hf(model, tmp_path / "merged")
    np.testing.assert_allclose(load_model(tmp_path / "merged")(TOKENS % 40), model(TOKENS % 40), atol=1e-4)
    assert has_peft_adapter(add_adapters(whole, LoraConfig(2, targets=("o", "down")), jax.random.key(1)))


@pytest.mark.slow
def test_experts_have_no_adapters(tmp_path):
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 40, "hidden_size": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4, "num_experts_per_tok": 2}))
    model = load_model(tmp_path, init_key=jax.random.key(0), quantize="nf4")
    with pytest.raises(ConfigError, match=r"lora.targets are gate, up, but outside its experts this model has none"):
        add_adapters(model, LoraConfig(2, targets=("gate", "up")), jax.random.key(1))
    adapted = shaken(add_adapters(model, LoraConfig(2), jax.random.key(1)))
    save_adapter(adapted, tmp_path / "adapter")
    targets = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    assert targets == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert not any("experts" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))


def test_a_new_score_model_is_scored_by_transformers(tmp_path):
    """As a critic or reward model is written: the tokenizer's padding token is what transformers finds the end with."""
    model = load_model("embedded:sort", head="score")
    model = dataclasses.replace(model, hf_config={**model.hf_config, "pad_token_id": None})
    save_hf(model, tmp_path / "critic")
    pad = json.loads((tmp_path / "critic/config.json").read_text())["pad_token_id"]
    assert pad == model.tokenizer.pad_token_id
    tokens, segments = TOKENS.copy(), np.ones_like(TOKENS)
    tokens[1, 4:], segments[1, 4:] = pad, 0
    oracle = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens), attention_mask=torch.tensor(segments)).logits[:, 0].numpy()
    found = jax.jit(last_scores, static_argnums=0)(
        model.net, model.params, Inputs(jnp.asarray(tokens), jnp.asarray(segments))
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
