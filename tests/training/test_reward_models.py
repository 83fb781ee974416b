"""Reward models as rewards: transformers' own scores, in GRPO and in PPO."""

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.hf import EMBEDDED
from jaxrl_llm.training.reward_models import RewardModel, with_reward_models

TEMPLATE = (
    "{%- for message in messages -%}{{- '[' + message['role'] + '] ' + message['content'] + '\n' -}}{%- endfor -%}"
)
PLAIN = (["sort:31=", "sort:9=", "a much longer prompt than the others: "], ["13", "", "and its completion" * 3])
CHAT = (
    [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "x"}],
    ],
    [[{"role": "assistant", "content": "hi there"}], "no"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen2 with a score head, and a chat template that is not the policy's."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    path = tmp_path_factory.mktemp("reward")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, num_labels=1,
        )
    )  # fmt: skip
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def theirs(folder, texts):
    """As TRL's GRPOTrainer scores texts."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        return model(**inputs).logits[:, 0].numpy()


def test_scores_are_those_of_transformers(folder):
    reward = RewardModel(str(folder), rows=2)  # three rows are two batches
    joined = [a + b for a, b in zip(*PLAIN, strict=True)]
    np.testing.assert_allclose(reward(*PLAIN), theirs(folder, joined), rtol=1e-4, atol=1e-5)
    written = ["[user] hello\n[assistant] hi there\n", "[system] be kind\n[user] x\n[assistant] no\n"]
    np.testing.assert_allclose(reward(*CHAT), theirs(folder, written), rtol=1e-4, atol=1e-5)


def test_an_end_of_text_and_a_longest_row(folder):
    closed = RewardModel(str(folder), add_eos=True)(*PLAIN)
    joined = [a + b for a, b in zip(*PLAIN, strict=True)]
    np.testing.assert_allclose(closed, theirs(folder, [text + "<|end|>" for text in joined]), rtol=1e-4, atol=1e-5)
    short = RewardModel(str(folder), max_length=6)(*PLAIN)
    np.testing.assert_allclose(short, theirs(folder, [text[-6:] for text in joined]), rtol=1e-4, atol=1e-5)
    assert abs(short[0] - closed[0]) > 1e-3


def test_names_and_wrong_names(folder, tmp_path):
    reward, other = with_reward_models((f"model:{folder}(rows=4, name='taste')", "exact_match"))
    assert (reward.name, reward.rows, other) == ("taste", 4, "exact_match")
    with pytest.raises(ConfigError, match=r"no reward model.*LlamaForCausalLM"):
        with_reward_models("model:embedded:sort")
    with pytest.raises(ConfigError, match="there are max_length, rows, add_eos"):
        with_reward_models(f"model:{folder}(length=4)")
    with pytest.raises(ConfigError, match="nowhere"):
        with_reward_models(f"model:{tmp_path / 'nowhere'}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_run_learns_from_a_reward_model(root, tmp_path, folder, name):
    def length(completions, **_):
        return [float(len(text)) for text in completions]

    config = load_config_file(f"{root / 'configs' / name}.py:tiny")
    config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / "run"), -1, ("jsonl",)
    result = jaxrl_llm.train(config, rewards=[f"model:{folder}(name='taste')", length])
    for line in result.metrics:
        expected = line["rewards/taste/mean"] + line["rewards/length/mean"]
        np.testing.assert_allclose(line["reward"], expected, rtol=1e-5)
        assert np.isfinite(line["loss"])
        assert line["rewards/taste/std"] > 0
