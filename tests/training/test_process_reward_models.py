"""Process reward models as rewards: the probabilities of transformers, Qwen2.5-Math-PRM, aggregation, in GRPO."""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.training.reward_models import ProcessRewardModel, with_reward_models

TEMPLATE = (
    "{%- for m in messages -%}{{- '[' + m['role'] + ']' + m['content'] + '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
)
PROMPTS = ["sort:31=", "sort:9871=", "sort:5="]
COMPLETIONS = ["1\n3", "1\n\n 7\n9\n8\n", " \n"]
STEPS = [["1", "3"], ["1", " 7", "9", "8"], []]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random token classifier of Qwen2 as transformers writes it, with the tokenizer of the embedded model."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    path = tmp_path_factory.mktemp("prm")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen2ForTokenClassification(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.2,
            num_attention_heads=4, num_key_value_heads=2, num_labels=2,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.score.weight.mul_(5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def theirs(folder, prompt, steps, separator="\n"):
    """P(right) of each step as TRL's page has it: of the last token of the text up to the step, with its separator."""
    import torch
    from transformers import AutoModelForTokenClassification

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for count in range(1, len(steps) + 1):
        text = prompt + "".join(step + separator for step in steps[:count])
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            found.append(float(model(**ids).logits[0, -1].softmax(-1)[1]))
    return found


def test_steps_are_rated_as_by_transformers(folder):
    reward = ProcessRewardModel(str(folder), rows=2)
    expected = [theirs(folder, *row) for row in zip(PROMPTS, STEPS, strict=True)]
    found = reward.steps(PROMPTS, COMPLETIONS)
    assert [len(steps) for steps in found] == [2, 4, 0]
    for ours, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5)
    assert np.ptp(np.concatenate(found)) > 0.1
    ways = {"min": np.min, "product": np.prod, "mean": np.mean, "last": lambda x: x[-1], "sum": np.sum}
    for name, combine in ways.items():
        reward.aggregation = name
        scores = [combine(steps) if steps else 0.0 for steps in expected]
        np.testing.assert_allclose(reward(PROMPTS, COMPLETIONS), scores, atol=1e-5)


def test_rows_are_those_that_a_run_learns_from(folder):
    """Of texts and conversations; a row over the limit loses its end."""
    reward = ProcessRewardModel(str(folder))
    tokenizer = reward.model.tokenizer
    question = {"role": "user", "content": "sort:31="}
    for prompt in ("sort:31=", [question], [question, {"role": "assistant", "content": "so: "}]):
        row = RowTokenizer("steps", tokenizer)({"prompt": prompt, "completions": ["1", "3"], "labels": [1, 0]})
        ids, ends = reward._row(prompt, "1\n3")
        assert ids == row["ids"] and [n for n, on in enumerate(row["mask"]) if on] == ends
    (one,) = reward.steps([[question]], ["1\n3"])
    np.testing.assert_allclose(one, theirs(folder, "[user]sort:31=\n[assistant]", ["1", "3"]), atol=1e-5)
    answer = [{"role": "assistant", "content": [{"type": "text", "text": "1\n3"}]}]
    np.testing.assert_array_equal(reward.steps([[question]], [answer])[0], one)
    tool = [{"role": "assistant", "content": "?"}, {"role": "user", "content": "31"}]
    (later,) = reward.steps([[question]], [[*tool, *answer]])
    shown = "[user]sort:31=\n[assistant]?\n[user]31\n[assistant]"
    np.testing.assert_allclose(later, theirs(folder, shown, ["1", "3"]), atol=1e-5)
    assert reward([[question]] * 2, [[], tool]) == [0.0, 0.0]
    reward.max_length = len("sort:31=1\n3")
    np.testing.assert_allclose(reward.steps(["sort:31="], ["1\n3"])[0], theirs(folder, "sort:31=", ["1"]), atol=1e-5)
    reward.max_length = 3
    assert reward(["sort:31="], ["1\n3"]) == [0.0]


