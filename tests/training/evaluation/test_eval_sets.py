"""Several named evaluation sets, data sources, statistics and settings of samples; when evaluations happen."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.sample_statistics import passes_at_k
from jaxrl_llm.commands.preview import preview
from jaxrl_llm.config import ConfigError, default, eval_set, from_json, to_json, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model
from jaxrl_llm.rewards.runner import NOTHING_LOGGED
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.evaluation import metrics, run
from jaxrl_llm.training.evaluation.metrics import EvalMetrics, PromptResult, prompt_results, summary
from jaxrl_llm.training.evaluation.run import check_best
from jaxrl_llm.training.logging.console import evaluation_line
from jaxrl_llm.training.setup.evaluation import build_evaluations, eval_data, eval_metrics, eval_sets
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import eval_sampling
from tests.conftest import ROOT

ROWS = [
    {"prompt": f"sort:{digits}=", "answer": "".join(sorted(digits)), "right": right, "data_source": source}
    for digits, right, source in (("21", 2, "a/x"), ("312", 0, "b"), ("4213", 4, "b"), ("51", 1, "b"))
]


@pytest.fixture
def config():
    made = load_config_file(f"{ROOT / 'configs' / 'grpo.py'}:tiny")
    made.logging.backends, made.checkpoint.every = ("jsonl",), 0
    return made


def first_of_each(completions, right, row_numbers, **columns):
    """The first `right` completions of a prompt are right, and say so: of four in evaluations."""
    size = len(completions) // len(set(zip(right, columns["answer"], strict=True)))
    return [
        {"score": float(row % size < right[row]), "pred": "r" if row % size < right[row] else f"w{row % 2}"}
        for row in range(len(completions))
    ]


# --- statistics of results ---


def result_of(correct, answers=None, source=None) -> PromptResult:
    values = np.array(correct, bool)
    return PromptResult(values.astype(np.float32) * 2, values, answers, source)


def test_a_summary_by_hand():
    found = summary([result_of([1, 1, 0]), result_of([0, 0, 0])], EvalMetrics(), [result_of([1]), result_of([1])])
    assert found == pytest.approx({
        "reward": 2 / 3, "accuracy": 1 / 3, "greedy_accuracy": 1.0, "pass@1": 1 / 3, "pass@2": 0.5, "pass@3": 0.5,
    })  # fmt: skip


def test_prompts_that_the_first_reward_leaves_out_have_no_accuracy():
    rewards = np.array([[1.0], [0.0], [np.nan], [np.nan]], np.float32)
    results = prompt_results(rewards, np.ones(1, np.float32), [2, 2], 1.0, [["4", "5"], ["4", "4"]], ["a", "b"], ())
    metrics = EvalMetrics(interval=0.9)
    assert summary(results, metrics) == pytest.approx(summary(results[:1], metrics))
    empty = summary(results[1:], metrics, results[1:])
    assert set(empty) >= {"reward", "accuracy", "greedy_accuracy", "pass@1", "maj@2", "accuracy_low"}
    assert np.isnan(list(empty.values())).all()


def test_a_summary_with_everything():
    rows = [result_of([1, 1, 0], ["4", "4", "5"]), result_of([0, 0, 1], ["7", "7", "8"])]
    found = summary(rows, EvalMetrics(extremes=True, interval=0.9))
    assert [found[name] for name in ("maj@3", "best@3", "worst@3", "accuracy")] == [0.5, 2.0, 0.0, 0.5]
    assert found["accuracy_low"] == pytest.approx(1 / 3)
    assert found["accuracy_high"] == pytest.approx(2 / 3)
    assert (found["maj@3_low"], found["maj@3_high"], found["pass@3_low"]) == (0.0, 1.0, 1.0)
    assert not [name for name in found if name.startswith(("best@3_", "pass@2_"))]


def test_prompts_with_different_sample_counts():
    found = summary([result_of([1, 0]), result_of([1, 1, 1, 0])], EvalMetrics())
    assert found["accuracy"] == pytest.approx((0.5 + 0.75) / 2)
    assert set(found) == {"reward", "accuracy", "pass@1", "pass@2"}


def test_no_majority_without_all_answers():
    assert "maj@2" not in summary([result_of([1, 0], ["1", "2"]), result_of([1, 1])], EvalMetrics())


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("boxed", r"so \boxed{ \frac{1}{2} }.", "0.5"), ("boxed", "so 2", None),
        ("number", "1,000.0 it is", "1000"), ("number", "none", None),
        ("hashes", "12\n#### $1,250", "1250"), ("hashes", "12", None), ("text", " 12 ", "12"), ("text", " ", None),
    ],
)  # fmt: skip
def test_known_answers(name, text, answer):
    config = default()
    config.eval.answer = name
    assert eval_metrics(config).answers_of([text], "", NOTHING_LOGGED) == [answer]


def test_own_answers_and_their_errors(tmp_path):
    (tmp_path / "mine.py").write_text("def last(text):\n    return int(text.split()[-1])\n")
    config = default()
    config.eval.answer = f"{tmp_path}/mine.py:last"
    assert eval_metrics(config).answers_of(["it is 12"], "", NOTHING_LOGGED) == ["12"]
    with pytest.raises(ConfigError, match=r"eval.answer raised ValueError: .*, on completion 1"):
        eval_metrics(config).answers_of(["12", "no"], "", NOTHING_LOGGED)
    config.eval.answer = "boxd"
    with pytest.raises(ConfigError, match="the closest is boxed"):
        eval_metrics(config)


# --- sets ---


def test_metrics_of_the_user_are_made_in_the_first_process_alone(monkeypatch):
    """Each process would draw its own, and they would disagree on the best checkpoint."""
    sampled = SimpleNamespace(engine=SimpleNamespace(group_size=1), rewards=SimpleNamespace(names=("right",)))
    evaluation: Any = run.Evaluation(sampled, None, [{"prompt": "a"}], 1, EvalMetrics(0.5))  # pyright: ignore
    table = [{"prompt": "a", "completion": "b", "right": 1.0}]
    asked = []
    monkeypatch.setattr(run.jax, "process_index", lambda: 1)
    monkeypatch.setattr(run, "gather", lambda own: [{"own": 2.0}, own])
    assert evaluation._computed(asked.append, table) == {"own": 2.0} and not asked


def test_sets_as_texts_and_dictionaries():
    config = default()
    config.eval.sets = (
        "easy=task:sort(split='validation', samples=2)",
        {"set": "mixed", "path": "task:sort", "prompts": 3, "split": "validation"},
        "mixed=task:sort_demos",
    )
    validate(config)
    easy, mixed = eval_sets(config)
    assert (easy.name, easy.samples, easy.prompts) == ("easy", 2, 128)
    assert easy.sources == [{"path": "task:sort", "split": "validation", "eval_split": "validation"}]
    assert (mixed.name, mixed.samples, mixed.prompts) == ("mixed", 4, 3)
    assert mixed.sources == [easy.sources[0], {"path": "task:sort_demos"}]
    assert eval_sets(from_json(to_json(config))) == [easy, mixed]
    tokenizer = load_model("embedded:sort").tokenizer
    assert [len(part.rows) for part in eval_data(config, tokenizer)[1][1]] == [2, 1]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("task:sort", "takes name=path"), ("=task:sort", "takes name=path"), ("a/b=task:sort", "takes name=path"),
        ({"path": "task:sort"}, "takes name=path"), ({"set": "a"}, "takes name=path"),
        ("a=task:sort(samples=0)", "samples of a is 0"), ("a=task:sort(prompts='x')", "prompts of a is 'x'"),
        ({"set": "a", "path": "x", "format": len}, "eval.sets, a, which cannot be written"),
    ],
)  # fmt: skip
def test_entries_that_are_no_set(entry, words):
    config = default()
    config.eval.sets = (entry,)
    with pytest.raises(ConfigError, match=words):
        validate(config)


def test_a_set_that_is_not_there_is_named():
    config = default()
    config.eval.sets = ("a=task:sort(split='tset')",)
    with pytest.raises(ConfigError, match=r"no split 'tset'.*see eval.sets, a;"):
        eval_data(config, load_model("embedded:sort").tokenizer)


def test_a_file_of_one_split(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "sort:21=", "answer": "12"}\n')
    name, own, source = eval_set(f"x={tmp_path}/x.jsonl(split='train')")
    assert (name, own, source["eval_split"]) == ("x", {}, "train")


def test_the_preview_shows_every_set():
    config = default()
    config.algorithm.name, config.data.path = "sft", "task:sort_demos"
    config.eval.sets = ("demos=task:sort_demos", "asked=task:sort(prompts=2)")
    text = preview(config, rows=1)
    assert "--- evaluated on as demos: task:sort_demos, example 0" in text
    assert "--- evaluated on as asked: task:sort, example 0" in text


def test_own_sampling():
    config = default()
    config.rollout.temperature, config.rollout.top_p, config.rollout.min_p = 0.9, 0.8, 0.1
    assert eval_sampling(config) == SamplingParams(0.9, 0.8, 0, 0.1)
    config.eval.temperature, config.eval.top_k = 0.0, 5
    assert eval_sampling(config) == SamplingParams(0.0, 0.8, 5, 0.1)
    own = {"temperature": 0.7, "top_p": 0.6, "top_k": 4, "min_p": 0.2}
    own |= {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": -0.4}
    config.eval.update(own)
    assert eval_sampling(config) == SamplingParams(**own)


# --- metrics of a model ---


@pytest.mark.slow
def test_sets_and_sources(config):
    """Each set is measured as if it were alone; data sources of a set are measured apart."""
    config.eval.extremes, config.eval.interval = True, 0.9
    found = jaxrl_llm.evaluate(config, {"all": ROWS, "one": ROWS[2:3]}, first_of_each)
    by_hand = {"all": (2 + 0 + 4 + 1) / 16, "all/a/x": 0.5, "all/b": 5 / 12, "one": 1.0}
    assert {where: found[f"eval/{where}/accuracy"] for where in by_hand} == pytest.approx(by_hand)
    assert found["eval/all/pass@4"] == 0.75
    assert found["eval/all/a/x/pass@2"] == pytest.approx(1 - 1 / 6)
    assert found["eval/all/best@4"] == 0.75
    # 2 of 4 right, the wrong ones differ; none right; all right; 1 of 4 right with two wrong answers of 1 and 2 votes.
    assert found["eval/all/maj@4"] == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert found["eval/all/accuracy_low"] <= found["eval/all/accuracy"] <= found["eval/all/accuracy_high"]
    assert not [name for name in found if name.startswith("eval/one/a/")]
    config.eval.extremes, config.eval.interval = False, None
    alone = jaxrl_llm.evaluate(config, ROWS[2:3], first_of_each)
    assert alone == {name.replace("/one", ""): found[name] for name in found if name.replace("/one", "") in alone}
    assert alone["eval/mean_length"] == found["eval/one/mean_length"]


def test_a_column_that_a_reward_lacks_is_named_before_anything_is_sampled(config, monkeypatch):
    """A run would sample and train up to its first evaluation, with eval.at_start=false for hours."""
    monkeypatch.setattr("jaxrl_llm.training.setup.evaluation.build_worker", None)
    with pytest.raises(ConfigError, match="for the evaluation on bare: reward 'exact_match' needs 'answer'"):
        jaxrl_llm.evaluate(config, {"all": [{"prompt": "sort:21=", "answer": "12"}], "bare": [{"prompt": "sort:21="}]})


def test_the_spread_of_samples_as_verl_has_it():
    """Of each prompt's samples, divided by their number: 0.5 of 1, 0, 1, 0 and 3^0.5 / 4 of 1, 0, 0, 0."""
    rows = [result_of([1, 0, 1, 0]), result_of([1, 0, 0, 0])]
    found = summary(rows, EvalMetrics(estimate="verl"))
    assert found["accuracy_std"] == pytest.approx((0.5 + 3**0.5 / 4) / 2)
    assert found["reward_std"] == pytest.approx(0.5 + 3**0.5 / 4)  # of 0 and 2
    gap = rows[0]._replace(rewards=np.array([3.0, np.nan, 1.0, np.nan]))
    none = rows[1]._replace(rewards=np.full(4, np.nan), graded=False)
    spread = summary([gap, none], EvalMetrics(estimate="verl"))
    assert spread["reward_std"] == 1.0 and spread["accuracy_std"] == 0.5
    assert not {"reward_std", "accuracy_std"} & summary(rows, EvalMetrics()).keys()


