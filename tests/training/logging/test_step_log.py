"""The metrics that the log adds to those of a step: speed, memory, processors; and what a real run records of them."""

import dataclasses
import json
import math
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pyarrow.parquet as pq
import pytest

from jaxrl_llm.algorithms.losses import Metric
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.training.logging import step_log
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.step_log import Machine, Step, StepLog, merge
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.setup.records import health_spec
from tests.training.logging.common import quiet_spec

HEALTH = health_spec(default())


def test_speed_leaves_out_compilation(tmp_path, monkeypatch):
    """100 s of a step, of which 60 s were compilation, as were 7 s before it began: 4000 tokens are 100 a second."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    update = {"loss": Metric(1.0, "sum"), "grad_norm": Metric(1.0, "sum"), "nonfinite_gradient": Metric(0.0, "sum")}
    with Logger(quiet_spec(), tmp_path) as logger:
        log = StepLog(HEALTH, lambda metrics: None, watch, logger, {"num_tokens": 0, "skipped": 0})
        now[0] += 7.0
        watch.charge("compile", 7.0)
        for number, compiled, passed in ((1, 60.0, 100.0), (2, 0.0, 10.0)):
            began, before = now[0], watch.totals["compile"]
            with watch("update"):
                now[0] += passed
                watch.charge("compile", compiled)
            log.add(Step(number, began, {"num_tokens": 4000}, [update], [], before))
            log.settle()
    first, second = log.history
    assert first["step_time"] == 100.0 and first["tokens_per_second"] == 4000 / 40
    assert first["time/compile"] == 67.0 and first["time/update"] == 40.0
    assert second["tokens_per_second"] == 400.0 and "time/compile" in second


def test_the_share_of_the_peak(tmp_path, monkeypatch):
    """2000 operations of 1000 a second, in the 10 s of an update that do not compile, or in 25 where steps overlap."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    (update,) = updates_of({"loss": 1.0, "grad_norm": 1.0, "nonfinite_gradient": 0.0})
    with Logger(quiet_spec(), tmp_path) as logger:
        counts = {"num_tokens": 0, "skipped": 0}
        log = StepLog(HEALTH, lambda metrics: None, watch, logger, counts, peak=1000.0)
        for number, overlaps in ((1, False), (2, True), (3, False)):
            began, before = now[0], watch.totals["compile"]
            with watch("data"):
                now[0] += 15.0
            with watch("update"):
                now[0] += 50.0
                watch.charge("compile", 40.0)
            flops = None if number == 3 else jnp.float32(2000)
            log.add(Step(number, began, {"num_tokens": 1}, [update], [], before, flops, overlaps))
            log.settle()
    first, second, third = log.history
    assert first["mfu"] == pytest.approx(0.2) and first["time/update"] == 10.0
    assert second["mfu"] == pytest.approx(0.08) and "mfu" not in third


def updates_of(*rows):
    return [{name: Metric(value, "sum") for name, value in row.items()} for row in rows]


def test_a_name_of_the_run_that_a_reward_function_logs_is_told_once(tmp_path):
    """A step's metrics hold what reward functions log: of these names one is the update's, and one the log's."""
    updates = updates_of({"loss": 1.0, "grad_norm": 1.0, "nonfinite_gradient": 0.0})
    made = {"num_tokens": 1, "mine": 7.0, "loss": 8.0, "step_time": 9.0, "mfu": 10.0}
    counts = {"num_tokens": 0, "skipped": 0}
    with Logger(quiet_spec(), tmp_path) as logger:
        log = StepLog(HEALTH, lambda metrics: None, Stopwatch(), logger, counts, peak=1e9)
        told = []
        logger.warn = told.append
        for number in (1, 2):
            log.add(Step(number, time.perf_counter(), made, updates, [], flops=0.0))
            log.settle()
    newest = log.history[-1]
    assert newest["mine"] == 7.0 and newest["loss"] == 1.0 and newest["step_time"] < 9.0 and newest["mfu"] == 0.0
    assert told == [
        f"step 1: a reward function logs {name!r}, which is the run's own metric, and it is not shown: log it under "
        "another name"
        for name in ("loss", "mfu", "step_time")
    ]


def test_means_over_no_token_are_left_out_of_a_step():
    whole = {"loss": 1.0, "entropy": 1.7, "nonfinite_gradient": 0.0}
    masked = {"loss": 0.0, "entropy": math.nan, "nonfinite_gradient": 0.0}
    failed = {"loss": math.nan, "entropy": 1.7, "nonfinite_gradient": 1.0}
    assert merge(updates_of(whole, masked)) == {"loss": 0.5, "entropy": 1.7, "nonfinite_gradient": 0.0}
    assert math.isnan(merge(updates_of(masked, masked))["entropy"])
    merged = merge(updates_of(whole, failed))
    assert math.isnan(merged["loss"]) and merged["nonfinite_gradient"] == 0.5
    highest, none = ({"share": Metric(value, "max")} for value in (-0.5, -math.inf))
    assert merge([none, highest]) == {"share": -0.5} and math.isnan(merge([none, none])["share"])


