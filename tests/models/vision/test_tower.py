"""Models with vision against transformers: logits, gradients, layouts, decoding, export."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3ForSequenceClassification,
    Gemma4AudioConfig,
    Gemma4Config,
    InternVLConfig,
    Lfm2VlConfig,
    MiniMaxM3VLConfig,
    Mistral3Config,
)
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionEmbeddings

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft import TENSORS
from jaxrl_llm.models.families import family_for, family_of, kimi_k25
from jaxrl_llm.models.families.decoder import settings
from jaxrl_llm.models.files.safetensors import named_as_modules, stored_tensors
from jaxrl_llm.models.mixers import attention
from jaxrl_llm.models.mixers.mixer import DecodeInputs
from jaxrl_llm.models.model import add_adapters, check_attention, describe, load_model, save_adapter, save_hf
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.vision import patch_rows, tower
from jaxrl_llm.models.vision.tower import image_runs
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.packing.layout import Sizes, plan
from jaxrl_llm.training.passes import scored_logps
from tests.models.conftest import variants
from tests.models.decoding import trainer_logps
from tests.models.images import (
    ENCODER,
    GEMMA4_ENCODER,
    GEMMA4_TOKENS,
    IMAGE_TOKEN,
    PIXTRAL,
    SIGLIP2,
    TILE,
    TILE_TOKENS,
    VISION,
    as_published,
    as_torch,
    image_documents,
    image_gradients,
    image_greedy,
    joined,
    logits_alone,
    make_vision_oracle,
    oracle_image_gradients,
    oracle_image_greedy,
    padded_images,
    padded_pixels,
    variant_of,
)
from tests.models.oracles import SHAPE, VARIANTS, in_parameters, of_files

TOLERANCE = 2e-5
GATED = ("gate_proj", "up_proj", "down_proj")
WITHOUT_ADAPTERS = (
    "shared_expert_gate", "per_layer_input_gate", "per_layer_projection", "input_mix_weight_down",
    "input_mix_weight_up", "block_inject_weight", "ple.key_proj", "ple.value_proj",
)  # fmt: skip
QUICK = ("qwen2_5_vl",)  # the tests of training have a SmolVLM


@pytest.fixture(scope="module", params=variants(VISION, QUICK))
def oracle(request):
    return make_vision_oracle(request.param)


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    oracle.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def documents(oracle):
    return image_documents(family=variant_of(oracle))


@pytest.fixture(scope="module")
def alone(oracle, documents):
    return [logits_alone(oracle, document) for document in documents]


def check_logits(model, documents, alone, side):
    tokens, segments, images = padded_images(documents, side)
    logits = np.asarray(model(tokens, segments, images=images))
    for row, expected in enumerate(alone):
        np.testing.assert_allclose(logits[row][segments[row] > 0], expected, atol=TOLERANCE)
    return logits, (tokens, segments, images)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_with_two_one_and_no_images(model, documents, alone, side):
    logits, (tokens, segments, images) = check_logits(model, documents, alone, side)
    other = np.asarray(model(tokens, segments, images=dataclasses.replace(images, pixels=-images.pixels)))
    last = segments.shape[1] - 1 if side == "left" else segments.sum(1) - 1
    changed = np.abs(other - logits)[np.arange(3), last].max(axis=-1)
    assert changed[0] > 1e-2 and changed[1] > 1e-2 and changed[2] == 0


def test_images_that_were_encoded_before_give_the_same_logits(model, documents):
    """As those of an update are where what encodes them is frozen: without pixels."""
    tokens, segments, images = jax.tree.map(jnp.asarray, padded_images(documents))
    features = model.net.bind(model.params).image_features(images)
    known = dataclasses.replace(images, pixels=None, features=features)
    found, expected = (np.asarray(model(tokens, segments, images=x)) for x in (known, images))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_rows_that_are_encoded_one_at_a_time_have_the_same_features(model, documents, monkeypatch):
    """As those with many patches are, where all would take many times the memory of their features."""
    images = jax.tree.map(jnp.asarray, padded_images([*documents, documents[0]])[2])

    def features():
        encode = jax.jit(lambda params, images: model.net.bind(params).image_features(images))
        return encode.lower(model.params, images).as_text().count("stablehlo.while"), encode(model.params, images)

    loops, expected = features()
    monkeypatch.setattr(tower, "PATCHES_AT_ONCE", 2 * images.pixels.shape[1])
    more, found = features()
    assert more == loops + 1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_blocks_of_queries_see_the_image_that_ends_behind_them(model, documents, alone, monkeypatch):
    """As in rows that are long enough for blocks, of tokens and of patches."""
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(patch_rows, "BLOCK", 4)
    tokens, segments, images = jax.tree.map(jnp.asarray, padded_images(documents))
    logits = np.asarray(jax.jit(lambda params: model.net.bind(params)(tokens, segments, images=images))(model.params))
    for row, expected in enumerate(alone):
        np.testing.assert_allclose(logits[row][segments[row] > 0], expected, atol=TOLERANCE)


def test_packed_documents_have_their_own_tiles(model, documents, alone):
    """Documents one behind another in a row: their tiles too."""
    order = [2, 0, 1]
    tokens = np.concatenate([documents[i].tokens for i in order])[None]
    segments = np.concatenate([np.full(len(documents[i].tokens), 1 + i) for i in order])[None]
    images = padded_pixels([joined([documents[i].pixels for i in order])], documents[0].rows)
    logits = np.asarray(model(tokens, segments, images=images))[0]
    for i in order:
        np.testing.assert_allclose(logits[segments[0] == 1 + i], alone[i], atol=TOLERANCE)


@pytest.mark.slow
def test_gradients_of_all_parameters(oracle, model, documents):
    expected, found = oracle_image_gradients(oracle, documents), image_gradients(model, documents)
    tensors = named_as_modules(model.net, family_of(model.hf_config))
    assert {tensor.name for tensor in tensors} == set(expected)
    for tensor in tensors:
        theirs = of_files(tensor, expected)
        least = max(1e-4, 3e-5 * np.abs(theirs).max())  # small sums of large numbers are rounded as these are
        np.testing.assert_allclose(in_parameters(tensor, found), theirs, atol=least, rtol=1e-4, err_msg=tensor.name)


@pytest.mark.slow
def test_packed_rows_of_an_update_compute_the_same(model, documents):
    """Rows of groups whose prompts have images, in packed rows that hold a prompt once, two shards of them."""
    rows = [document for document in documents for _ in range(2)] + [documents[1]] * 2
    tokens, segments, images = padded_images(rows)
    tokens[1::2, -2:] = 7
    mask = np.zeros(tokens.shape, np.float32)
    mask[:, -3:] = 1
    sizes = Sizes(length=tokens.shape[1] + 8, packed_rows=2, rows=4, microbatches=2, group_size=2)
    layout = plan(tokens, segments, mask, sizes, shards=2)
    assert (layout.multiplicity == 2).any()
    inputs = jax.tree.map(jnp.asarray, Inputs(tokens, segments, images=images))
    if not model.net.config.shares_prefixes:
        with pytest.raises(ConfigError, match=r"(share a prefix|are packed), which this model's layers cannot"):
            scored_logps(model.net, model.params, inputs.replace(layout=layout), 1.0, 8, 2)
        return
    expected = np.asarray(trainer_logps(model.net, model.params, inputs)[0])
    found = scored_logps(model.net, model.params, inputs.replace(layout=layout), 1.0, 8, 2)
    np.testing.assert_allclose(np.asarray(found) * mask, expected * mask, atol=TOLERANCE)


@pytest.mark.slow  # of the quick one, decoding is compared with training below
def test_greedy_text_is_that_of_transformers(oracle, model, documents):
    found, expected = image_greedy(model, documents[:2], 6), oracle_image_greedy(oracle, documents[:2], 6)
    np.testing.assert_array_equal(found, np.repeat(expected[:, None], 2, axis=1))


def test_image_tokens_without_a_tile_keep_the_embedding_of_their_id(model, documents):
    """As those that a completion may have: sampling, which sees tokens alone, and training agree on them."""
    ids, tiles, rows = documents[1]
    tokens = np.append(ids, [IMAGE_TOKEN, 3])[None]
    images = padded_pixels([joined([tiles, tiles])], rows)
    images = dataclasses.replace(images, count=images.count // 2)
    segments = np.ones_like(tokens)
    logits = np.asarray(model(tokens, segments, images=images, prompt_width=len(ids)))[0]
    engine = Engine(SamplingParams(temperature=1.0), 1, 2, net=model.net, eos=(-1,))
    prompt = jax.tree.map(jnp.asarray, (tokens[:, :-2], segments[:, :-2], images))

    def decoded(net, params):
        bound = net.bind(params)
        _, caches, _ = bound.prefill(*prompt)
        cache = net.empty_caches(caches, 1, 2)
        inputs = DecodeInputs(prompt[1].sum(1)[:, None] + jnp.arange(2), prompt[1] > 0, jnp.zeros((1, 1), jnp.int32))
        return bound.logits(bound.decode(jnp.asarray(tokens[:, -2:]), inputs, caches, cache)[0])

    found = jax.jit(decoded, static_argnums=0)(engine.decoder, engine.decoding_params(model.params))
    np.testing.assert_allclose(found[0], logits[-2:], atol=TOLERANCE)


@pytest.mark.slow
def test_recomputing_gives_the_same_gradients(model, documents):
    columns = max(len(document.tokens) for document in documents)

    def gradients(remat):  # of the mean over the columns; those without are compiled for the test above already
        net = Net(dataclasses.replace(model.net.config, remat=remat))
        found = image_gradients(dataclasses.replace(model, net=net), documents)
        return {name: x / columns for name, x in found.items()}

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients("none"), gradients("block"))


def test_export_is_bit_for_bit_and_read_by_transformers(oracle, folder, model, documents, alone, tmp_path):
    save_hf(model, tmp_path / "out")
    stored, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    # Written as on the hub; transformers leaves a word out.
    family = oracle.config.model_type
    if family in ("gemma3", "lfm2_vl", "paligemma", "aya_vision", "cohere2_vision") or variant_of(oracle).startswith(
        "llava"
    ):
        stored = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in stored.items()}
    if family == "deepseek_vl":
        stored = {name.replace("vision_model.", "vision_model.vision_model."): x for name, x in stored.items()}
    if oracle.config.model_type == "qwen3_vl_moe":  # and these: transformers has them transposed
        stored = {name: x.swapaxes(1, 2) if ".experts." in name else x for name, x in stored.items()}
    if family == "kimi_k25":  # of which it takes parts for each other
        published = {
            "model.blocks.": "model.layers.", "encoder.patch_embed.": "patch_embed.",
            "model.mm_projector": "mm_projector",
        }  # fmt: skip
        for theirs, name in published.items():
            stored = {own.replace(theirs, name): x for own, x in stored.items()}
    assert stored.keys() == written.keys()
    for name, x in stored.items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)
    again, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    again = as_published(again)
    assert type(again) is type(oracle)
    assert not any(info.values()), info
    with torch.no_grad():
        np.testing.assert_array_equal(again(**as_torch(again, documents[0])).logits[0].numpy(), alone[0])
    entries = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")]
    for part in ("text_config", "vision_config"):
        assert entries[1][part] == entries[1][part] | entries[0][part]


def test_a_net_without_config_is_exported_with_its_vision(model, tmp_path):
    save_hf(dataclasses.replace(model, hf_config=None, tokenizer=None), tmp_path / "new")
    assert describe(tmp_path / "new").net.config == model.net.config
    AutoModelForImageTextToText.from_pretrained(tmp_path / "new")


def test_tiles_of_another_size_and_images_for_a_text_model_are_refused(model, documents):
    tokens, segments, images = padded_images(documents)
    small = dataclasses.replace(images, pixels=images.pixels[:, :, :20])
    reads = r"(24|96) x 24 x 3(, and grids of [26] numbers)?: use the image processor"
    if images.pixels.ndim == 3:
        reads = r"patches \[rows, patches, (96|48|192)\] and grids"
    with pytest.raises(ConfigError, match=rf"this model reads {reads}"):
        model(tokens, segments, images=small)
    text = Net(dataclasses.replace(model.net.config, vision=None))
    params = {name: x for name, x in model.params.items() if name != "vision"}
    with pytest.raises(ConfigError, match="reads text alone"):
        dataclasses.replace(model, net=text, params=params)(tokens, segments, images=images)


@pytest.mark.parametrize(
    ("family", "part", "entry", "value", "message"),
    [
        ("smolvlm", "text_config", "model_type", "mistral", "text_config = .* the entries of a llama model"),
        ("smolvlm", "vision_config", "hidden_act", "relu", "vision_config.hidden_act = 'relu'"),
        ("smolvlm", "vision_config", "image_size", 3, "vision_config.image_size = 3 .* from patch_size = 4 on"),
        ("smolvlm", None, "scale_factor", 4, "scale_factor = 4 .* divisors of the 6 patches"),
        ("smolvlm", None, "image_token_id", 97, "image_token_id = 97"),
        ("idefics2", "perceiver_config", "num_key_value_heads", 3, "num_key_value_heads = 3 .* divisors of 4"),
        ("idefics2", "perceiver_config", "hidden_act", "gelu", "perceiver_config: hidden_act = 'gelu'"),
        ("gemma3", None, "text_config", None, "text_config = None .* the entries of a gemma3_text model"),
        ("gemma3", "vision_config", "vision_use_head", True, "vision_config.vision_use_head = True"),
        ("gemma3", None, "mm_tokens_per_image", 16, "mm_tokens_per_image = 16 .* divisors of the 6 patches"),
        ("gemma3", None, "image_token_index", 97, "image_token_index = 97"),
        ("qwen2_5_vl", "text_config", "rope_parameters", {"mrope_section": [1, 1, 1]}, r"mrope_section = \[1, 1, 1\]"),
        ("qwen2_5_vl", "text_config", "layer_types", ["sliding_attention"] * 2, "sliding_window = None"),
        ("qwen2_5_vl", "vision_config", "out_hidden_size", 40, "vision_config.out_hidden_size = 40"),
        ("qwen2_5_vl", "vision_config", "num_heads", 8, "vision_config.hidden_size = 24"),
        ("qwen2_5_vl", "vision_config", "hidden_act", "gelu", "vision_config.hidden_act = 'gelu'"),
        ("qwen2_5_vl", "vision_config", "window_size", 7, "vision_config.window_size = 7"),
        ("qwen2_vl", "text_config", "layer_types", ["sliding_attention"] * 2, "sliding_window = None"),
        ("qwen2_vl", "vision_config", "hidden_size", 24, "vision_config.hidden_size = 24 .* hidden_size = 32"),
        ("qwen2_vl", "vision_config", "num_heads", 8, "vision_config.embed_dim = 24"),
        ("qwen2_vl", "vision_config", "mlp_ratio", 0.5, "mlp_ratio = 0.5"),
        ("qwen2_vl", "vision_config", "hidden_act", "silu", "vision_config.hidden_act = 'silu'"),
        ("qwen3_vl_moe", "text_config", "num_experts_per_tok", 5, "num_experts_per_tok = 5 .* up to num_experts = 4"),
        ("qwen3_vl_moe", "text_config", "mlp_only_layers", [0, 1, 2], r"mlp_only_layers = \[0, 1, 2\]"),
        ("qwen3_vl", "text_config", "rope_parameters", {"mrope_interleaved": False}, "mrope_interleaved = False"),
        ("qwen3_vl", "vision_config", "num_position_embeddings", 24, "num_position_embeddings = 24 .* squares"),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [2, 0], r"deepstack_visual_indexes = \[2, 0\]"),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [0, 4], r"deepstack_visual_indexes = \[0, 4\]"),
        ("qwen3_vl", "vision_config", "rope_parameters", {"rope_theta": 1e6}, "rope_theta = 1000000.0"),
        ("qwen3_5", "text_config", "rope_parameters", {"mrope_section": [4, 2, 2]}, "half of the 4 rotated dimensions"),
        ("qwen3_5", "text_config", "layer_types", ["sliding_attention"] * 3, "layer_types = "),
        ("qwen3_5_moe", "text_config", "num_experts_per_tok", 5, "num_experts_per_tok = 5 .* up to num_experts = 4"),
        ("internvl", "text_config", "model_type", "gpt_oss", "the entries of a qwen2 or qwen3 or llama or qwen3_moe"),
        ("internvl", None, "downsample_ratio", 0.25, "downsample_ratio = 0.25 .* divisors n of the 6 patches"),
        ("internvl", None, "downsample_ratio", 0.4, "downsample_ratio = 0.4"),
        ("internvl", None, "vision_feature_layer", -2, "vision_feature_layer = -2"),
        ("internvl", "vision_config", "norm_type", "batch_norm", "norm_type = 'batch_norm' .* layer_norm, rms_norm"),
        ("internvl", "vision_config", "image_size", [24, 48], r"vision_config.image_size = \[24, 48\] .* squares"),
        ("internvl", "vision_config", "use_mask_token", True, "vision_config.use_mask_token = True"),
        ("internvl", "vision_config", "layer_scale_init_value", 0, "layer_scale_init_value = 0 .* numbers above 0"),
        ("glm4v", "vision_config", "out_hidden_size", 40, "vision_config.out_hidden_size = 40 .* hidden_size = 32"),
        ("glm4v", "vision_config", "hidden_act", "gelu", "vision_config.hidden_act = 'gelu'"),
        ("glm46v", "text_config", "model_type", "glm4v_moe_text", "text_config.model_type = 'glm4v_moe_text'"),
        ("glm5_next", "text_config", "model_type", "glm4v_text", "text_config = .* of a glm5_next_text model"),
        ("glm5_next", "vision_config", "swiglu_limit", 0, "vision_config.swiglu_limit = 0 .* above 0"),
        ("glm5_next", "vision_config", "out_hidden_size", 40, "vision_config.out_hidden_size = 40"),
        ("glm_ocr", "vision_config", "num_heads", 5, "vision_config.hidden_size = 24 .* num_heads = 5"),
        ("exaone4_5", "text_config", "model_type", "llama", "text_config = .* of a exaone4 or exaone4_5_text model"),
        ("exaone4_5", "vision_config", "num_key_value_heads", 3, "num_key_value_heads = 3 .* of num_heads = 4"),
        ("exaone4_5", "vision_config", "window_size", 7, "vision_config.window_size = 7"),
        ("exaone4_5", None, "image_token_id", 97, "image_token_id = 97"),
        ("video_llama_3", "text_config", "model_type", "llama", "text_config = .* of a qwen2 model"),
        ("video_llama_3", "vision_config", "num_attention_heads", 4, "hidden_size = 24 .* 4 times 4 heads"),
        ("video_llama_3", "vision_config", "hidden_act", "relu", "vision_config.hidden_act = 'relu'"),
        ("gemma4_unified", None, "vision_config", None, "vision_config = None"),
        ("gemma4_unified", "vision_config", "output_proj_dims", 20, "output_proj_dims = 20 .* mm_embed_dim = 24"),
        ("gemma4_unified", "text_config", "model_type", "gemma4_text", "entries of a gemma4_unified_text model"),
        ("glm4v", "vision_config", "image_size", 3, "vision_config.image_size = 3 .* from patch_size = 4 on"),
        ("glm4v", "text_config", "rope_parameters", {"mrope_section": [1, 1, 1]}, r"mrope_section = \[1, 1, 1\]"),
        ("glm4v_moe", "text_config", "first_k_dense_replace", 3, "first_k_dense_replace = 3"),
        ("mistral3", "text_config", "model_type", "qwen2", "text_config = .* of a mistral or .* mistral4 model"),
        ("mistral3", None, "vision_feature_layer", [-1, 3], r"vision_feature_layer = \[-1, 3\]"),
        ("mistral3", None, "projector_hidden_act", "silu", "projector_hidden_act = 'silu'"),
        ("mistral3", None, "image_token_index", 97, "image_token_index = 97"),
        ("mistral3", "vision_config", "rope_parameters", {"rope_theta": 1e6}, "vision_config.rope_theta = 1000000.0"),
        ("mistral3", "vision_config", "num_attention_heads", 4, "vision_config.hidden_size = 24 .* 4 times 4 heads"),
        ("mistral3", "vision_config", "hidden_act", "relu", "vision_config.hidden_act = 'relu'"),
        ("gemma4", "text_config", "model_type", "gemma3_text", "text_config = .* the entries of a gemma4_text model"),
        ("gemma4", "text_config", "pad_token_id", None, "pad_token_id = None .* ids of tokens"),
        ("gemma4", "text_config", "use_bidirectional_attention", "all", "use_bidirectional_attention = 'all'"),
        ("gemma4", None, "image_token_id", 97, "image_token_id = 97"),
        ("gemma4", None, "vision_config", None, "vision_config = None .* the entries of an encoder"),
        ("gemma4", "vision_config", "num_attention_heads", 4, "hidden_size = 24 .* 4 times 4 heads"),
        ("gemma4", "vision_config", "head_dim", 16, "vision_config.head_dim = 16 .* supported: 8"),
        ("gemma4", "vision_config", "num_key_value_heads", 1, "vision_config.num_key_value_heads = 1 .* supported: 3"),
        ("gemma4", "vision_config", "hidden_activation", "relu", "vision_config.hidden_activation = 'relu'"),
        ("gemma4", "vision_config", "rope_parameters", {"rope_type": "yarn"}, "vision_config.rope_type = 'yarn'"),
        ("aya_vision", "text_config", "model_type", "llama", "text_config = .* of a cohere2 or cohere model"),
        ("aya_vision", None, "vision_feature_layer", -2, "vision_feature_layer = -2"),
        ("aya_vision", None, "vision_feature_select_strategy", "default", "vision_feature_select_strategy = 'default'"),
        ("aya_vision", None, "downsample_factor", 4, "downsample_factor = 4 .* divisors of the 6 patches"),
        ("aya_vision", None, "alignment_intermediate_size", 21, "alignment_intermediate_size = 21 .* even numbers"),
        ("aya_vision", "vision_config", "vision_use_head", True, "vision_config.vision_use_head = True"),
        ("cohere2_vision", "text_config", "model_type", "cohere", "text_config = .* of a cohere2 model"),
        ("cohere2_vision", "vision_config", "model_type", "clip_vision_model", "vision_config.model_type = 'clip"),
        ("cohere2_vision", None, "image_token_id", 97, "image_token_id = 97"),
        ("pixtral", None, "vision_feature_layer", -2, "vision_feature_layer = -2"),
        ("pixtral", None, "vision_feature_select_strategy", "default", "vision_feature_select_strategy = 'default'"),
        ("pixtral", "vision_config", "num_attention_heads", 4, "vision_config.hidden_size = 24 .* 4 times 4 heads"),
        ("llava_next", "vision_config", "model_type", "pixtral", "vision_config.model_type = 'pixtral'"),
        ("kimi_k25", "text_config", "model_type", "llama", "text_config = .* of a deepseek_v3 or kimi_k2 model"),
        ("kimi_k25", "vision_config", "pos_emb_width", 4, "vision_config.pos_emb_width = 4 .* pos_emb_height = 5"),
        (
            "kimi_k25",
            "vision_config",
            "merge_kernel_size",
            [2, 1],
            r"merge_kernel_size = \[2, 1\] .* two equal numbers",
        ),
        ("kimi_k25", "vision_config", "num_attention_heads", 4, "hidden_size = 24 .* 4 times 4 heads"),
        ("kimi_k25", None, "projection_hidden_size", 32, "projection_hidden_size = 32"),
        ("kimi_k25", None, "projection_layer_norm_eps", 1e-6, "projection_layer_norm_eps = 1e-06"),
        ("lfm3_vl", "text_config", "model_type", "llama", "text_config = .* of a lfm3 model"),
        ("lfm3_vl", None, "projector_hidden_act", "silu", "projector_hidden_act = 'silu'"),
        ("lfm3_vl", "vision_config", "num_key_value_heads", 3, "num_key_value_heads = 3 .* num_attention_heads = 4"),
        ("lfm3_vl", "vision_config", "conv_kernel_size", 2, "conv_kernel_size = 2 .* odd numbers"),
        ("lfm3_vl", "vision_config", "layer_types", ["conv"], r"layer_types = \['conv'\] .* 5 of conv and full_att"),
        ("deepseek_vl", "text_config", "model_type", "qwen2", "text_config = .* of a llama model"),
        ("deepseek_vl", "vision_config", "model_type", "clip_vision_model", "vision_config.model_type = 'clip"),
        ("deepseek_vl", None, "image_token_id", 97, "image_token_id = 97"),
        ("ovis2", "text_config", "model_type", "llama", "text_config = .* of a qwen2 model"),
        ("ovis2", None, "visual_indicator_token_ids", [91], r"visual_indicator_token_ids = \[91\] .* 5 ids of tokens"),
        ("ovis2", None, "visual_indicator_token_ids", [91, 92, 93, 94, 97], r"token_ids\[4\] = 97 .* ids of tokens"),
        ("ovis2", None, "hidden_size", 48, "hidden_size = 48 .* supported: 32"),
        ("ovis2", "vision_config", "tokenize_function", "st_argmax", "vision_config.tokenize_function = 'st_argmax'"),
        ("ovis2", "vision_config", "qkv_bias", True, "vision_config.qkv_bias = True .* supported: False"),
        ("ovis2", "vision_config", "hidden_stride", 4, "image_size = 24 .* multiples of the 16 pixels of a token"),
        ("ovis2", "vision_config", "num_attention_heads", 5, "hidden_size = 24 .* num_attention_heads = 5"),
        ("ovis2", "vision_config", "vocab_size", 5, "vision_config.vocab_size = 5 .* numbers above 5"),
        ("minimax_m3_vl", "text_config", "model_type", "llama", "text_config = .* of a minimax_m3_vl_text model"),
        ("minimax_m3_vl", "vision_config", "num_attention_heads", 4, "hidden_size = 42 .* num_attention_heads = 4"),
        ("minimax_m3_vl", "vision_config", "rope_parameters", {"rope_theta": 0.5}, "rope_theta = 0.5 .* above 1"),
        (
            "minimax_m3_vl",
            "vision_config",
            "img_token_compression_config",
            {"spatial_merge_size": 4},
            "img_token_compression_config.spatial_merge_size = 4 .* supported: 2",
        ),
        ("minimax_m3_vl", "vision_config", "hidden_act", "relu", "vision_config.hidden_act = 'relu'"),
        ("minimax_m3_vl", None, "image_token_index", 97, "image_token_index = 97"),
        ("lighton_ocr", "text_config", "model_type", "llama", "text_config = .* of a qwen3 model"),
        ("lfm2_vl", "text_config", "model_type", "llama", "text_config = .* of a lfm2 or lfm2_moe model"),
        ("lfm2_vl", None, "projector_hidden_act", "silu", "projector_hidden_act = 'silu'"),
        ("lfm2_vl", None, "image_token_id", 97, "image_token_id = 97"),
        ("lfm2_vl", "vision_config", "vision_use_head", True, "vision_config.vision_use_head = True"),
        ("lfm2_vl", "vision_config", "num_patches", 24, "vision_config.num_patches = 24 .* squares"),
        ("lfm2_vl", "vision_config", "hidden_act", "relu", "vision_config.hidden_act = 'relu'"),
        ("lfm2_vl", "vision_config", "num_attention_heads", 5, "vision_config.hidden_size = 24"),
    ],
)
def test_entries_that_mean_another_network_are_refused(family, part, entry, value, message):
    hf = VISION[family]().to_dict()
    family_of(hf).to_config(hf)
    (hf if part is None else hf[part])[entry] = value
    with pytest.raises(ConfigError, match=message):
        family_of(hf).to_config(hf)


def test_a_family_is_found_for_every_net():
    """Those that describe other nets refuse them, and end no search with another error."""
    for name, config in VISION.items():
        hf = config().to_dict()
        net = family_of(hf).to_config(hf)
        module = family_for(net)
        assert module.to_config(module.from_config(net, None), **settings(net)) == net, name


def test_kimis_own_files_name_entries_otherwise():
    """As Moonshot publishes them; an export has both names."""
    hf = VISION["kimi_k25"]().to_dict()
    expected = family_of(hf).to_config(hf)
    own = hf | {"media_placeholder_token_id": hf["image_token_id"]}
    del own["image_token_id"]
    names = {name: theirs for theirs, name in kimi_k25.OWN_VISION_ENTRIES.items()}
    own["vision_config"] = {names.get(name, name): x for name, x in hf["vision_config"].items()}
    own["text_config"] = hf["text_config"] | {"model_type": "kimi_k2"}
    assert "hidden_size" not in own["vision_config"] and family_of(own).to_config(own) == expected
    written = kimi_k25.from_config(expected, own)
    assert family_of(written).to_config(written) == expected
    assert written["vision_config"] == written["vision_config"] | hf["vision_config"] | own["vision_config"]


def test_a_published_minimax_m3():
    """Its encoder is called a CLIP's, and has its base and the numbers of what it merges elsewhere."""
    hf = VISION["minimax_m3_vl"]().to_dict()
    expected, vision = family_of(hf).to_config(hf), dict(hf["vision_config"])
    merged = {name: vision.pop(name) for name in ("spatial_merge_size", "temporal_patch_size")}
    theta = vision.pop("rope_parameters")["rope_theta"]
    vision |= {"model_type": "clip_vision_model", "rope_theta": theta, "img_token_compression_config": merged}
    given = hf | {"vision_config": vision}
    assert family_of(given).to_config(given) == expected
    written = family_of(given).from_config(expected, given)
    theirs = MiniMaxM3VLConfig(**{name: x for name, x in written.items() if name != "model_type"}).to_dict()
    assert family_of(theirs).to_config(theirs | {"architectures": None}) == expected


