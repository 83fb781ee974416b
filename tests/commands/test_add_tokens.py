"""New tokens: the rows of a folder with more of them, in transformers too, and a run that learns them."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jaxrl_llm
from jaxrl_llm.commands.add_tokens import add_tokens, main
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.files.new_tokens import with_tokens
from jaxrl_llm.models.model import load_model

NEW = ("<think>", "</think>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_tokens("embedded:sort", NEW, tmp_path_factory.mktemp("models") / "thinking")


def test_rows_are_the_mean_of_those_before(folder):
    before, after = load_model("embedded:sort"), load_model(folder)
    old, new = before.net.config.vocab_size, after.net.config.vocab_size
    count = max(before.tokenizer.get_vocab().values()) + 1
    assert new == max(old, count + 2)
    ids = [after.tokenizer.encode(token, add_special_tokens=False) for token in NEW]
    assert ids == [[count], [count + 1]]
    rows, known = after.params["embed"]["weight"], before.params["embed"]["weight"]
    np.testing.assert_array_equal(rows[:count], known[:count])
    np.testing.assert_allclose(rows[count : count + 2], np.broadcast_to(known[:count].mean(0), (2, known.shape[1])))
    text = "12<think>3</think>"
    ids = after.tokenizer.encode(text, add_special_tokens=False)
    assert after.tokenizer.decode(ids, skip_special_tokens=True) == text
    special = with_tokens(after, ["<turn>"], special=True).tokenizer
    assert special.decode(special.encode("1<turn>2", add_special_tokens=False), skip_special_tokens=True) == "12"


def test_transformers_reads_it(folder):
    theirs, tokenizer = (
        each.from_pretrained(folder)
        for each in (transformers.AutoModelForCausalLM, transformers.PreTrainedTokenizerFast)
    )
    model = load_model(folder)
    ids = tokenizer("3<think>1", return_tensors="pt")["input_ids"]
    assert theirs.config.vocab_size == model.net.config.vocab_size
    wanted = theirs(ids).logits.detach().numpy()
    got = model(jnp.array(ids.numpy()))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_vocabulary_grows_where_no_rows_are_left(folder):
    model = load_model(folder)
    size, count = model.net.config.vocab_size, max(model.tokenizer.get_vocab().values()) + 1
    larger = with_tokens(model, [f"<{number}>" for number in range(size - count + 2)])
    assert larger.net.config.vocab_size == larger.hf_config["vocab_size"] == size + 2
    rows, known = larger.params["embed"]["weight"], model.params["embed"]["weight"]
    assert len(rows) == size + 2 and size > count
    np.testing.assert_array_equal(rows[:count], known[:count])
    np.testing.assert_allclose(rows[count:], np.broadcast_to(known[:count].mean(0), rows[count:].shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("<x>", "<think>"), "'<think>' is a token of .* already"),
        ((), "none is named"),
        (("", "<x>"), "one is empty"),
    ],
)
def test_what_cannot_be_added(folder, tokens, message):
    with pytest.raises(ConfigError, match=message):
        with_tokens(load_model(folder), tokens)


def test_flags_are_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="--tokens is missing"):
        main(["--model=embedded:sort", f"--output={tmp_path}"])


@pytest.mark.slow
def test_a_run_learns_them(folder, tmp_path):
    config = default()
    config.algorithm.name, config.model.path, config.output_dir = "sft", str(folder), str(tmp_path / "run")
    config.total_steps, config.batch.prompts, config.optimizer.learning_rate, config.eval.every = 60, 4, 3e-3, -1
    result = jaxrl_llm.train(config, train_dataset=[{"prompt": "3", "completion": "<think>1</think>3"}] * 4)
    losses = [row["loss"] for row in result.metrics if "loss" in row]
    assert losses[-1] < 0.1 * losses[0]
