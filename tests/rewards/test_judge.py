"""Judges against a real HTTP server on this machine."""

import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards.combined import CombinedGrader
from jaxrl_llm.rewards.endpoint import _retry_after
from jaxrl_llm.rewards.judge import Judge, PairwiseJudge, shown
from jaxrl_llm.rewards.replies import ReplyError, json_objects, read_rubric, read_score, read_winner
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.rewards.signatures import RewardError
from tests.rewards.judge_server import JudgeServer, asked, completion


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(judge, completions, prompts=None, columns=None, **options):
    rows = len(completions)
    prompts = prompts or ["q"] * rows
    rewards = load_rewards(judge, **options)
    try:
        return rewards.submit(prompts, completions, [[1]] * rows, columns or {}).result()
    finally:
        rewards.close()


def by_completion(scores):
    """An answer that finds one of the completions in the request and gives its text."""
    return lambda body: next(text for name, text in scores.items() if f"<{name}>" in asked(body))


TEMPLATE = "{{ prompt }} <{{ completion }}>"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("how many?", "how many?"),
        ([{"role": "user", "content": "how many?"}], "how many?"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}], "<image>how many?"),
        (
            [{"role": "system", "content": [{"type": "text", "text": "count"}]}, {"role": "tool", "content": None}],
            "system: count\n\ntool: ",
        ),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": []}], "user: q\n\nassistant: "),
    ],
)
def test_a_prompt_is_shown_as_text(prompt, text):
    """Contents in parts, as rows with images have them, are no Python to a judge."""
    assert shown(prompt) == text


# --- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ('{"score": 7}', {}, 0.7),
        ('Well.\n```json\n{"reason": "ok {", "score": 10}\n```', {}, 1.0),
        ("I give it 8/10.", {}, 0.8),
        ("3 out of 10, or .5 of 10", {}, 0.05),
        ("Score: **3** out of 10", {}, 0.3),
        ("3 out of 10", {}, 0.3),
        ("First 3, no: 4", {}, 0.4),
        ("Score: 8 (out of 10)", {}, 0.8),
        ("The score is **8**, for it has 3 errors.\nConfidence: 5", {}, 0.8),
        ("Score (0-10): 6. Rating: [[7]], 2 reasons", {}, 0.7),
        ("Score: 2.5\nLength: 9", {"pattern": r"Score:\s*([\d.]+)"}, 0.25),
        ("[[6]]", {"pattern": r"\[\[(\d+)\]\]"}, 0.6),
        ('{"rating": "5"}', {"field": "rating"}, 0.5),
        ('{"score": "8/10"}', {}, 0.8),
        ('{"score": "8 out of 10", "length": 9}', {}, 0.8),
        ("-3.5", {"scale": None}, -3.5),
        ("3", {"scale": (1, 5)}, 0.5),
    ],
)
def test_scores_are_read(text, options, score):
    options = {"pattern": None, "field": "score", "scale": (0, 10)} | options
    assert read_score(text, **options) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "pattern", "message"),
    [
        ("no idea", None, "the reply holds no number: 'no idea'"),
        ("11", None, "the score 11 is not between 0 and 10"),
        ('{"score": true}', None, "the score True is no number"),
        ('{"score": null}', None, "the score None is no number"),
        ("7", r"Score: (\d+)", "the reply does not match"),
    ],
)
def test_replies_without_a_score(text, pattern, message):
    with pytest.raises(ReplyError, match=re.escape(message)):
        read_score(text, pattern, "score", (0, 10))


