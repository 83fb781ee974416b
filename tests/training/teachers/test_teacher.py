"""A teacher of an online run: its log-probs of the sampled tokens in the advantages, beside rewards or alone."""

import dataclasses
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.distillation import generalized_jsd, with_tail
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.tools.plan.shapes import describe
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import old_logps_of
from jaxrl_llm.training.step import improve

MESH = make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a random model with the tokenizer of the embedded one, and of another size."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "qwen3"}
    small |= {"architectures": ["Qwen3ForCausalLM"]}
    model = load_model("embedded:sort", init_key=jax.random.key(5), entries=small)
    # Random models are nearly uniform; this one has opinions.
    params = jax.tree.map(lambda x: 3.0 * x, model.params)
    save_hf(dataclasses.replace(model, params=params), folder := tmp_path_factory.mktemp("teacher") / "hf")
    return str(folder)


def config_of(teacher, **settings):
    config = default()
    config.batch.prompts, config.batch.packing, config.eval.every = 4, "false", -1
    config.rollout.group_size, config.rollout.max_prompt_length, config.rollout.max_completion_length = 4, 16, 8
    config.algorithm.aggregation, config.teacher.path = "token", teacher
    for name, value in settings.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    validate(config)
    return config


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def first_batch(config, rewards=length, update=False):
    """The batch of the first step, its metrics, and, where it is learned from, those of the update."""
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=rewards))
        experience = run.source.next(run.state, jax.random.key(1))
        updates = improve(run, run.state, experience.batch)[1] if update else None
    return experience.batch, jax.device_get(experience.metrics), updates


