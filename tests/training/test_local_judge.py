"""Judges whose model the run loads itself; tests/serving/test_judges.py compares them with served ones."""

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.rewards.combined import CombinedGrader
from jaxrl_llm.rewards.judge import Judge, PairwiseJudge
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.training.local_judge import LocalJudge, with_local_model
from jaxrl_llm.training.setup.sources import build_rewards

SORT = "template='sort:{{ completion }}=', scale=(0, 1e13), parameters={'max_tokens': 12}"


def grade(judge, completions, **options):
    """The rewards and what the judge logged."""
    rewards = load_rewards(judge, **options)
    rows = len(completions)
    graded = rewards.submit(["p"] * rows, completions, [[1]] * rows, {}).result()
    rewards.close()
    return graded.rewards[:, 0].tolist(), graded.logged.totals


def replies(judge, texts, attempt):
    """The judge's replies to texts, which it is asked for together."""
    endpoint, memory = judge.judge.endpoint, {}
    asked = endpoint.gather(*(endpoint.ask([{"role": "user", "content": x}], memory, attempt) for x in texts))
    with pytest.raises(StopIteration) as end:
        asked.send(None)
    return [answer.text for answer in end.value.value]


def tiny(root, tmp_path, *functions):
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.rewards.functions = functions
    return config


def test_judges_with_one_path_share_one_model(root, tmp_path):
    """Those of names, of files and in memory, each with its own template, lengths and parameters."""
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.rewards.judge import PairwiseJudge\njudge = PairwiseJudge(path='embedded:sort', rows=2)\n"
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    functions = (
        f"judge(path='embedded:sort', {SORT})",
        f"judge(path='embedded:sort', {SORT}, name='plain', chat_template='{template}', max_length=64)",
        f"{tmp_path / 'mine.py'}:judge",
        f"judge(path='embedded:sort', {SORT}, name='other', dtype='bfloat16')",
    )
    rewards = build_rewards(tiny(root, tmp_path, *functions))
    params = [grader.judge.endpoint.model.params["embed"]["weight"] for grader in rewards.graders]
    assert params[0] is params[1] is params[2] and params[3] is not params[0] and params[3].dtype == "bfloat16"
    assert rewards.names == ("judge", "plain", "pairwise_judge", "other") and not rewards.takes_rows
    rewards.close()


@pytest.mark.slow
def test_replies_that_are_drawn_are_asked_for_again():
    """At a temperature another reply is drawn for each try, the same ones for the same batch."""
    options = {"path": "embedded:sort", "template": "sort:21=", "pattern": "no such text"}
    options |= {"tries": 3, "on_failure": "none"}
    for temperature, requests in ((0.0, 1), (2.0, 3)):
        judge = LocalJudge(Judge(**options, parameters={"max_tokens": 4, "temperature": temperature}))
        with pytest.warns(UserWarning, match="could not judge row"):
            rewards, totals = grade(judge, ["a", "b"])
        assert np.isnan(rewards).all() and totals["judge/requests"] == requests
        assert totals["judge/unreadable"] == 6
    drawn = [replies(judge, list("12345678"), attempt) for attempt in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) > 4


def test_rows_fail_as_with_a_server():
    options = {"template": "sort:{{ completion }}=", "scale": None, "parameters": {"max_tokens": 8}}
    judge = LocalJudge(Judge(path="embedded:sort", max_length=32, **options))
    with pytest.raises(ConfigError, match=r"could not judge row 1: the prompt has \d+ tokens and its reply up to 8"):
        grade(judge, ["1", "2" * 50])
    with pytest.raises(ConfigError, match=r"template of the judge 'judge': 'anwser' is undefined; it may use"):
        grade(LocalJudge(Judge(path="embedded:sort", template="{{ anwser }}")), ["1", "2"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has neither url nor path; give url and model of a server, or the path"),
        ({"path": "embedded:sort", "url": "http://x/v1", "model": "m"}, "has both url and path"),
        ({"url": "http://x/v1"}, "has a url, but no model"),
        ({"path": "embedded:sort", "model": "m"}, "has a path, beside which it has no model"),
        ({"path": "embedded:sort", "cache": "c"}, "has a path, beside which it has no cache"),
        ({"url": "http://x/v1", "model": "m", "rows": 4}, "has a url, beside which it has no rows"),
    ],
)
@pytest.mark.parametrize("kind", [Judge, PairwiseJudge])
def test_a_judge_has_a_url_or_a_path(kind, options, message):
    with pytest.raises(ConfigError, match=f"the judge '(pairwise_)?judge' {message}"):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "embedded:nothing"}, "nothing"),
        ({"parameters": {"max_token": 3}}, "the parameter 'max_token'; .* the closest is max_tokens"),
        ({"parameters": {"rows": 3}}, "the parameter 'rows'"),
        ({"parameters": {"temperature": -1}}, "has temperature = -1; it takes a number >= 0"),
        ({"parameters": {"chat_template_kwargs": 1}}, "has chat_template_kwargs = 1; it takes a dictionary"),
        ({"rows": 0}, "has rows = 0; it takes an integer >= 1"),
        ({"max_length": 8, "parameters": {"max_tokens": 8}}, "has max_tokens = 8, but its rows have 8 tokens"),
        ({"max_length": 10**7}, "max_length of the judge 'judge'"),
        ({"chat_template": "chatlm"}, "the chat_template of the judge 'judge' is 'chatlm'"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "the chat template refused the messages"),
    ],
)
def test_wrong_settings_are_seen_when_the_model_is_loaded(options, message):
    with pytest.raises(ConfigError, match=message):
        LocalJudge(Judge(**{"path": "embedded:sort", **options}))


def test_a_judge_without_its_model():
    judge = Judge(path="embedded:sort")
    with pytest.raises(ConfigError, match="whose model a run loads for a reward of its own"):
        grade(judge, ["1"])
    combined = CombinedGrader([len, CombinedGrader([judge], name="inner")])
    with pytest.raises(ConfigError, match=r"'judge' has a path and is part of 'combined'.*rewards\.weights"):
        with_local_model(combined, {})


@pytest.mark.slow
def test_a_run_is_judged_by_a_model_of_its_own(root, tmp_path):
    config = tiny(root, tmp_path, f"judge(path='embedded:sort', {SORT}, rows=8)", "exact_match")
    config.eval.every = -1
    result = jaxrl_llm.train(config)
    assert len(result.metrics) == 2
    for line in result.metrics:
        assert line["judge/requests"] > 0 and line["judge/completion_tokens"] > line["judge/requests"]
        assert 0 <= line["rewards/judge/mean"] <= 1 and np.isfinite(line["loss"])