def test_rubrics_and_winners_are_read():
    score, each = read_rubric('{"right": 10, "clear": 5}', {"right": 3.0, "clear": 1.0}, (0, 10))
    assert score == pytest.approx((3 * 1.0 + 0.5) / 4) and each == {"right": 1.0, "clear": 0.5}
    with pytest.raises(ReplyError, match="no JSON object with right, clear"):
        read_rubric('{"right": 10}', {"right": 3.0, "clear": 1.0}, (0, 10))
    assert [read_winner(text) for text in ("A", "**B**", "It is a tie.", "A is longer, but: B")] == [1, 0, 0.5, 0]
    verdicts = ("B is longer, so the verdict is [[A]].", "[[A]], no: [[C]]", "A or B? [[A>>B]]", "[[B > A]]", "[[A=B]]")
    assert [read_winner(text) for text in verdicts] == [1, 0.5, 1, 0, 0.5]
    assert [read_winner(text) for text in ("A. It is clearer than B.", "**A**\n\nB is wrong", "A tie")] == [1, 1, 0.5]
    verdicts = ("A: long.\nB: short.\n**Verdict: A**", "A is right, B is wrong. [[A]]\n", "A and B agree: tie!")
    assert [read_winner(text) for text in verdicts] == [1, 1, 0.5]
    for text in ("A is better than B.", "B is worse than A", "A: bad. B: good."):
        with pytest.raises(ReplyError, match="names a and b, and no one alone"):
            read_winner(text)
    with pytest.raises(ReplyError, match="names neither A nor B"):
        read_winner("Neither")
    assert list(json_objects('x {"a": {"b": 1}} { {"c": 2}')) == [{"a": {"b": 1}}, {"c": 2}]


# --- scores -----------------------------------------------------------------------------------------------------------


def test_a_judge_by_name_with_a_template_file(tmp_path):
    (tmp_path / "judge.txt").write_text(
        "Rate {{ completion }} against {{ answer }} for {{ prompt }}, 0 to {{ high }}.\n"
    )
    with JudgeServer(lambda body: '{"score": 8}' if "good" in asked(body) else "2") as server:
        spec = f"judge(url='{server.url}', model='m', template='{tmp_path}/judge.txt', prices=(1.0, 20.0))"
        graded = ask(spec, ["good", [{"role": "assistant", "content": "bad"}]], columns={"answer": ["x", "y"]})
    np.testing.assert_allclose(graded.rewards, [[0.8], [0.2]], rtol=1e-6)
    texts = sorted(asked(body) for body in server.bodies)
    assert texts == ["Rate bad against y for q, 0 to 10.\n", "Rate good against x for q, 0 to 10.\n"]
    assert {body["model"] for body in server.bodies} == {"m"} and server.bodies[0]["temperature"] == 0.0
    totals = graded.logged.totals
    assert totals["judge/requests"] == 2 and totals["judge/failures"] == 0
    assert (totals["judge/prompt_tokens"], totals["judge/completion_tokens"]) == (200, 20)
    assert totals["judge/cost"] == pytest.approx((200 * 1 + 20 * 20) / 1e6)


def test_conversations_system_messages_and_parameters():
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with JudgeServer(lambda body: "10") as server:
        judge = Judge(server.url, "m", TEMPLATE, system="You judge.", parameters={"max_tokens": 5, "temperature": 1})
        assert ask(judge, [[{"role": "assistant", "content": "hello"}]], [prompt]).rewards.tolist() == [[1.0]]
    [body] = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "You judge."}
    assert asked(body) == "system: be brief\n\nuser: hi <hello>"
    assert (body["max_tokens"], body["temperature"]) == (5, 1)


def test_a_rubric_logs_each_criterion():
    answer = by_completion({"a": '{"right": 10, "clear": 0}', "b": '{"right": 0, "clear": 10}'})
    with JudgeServer(answer) as server:
        graded = ask(Judge(server.url, "m", TEMPLATE, criteria={"right": 3, "clear": 1}), ["a", "b"])
    np.testing.assert_allclose(graded.rewards[:, 0], [0.75, 0.25])
    assert graded.logged.metrics == {"rewards/judge/right": [0.5], "rewards/judge/clear": [0.5]}
    assert graded.logged.columns["judge/right"] == [1.0, 0.0]


