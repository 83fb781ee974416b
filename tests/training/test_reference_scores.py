"""A*-PO in a run: the first stage that scores the reference, the regression on it, resuming, and what does not fit."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import jaxrl_llm
from jaxrl_llm.algorithms.advantages import optimal_values
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.unread import unread
from jaxrl_llm.data import tasks
from jaxrl_llm.data.scored_prompts import ScoredPrompts
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model
from jaxrl_llm.training import reference_scores
from jaxrl_llm.training.reference_scores import assume_scores
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import build

MESH = make_mesh(devices=jax.devices()[:1])
ROWS = tasks.generate("sort", size=10)


def config_of(**settings):
    config = default()
    config.total_steps, config.batch.prompts, config.eval.every = 2, 4, -1
    config.rollout.group_size, config.rollout.max_prompt_length, config.rollout.max_completion_length = 1, 16, 8
    config.algorithm.advantage, config.algorithm.loss = "a2po(beta1=0.4)", "a2po(beta2=0.05)"
    config.algorithm.reference_samples = 3
    config.optimizer.learning_rate, config.logging.backends = 1e-3, ("jsonl",)
    for name, value in settings.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    return config


def even(completions, **kwargs):
    """Of some prompts all samples have it, of some none."""
    return [float(sum(map(ord, completion)) % 2 == 0) for completion in completions]


def trained(folder, config, rows=ROWS, rewards=even):
    config.output_dir = str(folder)
    return jaxrl_llm.train(config, train_dataset=rows, rewards=rewards)


def scores_in(folder):
    lines = (folder / "reference_scores.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_run(tmp_path):
    """What the first stage writes, the advantages that are made of it, and the loss of the first update."""
    result = trained(tmp_path / "run", config_of())
    rows = scores_in(tmp_path / "run")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert all(set(row["reference_scores"]) <= {0.0, 1.0} and len(row["reference_scores"]) == 3 for row in rows)
    values = optimal_values([row["reference_scores"] for row in rows], 0.4)
    values = {row["prompt"]: float(value) for row, value in zip(rows, values, strict=True)}
    table = pq.read_table(tmp_path / "run/completions/completions_00001.parquet").to_pylist()
    expected = [row["even"] - values[row["prompt"]] for row in table]
    np.testing.assert_allclose([row["advantage"] for row in table], expected, atol=1e-6)
    assert all(any(scores["reference_scores"]) for scores in rows if scores["prompt"] in {x["prompt"] for x in table})
    first, second = result.metrics
    np.testing.assert_allclose(first["loss"], np.square(expected).mean(), rtol=1e-5)
    assert first["a2po/implicit_reward"] == pytest.approx(0, abs=1e-5) != second["a2po/implicit_reward"]
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-4) and 0 < first["reward_reference"] <= 1
    assert "kl" not in first


@pytest.mark.slow
def test_the_reference_stays_while_the_policy_moves(tmp_path, monkeypatch):
    """Its log-probs are the old ones, its samples are the same in whatever batches, and the loss is the formula's."""
    notes, config = [], config_of(batch__packing="false")
    config.output_dir = str(tmp_path)
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=ROWS, rewards=even))
        stage, prompts = run.source.first_stage, run.source.producer.pipeline
        others = ScoredPrompts(prompts.examples, 4, True)
        moved = jax.tree.map(lambda x: 1.02 * x, run.state.params)
        stage(moved, notes.append)  # of the reference, whatever the policy is
        monkeypatch.setattr(reference_scores, "NOTE_SECONDS", 0.0)
        dataclasses.replace(stage, prompts=others, prompts_at_once=7)(run.state.params, notes.append)
        assert notes[3] == "first stage: 7 of 10 prompts, about 0 minutes left"
        jax.tree.map(np.testing.assert_array_equal, prompts.get_arrays(), others.get_arrays())
        stage(moved, notes.append)
        assert len(notes) == 5, "a stage that is done is done again"
        batch = run.source.next(dataclasses.replace(run.state, params=moved), jax.random.key(1)).batch
        logits = load_model("embedded:sort")(batch.inputs.tokens, batch.inputs.segments)
        objective = objective_of(config, run.model.net)
        loss, metrics = jax.jit(objective.loss)(moved, objective.prepare(batch))
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], batch.inputs.tokens[:, 1:, None], axis=-1)[..., 0]
    mask = np.asarray(batch.mask) > 0
    reference = np.pad(np.asarray(picked), ((0, 0), (1, 0)))
    np.testing.assert_allclose(np.asarray(batch.old_logps)[mask], reference[mask], atol=2e-4)
    gap = np.where(mask, np.asarray(batch.sample_logps) - reference, 0.0).sum(axis=1)  # the policy has sampled
    advantages = np.where(mask, batch.advantages, 0.0).sum(axis=1) / mask.sum(axis=1)
    np.testing.assert_allclose(loss, np.square(0.05 * gap - advantages).mean(), rtol=2e-3)
    np.testing.assert_allclose(metrics["a2po/implicit_reward"].value, 0.05 * gap.mean(), rtol=2e-2)
    assert abs(0.05 * gap.mean()) > 1e-3
    sampled = np.asarray(metrics["sampling/sampling_logp_difference/mean"].value)
    assert sampled < 1e-3, "the sampler is compared with the policy, not with the reference"