def test_another_token_ends_the_steps(folder, tmp_path):
    """As of Qwen2.5-Math-PRM: steps end with blank lines, and the model reads `<extra_0>` there."""
    from tests.models.qwen_prm import QwenPRM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_0>"]})
    tokenizer.save_pretrained(tmp_path)
    oracle = QwenPRM(tokenizer.convert_tokens_to_ids("<extra_0>") + 1)
    oracle.write(tmp_path)
    reward = with_reward_models(f"prm:{tmp_path}(separator='\\n\\n', name='qwen', aggregation='last')")
    assert isinstance(reward, ProcessRewardModel) and (reward.name, reward.step_token) == ("qwen", "<extra_0>")
    ids, ends = reward._row("a", "b\nc\n\nd\n\n")
    assert tokenizer.decode(ids) == "ab\nc<extra_0>d<extra_0>" and ends == [4, 6]
    logits = oracle([ids])[0, ends]
    np.testing.assert_allclose(
        reward.steps(["a"], ["b\nc\n\nd\n\n"])[0], 1 / (1 + np.exp(logits[:, 0] - logits[:, 1])), atol=1e-5
    )


def test_labels_are_read_by_their_names(folder, tmp_path):
    """Whichever of the two says right; a run does not train what it would read backwards."""
    (expected,) = ProcessRewardModel(str(folder)).steps(PROMPTS[:1], COMPLETIONS[:1])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    entries = json.loads((folder / "config.json").read_text())

    def named(*names, **others):
        own = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}, **others}
        (tmp_path / "config.json").write_text(json.dumps(entries | own))

    for names in (("step_wrong", "STEP_RIGHT"), ("-", "+"), ("good", "bad"), ("+", "-")):
        named(*names)
        (found,) = ProcessRewardModel(str(tmp_path)).steps(PROMPTS[:1], COMPLETIONS[:1])
        right = expected if names[1] in ("STEP_RIGHT", "+") else 1 - expected
        np.testing.assert_allclose(found, right, atol=1e-6)
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.data.path = "process_reward_model", "task:sort_steps"
    config.model.path = str(tmp_path)
    config.output_dir = str(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"gives right steps the label 0 .*: swap the rows of its head"):
        jaxrl_llm.train(config)
    for names, others in (
        (("A", "B"), {}), (("good", "right"), {}), (("correct", "not correct"), {}),
        (("wrong", "right"), {"label2id": {"wrong": 1, "right": 0}}),
    ):  # fmt: skip
        named(*names, **others)
        with pytest.raises(ConfigError, match=r"the names of its labels do not say which is right .*: call one right"):
            ProcessRewardModel(str(tmp_path))


@pytest.fixture(scope="module")
def writer(folder, tmp_path_factory):
    """A random language model as transformers writes it, which says + or - behind each step."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("writer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.5,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def answers(writer, ids):
    """The probability of + against - behind each token, as Math-Shepherd's and RLHFlow's pages have it."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(writer)
    model = AutoModelForCausalLM.from_pretrained(writer, dtype=torch.float32).eval()
    candidates = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in "+-"]
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, :, candidates].softmax(dim=-1)[:, 0].numpy()


def test_a_language_model_that_rates_by_a_token(writer):
    """As Math-Shepherd: where the step tag is, in the text as it was written."""
    reward = with_reward_models(f"prm:{writer}(labels=('+', '-'), step_token=' #', rows=2)")
    tokenizer = reward.model.tokenizer
    found = reward.steps(["ab: "] * 2, ["1+1=2\n\n2", "3"])
    for steps, text in zip(found, ("ab: 1+1=2 #\n2 #", "ab: 3 #"), strict=True):
        ids = tokenizer.encode(text)
        tags = [n for n, token in enumerate(ids) if token == tokenizer.encode("#", add_special_tokens=False)[-1]]
        np.testing.assert_allclose(steps, answers(writer, ids)[tags], atol=1e-5)
    assert len(found[0]) == 2 and np.ptp(np.concatenate(found)) > 0.01
    in_memory = ProcessRewardModel(jaxrl_llm.load_model(writer), labels=("+", "-"), step_token=" #", rows=2)
    np.testing.assert_array_equal(in_memory.steps(["ab: "], ["3"])[0], found[1])
    np.testing.assert_allclose(reward(["ab: "], ["1+1=2\n\n2"]), [min(found[0])])