def test_the_default_template_asks_for_what_is_read():
    with JudgeServer(lambda body: '{"right": 10, "clear": 10}' if "right, clear" in asked(body) else "5") as server:
        assert ask(Judge(server.url, "m"), ["x"]).rewards.tolist() == [[0.5]]
        assert ask(Judge(server.url, "m", criteria={"right": 1, "clear": 1}), ["x"]).rewards.tolist() == [[1.0]]
        assert ask(Judge(server.url, "m", scale=None), ["x"]).rewards.tolist() == [[5.0]]
    assert "# Task\nq\n\n# Answer\nx" in asked(server.bodies[0])
    first = [asked(body).partition("\n")[0] for body in server.bodies]
    assert first[0] == "Rate how well the answer solves the task, from 0 (useless) to 10 (perfect)."
    assert first[2] == "Rate how well the answer solves the task."


def test_a_column_of_criteria_is_shown_by_a_template_that_names_it():
    """It was hidden by the judge's own criteria, of which there were none."""
    with JudgeServer(lambda body: "5") as server:
        columns = {"criteria": ["be brief"], "low": [3]}
        judge = Judge(server.url, "m", "{{ completion }}: {{ criteria }}, {{ low }} to {{ high }}")
        assert ask(judge, ["a"], columns=columns).rewards.tolist() == [[0.5]]
        assert asked(server.bodies[-1]) == "a: be brief, 3 to 10"
        ask(Judge(server.url, "m"), ["a"], columns=columns)
        assert "from 0 (useless) to 10" in asked(server.bodies[-1]) and "be brief" not in asked(server.bodies[-1])


def test_a_completion_is_not_read_as_a_template():
    with JudgeServer(lambda body: "1") as server:
        ask(Judge(server.url, "m", TEMPLATE), ["{{ prompt.__class__ }}"])
    assert asked(server.bodies[0]) == "q <{{ prompt.__class__ }}>"


# --- comparisons ------------------------------------------------------------------------------------------------------

PAIR = "{{ prompt }} <{{ a }}|{{ b }}>"


def prefers(first, second):
    """The reply of a judge that prefers the longer answer."""
    return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


def test_pairwise_wins_within_each_prompt():
    def answer(body):
        prompt, first, second = re.fullmatch(r"(.) <(.*)\|(.*)>", asked(body)).groups()
        assert {len(first), len(second)} < ({1, 2, 3} if prompt == "p" else {5, 6})
        return prefers(first, second)

    with JudgeServer(answer) as server:
        graded = ask(PairwiseJudge(server.url, "m", PAIR), ["a", "bb", "ccc", "ddddd", "eeeee"], ["p"] * 3 + ["q"] * 2)
    assert graded.rewards[:, 0].tolist() == [0.0, 0.5, 1.0, 0.5, 0.5]
    assert len(server.bodies) == 3 * 2 + 2


