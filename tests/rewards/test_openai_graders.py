"""OpenAI's graders of reinforcement fine-tuning, in Python and in JSON."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.rewards.openai_graders import OpenAIGrader
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.rewards.signatures import RewardError
from tests.rewards.judge_server import JudgeServer, asked


def score(reward, completions, **columns):
    rows = len(completions)
    return load_rewards(reward).submit(["p"] * rows, completions, [[0]] * rows, columns).result()


def check(operation, text="{{ sample.output_text }}", reference="{{item.answer}}"):
    return {"type": "string_check", "name": "c", "input": text, "reference": reference, "operation": operation}


@pytest.mark.parametrize(
    ("operation", "rewards"),
    [("eq", [1, 0, 0]), ("ne", [0, 1, 1]), ("neq", [0, 1, 1]), ("like", [1, 0, 1]), ("ilike", [1, 1, 1])],
)
def test_string_checks(operation, rewards):
    graded = score(OpenAIGrader(check(operation)), ["Yes", "yes", "Yes."], answer=["Yes"] * 3)
    assert graded.rewards[:, 0].tolist() == rewards


def test_variables_reach_into_rows_and_json():
    grader = check("eq", "{{sample.output_json.sums[1].total}}", "{{item.want.n}}")
    completions = ['{"sums": [0, {"total": 7}]}', "no JSON", [{"role": "assistant", "content": '{"sums": []}'}]]
    assert score(OpenAIGrader(grader), completions, want=[{"n": 7}] * 3).rewards[:, 0].tolist() == [1, 0, 0]
    with pytest.raises(RewardError, match=r"reads \{\{item.wanted\}\}, which the row lacks; its columns are want"):
        score(OpenAIGrader(check("ne", reference="{{item.wanted}}")), ["a"], want=["b"])


def test_what_lacks_is_never_compared():
    """Not even with `ne`, or as the text `null`: a completion's earns 0, a null column gives no reward."""
    for operation in ("eq", "ne"):
        no_json = OpenAIGrader(check(operation, "{{sample.output_json}}", "null"))
        assert score(no_json, ["no JSON"]).rewards[:, 0].tolist() == [0]
        nothing = score(OpenAIGrader(check(operation)), ["null", "a"], answer=[None, "a"]).rewards[:, 0]
        assert np.isnan(nothing[0]) and nothing[1] == (operation == "eq")
    both = {"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "2 * a"}
    assert np.isnan(score(OpenAIGrader(both), ["a"], answer=[None]).rewards).all()


def test_python_graders():
    def grade(sample, item):
        assert sample["choices"][0]["message"]["role"] == "assistant" and sample["output_tools"] == []
        return float(sample["output_text"] == item["answer"]) + float(sample["output_json"] == 4)

    async def waits(sample, item):
        return grade(sample, item)

    for function in (grade, waits):
        graded = score(function, ["4", [{"role": "assistant", "content": "5"}]], answer=["4", "5"])
        assert graded.rewards[:, 0].tolist() == [2, 1]


def test_multi_adds_up_what_it_holds(tmp_path, monkeypatch):
    source = (
        "import math\n\ndef grade(sample: dict, item: dict) -> float:\n    return math.sqrt(len(sample['output_text']))"
    )
    inner = {"right": check("like"), "long": {"type": "python", "name": "p", "source": source}}
    grader = {"type": "multi", "name": "both", "graders": inner, "calculate_output": "2 * right + max(long, 1) ^ 2 / 4"}
    (tmp_path / "grader.json").write_text(json.dumps({"grader": grader}))
    monkeypatch.chdir(tmp_path)
    graded = score("grader.json", ["4444", "5"], answer=["4", "4"])
    assert graded.rewards[:, 0].tolist() == [3.0, 0.25]
    assert graded.logged.metrics == {
        "rewards/both/right": [0.5], "rewards/both/long": [1.5], "rewards/both/invalid": [0.0],
    }  # fmt: skip


def test_the_output_of_multi_is_not_that_of_a_grader_named_score():
    inner = {"score": check("eq"), "long": check("like", reference="a")}
    grader = {"type": "multi", "graders": inner, "calculate_output": " -score + 2 * long"}
    graded = score(OpenAIGrader(grader), ["a", "b"], answer=["a", "a"])
    assert graded.rewards[:, 0].tolist() == [1, 0]
    assert graded.logged.metrics == {"rewards/openai_grader/long": [0.5], "rewards/openai_grader/invalid": [0.0]}


def test_a_formula_without_a_value_scores_0():
    """Such as log(0): a completion that a grader gives 0 would end the run."""
    for formula, error in (
        ("log(a)", "ValueError"),
        ("1 / a", "ZeroDivisionError"),
        ("(a - 1) ^ 0.5", "no finite number"),
        ("0 * 9 ^ 9 ^ (9 - 8 * a)", "OverflowError"),  # of integers it would take for ever
    ):
        grader = {"type": "multi", "name": "m", "graders": {"a": check("eq")}, "calculate_output": formula}
        with pytest.warns(UserWarning, match=f"calculate_output of the grader 'm' .*{error}.*: score 0"):
            graded = score(OpenAIGrader(grader), ["a", "b"], answer=["a", "a"])
        assert graded.rewards[:, 0].tolist() == [float(formula == "1 / a"), 0]
        assert graded.logged.metrics == {"rewards/m/a": [0.5], "rewards/m/invalid": [0.5]}


def test_a_python_grader_is_a_module():
    """In which dataclasses find the names of annotations that are texts."""
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Grade:\n"
        "    x: float\ndef grade(sample, item):\n    return Grade(len(sample['output_text'])).x"
    )
    assert score(OpenAIGrader({"type": "python", "name": "json", "source": source}), ["abc"]).rewards.tolist() == [[3]]
    assert json.loads("3") == 3