def test_a_language_model_that_answers_each_step(writer):
    """As RLHFlow's: each step is a turn of the user, and every answer before it was +."""
    reward = with_reward_models(f"prm:{writer}(labels=('+', '-'), turns=True)")
    tokenizer, conversation, expected = reward.model.tokenizer, [], []
    for step in ("ab: 1+1=2", "2", "3"):
        conversation.append({"role": "user", "content": step})
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        expected.append(answers(writer, ids)[-1])
        conversation.append({"role": "assistant", "content": "+"})
    for prompt in ("ab:", [{"role": "user", "content": "ab:"}]):
        (found,) = reward.steps([prompt], ["1+1=2\n 2 \n3"])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(ConfigError, match=r"but a prompt ends with .*assistant.*: end it with the user's"):
        reward.steps([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]], ["1"])
    template = TEMPLATE.replace("m['content']", "'> ' + m['content']")
    with pytest.raises(ConfigError, match=r"its chat template does not write '\+' at once behind what opens"):
        ProcessRewardModel(str(writer), labels=("+", "-"), turns=True, chat_template=template).steps(["ab:"], ["1\n2"])


def test_names_and_wrong_names(folder, writer, tmp_path):
    reward, other = with_reward_models((f"prm:{folder}(rows=4, name='steps')", "exact_match"))
    assert (reward.name, reward.rows, other) == ("steps", 4, "exact_match")
    assert reward.step_token == reward.separator == "\n"
    for spec, message in {
        "prm:embedded:sort": r"no process reward model: .*LlamaForCausalLM; a step head .*configs/prm.py, or name the",
        f"prm:{folder}(labels=('+', '-'))": "has the head step, and lm is asked for",
        f"prm:{writer}(labels=('+', 'no'))": r"labels is \('\+', 'no'\), of the tokens .*, but it takes a token of",
        f"prm:{writer}(labels=('+', '+'))": "but it takes a token of right and one of wrong",
        "prm:nowhere(labels=(1, 0))": r"labels is \(1, 0\), but it takes two texts",
        "prm:nowhere(labels=('+',))": "but it takes two texts",
        f"prm:{folder}(turns=True)": "turns is true, but labels is None",
        f"prm:{folder}(length=4)": "max_length, rows, separator, step_token, aggregation, labels, turns, dtype",
        f"prm:{folder}(add_eos=True)": "unexpected keyword argument 'add_eos'",
        f"prm:{folder}(aggregation='max')": "aggregation is 'max', but it is one of min, product, mean, last, sum",
        f"prm:{folder}(separator='')": "separator is empty",
        f"model:{folder}": "has the head step, and score is asked for: .* the reward prm:PATH",
        f"prm:{tmp_path / 'nowhere'}": "nowhere",
    }.items():
        with pytest.raises(ConfigError, match=message):
            with_reward_models(spec)


@pytest.mark.slow
def test_from_training_to_a_reward(root, tmp_path):
    """A run is stopped and resumed bit for bit; its model, in memory and as a folder, rates samples of GRPO."""

    def trained(folder, steps, **changes):
        config = load_config_file(f"{root / 'configs/prm.py'}:tiny")
        config.output_dir, config.total_steps = str(tmp_path / folder), steps
        config.eval.every, config.logging.backends, config.optimizer.schedule = -1, ("jsonl",), "constant"
        config.update_from_flattened_dict(changes)
        return jaxrl_llm.train(config)

    whole = trained("whole", 4, **{"checkpoint.every": 2})
    trained("halves", 2)
    halves = trained("halves", 4)
    assert [line["loss"] for line in halves.metrics] == [line["loss"] for line in whole.metrics]
    for name, value in jaxrl_llm.load_model(tmp_path / "halves/hf").params["score"].items():
        np.testing.assert_array_equal(value, whole.model.params["score"][name])
    config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
    config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / "grpo"), -1, ("jsonl",)
    config.total_steps = 1
    writer = "prm:embedded:sort(labels=('+', '-'), name='writer')"  # a language model
    rewards = [whole.model, f"prm:{tmp_path / 'whole/hf'}(name='folder')", writer]
    (line,) = jaxrl_llm.train(config, rewards=rewards).metrics
    assert 0 < line["rewards/process_reward_model/mean"] < 1 and 0 < line["rewards/writer/mean"] < 1
    np.testing.assert_allclose(line["rewards/folder/mean"], line["rewards/process_reward_model/mean"], rtol=1e-4)