def test_prompts_of_one_text_are_told_apart():
    """Rows with other images, or of other environments; in a sum of graders too, and where rows are graded again."""
    with JudgeServer(lambda body: prefers(*re.fullmatch(r"p <(.*)\|(.*)>", asked(body)).groups())) as server:
        judge = PairwiseJudge(server.url, "m", PAIR)
        for spec in (judge, CombinedGrader([judge])):
            rewards = load_rewards(spec)
            graded = rewards.submit(["p"] * 4, ["a", "bb", "ccc", "dddd"], [[1]] * 4, {}, prompt_numbers=[7, 7, 8, 8])
            assert graded.result().rewards[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
        assert len(server.bodies) == 2 * 2 * 2
        rewards = load_rewards(judge)
        with pytest.raises(RewardError, match="prompt_numbers has 1 value for 2 prompts"):
            rewards.submit(["p"] * 2, ["a", "bb"], [[1]] * 2, {}, prompt_numbers=[0])


def test_both_orders_cancel_position_bias():
    with JudgeServer(lambda body: "A") as server:
        assert ask(PairwiseJudge(server.url, "m", PAIR), ["a", "b"], ["p"] * 2).rewards[:, 0].tolist() == [0.5, 0.5]
        one = PairwiseJudge(server.url, "m", PAIR, both_orders=False)
        assert ask(one, ["a", "b"], ["p"] * 2).rewards[:, 0].tolist() == [1.0, 0.0]


def test_a_completion_without_comparison_gets_none():
    with JudgeServer(lambda body: "who knows") as server:
        judge = PairwiseJudge(server.url, "m", PAIR, on_failure="none", tries=1)
        with pytest.warns(UserWarning, match="could not judge row [01]: the reply names neither"):
            assert np.isnan(ask(judge, ["a", "b", "c"], ["p", "p", "q"]).rewards).all()


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(times, status=503, headers=None):
    """An answer that fails `times` times, then gives 10."""
    left = [times]

    def answer(body):
        left[0] -= 1
        return (status, headers or {}, b"overloaded") if left[0] >= 0 else "10"

    return answer


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass_are_asked_again(status):
    with JudgeServer(failing(2, status)) as server:
        graded = ask(Judge(server.url, "m", backoff=0.01), ["a"])
    assert graded.rewards.tolist() == [[1.0]]
    assert graded.logged.totals["judge/retries"] == 2 and graded.logged.totals["judge/requests"] == 3


def test_retry_after_is_kept():
    with JudgeServer(failing(1, 429, {"Retry-After": "0.4"})) as server:
        ask(Judge(server.url, "m", backoff=0.001), ["a"])
    assert server.times[1] - server.times[0] >= 0.4
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0 and _retry_after("soon") is None


def test_pauses_double_with_jitter():
    judge = Judge("http://127.0.0.1:1/v1", "m", backoff=1.0)
    random.seed(0)
    for attempt, grown in enumerate((1, 2, 4, 8)):
        pauses = [judge.endpoint._pause(attempt, None) for _ in range(200)]
        assert grown / 2 <= min(pauses) < 0.6 * grown and 0.9 * grown < max(pauses) <= grown
    assert judge.endpoint._pause(20, None) == judge.endpoint._pause(0, 1e6) == 60.0


def test_refusals_are_final_and_quote_the_server():
    with (
        JudgeServer(failing(9, 400)) as server,
        pytest.raises(RewardError, match=r"judge 'judge' could not judge row 0: .* answered HTTP 400: 'overloaded'"),
    ):
        ask(Judge(server.url, "m", backoff=0.01), ["a"])
    assert len(server.bodies) == 1


def test_the_key_is_in_the_header_and_nowhere_else(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    judge = None
    with JudgeServer(lambda body: (401, {}, b"wrong key: sk-secret")) as server:
        judge = Judge(server.url, "m", cache=str(tmp_path))
        with pytest.raises(RewardError) as caught:
            ask(judge, ["a"])
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "wrong key: [key]" in str(caught.value) and "sk-secret" not in str(caught.value)
    with JudgeServer(lambda body: "5") as server:
        ask(Judge(server.url, "m", cache=str(tmp_path)), ["a"])
    entries = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert len(entries) == 1 and "sk-secret" not in entries[0] and "sk-secret" not in repr(vars(judge.endpoint))
    with pytest.raises(ConfigError, match="environment variable MY_KEY, which is not set"):
        Judge(server.url, "m", key="MY_KEY")


def test_redirects_are_refused(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with JudgeServer(lambda body: "10") as target:
        there = f"{target.url}/chat/completions"
        with (
            JudgeServer(lambda body: (307, {"Location": there}, b"")) as server,
            pytest.raises(RewardError, match="307"),
        ):
            ask(Judge(server.url, "m"), ["a"])
    assert not target.bodies


def test_slow_answers_run_into_the_attempts_limit():
    release = threading.Event()
    with JudgeServer(lambda body: release.wait(20) and "10") as server:
        judge = Judge(server.url, "m", timeout=0.1, attempts=2, backoff=0.01, on_failure=-0.5)
        with pytest.warns(UserWarning, match="could not judge row 0: .* failed 2 attempts, the last time: .*timed out"):
            graded = ask(judge, ["a"])
        release.set()
    assert graded.rewards.tolist() == [[-0.5]]
    assert graded.logged.totals["judge/failures"] == graded.logged.totals["judge/failed_rows"] == 1


class Slow:
    """A reply of one byte each 20 ms, without an end."""

    def reply(self, write):
        while True:
            write(b" ")
            time.sleep(0.02)


class Huge:
    def reply(self, write):
        for _ in range(4000):
            write(b"x" * 2**20)


class SlowHead:
    """Not even the headers end."""

    def reply(self, write):
        write(b"HTTP/1.1 200 OK\r\n")
        while True:
            write(b"A: b\r\n")
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Slow, "timed out: there was no complete reply"),
        (SlowHead, "timed out"),
        (Huge, "more than 16777216 b"),
    ],
)
def test_replies_without_an_end(kind, said):
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if kind is not SlowHead:
                self.send_response(200)
                self.end_headers()

            def write(data):
                self.wfile.write(data)
                sent.append(len(data))

            with contextlib.suppress(OSError):
                kind().reply(write)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        judge = Judge(url, "m", timeout=0.5 if kind is not Huge else 20, attempts=1, on_failure="none")
        began = time.monotonic()
        with pytest.warns(UserWarning, match=said):
            assert np.isnan(ask(judge, ["a"]).rewards).all()
        assert time.monotonic() - began < 15 and sum(sent) < 200 * 2**20
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"score":' * 50_000, "1" * 5000, '{"score": 1e999}', "1e999999"])
@pytest.mark.parametrize("scale", [(0, 10), None])
def test_replies_that_are_nested_too_deep_or_too_large_fail_their_row(text, scale):
    bodies = [(200, {}, completion(text))] * 2
    with JudgeServer(lambda _: bodies.pop()) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = ask(Judge(server.url, "m", scale=scale, on_failure="none"), ["a"]).rewards[0, 0]
    assert np.isnan(reward) or (scale is None and np.isfinite(reward)) or text == "1e999999"