@pytest.mark.parametrize(("of", "words"), [("", "the gradient is not"), ("critic/", "the critic has a gradient")])
def test_a_policy_or_a_critic_that_never_learns_ends_the_run(tmp_path, of, words):
    """With passes of their own, each has updates of its own, whose failures the other's must not hide."""
    fine = {"loss": 1.0, "grad_norm": 1.0, "nonfinite_gradient": 0.0}
    critic, policy = ({f"{place}{name}": x for name, x in fine.items()} for place in ("critic/", ""))
    failing = critic if of else policy
    failing |= {f"{of}loss": math.nan, f"{of}grad_norm": math.nan, f"{of}nonfinite_gradient": 1.0}
    with Logger(quiet_spec(), tmp_path) as logger:
        spec = dataclasses.replace(HEALTH, max_skipped_steps=1)
        log = StepLog(spec, lambda metrics: None, Stopwatch(), logger, {"num_tokens": 0, "skipped": 0})
        log.add(Step(1, 0.0, {"num_tokens": 1}, updates_of(critic, policy), []))
        log.add(Step(2, 0.0, {"num_tokens": 1}, updates_of(critic, policy), []))
        with pytest.raises(ConfigError, match=f"step 2: {words}.* 2 steps in a row"):
            log.settle()


def test_an_evaluation_adds_to_the_phases_of_its_step(tmp_path):
    watch = Stopwatch()
    with Logger(quiet_spec(), tmp_path) as logger:
        log = StepLog(HEALTH, lambda metrics: None, watch, logger, {"num_tokens": 0, "skipped": 0})

        def evaluate():
            watch.charge("compile", 2.0)
            return {"eval/reward": 1.0}

        log.log(1, {"time/compile": 3.0}, evaluate)
    assert log.newest["time/compile"] == pytest.approx(5.0) and log.newest["eval/reward"] == 1.0


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    def device(**stats):
        return SimpleNamespace(memory_stats=lambda: stats or None)

    devices = [device(bytes_in_use=2**30, peak_bytes_in_use=3 * 2**30), device(bytes_in_use=2**31), device()]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    machine = Machine()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    metrics = machine.metrics()
    assert metrics["machine/device_memory_gib"] == 2.0 and metrics["machine/device_memory_peak_gib"] == 3.0
    assert 0.01 < metrics["machine/host_memory_peak_gib"] < 1000
    assert metrics["machine/cpu_cores"] > 0
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    assert machine.metrics().keys() == {"machine/host_memory_peak_gib", "machine/cpu_cores"}


def test_of_several_processes_the_largest_numbers_and_the_slowest(monkeypatch):
    def of_each(own):
        return [{**own, "waited": 5.0}, dict.fromkeys(own, 9.0) | {"waited": 0.5}, {**own, "waited": 4.0}]

    monkeypatch.setattr(step_log.jax, "process_count", lambda: 3)
    monkeypatch.setattr(step_log.processes, "of_each", of_each)
    metrics = Machine().metrics()
    assert metrics["machine/slowest_process"] == 1 and metrics["machine/waited_seconds"] == 4.5
    assert metrics["machine/host_memory_peak_gib"] == 9.0


def test_a_run_records_its_evaluations_and_where_it_ran(tiny_run):
    folder = tiny_run.output_dir
    (start,) = json.loads((folder / "starts.json").read_text())
    assert start["step"] == 0 and start["host"] and start["versions"]["jax"] == jax.__version__
    first, last = tiny_run.metrics[0], tiny_run.metrics[-1]
    table = pq.read_table(folder / "completions" / "evaluation_00000.parquet").to_pylist()
    sampled = [row["exact_match"] for row in table if row["evaluation"] == "sampled"]
    greedy = [row["exact_match"] for row in table if row["evaluation"] == "greedy"]
    assert len(sampled) == 4 * len(greedy) > 0 and len(sampled) + len(greedy) == len(table)
    assert sum(sampled) / len(sampled) == pytest.approx(first["eval/reward"])
    assert sum(greedy) / len(greedy) == pytest.approx(first["eval/greedy_accuracy"])
    assert {"prompt", "completion", "step"} <= table[0].keys() and not table[0]["step"]
    assert (folder / "completions" / "evaluation_00002.parquet").is_file()
    assert last["epoch"] == pytest.approx(2 * tiny_run.metrics[1]["epoch"]) and last["epoch"] > 0
    assert last["machine/cpu_cores"] > 0
