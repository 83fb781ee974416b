"""LongCat-Flash: a layer of two halves by hand, what decoding keeps of it, and entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns, with_patterns
from jaxrl_llm.models.families import longcat_flash
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.mixers.mixer import AttentionInputs
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.shortcut import ShortcutBlock
from jaxrl_llm.models.transformer import attention_mask
from tests.models.oracles import VARIANTS, make_oracle


def entries(**changed):
    return VARIANTS["longcat_flash"]().to_dict() | {"architectures": None} | changed


@pytest.fixture(scope="module")
def config():
    return longcat_flash.to_config(entries())


def test_experts_read_the_first_half_and_are_added_behind_the_second(config):
    kind = config.layer_configs[0]
    block = ShortcutBlock(config, kind, nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 32)), jnp.float32)
    segments = jnp.ones((1, 5), jnp.int32)
    inputs = AttentionInputs(jnp.arange(5)[None], segments, attention_mask(segments))
    arrays = kind.mixer.layer_arrays(config, kind)
    found, (caches, experts), _ = block.prefill(x, inputs, arrays)
    before, seen = x, []
    for half in (block.first, block.second):
        before += half.mixer.prefill(half.input_norm(before), inputs, arrays)[0]
        seen.append(half.post_attention_norm(before))
        before += half.mlp(seen[-1])
    added, chosen, _ = block.mlp(seen[0])
    np.testing.assert_allclose(found, before + added, atol=1e-5)
    np.testing.assert_array_equal(experts, chosen)
    assert [cache.shape for cache in caches] == [(1, 5, 20)] * 2
    assert np.abs(added).max() > 0.01


def test_halves_may_have_adapters_of_their_own(config):
    """Which patterns tell apart by the number of the half in the names of modules."""
    net = Net(config).with_lora(LoraConfig(rank=4, targets=("o",)))
    patterns = AdapterPatterns(rank_pattern=(r"self_attn\.1\.o_proj=2",))
    shapes = with_patterns(net, longcat_flash, patterns).shapes()["latent_layers"]
    assert [shapes[half]["latent"]["o"]["lora_a"].shape[-1] for half in ("first", "second")] == [4, 2]


def test_matrices_of_experts_that_compute_nothing_are_passed_over(tmp_path):
    """Which transformers writes, and are not in an export."""
    make_oracle("longcat_flash").save_pretrained(tmp_path)
    expected, tensors = hf.load(tmp_path)[1], load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.1.mlp.experts.{expert}.{x}_proj.weight" for expert in (6, 8) for x in ("gate", "up")]
    save_file(tensors | {name: np.ones((16, 32), np.float32) for name in names}, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], expected)
    save_file(tensors | {"model.layers.0.mlp.experts.9.up_proj.weight": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gives no place to: model.layers.0.mlp.experts.9.up_proj"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"zero_expert_type": "copy"}, "zero_expert_type = 'copy' .* identity"),
        ({"router_bias": True}, "router_bias = True"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora = False"),
        ({"qk_head_dim": 16}, "qk_head_dim = 16 .* 12"),
        ({"head_dim": 8}, "head_dim = 8 .* 4"),
        ({"zero_expert_num": -1}, "zero_expert_num = -1 .* numbers from 0"),
    ],
)
def test_entries_that_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        longcat_flash.to_config(entries(**changed))