def test_a_python_grader_that_fails_on_a_completion_scores_0():
    """As at OpenAI: else what no grader can read would end the run, or go unpunished."""
    source = "import json\ndef grade(sample, item): return json.loads(sample['output_text'])['x']"
    grader = {"type": "python", "name": "p", "source": source}
    texts = ['{"x": 0.5}', "oops", '{"x": NaN}', '{"x": "1"}', '{"x": null}', '{"x": true}']
    with pytest.warns(UserWarning, match="score 0") as warned:
        graded = score(OpenAIGrader(grader), texts)
    assert str(warned[0].message).startswith("the source of the grader 'p' raised JSONDecodeError")
    assert "returned nan, no finite number: score 0" in str(warned[1].message)
    assert graded.rewards[:, 0].tolist() == [0.5, 0, 0, 0, 0, 1]
    assert graded.logged.metrics == {"rewards/p/invalid": [pytest.approx(4 / 6)]}
    both = {"type": "multi", "name": "m", "graders": {"p": grader}, "calculate_output": "p + 1"}
    with pytest.warns(UserWarning, match="score 0"):
        graded = score(OpenAIGrader(both), texts[:2])
    assert graded.rewards[:, 0].tolist() == [1.5, 1] and graded.logged.metrics["rewards/m/invalid"] == [0.5]


