"""What GPT-2, Pythia, OPT, Phi-2 and Falcon have of their own: older files, PEFT's adapters, a biased head, learned
positions, tokenizers without padding and chat template; and runs of later families with layers of their own."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPTNeoConfig,
    StableLmConfig,
)

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.families.rotary import max_positions
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.kernels.fused_attention import described
from jaxrl_llm.models.logprobs import token_statistics
from jaxrl_llm.models.mixers.attention import linear_biases
from jaxrl_llm.models.model import Model, add_adapters, check_attention, load_model, save_adapter, save_hf
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.reward_models import RewardModel
from tests.models.conftest import variants
from tests.models.decoding import padded
from tests.models.oracles import VARIANTS, VOCAB, make_oracle

TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 7))
MODULES = {  # of linear maps in the layers
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "gptj": {"q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"},
    "gpt_bigcode": {"c_attn", "c_proj", "c_fc"},
    "gpt_neo": {"q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"},
    "opt-narrow": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
    "phi": {"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"},
    "nanochat": {"q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"},
    "starcoder2": {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"},
    "bloom": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "mpt": {"Wqkv", "out_proj", "up_proj", "down_proj"},
    "falcon-grouped": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "exaone": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}


def changed(folder, change):
    """The folder with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: x for key, value in tensors.items() for name, x in change(key, value)}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("variant", variants(MODULES, quick=("gpt2",)))
def test_adapters_are_those_of_peft(variant, tmp_path):
    """On all linear maps, written for PEFT, and read from what PEFT writes for its usual modules of the family."""
    make_oracle(variant).save_pretrained(tmp_path / "base")
    model = add_adapters(load_model(tmp_path / "base"), LoraConfig(rank=3, alpha=6.0), jax.random.key(0))
    frozen, trained = lora.split(model.params)
    trained = jax.tree.map(
        lambda x: x + 0.1 * np.random.default_rng(1).normal(size=x.shape).astype(np.float32), trained
    )
    model = dataclasses.replace(model, params=lora.combine(frozen, trained))
    save_adapter(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    oracle = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert {n.split(".")[-2] for n, _ in oracle.named_modules() if n.endswith(".lora_A")} == MODULES[variant]
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS), oracle(torch.tensor(TOKENS)).logits.numpy(), atol=2e-5)
    entries = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert entries["fan_in_fan_out"] == (variant == "gpt2")
    again = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    if variant not in ("gpt2", "gpt_neox", "gptj", "gpt_bigcode"):
        return
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    made.save_pretrained(tmp_path / "usual")
    with torch.no_grad():
        expected = made(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(load_model(tmp_path / "base", adapter=tmp_path / "usual")(TOKENS), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("variant", "prefix", "extra"),
    [
        ("gpt2", "transformer.", {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)}),
        ("gpt_neo", "", {"transformer.h.0.attn.attention.bias": np.ones((1, 1, 8, 8), np.float32)}),
        ("opt", "model.", {"lm_head.weight": None}),
        ("gpt_neox", "", {"gpt_neox.layers.1.attention.masked_bias": np.ones((), np.float32)}),
    ],
)
def test_older_files_are_read(variant, prefix, extra, tmp_path):
    """Names without the first word, and buffers beside the weights."""
    make_oracle(variant).save_pretrained(tmp_path)
    expected = hf.load(tmp_path)[1]
    changed(tmp_path, lambda name, x: [(name.removeprefix(prefix), x)])
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name: tensors["decoder.embed_tokens.weight"].copy() if x is None else x for name, x in extra.items()}
    save_file(tensors | own, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], expected)