@pytest.mark.slow
def test_layers_of_multi_token_prediction_are_passed_over(tmp_path):
    """Under the names of the hub too, which begin with the part."""
    make_vision_oracle("minimax_m3_vl").save_pretrained(tmp_path)
    expected = load_model(tmp_path)
    tensors, entries = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    names = ("language_model.model.layers.4.eh_proj.weight", "language_model.mtp.norm.weight")
    save_file(tensors | {name: np.ones(2, np.float32) for name in names}, tmp_path / "model.safetensors")
    entries["text_config"]["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(entries))
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, expected.params)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_configs(name):
    """Files of transformers 4 have the decoder's entries beside those of the whole, and name their rotary positions."""
    nested = VISION[name]().to_dict()
    text = dict(nested.pop("text_config"))
    given = text.pop("rope_parameters")
    rope = {"type": "mrope", "mrope_section": given["mrope_section"]}
    flat = {**text, **nested, "rope_theta": given["rope_theta"], "rope_scaling": rope, "model_type": name}
    family = family_of(flat)
    config = family.to_config(flat)
    assert config == family.to_config(VISION[name]().to_dict())
    assert config.rope_axes == (0, 1, 1, 2)
    written = family.from_config(config, flat)
    assert written == written | {name: x for name, x in flat.items() if name not in ("architectures", "head_dim")}
    assert "text_config" not in written