ALIKE = {"type": "text_similarity", "name": "a", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
ASKED = [
    {"role": "developer", "content": "Grade."},
    {"role": "user", "content": [{"type": "input_text", "text": "Is {{sample.output_text}} "}, "{{item.answer}}?"]},
]
SCORED = {"type": "score_model", "name": "s", "model": "gpt", "input": ASKED}
LABELLED = {**SCORED, "type": "label_model", "name": "l", "labels": ["good", "bad"], "passing_labels": ["good"]}


def test_text_similarity():
    graded = score(OpenAIGrader({**ALIKE, "evaluation_metric": "rouge_l"}), ["a b c", "c"], answer=["a c", None])
    assert graded.rewards[0, 0] == np.float32(0.8) and np.isnan(graded.rewards[1, 0])


def test_models_give_scores_and_labels():
    """In the form that OpenAI's graders ask for; what a completion lacks is not asked, a refusal counts 0."""
    replies = {"one": 10**400, "two": 0.25, "three": None, "four": math.inf}

    def answer(body):
        if body["model"] == "labels":
            return json.dumps({"steps": [], "result": "good" if "Is one" in asked(body) else "bad"})
        found = next(value for name, value in replies.items() if f"Is {name} " in asked(body))
        return json.dumps({"steps": [{"description": "{", "conclusion": "x"}], "result": found})

    sampling = {"seed": 1, "max_completions_tokens": 64}
    inner = {
        "scored": {**SCORED, "range": [-1, 2], "sampling_params": sampling},
        "labelled": {**LABELLED, "model": "labels"},
        "same": check("eq"),
    }
    multi = {
        "type": "multi",
        "name": "all",
        "graders": inner,
        "calculate_output": "scored + 10 * labelled + 100 * same",
    }
    with JudgeServer(answer) as server:
        reward = OpenAIGrader(multi, server={"url": server.url})
        graded = score(reward, ["one", "two", "four", "three"], answer=["one", "1", "1", None])
        reward.close()
        of_server = {key: value for key, value in inner["scored"].items() if key != "model"}
        alone = OpenAIGrader(of_server, server={"url": server.url, "model": "mine"})
        scored = score(alone, ["two", "three", "four"], answer=["1"] * 3)
        alone.close()
    assert graded.rewards[:3, 0].tolist() == [112, 0.25, 0] and np.isnan(graded.rewards[3, 0])
    assert graded.logged.metrics["rewards/all/unreadable"] == [pytest.approx(1 / 3)]
    assert scored.rewards[:, 0].tolist() == [0.25, 0, 0]
    assert scored.logged.metrics == {"rewards/s/unreadable": [pytest.approx(2 / 3)]}
    spent = {name: scored.logged.totals[f"s/{name}"] for name in ("requests", "prompt_tokens", "failures")}
    assert spent == {"requests": 3, "prompt_tokens": 300, "failures": 0}
    assert graded.logged.totals["all/requests"] == len(server.bodies) - 3 > 4  # of both models
    body = next(body for body in server.bodies if body["model"] == "mine")
    assert body["messages"][0] == {"role": "system", "content": "Grade."} and "temperature" not in body
    assert (body["seed"], body["max_completion_tokens"]) == (1, 64)
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["steps", "result"] and schema["properties"]["result"] == {"type": "number"}
    load_rewards(f"openai_grader(grader={SCORED!r}, server={{'url': 'http://h/v1'}})").close()
    with pytest.raises(RewardError, match="the server of the grader 's' has 'urls'; it takes url, model"):
        OpenAIGrader(SCORED, server={"urls": server.url})


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("nosuch.json", "there is no file nosuch.json"),
        ({"type": "endpoint", "name": "m"}, "label_model and multi. For endpoint, write an async function grade"),
        ({**ALIKE, "evaluation_metric": "meteor"}, "the metric meteor of the grader 'a' counts WordNet's synonyms"),
        ({**ALIKE, "evaluation_metric": "cosine"}, "the metric cosine of the grader 'a' compares embeddings"),
        ({**ALIKE, "evaluation_metric": "rouge"}, "evaluation_metric of the grader 'a' is 'rouge'; it is fuzzy_match"),
        (SCORED, "'s' asks the model 'gpt': name the server that has it, openai_grader"),
        ({**SCORED, "range": [1, 0]}, r"the range of the grader 's' is \[1, 0\]; it is two numbers"),
        ({**LABELLED, "passing_labels": ["great"]}, "passing label 'great' of the grader 'l' is none of its labels"),
        ({**LABELLED, "labels": "good"}, "labels of the grader 'l' is 'good'; it is a list of texts"),
        (check("eq", reference="{{ items.answer }}"), r"'c' has \{\{ items.answer \}\}, which is no variable"),
        (check("eq", "{{sample.text}}"), r"'c' has \{\{sample.text\}\}, which is no variable"),
        (check("eq", reference=5), "the grader 'c' has 5 in the place of a text"),
        ({**check("eq"), "operation": ["eq"]}, r"is \['eq'\]; it is eq, ne"),
        ({"type": "python", "source": "async def grade(sample, item): return 1"}, "defines no plain function grade"),
        ({"type": "multi", "graders": [check("eq")], "calculate_output": "a"}, "it has graders by name"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "'a'"}, "has 'a'; it may have"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "2(a)"}, r"has 2\(a\); it may have"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "a + max"}, "has max; it may have"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "a % 2"}, "has a % 2; it may have"),
        ([1], r"'openai_grader' is \[1\]; its type"),
        ({**check("eq"), "operation": "is"}, "operation of the grader 'c' is 'is'; it is eq, ne, neq, like, ilike"),
        (
            {"type": "string_check", "name": "c", "operation": "eq", "input": "a"},
            "'c' of type string_check has no 'reference'",
        ),
        ({"type": "python", "source": "x = 1 / 0"}, "raised ZeroDivisionError"),
        ({"type": "python", "source": "def score(): pass"}, r"defines no plain function grade\(sample, item\)"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "a +"}, "'a \\+', which is no formula"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "b"}, "has b; it may have the graders a"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "a.real"}, "has a.real; it may have"),
    ],
)
def test_wrong_graders_are_refused_when_they_are_made(grader, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=message):
        OpenAIGrader(grader)
