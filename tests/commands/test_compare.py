"""Two models on the same prompts: who wins, by rewards and by a judge that is shown both orders."""

import importlib
import json
import shutil

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.commands.compare import Samples, _graded, _numbers, compare
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files.hf import EMBEDDED, load_tokenizer
from jaxrl_llm.models.model import load_model
from jaxrl_llm.rewards.judge import PairwiseJudge
from jaxrl_llm.rewards.runner import TrainerState, load_rewards
from jaxrl_llm.training.setup.data import tokenizer_of
from tests.data.smolvlm import picture, png, smolvlm_folder
from tests.rewards.judge_server import JudgeServer, asked

PAIR = "{{ prompt }}|{{ a }}|{{ b }}"


@pytest.fixture
def config(root):
    made = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    made.eval.greedy = False
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("embedded:sort").tokenizer


def met(tokenizer, *prompts):
    """Completions of two models: `(prompt, those of a, those of b)` each."""
    examples = [
        {"prompt": prompt, "prompt_ids": [1], "set": "", "number": i} for i, (prompt, _, _) in enumerate(prompts)
    ]
    return [Samples(examples, [list(row[side]) for row in prompts], tokenizer) for side in (1, 2)]


def graded(rewards, written, tie=0.0):
    return _graded(load_rewards(rewards), written, tie, TrainerState(5, 5))


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_the_larger_sum_of_rewards_wins(tokenizer):
    pairs = graded(length, met(tokenizer, ("p", ["1", "123"], ["12", "12"]), ("q", ["1", "1"], ["2", ""])), tie=0.5)
    assert [pair["winner"] for pair in pairs] == ["b", "a", "tie", "a"]
    assert pairs[1] == {"set": "", "row": 0, "prompt": "p", "a": "123", "b": "12", "score_a": 3.0, "score_b": 2.0,
                        "winner": "a"}  # fmt: skip
    found = _numbers(pairs, 0.95)
    assert [found[name] for name in ("prompts", "pairs", "win", "tie", "loss")] == [2, 4, 0.5, 0.25, 0.25]
    assert found["win_rate"] == (0.5 + 0.75) / 2 == found["win"] + found["tie"] / 2
    assert (found["win_rate_low"], found["win_rate_high"]) == (0.5, 0.75)
    assert (found["reward_a"], found["reward_b"]) == (1.5, 1.25)


def test_pairs_that_no_reward_applies_to(tokenizer):
    def some(completions, **columns):
        return [None if completion == "x" else 1.0 for completion in completions]

    pairs = graded(some, met(tokenizer, ("p", ["x", "1"], ["1", "1"])))
    found = _numbers(pairs, 0.95)
    assert [pair["winner"] for pair in pairs] == [None, "tie"]
    assert (found["ungraded"], found["tie"], found["win_rate"]) == (1, 1.0, 0.5)
    assert np.isnan(_numbers(pairs[:1], 0.95)["win_rate"])

    # A prompt counts the same however many of its pairs are graded.
    pairs = graded(lambda completions, **_: [None if x == "x" else len(x) for x in completions],
                   met(tokenizer, ("p", ["x", "12"], ["1", "1"]), ("q", ["1", "1"], ["12", "12"])))  # fmt: skip
    found = _numbers(pairs, 0.95)
    assert [found[name] for name in ("win", "tie", "loss", "win_rate")] == [0.5, 0.0, 0.5, 0.5]


def test_columns_and_token_ids_are_those_of_the_pair(tokenizer):
    seen = []

    def look(prompts, completions, completion_ids, number, trainer_state, prompt_numbers, **columns):
        seen.append((prompts, completions, [len(ids) for ids in completion_ids], number, prompt_numbers))
        assert trainer_state.global_step / trainer_state.max_steps == 1.0
        return [0.0] * len(prompts)

    graded(look, met(tokenizer, ("p", ["12"], ["1"]), ("p", ["3"], ["4"]), ("q", ["5"], ["6"])))
    prompts, completions = ["p", "p", "p", "p", "q", "q"], ["12", "1", "3", "4", "5", "6"]
    assert seen == [(prompts, completions, [2, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2])]


def test_sets_have_columns_of_their_own(tokenizer):
    """A column that the first row lacks reaches the reward, and is None for the rows without one."""
    seen = {}

    def rewarded(completions, answer, tests, **columns):
        seen.update(answer=answer, tests=tests)
        return [1.0] * len(completions)

    written = met(tokenizer, ("p", ["x"], ["y"]), ("q", ["x"], ["y"]))
    for example, column in zip(written[0].examples, ({"answer": "1"}, {"tests": "t"}), strict=True):
        example |= column
    assert len(_graded(load_rewards(rewarded), written, 0.0, TrainerState(5, 5))) == 2
    assert seen == {"answer": ["1", "1", None, None], "tests": [None, None, "t", "t"]}


