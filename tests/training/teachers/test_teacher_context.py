"""A teacher that is shown more than the policy: a right answer of the prompt (SDPO) or a text of the data (SDFT)."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.algorithms.distillation import generalized_jsd, with_tail, without_tail
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.models.model import load_model
from jaxrl_llm.rewards.runner import NOTHING_LOGGED
from jaxrl_llm.training.objectives.distillation import DivergenceSpec, teacher_term
from jaxrl_llm.training.objectives.objective import token_metrics, weigh
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import context_spec
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.teachers.teacher_context import (
    ContextSpec,
    all_text,
    privileged_texts,
    successful_rows,
    with_context,
)

MESH = make_mesh(devices=jax.devices()[:1])
SUCCESS = {"teacher__context": "success", "teacher__template": "{solution}{prompt}"}
SUCCESS |= {"teacher__solution_template": "{solution},"}
PRIVILEGED = {"teacher__context": "privileged", "teacher__template": "{privileged}{prompt}"}
PRIVILEGED |= {"teacher__privileged_template": "<{privileged}>", "teacher__max_prompt_length": 40}
DIVERGENCE = {"teacher__form": "divergence", "algorithm__advantage": "zero"}


def config_of(**settings):
    config = default()
    config.batch.prompts, config.batch.packing, config.eval.every = 4, "false", -1
    config.rollout.group_size, config.rollout.max_prompt_length, config.rollout.max_completion_length = 4, 16, 8
    config.algorithm.aggregation, config.teacher.path = "sequence", "self"
    for name, value in settings.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    validate(config)
    return config


def odd(prompts, completions, **columns):
    """A success is a completion of odd length to a prompt whose first digit is small: in some groups there is none."""
    return [float(len(c) % 2 and int(p[5]) < 7) for p, c in zip(prompts, completions, strict=True)]


def first_batch(config, rewards=odd, rows=None, update=False):
    """The run, the experience of its first step, and, where it is learned from, the metrics of its update."""
    with jax.set_mesh(MESH):
        rows = tasks.generate("sort", size=16) if rows is None else rows
        run = build(config, MESH, Given(train_dataset=rows, rewards=rewards))
        experience = run.source.next(run.state, jax.random.key(1))
        updates = improve(run, run.state, experience.batch)[1] if update else None
    return run, experience, updates


def shown_log_probs(table, batch, contexts):
    """Log-probs `[N,T,V]` of the embedded model for each completion behind its context, by whole logits."""
    model, width = load_model("embedded:sort"), batch.inputs.prompt_width
    found = np.zeros((*batch.inputs.tokens.shape, model.net.config.vocab_size), np.float32)
    tokens = np.zeros((len(table), 48), np.int32)  # one shape, whatever the contexts: padding goes to the right
    segments, places = np.zeros_like(tokens), []
    for row, (line, context) in enumerate(zip(table, contexts, strict=True)):
        prompt = model.tokenizer(context + line["prompt"], add_special_tokens=False)["input_ids"]
        completion = np.asarray(batch.inputs.tokens)[row, width:][np.asarray(batch.inputs.segments)[row, width:] > 0]
        end = len(prompt) + len(completion)
        tokens[row, :end], segments[row, :end] = np.concatenate([prompt, completion]), 1
        places.append((len(prompt), end))
    log_probs = jax.nn.log_softmax(model(tokens, segments))
    for row, (start, end) in enumerate(places):
        found[row, width : width + end - start] = log_probs[row, start - 1 : end - 1]
    return found


def contexts_of(table, size=4):
    """What each row is shown by the rule: the first other success of its group."""
    found = []
    for row in range(len(table)):
        group = range(row - row % size, row - row % size + size)
        first = next((table[i]["completion"] for i in group if i != row and table[i]["odd"] >= 1), None)
        found.append(None if first is None else f"{first},")
    return found


def of_tokens(log_probs, batch):
    return np.take_along_axis(log_probs, np.asarray(batch.inputs.tokens)[..., None], axis=-1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_advantages_of_what_was_shown(packing):
    """Beside rewards: the teacher's log-probs behind another prompt, at the policy's tokens; none without success."""
    without = first_batch(config_of(teacher__path=None, batch__packing=packing))[1].batch
    _, experience, _ = first_batch(config_of(**SUCCESS, teacher__coef=0.5, batch__packing=packing))
    batch, table, metrics = experience.batch, experience.table, experience.metrics
    contexts = contexts_of(table)
    taught = np.array([context is not None for context in contexts])
    assert 0 < taught.sum() < len(taught)
    theirs = of_tokens(shown_log_probs(table, batch, [context or "" for context in contexts]), batch)
    own = of_tokens(shown_log_probs(table, batch, [""] * len(table)), batch)
    mask = np.asarray(batch.mask) > 0
    expected = np.asarray(without.advantages) - 0.5 * np.where(taught[:, None], own - theirs, 0.0)
    np.testing.assert_allclose(np.asarray(batch.advantages)[mask], expected[mask], atol=3e-4)
    rated = mask & taught[:, None]
    assert np.abs(own - theirs)[rated].mean() > 0.1, "the context says nothing: the case proves nothing"
    np.testing.assert_allclose(metrics["teacher/kl"], (own - theirs)[rated].mean(), atol=3e-4)
    np.testing.assert_allclose(metrics["teacher/taught"], taught.mean())
    assert metrics["teacher/too_long"] == 0
    shown = [
        None if context is None else context + line["prompt"] for context, line in zip(contexts, table, strict=True)
    ]
    assert [line["teacher_prompt"] for line in table] == shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "top"),
    [
        ("false", {}),
        ("true", {}),
        ("true", {"top_k": 5}),
        ("true", {"top_k": 5, "top_of": "policy", "tail": False}),
    ],
)
def test_divergence_of_what_was_shown(packing, top):
    """As all of the loss, in rows that share tokens too: each is compared with what its own context says."""
    settings = {**SUCCESS, **DIVERGENCE, "teacher__beta": 0.3, "batch__packing": packing}
    settings |= {f"teacher__{key}": value for key, value in top.items()}
    _, experience, updates = first_batch(config_of(**settings), update=True)
    batch, contexts = experience.batch, contexts_of(experience.table)
    own = shown_log_probs(experience.table, batch, [""] * len(contexts))
    theirs = shown_log_probs(experience.table, batch, [context or "" for context in contexts])
    if top:
        ids = jax.lax.top_k(own if "top_of" in top else theirs, top["top_k"])[1]
        both = (jnp.take_along_axis(jnp.asarray(x), ids, -1) for x in (own, theirs))
        own, theirs = map(with_tail if top.get("tail", True) else without_tail, both)
    taught = np.array([context is not None for context in contexts], np.float32)
    mask = np.asarray(batch.mask)
    divergence = np.asarray(generalized_jsd(own, theirs, 0.3)) * mask
    per_row = divergence.sum(axis=1) / mask.sum(axis=1)
    np.testing.assert_allclose(updates[0]["loss"].value, (per_row * taught).mean(), rtol=2e-4)
    of_taught = (divergence.sum(axis=1) * taught).sum() / (mask.sum(axis=1) * taught).sum()
    np.testing.assert_allclose(updates[0]["teacher/divergence"].value, of_taught, rtol=2e-4)
    np.testing.assert_array_equal(batch.taught, taught)
    assert updates[0]["grad_norm"].value > 0.001


@pytest.mark.slow
def test_micro_batches_change_nothing():
    settings = {**SUCCESS, **DIVERGENCE}
    whole, parts = (
        first_batch(config_of(**settings, batch__microbatch_rows=rows), update=True)[2][0] for rows in (0, 4)
    )
    for name in ("loss", "grad_norm", "teacher/divergence"):
        np.testing.assert_allclose(parts[name].value, whole[name].value, rtol=1e-4)


@pytest.mark.slow
def test_privileged_texts_of_the_data_and_prompts_that_are_too_long():
    """A text of the row's column; a blank one and one that makes the prompt too long teach nothing, and cut nothing."""
    hints = ["12", " ", None, "9" * 60]
    rows = [{**row, "hint": hint} for row, hint in zip(tasks.generate("sort", size=4), hints, strict=True)]
    settings = {**PRIVILEGED, **DIVERGENCE, "teacher__privileged_column": "hint"}
    _, experience, updates = first_batch(config_of(**settings, data__shuffle=False), rows=rows, update=True)
    batch, mask = experience.batch, np.asarray(experience.batch.mask)
    taught = np.repeat([1.0, 0.0, 0.0, 0.0], 4)
    np.testing.assert_array_equal(batch.taught, taught)
    assert (experience.metrics["teacher/taught"], experience.metrics["teacher/too_long"]) == (0.25, 0.25)
    own = shown_log_probs(experience.table, batch, [""] * 16)
    theirs = shown_log_probs(experience.table, batch, ["<12>"] * 4 + [""] * 12)
    per_row = (np.asarray(generalized_jsd(own, theirs, 1.0)) * mask).sum(axis=1) / mask.sum(axis=1)
    np.testing.assert_allclose(updates[0]["loss"].value, (per_row * taught).mean(), rtol=2e-4)