@pytest.mark.slow
def test_resumed_run_is_the_same(tmp_path):
    """Scores come from the checkpoint: nothing is sampled of the reference, and the rest is the same bit for bit."""
    whole = trained(tmp_path / "whole", config_of())
    graded = []

    def counted(completions, **kwargs):
        graded.extend(completions)
        return even(completions)

    counted.__name__ = "even"
    first = config_of()
    first.total_steps = 1
    trained(tmp_path / "cut", first)
    assert "scores" not in (tmp_path / "cut/checkpoints/1/host/metadata").read_text()  # but in arrays
    resumed = trained(tmp_path / "cut", config_of(), rewards=counted)
    assert len(graded) == 4
    assert [line["loss"] for line in resumed.metrics] == [line["loss"] for line in whole.metrics]
    own, other = (load_file(tmp_path / name / "hf/model.safetensors") for name in ("whole", "cut"))
    assert own.keys() == other.keys() and all((own[name] == other[name]).all() for name in own)


@pytest.mark.slow
def test_a_column_of_an_earlier_run(tmp_path):
    """The file of a first stage is a data set for further runs, which then begin with the first step."""
    sampled = trained(tmp_path / "first", config_of())
    rows = scores_in(tmp_path / "first")
    read = trained(tmp_path / "second", config_of(algorithm__reference_samples=0), rows)
    assert [line["loss"] for line in read.metrics] == [line["loss"] for line in sampled.metrics]
    assert not (tmp_path / "second/reference_scores.jsonl").exists()
    with pytest.raises(ConfigError, match=r"rows have a column reference_scores, but algorithm.reference_samples is 3"):
        trained(tmp_path / "third", config_of(), rows)
    with pytest.raises(ConfigError, match="reference_samples is 0, but rows have no column reference_scores"):
        trained(tmp_path / "fourth", config_of(algorithm__reference_samples=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"lora__rank": 4},
        {"rollout__staleness": 1},
        {"rollout__group_size": 2, "batch__minibatches": 2, "algorithm__num_iterations": 2},
        {"algorithm__loss": "ppo_clip"},
        {"algorithm__drop_unsolved": False, "algorithm__missing_eos_penalty": 0.5},
    ],
    ids=["adapters", "ahead", "several updates", "another loss", "shaped"],
)
def test_it_goes_with(tmp_path, settings):
    lines = trained(tmp_path / "run", config_of(**settings)).metrics
    assert len(lines) == 2 and all(np.isfinite([line["loss"], line["grad_norm"]]).all() for line in lines)
    if settings.get("algorithm__loss") != "ppo_clip" and "batch__minibatches" not in settings:
        assert lines[0]["a2po/implicit_reward"] == pytest.approx(0, abs=1e-4)
    if "algorithm__missing_eos_penalty" in settings:
        assert {score for row in scores_in(tmp_path / "run") for score in row["reference_scores"]} & {-0.5, 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["first stage", "evaluation before the first step"])
def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path, place):
    """Nothing is saved there: a run that is stopped does not sample on."""
    graded = []

    def stopped(completions, **kwargs):
        graded.extend(completions)
        os.kill(os.getpid(), signal.SIGTERM)
        return even(completions)

    config = config_of()
    config.batch.prompts, config.algorithm.reference_samples = 2, 2  # so that it takes several batches
    config.output_dir, rows = str(tmp_path), ROWS
    if place != "first stage":
        config.algorithm.reference_samples, config.eval.every, config.eval.samples = 0, 0, 2
        rows = [{**row, "reference_scores": [1.0]} for row in ROWS]
    with pytest.raises(SystemExit) as ended:
        jaxrl_llm.train(config, train_dataset=rows, eval_dataset=ROWS, rewards=stopped)
    assert ended.value.code == 143 and f"in the {place}" in ended.value.__notes__[0]
    assert len(graded) < 20


def test_what_cannot_be_written_leaves_no_file(tmp_path):
    """Rows of what JSON does not hold."""
    with jax.set_mesh(MESH):
        run = build(config_of(), MESH, Given(train_dataset=[{**row, "odd": {1}} for row in ROWS], rewards=even))
        stage = dataclasses.replace(run.source.first_stage, folder=tmp_path)
        assert "could not be written" in stage._written(np.ones((len(ROWS), 3)))
    assert not list(tmp_path.iterdir())


def test_steps_that_are_measured_take_scores_for_granted():
    with jax.set_mesh(MESH):
        run = build(config_of(), MESH, Given(train_dataset=ROWS, rewards=even))
        assert assume_scores(run.source) == 10 and assume_scores(run.source) == 0
        assert run.source.producer.pipeline.known


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"algorithm__advantage": "group", "rollout__group_size": 2},
            "reference_samples is 3, but algorithm.advantage",
        ),
        ({"data__streaming": True}, "'a2po.beta1=0.4.', for which the scores .* but data.streaming is true"),
        ({"data__curriculum_easy": 0.9}, "but data.curriculum_easy is 0.9"),
        (
            {"algorithm__beta": 0.1},
            "compares the policy with the reference that it started .* but algorithm.beta is 0.1",
        ),
        ({"teacher__path": "embedded:sort"}, "with the reference that it started .* but teacher.form is 'advantage'"),
        (
            {"teacher__path": "embedded:sort", "rewards__functions": (), "algorithm__loss": "auto"},
            "rewards.functions is empty, .* but algorithm.reference_samples is 3, which reads rewards",
        ),
        ({"algorithm__ref_sync_steps": 4}, "but algorithm.ref_sync_steps is 4: leave it out, or take another loss"),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        validate(config_of(**settings))


def test_the_loss_keeps_a_reference():
    assert not unread(config_of(algorithm__offload_reference=True), adapted=False, plays=False)
    told = config_of(algorithm__offload_reference=True, algorithm__loss="ppo_clip")
    assert unread(told, adapted=False, plays=False)
