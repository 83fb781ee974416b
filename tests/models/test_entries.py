"""Entries of config.json that are of another kind than they must be."""

import copy
import dataclasses

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import FAMILIES, family_of
from tests.models.images import VISION
from tests.models.oracles import VARIANTS


@pytest.mark.parametrize(
    ("variant", "path", "value", "message"),
    [
        ("phi3", "rope_parameters.partial_rotary_factor", "half", "partial_rotary_factor = 'half'"),
        ("laguna", "rope_parameters.full_attention.partial_rotary_factor", [1], r"partial_rotary_factor = \[1\]"),
        ("mistral4", "rope_parameters.mscale", "one", "mscale = 'one'"),
        ("mistral4-plain", "qk_rope_head_dim", "4", "qk_rope_head_dim = '4'"),
        ("opt", "activation_function", ["relu"], r"activation_function = \['relu'\] .* a text"),
        ("glm_moe_dsa-shared", "indexer_types", 3, "indexer_types = 3 .* a list"),
        ("cohere2_moe-sigmoid", "shared_expert_combination_strategy", ["sum"], "combination_strategy = .* a text"),
        ("gemma4_text-dense", "per_layer_config.2", 3, "per_layer_config = .* each with entries"),
        ("qwen3_vl", "text_config.rope_parameters.mrope_section", 3, "mrope_section = 3 .* a list"),
        ("qwen3_vl", "text_config.rope_parameters.mrope_section", [1, "2", 1], "mrope_section = .* integers"),
        ("exaone4_5", "text_config.hidden_size", ..., "no entry hidden_size"),
        ("mllama", "vision_config.supported_aspect_ratios", 3, "supported_aspect_ratios = 3 .* a list"),
    ],
)
def test_entries_of_another_kind_are_refused(variant, path, value, message):
    hf = copy.deepcopy((VISION | VARIANTS)[variant]().to_dict())
    family_of(hf).to_config(hf)
    *parts, entry = path.split(".")
    part = hf
    for name in parts:
        part = part[name]
    assert entry in part
    part |= {entry: value}
    if value is ...:
        del part[entry]
    with pytest.raises(ConfigError, match=message):
        family_of(hf).to_config(hf)


def test_a_head_that_nothing_ties_is_one_of_its_own():
    """`tie_word_embeddings` may be left out of both the whole and its decoder."""
    hf = VISION["video_llama_3"]().to_dict()
    for part in (hf, hf["text_config"]):
        part.pop("tie_word_embeddings", None)
    assert not family_of(hf).to_config(hf).tie_embeddings


def test_a_net_without_experts_is_no_ernie_with_them():
    """The search for the family of a net goes on, which an error other than a ConfigError ends."""
    family = FAMILIES["ernie4_5_moe"]
    net = family.to_config(VARIANTS["ernie4_5_moe"]().to_dict())
    with pytest.raises(ConfigError, match=r"moe_layer_start_index = None .* nets with experts"):
        family.from_config(dataclasses.replace(net, dense_layers=tuple(range(net.layers))), None)