@pytest.mark.slow
def test_the_teacher_may_be_another_model_with_the_context():
    settings = {**SUCCESS, "algorithm__advantage": "zero"}
    own, other = (first_batch(config_of(**settings, teacher__path=path))[1].batch for path in ("self", "embedded:sort"))
    np.testing.assert_allclose(own.advantages, other.advantages, atol=1e-5)
    assert np.abs(np.asarray(own.advantages)).max() > 0.1


def moved(params, by):
    return jax.tree.map(lambda x: x + by, params)


@pytest.mark.parametrize(
    ("path", "moves"),
    [
        ("self(rate=0.25)", (0.0, 0.25, 0.6875)), ("self(rate=1.0, every=2)", (0.0, 0.0, 2.0)),
        pytest.param("self", (0.0, 1.0, 2.0), marks=pytest.mark.slow),
        pytest.param("self(rate=0)", (0.0, 0.0, 0.0), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_policy_as_its_teacher_follows_it(path, moves):
    """By hand: the policy moves by 1 a step, the teacher by its rate; and from what a checkpoint holds it goes on."""
    config = config_of(**SUCCESS, teacher__path=path)

    def learner_of():
        return build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=odd))

    with jax.set_mesh(MESH):
        run = learner_of()
        start, learner = jax.tree.map(jnp.copy, run.state.params), run.source.learner

        def teacher_after(learner, step):
            state = dataclasses.replace(run.state, params=moved(start, float(step)), step=jnp.int32(step))
            return learner.teacher.at(state).params

        def distance(params):
            found = {round(float(x.mean()), 4) for x in jax.tree.leaves(jax.tree.map(jnp.subtract, params, start))}
            assert len(found) == 1
            return found.pop()

        assert [distance(teacher_after(learner, step)) for step in (0, 1)] == list(moves[:2])
        arrays = jax.tree.map(np.array, learner.get_arrays())
        assert set(arrays) == ({"teacher"} if path not in ("self", "self(rate=0)") else set())
        resumed = learner_of().source.learner
        resumed.restore(learner.controllers.get_state(), jax.tree.map(jnp.asarray, arrays))
        assert [distance(teacher_after(x, 2)) for x in (learner, resumed)] == [moves[2]] * 2


@pytest.mark.slow
def test_a_run_with_adapters_and_its_moving_teacher_goes_on(root, tmp_path):
    """Three steps, or two and, after a stop, the third: the same policy; the teacher is a copy of the whole model."""

    def train(name, steps):
        config = load_config_file(f"{root / 'configs/sdpo.py'}:tiny")
        config.output_dir, config.eval.every, config.checkpoint.every = str(tmp_path / name), -1, 1
        config.logging.backends, config.total_steps, config.lora.rank = ("jsonl",), steps, 4
        config.optimizer.schedule, config.teacher.path = "constant", "self(rate=0.5)"
        return jaxrl_llm.train(config, rewards=odd).metrics

    whole = train("whole", 3)
    train("parts", 2)
    last = train("parts", 3)[-1]
    assert last["step"] == 3
    for name in ("loss", "grad_norm", "teacher/divergence", "teacher/taught"):
        assert last[name] == whole[-1][name], name


def test_successes_by_hand():
    scores = np.float32([1, 0, 2, np.nan, 0, 0.9, 0, 0, 1, 0, 0, 0])
    assert successful_rows(scores, 4, 1.0, True) == [2, 0, 0, 0, None, None, None, None, None, 8, 8, 8]
    assert successful_rows(scores, 4, 1.0, False) == [0, 0, 0, 0, None, None, None, None, 8, 8, 8, 8]
    assert successful_rows(scores, 4, 0.5, True)[4:8] == [5, None, 5, 5]


def test_what_is_shown_by_hand():
    texts = ["a", [{"role": "assistant", "content": "b"}]]
    shown = {
        "success": (("b", ""), (None, "")),
        "privileged": ((None, "p"), (None, "p")),
        "success_or_privileged": (("b", ""), (None, "p")),
        "success_and_privileged": (("b", "p"), (None, "p")),
    }
    for kind, (with_success, without) in shown.items():
        assert spec_of(kind).shown(1, texts, "p") == with_success
        assert spec_of(kind).shown(None, texts, "p") == without
        assert spec_of(kind).shown(None, texts, " ") == (None, "")


def spec_of(kind, **settings):
    return ContextSpec(kind, 1.0, True, settings.pop("remove_thinking", False), "hint", 4, **settings)


def test_prompts_with_a_context_by_hand():
    spec = spec_of("success_and_privileged")
    shown = with_context(spec, "2 + 2?", "{4}", "no")
    assert shown == (
        "2 + 2?\nCorrect solution:\n\n{4}\n\n\nThe following is feedback from your unsuccessful earlier attempt:\n\nno"
        "\n\n\n\nCorrectly solve the original question.\n"
    )
    assert with_context(spec, "2 + 2?", None, "") == "2 + 2?\n\nCorrectly solve the original question.\n"
    settings = {"template": "{prompt}|{solution}", "solution_template": "{solution}", "remove_thinking": True}
    config = config_of(teacher__context="success", **{f"teacher__{name}": value for name, value in settings.items()})
    own = context_spec(config)
    assert own is not None
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert with_context(own, messages, "<think>a\nb</think> c", "") == [
        messages[0], {"role": "user", "content": "q|c"},
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="a prompt ends with a message of role 'assistant': end prompts with"):
        with_context(own, [*messages, {"role": "assistant", "content": "so"}], "c", "")


def test_privileged_texts_by_hand():
    """What a reward function logged of a completion comes before the column of the data, and may be messages."""
    rows = SimpleNamespace(logged=NOTHING_LOGGED)
    examples = [
        {"hint": "a"},
        {"hint": None},
        {"other": 1},
        {"hint": [{"role": "user", "content": "b"}, {}]},
        {"hint": 7},
    ]
    assert privileged_texts("hint", rows, examples) == ["a", "", "", "b", "7"]
    logged = SimpleNamespace(logged=NOTHING_LOGGED._replace(columns={"hint": [None, " ", "x", "y", "z"]}))
    assert privileged_texts("hint", logged, examples) == ["", " ", "x", "y", "z"]
    with pytest.raises(ConfigError, match=r"teacher.privileged_column is 'tip', but neither.*rows have hint"):
        privileged_texts("tip", rows, examples)
    assert all_text([{"role": "assistant", "content": "one"}]) == "one"


def test_the_term_by_hand():
    """coef x divergence x the ratio with the old policy up to a bound; nothing where a row is not taught."""
    logps, old = jnp.log(jnp.float32([[0.5, 0.9], [0.5, 0.5]])), jnp.log(jnp.float32([[0.25, 0.1], [0.5, 0.5]]))
    batch = Batch(Inputs(jnp.zeros((2, 2), jnp.int32)), jnp.ones((2, 2)), old_logps=old, taught=jnp.float32([1, 0]))
    tokens = TokenStatistics(logps, logps, logps, divergence=jnp.float32([[3.0, 5.0], [7.0, 11.0]]))
    batch = weigh(batch, loss_weights(batch.mask, "token"))
    spec = DivergenceSpec(0.5, 1.0, 1.0, importance_max=4.0, top_k=0, tail=True, least=None, limit=None)
    plain = dataclasses.replace(spec, importance_max=None)
    term, metric = teacher_term(spec, tokens, batch)
    np.testing.assert_allclose(term, [[0.5 * 3 * 2, 0.5 * 5 * 4], [0, 0]], rtol=1e-6)
    assert token_metrics({"teacher/divergence": metric}, batch)["teacher/divergence"].value == 4  # of taught tokens
    nobody = weigh(batch.replace(taught=jnp.zeros(2)), loss_weights(batch.mask, "token"))
    term, metric = teacher_term(plain, tokens, nobody)
    assert not term.any()
    assert np.isnan(token_metrics({"teacher/divergence": metric}, nobody)["teacher/divergence"].value)
    np.testing.assert_allclose(teacher_term(plain, tokens, batch)[0], [[1.5, 2.5], [0, 0]])
    limited = teacher_term(dataclasses.replace(plain, limit=4.0), tokens, batch)
    np.testing.assert_allclose(limited[0], [[1.5, 2.0], [0, 0]])
    assert token_metrics({"teacher/divergence": limited[1]}, batch)["teacher/divergence"].value == 4  # without it
    slope = jax.grad(lambda x: teacher_term(spec, tokens._replace(logps=x), batch)[0].sum())(logps)
    np.testing.assert_array_equal(slope, 0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "teacher.context is none, so that the policy would learn from itself what it knows"),
        ({**SUCCESS, "teacher__path": "self(rate=2)"}, "but the policy as its own teacher is self(rate=0.05, every=1)"),
        ({**SUCCESS, "teacher__path": "self(ema=0.5)"}, "but the policy as its own teacher is self(rate=0.05"),
        (
            {**SUCCESS, "teacher__path": "self(rate=0.5)", "model__quantize": "int8", "lora__rank": 4},
            "adapters are not merged into them: set rate to 0, or to 1",
        ),
        ({**SUCCESS, "teacher__offload": True}, "teacher.offload is True, but teacher.path is 'self'"),
        ({"teacher__path": "x", "teacher__exclude_own": False}, "teacher.exclude_own is False, but teacher.context is"),
        ({**SUCCESS, "environment__name": "a.py:A"}, "but environment.name is 'a.py:A': a context is of one sampled"),
        ({**SUCCESS, "environment__tools": ("a",)}, "but environment.tools is ('a',)"),
        ({**SUCCESS, **DIVERGENCE, "algorithm__replay_groups": 2}, "but algorithm.replay_groups is 2"),
        ({**SUCCESS, "algorithm__name": "sft", "teacher__form": "divergence"}, "but algorithm.name is 'sft'"),
        ({**SUCCESS, "teacher__others": ("b=x",)}, "but teacher.others is ('b=x',)"),
        ({**SUCCESS, "rollout__staleness": 1}, "teacher.context is 'success', which needs batches that are"),
        ({**SUCCESS, "rewards__functions": ()}, "so that no completion is a success: name one"),
        ({**SUCCESS, "rollout__group_size": 1, "algorithm__advantage": "zero"}, "so that there is no other completion"),
        ({**PRIVILEGED, "teacher__max_prompt_length": None}, "privileged texts may have any length"),
        ({**SUCCESS, "teacher__privileged_column": "x"}, "which teacher.context = success does not read"),
        ({**PRIVILEGED, "teacher__success_threshold": 0.5}, "teacher.context = privileged does not read"),
        ({**SUCCESS, "teacher__template": "{prompt}"}, "but it takes a text with {prompt} and {solution}"),
        ({**SUCCESS, "teacher__solution_template": "{solution} {x}"}, "with {solution}, and other braces doubled"),
        ({**SUCCESS, **DIVERGENCE, "teacher__top_of": "policy"}, "teacher.top_of is policy, but teacher.top_k is 0"),
        ({**SUCCESS, **DIVERGENCE, "teacher__least_logp": -9.0}, "teacher.least_logp is -9.0, but teacher.top_k is 0"),
        ({**SUCCESS, "teacher__importance_max": 2.0}, "teacher.importance_max is 2.0, which is of teacher.form"),
    ],
)  # fmt: skip
def test_contradictions(settings, words):
    with pytest.raises(ConfigError) as error:
        config_of(**settings)
    assert words in str(error.value)


def test_a_limit_below_the_policys_own_prompts():
    settings = {**SUCCESS, "teacher__max_prompt_length": 5}
    with pytest.raises(ConfigError, match=r"teacher.max_prompt_length is 5, but the policy's prompts alone have up to"):
        first_batch(config_of(**settings))