@pytest.mark.slow
def test_experts_of_qwen3_vl_are_read_in_both_orientations(tmp_path):
    """As the hub's files have them, which are written, and as version 5 of transformers writes them; it reads both."""
    oracle = make_vision_oracle("qwen3_vl_moe")
    oracle.save_pretrained(tmp_path / "5")
    stored = load_file(tmp_path / "5" / "model.safetensors")
    experts = [name for name in stored if ".experts." in name]
    assert {stored[name].shape for name in experts} == {(4, 40, 32), (4, 32, 20)}
    model = load_model(tmp_path / "5")
    save_hf(model, tmp_path / "hub")
    written = load_file(tmp_path / "hub" / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, x in stored.items():
        np.testing.assert_array_equal(written[name], x.swapaxes(1, 2) if name in experts else x, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "hub").params, model.params)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "hub")
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), oracle.parameters(), strict=True))


def test_qwen3_vl_moe_reads_entries_as_transformers_does():
    """Embeddings are tied where the whole says so, and not its decoder; weights of experts always add up to 1."""
    hf = VISION["qwen3_vl_moe"]().to_dict()
    hf["text_config"] |= {"tie_word_embeddings": True, "norm_topk_prob": False}
    config = family_of(hf).to_config(hf)
    assert not config.tie_embeddings and config.normalize_top_k
    assert family_of(hf).to_config(hf | {"tie_word_embeddings": True}).tie_embeddings


