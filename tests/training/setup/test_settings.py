"""Settings that move what a run computes, by numbers that the run logs and leaves."""

import dataclasses
import json

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from huggingface_hub import ModelCard

import jaxrl_llm
from jaxrl_llm.config import validate
from jaxrl_llm.data import tasks
from jaxrl_llm.data.curriculum import CurriculumSpec
from jaxrl_llm.distributed.sharding import make_mesh, path_name
from jaxrl_llm.models.model import load_model
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import curriculum_spec

MESH = make_mesh(devices=jax.devices()[:1])


def configured(**settings):
    config = jaxrl_llm.default_config()
    config.batch.prompts, config.rollout.group_size, config.eval.every, config.batch.packing = 2, 4, -1, "false"
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 16, 8
    config.logging.backends = ("jsonl",)
    config.update_from_flattened_dict(settings)
    validate(config)
    return config


@pytest.mark.slow
def test_what_a_run_is_told_by_numbers(tmp_path):
    """All completions score alike, so that weight decay alone moves the model, by known numbers."""
    (tmp_path / "rows").mkdir()
    for split, digit in (("train", 1), ("test", 7)):
        rows = ({"prompt": f"sort:{digit}{n}=", "answer": "?"} for n in range(4))
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "output_dir": str(tmp_path / "run"), "total_steps": 5, "data.path": str(tmp_path / "rows"),
        "data.split": "test", "checkpoint.every": 1, "checkpoint.keep": 1, "checkpoint.keep_every": 2,
        "optimizer.learning_rate": 0.1, "optimizer.weight_decay": 0.1, "optimizer.weight_decay_end": 0.4,
        "optimizer.no_decay": ("weight",), "algorithm.beta": 1e-20,  # a reference, to which the KL is measured
        "watch.kl": 1e-6, "watch.entropy": 20.0, "watch.mismatch": 1e-12,
        "export.title": "Sorted by decay", "export.tags": ("sorting", "toys"),
    }  # fmt: skip
    result = jaxrl_llm.train(configured(**settings), rewards=lambda completions, **_: [1.0] * len(completions))

    table = pq.read_table(tmp_path / "run/completions/completions_00001.parquet").column("prompt").to_pylist()
    assert table and all(prompt.startswith("sort:7") for prompt in table)
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir() if path.is_dir()} == {"2", "4", "5"}
    kept = np.prod([1 - 0.1 * (0.1 + 0.3 * update / 5) for update in range(5)])
    start = load_model("embedded:sort").params
    for (path, after), before in zip(
        jax.tree_util.tree_leaves_with_path(result.model.params), jax.tree.leaves(start), strict=True
    ):
        share = 1.0 if path_name(path).endswith("weight") else kept
        np.testing.assert_allclose(after, share * before, rtol=1e-5, atol=1e-6, err_msg=path_name(path))
    warned = [{name for name in line if name.startswith("warning/")} for line in result.metrics]
    always = {"warning/entropy_collapse", "warning/sampler_mismatch"}
    assert warned == [always, *[always | {"warning/kl_explosion"}] * 4]
    card = ModelCard.load(tmp_path / "run/hf/README.md")
    assert card.text.lstrip().startswith("# Sorted by decay\n") and card.data.tags[-2:] == ["sorting", "toys"]


@pytest.mark.slow
def test_what_is_added_to_rewards_and_moves_by_itself():
    """The score's bounds and its fall with length, a KL in the reward, the entropy bonus, and solved prompts."""
    config = configured(**{
        "algorithm.beta": 0.1, "algorithm.reward_beta": 0.5, "algorithm.reward_kl": "abs",
        "algorithm.reward_clip": (5.5, 5.8), "algorithm.overlong_buffer": 6, "algorithm.overlong_penalty": 2.0,
        "algorithm.entropy_controller": "adaptive", "algorithm.entropy_target": 9.0, "algorithm.entropy_coef": 0.1,
        "algorithm.entropy_delta": 0.05, "algorithm.entropy_coef_min": 0.06, "algorithm.entropy_coef_max": 0.12,
        "data.curriculum_easy": 0.9, "data.curriculum_hard": 0.05, "data.curriculum_revisit": 0.2,
        "data.curriculum_visits": 3, "data.curriculum_decay": 0.4, "eval.correct_at": 6.0,
    })  # fmt: skip

    def length(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=4), rewards=length))
        learner, pipeline = run.source.learner, run.source.producer.pipeline
        learner.learn({"entropy": 1.0})
        moved = dataclasses.replace(run.state, params=jax.tree.map(lambda x: 1.05 * x, run.state.params))
        experience = run.source.next(moved, jax.random.key(1))
        batch, metrics = experience.batch, jax.device_get(experience.metrics)
        logits = load_model("embedded:sort")(batch.inputs.tokens, batch.inputs.segments)

    scores = np.array([row["length"] for row in experience.table])
    width = batch.inputs.prompt_width
    lengths = np.asarray(batch.inputs.segments)[:, width:].sum(axis=1)
    shaped = np.clip(scores, 5.5, 5.8) + 2.0 * np.minimum(0.0, (8 - 6 - lengths) / 6)
    assert len(set(scores)) > 1
    assert metrics["reward_shaping"] == pytest.approx((shaped - scores).mean(), rel=1e-5)

    reference = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits))[:, :-1], np.asarray(batch.inputs.tokens)[:, 1:, None], axis=-1
    )[..., 0]
    gap = (np.asarray(batch.old_logps)[:, 1:] - reference)[np.asarray(batch.mask)[:, 1:] > 0]
    assert metrics["reward_kl"] == pytest.approx(np.abs(gap).mean(), rel=1e-3) and (gap < -1e-3).any()

    assert metrics["entropy_coef"] == pytest.approx(0.12)  # 0.1 + 0.05, bounded
    for coef in (0.07, 0.06):
        learner.learn({"entropy": 10.0})
        assert learner.controllers.entropy.coef == pytest.approx(coef)

    expected = CurriculumSpec(easy=0.9, hard=0.05, revisit=0.2, visits=3, decay=0.4)
    assert curriculum_spec(config) == expected
    assert pipeline.metrics()["prompts/success_rate"] == pytest.approx((scores >= 6).mean())
    assert 0 < (scores >= 6).mean() < 1
