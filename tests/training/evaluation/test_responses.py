"""Responses of a file: how they are read and graded, and the numbers of verl's offline evaluation."""

import importlib
import json
import re

import datasets
import numpy as np
import pytest

from jaxrl_llm.commands.evaluate import evaluate_responses
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.training.evaluation import responses
from jaxrl_llm.training.evaluation.responses import read_responses

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = solution_str.split()[-1]
    return {"score": float(found == ground_truth) * (2 if data_source == "b" else 1), "pred": found}
"""


def verl_row(source, truth, *responses, **columns):
    ask = [{"role": "user", "content": "?"}]
    model = {"style": "rule", "ground_truth": truth}
    return {"data_source": source, "prompt": ask, "reward_model": model, "responses": list(responses), **columns}


ROWS = [
    verl_row("a", "2", "it is 2", "it is 3", "it is 3"),
    verl_row("a", "1", "1", "so 1"),
    verl_row("b", "3", "it is 3", "it is 3", "it is 4"),
]


def main_eval(rows, score) -> dict[str, float]:
    """verl's: the mean over a row's responses, then over the rows of each data source."""
    found = {}
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        scores = [score(row["data_source"], response, truth)["score"] for response in row["responses"]]
        found.setdefault(row["data_source"], []).append(np.mean(scores))
    return {source: np.mean(scores) for source, scores in found.items()}


@pytest.fixture
def score_file(tmp_path):
    (tmp_path / "my_score.py").write_text(SCORE)
    return str(tmp_path / "my_score.py")


def test_verls_numbers(score_file):
    scope = {}
    exec(SCORE, scope)
    found = evaluate_responses(default(), ROWS, score_file)
    expected = main_eval(ROWS, scope["compute_score"])
    assert {source: found[f"eval/{source}/reward"] for source in expected} == pytest.approx(expected)
    assert found["eval/reward"] == pytest.approx((1 / 3 + 1 + 4 / 3) / 3)
    assert found["eval/accuracy"] == pytest.approx((1 / 3 + 1 + 2 / 3) / 3)
    assert found["eval/b/maj@3"] == 1.0
    assert "eval/maj@2" in found and "eval/maj@3" not in found  # a row has two responses only


def test_rows_without_a_prompt_are_prompts_of_their_own():
    """A function that compares the responses of a prompt is told which they are."""
    seen = []

    def look(completions, prompt_numbers):
        seen.extend(prompt_numbers)
        return [0.0] * len(completions)

    evaluate_responses(default(), [{"responses": ["a", "b"]}, {"responses": ["c"]}], look)
    assert seen == [0, 0, 1]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_and_other_names_of_columns(kind, score_file, tmp_path, capsys):
    names = {"responses": "answers", "data_source": "source", "reward_model": "rm", "prompt": "question"}
    rows = [{names.get(name, name): value for name, value in row.items()} for row in ROWS]
    table, path = datasets.Dataset.from_list(rows), tmp_path / f"r.{kind}"
    table.to_parquet(path) if kind == "parquet" else table.to_json(path)
    flags = ["--response_key=answers", "--data_source_key=source", "--reward_model_key=rm", "--prompt_key=question"]
    importlib.import_module("jaxrl_llm.commands.evaluate").main(
        [f"--responses={path}", *flags, f"--config.rewards.functions={score_file}", f"--output={tmp_path / 'n.json'}"]
    )
    found = json.loads((tmp_path / "n.json").read_text())
    expected = evaluate_responses(default(), ROWS, score_file)
    assert found["prompts"] == 3
    assert {f"eval/{name}": value for name, value in found["metrics"].items()} == expected
    assert f"a/reward {expected['eval/a/reward']:.3f}" in re.sub(" +", " ", capsys.readouterr().out)


def test_texts_and_our_own_columns():
    rows = [{"prompt": "1+1=", "answer": "2", "responses": " 2 "}, {"prompt": "1+2=", "answer": "3", "responses": "4"}]
    names = ("reward", "accuracy", "pass@1", "rewards/exact_match/mean")
    assert evaluate_responses(default(), rows) == {f"eval/{name}": 0.5 for name in names}


def test_each_function_and_what_it_logs(monkeypatch):
    """Means over all responses to which a function applies, whatever batches they are graded in."""
    steps = []

    def format_score(completions, trainer_state, log_metric, **columns):
        steps.append(tuple(trainer_state))
        log_metric("mine/words", sum(map(len, completions)) / len(completions))
        return [{"score": float(len(x)), "acc": len(x) > 1} if "x" not in x else None for x in completions]

    rows = [{"prompt": "", "responses": ["a", "bb", "x"]}, {"prompt": "", "responses": ["cccc", "x"]}]
    config = default()
    config.total_steps = 7
    for at_once in (1024, 3, 2):
        monkeypatch.setattr(responses, "ROWS_AT_ONCE", at_once)
        found = evaluate_responses(config, rows, [format_score, lambda completions: [None] * len(completions)])
        assert found["eval/rewards/format_score/mean"] == pytest.approx(7 / 3), at_once
        assert found["eval/rewards/format_score/acc"] == pytest.approx(2 / 3), at_once
        assert found["eval/mine/words"] == pytest.approx(9 / 5), at_once
        assert [name for name, value in found.items() if np.isnan(value)] == ["eval/rewards/<lambda>/mean"]
    assert set(steps) == {(7, 7)}


def test_responses_of_a_prompt_are_graded_together(monkeypatch):
    """However many there are: a function may compare them."""
    calls = []

    def best(completions, prompt_numbers):
        calls.append(prompt_numbers)
        return [float(x == max(y for y, m in zip(completions, prompt_numbers, strict=True) if n == m))
                for x, n in zip(completions, prompt_numbers, strict=True)]  # fmt: skip

    monkeypatch.setattr(responses, "ROWS_AT_ONCE", 4)
    rows = [{"prompt": "a", "responses": ["1", "2", "3"]}, {"prompt": "a", "responses": ["9", "7", "8"]},
            {"prompt": "b", "responses": "1"}]  # fmt: skip
    assert evaluate_responses(default(), rows, best)["eval/reward"] == pytest.approx((1 / 3 + 1 / 3 + 1) / 3)
    assert [len(numbers) for numbers in calls] == [6, 1]


def test_a_response_without_content():
    """A message that calls a tool has none; its text is empty."""
    row = {"prompt": [{"role": "user", "content": "q"}], "answer": "2", "ground_truth": "2"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}
    names = ["exact_match", "boxed_accuracy", "gsm8k_accuracy", "numeric_answer", "think_format", "target_length"]
    found = evaluate_responses(default(), [row | {"responses": [[calls], [parts]]}], names)
    assert found["eval/rewards/exact_match/mean"] == found["eval/rewards/numeric_answer/mean"] == 0.5


def test_what_graders_see():
    seen = {}

    def look(prompts, completions, completion_ids, answer, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        return [1.0] * len(prompts)

    turn = {"role": "assistant", "content": "12"}
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "x", "responses": [[turn], [turn]]}]
    evaluate_responses(default(), rows, look)
    assert seen["completions"] == [[turn], [turn]]
    assert seen["answer"] == ["x", "x"]
    assert [len(ids) for ids in seen["ids"]] == [2, 2]  # of model.path's tokenizer, which has a token for each digit
    rows = [{**rows[0], "responses": ["12"]}]
    evaluate_responses(default(), rows, look)
    assert seen["completions"] == [[turn]]


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        (ROWS, {"responses": "response"}, r"no column 'response' \(--response_key\); they have data_source, prompt"),
        (ROWS, {"data_source": "sourc"}, r"no column 'sourc' \(--data_source_key\)"),
        ([{"prompt": "a", "responses": []}], {}, "row 0 of the responses has .* it takes a text"),
        ([{"prompt": "a", "responses": [["a"]]}], {}, "row 0 of the responses has .* it takes a text"),
        ([verl_row("a", "1", "2") | {"reward_model": {"style": "rule"}}], {}, "row 0.*ground_truth"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_graded(rows, keys, words):
    with pytest.raises(ConfigError, match=words):
        read_responses(rows, keys)


def test_keys_without_a_file(tmp_path):
    with pytest.raises(ConfigError, match="name it with --responses=FILE"):
        importlib.import_module("jaxrl_llm.commands.evaluate").main(["--response_key=x"])
    with pytest.raises(ConfigError, match=r"^--responses: there is no file or folder '[^;]*$"):
        importlib.import_module("jaxrl_llm.commands.evaluate").main([f"--responses={tmp_path}/r.parquet"])