@pytest.mark.parametrize("layout", ["of transformers", "of its class", "of its class, before version 5"])
def test_gemma3_is_read_under_all_names_of_its_tensors(tmp_path, layout):
    oracle = make_vision_oracle("gemma3")
    oracle.save_pretrained(tmp_path)
    expected = load_model(tmp_path).params
    if layout != "of transformers":
        tensors = {name: x.detach().numpy() for name, x in oracle.named_parameters()}
        if "before" in layout:
            tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, expected)


@pytest.mark.parametrize("family", ["internvl", "mistral3"])
def test_a_score_head_is_an_entry_of_the_whole(family):
    hf = VISION[family]().to_dict()
    config = family_of(hf).to_config(hf, head="score")
    written = family_of(hf).from_config(config, hf)
    assert written["architectures"][0].endswith("ForSequenceClassification") and written["num_labels"] == 1
    assert "num_labels" not in written["text_config"]
    assert family_of(written).to_config(written) == config


@pytest.mark.parametrize("family", ["internvl", "mistral3", "deepseek_vl", "ovis2"])
def test_files_say_whether_the_head_is_the_embedding(tmp_path, family):
    """Where config.json does not, whatever it says of the decoder, as in transformers."""
    for tied in (True, False):
        config = VISION[family]()
        config.tie_word_embeddings = tied
        make_vision_oracle(family, config).save_pretrained(tmp_path)
        entries = json.loads((tmp_path / "config.json").read_text())
        del entries["tie_word_embeddings"]
        entries["text_config"]["tie_word_embeddings"] = not tied
        (tmp_path / "config.json").write_text(json.dumps(entries))
        theirs = AutoModelForImageTextToText.from_pretrained(tmp_path)
        head, embedding = theirs.lm_head.weight, theirs.get_input_embeddings().weight
        model = load_model(tmp_path)
        assert model.net.config.tie_embeddings == (head.data_ptr() == embedding.data_ptr()) == tied
        kernel = model.params["embed"]["weight"].T if tied else model.params["head"]["kernel"]
        np.testing.assert_array_equal(kernel.T, head.detach())
        assert model.hf_config["tie_word_embeddings"] is tied