def test_secrets_of_an_address_are_in_no_message():
    with JudgeServer(lambda body: (400, {}, b"no user hunter2 with sk-query")) as server:
        url = server.url.replace("://", "://me:hunter2@") + "?api-version=3&api_key=sk-query"
        with pytest.raises(RewardError) as raised:
            ask(Judge(url, "m", attempts=1), ["a"])
        assert server.headers[0]["Authorization"].startswith("Basic")
    message = str(raised.value)
    assert "hunter2" not in message and "sk-query" not in message and "api-version=3" in message


def test_a_server_that_is_not_there():
    judge = Judge("http://127.0.0.1:9/v1", "m", attempts=1, on_failure="none")
    with pytest.warns(UserWarning, match="Connection refused"):
        assert np.isnan(ask(judge, ["a"]).rewards).all()


@pytest.mark.parametrize("body", [b"not json", b"{}", b'{"choices": []}', b'{"choices": [{"message": {}}]}', b""])
def test_replies_without_completion_are_retried(body):
    answers = iter([(200, {}, body), (200, {}, completion("10"))])
    with JudgeServer(lambda _: next(answers)) as server:
        assert ask(Judge(server.url, "m", backoff=0.01), ["a"]).rewards.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("message", "reason", "said"),
    [
        ({"content": None, "refusal": "I will not."}, "stop", "the model refused, 'I will not.'"),
        ({"content": None}, "content_filter", "the model refused, 'content_filter'"),
        ({"content": None, "reasoning_content": "Hm"}, "length", "it reasoned until max_tokens ended it; give more"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "tool_calls", "it calls a tool, {'id': 'c'}"),
    ],
)
def test_a_reply_without_a_text_is_no_failure_of_the_server(message, reason, said, tmp_path):
    """It was asked for again as after an outage; now as a reply that cannot be read, `tries` times."""
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    body = json.dumps({"choices": [{"message": message, "finish_reason": reason}], "usage": usage}).encode()
    with JudgeServer(lambda _: (200, {}, body)) as server:
        judge = Judge(server.url, "m", on_failure="none", backoff=5.0, timeout=5.0, cache=str(tmp_path))
        with pytest.warns(UserWarning, match=rf"row 0: the reply has no text: {re.escape(said)}"):
            graded = ask(judge, ["a"])
    counts = {name.removeprefix("judge/"): value for name, value in graded.logged.totals.items()}
    assert len(server.bodies) == counts["requests"] == counts["unreadable"] == 2 and counts["retries"] == 0
    assert counts["prompt_tokens"] == 14 and counts["completion_tokens"] == 6 and not list(tmp_path.iterdir())


