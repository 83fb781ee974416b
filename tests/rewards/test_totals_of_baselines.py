"""Totals of grading include greedy baselines and evaluations."""

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.rewards.runner import Logged
from jaxrl_llm.training.logging.reward_metrics import add_totals


def test_totals_are_added_and_the_rest_stays():
    held = Logged({"a": [1.0]}, {"cost": 2.0}, {"text": ["x"]})
    more = Logged({"a": [5.0], "b": [1.0]}, {"cost": 3.0, "calls": 1.0}, {"text": ["y"]})
    assert add_totals(held, more) == Logged({"a": [1.0]}, {"cost": 5.0, "calls": 1.0}, {"text": ["x"]})


@pytest.mark.slow
def test_a_run_counts_greedy_baselines_and_evaluations(root, tmp_path):
    def paid(completions, log_total, **columns):
        log_total("paid/calls", len(completions))
        return np.arange(len(completions), dtype=float)

    config = load_config_file(f"{root / 'configs' / 'remax.py'}:tiny")
    config.output_dir, config.logging.backends, config.total_steps = str(tmp_path / "run"), ("jsonl",), 1
    config.optimizer.warmup_steps, config.eval.every = 0, 1
    first, last = jaxrl_llm.train(config, rewards=paid).metrics
    rows = config.batch.prompts * config.rollout.group_size
    assert last["paid/calls"] == rows + config.batch.prompts
    graded = config.eval.prompts * (config.eval.samples + 1)
    assert first["eval/paid/calls"] == last["eval/paid/calls"] == graded