SEEN_BOTH_WAYS = {"pad_token_id": 0, "use_bidirectional_attention": "vision"}
# Decoders and encoders besides those of VISION: InternViT-6B's, with tied embeddings, and one with linear map and norm.
OTHERS = {
    "internvl of qwen3": lambda: InternVLConfig(
        text_config={**SHAPE, "model_type": "qwen3", "head_dim": 16},
        vision_config=ENCODER | {"norm_type": "rms_norm", "use_qk_norm": True, "layer_scale_init_value": 0.4},
        image_token_id=IMAGE_TOKEN,
    ),
    "internvl of llama": lambda: InternVLConfig(
        text_config={**SHAPE, "model_type": "llama"},
        vision_config=ENCODER | {"use_mean_pooling": False, "layer_scale_init_value": 0.4},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
    "internvl of qwen3_moe": lambda: InternVLConfig(
        text_config={**VARIANTS["qwen3_moe"]().to_dict()},
        vision_config=ENCODER,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
    "gemma4 of 31B": lambda: Gemma4Config(
        text_config=VARIANTS["gemma4_text-dense"]().to_dict() | SEEN_BOTH_WAYS,
        vision_config=GEMMA4_ENCODER | {"standardize": True},
        **GEMMA4_TOKENS,
    ),
    "lfm2_vl of lfm2_moe": lambda: Lfm2VlConfig(
        text_config=VARIANTS["lfm2_moe"]().to_dict(),
        vision_config=SIGLIP2,
        image_token_id=IMAGE_TOKEN,
        projector_use_layernorm=False,
        projector_bias=False,
    ),
    "mistral3 of mistral": lambda: Mistral3Config(
        text_config=VARIANTS["mistral"]().to_dict(),
        vision_config=PIXTRAL | {"hidden_act": "gelu"},
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
    "mistral3 of mistral4": lambda: Mistral3Config(
        text_config=VARIANTS["mistral4"]().to_dict(),
        vision_config=PIXTRAL,
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders_and_encoders(tmp_path, name):
    """Logits of left-padded rows, and the export, under the names of files and those of classes."""
    family = name.split()[0]
    oracle, documents = make_vision_oracle(family, OTHERS[name]()), image_documents(family=family)
    oracle.save_pretrained(tmp_path / "model")
    alone = [logits_alone(oracle, document) for document in documents]
    model = load_model(tmp_path / "model")
    check_logits(model, documents, alone, "left")
    save_hf(model, tmp_path / "out")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        np.testing.assert_array_equal(again(**as_torch(again, documents[0])).logits[0].numpy(), alone[0])
    save_hf(dataclasses.replace(model, hf_config=None, tokenizer=None), tmp_path / "new")
    assert describe(tmp_path / "new").net.config == model.net.config
    tensors = {name: x.detach().numpy() for name, x in oracle.state_dict().items() if name in by_module(model)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "model").params, model.params)


def by_module(model):
    """The names of the model's tensors in its class, where experts may be stacked, and apart in files."""
    family = family_of(model.hf_config)
    tables = (getattr(family, "MODULE_KEYS", family.KEYS), *getattr(family, "OTHER_KEYS", ()))
    return {tensor.name for table in tables for tensor in stored_tensors(model.net, family, table)}


def test_the_pooling_head_of_deepseek_vl_is_not_read(tmp_path):
    """As nothing reads its output: published files have one, and exports have none, which transformers reads."""
    config, documents = VISION["deepseek_vl"](), image_documents(family="deepseek_vl")
    config.vision_config.vision_use_head = True
    whole = make_vision_oracle("deepseek_vl", config)
    whole.save_pretrained(tmp_path / "whole")
    assert any("head.probe" in name for name in load_file(tmp_path / "whole" / "model.safetensors"))
    model = load_model(tmp_path / "whole")
    check_logits(model, documents, [logits_alone(whole, document) for document in documents], "left")
    save_hf(model, tmp_path / "out")
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and not again.config.vision_config.vision_use_head
    theirs = whole.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in again.state_dict().items())


def test_the_sound_of_gemma4_is_not_read(tmp_path):
    """Its tensors are passed over, and exports have none, which transformers reads."""
    config = VISION["gemma4"]()
    config.audio_config = Gemma4AudioConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 4], output_proj_dims=8
    )
    whole = make_vision_oracle("gemma4", config)
    whole.save_pretrained(tmp_path / "whole")
    assert any("audio" in name for name in load_file(tmp_path / "whole" / "model.safetensors"))
    model = load_model(tmp_path / "whole")
    save_hf(model, tmp_path / "out")
    assert not any("audio" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and again.config.audio_config is None
    theirs, rest = whole.state_dict(), again.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in rest.items())
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "out").params, model.params)