def test_unreadable_replies_are_retried_then_fail():
    answers = iter(["hm", "7", "hm", "hm"])
    with JudgeServer(lambda _: next(answers)) as server:
        graded = ask(Judge(server.url, "m"), ["a"])
        assert graded.rewards[0, 0] == np.float32(0.7) and graded.logged.totals["judge/unreadable"] == 1
        with pytest.raises(RewardError, match="could not judge row 0: the reply holds no number: 'hm'"):
            ask(Judge(server.url, "m"), ["b"])


def test_only_the_failing_rows_get_none():
    with JudgeServer(by_completion({"a": "10", "b": "?", "c": "0"})) as server:
        judge = Judge(server.url, "m", TEMPLATE, on_failure="none")
        with pytest.warns(UserWarning, match="row 1"):
            np.testing.assert_array_equal(ask(judge, ["a", "b", "c"]).rewards[:, 0], np.float32([1, np.nan, 0]))


# --- limits and the cache ---------------------------------------------------------------------------------------------


def test_concurrency_and_rate_limits():
    def answer(body):
        time.sleep(0.05)
        return "1"

    with JudgeServer(answer) as server:
        ask(Judge(server.url, "m", TEMPLATE, concurrency=3), [str(i) for i in range(9)])
        assert server.most_under_way == 3
    with JudgeServer(lambda body: "1") as server:
        started = time.monotonic()  # and not the first arrival, which a busy machine may delay
        ask(Judge(server.url, "m", TEMPLATE, per_minute=1200), [str(i) for i in range(5)])
        assert server.times[-1] - started >= 4 * 0.05


def test_what_nobody_waits_for_is_not_asked():
    """Rows that are late are asked for no more: their requests would stand before those of the next batch."""
    over = threading.Event()
    with JudgeServer(lambda body: over.wait(20) and "1") as server:
        judge = Judge(server.url, "m", "{{ completion }}", concurrency=1)
        rewards = load_rewards(judge, timeout=1.0, on_timeout="none")
        with pytest.warns(UserWarning, match="took more than"):
            assert np.isnan(rewards(["p"] * 4, list("abcd"), [[1]] * 4, {})).all()
        over.set()
        graded = rewards(["p"] * 2, ["x", "x"], [[1]] * 2, {})
        rewards.close()
    assert graded.ravel().tolist() == [np.float32(0.1)] * 2
    assert [asked(body) for body in server.bodies] in (["a", "x"], ["x"])