def test_a_head_with_a_bias_is_in_every_number_of_a_token(tmp_path):
    """As a row of the matrix that the chunked softmax reads: log-probs, entropies and gradients are those of logits."""
    make_oracle("phi").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    tokens, segments = map(jnp.asarray, padded([TOKENS[0], TOKENS[1, :4]], "left"))

    def whole(head):
        logps = jax.nn.log_softmax(model.net.bind(model.params | {"head": head})(tokens, segments))[:, :-1]
        counted = (segments[:, 1:] != 0) & (segments[:, :-1] != 0)
        picked = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
        entropies = -(jnp.exp(logps) * logps).sum(-1)
        return jnp.where(counted, picked, 0.0).sum(), jnp.where(counted, entropies, 0.0)

    def chunked(head):
        found = token_statistics(model.net, model.params | {"head": head}, Inputs(tokens, segments))
        return found.logps.sum(), found.entropy[:, 1:]

    (expected, entropies), gradients = jax.jit(jax.value_and_grad(whole, has_aux=True))(model.params["head"])
    (found, own), own_gradients = jax.jit(jax.value_and_grad(chunked, has_aux=True))(model.params["head"])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(own, entropies, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), own_gradients, gradients)
    assert np.abs(gradients["bias"]).max() > 0.1
    logits = model.net.bind(model.params).logits(jnp.ones((1, 32)), ids=(3, 5))
    np.testing.assert_array_equal(logits, model.net.bind(model.params).logits(jnp.ones((1, 32)))[:, jnp.array([3, 5])])


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "falcon"])
def test_step_heads_that_are_named_otherwise_are_refused(variant, tmp_path):
    entries = VARIANTS[variant]().to_dict() | {"architectures": None}
    with pytest.raises(ConfigError, match="models of this type have no head 'step' here; they have lm, score"):
        family_of(entries).to_config(entries, head="step")


REFUSED = {
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
    "falcon": ({"alibi": True}, "alibi = True is not supported; supported: false"),
    "gpt_neo": (
        {"attention_types": [[["near"], 2]], "attention_layers": None},
        r"attention_types = .* the types global and local",
    ),
    "gptj": ({"rotary_dim": 7}, "rotary_dim = 7 is not supported; supported: even numbers up to n_embd / n_head = 8"),
    "bamba": ({"attn_layer_indices": [2]}, r"attn_layer_indices = \[2\] .* integers from 0 to .* = 1"),
    "mamba": ({"conv_kernel": 1}, "conv_kernel = 1 is not supported; supported: numbers from 2"),
    "falcon_mamba": ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported; supported: silu"),
    "mamba2": ({"num_heads": 4}, "head_dim = 8 is not supported; supported: expand . hidden_size / num_heads = 16"),
    "dbrx": ({"attn_config": {"rope_theta": 5e5}}, "attn_config: rope_theta = 500000.0 .* 10000.0, as rope_theta"),
    "jamba": ({"attn_layer_offset": 4}, "attn_layer_offset = 4 .* integers from 0, below attn_layer_period = 4"),
    "phi": ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
    "opt": ({"activation_function": "tanh"}, "hidden_act = 'tanh' is not supported; supported: gelu, gelu_new"),
    "deepseek_v2": ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported; supported: greedy and"),
    "mistral4": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type = 'default' .* yarn"),
    "mistral4-plain": ({"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.5}}, "4 of 12 numbers"),
    "hy_v3": ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types = .* and sparse for one"),
    "cohere2_moe": ({"expert_selection_fn": "topk"}, "expert_selection_fn = 'topk' .* softmax and sigmoid"),
    "phimoe": ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported; supported: 2"),
    "phimoe-long": (
        {"rope_parameters": VARIANTS["phimoe-long"]().rope_parameters | {"long_mscale": 1.5}},
        "long_mscale = 1.5 .* short_mscale = 1.3",
    ),
    "mimo_v2_flash": ({"num_key_value_heads": 4}, "num_key_value_heads = 4 .* half of num_attention_heads = 4"),
    "laguna": ({"num_attention_heads_per_layer": [4, 8, 4, 4]}, "one number for the layers with a window, and one"),
    "apertus1p5_text": ({"tie_word_embeddings": True}, "tie_word_embeddings = True .* more rows than the head"),
    "apertus1p5_text-tied": ({"output_vocab_size": 98}, "output_vocab_size = 98 .* up to vocab_size = 97"),
    "bailing_hybrid": ({"kda_lower_bound": 5.0}, "kda_lower_bound = 5.0 .* numbers below 0"),
    "bailing_hybrid-plain": ({"tie_word_embeddings": True}, "tie_word_embeddings = True .* supported: False"),
    "kolibri1-full": ({"sliding_window": None}, "sliding_window = None .* integers from 1"),
    "kolibri1": ({"layer_types": ["chunked_attention"] * 4}, "layer_types = .* full_attention and sliding_attention"),
    "laguna-elements": ({"gating": "per-layer"}, "gating = 'per-layer' .* per-head, per-element"),
}


@pytest.mark.parametrize("variant", REFUSED)
def test_what_is_not_computed_is_refused(variant):
    entries, message = REFUSED[variant]
    hf_config = VARIANTS[variant]().to_dict() | {"architectures": None} | entries
    with pytest.raises(ConfigError, match=message):
        family_of(hf_config).to_config(hf_config)


def test_norms_of_each_head_are_read_and_written(tmp_path):
    """StableLM 2 12B has one tensor for each head of a layer, and no biases."""
    torch.manual_seed(0)
    config = StableLmConfig(**VARIANTS["stablelm-parallel"]().to_dict() | {"qk_layernorm": True})
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.0))
        expected = oracle(torch.tensor(TOKENS)).logits.numpy()
    oracle.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    assert model.params["layers"]["attention"]["k_norm"]["scale"].shape == (2, 2, 8)
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)
    save_hf(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    jax.tree.map(np.testing.assert_array_equal, theirs, ours)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(TOKENS)).logits.numpy(), expected, atol=1e-6)


