"""Reward models as rewards: transformers' own scores, in GRPO and in PPO."""

import copy
import dataclasses

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.training.reward_models import RewardModel, with_reward_models
from tests.data.coded_tokenizer import coded_folder, kind

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


@pytest.fixture(scope="module")
def scorer():
    """A model in memory whose score head is drawn at random."""
    return jaxrl_llm.load_model("embedded:sort", head="score")


def test_parts_of_contents_are_texts_to_a_template_that_reads_no_parts(scorer):
    reward, answer = RewardModel(scorer), [{"role": "assistant", "content": "2"}]
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "how many?"}]
    in_parts = [{"role": "user", "content": parts}]
    in_text = [{"role": "user", "content": "<image>how many?"}]
    assert reward([in_parts], [answer]) == reward([in_text], [answer])
    answer_in_parts = [{"role": "assistant", "content": [{"type": "text", "text": "2"}]}]
    assert reward([in_parts], [answer_in_parts]) == reward([in_text], [answer])
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text or 'I' }}{% endfor %}{% endfor %}"
    shows_parts = RewardModel(scorer, chat_template=template)
    assert shows_parts([in_parts], ["2"]) == shows_parts(["Ihow many?"], ["2"])


def test_an_answer_that_the_prompt_begins_is_one_message(scorer):
    reward = RewardModel(scorer)
    question, begun = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi "}
    for opening in (begun, {"role": "assistant", "content": [{"type": "text", "text": "hi "}]}):
        for rest in ("there", [{"role": "assistant", "content": "there"}]):
            assert reward([[question, opening]], [rest]) == reward([[question]], ["hi there"])
    assert reward([[question]], [[]]) == reward(["<|user|>hello<|end|>"], [""])  # of an episode that failed


def test_rows_with_an_end_are_those_that_a_reward_model_learns_from(scorer):
    """With the token that begins a text, where the tokenizer has one."""
    tokenizer = copy.deepcopy(scorer.tokenizer)
    tokenizer.bos_token = "<|system|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.bos_token_id)]
    )
    pair = {"prompt": "sort:21=", "chosen": "12", "rejected": "21"}
    row = RowTokenizer("pairs", tokenizer)(pair)
    scores = RewardModel(scorer, add_eos=True, tokenizer=tokenizer)(["sort:21="] * 2, ["12", "21"])
    for name, score in zip(("chosen", "rejected"), scores, strict=True):
        assert row[f"{name}_ids"][0] == tokenizer.bos_token_id
        assert score == pytest.approx(float(scorer([row[f"{name}_ids"]])[0, -1]), abs=1e-5)


def test_another_tokenizer_and_template(scorer, tmp_path, monkeypatch):
    """By name and in memory, which stays as it is; Python code of a folder is run where that is trusted alone."""
    jaxrl_llm.save_hf(dataclasses.replace(scorer, tokenizer=None), tmp_path / "rm")
    question = [[{"role": "user", "content": "hello"}]]
    with pytest.raises(ConfigError, match=r"reward model rm has no tokenizer: .* tokenizer='PATH'"):
        RewardModel(str(tmp_path / "rm"))
    expected = RewardModel(scorer)(question, ["hi"])
    spec = f"model:{tmp_path / 'rm'}(tokenizer='embedded:sort')"
    np.testing.assert_allclose(with_reward_models(spec)(question, ["hi"]), expected, atol=1e-5)
    own = copy.deepcopy(scorer.tokenizer)
    own.image_folder = tmp_path
    np.testing.assert_allclose(RewardModel(str(tmp_path / "rm"), tokenizer=own)(question, ["hi"]), expected, atol=1e-5)
    assert own.image_folder == tmp_path
    (tmp_path / "template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    reward = RewardModel(scorer, chat_template=str(tmp_path / "template.jinja"))
    assert reward(question, ["hi"]) == reward(["[hello]"], ["[hi]"])
    with pytest.raises(ConfigError, match="the chat_template of reward model reward_model is 'chatlm'"):
        RewardModel(scorer, chat_template="chatlm")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    coded = str(coded_folder(tmp_path / "coded"))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        RewardModel(scorer, tokenizer=coded)
    trusted = RewardModel(scorer, tokenizer=coded, trust_remote_code=True)
    assert kind(trusted.model.tokenizer) == "CodedTokenizer" and trusted(question, ["hi"]) == expected


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
@pytest.mark.parametrize("name", ["ppo", "grpo"])
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
