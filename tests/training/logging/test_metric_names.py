"""The names of metrics: TRL's within a run and in its records, verl's in the records when asked."""

import json

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.report.runs import run_of
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.metric_names import EVALUATIONS, TRL_PPO, VERL_MORE
from jaxrl_llm.training.logging.metric_names import VERL as VERL_NAMES
from jaxrl_llm.training.setup.records import logging_spec, metric_names

TRL_GRPO = {
    "num_tokens", "step_time", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "completions/clipped_ratio", "rewards/exact_match/mean", "rewards/exact_match/std", "reward", "reward_std",
    "frac_reward_zero_std", "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
    "clip_ratio/high_max", "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/max",
}  # fmt: skip
VERL = {
    "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm",
    "actor/lr", "critic/score/mean", "critic/score/max", "critic/score/min", "critic/advantages/mean",
    "critic/advantages/max", "critic/advantages/min", "response_length/mean", "response_length/max",
    "response_length/min", "response_length/clip_ratio", "prompt_length/mean", "prompt_length/max", "prompt_length/min",
    "timing_s/gen", "timing_s/reward", "timing_s/update_actor", "perf/time_per_step", "perf/throughput",
    "rollout_corr/kl", "perf/total_num_tokens", "training/global_step", "training/epoch", "timing_s/step",
    "timing_per_token_ms/gen", "timing_per_token_ms/update_actor", "critic/rewards/mean", "critic/rewards/max",
    "critic/rewards/min",
}  # fmt: skip