def test_embedding_and_head_that_are_one_may_be_trained_whole_beside_adapters(tmp_path):
    """GPT-2 calls the embedding wte, and lm_head means it too, which is the name by which PEFT ties them."""
    make_oracle("gpt2").save_pretrained(tmp_path)
    model = add_adapters(load_model(tmp_path), LoraConfig(2), jax.random.key(0), modules_to_save=("lm_head",))
    assert model.net.config.lora is not None and model.net.config.lora.saved == ("embed/weight",)
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"] == ["lm_head", "wte"]
    only = AdapterPatterns(layers_to_transform=(1,))
    model = add_adapters(load_model(tmp_path), LoraConfig(2), jax.random.key(0), patterns=only)
    shape = model.net.config.lora
    assert shape is not None and {tuple(x.path for x in own) for own in shape.groups} == {
        (), ("attention/qkv", "attention/o", "mlp/up", "mlp/down"),
    }  # fmt: skip


def test_a_table_of_positions_says_how_long_rows_are(monkeypatch):
    """Whatever other entries say: a position behind the table would have the embedding of the last one."""
    entries = VARIANTS["gpt2"]().to_dict() | {"architectures": None, "max_position_embeddings": 4096}
    config = family_of(entries).to_config(entries)
    assert config.position_limit == entries["n_positions"]
    model = Model(Net(config), {}, hf_config=entries)
    assert model.max_positions == config.position_limit
    most, longer = config.learned_positions, np.ones((1, config.learned_positions + 1), int)
    monkeypatch.setattr("jaxrl_llm.models.model._apply", lambda *_: "computed")
    assert model(longer[:, 1:]) == model(longer, (np.arange(most + 1) > 2)[None] + 1) == "computed"  # two documents
    with pytest.raises(ConfigError, match=f"rows reach position {most}, but the model has learned {most}, from 0 on"):
        model(longer)
    without = {name: x for name, x in entries.items() if name not in ("n_positions", "max_position_embeddings")}
    assert Model(Net(family_of(without).to_config(without)), {}, hf_config=without).max_positions == 1024
    opt = VARIANTS["opt"]().to_dict() | {"architectures": None}
    assert family_of(opt).to_config(opt).position_limit == opt["max_position_embeddings"]
    scaled = entries | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ConfigError, match=r"rope_type = 'linear' .* no layer of this model has rotary positions"):
        family_of(scaled).to_config(scaled)


