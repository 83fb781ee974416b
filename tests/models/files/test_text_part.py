"""The text parts of models with vision that is not read or not there: they compute as in the whole, and are exported
alone."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files.hf import read_config
from jaxrl_llm.models.model import load_model, save_hf
from tests.models.conftest import variants
from tests.models.oracles import VARIANTS, VOCAB, make_oracle, oracle_logits

TOKENS = np.random.default_rng(0).integers(0, VOCAB - 10, (2, 9))
VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def whole(kind: str):
    """A tiny random model with vision, or of a family that may have it, and its text part."""
    torch.manual_seed(0)
    if kind == "gemma4_unified":
        text = VARIANTS["gemma4_unified_text"]().to_dict() | {"pad_token_id": 0}
        config = Gemma4UnifiedConfig(text_config=text, vision_config=None, audio_config=None, image_token_id=90)
        model = Gemma4UnifiedForConditionalGeneration(config)
        return model, lambda tokens: model(tokens).logits
    if kind == "gemma4":
        ids = {"image_token_id": 90, "audio_token_id": 91, "boi_token_id": 92, "eoi_token_id": 93}
        text = VARIANTS["gemma4_text"]().to_dict() | {"pad_token_id": 0}
        config = Gemma4Config(text_config=text, vision_config=None, audio_config=None, **ids)
        model = Gemma4ForConditionalGeneration(config)
        return model, lambda tokens: model(tokens).logits
    if kind == "step3p7":
        text = VARIANTS["step3p5"]().to_dict()
        model = Step3p7ForConditionalGeneration(
            Step3p7Config(vision_config=VISION, text_config=text, image_token_id=92)
        )
        return model, lambda tokens: model(tokens).logits
    sizes = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    text = VARIANTS["llama4_text"]().to_dict()
    config = Llama4Config(vision_config=VISION | sizes, text_config=text, image_token_index=92)
    model = Llama4ForConditionalGeneration(config)
    return model, lambda tokens: model.language_model(tokens).logits


@pytest.mark.parametrize("kind", variants(["gemma4", "gemma4_unified", "llama4", "step3p7"], quick=("llama4",)))
def test_the_text_part_computes_as_in_the_whole(tmp_path, kind):
    oracle, logits = whole(kind)
    oracle.eval().save_pretrained(tmp_path / "whole")
    model = load_model(tmp_path / "whole")
    with torch.no_grad():
        expected = logits(torch.tensor(TOKENS)).numpy()
    np.testing.assert_allclose(model(TOKENS), expected, atol=2e-5)
    save_hf(model, tmp_path / "text")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_allclose(alone(torch.tensor(TOKENS)).logits.numpy(), model(TOKENS), atol=2e-5)
    assert alone.config.model_type == ("step3p5" if kind == "step3p7" else f"{kind}_text")
    np.testing.assert_array_equal(load_model(tmp_path / "text")(TOKENS), model(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3n", "apertus1p5"])
def test_others_are_read_without_their_images_and_sound(kind, tmp_path):
    """transformers needs other libraries, or large models, for the encoders of the whole: here is what files hold."""
    oracle = make_oracle(f"{kind}_text")
    oracle.save_pretrained(tmp_path / "text")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    tensors |= {f"model.{part}.weight": np.ones((2, 2), np.float32) for part in ("vision_tower.stem", "embed_audio.x")}
    # Published files have keys and values of the layers that share those of others.
    shared = "model.language_model.layers.4.self_attn"
    if kind == "gemma3n":
        tensors |= {f"{shared}.{part}_proj.weight": np.ones((16, 32), np.float32) for part in "kv"}
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    whole = {"model_type": kind, "architectures": [f"{kind}ForConditionalGeneration"], "text_config": text}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole | {"vision_config": {"model_type": kind}}))
    model = load_model(tmp_path / "whole")
    np.testing.assert_allclose(model(TOKENS), oracle_logits(oracle, TOKENS), atol=2e-5)
    save_hf(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert again.config.model_type == f"{kind}_text"
    np.testing.assert_array_equal(oracle_logits(again, TOKENS), oracle_logits(oracle, TOKENS))


def test_names_of_files_and_of_modules_read_alike(tmp_path):
    """Files of the hub name the text part before the model, the classes of transformers behind it."""
    oracle, _ = whole("llama4")
    oracle.save_pretrained(tmp_path)
    before = load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("language_model.model.", "model.language_model.") for name in tensors}
    assert names != dict.fromkeys(tensors)
    save_file({names[name]: x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load_model(tmp_path)(TOKENS), before(TOKENS))


def test_entries_are_those_of_the_text_part(tmp_path):
    oracle, _ = whole("llama4")
    oracle.save_pretrained(tmp_path)
    assert read_config(tmp_path, {"rms_norm_eps": 0.5})["rms_norm_eps"] == 0.5
    assert read_config(tmp_path)["text_part_of"] == "llama4"
    entries = json.loads((tmp_path / "config.json").read_text())
    entries["text_config"]["model_type"] = "qwen2"
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"text_config = .* is not supported; .* of a llama4_text model"):
        load_model(tmp_path)