def test_equal_requests_are_sent_once_and_cached(tmp_path):
    with JudgeServer(lambda body: "4") as server:
        first = ask(Judge(server.url, "m", TEMPLATE, cache=str(tmp_path)), ["a", "a", "b"])
        again = ask(Judge(server.url, "m", TEMPLATE, cache=str(tmp_path)), ["a", "b", "b"])
        assert len(server.bodies) == 2
        ask(Judge(server.url, "other", TEMPLATE, cache=str(tmp_path)), ["a"])
        ask(Judge(server.url, "m", TEMPLATE, cache=str(tmp_path), parameters={"top_p": 0.5}), ["a"])
        assert len(server.bodies) == 4
    assert first.rewards.tolist() == again.rewards.tolist()
    assert again.logged.totals["judge/cached"] == 3 and again.logged.totals["judge/requests"] == 0
    assert not list(tmp_path.rglob("*.part"))


def test_a_damaged_cache_entry_is_asked_for_again(tmp_path):
    with JudgeServer(lambda body: "4") as server:
        for damage in ("", "{", "{}", "null", '{"text": null, "prompt_tokens": 1, "completion_tokens": 1}', None):
            assert ask(Judge(server.url, "m", cache=str(tmp_path)), ["a"]).rewards[0, 0] == np.float32(0.4)
            [entry] = tmp_path.rglob("*.json")
            if damage is not None:
                entry.write_text(damage)
        ask(Judge(server.url, "m", cache=str(tmp_path)), ["a"])
        assert len(server.bodies) == 6


def test_processes_share_the_cache(tmp_path):
    code = (
        "import sys\nfrom jaxrl_llm.rewards.runner import load_rewards\n"
        "url, cache = sys.argv[1:]\n"
        "spec = f\"judge(url='{url}', model='m', template='{{{{ completion }}}}', cache='{cache}', scale=None)\"\n"
        "texts = [str(i) for i in range(20)]\n"
        "print(load_rewards(spec)(['p'] * 20, texts, [[1]] * 20, {})[:, 0].astype(int).tolist())\n"
    )
    with JudgeServer(lambda body: asked(body)) as server:
        command = [sys.executable, "-c", code, server.url, str(tmp_path)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert outputs == [list(range(20))] * 2
    assert len(list(tmp_path.rglob("*.json"))) == 20 and not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"url": url}, f"the judge's url is {url!r}; it starts with http:// or https://, names a host")
            for url in ("localhost:8000", 8000, "http:///v1", "http://[::1/v1", "http://h:port", "http://a b/v1")
        ),
        ({"url": "http://me:secret@h:99999/v1"}, "the judge's url is 'http://***@h:99999/v1'; it starts with"),
        ({"template": "missing.txt"}, "the judge's template is 'missing.txt', but there is no such file"),
        ({"template": "{{ prompt"}, "the judge's template, line 1"),
        ({"on_failure": "skip"}, "on_failure of the judge 'judge' is 'skip'; it is stop, none or a number"),
        ({"scale": (5, 5)}, "scale of the judge 'judge' is (5, 5)"),
        ({"pattern": "(score"}, "pattern of the judge 'judge' is '(score', which is no regular expression"),
        ({"attempts": 0}, "the judge's attempts is 0; it is a whole number of at least 1"),
        ({"concurrency": 2.5}, "the judge's concurrency is 2.5; it is a whole number of at least 1"),
        ({"timeout": "60"}, "the judge's timeout is '60'; it is a number of at least 0.001"),
        ({"prices": (0.15,)}, "prices of the judge 'judge' is (0.15,); it is two numbers"),
        ({"tries": 0}, "tries of the judge 'judge' is 0; a reply is asked for once or more"),
        ({"criteria": {"right": 1, "short": -1}}, "criteria of the judge 'judge', {'right': 1, 'short': -1}, have"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Judge(**({"url": "http://x/v1", "model": "m"} | options))


def test_a_template_with_unknown_names():
    with pytest.raises(RewardError, match=r"'anwser' is undefined; it may use answer, completion, "):
        ask(Judge("http://127.0.0.1:9/v1", "m", "{{ anwser }}"), ["a"], columns={"answer": ["x"]})