def test_slopes_of_heads_are_those_that_mosaicml_published():
    """With the `alibi_bias_max` of storywriter, which transformers does not read; of 12 heads as in its own code."""
    entries = VARIANTS["mpt"]().to_dict() | {"architectures": ["MPTForCausalLM"], "n_heads": 12, "d_model": 24}
    entries["attn_config"] |= {"alibi_bias_max": 16, "clip_qkv": 6}
    family = family_of(entries)
    config = family.to_config(entries)
    assert (config.qkv_clip, max_positions(entries)) == (6, entries["max_seq_len"])
    exported = family.from_config(config, entries)
    assert exported["architectures"] == ["MPTForCausalLM"] and exported["attn_config"] == entries["attn_config"]
    published = 2.0 ** -np.arange(1.0, 17)  # of 16 heads, in this order of them
    slopes = np.concatenate([published[1::2], published[::2]])[:12]
    found = linear_biases(config, jnp.array([[0, 1, 1000]]))
    np.testing.assert_allclose(found[0, :, 0], slopes[:, None] * [0, 1, 1000], rtol=1e-6)


def test_no_kernel_is_asked_for_scores_that_fall_with_distance():
    entries = VARIANTS["bloom"]().to_dict() | {"architectures": None}
    config = family_of(entries).to_config(entries, dtype="bfloat16")
    for backend in ("gpu", "tpu"):
        assert described(config, backend) == "xla (no kernel adds ALiBi to scores, as this model does)"
    with pytest.raises(ConfigError, match=r"model.attention = 'splash': it adds no ALiBi to scores"):
        check_attention(dataclasses.replace(config, attention="splash"), "tpu")


@pytest.mark.parametrize(
    ("variant", "entry", "value"),
    [
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("mpt", "no_bias", False),
        ("mpt", "logit_scale", 0.5),
        ("mpt", "attn_config", {"alibi": False}),
        ("mpt", "attn_config", {"qk_ln": True}),
        ("ernie4_5_moe", "moe_norm_min", 0.6),
        ("llama", "head_dim", 5),
        ("deepseek_v3", "qk_rope_head_dim", 5),
    ],
)
def test_what_is_not_computed_is_refused_by_name(variant, entry, value):
    entries = VARIANTS[variant]().to_dict() | {"architectures": None, entry: value}
    name = next(iter(value)) if isinstance(value, dict) else entry
    with pytest.raises(ConfigError, match=f"config.json: .*{name} = "):
        family_of(entries).to_config(entries)


def test_types_of_layers_are_those_that_transformers_reads():
    """It works `attention_layers` out of `attention_types`, and takes those of the file in their place."""
    entries = VARIANTS["gpt_neo"]().to_dict() | {"architectures": None, "attention_layers": ["local", "global"]}
    assert VARIANTS["gpt_neo"]().attention_layers == ["global", "local"]
    assert GPTNeoConfig(**entries).attention_layers == ["local", "global"]
    assert family_of(entries).to_config(entries).sliding_layers == (0,)


def test_files_of_bigscience_have_names_of_their_own(tmp_path):
    oracle = make_oracle("bloom")
    oracle.save_pretrained(tmp_path)
    expected = load_model(tmp_path).params
    changed(tmp_path, lambda name, x: {name.removeprefix("transformer."): x}.items())
    entries = json.loads((tmp_path / "config.json").read_text())
    entries |= {"n_embed": entries.pop("hidden_size"), "num_attention_heads": entries.pop("n_head")}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, expected)


def test_command_r_reads_rows_as_long_as_its_other_entry_says():
    assert max_positions({"max_position_embeddings": 8192, "model_max_length": 131072}) == 131072


def test_the_bias_of_a_head_in_fp32_is_sampled_with_in_fp32():
    entries = VARIANTS["phi"]().to_dict() | {"architectures": None}
    net = Net(family_of(entries).to_config(entries, dtype="bfloat16", fp32_head=True))
    shapes = jax.eval_shape(lambda params: decoding_params(params, net), net.shapes())
    assert {str(x.dtype) for x in shapes["head"].values()} == {"float32"}


def test_targets_under_the_names_of_other_families_are_refused():
    """They would be passed over: GPT-2 calls both `o` and `down` c_proj."""
    entries = VARIANTS["gpt2"]().to_dict() | {"architectures": None}
    net = Net(family_of(entries).to_config(entries))
    with pytest.raises(ConfigError, match=r"lora.targets has o, which is c_proj in this model"):
        add_adapters(Model(net, {}, hf_config=entries), LoraConfig(2, targets=("o", "qkv")), jax.random.key(0))