@pytest.mark.slow
def test_what_is_right_how_it_is_sampled_and_estimated(config):
    """Samples of the smallest top_p are the greedy ones; two of four first rewards of 0.5 are right at 0.5."""
    seen = []

    def half(completions, **columns):
        seen.append(completions)
        return [0.5 * (row % 4 < 2) for row in range(len(completions))]

    config.eval.top_p, config.eval.repetition_penalty, config.eval.estimate = 1e-6, 1.3, "verl"
    config.eval.correct_at, config.eval.samples = 0.5, 4
    found = jaxrl_llm.evaluate(config, ROWS[:2], half)
    sampled, greedy = seen
    assert [sampled[4 * row : 4 * row + 4] for row in range(2)] == [[text] * 4 for text in greedy]
    assert found["eval/accuracy"] == 0.5 and found["eval/pass@2"] == pytest.approx(0.75, abs=0.03)  # else 5 / 6
    assert found["eval/pass@2"] == pytest.approx(passes_at_k([np.array([1, 1, 0, 0])], 2, "verl")[0])
    config.eval.correct_at = 0.6
    assert eval_metrics(config).correct_at == 0.6 and jaxrl_llm.evaluate(config, ROWS[:2], half)["eval/accuracy"] == 0


@pytest.mark.slow
def test_each_reward_function_and_what_it_logs(config):
    """As training names it, of samples alone: entries by source, and what is logged of a batch by its completions.

    There are 4 prompts in a batch, and 2 in the last one, which others fill up.
    """
    calls, sources = [], "aaabbb"

    def first(completions, weight, trainer_state, log_metric, log_total, **columns):
        calls.append(len(completions))
        assert tuple(trainer_state) == (config.total_steps, config.total_steps)
        log_metric("mine/weight", sum(weight) / len(weight))
        log_metric("mine/rows", len(completions))
        log_metric("accuracy", 9.0)
        log_total("mine/paid", len(completions))
        return [{"score": x, "acc": x > 3, "format": None if x == 1 else x} if x else None for x in weight]

    def second(completions, weight, **columns):
        return [x if x > 4 else None for x in weight]

    config.batch.prompts, config.rollout.group_size, config.eval.samples = 4, 2, 2
    weights = [0, 1, 2, 3, 4, 6]
    rows = [
        {"prompt": "sort:21=", "weight": weight, "data_source": source}
        for weight, source in zip(weights, sources, strict=True)
    ]
    with pytest.warns(UserWarning, match="logs 'accuracy', and eval/accuracy is the evaluation's own metric"):
        found = jaxrl_llm.evaluate(config, {"s": rows}, [first, second])
    expected = {
        "rewards/first/mean": 16 / 5, "a/rewards/first/mean": 3 / 2, "b/rewards/first/mean": 13 / 3,
        "rewards/first/acc": 2 / 5, "a/rewards/first/acc": 0.0, "b/rewards/first/acc": 2 / 3,
        "rewards/first/format": 15 / 4, "a/rewards/first/format": 2.0, "rewards/second/mean": 6.0,
        "mine/weight": (1.5 * 8 + 5 * 4) / 12, "mine/rows": (8 * 8 + 4 * 4) / 12, "mine/paid": 12 + 6,
    }  # fmt: skip
    assert {name: found[f"eval/s/{name}"] for name in expected} == pytest.approx(expected)
    assert np.isnan(found["eval/s/a/rewards/second/mean"]) and found["eval/s/accuracy"] == 1.0
    assert calls == [8, 4, 4, 2] and not [name for name in found if "a/mine" in name]
    check_best("eval/s/rewards/second/mean", found)