def test_a_run_has_trls_names(tiny_run):
    line = tiny_run.metrics[1]
    assert line.keys() >= TRL_GRPO
    assert line["completions/min_length"] <= line["completions/mean_length"] <= line["completions/max_length"]
    assert line["completions/min_terminated_length"] <= line["completions/mean_terminated_length"]
    assert line["reward_min"] <= line["reward"] <= line["reward_max"]
    lines = [json.loads(text) for text in (tiny_run.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[1].keys() >= TRL_GRPO


def test_verls_names_of_what_is_evaluated_on():
    """`data.path` has a default, and sources take its place."""
    config = default()
    config.logging.names, config.eval.fraction = "verl", 0.1
    for name in ("task:sort", "a.jsonl+b.jsonl", "c.jsonl"):
        assert metric_names(config).shown("eval/accuracy") == f"val-core/{name}/acc/mean@4"
        config.data.eval_path = "c.jsonl" if config.data.sources else None
        config.data.sources = ("a.jsonl", {"path": "b.jsonl", "weight": 2})


@pytest.mark.slow
def test_verls_names_in_the_records_only(root, tmp_path):
    config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
    config.output_dir, config.total_steps, config.checkpoint.every = str(tmp_path / "run"), 1, 0
    config.logging.backends, config.logging.names = ("jsonl",), "verl"
    result = jaxrl_llm.train(config)
    assert result.metrics[1].keys() >= TRL_GRPO
    before, after = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert after.keys() >= VERL
    assert not after.keys() & {"reward", "kl", "grad_norm", "completions/mean_length"}
    assert {"val-core/task:sort/acc/mean@4", "val-aux/task:sort/acc/best@2/mean"} <= before.keys()
    assert after["actor/kl_loss"] == result.metrics[1]["kl"]
    assert not before.keys() & VERL_MORE.keys()
    assert after["perf/total_num_tokens"] == result.metrics[1]["num_tokens"]  # of the one step
    np.testing.assert_equal(jaxrl_llm.train(config).metrics, result.metrics)
    reported = run_of(tmp_path / "run").metrics
    assert {"step_tokens", "epoch", "reward"} <= reported.keys() and not reported.keys() & VERL_MORE.keys()


def test_records_are_read_back_whatever_their_names(tmp_path):
    config = default()
    config.logging.backends, config.logging.names = ("jsonl",), "verl"
    with Logger(logging_spec(config), tmp_path) as logger:
        logger.log(0, {"eval/accuracy": 0.25})
        logger.log(1, {"reward": 1.0, "eval/accuracy": 0.5})
    with Logger(logging_spec(config), tmp_path, resume_step=1) as logger:
        first = {"step": 0, "eval/accuracy": 0.25}
        assert logger.earlier() == [first, {"step": 1, "reward": 1.0, "eval/accuracy": 0.5}]


def test_what_verl_computes_of_others(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    config = default()
    step = {"step_tokens": 600.0, "step_time": 9.0, "time/rollout": 4.0, "time/update": 3.0, "time/reward": 1.0}
    lengths = {"prompts/mean_length": 50.0, "completions/mean_length": 100.0}  # of 4 rows
    scores = {"reward": 0.5, "reward_max": 1.0, "reward_min": None, "environment/turns": 1.25}
    assert metric_names(config).more(3, step | lengths | scores) == {}
    config.logging.names = "verl"
    expected = {"training/global_step": 3, "timing_s/step": 9.0, "timing_per_token_ms/update_actor": 3000.0 / 600}
    expected["perf/throughput"] = 600 / (9.0 * 4)
    assert metric_names(config).more(3, step) == expected
    expected |= {"timing_per_token_ms/gen": 4000.0 / 400, "num_turns/mean": 2.5}
    rewards = {"critic/rewards/mean": 0.5, "critic/rewards/max": 1.0, "critic/rewards/min": None}
    assert metric_names(config).more(3, step | lengths | scores) == expected | rewards
    assert (expected | rewards).keys() == VERL_MORE.keys()
    assert metric_names(config).more(0, {"eval/reward": 1.0}) == {}
    for key, value in (("kl_in_reward", True), ("reward_beta", 0.1)):  # the reward that is learned from is another
        penalised = default()
        penalised.logging.names, penalised.algorithm[key] = "verl", value
        assert metric_names(penalised).more(3, step | lengths | scores) == expected
        own = metric_names(penalised).more(3, step | lengths | scores | {"objective/rlhf_reward": 0.375})
        assert own == expected | {"critic/rewards/mean": 0.375}


def test_evaluations_by_set_and_source():
    """verl's own rule: of acc the mean, and best and maj of all samples are val-core; everything else is val-aux."""
    config = default()
    config.logging.names, config.data.path = "verl", "openai/gsm8k"
    config.eval.sets = ("aime=x.jsonl(samples=16)", "math=y.jsonl")
    names = metric_names(config)
    pairs = {
        "eval/accuracy": "val-core/openai/gsm8k/acc/mean@4",
        "eval/reward": "val-aux/openai/gsm8k/reward/mean@4",
        "eval/pass@4": "val-core/openai/gsm8k/acc/best@4/mean",
        "eval/accuracy_std": "val-aux/openai/gsm8k/acc/std@4",
        "eval/aime/b/reward_std": "val-aux/aime/b/reward/std@16",
        "eval/aime/accuracy": "val-core/aime/acc/mean@16",
        "eval/aime/maj@16": "val-core/aime/acc/maj@16/mean",
        "eval/aime/maj@4": "val-aux/aime/acc/maj@4/mean",
        "eval/math/a/b/pass@4": "val-core/math/a/b/acc/best@4/mean",
        "eval/math/a/b/worst@2": "val-aux/math/a/b/reward/worst@2/mean",
        "eval/math/best@4": "val-aux/math/reward/best@4/mean",
        "eval/math/greedy_accuracy": "eval/math/greedy_accuracy",
        "eval/rewards/compute_score/accuracy": "eval/rewards/compute_score/accuracy",
        "eval/math/a/rewards/compute_score/reward": "eval/math/a/rewards/compute_score/reward",
        "reward": "critic/score/mean",
    }
    assert {name: names.shown(name) for name in pairs} == pairs
    assert {names.internal(shown): shown for shown in pairs.values()} == pairs
    config.logging.names = "trl"
    assert metric_names(config).shown("eval/aime/accuracy") == "eval/aime/accuracy"


def test_no_two_metrics_share_a_name():
    config = default()
    for names in ("trl", "verl"):
        for algorithm in ("grpo", "ppo"):
            config.logging.names, config.algorithm.name = names, algorithm
            shown = metric_names(config)
            assert len(set(shown.values())) == len(shown)
            assert not set(shown.values()) & (TRL_GRPO - shown.keys())
    config.algorithm.kl_in_reward = True
    assert metric_names(config)["kl"] == "actor/reward_kl_penalty"
    config.algorithm.kl_in_reward, config.algorithm.reward_beta = False, 0.1
    assert metric_names(config)["kl"] == "actor/kl_loss"
    assert metric_names(config)["reward_kl"] == "actor/reward_kl_penalty"
    assert metric_names(config)["kl_coef"] == "actor/reward_kl_penalty_coeff"


def test_the_page_names_them(root):
    page = (root / "docs/metrics.md").read_text(encoding="utf-8")
    for names in (VERL_NAMES, TRL_PPO):
        for ours, theirs in names.items():
            assert f"| `{ours}` | `{theirs}` |" in page
    for theirs, ours in VERL_MORE.items():
        assert f"| `{theirs}` | {ours} |" in page
    for ours, theirs in EVALUATIONS.items():
        assert f"| `eval/{ours}` | `{theirs}` |" in page
    assert not [name for name in TRL_GRPO if name.partition("/")[0] not in page]


def test_the_page_names_what_every_run_has(tiny_run, root):
    page = (root / "docs/metrics.md").read_text(encoding="utf-8")
    named = {name for name in tiny_run.metrics[1] if name.startswith("machine/") or name in ("epoch", "step_time")}
    assert {"machine/host_memory_peak_gib", "machine/cpu_cores", "epoch", "step_time"} <= named
    assert not [name for name in named if f"`{name}`" not in page]
