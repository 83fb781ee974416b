"""Rotary frequencies against transformers, and rows longer than the original length."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import FAMILIES, rotary
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.rope import Rope, check_length, dynamic_frequencies, frequencies, rotate

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-step": {  # of Llama 4 Scout
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "longrope": {
        "rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 1024,
        "short_factor": [1 + i / 64 for i in range(32)], "long_factor": [1 + i for i in range(32)],
    },
    "longrope-attention-factor": {
        "rope_type": "longrope", "attention_factor": 1.25, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    "yarn-without-length": {"rope_type": "yarn", "factor": 4.0},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2,
        "original_max_position_embeddings": 4096,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "truncate": False},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name):
    config = LlamaConfig(head_dim=64, max_position_embeddings=32768, rope_parameters=ROPES[name] | {"rope_theta": 5e5})
    rope = rotary.read({"rope_parameters": ROPES[name] | {"rope_theta": 5e5}, "max_position_embeddings": 32768})["rope"]
    expected, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    np.testing.assert_allclose(frequencies(rope, 64), expected.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
@pytest.mark.parametrize("head_dim", [None, 32])
def test_frequencies_of_hunyuan_are_stretched_as_in_transformers(family, head_dim):
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    entries = {"model_type": family, "rope_theta": 1e4, "rope_scaling": scaling, "head_dim": head_dim, **sizes}
    module = FAMILIES[family]
    config = module.to_config(entries)
    exported = module.from_config(config, entries)
    assert exported["rope_scaling"] == scaling and module.to_config(exported) == config
    theirs = AutoModel.from_config(AutoConfig.for_model(**exported)).rotary_emb
    np.testing.assert_allclose(frequencies(config.rope, config.head_dim), theirs.inv_freq, rtol=2e-6)


def test_dynamic_frequencies_follow_the_length_of_a_row():
    parameters = ROPES["dynamic"] | {"rope_theta": 1e4}
    config = LlamaConfig(head_dim=32, max_position_embeddings=16, rope_parameters=parameters)
    rope = Rope(1e4, "dynamic", 2.0, 16)
    for length in (4, 16, 17, 40):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
        np.testing.assert_allclose(dynamic_frequencies(rope, 32, jnp.array(length)), expected.numpy(), rtol=1e-5)
    np.testing.assert_allclose(dynamic_frequencies(rope, 32, jnp.array(5)), frequencies(rope, 32), rtol=1e-6)


def test_frequencies_of_longrope_are_those_of_short_rows_or_of_long_ones():
    parameters = ROPES["longrope"] | {"rope_theta": 1e4}
    config = LlamaConfig(head_dim=64, max_position_embeddings=32768, rope_parameters=parameters)
    rope = rotary.read({"rope_parameters": parameters})["rope"]
    lengths = (4, 1024, 1025, 9000)
    for length, found in zip(lengths, dynamic_frequencies(rope, 64, jnp.array(lengths)), strict=True):
        expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
        np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)


def test_rows_that_grow_beyond_the_original_length_are_not_sampled():
    check_length(Rope(1e4, "dynamic", 2.0, 16), 16)
    check_length(Rope(1e4, "yarn", 2.0, 16), 1000)
    with pytest.raises(ConfigError, match="rows of up to 17 cannot be sampled"):
        check_length(Rope(1e4, "dynamic", 2.0, 16), 17)
    long = Rope(1e4, "longrope", 2.0, 16, short_factors=(1.0, 1.0), long_factors=(1.0, 2.0))
    with pytest.raises(ConfigError, match=r"longrope .* beyond 16 .* its long_factor as its short_factor too"):
        check_length(long, 17)
    check_length(long._replace(short_factors=(1.0, 2.0)), 1000)


def test_rotation_by_hand():
    """One pair of dimensions turns by position x frequency; the dimensions beyond the waves stay."""
    x = jnp.array([1.0, 0.0, 5.0, 6.0])[None, None]  # one token, one head
    found = rotate(x, jnp.array([3]), jnp.array([0.5]))[0, 0]
    np.testing.assert_allclose(found, [np.cos(1.5), np.sin(1.5), 5.0, 6.0], rtol=1e-6)
    scaled = rotate(x, jnp.array([3]), jnp.array([0.5]), 2.0)[0, 0]
    np.testing.assert_allclose(scaled, [2 * np.cos(1.5), 2 * np.sin(1.5), 5.0, 6.0], rtol=1e-6)
    still = rotate(x, jnp.array([3]), jnp.array([0.0, 0.0]))[0, 0]
    np.testing.assert_array_equal(still, x[0, 0])


def test_entries_are_written_as_they_are_read():
    for parameters in ROPES.values():
        hf = {"rope_parameters": parameters | {"rope_theta": 5e5}, "max_position_embeddings": 32768}
        fields = rotary.read(hf)
        config = type("Config", (), {"local_rope": None, **fields})
        assert rotary.read({"max_position_embeddings": 32768} | rotary.write(config)) == fields


V5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def written(folder, model_type="llama", **entries):
    """A folder with a config.json of these entries."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    entries = {"model_type": model_type, **sizes, "num_attention_heads": 4, "max_position_embeddings": 16384, **entries}
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo3"])
@pytest.mark.parametrize("scaling", [None, YARN | {"rope_theta": 2e5}], ids=["null", "yarn"])
def test_a_scaling_beside_parameters_goes_before_them_as_in_transformers(tmp_path, kind, scaling):
    """As in a folder of transformers 5 to which a block is added by the old name."""
    given = V5["rope_parameters"]
    given = given if kind == "llama" else dict.fromkeys(rotary.TYPES, given)
    written(tmp_path, kind, rope_parameters=given, rope_scaling=scaling)
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    rope = hf.load_net(tmp_path).config.rope
    assert rope == rotary.read({"rope_parameters": expected}, by_type=True)["rope"]
    assert (rope.kind, rope.theta) == (("default", 5e5) if scaling is None else ("yarn", 2e5))