# config.json of google/gemma-4-31B-it, but for entries about generation and classification.
GEMMA4_31B: dict[str, Any] = {
    "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None,
    "image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881, "boi_token_id": 255999,
    "eoi_token_id": 258882, "tie_word_embeddings": True, "vision_soft_tokens_per_image": 280,
    "text_config": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "pad_token_id": 0,
        "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "global_head_dim": 72, "patch_size": 16,
        "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06, "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": True, "use_clipped_linears": False, "default_output_length": 280,
    },
}  # fmt: skip


def test_a_published_gemma4():
    family = family_of(GEMMA4_31B)
    config = family.to_config(GEMMA4_31B)
    assert config.vision.bidirectional == "sliding" and config.vision.blank_tokens == (258880, 258884, 258881)
    encoder = config.vision.encoder
    assert (encoder.merge, encoder.positions, encoder.standardized, encoder.clipped) == (3, 10240, True, False)
    written = family.from_config(config, GEMMA4_31B)
    assert written["vision_config"] == GEMMA4_31B["vision_config"] | {"initializer_range": 0.02}
    assert written["text_config"] == written["text_config"] | GEMMA4_31B["text_config"]
    assert family.to_config(written) == config


def test_positions_are_interpolated_by_cubics_as_in_transformers():
    """Those of GLM-4.1V, to images with fewer and with more patches than there are learned ones."""
    table, (high, wide) = torch.randn(25, 6), (4, 14)
    config = patch_rows.PatchRowsConfig(width=6, positions=5, places="cubic")
    module = patch_rows.InterpolatedPositions(config, SimpleNamespace(param_dtype="float32", init_scale=1), nnx.Rngs(0))
    module.weight[...] = jnp.asarray(table.numpy())
    theirs = Glm4vVisionEmbeddings(Glm4vVisionConfig(hidden_size=6, image_size=20, patch_size=4))
    theirs.position_embedding.weight.data = table
    y, x = np.divmod(np.arange(high * wide), wide)
    sizes = torch.tensor([[1, high, wide]])
    with torch.no_grad():
        expected = theirs(torch.zeros(len(y), 6), [len(y)], sizes, torch.tensor(y), torch.tensor(x)).numpy()
    high, wide = np.full((1, len(y)), high), np.full((1, len(y)), wide)
    found = jax.jit(lambda *places: module(*places))(y[None], x[None], high, wide)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