def logps_by(path, batch, temperature=1.0):
    """Log-probs `[N,T]` of the tokens by a model's whole logits."""
    logits = load_model(path)(batch.inputs.tokens, batch.inputs.segments) / temperature
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], batch.inputs.tokens[:, 1:, None], axis=-1)[..., 0]
    return np.pad(np.asarray(logps), ((0, 0), (1, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_teacher_in_the_advantages(teacher, packing):
    """A teacher of another family and size, at the sampling temperature, beside rewards."""
    settings = {"rollout__temperature": 0.7, "batch__packing": packing}
    without, _, _ = first_batch(config_of(None, **settings))
    batch, metrics, _ = first_batch(config_of(teacher, teacher__coef=0.5, **settings))
    mask = np.asarray(batch.mask) > 0
    np.testing.assert_array_equal(without.inputs.tokens, batch.inputs.tokens)
    own, theirs = (logps_by(path, batch, 0.7) for path in ("embedded:sort", teacher))
    expected = without.advantages - 0.5 * (own - theirs)
    np.testing.assert_allclose(np.asarray(batch.advantages)[mask], expected[mask], atol=2e-4)
    assert np.abs(own - theirs)[mask].mean() > 0.5, "the teacher agrees: the case proves nothing"
    np.testing.assert_allclose(metrics["teacher/kl"], (own - theirs)[mask].mean(), atol=2e-4)
    np.testing.assert_allclose(metrics["teacher/logp"], theirs[mask].mean(), atol=2e-4)
    np.testing.assert_allclose(metrics["advantages/mean"], expected[mask].mean(), atol=2e-4)
    assert not np.asarray(batch.advantages)[~mask].any()


@pytest.mark.parametrize(
    "rewards", [None, pytest.param(length, marks=pytest.mark.slow)], ids=["no reward function", "measured"]
)
def test_teacher_alone(teacher, rewards):
    """Without rewards, or with the rule that learns nothing from them, the advantage is the teacher's term."""
    alone = {"rewards__functions": ()} if rewards is None else {"algorithm__advantage": "zero"}
    batch, metrics, updates = first_batch(config_of(teacher, rollout__group_size=4, **alone), rewards, update=True)
    mask = np.asarray(batch.mask) > 0
    expected = logps_by(teacher, batch) - logps_by("embedded:sort", batch)
    np.testing.assert_allclose(np.asarray(batch.advantages)[mask], expected[mask], atol=2e-4)
    assert updates[0]["grad_norm"].value > 0
    assert ("reward" in metrics) is (rewards is not None)
    assert "unscorable_rows" not in metrics or metrics["unscorable_rows"] == 0


def test_correct_completions_are_known_by_a_reward(teacher):
    config = config_of(teacher, rewards__functions=(), algorithm__positive_nll_coef=0.1)
    with pytest.raises(ConfigError, match=r"positive_nll_coef is 0\.1, but no reward says which completions are corr"):
        first_batch(config, None)


@pytest.mark.slow
def test_weights_by_position(teacher):
    """IW-OPD: the term weighs less the more of a row's disagreement lies before a token."""
    config = config_of(teacher, teacher__position_gamma=0.8, algorithm__loss="reinforce", rewards__functions=())
    batch, metrics, updates = first_batch(config, None, update=True)
    mask = np.asarray(batch.mask) > 0
    gap = np.where(mask, logps_by("embedded:sort", batch) - logps_by(teacher, batch), 0.0)
    before = np.cumsum(np.abs(gap), axis=1) - np.abs(gap)
    weights = 1.8 - 0.8 * before / np.abs(gap).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(batch.advantages)[mask], (-weights * gap)[mask], atol=5e-4)
    np.testing.assert_allclose(metrics["teacher/position_weight"], weights[mask].mean(), rtol=1e-4)
    assert 1.1 < weights[mask].mean() < 1.7 and updates[0]["grad_norm"].value > 0
    with pytest.raises(ConfigError, match=r"position_gamma is 0\.8, which weighs the signal of sampled tokens"):
        config_of(teacher, teacher__position_gamma=0.8, teacher__form="divergence")


@pytest.mark.slow
def test_discounted_signals(teacher):
    """MiniLLM: the term of a token is the discounted mean of those from it on."""
    batch, _, updates = first_batch(config_of(teacher, teacher__gamma=0.7, rewards__functions=()), None, update=True)
    mask = np.asarray(batch.mask) > 0
    gap = np.where(mask, logps_by(teacher, batch) - logps_by("embedded:sort", batch), 0.0)
    steps = np.arange(mask.shape[1])
    weights = np.where(steps >= steps[:, None], 0.7 ** np.maximum(steps - steps[:, None], 0), 0.0)
    expected = gap @ weights.T / np.maximum(mask @ weights.T, 1e-9)
    np.testing.assert_allclose(np.asarray(batch.advantages)[mask], expected[mask], atol=5e-4)
    assert updates[0]["grad_norm"].value > 0
    with pytest.raises(ConfigError, match=r"teacher\.gamma is 0\.7, which weighs the signal of sampled tokens"):
        config_of(teacher, teacher__gamma=0.7, teacher__form="divergence")


@pytest.mark.slow
def test_the_signal_of_the_policy_as_it_is(teacher):
    """`opd`: the old log-probs are the sampler's, and it takes the advantages of a teacher as they are."""
    config = config_of(teacher, algorithm__loss="opd", algorithm__num_iterations=2, rewards__functions=())
    batch, _, updates = first_batch(config, None, update=True)
    np.testing.assert_array_equal(batch.old_logps, batch.sample_logps)
    assert len(updates) == 2 and all(update["grad_norm"].value > 0 for update in updates)
    for key, value in {"coef": 0.5, "position_gamma": 0.5, "gamma": 0.5, "form": "divergence"}.items():
        with pytest.raises(ConfigError, match=f"signal is a teacher's log-prob .* but teacher.{key} is"):
            config_of(teacher, algorithm__loss="opd", **{f"teacher__{key}": value})
    with pytest.raises(ConfigError, match=r"but teacher\.path is None"):
        config_of(None, algorithm__loss="opd")


def test_policy_of_the_trainer_where_the_sampler_is_another(teacher):
    """With an importance correction the teacher is compared with the trainer's log-probs, not with the sampler's."""
    assert old_logps_of(config_of(teacher)) == "policy"
    assert old_logps_of(config_of(teacher, algorithm__importance_correction="token_truncate")) == "trainer"
    assert old_logps_of(config_of(None, algorithm__importance_correction="token_truncate")) == "policy"


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    folder = tmp_path / "other"
    save_hf(load_model("embedded:sort"), folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    assert '"7"' in text
    (folder / "tokenizer.json").write_text(text.replace('"7"', '"seven"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"teacher\.path = .*other.*another vocabulary: id \d+ is '7' there and 'sev"):
        first_batch(config_of(str(folder)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teacher__path": None, "teacher__coef": 0.5}, "teacher.coef is 0.5, but there is no teacher"),
        ({"teacher__path": None, "algorithm__advantage": "zero"}, "there is no teacher: set another"),
        ({"algorithm__name": "sft"}, "samples nothing that a teacher could rate"),
        (
            {"algorithm__name": "sft", "teacher__form": "divergence", "algorithm__loss": "dft"},
            "is 'dft', but with",
        ),
        ({"teacher__form": "divergence", "teacher__on_policy": 0.5}, "and algorithm.advantage is 'group': use grpo"),
        ({"teacher__others": ("b",)}, "teacher.others has 'b', but it takes VALUE=PATH"),
        ({"teacher__others": ("b=x", "c=x", "b=y")}, "teacher.others has 'b' twice"),
        ({"teacher__others": ("b=self(rate=0)",)}, "teacher.others has 'b=self(rate=0)', but the policy as its own"),
        ({"teacher__others": ("b=x",), "teacher__form": "divergence"}, "reads the distributions of one teacher"),
        ({"teacher__beta": 0.5}, "teacher.beta is 0.5, which is of teacher.form = divergence"),
        ({"rewards__functions": (), "algorithm__dynamic_sampling": True}, "algorithm.dynamic_sampling is True, which"),
        ({"rewards__functions": (), "algorithm__name": "ppo", "algorithm__advantage": "ppo"}, "name is 'ppo', which"),
        ({"rewards__functions": (), "eval__every": 0}, "cannot be graded, but eval.every is 0: set it to -1"),
    ],
)
def test_contradictions(settings, words):
    with pytest.raises(ConfigError) as error:
        config_of("embedded:sort", **settings)
    assert words in str(error.value)


@pytest.mark.slow
def test_quantised_and_offloaded_teachers():
    """A teacher in the host's memory changes nothing; one in 8 bits says nearly the same."""

    def rated(**settings):
        return first_batch(config_of("embedded:sort", algorithm__advantage="zero", **settings))[1]["teacher/logp"]

    plain = rated()
    assert rated(teacher__offload=True) == plain
    assert 0 < abs(rated(teacher__quantize="int8") - plain) < 0.05


def log_probs_by(path, batch, temperature=1.0):
    """Log-probs `[N,T,V]` of what could have been each token, by a model's whole logits; 0 for the first."""
    logits = load_model(path)(batch.inputs.tokens, batch.inputs.segments) / temperature
    return jnp.pad(jax.nn.log_softmax(logits)[:, :-1], ((0, 0), (1, 0), (0, 0)))


DIVERGENCES = {
    "beside rewards": ({}, {}),
    "packed": ({}, {"batch__packing": "true"}),
    "alone": ({"algorithm__advantage": "zero"}, {}),
    "alone, packed, its likeliest tokens": (
        {"algorithm__advantage": "zero", "teacher__top_k": 5, "teacher__least_logp": -4.0}, {"batch__packing": "true"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_in_the_loss(teacher, name):
    """By the whole logits of both models, at a temperature of its own; without rewards nothing else is in the loss."""
    learned, computed = DIVERGENCES[name]
    settings = {"teacher__form": "divergence", "teacher__beta": 0.3, "teacher__coef": 0.5, "teacher__temperature": 0.8}
    batch, metrics, updates = first_batch(config_of(teacher, **settings, **learned, **computed), update=True)
    own, theirs = (log_probs_by(path, batch, 0.8) for path in ("embedded:sort", teacher))
    if k := learned.get("teacher__top_k"):
        top, ids = jax.lax.top_k(theirs, k)
        assert jnp.take_along_axis(own, ids, -1).min() < -5
        both = (jnp.take_along_axis(own, ids, -1), top)
        own, theirs = (with_tail(jnp.maximum(x, -4.0)) for x in both)
    mask = np.asarray(batch.mask)
    expected = (np.asarray(generalized_jsd(own, theirs, 0.3)) * mask).sum() / mask.sum()
    np.testing.assert_allclose(updates[0]["teacher/divergence"].value, expected, rtol=1e-4)
    assert "teacher/kl" not in metrics
    loss = float(updates[0]["loss"].value)
    if learned:
        np.testing.assert_allclose(loss, 0.5 * expected, rtol=1e-4)
    else:
        np.testing.assert_allclose(loss, updates[0]["policy_term"].value + 0.5 * expected, rtol=1e-4)
    assert updates[0]["grad_norm"].value > 0.01


@pytest.mark.slow
def test_the_ratio_beside_a_divergence_is_at_the_temperature_of_the_rollouts(teacher):
    """The policy that sampled has a ratio of 1 with itself, whatever the temperature of the divergence."""
    settings = {"algorithm__advantage": "zero", "batch__minibatches": 2, "rollout__temperature": 0.7}
    settings |= {"teacher__form": "divergence", "teacher__temperature": 2.0, "teacher__importance_max": 2.0}
    _, _, updates = first_batch(config_of(teacher, **settings), update=True)
    loss = float(updates[0]["loss"].value)
    np.testing.assert_allclose(loss, updates[0]["teacher/divergence"].value, rtol=1e-4)
    plain = first_batch(config_of(teacher, **settings | {"teacher__importance_max": None}), update=True)[2]
    np.testing.assert_allclose(loss, plain[0]["loss"].value, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_given_rows_are_learned_from_by_the_teachers_distributions(teacher, packed):
    """sft with a teacher: offline distillation, here by the forward KL, and the same measure on held-out rows."""
    settings = {"algorithm__name": "sft", "teacher__form": "divergence", "teacher__beta": 0.0, "data__packing": packed}
    config = config_of(teacher, **settings, data__max_length=64, eval__every=0)
    rows = tasks.generate("sort_demos", size=16)
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=rows, eval_dataset=rows[:6]))
        experience = run.source.next(run.state, jax.random.key(1))
        assert run.evaluation is not None
        held_out = run.evaluation(run.state.params, jax.random.key(0))
        _, updates = improve(run, run.state, experience.batch)
    batch, mask = experience.batch, np.asarray(experience.batch.mask)
    divergence = generalized_jsd(log_probs_by("embedded:sort", batch), log_probs_by(teacher, batch), 0.0)
    expected = (np.asarray(divergence) * mask).sum() / mask.sum()
    np.testing.assert_allclose(updates[0]["loss"].value, expected, rtol=1e-4)
    np.testing.assert_allclose(updates[0]["teacher/divergence"].value, expected, rtol=1e-4)
    np.testing.assert_allclose(held_out["eval/loss"], held_out["eval/teacher/divergence"], rtol=1e-5)
    assert 0.3 * expected < held_out["eval/loss"] < 3 * expected


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_samples_and_given_rows_by_turns(packing):
    """A share of the steps, drawn from the seed, takes the data's completions; a resumed run goes on with the same."""
    settings = {"teacher__form": "divergence", "algorithm__advantage": "zero", "teacher__on_policy": 0.5}
    config = config_of("embedded:sort", **settings, batch__packing=packing, batch__prompts=2)
    rows = tasks.generate("sort_demos", size=32)
    texts = {row["prompt"] + row["completion"] for row in rows}

    def source_and_state():
        run = build(config, MESH, Given(train_dataset=rows, rewards=length))
        return run, run.source, run.state

    def given(batch):
        decode = run.model.tokenizer.decode
        shown = [
            decode(tokens[segments > 0], skip_special_tokens=True)
            for tokens, segments in zip(*map(np.asarray, (batch.inputs.tokens, batch.inputs.segments)), strict=True)
        ]
        return all(text in texts for text in shown)

    with jax.set_mesh(MESH):
        run, source, state = source_and_state()
        kinds, batches = [], []
        for step in range(6):
            if step == 3:
                saved = source.get_state()
            experience = source.next(dataclasses.replace(state, step=jnp.int32(step)), jax.random.key(step))
            kinds.append(experience.metrics["teacher/on_policy"])
            batches.append(experience.batch)
            _, updates = improve(run, jax.tree.map(jnp.copy, state), experience.batch)
            assert np.isfinite(updates[0]["loss"].value)
            assert "teacher/divergence" in updates[0]
        assert set(kinds) == {0.0, 1.0}
        assert [given(batch) for batch in batches] == [kind == 0 for kind in kinds]
        _, resumed, _ = source_and_state()
        resumed.set_state(saved, {})
        for step in range(3, 6):
            again = resumed.next(dataclasses.replace(state, step=jnp.int32(step)), jax.random.key(step))
            np.testing.assert_array_equal(again.batch.inputs.tokens, batches[step].inputs.tokens)
        config.teacher.on_policy = 1.0  # a run may go on with samples alone, and with given rows from then on
        _, samples, _ = source_and_state()
        samples.set_state(saved, {})
        assert samples.get_state()["pipeline"] == saved["pipeline"]
        resumed.set_state(samples.get_state(), {})
        assert resumed.get_state()["pipeline"] == saved["pipeline"]


@pytest.mark.parametrize(
    ("packing", "column"), [("false", "who"), pytest.param("true", "teacher", marks=pytest.mark.slow)]
)
def test_a_teacher_for_some_rows(teacher, packing, column):
    """Rows whose column names a further teacher are rated by that one, the others by teacher.path."""
    rows = [{**row, column: name} for row, name in zip(tasks.generate("sort", size=4), "abca", strict=True)]
    settings = {"algorithm__advantage": "zero", "data__shuffle": False, "batch__packing": packing}
    settings |= {} if column == "teacher" else {"teacher__column": column}
    config = config_of("embedded:sort", teacher__others=(f"b={teacher}",), **settings)
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=rows, rewards=length))
        batch = run.source.next(run.state, jax.random.key(1)).batch
    mask, of_b = np.asarray(batch.mask) > 0, np.repeat([False, True, False, False], 4)[:, None]
    expected = np.where(of_b, logps_by(teacher, batch) - logps_by("embedded:sort", batch), 0.0)
    np.testing.assert_allclose(np.asarray(batch.advantages)[mask], expected[mask], atol=2e-4)
    assert np.abs(expected[mask]).mean() > 0.1


def test_a_revision_is_of_the_first_teacher_alone(teacher, tmp_path, monkeypatch):
    """Here of a hub id in the cache of this machine; a further teacher, a folder, has none. Types are of both."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    kept, commit = tmp_path / "models--me--teacher", "0" * 40
    shutil.copytree(teacher, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "v2").write_text(commit)
    settings = {"teacher__revision": "v2", "teacher__others": (f"b={teacher}",), "teacher__dtype": "bfloat16"}
    config = config_of("me/teacher", **settings)
    with jax.set_mesh(MESH):
        learner = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=4))).source.learner
        shapes = describe(config, MESH, "float32", True)
    ours, theirs = learner.teacher, learner.other_teachers["b"]
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert shapes.teachers.keys() == {"", "b"}
    for held in (ours, theirs, *shapes.teachers.values()):
        types = {held.net.config.dtype, *(x.dtype.name for x in jax.tree.leaves(held.params))}
        assert types == {"bfloat16"}
    config.teacher.revision = "v3"
    with jax.set_mesh(MESH), pytest.raises(ConfigError, match="model path 'me/teacher', revision 'v3'"):
        build(config, MESH, Given(train_dataset=tasks.generate("sort", size=4)))