def test_a_scaling_that_leaves_the_base_behind_is_refused(tmp_path):
    """transformers would take the family's own base in place of that of the parameters, which it does not read."""
    written(tmp_path, **V5, rope_scaling=YARN)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e4
    with pytest.raises(ConfigError, match=r"rope_scaling = .* with {'rope_theta': 500000.0, .* in it"):
        hf.load_net(tmp_path)
    assert hf.load_net(written(tmp_path, **V5, rope_scaling=YARN, rope_theta=5e5)).config.rope.theta == 5e5


OVERRIDES = {
    "base": ({"rope_theta": 1e6}, Rope(1e6), Rope(1e6, "linear", 2.0)),
    "scaling": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, *[Rope(5e5, "linear", 4.0)] * 2),
    "no scaling": ({"rope_scaling": None}, Rope(5e5), Rope(5e5)),
    "both": ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}}, *[Rope(1e6, "linear", 4.0)] * 2),
    "parameters": ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, *[Rope(5e5, "linear", 4.0)] * 2),
    "all of them": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6), Rope(1e6)),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_of_rotary_entries_are_computed_and_exported(tmp_path, name):
    """Whatever version of transformers wrote the folder, and the export means the same to transformers."""
    entries, plain, scaled = OVERRIDES[name]
    linear = {"rope_type": "linear", "factor": 2.0}
    ways = [
        (V5, plain), ({"rope_theta": 5e5}, plain), ({"rope_theta": 5e5, "rope_scaling": linear}, scaled),
        ({"rope_parameters": linear | {"rope_theta": 5e5}}, scaled),
        ({"rope_scaling": linear | {"rope_theta": 5e5}}, scaled),
    ]  # fmt: skip
    for given, expected in ways:
        read = hf.read_config(written(tmp_path, **given), entries)
        config = FAMILIES["llama"].to_config(read)
        assert config.rope == expected
        exported = FAMILIES["llama"].from_config(config, read)
        (tmp_path / "config.json").write_text(json.dumps(exported))
        means = AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert rotary.read({"rope_parameters": means})["rope"] == expected


def test_overrides_that_would_change_nothing_are_refused(tmp_path):
    sets = {name: {"rope_type": "default", "rope_theta": 5e5} for name in rotary.TYPES}
    for kind in ("gemma3_text", "gemma4_text", "olmo3"):
        folder = written(tmp_path, kind, rope_parameters=sets)
        for name, value in {"rope_theta": 1e6, "rope_scaling": YARN, "rope_local_base_freq": 1e6}.items():
            with pytest.raises(ConfigError, match=rf"model.overrides: {name} changes nothing .* a set for each type"):
                hf.load_net(folder, {name: value})
        other = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
        assert hf.load_net(folder, {"rope_parameters": sets | other}).config.rope.theta == 1e6
        with pytest.raises(ConfigError, match="one set of parameters for each of full_attention, sliding_attention"):
            hf.load_net(folder, {"rope_parameters": YARN})
    with pytest.raises(ConfigError, match=r"rope_theta = 1000000.0 is not supported; .* a set for each"):
        hf.load_net(written(tmp_path, "gemma4_text"), {"rope_theta": 1e6})


def test_overrides_of_a_model_with_vision_are_those_of_its_decoder(tmp_path):
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": text}))
    read = hf.read_config(tmp_path, {"rope_theta": 1e6})["text_config"]
    assert read["rope_parameters"] == text["rope_parameters"] | {"rope_theta": 1e6}


def test_numbers_that_nothing_is_computed_of_are_named():
    """The block of DeepSeek-R1-0528-Qwen3-8B: its numbers are those of transformers, which vLLM multiplies."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with_factor = {"rope_scaling": block | {"attn_factor": 0.8782488562869419}, "rope_theta": 1e6}
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, **with_factor)
    _, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert rotary.read(with_factor)["rope"].attention_factor == pytest.approx(scale, rel=1e-12)
    (line,) = rotary.unread(with_factor)
    assert line.startswith("config.json: attn_factor = 0.878249 among the rotary parameters is not used, as in transf")
    assert "vLLM multiplies" in line
    sets = {"full_attention": block | {"strength": 2}, "sliding_attention": {"rope_type": "default", "finetuned": True}}
    assert [line.split(" among")[0] for line in rotary.unread({"text_config": {"rope_parameters": sets}})] == [
        "config.json: strength = 2"
    ]
    for parameters in ROPES.values():
        assert not rotary.unread({"rope_parameters": parameters | {"rope_theta": 1e4}})
    stretched = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "rope_theta": 1e4}
    assert not rotary.unread(stretched | {"model_type": "hunyuan_v1_dense"})
    assert [line.split(" among")[0] for line in rotary.unread(stretched)] == ["config.json: alpha = 1000"]