@pytest.mark.slow
def test_a_gemma3_with_a_score_head(tmp_path):
    documents = image_documents()
    config = VISION["gemma3"]()
    config.num_labels, config.text_config.pad_token_id = 1, 0
    torch.manual_seed(0)
    oracle = Gemma3ForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    oracle.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=0.15)
    oracle.save_pretrained(tmp_path / "oracle")
    model = load_model(tmp_path / "oracle")
    tokens, segments, images = padded_images(documents)
    with torch.no_grad():
        expected = [oracle(**as_torch(oracle, document)).logits[0, 0] for document in documents]
    np.testing.assert_allclose(model(tokens, segments, images=images)[:, -1], expected, atol=TOLERANCE)
    save_hf(model, tmp_path / "out")
    again = Gemma3ForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), oracle.parameters(), strict=True))


def test_flash_attention_and_images_that_are_seen_in_both_directions_are_refused():
    config = family_of(hf := VISION["gemma3"]().to_dict()).to_config(hf, attention="flash", dtype="bfloat16")
    with pytest.raises(ConfigError, match="it is causal, and this model's images are seen in both directions"):
        check_attention(config, "gpu")


def test_runs_of_images():
    index = jnp.array([[-1, 0, 1, -1, 2, 3, 4, 5, -1, 6]])
    segments = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2]])
    np.testing.assert_array_equal(image_runs(index, segments), [[0, 1, 1, 0, 3, 3, 4, 4, 0, 6]])


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "gemma3", "internvl"])
def test_sizes_of_a_tile(family):
    config = family_of(hf := VISION[family]().to_dict()).to_config(hf)
    assert config.vision.tile_tokens == TILE_TOKENS
    assert config.vision.tile_shape == TILE


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "lora"])
def test_adapters_are_where_peft_finds_them(oracle, folder, model, vision, tmp_path):
    """On the decoder alone, or on the encoder too; and they come back."""
    given = load_model(folder, vision_training=vision)
    adapted = add_adapters(given, LoraConfig(rank=2), jax.random.key(0))
    if oracle.config.model_type in (
        "glm4v",
        "glm46v",
        "glm_ocr",
        "minimax_m3_vl",
    ):  # which have gate and up in one tensor
        with pytest.raises(ConfigError, match="gate_up_proj as one tensor of several linear maps"):
            save_adapter(adapted, tmp_path / "adapter")
        return
    save_adapter(adapted, tmp_path / "adapter")
    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config = peft.LoraConfig(r=2, target_modules=entries["target_modules"])
    by_weight = tuple(f".{name.removesuffix('.weight')}" for name in entries["target_parameters"] or ())
    wanted = {name for name, x in oracle.named_modules() if isinstance(x, torch.nn.Linear)}
    # Of Qwen's encoders and Kimi's queries, keys and values are one matrix, and have no adapters, as have those of
    # Mistral Large 4's, whose numbers are in another order in the class, and gates of experts and indexers.
    apart = ".attention." if oracle.config.model_type == "mistral_large4" else ".attn."
    wanted = {
        name
        for name in wanted
        if not (".vision_tower." in name and apart in name) and ".indexer." not in name
        if (("layers" in name or "encoder.layer." in name) and not name.endswith(WITHOUT_ADAPTERS))
        or ("blocks" in name and ".mlp." in name)
        or name.endswith("patch_dense")
        or "modality_projection" in name
        or ("merger" in name and "merging" not in name and ("linear" in name or name.endswith(GATED)))
    }
    wanted = {name for name in wanted if vision == "lora" or "text_model" in name or "language_model" in name}
    found = {name for name, _ in oracle.named_modules() if check_target_module_exists(config, name)}
    found |= {name for name, _ in oracle.named_modules() if f".{name}".endswith(by_weight)}
    assert found == wanted
    names = {name.removeprefix("base_model.model.") for name in load_file(tmp_path / "adapter" / TENSORS)}
    assert names == {f"{name}.lora_{x}.weight" for name in wanted for x in "AB"}
    again = load_model(folder, adapter=tmp_path / "adapter")
    assert again.net.config.vision_training == vision
    for x, y in zip(jax.tree.leaves(again.params), jax.tree.leaves(adapted.params), strict=True):
        np.testing.assert_array_equal(x, y)
