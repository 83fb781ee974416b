"""PaliGemma, in which the tokens of a prompt see each other, against transformers; its rows, and what is refused."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma2Config, PaliGemmaConfig
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.files.hf import EMBEDDED, remember_images
from jaxrl_llm.models.files.safetensors import named_as_modules
from jaxrl_llm.models.logprobs import likeliest, token_logps
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.tools.tinker.service import TrainingService
from jaxrl_llm.training.offline import pad_examples, with_images
from jaxrl_llm.training.packing.planner import _obstacle
from jaxrl_llm.training.reward_models import ProcessRewardModel
from jaxrl_llm.training.setup.models import build_critic, check_prompts
from tests.data.test_image_processor import picture
from tests.models.images import (
    IMAGE_TOKEN,
    SIGLIP,
    VISION,
    as_torch,
    image_documents,
    image_greedy,
    make_vision_oracle,
    oracle_image_greedy,
    padded_images,
)
from tests.models.oracles import CAPS, SHAPE, WINDOW, added_gradients, in_files, in_parameters, of_files

ANSWER = 4  # tokens of each document that are no prompt
OF_GEMMA2 = PaliGemmaConfig(
    text_config=Gemma2Config(**SHAPE, **CAPS, head_dim=8, sliding_window=WINDOW).to_dict(),
    vision_config=SIGLIP,
    image_token_index=IMAGE_TOKEN,
    projection_dim=SHAPE["hidden_size"],
)


def with_prompts(oracle, document):
    """The arguments of transformers, which tell the prompt from the answer."""
    given = as_torch(oracle, document)
    given["token_type_ids"] = (torch.arange(len(document.tokens)) >= len(document.tokens) - ANSWER).int()[None]
    return given


@pytest.mark.parametrize(
    ("text", "decodes"),
    [("gemma2", False), *(pytest.param(text, True, marks=pytest.mark.slow) for text in ("gemma", "gemma2"))],
)
def test_prompts_are_seen_in_both_directions(tmp_path, text, decodes):
    """Logits on both sides of padding, the export, gradients and greedy text; PaliGemma 2 has windows of 5 tokens.

    What a server says of the tokens of prompts are their log-probs given those before them.
    """
    oracle = make_vision_oracle("paligemma", OF_GEMMA2 if text == "gemma2" else VISION["paligemma"]())
    oracle.save_pretrained(tmp_path / "model")
    model, documents = load_model(tmp_path / "model"), image_documents()
    with pytest.raises(ConfigError, match=r"the tokens of a prompt see each other in .*model, but rows are scored"):
        ProcessRewardModel(model, labels=("+", "-"))
    with torch.no_grad():
        expected = [oracle(**with_prompts(oracle, document)).logits[0].numpy() for document in documents]
    apply = jax.jit(lambda params, inputs: (net := model.net.bind(params)).logits(net.hidden(inputs)))

    def check(tokens, segments, images, in_prompt):
        inputs = jax.tree.map(jnp.asarray, Inputs(tokens, segments, images=images, in_prompt=in_prompt))
        logits = np.asarray(apply(model.params, inputs))
        for row in range(3):
            np.testing.assert_allclose(logits[row][segments[row] > 0], expected[row], atol=2e-5)

    for side in ("left", "right"):
        tokens, segments, images = padded_images(documents, side)
        ends = segments.shape[1] if side == "left" else segments.sum(1, keepdims=True)
        check(tokens, segments, images, (segments > 0) & (np.arange(segments.shape[1]) < ends - ANSWER))
    if decodes:
        # Left-padded rows of a rollout say it by their columns.
        tokens, segments, images = padded_images(documents)
        logits = model(tokens, segments, images=images, prompt_width=tokens.shape[1] - ANSWER)
        np.testing.assert_allclose(logits[0][segments[0] > 0], expected[0], atol=2e-5)
        found = image_greedy(model, documents[:2], 6)
        np.testing.assert_array_equal(found[:, 0], oracle_image_greedy(oracle, documents[:2], 6))
        check_gradients(oracle, model, documents)
    else:
        ids, ones = documents[2].tokens, np.ones((1, len(documents[2].tokens)), np.int32)
        with torch.no_grad():
            causal = oracle(**as_torch(oracle, documents[2])).logits[0].log_softmax(-1).numpy()
        found = likeliest(model.net.bind(model.params), jnp.asarray(ids)[None], ones, jnp.ones(1), 1)
        np.testing.assert_allclose(found.logps[0, 1:], causal[np.arange(len(ids) - 1), ids[1:]], atol=2e-5)
        save_hf(model, tmp_path / "out")
        again, info = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "out", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), info
        with torch.no_grad():
            np.testing.assert_array_equal(again(**with_prompts(again, documents[0])).logits[0].numpy(), expected[0])
        save_hf(dataclasses.replace(model, hf_config=None, tokenizer=None), tmp_path / "new")
        assert load_model(tmp_path / "new").net.config == model.net.config


def check_gradients(oracle, model, documents):
    """Those of the log-probs of answers."""
    oracle.zero_grad()
    for document in documents:
        logps = oracle(**with_prompts(oracle, document)).logits[0, :-1].log_softmax(-1)
        (-logps.gather(-1, torch.tensor(document.tokens)[1:, None])[-ANSWER:].sum()).backward()
    # Those of an encoder's layers that are not read have none.
    grads = {name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in oracle.named_parameters()}
    expected = in_files(oracle, grads)
    inputs = jax.tree.map(jnp.asarray, Inputs(*(rows := padded_images(documents))[:2], images=rows[2]))
    inputs = inputs.replace(prompt_width=rows[0].shape[1] - ANSWER)
    found = added_gradients(lambda params: (-token_logps(model.net, params, inputs)[0].sum(), None), model.params)[1]
    found = {path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(found)}
    for tensor in named_as_modules(model.net, family_of(model.hf_config)):
        theirs = of_files(tensor, expected)
        np.testing.assert_allclose(in_parameters(tensor, found), theirs, atol=1e-4, rtol=1e-4, err_msg=tensor.name)


def test_prompts_of_offline_rows_end_where_they_are_learned():
    """Of rows of one document, and of several that are packed into one."""
    family = family_of(hf := VISION["paligemma"]().to_dict())
    net = SimpleNamespace(config=family.to_config(hf))
    rows = [{"ids": [3, 4, 5, 6], "mask": [0, 0, 1, 1]}, {"ids": [3, 4, 5], "mask": [0, 1, 0]}]
    batch = with_images(pad_examples([[row] for row in rows], 5), [[row] for row in rows], net)
    np.testing.assert_array_equal(batch.inputs.in_prompt, [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    packed = batch.replace(
        inputs=Inputs(np.array([[3, 4, 5, 3, 4, 5, 0]]), np.array([[1, 1, 1, 2, 2, 2, 0]])),
        mask=np.array([[0, 1, 1, 0, 0, 1, 0]]),
    )
    packed = with_images(packed, [[{"ids": [3, 4, 5, 3, 4, 5]}]], net)
    np.testing.assert_array_equal(packed.inputs.in_prompt, [[1, 0, 0, 1, 1, 0, 0]])
    assert not net.config.shares_prefixes


@pytest.fixture
def tokenizer(tmp_path):
    """That of a folder whose tokenizer has no chat template, as PaliGemma's, and of its image processor."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = None
    pil = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    pil.save_pretrained(tmp_path)
    config = {"model_type": "paligemma", "vision_config": {"image_size": 16, "patch_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    remember_images(tokenizer, tmp_path)
    return tokenizer


def test_rows_are_as_the_processor_writes_them(tokenizer):
    image = picture(20, 33)
    tokenize = RowTokenizer("completions", tokenizer, images=ImageReader(tokenizer))
    user = {"role": "user", "content": "<image>what is it?"}
    row = tokenize({"prompt": [user], "completion": [{"role": "assistant", "content": "a cat"}], "images": [image]})
    # The processor, made without __init__, which wants a class of tokenizers; its texts, and what it puts for an image.
    theirs = PaliGemmaProcessor.__new__(PaliGemmaProcessor)
    theirs.tokenizer, theirs.image_token, theirs.image_seq_length = tokenizer, "<image>", 4
    (text,) = theirs.prepare_inputs_layout([image], ["<image>what is it?"])[1]
    text = text.replace("<image>", theirs.replace_image_token({}, 0))
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert row is not None and row["ids"][: len(prompt)] == prompt
    assert tokenizer.decode(row["ids"][len(prompt) :]) == "a cat<eos>"
    assert row["mask"] == [0] * len(prompt) + [1] * (len(row["ids"]) - len(prompt))
    pil = SiglipImageProcessorPil.from_pretrained(tokenizer.image_folder)
    expected = pil(images=[image], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(np.asarray(row["pixels"]), np.moveaxis(expected, 1, -1))
    with pytest.raises(ConfigError, match="the column prompt as plain text, but this model reads images in front of"):
        tokenize({"prompt": "<image>what is it?", "completion": "a cat", "images": [image]})


def test_what_does_not_know_where_prompts_end_is_refused(tmp_path):
    hf = VISION["paligemma"]().to_dict()
    with pytest.raises(ConfigError, match="models of this type have no head 'score' here; they have lm"):
        family_of(hf).to_config(hf, head="score")
    with pytest.raises(ConfigError, match=r"projection_dim = 16 is not supported; .* the text_config, 32"):
        family_of(hf).to_config(hf | {"projection_dim": 16})
    config = default()
    with pytest.raises(ConfigError, match="there is an environment, whose turns are sampled behind longer prompts"):
        check_prompts(config, True)
    config.rollout.partial_prompts = 4
    with pytest.raises(ConfigError, match=r"rollout\.partial_prompts is set, with which continued rows are sampled"):
        check_prompts(config, False)
    net = family_of(hf).to_config(hf)
    packing: Any = SimpleNamespace(documents=False, noise=False)
    assert "the tokens of a prompt see each other" in str(_obstacle(packing, net, cast(Any, object())))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    own = default()
    own.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"the critic, of model.path = .*: models of this type have no head 'score'"):
        build_critic(own, cast(Any, SimpleNamespace(tokenizer=object())), cast(Any, None))
    model: Any = SimpleNamespace(net=SimpleNamespace(config=net), path="paligemma")
    with pytest.raises(ConfigError, match="see each other in paligemma, but rows of clients do not say where"):
        TrainingService(model, cast(Any, None), tmp_path, ("a",), 256)