def test_rewards_see_the_images_of_a_prompt(config, tmp_path):
    """As in training: PIL images in the column images, and no pixels."""
    seen = {}

    def look(completions, images, **columns):
        seen.update(columns, images=images)
        return [1.0] * len(completions)

    config.model.path = str(smolvlm_folder(tmp_path))
    tokenizer = tokenizer_of(config)
    tokenize = RowTokenizer("prompts", tokenizer, images=ImageReader(tokenizer))
    rows = [{"prompt": "<image>what?", "images": [png(picture(16, 9))]}, {"prompt": "why?", "images": []}]
    examples = [{**tokenize(row), "set": ""} for row in rows]
    graded(look, [Samples(examples, [["a"], ["b"]], tokenizer)] * 2)
    assert [len(own) for own in seen["images"]] == [1, 1, 0, 0] and "pixels" not in seen
    assert seen["images"][0][0].tobytes() == picture(16, 9).tobytes()


def test_tokenizers_that_leave_out_different_prompts(config, tmp_path):
    """Before a model is read: the first has one token where the second has five."""
    for name, words in (("a", ["sort:"]), ("b", [])):
        shutil.copytree(EMBEDDED / "sort", tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        own = load_tokenizer(tmp_path / name)
        own.add_tokens(words)
        own.save_pretrained(tmp_path / name)
    config.rollout.max_prompt_length, config.data.overlong = 8, "filter"
    config.model.revision = "main"  # of another model, model.path
    rows = [{"prompt": "sort:1=", "answer": "1"}, {"prompt": "sort:4321=", "answer": "1234"}]
    with pytest.raises(ConfigError, match=r"leave out different prompts \(0 and 1 of 2\).*which is 8, or shorten"):
        compare(config, str(tmp_path / "a"), str(tmp_path / "b"), rows, length)


def test_a_judge_sees_each_pair_in_both_orders(tokenizer):
    """One that always takes the first place has no preference; one that takes the longer has."""
    written = met(tokenizer, ("p", ["123", "1"], ["12", "12"]), ("p", ["1234"], ["1"]))
    with JudgeServer(lambda body: "A") as server:
        pairs = graded(PairwiseJudge(server.url, "m", PAIR), written)
        assert [pair["winner"] for pair in pairs] == ["tie"] * 3
        assert sorted(asked(body) for body in server.bodies) == sorted(
            ["p|123|12", "p|12|123", "p|1|12", "p|12|1", "p|1234|1", "p|1|1234"]
        )

    def longer(body):
        _, a, b = asked(body).split("|")
        return "A" if len(a) > len(b) else "B"

    with JudgeServer(longer) as server:
        pairs = graded(PairwiseJudge(server.url, "m", PAIR), written)
    assert [pair["winner"] for pair in pairs] == ["a", "b", "a"]


@pytest.mark.slow
def test_models(config, tiny_run, tmp_path):
    """A model ties with itself; against another the rewards are those of evaluations of the two."""
    model, output = str(tiny_run.output_dir / "hf"), str(tmp_path / "n.json")
    assert compare(config, model, str(tiny_run.output_dir)).metrics["tie"] == 1.0
    flags = [f"--a={model}", "--b=embedded:sort", f"--pairs={tmp_path / 'p.jsonl'}", f"--output={output}"]
    main = importlib.import_module("jaxrl_llm.commands.compare").main
    main([f"--config={jaxrl_llm.__path__[0]}/../configs/grpo.py:tiny", *flags])
    found = json.loads((tmp_path / "n.json").read_text())
    for side, path in (("a", model), ("b", "embedded:sort")):
        config.model.path = path
        assert found[f"reward_{side}"] == pytest.approx(jaxrl_llm.evaluate(config)["eval/reward"])
    pairs = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(pairs) == found["pairs"] == 8 * 4
    assert found["win"] == sum(pair["winner"] == "a" for pair in pairs) / 32
    assert found["win"] + found["tie"] + found["loss"] == pytest.approx(1)


def test_what_a_comparison_needs(config, tmp_path, monkeypatch):
    module = importlib.import_module("jaxrl_llm.commands.compare")
    main = module.main
    with pytest.raises(ConfigError, match="--b is missing"):
        main(["--a=embedded:sort"])
    with pytest.raises(ConfigError, match="--pairs: there is no folder"):
        main(["--a=embedded:sort", "--b=embedded:sort", f"--pairs={tmp_path}/none/x.jsonl"])

    def length(completions, target, **columns):
        return [float(len(completion)) for completion in completions]

    monkeypatch.setattr(module, "completions_of", lambda *_: pytest.fail("it has sampled"))
    with pytest.raises(ConfigError, match=r"for the comparison: .*target"):
        compare(config, "embedded:sort", "embedded:sort", rewards=length)
    config.environment.name = "guess"
    with pytest.raises(ConfigError, match=r"environment.name is set"):
        compare(config, "embedded:sort", "embedded:sort")
