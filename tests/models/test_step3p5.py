"""Step 3.5: clipped gates by hand, entries as StepFun's own files have them, and those that are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Step3p7TextConfig

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import step3p5
from jaxrl_llm.models.layers import clipped
from tests.models.oracles import SHAPE, VARIANTS

OWN = {  # of four layers and one of multi-token prediction
    **{name: x for name, x in SHAPE.items() if name != "num_key_value_heads"},
    "model_type": "step3p5", "architectures": None, "num_hidden_layers": 4, "num_nextn_predict_layers": 1,
    "num_attention_groups": 2, "head_dim": 8, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 16,
    "share_expert_dims": 20, "moe_layers_enum": "1,2,3", "moe_router_activation": "sigmoid", "sliding_window": 5,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "pad_token_id": 1,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8},
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "swiglu_limits": [0.0, 0.0, 0.0, 7, 0.0], "swiglu_limits_shared": [0.0, 0.0, 16, 16, 0.0],
}  # fmt: skip


def test_gates_are_clipped_above_and_ups_on_both_sides():
    gate, up = jnp.array([-3.0, 0.5, 3.0]), jnp.array([-4.0, 4.0, 0.5])
    np.testing.assert_array_equal(clipped(gate, up, 2.0), [6.0, 1.0, 1.0])
    np.testing.assert_array_equal(clipped(gate, up, 0.0), gate * up)


def test_entries_of_stepfuns_own_files():
    config = step3p5.to_config(dict(OWN))
    theirs = Step3p7TextConfig(**{name: x for name, x in OWN.items() if name != "architectures"}).to_dict()
    assert config == step3p5.to_config(theirs | {"architectures": None})
    assert step3p5.to_config(step3p5.from_config(config, OWN)) == config
    assert step3p5.to_config(step3p5.from_config(config, None)) == config
    assert config.dense_layers == (0,) and config.sliding_layers == (1, 2, 3) and config.heads == 8
    assert config.full_fields == (("heads", 4), ("rotary_fraction", 0.5)) and config.rope.kind == "llama3"
    assert config.layer_clips == ((0.0, 0.0), (0.0, 0.0), (0.0, 16.0), (7.0, 16.0))
    assert config.stacks == {
        "layers": (1,), "dense_full_layers": (0,), "clipped1_layers": (2,), "clipped2_layers": (3,),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"swiglu_limits": [1.0]}, r"swiglu_limits = \[1.0\] .* each of the 4 layers"),
        (
            {"num_sliding_attention_heads": 3, "per_layer_config": None},
            "num_sliding_attention_heads = 3 .* multiples of num_key_value_heads = 2",
        ),
        ({"per_layer_config": {"1": {"num_attention_heads": 4}}}, "per_layer_config of layer 1 = .* = 8"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config of layer 1 = "),
        ({"mlp_layer_types": None, "moe_layers_enum": "1,b"}, "moe_layers_enum = '1,b' .* numbers of layers"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate = False"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation = 'softmax' .* sigmoid"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 .* numbers above 0"),
    ],
)
def test_entries_that_are_refused(changed, message):
    entries = VARIANTS["step3p5"]().to_dict() | {"architectures": None}
    step3p5.to_config(dict(entries))
    with pytest.raises(ConfigError, match=message):
        step3p5.to_config(entries | changed)
