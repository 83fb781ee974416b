"""The head of process reward models: token classifiers of transformers, Qwen2.5-Math-PRM, PEFT, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForTokenClassification
from transformers.modeling_layers import GenericForTokenClassification

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import add_adapters, load_model, save_adapter, save_hf
from tests.models import oracles
from tests.models.conftest import variants
from tests.models.decoding import padded
from tests.models.oracles import VARIANTS, VOCAB, oracle_logits
from tests.models.qwen_prm import QwenPRM

TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 7))
MODELS = AutoModelForTokenClassification._model_mapping
CLASSIFIERS = [  # those that transformers has one for; the older families' have names of their own, and are refused
    name
    for name in oracles.FAMILIES
    if (kind := type(VARIANTS[name]())) in MODELS and issubclass(MODELS[kind], GenericForTokenClassification)
]


def written(folder, variant: str = "llama"):
    """A token classifier of a family as transformers writes it, with a bias that matters."""
    torch.manual_seed(0)
    config = VARIANTS[variant]()
    config.num_labels = 2
    oracle = AutoModelForTokenClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        oracle.score.bias.normal_()
    oracle.save_pretrained(folder)
    return oracle


@pytest.mark.parametrize("variant", variants(CLASSIFIERS, quick=("llama",)))
def test_token_classifiers_of_transformers_are_read_and_come_back(variant, tmp_path):
    oracle = written(tmp_path / "oracle", variant)
    model = load_model(tmp_path / "oracle")
    assert model.net.config.head == "step"
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, VOCAB, length) for length in (7, 12, 4)]
    tokens, segments = padded(documents, "left")
    found = np.asarray(model(tokens, segments))
    for row, document in enumerate(documents):
        np.testing.assert_allclose(found[row][segments[row] > 0], oracle_logits(oracle, document[None])[0], atol=3e-5)
    for config in (model.hf_config, None) if variant == "llama" else (model.hf_config,):
        save_hf(dataclasses.replace(model, hf_config=config), tmp_path / "out", overwrite=True)
        again = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", attn_implementation="eager")
        assert again.config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
        ours, theirs = again.state_dict(), oracle.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_step_head_with_a_hidden_layer(tmp_path):
    """That of Qwen2.5-Math-PRM, read from its folder without its code, and written under the same names."""
    oracle, folder = QwenPRM(VOCAB), tmp_path / "qwen"
    oracle.write(folder)
    model = load_model(folder)
    np.testing.assert_allclose(model(TOKENS), oracle(TOKENS), atol=2e-5)
    save_hf(model, tmp_path / "out")
    files = [load_file(path / "model.safetensors") for path in (folder, tmp_path / "out")]
    assert files[0].keys() - {"lm_head.weight"} == files[1].keys()
    np.testing.assert_array_equal(load_model(tmp_path / "out")(TOKENS), model(TOKENS))
    adapted = add_adapters(model, LoraConfig(2), jax.random.key(0))
    save_adapter(adapted, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"] == ["score"]
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "adapter").params, adapted.params)


def test_a_language_model_gets_a_new_step_head(llama_folder):
    model = load_model(llama_folder, head="step")
    head = model.params["score"]
    assert head["kernel"].shape == (32, 2) and not np.asarray(head["bias"]).any()
    assert float(head["kernel"].std()) == pytest.approx(model.net.config.init_scale, rel=0.4)
    assert "head" not in model.params
    assert model(TOKENS).shape == (2, 7, 2)


def test_the_adapter_of_a_process_reward_model_brings_its_head(tmp_path):
    written(tmp_path / "base")
    model = add_adapters(load_model(tmp_path / "base"), LoraConfig(3, targets=("q", "down")), jax.random.key(0))
    draw = np.random.default_rng(1)
    frozen, trained = lora.split(model.params)
    assert set(trained) == {"layers", "score"}
    moved = jax.tree.map(lambda x: x + 0.1 * draw.normal(size=x.shape).astype(np.float32), trained)
    model = dataclasses.replace(model, params=lora.combine(frozen, moved))
    save_adapter(model, tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "adapter").params, model.params)
    base = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=2)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-4)


def test_heads_that_are_others(tmp_path, llama_folder):
    written(tmp_path)
    with pytest.raises(ConfigError, match=r"has the head step, and score is asked for: .* the reward prm:PATH"):
        hf.load(tmp_path, head="score")
    with pytest.raises(ConfigError, match=r"has the head step, and lm is asked for: .* the reward prm:PATH"):
        hf.load(tmp_path, head="lm")
    entries = json.loads((tmp_path / "config.json").read_text())
    labels = {str(n): f"LABEL_{n}" for n in range(3)}
    for change, message in (
        ({"id2label": labels}, r"num_labels = 3 .* 2 \(wrong and right\)"),
        ({"token_classification_bias": False}, "token_classification_bias = False"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(entries | change))
        with pytest.raises(ConfigError, match=message):
            hf.load(tmp_path)
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.data.path, config.output_dir = (
        "process_reward_model",
        "task:sort_steps",
        str(tmp_path),
    )
    with pytest.raises(ConfigError, match="in memory has the head score, which is no step head"):
        jaxrl_llm.train(config, model=load_model("embedded:sort", head="score"))