@pytest.fixture
def plain_gpt2(tmp_path):
    """A GPT-2 whose tokenizer has neither padding nor chat template, as that of the hub."""
    tokenizer = AutoTokenizer.from_pretrained(hf.EMBEDDED / "sort")
    tokenizer.pad_token = tokenizer.chat_template = None
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "initializer_range": 0.15}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=len(tokenizer), **sizes, **ids))
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def run_of(root, name, folder, rows):
    """A run of a few rows of text, or of messages."""
    (folder.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = load_config_file(f"{root / 'configs' / name}.py:tiny")
    config.output_dir, config.model.path = str(folder.parent / name), str(folder)
    config.data.path, config.data.eval_split = str(folder.parent / "rows.jsonl"), "none"
    config.total_steps, config.eval.every, config.logging.backends = 1, -1, ("jsonl",)
    return config


@pytest.mark.slow
def test_a_run_without_padding_and_chat_template(plain_gpt2, root, tmp_path):
    """Rows of text are trained on and the model is exported; messages and rows beyond its positions are refused.

    Packed rows may be longer: the positions of each document count from 0.
    """
    rows = [{"prompt": f"{i} 3 1 2", "completion": "1 2 3" if i % 2 else "1"} for i in range(8)]
    config = run_of(root, "sft", plain_gpt2, rows)
    config.data.packing, config.data.max_length, config.batch.prompts = True, 40, 2
    assert jaxrl_llm.train(config).metrics[0]["loss"] > 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "sft/hf")).__name__ == "GPT2LMHeadModel"
    assert json.loads((tmp_path / "sft/hf/tokenizer_config.json").read_text()).get("pad_token") is None
    config = run_of(root, "sft", plain_gpt2, [{"prompt": "1 " * 20, "completion": "1"}] * 8)
    config.output_dir = str(tmp_path / "long")
    with pytest.raises(ConfigError, match=r"rows would have up to \d+ tokens .* has positions for 24 .*n_positions"):
        jaxrl_llm.train(config)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1 " * 20, "completion": "1"}))
    config = run_of(root, "sft", plain_gpt2, rows)
    config.output_dir, config.data.eval_path, config.data.eval_split = (
        str(tmp_path / "e"),
        str(tmp_path / "eval.jsonl"),
        "train",
    )
    config.eval.every = 1
    with pytest.raises(ConfigError, match=r"rows would have up to \d+ tokens \(the longest row to evaluate on"):
        jaxrl_llm.train(config)
    roles = zip(("user", "assistant"), ("3 1 2", "1 2 3"), strict=True)
    messages = [{"role": role, "content": text} for role, text in roles]
    config = run_of(root, "sft", plain_gpt2, [{"messages": messages}] * 8)
    config.output_dir = str(tmp_path / "messages")
    with pytest.raises(ConfigError, match=r"chat messages but the tokenizer has no chat template.*chat_template"):
        jaxrl_llm.train(config)


def test_scorers_and_functions_with_too_few_positions_are_refused(plain_gpt2, root, tmp_path):
    """Those of a critic and of a reward model, and of the policy where a function brings prompts of its own."""
    config, path = GPT2Config.from_pretrained(plain_gpt2), tmp_path / "small"
    config.n_positions, config.num_labels = 8, 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(plain_gpt2).save_pretrained(path)
    with pytest.raises(
        ConfigError, match=r"small: a prompt .* have \d+ tokens, but it has learned 8 positions: set its"
    ):
        RewardModel(str(path), name="small")(["3 1 2 4 5"], ["1 2 3 4 5"])
    assert np.isfinite(RewardModel(str(path), max_length=8)(["3 1 2 4 5"], ["1 2 3 4 5"])).all()
    run = run_of(root, "ppo", plain_gpt2, [{"prompt": f"{i} 3 1 2", "answer": "1"} for i in range(8)])
    run.critic.path = str(path)
    with pytest.raises(ConfigError, match=r"max_completion_length = 10, which the critic reads.* positions for 8 "):
        jaxrl_llm.train(run)
    (tmp_path / "own.py").write_text("def own(prompts, sampler):\n    raise AssertionError\n")
    run = run_of(root, "grpo", plain_gpt2, [{"prompt": f"{i} 3 1 2"} for i in range(8)])
    run.environment.rollout_func, run.algorithm.old_logps = f"{tmp_path / 'own.py'}:own", "sampler"
    with pytest.raises(ConfigError, match=r"16 of prompts, up to rollout.max_prompt_length.* positions for 24 "):
        jaxrl_llm.train(run)