def test_greedy_samples_and_no_greedy_pass(config):
    """At temperature 0 all samples are the greedy completion; the answers that are voted on are found in the text."""
    config.eval.temperature, config.eval.greedy, config.eval.answer = 0.0, False, "text"
    found = jaxrl_llm.evaluate(config, [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS])
    assert "eval/greedy_accuracy" not in found
    assert found["eval/accuracy"] == found["eval/pass@4"] == found["eval/maj@4"] == found["eval/maj@2"]


def evaluated_steps(result) -> list[int]:
    return [line["step"] for line in result.metrics if any(name.startswith("eval/") for name in line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "start", "end", "first", "steps"),
    [
        (1, True, False, 2, [2, 3]),
        (0, False, True, 0, [3]),
        (2, True, True, 0, [0, 2, 3]),
        (2, False, False, 0, [2]),
    ],
)
def test_when_evaluations_happen(every, start, end, first, steps, config, tmp_path):
    config.output_dir, config.total_steps, config.eval.prompts = str(tmp_path), 3, 4
    config.eval.every, config.eval.at_start, config.eval.at_end, config.eval.greedy = every, start, end, False
    config.eval.start = first
    assert evaluated_steps(jaxrl_llm.train(config)) == steps


@pytest.mark.slow
def test_held_out_losses_of_several_sets():
    """Each is what it is alone, in rows of the width of the longest."""
    config = default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = "preference", "dpo", 0.1
    config.data.path, config.batch.prompts, config.eval.prompts, config.logging.backends = "task:sort_pairs", 4, 3, ()
    rows = tasks.generate("sort_pairs", size=10)

    def measured(held_out):
        with jax.set_mesh(mesh := make_mesh(devices=jax.devices()[:1])):
            run = build(config, mesh, Given(rows, held_out))
            assert run.evaluation is not None
            return run.evaluation(jax.tree.map(lambda x: x * 1.02, run.state.params), jax.random.key(0))

    both, alone = measured({"a": rows[:3], "b": rows[3:9]}), measured(rows[3:6])
    assert both["eval/a/loss"] != both["eval/b/loss"]
    assert {name for name in both if "/b/" in name} == {name.replace("eval/", "eval/b/") for name in alone}
    for name, value in alone.items():
        np.testing.assert_allclose(both[name.replace("eval/", "eval/b/")], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_named_sets_beside_rows_in_memory():
    config = load_config_file(f"{ROOT / 'configs' / 'grpo.py'}:tiny")
    config.eval.sets = ("x=task:sort(samples=2, prompts=2)",)
    with jax.set_mesh(mesh := make_mesh(devices=jax.devices()[:1])):
        run = build(config, mesh, Given([{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]))
    assert run.evaluation is not None
    assert build_evaluations(config, run.model, run.rewards, None, mesh)[0].sampled.engine.group_size == 2


def test_the_line_of_the_console():
    found = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "a/greedy_accuracy": 0.7, "a/accuracy": 0.25}
    found |= {"a/greedy_accuracy_low": 0.1, "a/greedy_accuracy_high": 0.9, "rewards/chosen": 1.0}
    assert (
        evaluation_line(found) == "a/accuracy 0.250 (greedy 0.700)  reward 0.500 [0.400, 0.600]  rewards/chosen 1.000"
    )


# --- the best checkpoint ---


def test_the_best_of_a_metric_that_is_not_there():
    check_best("eval/math/pass@4", {"eval/math/pass@4": 0.5})
    check_best("reward", {"eval/reward": 0.5})
    with pytest.raises(ConfigError, match=r"closest is 'eval/math/pass@4', and all are eval/math/pass@1, eval/math"):
        check_best("eval/pass@4", {"eval/math/pass@4": 0.5, "eval/math/pass@1": 0.5})


@pytest.mark.slow
def test_a_missing_best_metric_ends_the_run(config, tmp_path):
    config.output_dir, config.eval.every, config.checkpoint.every = str(tmp_path), 1, 1
    config.eval.greedy, config.checkpoint.best = False, "eval/greedy_accuracy"
    with pytest.raises(ConfigError, match="eval/greedy_accuracy', but an evaluation has no such metric"):
        jaxrl_llm.train(config)
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]


def test_settings_of_measures_are_those_of_eval():
    fields = {field.name for field in dataclasses.fields(EvalMetrics)}
    assert fields <= set(default().eval)
    assert metrics.SOURCE == "data_source"


class Counted:
    """An environment that asks as often as its row says."""

    def reset(self, row):
        self.left = row["asks"]

    def step(self, action):
        self.left -= 1
        return ("more", 0.0, self.left == 0)


@pytest.mark.slow
def test_episodes_that_fill_up_a_batch_are_not_counted(config):
    config.batch.prompts, config.rollout.group_size, config.eval.samples, config.eval.greedy = 4, 2, 2, False
    config.rollout.max_completion_length = 48
    rows = [{"prompt": "sort:21=", "answer": "12", "asks": asks} for asks in (1, 1, 1, 1, 3)]
    found = jaxrl_llm.evaluate(config, rows, environment=Counted)
    assert found["eval/environment/turns"] == pytest.approx(7 / 5) and found["eval/environment/failures"] == 0