@pytest.mark.slow
def test_what_learned_positions_sample_is_what_they_score(plain_gpt2, root):
    """GRPO, with a prompt that rows share and completions behind it, packed as they are by default."""

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    config = run_of(root, "grpo", plain_gpt2, [{"prompt": f"{i} 3 1 2" + " 4" * (i % 3)} for i in range(8)])
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 12, 8
    result = jaxrl_llm.train(config, rewards=length)
    assert result.metrics[0]["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.slow
def test_a_reward_model_of_opt_and_its_scores_of_quantised_pythia(root, tmp_path):
    """A head behind the narrower embedding is trained on pairs and exported; maps that are one tensor are quantised."""
    tokenizer = AutoTokenizer.from_pretrained(hf.EMBEDDED / "sort")
    config = VARIANTS["opt-narrow"]()
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "opt")
    tokenizer.save_pretrained(tmp_path / "opt")
    run = load_config_file(f"{root / 'configs/reward_model.py'}:tiny")
    run.output_dir, run.model.path, run.eval.every = str(tmp_path / "run"), str(tmp_path / "opt"), -1
    run.logging.backends = ("jsonl",)
    jaxrl_llm.train(run)
    entries = json.loads((tmp_path / "run/hf/config.json").read_text())
    assert entries["architectures"] == ["OPTForSequenceClassification"]
    assert load_model(tmp_path / "run/hf").net.config.head == "score"
    make_oracle("gpt_neox").save_pretrained(tmp_path / "neox")
    model = load_model(tmp_path / "neox", quantize="int8")
    save_hf(model, tmp_path / "dequantised")
    np.testing.assert_allclose(load_model(tmp_path / "dequantised")(TOKENS), model(TOKENS), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "name"), [("lfm3", "Lfm3ForCausalLM"), ("nanochat", "NanoChatForCausalLM")])
def test_a_run_samples_what_it_scores(variant, name, root, tmp_path):
    """GRPO of new layers, with adapters beside quantised maps; the export is a model of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(hf.EMBEDDED / "sort")
    shape = VARIANTS[variant]()
    shape.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / variant)
    tokenizer.save_pretrained(tmp_path / variant)

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    config = run_of(root, "grpo", tmp_path / variant, [{"prompt": f"{i} 3 1 2" + " 4" * (i % 3)} for i in range(8)])
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 12, 8
    config.model.quantize, config.lora.rank = "int8", 2
    result = jaxrl_llm.train(config, rewards=length)
    assert result.metrics[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "grpo/hf")).__name__ == name


@pytest.mark.slow
def test_rows_of_any_length_are_sampled_with_the_long_factors_alone(root, tmp_path):
    """GRPO of Phi-4-mini's shape: rows beyond the original length are refused, unless both lists of factors are one."""
    tokenizer = AutoTokenizer.from_pretrained(hf.EMBEDDED / "sort")
    shape = VARIANTS["phi3-long"]()
    shape.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "phi")
    tokenizer.save_pretrained(tmp_path / "phi")

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    config = run_of(root, "grpo", tmp_path / "phi", [{"prompt": f"{i} 3 1 2" + " 4" * (i % 3)} for i in range(8)])
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 12, 8
    with pytest.raises(ConfigError, match="rope_type longrope rotates every token anew as a row grows beyond 8 tokens"):
        jaxrl_llm.train(config, rewards=length)
    factors = {"short_factor": [1.0, 2.5, 6.0], "long_factor": [1.0, 2.5, 6.0]}
    config.model.overrides = f"rope_parameters={ {'rope_type': 'longrope', **factors} }"
    result = jaxrl_llm.train(config, rewards=length)
    assert result.metrics[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert json.loads((tmp_path / "grpo/hf/config.json").read_text())["rope_parameters"]["short_factor"] == [1, 2.5, 6]
